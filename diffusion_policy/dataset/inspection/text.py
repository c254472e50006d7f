"""The facts as text for a terminal."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diffusion_policy.common.command_line import override, shell_command
from diffusion_policy.dataset.inspection.finding import Finding
from diffusion_policy.dataset.inspection.measure import Facts
from diffusion_policy.dataset.inspection.units import units
from diffusion_policy.dataset.inspection.vectors import Vector

MARKS = {"problem": "[X]", "warning": "[!]", "note": "[i]"}
WIDTH = 110
GUESSED = "Units with a question mark are guessed from names and ranges."


def overview(facts: Facts) -> list[tuple[str, str]]:
    """(name, value) lines about the recording as a whole."""
    recordings, lengths = facts.recordings, np.array(facts.recordings.lengths)
    minutes = f", {lengths.sum() / recordings.fps / 60:.1f} minutes" if recordings.fps else ""
    out = [
        ("kind", recordings.kind),
        ("episodes", f"{len(lengths):,}"),
        ("steps", f"{lengths.sum():,} ({lengths.min()} to {lengths.max()}, median {np.median(lengths):g}){minutes}"),
        ("rate", f"{recordings.fps:g} Hz" if recordings.fps else "not recorded"),
    ]
    if any(recordings.tasks):
        out.append(("tasks", "; ".join(recordings.tasks[:5]) + (" ..." if len(recordings.tasks) > 5 else "")))
    for camera, size in recordings.cameras.items():
        there = len(recordings) - len(facts.missing[camera])
        out.append(("camera", f"{camera}, {size.height} x {size.width}, in {there} of {len(recordings)} episodes"))
    return out


def feature_title(vector: Vector) -> str:
    """'action (26,) float32'."""
    return f"{vector.key}  {vector.feature.shape}  {vector.feature.dtype}"


def report(facts: Facts, findings: Sequence[Finding]) -> str:
    """The report without figures."""
    lines = [str(facts.recordings.path), *(f"  {name:10} {value}" for name, value in overview(facts))]
    guessed = False
    for vector in facts.vectors.values():
        lines += ["", f"  {feature_title(vector)}"]
        width, unit = max(map(len, vector.labels)), units(vector)
        wide = max(map(len, unit))
        guessed |= any(each.endswith("?") for each in unit)
        for number, label in enumerate(vector.labels if vector.detailed else ["all"]):
            values = (vector.low, vector.mean, vector.high, vector.std)
            low, mean, high, std = (f"{value[number]:.4g}" for value in values)
            lines.append(
                f"    {label:{width}}  {low:>10} .. {high:<10} {unit[number]:{wide}} mean {mean:>10}  std {std:>9}"
            )
    lines += ["", GUESSED] if guessed else []
    lines += ["", "Findings" if findings else "No findings."]
    for finding in findings:
        lines.append(f"{MARKS[finding.level]} {finding.title}")
        lines += textwrap.wrap(finding.advice, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def training_commands(facts: Facts) -> list[str]:
    """What to run next: with the numbers alone and, if there are images, with all cameras."""
    recordings = facts.recordings
    common = ["task=my_data", override("task.path", os.path.abspath(recordings.path)), "preset=cpu"]
    if facts.relation is not None and facts.relation.is_position_control:
        common.append("task.relative_actions=true")
    whole = len(facts.whole) == len(recordings)
    skip = ["task.skip_broken=true"] if recordings.left_out else []
    commands = [["--config-name=train_idp_mlp_lowdim", *common, *skip]]
    if recordings.cameras and facts.whole:
        skip = skip if whole else ["task.skip_broken=true"]
        names = [override("", camera)[1:] for camera in recordings.cameras]
        cameras = f"task.cameras=[{','.join(names)}]"
        commands.append(["--config-name=train_idp_unet_lowdim", *common, cameras, *skip])
    return [shell_command("python", "train.py", *command) for command in commands]


def default_page(path: Path) -> Path:
    """Where the page goes unless told."""
    return Path("data/outputs/inspection") / f"{path.resolve().name}.html"


def printable(text: str) -> str:
    """Names come from files: control characters are replaced."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
