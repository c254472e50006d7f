"""Look at the recordings of a robot before training on them: what they hold, and what in them would harm a policy.

    python -m diffusion_policy.scripts.inspect_data PATH
        prints episodes, rate, ranges and findings, writes a page with histograms, trajectories and camera images, and
        ends with the command that trains on the data

PATH is a LeRobotDataset folder (v2.0, v2.1, v3), a folder or file of ALOHA/ACT hdf5 episodes, a robomimic hdf5 file, a
replay buffer (.zarr), or a folder of npz episodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diffusion_policy.common.command_line import Parser, reporting
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
    return out


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
        inspect(open_recordings(arguments.path, arguments.skip_broken), arguments.page)


if __name__ == "__main__":
    main()
