"""Networks of the MIP protocol: published parameter counts, embeddings, times, conditions."""

import importlib

import pytest
import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.mip.networks import (
    ChiTransformer,
    ChiUnet,
    ResidualMLP,
    StateEncoder,
    TwoTimeEmbedding,
    stack_times,
)

# task: obs_dim, action_dim, horizon, and parameters of network / encoder for mlp, transformer, unet
TASKS = {
    "lift": (19, 10, 16, (17_661_089, 807_936), (20_316_875, 458_496), (19_669_899, 207_360)),
    "can_square": (23, 10, 10, (17_599_589, 812_032), (20_314_571, 461_568), (19_669_899, 209_408)),
    "tool_hang": (53, 10, 10, (17_599_589, 842_752), (20_314_571, 484_608), (19_669_899, 224_768)),
    "transport": (59, 20, 10, (17_702_089, 848_896), (20_323_221, 489_216), (19_678_869, 227_840)),
    "pusht_state": (5, 2, 16, (17_529_889, 793_600), (20_309_955, 447_744), (19_662_723, 200_192)),
    "pusht_keypoint": (20, 2, 16, (17_529_889, 808_960), (20_309_955, 459_264), (19_662_723, 207_872)),
    "kitchen": (60, 9, 16, (17_644_689, 849_920), (20_316_010, 489_984), (19_669_002, 228_352)),
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def linear(n_in: int, n_out: int) -> int:
    return n_in * n_out + n_out


@pytest.mark.parametrize("task", TASKS)
def test_parameter_counts(task):
    """The published counts minus the scalar head.

    The head reads: mlp the last features; transformer the mean input, output and memory; unet the mean middle features.
    """
    obs_dim, action_dim, horizon, mlp, transformer, unet = TASKS[task]
    scalar_head = {
        "mlp": linear(512, 1),
        "transformer": linear(action_dim, 96) + linear(384, 96) + linear(96 + 96 + 384, 1),
        "unet": linear(512, 128) + linear(128, 1),
    }
    with torch.device("meta"):
        assert count(ResidualMLP(action_dim, action_dim, horizon)) == mlp[0] - scalar_head["mlp"]
        assert count(ChiTransformer(action_dim, action_dim, horizon)) == transformer[0] - scalar_head["transformer"]
        assert count(ChiUnet(action_dim)) == unet[0] - scalar_head["unet"]
        encoders = [count(StateEncoder(obs_dim, 2, emb_dim)) for emb_dim in (512, 384, 256)]
    assert encoders == [mlp[1], transformer[1], unet[1]]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformer":
        model = ChiTransformer(3, 3, 8, cond_dim=16, n_layer=2, n_head=2, n_emb=16)
    elif name == "mlp":
        model = ResidualMLP(3, 3, 8, cond_dim=16, n_layer=2, n_emb=16, time_embed_dim=8)
    else:
        model = ChiUnet(
            3, global_cond_dim=32, cond_embed_dim=8, diffusion_step_embed_dim=8, down_dims=(8, 16, 16), kernel_size=3
        )
    return model.eval()


def call(model: nn.Module, x, t, tokens, **kwargs):
    if isinstance(model, ChiUnet):
        return model(x, t, global_cond=tokens.flatten(1), **kwargs)
    return model(x, t, cond=tokens, **kwargs)


@pytest.fixture(params=["transformer", "mlp", "unet"])
def model(request):
    return build(request.param)


def test_times_and_conditions(model):
    x, tokens = torch.randn(4, 8, 3), torch.randn(4, 2, 16)
    out = call(model, x, 0.9, tokens)
    assert out.shape == x.shape
    torch.testing.assert_close(out, call(model, x, torch.full((4,), 0.9), tokens))
    torch.testing.assert_close(out, call(model, x, torch.tensor(0.9), tokens))
    torch.testing.assert_close(out, call(model, x, 0.9, tokens, start_time=0.9))
    assert not torch.allclose(out, call(model, x, 0.9, tokens, start_time=0.0), atol=1e-6)
    assert not torch.allclose(out, call(model, x, 0.0, tokens, start_time=0.9), atol=1e-6)
    assert not torch.allclose(out, call(model, x, 0.9, tokens + 1), atol=1e-6)
    assert not torch.allclose(out, call(model, x + 1, 0.9, tokens), atol=1e-6)


def test_every_parameter_learns(model):
    call(model.train(), torch.randn(4, 8, 3), torch.rand(4), torch.randn(4, 2, 16)).square().sum().backward()
    unused = [name for name, p in model.named_parameters() if p.numel() and p.grad is None]
    assert unused == []


def test_forward_mode_derivative_in_both_times(model):
    x, tokens = torch.randn(2, 8, 3), torch.randn(2, 2, 16)

    def f(s, t):
        return call(model, x, t, tokens, start_time=s)

    times = (torch.full((2,), 0.2), torch.full((2,), 0.7))
    ones, zeros = torch.ones(2), torch.zeros(2)
    _, along_both = torch.func.jvp(f, times, (ones, ones))
    _, along_s = torch.func.jvp(f, times, (ones, zeros))
    _, along_t = torch.func.jvp(f, times, (zeros, ones))
    assert along_s.abs().max() > 0 and along_t.abs().max() > 0
    torch.testing.assert_close(along_both, along_s + along_t, rtol=1e-3, atol=1e-4)


def test_time_embedding():
    embedding = TwoTimeEmbedding(16)(torch.tensor([[0.0, 0.9]]))[0]
    assert embedding[:8].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    expected = torch.tensor([0.62161, 0.99595, 0.99996, 1.0, 0.78333, 0.08988, 0.009, 0.0009])
    torch.testing.assert_close(embedding[8:], expected, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="divisible by 4"):
        TwoTimeEmbedding(6)


def test_start_time_comes_first():
    sample = torch.zeros(2, 8, 3)
    torch.testing.assert_close(stack_times(0.9, 0.2, sample), torch.tensor([[0.2, 0.9]] * 2))
    torch.testing.assert_close(
        stack_times(torch.tensor([0.1, 0.9]), None, sample), torch.tensor([[0.1, 0.1], [0.9, 0.9]])
    )


def test_transformer_masks():
    model = build("transformer")
    x, tokens = torch.randn(2, 8, 3), torch.randn(2, 2, 16)
    reference = model(x, 0.5, tokens)
    later = tokens.clone()
    later[:, 1] += 1
    changed = model(x, 0.5, later)
    assert torch.equal(changed[:, 0], reference[:, 0]) and not torch.allclose(changed[:, 1], reference[:, 1])
    x[:, 5:] += 1
    changed = model(x, 0.5, tokens)
    assert torch.equal(changed[:, :5], reference[:, :5]) and not torch.allclose(changed[:, 5:], reference[:, 5:])


def test_mlp_initial_weights_are_orthogonal():
    for module in build("mlp").modules():
        if isinstance(module, nn.Linear):
            weight = module.weight if module.weight.shape[0] <= module.weight.shape[1] else module.weight.T
            torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), rtol=0, atol=1e-5)
            assert module.bias.abs().max() == 0


