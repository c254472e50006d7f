"""Rotations from one representation to another and back.

R is a (..., 3, 3) matrix that turns column vectors.
    axis_angle    (..., 3)  axis times angle
    quaternion    (..., 4)  real part first
    rotation_6d   (..., 6)  the first two ROWS of R; if they are not orthonormal, Gram-Schmidt makes them so
    euler_angles  (..., 3)  R = R_a(x_0) R_b(x_1) R_c(x_2) for a convention 'ABC' of axes, such as 'XYZ' or 'ZXZ'
    matrix        (..., 3, 3)
Every conversion is closed-form and differentiable, also at angle 0. At angle pi two axes describe the same rotation;
one of them is returned.
"""

from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from diffusion_policy.common.errors import ConfigError

SHAPES = {"axis_angle": (3,), "quaternion": (4,), "rotation_6d": (6,), "euler_angles": (3,), "matrix": (3, 3)}
SMALL = 1e-6  # for squares below it, the first terms of the series are exact to the last bits of a float64

Array = TypeVar("Array", np.ndarray, torch.Tensor)


class RotationTransformer:
    """Converts between two of SHAPES; only euler_angles need a convention."""

    def __init__(
        self,
        from_rep: str = "axis_angle",
        to_rep: str = "rotation_6d",
        from_convention: str | None = None,
        to_convention: str | None = None,
    ):
        for rep, convention in ((from_rep, from_convention), (to_rep, to_convention)):
            if rep not in SHAPES:
                raise ConfigError(f"Unknown rotation representation {rep!r}; use one of {', '.join(SHAPES)}.")
            if rep == "euler_angles" and not _is_convention(convention):
                raise ConfigError(
                    f"euler_angles need a convention of three axes, adjacent ones different, such as 'XYZ', "
                    f"not {convention!r}."
                )
        if from_rep == to_rep:
            raise ConfigError(f"from_rep and to_rep are both {from_rep!r}: there is nothing to transform.")
        self.source, self.target = (from_rep, from_convention or ""), (to_rep, to_convention or "")

    def forward(self, x: Array) -> Array:
        """x: numpy array or tensor of from_rep's shape -> the same type, of to_rep's shape."""
        return _convert(x, self.source, self.target)

    def inverse(self, x: Array) -> Array:
        """The inverse of `forward`."""
        return _convert(x, self.target, self.source)


def _convert(x: Array, source: tuple[str, str], target: tuple[str, str]) -> Array:
    values = torch.as_tensor(x)
    shape = SHAPES[source[0]]
    if values.shape[-len(shape) :] != shape:
        raise ValueError(f"{source[0]} has shape (..., {', '.join(map(str, shape))}), not {tuple(values.shape)}")
    result = _from_matrix(_to_matrix(values, *source), *target)
    return result.numpy() if isinstance(x, np.ndarray) else result


def _to_matrix(x: torch.Tensor, rep: str, convention: str) -> torch.Tensor:
    match rep:
        case "axis_angle":
            return quaternion_to_matrix(axis_angle_to_quaternion(x))
        case "quaternion":
            return quaternion_to_matrix(x)
        case "rotation_6d":
            return rotation_6d_to_matrix(x)
        case "euler_angles":
            first, second, third = (_about(axis, x[..., i]) for i, axis in enumerate(convention))
            return first @ second @ third
    return x


def _from_matrix(matrix: torch.Tensor, rep: str, convention: str) -> torch.Tensor:
    match rep:
        case "axis_angle":
            return quaternion_to_axis_angle(matrix_to_quaternion(matrix))
        case "quaternion":
            return matrix_to_quaternion(matrix)
        case "rotation_6d":
            return matrix[..., :2, :].flatten(-2).clone()
        case "euler_angles":
            return matrix_to_euler_angles(matrix, convention)
    return matrix


def axis_angle_to_quaternion(axis_angle: torch.Tensor) -> torch.Tensor:
    """(cos(a/2), sin(a/2)/a * axis_angle), with sin(a/2)/a = 1/2 - a^2/48 near 0."""
    square = axis_angle.square().sum(-1, keepdim=True)
    small = square < SMALL
    angle = torch.where(small, 1, square).sqrt()  # the square root has no derivative at 0
    factor = torch.where(small, 0.5 - square / 48, (angle / 2).sin() / angle)
    real = torch.where(small, 1 - square / 8 + square.square() / 384, (angle / 2).cos())
    return torch.cat([real, factor * axis_angle], dim=-1)


