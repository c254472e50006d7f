"""The two diffusion backbones: upstream's numbers, and what must hold by construction."""

import pytest
import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.diffusion.mask_generator import DummyMaskGenerator, LowdimMaskGenerator
from diffusion_policy.model.diffusion.positional_embedding import SinusoidalPosEmb
from diffusion_policy.model.diffusion.transformer_for_diffusion import (
    LayerStack,
    TransformerForDiffusion,
    TransformerLayer,
)
from tests import golden

CLASSES = {"TransformerForDiffusion": TransformerForDiffusion, "ConditionalUnet1D": ConditionalUnet1D}
CASES = ["tf_cond_causal_mlp", "tf_cond_noncausal", "tf_bert_causal", "unet_global_film", "unet_local", "unet_3level"]


@pytest.fixture(scope="module")
def cases():
    return golden.read("model_forward")["cases"]


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_match(cases, name):
    case = cases[name]
    model = CLASSES[case["class"]](**case["kwargs"]).eval()
    weights = golden.drawn_weights(case)
    assert list(model.state_dict()) == list(weights)
    model.load_state_dict(weights)
    cond = {key: case[key] for key in ("cond", "local_cond", "global_cond") if case.get(key) is not None}
    steps = {"out_batch_t": case["timestep_batch"], "out_int_t7": 7, "out_scalar_t42": torch.tensor(42)}
    for key, step in steps.items():
        torch.testing.assert_close(model(case["sample"], step, **cond), case[key], rtol=1e-5, atol=1e-5)
    if case.get("out_short_T") is not None:
        n_step = case["out_short_T"].shape[1]
        short = model(case["sample"][:, :n_step], case["timestep_batch"], **cond)
        torch.testing.assert_close(short, case["out_short_T"], rtol=1e-5, atol=1e-5)

    model(case["sample"], case["timestep_batch"], **cond).square().mean().backward()
    without_grad = {key for key, p in model.named_parameters() if p.grad is None}
    assert without_grad == set(case["params_without_grad"])
    norms = {key: p.grad.norm().item() for key, p in model.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(case["grad_norms"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", CASES[:3])
def test_transformer_attributes_and_optimizer_groups(cases, name):
    case = cases[name]
    model = TransformerForDiffusion(**case["kwargs"])
    assert {key: getattr(model, key) for key in case["attrs"]} == case["attrs"]
    names = {parameter: key for key, parameter in model.named_parameters()}
    groups = [
        {"weight_decay": group["weight_decay"], "params": [names[p] for p in group["params"]]}
        for group in model.get_optim_groups(1e-3)
    ]
    assert groups == case["optim_groups"]


def test_full_size_layouts():
    for name, layout in golden.read("state_dict_layouts_lowdim").items():
        config = dict(layout["resolved_policy_cfg"]["model"])
        model_class = CLASSES[config.pop("_target_").rsplit(".", 1)[1]]
        with torch.device("meta"):
            model = model_class(**config)
        expected = list(layout["model_state_dict"].items())
        assert [(key, list(value.shape)) for key, value in model.state_dict().items()] == expected, name
        assert sum(p.numel() for p in model.parameters()) == layout["n_params_model"], name


@pytest.mark.parametrize("cross_attention", [False, True])
def test_layers_are_torch_layers(cross_attention):
    """Same random numbers drawn, same keys, same outputs as torch's own stacks."""
    kwargs = dict(
        d_model=16, nhead=4, dim_feedforward=64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    )
    torch.manual_seed(0)
    if cross_attention:
        reference = nn.TransformerDecoder(nn.TransformerDecoderLayer(**kwargs), 2).eval()
    else:
        reference = nn.TransformerEncoder(nn.TransformerEncoderLayer(**kwargs), 2, enable_nested_tensor=False).eval()
    after_reference = torch.rand(1)
    torch.manual_seed(0)
    stack = LayerStack(TransformerLayer(16, 4, 0.1, cross_attention), 2).eval()
    assert torch.equal(after_reference, torch.rand(1))
    assert list(stack.state_dict()) == list(reference.state_dict())
    for ours, theirs in zip(stack.state_dict().values(), reference.state_dict().values()):
        assert torch.equal(ours, theirs)

    x, memory = torch.randn(3, 5, 16), torch.randn(3, 2, 16)
    mask = torch.full((5, 5), -torch.inf).triu(1)
    memory_mask = torch.zeros(5, 2)
    memory_mask[0, 1] = -torch.inf
    if cross_attention:
        torch.testing.assert_close(stack(x, mask, memory, memory_mask), reference(x, memory, mask, memory_mask))
    else:
        torch.testing.assert_close(stack(x, mask), reference(x, mask))


def small_transformer(**kwargs):
    torch.manual_seed(0)
    defaults = dict(
        input_dim=2, output_dim=2, horizon=6, n_obs_steps=2, cond_dim=3, n_layer=2, n_head=2, n_emb=16, causal_attn=True
    )
    return TransformerForDiffusion(**{**defaults, **kwargs}).eval()


def test_causal_masks():
    model = small_transformer()
    sample, cond = torch.randn(2, 6, 2), torch.randn(2, 2, 3)
    reference = model(sample, 3, cond)
    future = sample.clone()
    future[:, 4:] += 1
    changed = model(future, 3, cond)
    assert torch.equal(changed[:, :4], reference[:, :4]) and not torch.allclose(changed[:, 4:], reference[:, 4:])
    later_obs = cond.clone()
    later_obs[:, 1] += 1
    changed = model(sample, 3, later_obs)
    assert torch.equal(changed[:, 0], reference[:, 0]) and not torch.allclose(changed[:, 1:], reference[:, 1:])


def test_transformer_initial_weights():
    model = small_transformer(n_emb=64)
    assert model.head.bias.abs().max() == 0 and model.decoder.layers[0].self_attn.in_proj_bias.abs().max() == 0
    for weight in (
        model.decoder.layers[1].multihead_attn.in_proj_weight,
        model.decoder.layers[0].linear1.weight,
        model.pos_emb,
    ):
        assert abs(weight.std().item() - 0.02) < 0.003
    assert small_transformer(cond_dim=0).cond_pos_emb.abs().max() == 0


def test_transformer_has_forward_mode_derivatives_and_exports():
    model = small_transformer()
    sample, cond, time = torch.randn(2, 6, 2), torch.randn(2, 2, 3), torch.full((2,), 0.3)
    _, tangent = torch.func.jvp(lambda t: model(sample, t, cond), (time,), (torch.ones(2),))
    model, sample, cond, time = model.double(), sample.double(), cond.double(), time.double()
    difference = (model(sample, time + 1e-5, cond) - model(sample, time - 1e-5, cond)) / 2e-5
    torch.testing.assert_close(tangent.double(), difference, rtol=1e-3, atol=1e-5)
    exported = torch.export.export(model, (sample, time, cond)).module()
    torch.testing.assert_close(exported(sample, time, cond), model(sample, time, cond))


def test_transformer_errors():
    with pytest.raises(ConfigError, match="10.*4"):
        small_transformer(n_emb=10, n_head=4)
    with pytest.raises(ConfigError, match="4 steps.*horizon 6"):
        small_transformer()(torch.randn(1, 4, 2), 0, torch.randn(1, 2, 3))
    with pytest.raises(ConfigError, match="obs_as_cond"):
        small_transformer()(torch.randn(1, 6, 2), 0)
    with pytest.raises(ConfigError, match="time_as_cond"):
        small_transformer(time_as_cond=False)


def test_unet_horizon_must_be_divisible():
    model = ConditionalUnet1D(2, diffusion_step_embed_dim=8, down_dims=[8, 16, 16])
    with pytest.raises(ValueError, match=r"multiple of 4.*T = 10"):
        model(torch.randn(1, 10, 2), 0)
    assert model(torch.randn(1, 12, 2), 0).shape == (1, 12, 2)


def test_both_depend_on_time_and_accept_floats():
    unet = ConditionalUnet1D(2, diffusion_step_embed_dim=8, down_dims=[8, 16]).eval()
    transformer = small_transformer(cond_dim=0)
    sample = torch.randn(3, 6, 2)
    for model in (unet, transformer):
        at_third = model(sample, 0.3)
        assert not torch.allclose(at_third, model(sample, 0))
        torch.testing.assert_close(at_third, model(sample, torch.full((3,), 0.3)))


def test_masks_and_embedding_match():
    expected = golden.read("mask_posemb")
    for name in ("ld_inpaint", "ld_visible", "ld_obs0", "ld_random_seed0"):
        case = expected[name]
        mask = LowdimMaskGenerator(**case["kwargs"])(case["shape"], seed=0)
        assert mask.dtype == torch.bool and mask.int().tolist() == case["mask"], name
    for dim, values in expected["sinusoidal"].items():
        steps = torch.tensor([0, 1, 17, 99])
        torch.testing.assert_close(SinusoidalPosEmb(int(dim))(steps), torch.tensor(values), rtol=1e-5, atol=1e-5)


def test_masks_in_closed_form():
    mask = LowdimMaskGenerator(action_dim=1, obs_dim=2, max_n_obs_steps=2)((1, 3, 3))
    assert mask[0].int().tolist() == [[0, 1, 1], [0, 1, 1], [0, 0, 0]]
    assert DummyMaskGenerator()((2, 3)).all()
    with pytest.raises(ConfigError, match="4 wide"):
        LowdimMaskGenerator(action_dim=1, obs_dim=2)((1, 3, 4))
    torch.manual_seed(0)
    random_steps = LowdimMaskGenerator(1, 1, max_n_obs_steps=3, fix_obs_steps=False)
    lengths = {int(n) for _ in range(20) for n in random_steps((4, 5, 2))[..., 1].sum(1)}
    assert lengths == {1, 2, 3}
