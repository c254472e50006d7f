"""Source of PushT's demonstrations: the human ones if they are available, else the rollouts in the repository."""

import contextlib
import http.client
import logging
import os
import pathlib
import urllib.error
from collections.abc import Iterator

from diffusion_policy.common.config_util import project_path
from diffusion_policy.common.errors import DataError, DataNotFoundError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

DATA_URL = "https://diffusion-policy.cs.columbia.edu/data/training/pusht.zip"
#: Value of zarr_path that selects the demonstrations as `find_pusht` describes.
AUTO = "auto"
#: The human demonstrations, where upstream expects them and `download pusht` puts them.
HUMAN = "data/pusht/pusht_cchi_v7_replay.zarr"
#: Rollouts of trained policies, part of the repository.
SHIPPED = "data/demos/pusht_policy_rollouts.zarr"
DOWNLOAD = "python -m diffusion_policy.scripts.download pusht"


def find_pusht(zarr_path: str | os.PathLike) -> tuple[str, str | None]:
    """Return the path of the demonstrations and, if they are not the ones that were asked for, a warning.

    'auto' asks for the human demonstrations: those at their default path, else they are downloaded. Without a network
    the result is the rollouts in the repository, and the warning goes to the log, too.
    """
    if zarr_path == AUTO:
        return _human_or_shipped()
    path = os.path.expanduser(zarr_path)
    if not os.path.exists(path):
        raise DataNotFoundError(
            f"There is no PushT dataset at {path} (from {os.getcwd()}). Get the public one, {DATA_URL}, with: "
            f"{DOWNLOAD}"
        )
    return path, None


def _human_or_shipped() -> tuple[str, str | None]:
    if not os.path.exists(project_path(HUMAN)):
        reason = _download(pathlib.Path(project_path("data")))
        if reason is not None:
            return _shipped(reason)
    return project_path(HUMAN), None


def _shipped(reason: str) -> tuple[str, str]:
    path = project_path(SHIPPED)
    if not os.path.exists(path):
        raise DataNotFoundError(
            f"PushT's human demonstrations are not at {HUMAN} (from {os.getcwd()}), and {DATA_URL} cannot be reached "
            f"({reason}). Get them with: {DOWNLOAD}"
        )
    warning = (
        f"trained on policy rollouts ({os.path.basename(path)}), not on PushT's human demonstrations: SCORES DO NOT "
        f"COMPARE WITH PAPERS. The human demonstrations are not at {HUMAN}, and {DATA_URL} cannot be reached "
        f"({reason}). Get them with: {DOWNLOAD}"
    )
    log.warning(warning)
    return path, warning


def _download(folder: pathlib.Path) -> str | None:
    """Install the human demonstrations below `folder`; return the reason if their server cannot be reached."""
    from diffusion_policy.scripts import download  # here, because that module imports this one

    source = download.SOURCES["pusht"]
    try:
        download.check_reachable(source.url)
    except urllib.error.URLError as error:
        return str(error.reason)
    log.info("downloading PushT's human demonstrations from %s to %s", source.url, folder)
    try:
        with _one_at_a_time(folder):  # the second of two runs finds them complete
            download.install(source, source.url, folder, "pusht", source.sha256, force=False)
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise DataError(
            f"The download of {source.url} stopped ({getattr(error, 'reason', error)}). What has arrived is kept: the "
            "same command resumes."
        ) from error
    return None


@contextlib.contextmanager
def _one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
    """Wait until no other process downloads into `folder`: runs with several seeds often start at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".pusht.lock", "a") as file:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX)  # released by the system however the process ends
        yield
