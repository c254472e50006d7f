"""The facts as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.inspection import drawing
from diffusion_policy.dataset.inspection.finding import Finding
from diffusion_policy.dataset.inspection.findings import IDLE_LIMIT
from diffusion_policy.dataset.inspection.measure import Facts
from diffusion_policy.dataset.inspection.text import GUESSED, feature_title, overview
from diffusion_policy.dataset.inspection.units import units
from diffusion_policy.dataset.inspection.vectors import BINS, Vector

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1020px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em; margin-bottom: .2em } h2 { font-size: 1.15em; margin: 1.8em 0 .5em }
code, pre { font: 12px/1.5 ui-monospace, monospace; background: #f4f4f4; padding: .1em .3em; overflow-x: auto }
pre { padding: .7em; white-space: pre-wrap }
table { border-collapse: collapse } td, th { padding: .15em .7em .15em 0; text-align: left }
th { font-weight: 600; color: #666; font-size: .9em; white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums }
th.wide { white-space: normal } tr.row td { border-top: 1px solid #eee } svg { display: block; background: #fafafa }
.finding { border-left: 4px solid; padding: .3em .8em; margin: .5em 0 } .finding p { margin: 0; color: #555 }
.problem { border-color: #c33; background: #fdf3f3 } .warning { border-color: #e08214; background: #fef8f0 }
.note { border-color: #2a78b5; background: #f3f8fc } .mark { color: #a60; font-size: .85em; white-space: nowrap }
.frames img { margin: 0 4px 4px 0; height: 110px } .path, .small { color: #777; font-size: .9em }
"""
FRAMES = 6


def page(facts: Facts, findings: Sequence[Finding], commands: Sequence[str]) -> str:
    """The page, a single HTML file without scripts."""
    name = escape(facts.recordings.path.resolve().name)
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in overview(facts))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head><body>
<h1>{name}</h1><div class="path">{escape(str(facts.recordings.path.resolve()))}</div>
<table>{rows}</table>
<h2>Findings</h2>{"".join(map(_finding, findings)) or "<p>None.</p>"}
{"".join(_cameras(facts))}
{_episodes(facts)}
{"".join(_feature(facts, vector) for vector in facts.vectors.values())}
<h2>Train on it</h2><pre>{escape(chr(10).join(commands))}</pre>
</body></html>
"""


def _finding(finding: Finding) -> str:
    return f'<div class="finding {finding.level}"><b>{escape(finding.title)}</b><p>{escape(finding.advice)}</p></div>'


def _episodes(facts: Facts) -> str:
    lengths = np.array(facts.recordings.lengths)
    return f"""<h2>Episodes</h2><table><tr><th>length, {lengths.min()} to {lengths.max()} steps</th></tr>
<tr><td>{drawing.bars(np.histogram(lengths, min(60, max(BINS, len(lengths) // 3)))[0], 900, 60)}</td></tr>
<tr><th>share of idle steps per episode; the line is at {IDLE_LIMIT:.0%}</th></tr>
<tr><td>{drawing.columns(facts.idle, IDLE_LIMIT)}</td></tr></table>"""


def _feature(facts: Facts, vector: Vector) -> str:
    head = "<tr><th></th><th></th><th>min</th><th>mean</th><th>max</th><th>unit</th><th>std</th>"
    if not vector.detailed:
        values = f"{vector.low[0]:.4g} to {vector.high[0]:.4g}"
        return f"<h2>{escape(feature_title(vector))}</h2><p>{values}</p>"
    names = [facts.recordings.short_name(index) for index in facts.drawn]
    colours = ", ".join(
        f'<span style="color:{colour}">{escape(name)}</span>' for colour, name in zip(drawing.COLOURS, names)
    )
    unit = units(vector)
    rows = "".join(_dimension(facts, vector, number, unit[number]) for number in range(vector.size))
    note = f'<p class="small">{GUESSED}</p>' if any(each.endswith("?") for each in unit) else ""
    head += f"<th>values</th><th class=wide>over time: {colours}</th><th></th></tr>"
    return f"<h2>{escape(feature_title(vector))}</h2><table>{head}{rows}</table>{note}"


def _dimension(facts: Facts, vector: Vector, number: int, unit: str) -> str:
    low, mean, high, std = (
        f'<td class="n">{value[number]:.4g}</td>' for value in (vector.low, vector.mean, vector.high, vector.std)
    )
    series = [values[vector.key][:, number] for values in facts.drawn.values()]
    label = escape(vector.labels[number]) if vector.feature.names else ""
    return (
        f'<tr class="row"><td class="small">{number}</td><td>{label}</td>{low}{mean}{high}'
        f'<td class="small">{unit}</td>{std}'
        f"<td>{drawing.bars(vector.histogram[number])}</td>"
        f"<td>{drawing.lines(series, vector.low[number], vector.high[number])}</td>"
        f'<td class="mark">{escape(_marks(vector, number))}</td></tr>'
    )


def _marks(vector: Vector, number: int) -> str:
    if vector.constant[number]:
        return "constant"
    if vector.binary[number]:
        return "two values"
    share = max(vector.at_low[number], vector.at_high[number])
    return f"{share:.0%} at its limit" if share > 0.05 else ""


def _cameras(facts: Facts) -> Iterator[str]:
    """Frames of every camera: one short episode from its start to its end, and the starts of others."""
    recordings = facts.recordings
    for camera in recordings.cameras:
        there = [index for index in range(len(recordings)) if index not in set(facts.missing[camera])]
        if not there:
            continue
        shortest = min(there, key=lambda index: recordings.lengths[index])
        wanted = set(np.linspace(0, recordings.lengths[shortest] - 1, FRAMES).astype(int).tolist())
        others = [there[int(place)] for place in np.linspace(0, len(there) - 1, min(FRAMES, len(there)))]
        yield f"<h2>{escape(camera)}</h2>"
        try:
            strip = [frame for step, frame in enumerate(recordings.frames(shortest, camera)) if step in wanted]
            starts = [frame for index in others for frame in recordings.frames(index, camera, count=1)]
        except DataError as error:
            yield f"<p>{escape(str(error))}</p>"
            continue
        for title, frames in ((recordings.episode_names[shortest], strip), ("starts of other episodes", starts)):
            images = "".join(f'<img alt="" src="{drawing.photograph(frame)}">' for frame in frames)
            yield f'<div class="small">{escape(title)}</div><div class="frames">{images}</div>'
