"""Rotations: upstream's numbers, round trips, and the places where formulas break."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.rotation_transformer import RotationTransformer
from tests import golden

CONVENTIONS = ["".join(axes) for axes in itertools.product("XYZ", repeat=3) if axes[1] not in (axes[0], axes[2])]
angles = st.floats(-7, 7, allow_nan=False)


def matrix_of(axis_angle):
    return RotationTransformer("axis_angle", "matrix").forward(np.asarray(axis_angle, dtype=np.float64))


def test_upstream_s_numbers():
    expected = golden.read("rotation")
    transformer = RotationTransformer()
    np.testing.assert_allclose(transformer.forward(expected["axis_angle"]), expected["rotation_6d"], atol=1e-14)
    # The same rotations; upstream's angles go beyond pi, ours do not.
    for six, back in (("rotation_6d", "axis_angle_back"), ("noisy_6d", "axis_angle_from_noisy")):
        ours = transformer.inverse(expected[six])
        np.testing.assert_allclose(matrix_of(ours), matrix_of(expected[back]), atol=1e-12)
        assert np.linalg.norm(ours, axis=-1).max() <= np.pi + 1e-12
    np.testing.assert_allclose(
        RotationTransformer("rotation_6d", "matrix").forward(expected["noisy_6d"]),
        expected["matrix_from_noisy"],
        atol=1e-14,
    )


@settings(max_examples=60)
@given(st.tuples(angles, angles, angles), st.sampled_from(["quaternion", "rotation_6d", "matrix"]))
def test_round_trips(axis_angle, rep):
    transformer = RotationTransformer("axis_angle", rep)
    back = transformer.inverse(transformer.forward(np.array(axis_angle)))
    np.testing.assert_allclose(
        matrix_of(back), matrix_of(axis_angle), atol=1e-7
    )  # near pi the axis is known to half the digits
    matrix = matrix_of(axis_angle)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_euler_angles(convention):
    transformer = RotationTransformer("euler_angles", "matrix", from_convention=convention)
    rng = np.random.default_rng(0)
    special = np.array(list(itertools.product([0, np.pi / 2, -np.pi / 2, np.pi], repeat=3)))  # gimbal lock among them
    euler = np.concatenate([rng.uniform(-7, 7, (50, 3)), special])
    matrix = transformer.forward(euler)
    back = transformer.inverse(matrix)
    np.testing.assert_allclose(transformer.forward(back), matrix, atol=1e-7)
    by_hand = np.eye(3)
    for axis, angle in zip(convention, euler[0], strict=False):
        by_hand = by_hand @ matrix_of(np.eye(3)["XYZ".index(axis)] * angle)
    np.testing.assert_allclose(matrix[0], by_hand, atol=1e-12)


@pytest.mark.parametrize(
    "angle", [0.0, 1e-300, 1e-30, 1e-12, 1e-8, 1e-5, 9.99e-4, 1.001e-3, 0.1, np.pi - 1e-3, np.pi - 1e-9, np.pi]
)
@pytest.mark.parametrize("axis", [(1, 0, 0), (0, -1, 0), (0, 0, 1), (-3, 2, 6), (1, -1, 0)])
def test_small_angles_and_half_turns(angle, axis):
    axis = np.array(axis) / np.linalg.norm(axis)
    transformer = RotationTransformer()
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        back = transformer.inverse(transformer.forward((axis * angle).astype(dtype)))
        assert back.dtype == dtype
        error = min(
            np.abs(back - axis * angle).max(), np.abs(back + axis * angle).max() if angle > 3 else np.inf
        )  # at pi, both axes are right
        assert error <= tolerance * max(1, 100 * (angle > 3))


def test_gradients_are_finite_everywhere():
    for angle in (0.0, 1e-20, 1e-4, 1.0, 3.1):
        x = torch.tensor([angle, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
        transformer = RotationTransformer()
        transformer.inverse(transformer.forward(x)).sum().backward()
        assert torch.isfinite(x.grad).all() and x.grad[0] == pytest.approx(1, abs=1e-6)


def test_kinds_and_shapes():
    transformer = RotationTransformer("quaternion", "rotation_6d")
    assert isinstance(transformer.forward(torch.randn(2, 5, 4)), torch.Tensor) and transformer.forward(
        np.ones((7, 4), np.float32)
    ).shape == (7, 6)
    assert RotationTransformer("matrix", "axis_angle").forward(np.eye(3)[None].repeat(2, 0)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"rotation_6d has shape \(..., 6\)"):
        transformer.inverse(np.zeros(5))
    for arguments, words in (
        (("axis_angle", "axis_angle"), "nothing to transform"),
        (("rotation_9d", "matrix"), "Unknown rotation representation"),
        (("euler_angles", "matrix"), "convention"),
        (("euler_angles", "matrix", "XXY"), "convention"),
    ):
        with pytest.raises(ConfigError, match=words):
            RotationTransformer(*arguments)
