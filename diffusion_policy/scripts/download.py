"""Download a public dataset.

    python -m diffusion_policy.scripts.download pusht [--output data]
    python -m diffusion_policy.scripts.download robomimic --task lift --kind ph --obs low_dim_abs

An archive is downloaded to `<output>/<name>.zip.part`, where a later call resumes. It is unpacked next to its final
place, checked, and only then moved there. A robomimic file goes to
`<output>/robomimic/datasets/<task>/<kind>/<obs>.hdf5` in the same way.
"""

import argparse
import hashlib
import http.client
import re
import shutil
import stat
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from diffusion_policy.common.errors import DataError, UserError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.pusht_source import DATA_URL, HUMAN
from diffusion_policy.storage import zarr_io
from diffusion_policy.storage.atomic import write_atomically
from diffusion_policy.storage.hdf5_reader import read_demos

TIMEOUT_SECONDS = 30
CONNECT_SECONDS = 5  # to find out whether there is a network
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A published archive and its expected content."""

    url: str
    sha256: str | None  # of the archive; None if unpublished
    zarr: str  # path of the replay buffer in the archive
    episodes: int
    steps: int
    keys: tuple[str, ...]
    content_sha256: str  # over the raw bytes of these arrays, in this order, then of episode_ends
    images: tuple[str, str] | None = None  # name of the array of images, and sha256 of its raw bytes


SOURCES = {
    "pusht": Source(
        url=DATA_URL,
        sha256=None,
        zarr=str(Path(HUMAN).relative_to("data")),
        episodes=206,
        steps=25650,
        keys=("action", "state", "keypoint"),
        content_sha256="659cf896bbeaa9ae5d3e565da48eebb4e81292d5230baf967318b605b076196c",
        images=("img", "3f7650895d1a500d7162b10475df689731f4fece2b15eaf7d913a560c2a0783d"),
    ),
}

TASKS = ("lift", "can", "square", "transport", "tool_hang")
KINDS = ("ph", "mh")
OBS = ("low_dim", "low_dim_abs", "image", "image_abs")
HUB = "https://huggingface.co/datasets"
#: sha256 of v1.5/<task>/ph/low_dim_v15.hdf5 in robomimic's own data, revision 74fa018461f479cd9fd15b924a16103012096203.
#: The publishers name no checksums of their other files; for those the one that the server names is compared.
ROBOMIMIC_PH_SHA256 = {
    "lift": "2067777cb8b532e9263dd09fd6448c41cc31224bb27be4a3b734010ae13eb540",
    "can": "3f2eb92e0a5025d0095e866ac16cc8092d6a762abe27dec90dbaff9027282962",
    "square": "45d8cabb6d57a4c03e839aa5e4b3e58fb60fe8bd20e1951fec563a2abfd14951",
    "transport": "260515618f4c8b660e54171497ecceb08c7c6463691a9ce862b158bcacd950b4",
    "tool_hang": "c5cb01b119a109a3d4842ca515906e86f1f35a8ee1a333d22b3503c1a513a8f4",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parse(argv)
    if args.dataset == "robomimic":
        url = args.url or robomimic_url(args.task, args.kind, args.obs, args.source)
        place = args.output / "robomimic/datasets" / args.task / args.kind / f"{args.obs}.hdf5"
        other_way = f"put it at {place}"
    else:
        source = SOURCES[args.dataset]
        url = args.url or source.url
        other_way = f"unpack it into {args.output}"
    try:
        if args.dataset == "robomimic":
            pinned = ROBOMIMIC_PH_SHA256[args.task] if (args.source, args.kind) == ("robomimic", "ph") else None
            install_file(url, place, args.sha256 or pinned, args.force)
        else:
            install(source, url, args.output, args.dataset, args.sha256 or source.sha256, args.force)
    except urllib.error.HTTPError as error:
        return _fail(
            f"{url} answers {error.code} {error.reason}. Is the address right? Another one can be given with --url."
        )
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        return _fail(
            f"{url} cannot be reached ({getattr(error, 'reason', error)}). Is there a network? What has arrived is "
            f"kept: the same command resumes. Or fetch the file in another way and {other_way}."
        )
    except (UserError, OSError) as error:
        return _fail(str(error))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", type=Path, default=Path("data"), help="folder for the dataset (default: data)")
    common.add_argument("--url", help="another address of the same file, such as a mirror")
    common.add_argument("--sha256", help="expected checksum; a file with another one is rejected")
    common.add_argument("--force", action="store_true", help="replace an existing dataset")
    parser = argparse.ArgumentParser(description="Download a public dataset.")
    datasets = parser.add_subparsers(
        dest="dataset", required=True, metavar=f"{{{','.join([*sorted(SOURCES), 'robomimic'])}}}"
    )
    for name in sorted(SOURCES):
        datasets.add_parser(name, parents=[common])
    robomimic = datasets.add_parser("robomimic", parents=[common])
    robomimic.add_argument("--task", required=True, choices=TASKS)
    robomimic.add_argument(
        "--kind", default="ph", choices=KINDS, help="demonstrations of one skilled person, or of six (default: ph)"
    )
    robomimic.add_argument(
        "--obs",
        default="low_dim_abs",
        choices=OBS,
        help="without or with images; abs: actions are poses, as in config/task/ (default: low_dim_abs)",
    )
    robomimic.add_argument(
        "--source",
        default="mip",
        choices=("mip", "robomimic"),
        help="publisher: mip has all files, robomimic only low_dim (default: mip)",
    )
    args = parser.parse_args(argv)
    if args.dataset == "robomimic":
        if (args.task, args.kind) == ("tool_hang", "mh"):
            robomimic.error("tool_hang has only demonstrations of kind ph")
        if args.source == "robomimic" and args.obs != "low_dim":
            robomimic.error("robomimic publishes only low_dim; use --source mip for the others")
    return args


def robomimic_url(task: str, kind: str, obs: str, source: str) -> str:
    """Address of a robomimic file at its publisher."""
    if source == "robomimic":
        return f"{HUB}/amandlek/robomimic/resolve/main/v1.5/{task}/{kind}/low_dim_v15.hdf5"
    return f"{HUB}/ChaoyiPan/mip-dataset/resolve/main/robomimic/{task}/{kind}/{obs}.hdf5"


def install_file(url: str, target: Path, sha256: str | None, force: bool) -> None:
    """Fetch and check a demonstration file; store its checksum in <target>.sha256, readable by `sha256sum -c`."""
    record = target.with_name(f"{target.name}.sha256")
    if target.exists() and not force:
        if not record.exists():
            print(f"{target} exists, {contents(target)}. Its checksum is not known; --force fetches it again.")
        elif sum_of(target) != record.read_text().split()[0]:
            raise DataError(
                f"{target} has changed since it was fetched: its checksum differs. --force fetches it again."
            )
        else:
            print(f"{target} exists and is complete, {contents(target)}; --force fetches it again.")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    published = fetch(url, part)
    try:
        actual = check_sum(part, sha256 or published)
        found = contents(part)
    except DataError:
        part.unlink()  # resuming a file with wrong content would never make it right
        raise
    if sha256 or published:
        print(f"The checksum is {'the expected one' if sha256 else 'the one published by the server'}.")
    else:
        print(f"No published checksum to compare with; this one is recorded in {record.name}.")
    part.replace(target)
    write_atomically(record, lambda file: file.write(f"{actual}  {target.name}\n".encode()))
    print(f"{target}: {found}.")


def contents(path: Path) -> str:
    """Describe a demonstration file; raise DataError if it is not one."""
    ends = read_demos(path, ["actions"]).episode_ends
    return f"{len(ends)} demonstrations, {ends[-1]} steps"


def install(source: Source, url: str, output: Path, name: str, sha256: str | None, force: bool) -> None:
    """Fetch, check and unpack `source` into `output`."""
    target = output / Path(source.zarr).parts[0]
    if target.exists() and not force:
        try:
            verify(output / source.zarr, source)
        except DataError as error:
            raise DataError(f"{error} --force fetches it again.") from error
        print(f"{target} exists and is complete; --force fetches it again.")
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


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the sha256 that Hugging Face names when it redirects to the file."""

    sha256: str | None = None

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        name = headers.get("X-Linked-Etag", "").strip('"')
        self.sha256 = name if re.fullmatch("[0-9a-f]{64}", name) else self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_reachable(url: str) -> None:
    """Raise URLError unless the server soon starts to send the file."""
    try:
        urllib.request.urlopen(url, timeout=CONNECT_SECONDS).close()
    except TimeoutError as error:  # it accepted the connection and stays silent
        raise urllib.error.URLError(error) from error


