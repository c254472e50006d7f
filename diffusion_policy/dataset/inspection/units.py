"""Units of dimensions. No format of recordings has them: they are read or guessed from names, and from ranges."""

from __future__ import annotations

import re

import numpy as np

from diffusion_policy.dataset.inspection.vectors import Vector

#: A unit at the end of a name: elbow_deg, x [mm].
STATED = re.compile(r"(?:[_./ ]|\[|\()(rad/s|deg/s|m/s|rad|deg|mm|cm|Nm|N|m)[\])]?$")
RATES = re.compile(r"vel|speed|torque|effort|force|current|delta", re.IGNORECASE)
GRIPPERS = re.compile(r"hand|grip|finger|thumb|pinky|claw", re.IGNORECASE)
ANGLES = re.compile(
    r"joint|qpos|shoulder|elbow|wrist|forearm|waist|neck|hip|knee|ankle|angle|yaw|pitch|roll", re.IGNORECASE
)
LENGTHS = re.compile(r"(?:^|[_./ ])(?:x|y|z)$", re.IGNORECASE)


def units(vector: Vector) -> list[str]:
    """The unit of each dimension; '' if nothing tells, a question mark after a guess."""
    if not vector.detailed:
        return [""]
    out = []
    for number in range(vector.size):
        name = vector.labels[number] if vector.feature.names else vector.key
        out.append(unit(name, float(vector.low[number]), float(vector.high[number])))
    for start in vector.quaternions:
        out[start : start + 4] = ["quat"] * 4
    return out


def unit(name: str, low: float, high: float) -> str:
    """The unit of a dimension of that name and range."""
    most = max(abs(low), abs(high))
    if stated := STATED.search(name):
        return stated[1]
    if RATES.search(name):
        return ""
    if GRIPPERS.search(name) and low >= -0.01:
        return "0..1?" if most <= 1.01 else "%?" if 2 * np.pi < most <= 101 else ""
    if ANGLES.search(name):
        return "rad?" if most <= 2.1 * np.pi else "deg?" if most <= 400 else ""
    if LENGTHS.search(name):
        return "m?" if most <= 3 else "mm?" if most >= 30 else ""
    return ""
