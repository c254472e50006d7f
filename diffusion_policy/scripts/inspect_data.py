"""Look at the recordings of a robot before training on them: what they hold, and what in them would harm a policy.

    python -m diffusion_policy.scripts.inspect_data PATH
        prints episodes, rate, ranges and findings, writes a page with histograms, trajectories and camera images, and
        ends with the command that trains on the data
    python -m diffusion_policy.scripts.inspect_data PATH --convert OUT.zarr [--images]
        writes a replay buffer, the format of Diffusion Policy
    python -m diffusion_policy.scripts.inspect_data PATH --to-lerobot OUT [--images]
        writes a LeRobotDataset v3, which lerobot opens: LeRobotDataset("local/name", root="OUT")

PATH is a LeRobotDataset folder (v2.0, v2.1, v3), a folder or file of ALOHA/ACT hdf5 episodes, a robomimic hdf5 file, a
replay buffer (.zarr), or a folder of npz episodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diffusion_policy.common.command_line import Parser, reporting
from diffusion_policy.dataset.conversion import to_lerobot, to_zarr
from diffusion_policy.dataset.inspection import find, measure
from diffusion_policy.dataset.inspection.page import page
from diffusion_policy.dataset.inspection.text import default_page, printable, report, training_commands
from diffusion_policy.dataset.recordings import Recordings, open_recordings
from diffusion_policy.storage.atomic import write_text


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="inspect_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("path", type=Path, help="the recordings: a folder or a file")
    out.add_argument(
        "--page", type=Path, help="where to write the page (default: data/outputs/inspection/NAME.html)", metavar="FILE"
    )
    out.add_argument("--skip-broken", action="store_true", help="leave out episodes that cannot be read, and say which")
    out.add_argument("--convert", type=Path, metavar="OUT.zarr", help="write a replay buffer instead of a report")
    out.add_argument("--to-lerobot", type=Path, metavar="OUT", help="write a LeRobotDataset v3 instead of a report")
    out.add_argument("--images", action="store_true", help="also convert the images of all cameras")
    out.add_argument("--fps", type=float, help="steps per second for --to-lerobot, if the recordings have no rate")
    return out


def convert(recordings: Recordings, arguments: argparse.Namespace) -> None:
    """Write the recordings in other formats."""
    if arguments.convert:
        to_zarr(recordings, arguments.convert, arguments.images)
        print(printable(f"{arguments.convert}: {len(recordings)} episodes, {sum(recordings.lengths)} steps."))
    if arguments.to_lerobot:
        names = to_lerobot(recordings, arguments.to_lerobot, arguments.images, arguments.fps)
        changed = "".join(f" {key} is {name}." for key, name in names.items() if key != name)
        text = f"{arguments.to_lerobot}: {len(recordings)} episodes, {sum(recordings.lengths)} steps.{changed}"
        print(printable(text))
    for reason in recordings.left_out:
        print(printable(f"left out: {reason}"))


def inspect(recordings: Recordings, file: Path | None) -> None:
    """Print the report, write the page, and say what to run next."""
    facts = measure(recordings)
    findings, commands = find(facts), training_commands(facts)
    print(printable(report(facts, findings)))
    file = file or default_page(recordings.path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page(facts, findings, commands))
    print(f"\nPage with histograms, trajectories and images: {file}\n\nTrain on it:")
    print("\n".join(f"  {command}" for command in commands))


def main() -> None:
    arguments = parser().parse_args()
    with reporting():
        recordings = open_recordings(arguments.path, arguments.skip_broken)
        if arguments.convert or arguments.to_lerobot:
            convert(recordings, arguments)
        else:
            inspect(recordings, arguments.page)


if __name__ == "__main__":
    main()