# urllib, not requests: that does not resume either, loses the last block before a cut and cannot read file:// URLs.
# huggingface_hub resumes, but neither from a mirror (--url) nor with a checksum.
def fetch(url: str, part: Path) -> str | None:
    """Download `url` to `part`, resuming an earlier attempt if the server supports it.

    Returns:
        The file's sha256 if the server names it, else None.
    """
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    redirects = _Redirects()
    try:
        response = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # no bytes after `done`: the file is complete, which the caller's checks confirm
            return redirects.sha256
        raise
    with response:
        if response.status != 206:  # the server sends the whole file again
            done = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - done > free:
            needed = f"{(total - done) / 1e9:.1f} GB"
            raise OSError(f"The download needs {needed} in {part.parent}, where {free / 1e9:.1f} GB are free.")
        with (
            open(part, "ab" if done else "wb") as file,
            tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=part.name, disable=None) as progress,
        ):
            while block := response.read(BLOCK_BYTES):
                file.write(block)
                progress.update(len(block))
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection was cut after {size} of {total} bytes")
    return redirects.sha256


def sum_of(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sum(path: Path, expected: str | None) -> str:
    """Print the file's sha256; raise DataError if it is not the expected one."""
    actual = sum_of(path)
    print(f"sha256 {actual}")
    if expected is not None and actual != expected.lower():
        raise DataError(f"The file's sha256 is {actual}, expected {expected}. It was removed; nothing was installed.")
    return actual


def unzip(archive: Path, folder: Path) -> None:
    """Unpack into `folder`; reject an archive with links or names outside it."""
    try:
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                inside = (folder / info.filename).resolve().is_relative_to(folder.resolve())
                if not inside or stat.S_ISLNK(info.external_attr >> 16):
                    raise DataError(
                        f"The archive entry {info.filename!r} is outside the folder. Nothing was installed."
                    )
            needed, free = sum(info.file_size for info in file.infolist()), shutil.disk_usage(archive.parent).free
            if needed > 10 * archive.stat().st_size + 10_000_000:  # the chunks in it are compressed already
                raise DataError(f"The archive unpacks to {needed / 1e9:.1f} GB, far more than it should have.")
            if needed > free:
                raise OSError(
                    f"Unpacking needs {needed / 1e9:.1f} GB in {archive.parent}, where {free / 1e9:.1f} GB are free."
                )
            file.extractall(folder)
    except (zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"The archive is damaged ({error}). It was removed; run the command again.") from error


def verify(path: Path, source: Source) -> None:
    """Raise DataError unless the replay buffer at `path` is the published one."""
    if not path.exists():
        raise DataError(f"{path} is missing: this is not the expected dataset.")
    buffer = ReplayBuffer.copy_from_path(path, keys=source.keys)
    if (buffer.n_episodes, buffer.n_steps) != (source.episodes, source.steps):
        raise DataError(
            f"{path} holds {buffer.n_episodes} episodes and {buffer.n_steps} steps, "
            f"expected {source.episodes} and {source.steps}."
        )
    if content_sha256(buffer, source.keys) != source.content_sha256:
        raise DataError(f"{path} has the right size, but its numbers differ from the published dataset.")
    if source.images is not None:
        name, expected = source.images
        group: Any = zarr_io.open_group(path, "r")["data"]
        print(f"comparing the checksum of the images in {path} ...")
        if name not in group or zarr_io.sha256(group[name]) != expected:
            raise DataError(f"{path}: its images (data/{name}) are not those of the published dataset.")


def content_sha256(buffer: ReplayBuffer, keys: Sequence[str]) -> str:
    """sha256 over the little-endian bytes of the named arrays and of episode_ends."""
    digest = hashlib.sha256()
    for array in (*(buffer[key] for key in keys), buffer.episode_ends):
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