def quaternion_to_axis_angle(quaternion: torch.Tensor) -> torch.Tensor:
    """a / sin(a/2) times the imaginary part, with a = 2 atan2(|imaginary|, real).

    The real part is made positive first, so a is in [0, pi].
    """
    quaternion = F.normalize(torch.where(quaternion[..., :1] < 0, -quaternion, quaternion), dim=-1)
    real, imaginary = quaternion[..., :1], quaternion[..., 1:]
    square = imaginary.square().sum(-1, keepdim=True)
    small = square < SMALL
    norm = torch.where(small, 1, square).sqrt()
    series = 2 + square / 3 + 0.15 * square.square()  # of 2 asin(norm) / norm
    return torch.where(small, series, 2 * torch.atan2(norm, real) / norm) * imaginary


def quaternion_to_matrix(quaternion: torch.Tensor) -> torch.Tensor:
    """Convert a quaternion of any length but 0."""
    w, x, y, z = F.normalize(quaternion, dim=-1).unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - z * w),
        2 * (x * z + y * w),
        2 * (x * y + z * w),
        1 - 2 * (x * x + z * z),
        2 * (y * z - x * w),
        2 * (x * z - y * w),
        2 * (y * z + x * w),
        1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def matrix_to_quaternion(matrix: torch.Tensor) -> torch.Tensor:
    """Read q from q q^T, which is linear in R.

    The column with the largest diagonal entry is q times a factor of at least 1/4 in magnitude: no cancellation.
    """
    m00, m01, m02, m10, m11, m12, m20, m21, m22 = matrix.flatten(-2).unbind(-1)
    outer = torch.stack(
        [
            1 + m00 + m11 + m22,
            m21 - m12,
            m02 - m20,
            m10 - m01,
            m21 - m12,
            1 + m00 - m11 - m22,
            m01 + m10,
            m02 + m20,
            m02 - m20,
            m01 + m10,
            1 - m00 + m11 - m22,
            m12 + m21,
            m10 - m01,
            m02 + m20,
            m12 + m21,
            1 - m00 - m11 + m22,
        ],
        dim=-1,
    ).unflatten(-1, (4, 4))  # 4 q q^T
    largest = outer.diagonal(dim1=-2, dim2=-1).argmax(-1)
    column = outer.gather(-2, largest[..., None, None].expand(*largest.shape, 1, 4)).squeeze(-2)
    return F.normalize(torch.where(column[..., :1] < 0, -column, column), dim=-1)


def rotation_6d_to_matrix(rotation_6d: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt: rows b1 = a1 / |a1|, b2 = normalised part of a2 orthogonal to b1, b3 = b1 x b2."""
    first, second = rotation_6d[..., :3], rotation_6d[..., 3:]
    first = F.normalize(first, dim=-1)
    second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], dim=-2)


def matrix_to_euler_angles(matrix: torch.Tensor, convention: str) -> torch.Tensor:
    """The middle angle is in [-pi/2, pi/2] for three distinct axes, in [0, pi] for two.

    In gimbal lock only the sum (or difference) of the outer angles is determined.
    """
    i, j, k = ("XYZ".index(axis) for axis in convention)
    sign = 1 if (j - i) % 3 == 1 else -1  # of the permutation (i, j, the third axis)
    if i != k:
        middle = torch.asin((sign * matrix[..., i, k]).clamp(-1, 1))
        outer = torch.atan2(-sign * matrix[..., j, k], matrix[..., k, k])
    else:
        k = 3 - i - j
        middle = torch.acos(matrix[..., i, i].clamp(-1, 1))
        outer = torch.atan2(matrix[..., j, i], -sign * matrix[..., k, i])
    # Undoing the first two rotations leaves the last one, so gimbal lock needs no special case.
    rest = _about(convention[1], -middle) @ _about(convention[0], -outer) @ matrix
    axis = "XYZ".index(convention[2])
    a, b = (axis + 1) % 3, (axis + 2) % 3
    return torch.stack([outer, middle, torch.atan2(rest[..., b, a], rest[..., a, a])], dim=-1)


def _about(axis: str, angle: torch.Tensor) -> torch.Tensor:
    """Rotation (..., 3, 3) by `angle` (...) about a coordinate axis."""
    c, s, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rows = {
        "X": [one, zero, zero, zero, c, -s, zero, s, c],
        "Y": [c, zero, s, zero, one, zero, -s, zero, c],
        "Z": [c, -s, zero, s, c, zero, zero, zero, one],
    }[axis]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def _is_convention(convention: str | None) -> bool:
    return (
        isinstance(convention, str)
        and len(convention) == 3
        and set(convention) <= set("XYZ")
        and convention[1] not in (convention[0], convention[2])
    )