def test_unet_has_no_mish_and_checks_the_horizon():
    model = build("unet")
    assert not any(isinstance(module, nn.Mish) for module in model.modules())
    with pytest.raises(ConfigError, match="multiple of 4.*T = 10"):
        call(model, torch.randn(1, 10, 3), 0.0, torch.randn(1, 2, 16))


def test_state_encoder_mixes_steps():
    torch.manual_seed(0)
    encoder = StateEncoder(5, n_obs_steps=2, emb_dim=16)
    obs = torch.randn(3, 2, 5)
    out = encoder(obs)
    assert out.shape == (3, 2, 16) and encoder.output_dim == 16
    obs[:, 1] += 1
    assert not torch.allclose(encoder(obs)[:, 0], out[:, 0])


@pytest.mark.parametrize(
    "former, current",
    [
        ("diffusion.mip_networks", "mip.networks"),
        ("vision.mip_image_encoder", "mip.image_encoder"),
        ("vision.pointnet_extractor", "dp3.encoder"),
    ],
)
def test_former_paths_resolve(former, current):
    """Configs and checkpoints name the former modules."""
    former, current = (importlib.import_module(f"diffusion_policy.model.{name}") for name in (former, current))
    for name in former.__all__:
        assert getattr(former, name) is getattr(current, name)
