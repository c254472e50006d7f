"""Exported graphs: what PyTorch computes, for every policy and network, and nothing of the reader's machine."""

import json

import onnx
import pytest
import torch
from omegaconf import OmegaConf

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.representation import Field, Representation
from diffusion_policy.export import graph, parity, writers
from diffusion_policy.export.bundle import onnx_of, use_ddim
from diffusion_policy.export.signature import from_json, signature_of
from diffusion_policy.model.common.normalizer import LinearNormalizer, SingleFieldLinearNormalizer
from diffusion_policy.policy.onnx_policy import onnx_policy
from diffusion_policy.policy.represented import build_policy
from diffusion_policy.storage import onnx_io
from tests.util import load_config

# One of each kind of sampler; straight flow and regression, TSD and MIP, both consistency models act alike.
OBJECTIVES = (
    "regression", "naive_drifting", "mip", "flow", "mean_flow", "flow_policy", "consistency_training",
    "one_step_diffusion", "ofp", "idp_multimodal",
)  # fmt: skip
IMAGES = ("task.image_shape=[3,24,24]", "task.crop_shape=[20,20]")


def make(name: str, *overrides: str, stats: float = 5.0):
    """An untrained policy of a config at the debug preset's size, with a normaliser."""
    import hydra

    torch.manual_seed(0)
    policy = hydra.utils.instantiate(load_config(name, "preset=debug", *overrides).policy)
    normalizer = LinearNormalizer()
    shapes = policy.obs_shapes() | {"action": (policy.action_dim,)}
    normalizer.fit(
        {key: stats * torch.randn(50, *shape) for key, shape in shapes.items() if key not in policy.rgb_keys}
    )
    for key in policy.rgb_keys:
        normalizer[key] = SingleFieldLinearNormalizer.create_identity()
    policy.set_normalizer(normalizer)
    for parameter in policy.parameters():  # networks start as constants; let the outputs depend on everything
        if parameter.requires_grad and parameter.ndim:
            torch.nn.init.normal_(parameter, std=0.2)
    policy.set_normalizer(normalizer)
    return policy.eval()


def largest_error(policy, exported, batch: int) -> float:
    signature = graph.describe(policy)
    obs = {field.name: field.example(batch) for field in signature.inputs if field.kind != "noise"}
    return parity.difference(policy, exported, obs, signature)


def check(policy) -> None:
    exported = onnx_of(policy)
    for batch in (1, 3):
        assert largest_error(policy, exported, batch) < 1e-5
    assert (exported.n_obs_steps, exported.nfe) == (policy.n_obs_steps, policy.nfe)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_sampler_is_one_graph(objective):
    check(make(f"train_{objective}_mlp_lowdim"))


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("train_idp_transformer_lowdim", ()),
        ("train_idp_unet_lowdim", ()),
        ("train_idp_mlp_lowdim", ("state_features=features", "policy.nfe=2")),
        ("train_idp_mlp_image", IMAGES),
        ("train_idp_unet_pointcloud", ()),
        ("train_diffusion_mlp_lowdim", ("num_inference_steps=3",)),
        ("train", ("objective=edm_teacher", "backbone=mlp", "policy.nfe=3")),
    ],
)
def test_every_backbone_and_modality_is_one_graph(name, overrides):
    check(make(name, *overrides))


@pytest.mark.parametrize(
    "name, calls",
    [
        ("train_idp_mlp_lowdim", ()),
        ("train_diffusion_transformer_lowdim_workspace", ("policy.num_inference_steps=2",)),  # it has no `act`
    ],
)
def test_relative_actions_are_in_the_graph(name, calls):
    cfg = load_config(name, "preset=debug", *calls)
    size = cfg.policy.action_dim
    fields = {"obs": {"obs": Field(cfg.policy.obs_dim)}, "action": Field(size)}
    absolute = make(name, *calls)
    OmegaConf.set_struct(cfg, False)
    cfg.task.representation = Representation(**fields, relative=("obs", 1, 1 + size)).to_config()
    policy = build_policy(cfg)
    policy.load_state_dict(absolute.state_dict())
    policy.eval()
    signature = graph.describe(policy)
    stats = policy.normalizer["obs"].get_input_stats()["max"][1 : 1 + size]
    expected = policy.normalizer["action"].get_input_stats()["max"] + stats
    assert signature.action.high == pytest.approx(expected.tolist())
    check(policy)
    obs = {"obs": torch.randn(2, policy.n_obs_steps, policy.obs_dim)}
    exported = onnx_of(policy)
    results = []
    for each in (absolute, exported):
        torch.manual_seed(0)
        results.append(each.predict_action(obs)["action"])
    now = obs["obs"][:, policy.n_obs_steps - 1 :, 1 : 1 + size]
    torch.testing.assert_close(results[0] + now, results[1], rtol=0, atol=1e-3)


