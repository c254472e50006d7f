"""Normalisers: upstream's numbers, the round trip, and what a wrong use says."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diffusion_policy.common import normalize_util
from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.pytorch_util import (
    dict_apply,
    dict_apply_reduce,
    dict_apply_split,
    optimizer_to,
    pad_remaining_dims,
    replace_submodules,
)
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
from diffusion_policy.model.common.normalizer import LinearNormalizer, SingleFieldLinearNormalizer
from tests import golden


@pytest.fixture(scope="module")
def upstream():
    return golden.read("normalizer")


def assert_same(state_dict, expected):
    assert list(state_dict) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(state_dict[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_every_fit_mode_gives_upstreams_parameters_and_outputs(upstream):
    for name, case in upstream["cases"].items():
        mode, fit_offset, last_n_dims, output = name.split("|")
        output_max, output_min = (float(x) for x in output.removeprefix("out=(").removesuffix(")").split(","))
        normalizer = LinearNormalizer()
        normalizer.fit(
            upstream["data"],
            mode=mode,
            fit_offset=fit_offset.endswith("True"),
            last_n_dims=int(last_n_dims[-1]),
            output_max=output_max,
            output_min=output_min,
        )
        assert_same(normalizer.state_dict(), case["state_dict"])
        assert {k: p.requires_grad for k, p in normalizer.named_parameters()} == case["requires_grad"]
        rows = {key: value[: len(case["normalized"][key])] for key, value in upstream["data"].items()}
        assert_same(normalizer.normalize(rows), case["normalized"])
        assert_same(normalizer.unnormalize(case["normalized"]), case["unnormalized"])


def test_single_fields_are_upstreams(upstream):
    default = LinearNormalizer()
    default.fit(upstream["data"]["obs"])
    assert_same(default.state_dict(), upstream["default_key"]["state_dict"])
    normalized = upstream["default_key"]["normalized"]
    assert_same({"y": default(upstream["data"]["obs"][: len(normalized)])}, {"y": normalized})
    assert_same(SingleFieldLinearNormalizer.create_fit(upstream["data"]["action"]).state_dict(), upstream["single_fit"])
    assert_same(SingleFieldLinearNormalizer.create_identity().state_dict(), upstream["single_identity"])
    eps = LinearNormalizer()
    eps.fit({"x": upstream["range_eps_data"]})
    assert_same(eps.state_dict(), upstream["range_eps"])


def test_util_normalisers_are_upstreams(upstream):
    stat = normalize_util.array_to_stats(upstream["stat_input"])
    for key, value in upstream["array_to_stats"].items():
        np.testing.assert_allclose(stat[key], value, rtol=1e-5, atol=1e-6)
    dual = normalize_util.array_to_stats(upstream["stat_input_dual"])
    assert_same(normalize_util.get_image_range_normalizer().state_dict(), upstream["image_range"])
    assert_same(normalize_util.get_range_normalizer_from_stat(stat).state_dict(), upstream["range_from_stat"])
    assert_same(normalize_util.get_identity_normalizer_from_stat(stat).state_dict(), upstream["identity_from_stat"])
    assert_same(
        normalize_util.robomimic_abs_action_only_normalizer_from_stat(stat).state_dict(), upstream["abs_action_only"]
    )
    assert_same(
        normalize_util.robomimic_abs_action_only_dual_arm_normalizer_from_stat(dual).state_dict(),
        upstream["abs_action_only_dual"],
    )


def test_rotation_is_left_alone_in_absolute_actions():
    class SixD:
        def forward(self, x):
            return np.concatenate([x, x], axis=-1)

    actions = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    normalizer = normalize_util.robomimic_abs_action_normalizer_from_stat(
        normalize_util.array_to_stats(actions), SixD()
    )
    transformed = np.concatenate([actions[:, :3], SixD().forward(actions[:, 3:6]), actions[:, 6:]], axis=1)
    y = normalizer(transformed).detach()
    torch.testing.assert_close(y[:, 3:9], torch.from_numpy(transformed[:, 3:9]))
    for part in (y[:, :3], y[:, 9:]):
        torch.testing.assert_close(part.amax(0), torch.ones(part.shape[1]))
        torch.testing.assert_close(part.amin(0), -torch.ones(part.shape[1]))


def test_loading_creates_the_checkpoints_fields(upstream):
    normalizer = LinearNormalizer()
    normalizer["action"] = SingleFieldLinearNormalizer.create_fit(upstream["data"]["action"])
    normalizer["image"] = normalize_util.get_image_range_normalizer()
    assert_same(normalizer.state_dict(), upstream["mixed_setitem"])
    holder = torch.nn.Module()
    holder.normalizer = LinearNormalizer()
    state = {f"normalizer.{key}": value for key, value in normalizer.state_dict().items()}
    holder.load_state_dict(state)  # strict: no unexpected keys
    assert [k.removeprefix("normalizer.") for k in holder.state_dict()] == upstream["mixed_reload_keys"]
    assert not any(p.requires_grad for p in holder.parameters())
    state["normalizer.params_dict.action.scale"].zero_()
    assert (
        holder.normalizer.params_dict["action"]["scale"].abs().min() > 0
    )  # shares no memory with what it was loaded from
    copy.deepcopy(holder).normalizer["image"].normalize(torch.zeros(2, 3, 4, 4))


def test_a_state_dict_without_the_normaliser_does_not_empty_it():
    normalizer = LinearNormalizer()
    normalizer.fit({"a": torch.randn(5, 2)})
    assert "params_dict.a.scale" in normalizer.load_state_dict({}, strict=False).missing_keys
    assert "a" in normalizer.params_dict
    with pytest.raises(RuntimeError, match="Missing key"):
        normalizer.load_state_dict({})


# Each column is constant, or spans at least the range below which a dimension counts as constant by far.
columns = st.one_of(
    st.floats(-100, 100, width=32).map(lambda v: np.full(8, v, dtype=np.float32)),
    hnp.arrays(np.float32, 8, elements=st.floats(-100, 100, width=32)).filter(lambda a: np.ptp(a) > 1e-2),
)


@settings(max_examples=60)
@given(st.lists(columns, min_size=1, max_size=4), st.sampled_from(["limits", "gaussian"]), st.booleans())
def test_round_trip(cols, mode, fit_offset):
    data = torch.from_numpy(np.stack(cols, axis=-1))
    normalizer = LinearNormalizer()
    normalizer.fit({"x": data}, mode=mode, fit_offset=fit_offset)
    y = normalizer.normalize({"x": data})["x"]
    assert torch.isfinite(y).all()
    torch.testing.assert_close(normalizer.unnormalize({"x": y})["x"], data, rtol=1e-4, atol=2e-3)
    if mode == "limits" and fit_offset:
        assert y.abs().max() <= 1 + 1e-2  # scale is at most 200, inputs at most 100: float32 leaves about 1e-3
        constant = data.amax(0) == data.amin(0)
        torch.testing.assert_close(y[:, constant], torch.zeros_like(y[:, constant]), atol=1e-4, rtol=0)


def test_statistics():
    data = torch.randn(100, 3) * 5 + 2
    normalizer = LinearNormalizer()
    normalizer.fit({"x": data})
    assert set(normalizer.get_input_stats()["x"]) == {"max", "mean", "min", "std"}
    out = normalizer.get_output_stats()["x"]
    torch.testing.assert_close(out["std"], normalizer["x"](data).std(0))
    torch.testing.assert_close(out["max"], torch.ones(3))
    bare = SingleFieldLinearNormalizer.create_fit(data)
    torch.testing.assert_close(bare.get_input_stats()["mean"], data.mean(0))


def test_casts_to_its_own_dtype():
    normalizer = SingleFieldLinearNormalizer.create_fit(np.arange(10.0)[:, None])
    assert normalizer(np.arange(10)[:, None]).dtype == torch.float32


@pytest.mark.parametrize(
    "use, error, words",
    [
        (lambda n: n.normalize({"goal": torch.zeros(1, 2)}), ConfigError, "no field 'goal'; fitted fields: obs"),
        (lambda n: n.unnormalize(torch.zeros(1, 2)), ConfigError, "no field '_default'"),
        (lambda n: n["obs"].normalize(torch.zeros(1, 3)), ConfigError, r"\(1, 3\) does not fit a normaliser of size 2"),
        (lambda n: n.fit({"obs": torch.tensor([[float("nan")]])}), DataError, "'obs'.*NaN"),
        (lambda n: n.fit({"obs": torch.zeros(0, 2)}), DataError, "empty"),
        (lambda n: n.fit({"obs": torch.zeros(3, 2)}, mode="minmax"), ConfigError, "minmax"),
        (lambda n: n.fit({"obs": torch.zeros(3, 2)}, output_max=0, fit_offset=False), ConfigError, "output range"),
        (lambda n: SingleFieldLinearNormalizer().normalize(torch.zeros(1)), ConfigError, "never fitted"),
        (lambda n: SingleFieldLinearNormalizer.create_manual(np.ones(2), np.ones(3), {}), ConfigError, "offset"),
    ],
)
def test_wrong_use_says_what_is_wrong(use, error, words):
    normalizer = LinearNormalizer()
    normalizer.fit({"obs": torch.randn(5, 2)})
    with pytest.raises(error, match=words):
        use(normalizer)


def test_normaliser_does_not_pull_in_the_data_stack(repo_root):
    code = "import sys, diffusion_policy.model.common.normalizer; sys.exit('zarr' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=repo_root, check=True)


def test_dict_helpers():
    x = {"a": torch.ones(2), "b": {"c": torch.zeros(3)}}
    assert dict_apply(x, len) == {"a": 2, "b": {"c": 3}}
    assert dict_apply_split({"a": 3, "b": 5}, lambda v: {"half": v / 2, "twice": 2 * v}) == {
        "half": {"a": 1.5, "b": 2.5},
        "twice": {"a": 6, "b": 10},
    }
    assert dict_apply_reduce([{"a": 1}, {"a": 2}], sum) == {"a": 3}
    assert pad_remaining_dims(torch.ones(2, 3), torch.ones(2, 3, 4, 5)).shape == (2, 3, 1, 1)
    with pytest.raises(ValueError):
        pad_remaining_dims(torch.ones(3), torch.ones(2, 3))


def test_replace_submodules_keeps_aliases_one_module():
    norm = torch.nn.BatchNorm2d(4)
    root = torch.nn.Sequential(torch.nn.Sequential(norm, torch.nn.ReLU()), norm)
    result = replace_submodules(
        root, lambda m: isinstance(m, torch.nn.BatchNorm2d), lambda m: torch.nn.GroupNorm(2, m.num_features)
    )
    assert result is root and isinstance(root[1], torch.nn.GroupNorm) and root[0][0] is root[1]
    assert isinstance(replace_submodules(norm, lambda m: True, lambda m: torch.nn.Identity()), torch.nn.Identity)


def test_optimizer_to_moves_moments_and_leaves_the_step_counter():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert optimizer_to(optimizer, "meta") is optimizer
    state = optimizer.state[weight]
    assert state["exp_avg"].device.type == "meta" and state["step"].device.type == "cpu"


def test_module_attributes():
    module = ModuleAttrMixin().to(torch.float64)
    assert module.dtype == torch.float64 and module.device.type == "cpu"
    assert module.state_dict()["_dummy_variable"].shape == (0,)


def test_mip_s_rule_maps_every_range_and_constants_to_minus_one():
    data = torch.tensor([[5.0, 0.0, 1.0, -3.0], [5.0, 1e-5, 2.0, 4.0], [5.0, 5e-6, 1.5, 0.5]])
    ours, upstream = LinearNormalizer(), LinearNormalizer()
    ours.fit({"x": data}, mode="min_max")
    upstream.fit({"x": data})
    expected = torch.tensor([[-1.0, -1.0, -1.0, -1.0], [-1.0, 1.0, 1.0, 1.0], [-1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(ours["x"].normalize(data), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours["x"].unnormalize(expected), data, atol=1e-6, rtol=1e-6)
    assert ours["x"].normalize(torch.tensor([5.5, 0.0, 1.0, -3.0]))[0] == 0  # a range of 1 instead of 0
    # Upstream's leaves ranges below 1e-4 alone; larger ones are the same to the last bit.
    torch.testing.assert_close(upstream["x"].normalize(data)[:, :2], torch.tensor([[0.0, 0], [0, 1e-5], [0, 5e-6]]))
    for name in ("scale", "offset"):
        assert torch.equal(ours["x"].params_dict[name][2:], upstream["x"].params_dict[name][2:])


def test_a_field_follows_what_is_fitted_and_loaded_later():
    normalizer, other = LinearNormalizer(), LinearNormalizer()
    normalizer.fit({"a": torch.tensor([[0.0], [1.0]])})
    other.fit({"a": torch.tensor([[0.0], [4.0]])})
    x, keys = torch.tensor([[1.0]]), set(normalizer.state_dict())
    assert normalizer["a"] is normalizer["a"] and normalizer["a"].normalize(x) == 1
    normalizer.fit({"a": torch.tensor([[0.0], [2.0]])})
    assert normalizer["a"].normalize(x) == 0
    normalizer.load_state_dict(other.state_dict())
    assert normalizer["a"].normalize(x) == -0.5 and set(normalizer.state_dict()) == keys
    twin = copy.deepcopy(normalizer)
    twin["a"].params_dict["scale"].fill_(0.0)
    assert normalizer["a"].normalize(x) == -0.5 and twin["a"].normalize(x) == -1
    assert normalizer.double()["a"].normalize(x).dtype == torch.float64


def test_data_may_be_split_over_several_dimensions():
    normalizer = SingleFieldLinearNormalizer.create_fit(torch.rand(10, 2, 3), last_n_dims=2)
    x = torch.rand(4, 2, 3)
    assert torch.equal(normalizer.normalize(x), normalizer.normalize(x.flatten(1)).reshape(4, 2, 3))
    assert torch.equal(normalizer.unnormalize(x), normalizer.unnormalize(x.flatten(1)).reshape(4, 2, 3))
