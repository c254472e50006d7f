"""Get a public dataset: `python -m diffusion_policy.scripts.download pusht [--output data]`.

The archive is fetched into `<output>/<name>.zip.part`, where a later call resumes, unpacked beside its final place, checked, and
only then moved there.
"""
import argparse
import hashlib
import http.client
import shutil
import stat
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from diffusion_policy.common.errors import DataError, UserError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.pusht_dataset import DATA_URL

TIMEOUT_SECONDS = 30
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A published archive, and what is known of its content."""
    url: str
    sha256: str | None  # of the archive; None where nobody has published it
    zarr: str  # the replay buffer's path in the archive
    episodes: int
    steps: int
    keys: tuple[str, ...]
    content_sha256: str  # over the raw bytes of these arrays, in this order, and of episode_ends


SOURCES = {
    "pusht": Source(
        url=DATA_URL, sha256=None, zarr="pusht/pusht_cchi_v7_replay.zarr", episodes=206, steps=25650,
        keys=("action", "state", "keypoint"),
        content_sha256="659cf896bbeaa9ae5d3e565da48eebb4e81292d5230baf967318b605b076196c"),
}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="Download a public dataset.")
    parser.add_argument("dataset", choices=sorted(SOURCES))
    parser.add_argument("--output", type=Path, default=Path("data"), help="folder to put it in (default: data)")
    parser.add_argument("--url", help="another address of the same archive, such as a mirror")
    parser.add_argument("--sha256", help="refuse an archive with another checksum")
    parser.add_argument("--force", action="store_true", help="replace the dataset if it is already there")
    args = parser.parse_args(argv)
    source = SOURCES[args.dataset]
    url = args.url or source.url
    try:
        install(source, url, args.output, args.dataset, args.sha256 or source.sha256, args.force)
    except urllib.error.HTTPError as error:
        return _fail(f"{url} answers {error.code} {error.reason}. Is the address right? Another one can be given with --url.")
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        return _fail(f"{url} cannot be reached ({getattr(error, 'reason', error)}). Is there a network? What has arrived is kept: "
                     f"the same command resumes. Or fetch the file in another way and unpack it into {args.output}.")
    except (UserError, OSError) as error:
        return _fail(str(error))
    return 0


def install(source: Source, url: str, output: Path, name: str, sha256: str | None, force: bool):
    """Fetch, check and unpack `source` into `output`."""
    target = output / Path(source.zarr).parts[0]
    if target.exists() and not force:
        try:
            verify(output / source.zarr, source)
        except DataError as error:
            raise DataError(f"{error} --force fetches it again.") from error
        print(f"{target} is already there and complete; --force fetches it again.")
        return
    output.mkdir(parents=True, exist_ok=True)
    part = output / f"{name}.zip.part"
    fetch(url, part)
    try:
        check_sum(part, sha256)
        with tempfile.TemporaryDirectory(dir=output, prefix=f".{name}-") as folder:
            unpacked = Path(folder) / "new"
            unzip(part, unpacked)
            verify(unpacked / source.zarr, source)
            if target.exists():
                target.rename(Path(folder) / "old")
            (unpacked / target.name).rename(target)
    except DataError:
        part.unlink()  # resuming a file with wrong content would never make it right
        raise
    part.unlink()
    print(f"{output / source.zarr}: {source.episodes} episodes, {source.steps} steps.")


def fetch(url: str, part: Path):
    """Download `url` to `part`, from where an earlier attempt ended if the server can do that."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # no bytes after `done`: it has arrived in whole, which the checks that follow confirm
            return
        raise
    with response:
        if response.status != 206:  # the server sends all of it again
            done = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with open(part, "ab" if done else "wb") as file, tqdm(
                total=total, initial=done, unit="B", unit_scale=True, desc=part.name, disable=None) as progress:
            while block := response.read(BLOCK_BYTES):
                file.write(block)
                progress.update(len(block))
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection was cut after {size} of {total} bytes")


def check_sum(path: Path, expected: str | None):
    """Print the file's sha256, and raise if it is not the expected one."""
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    print(f"sha256 {actual}")
    if expected is not None and actual != expected.lower():
        raise DataError(f"The archive's sha256 is {actual}, expected {expected}. It was removed; nothing was unpacked.")


def unzip(archive: Path, folder: Path):
    """Unpack into `folder`, refusing an archive with a name that leads out of it."""
    try:
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                inside = (folder / info.filename).resolve().is_relative_to(folder.resolve())
                if not inside or stat.S_ISLNK(info.external_attr >> 16):
                    raise DataError(f"The archive holds {info.filename!r}, which leads out of the folder. Nothing was installed.")
            needed, free = sum(info.file_size for info in file.infolist()), shutil.disk_usage(archive.parent).free
            if needed > free:
                raise OSError(f"Unpacking needs {needed / 1e9:.1f} GB in {archive.parent}, where {free / 1e9:.1f} GB are free.")
            file.extractall(folder)
    except (zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"The archive is damaged ({error}). It was removed; run the command again.") from error


def verify(path: Path, source: Source):
    """Raise unless the replay buffer at `path` is the published one."""
    if not path.exists():
        raise DataError(f"{path} is missing: this is not the expected dataset.")
    buffer = ReplayBuffer.copy_from_path(path, keys=source.keys)
    if (buffer.n_episodes, buffer.n_steps) != (source.episodes, source.steps):
        raise DataError(f"{path} holds {buffer.n_episodes} episodes and {buffer.n_steps} steps, "
                        f"expected {source.episodes} and {source.steps}.")
    if content_sha256(buffer, source.keys) != source.content_sha256:
        raise DataError(f"{path} has the right size but other numbers than the published dataset.")


def content_sha256(buffer: ReplayBuffer, keys) -> str:
    """Over the little-endian bytes of the named arrays and of episode_ends."""
    digest = hashlib.sha256()
    for array in (*(buffer[key] for key in keys), buffer.episode_ends):
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