def test_ddim_is_unrolled():
    policy = make("train_diffusion_mlp_lowdim")
    use_ddim(policy, 10)
    signature = graph.describe(policy)
    assert signature.nfe == 10 and signature.inputs[-1].shape == (1, policy.horizon, policy.action_dim)
    check(policy)


def test_upstream_policies_are_one_graph():
    policy = make("train_diffusion_transformer_lowdim_workspace", "policy.num_inference_steps=2")
    check(policy)


def test_images_are_bytes_and_noise_is_an_input():
    policy = make("train_naive_drifting_mlp_image", *IMAGES)
    fields = {field.name: (field.shape, field.dtype) for field in graph.describe(policy).inputs}
    assert fields["image"] == ((2, 3, 24, 24), torch.uint8) and fields["agent_pos"] == ((2, 2), torch.float32)
    assert fields["noise"][0] == (1, policy.horizon, 2)
    exported = onnx_of(policy)
    image = torch.randint(0, 256, (1, 2, 3, 24, 24), dtype=torch.uint8)
    results = []
    for value in (image, image / 255):
        torch.manual_seed(3)
        results.append(exported.predict_action({"image": value, "agent_pos": torch.zeros(1, 2, 2)})["action"])
    assert torch.equal(*results)


def test_the_file_says_what_it_takes_and_holds_nothing_of_this_machine(tmp_path):
    policy = make("train_idp_mlp_lowdim")
    signature = graph.describe(policy, rate_hz=10.0)
    model = writers.to_onnx(graph.capture(policy, signature), signature)
    data = onnx_io.pack(model, {"signature": signature.described()})
    assert b"/diffusion_policy/" not in data and b".py" not in data
    (entry,) = onnx.load_model_from_string(data).metadata_props
    about = json.loads(entry.value)
    assert from_json(about["signature"], "it") == signature
    obs, action = about["signature"]["inputs"][0], about["signature"]["outputs"][0]
    assert (obs["name"], obs["shape"], obs["dtype"], len(obs["low"])) == ("obs", [2, 5], "float32", 5)
    assert (action["name"], action["shape"]) == ("action", [8, 2])
    assert action["units"] and about["signature"]["rate_hz"] == 10.0
    unpacked = onnx_policy(onnx_io.unpack(data, "it")["onnx"])
    assert largest_error(policy, unpacked, 2) < 1e-5


def test_torchscript_takes_any_batch():
    policy = make("train_naive_drifting_transformer_lowdim")
    signature = graph.describe(policy)
    data = writers.to_torchscript(graph.capture(policy, signature), signature, {"a": 1})
    exported = writers.torchscript_policy(data, signature)
    for batch in (1, 5):
        assert largest_error(policy, exported, batch) < 1e-5
    files = {writers.METADATA: ""}
    torch.jit.load(__import__("io").BytesIO(data), _extra_files=files)
    assert json.loads(files[writers.METADATA]) == {"a": 1}


def test_what_is_not_a_function_of_its_inputs_is_refused():
    hybrid = make("train_diffusion_unet_hybrid_workspace", *IMAGES, "policy.crop_shape=[20,20]",
                  "policy.eval_fixed_crop=false")  # fmt: skip
    with pytest.raises(ConfigError, match="eval_fixed_crop"):
        graph.describe(hybrid)
    warm = make("train_ofp_mlp_lowdim")
    warm.warm_start = 0.5
    with pytest.raises(ConfigError, match="warm_start"):
        graph.describe(warm)
    with pytest.raises(ConfigError, match="obs_shapes"):
        signature_of(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="diffusion policies"):
        use_ddim(warm, 10)


@pytest.fixture(scope="module")
def exported():
    return onnx_of(make("train_idp_mlp_lowdim"))


@pytest.mark.parametrize(
    "obs, message",
    [
        ([], "a dictionary"),
        ({}, "no entry 'obs'"),
        ({"obs": torch.zeros(1, 2, 4)}, "at least 2 steps, 5"),
        ({"obs": torch.zeros(1, 1, 5)}, "at least 2 steps, 5"),
        ({"obs": torch.zeros(0, 2, 5)}, "at least 2 steps, 5"),
        ({"obs": torch.full((1, 2, 5), torch.nan)}, "finite"),
        ({"obs": torch.zeros(1, 2, 5, dtype=torch.bool)}, "real numbers"),
    ],
)
def test_an_exported_policy_checks_its_observations(exported, obs, message):
    with pytest.raises(ConfigError, match=message):
        exported.predict_action(obs)


def test_an_exported_policy_keeps_its_number_of_calls(exported):
    exported.nfe = 1
    with pytest.raises(ValueError, match="--nfe"):
        exported.nfe = 2


def test_an_exported_policy_never_returns_actions_that_are_not_finite(exported, monkeypatch):
    nan = torch.full((1, 16, 2), torch.nan).numpy()
    monkeypatch.setattr(exported, "_call", lambda feeds: [nan[:, :8], nan])
    with pytest.raises(ConfigError, match="not finite"):
        exported.predict_action({"obs": torch.zeros(1, 2, 5)})
