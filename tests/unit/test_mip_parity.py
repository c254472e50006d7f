"""MIP's networks, losses, samplers and training steps: numbers that MIP's own code computed, with ours from configs.

Weights follow from MIP's names of the parameters; random numbers are those that MIP drew. Sums of float32 have another
order here: outputs and losses agree to 1e-5, gradients to 1e-4, and what 20 steps amplify to 1e-3.
"""

import re

import hydra
import numpy as np
import pytest
import torch

from diffusion_policy.policy.represented import build_policy
from tests import golden
from tests.util import load_config, unit_normalizer, write_pusht

MIP = golden.read("mip_networks")
OBS, ACTION = 5, 2
BACKBONES = ("mlp", "transformer", "unet")
SMALL = {
    "mlp": ("size.mlp.n_emb=16", "size.mlp.n_layer=2", "size.mlp.p_drop=0"),
    "transformer": (
        "size.transformer.n_emb=16",
        "size.transformer.n_head=2",
        "size.transformer.n_layer=2",
        "size.transformer.p_drop_attn=0",
    ),
    "unet": ("size.unet.emb_dim=16", "size.unet.down_dims=[32,64,64]"),
}
OBJECTIVES = {
    "regression": ("objective=regression",),
    "mip": ("objective=mip",),
    "flow": ("objective=flow",),
    "tsd": ("objective=tsd",),
    "straight_flow": ("objective=straight_flow",),
    "mf": ("objective=mean_flow", "policy.variant=mf"),
}
# Where we draw in another order than MIP: for each of our draws, the index of MIP's.
DRAW_ORDER = {"tsd": (1, 0), "mf": (1, 0, 2, 3)}
UNTRAINED_HEAD = re.compile("scalar|input_processor|final_processor")


# ---------------------------------------------------------------------- names
def mip_names(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """MIP's names of the parameters of a network or encoder; the transformer's are ours."""
    blocks = {0: "norm1", 1: "linear1", 4: "norm2", 5: "linear2"}
    layers = {0: "input_proj", 1: "input_norm"}
    if hasattr(module, "net"):
        layers |= {len(module.net) - 2: "final_norm", len(module.net) - 1: "main_output"}
    rules = (
        (r"^net\.(\d+)\.(\d)\.", lambda m: f"residual_blocks.{int(m[1]) - 3}.{blocks[int(m[2])]}."),
        (r"^net\.(\d+)\.", lambda m: f"{layers[int(m[1])]}."),
        (r"^(mid|down|up)_modules", r"\1s"),
        (r"\.blocks\.([01])\.block\.", lambda m: f".conv{int(m[1]) + 1}."),
        (r"^diffusion_step_encoder\.([13])", lambda m: f"map_emb.{int(m[1]) - 1}"),
        (r"^global_cond_proj", "global_cond_encoder"),
        (r"^final_conv\.1\.", "final_conv.3."),
        (r"^final_conv\.0\.block\.", "final_conv."),
        (r"^frame\.", ""),
    )
    state_encoder = {"mlp.0": "mlp.mlp.0.0", "mlp.2": "mlp.mlp.1.0", "mlp.4": "mlp.mlp.2"}
    named = {}
    for name, parameter in module.named_parameters():
        if not parameter.numel():
            continue
        if type(module).__name__ == "StateEncoder":
            name = state_encoder[name[:5]] + name[5:]
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        named[name] = parameter
    return named


def parts(policy) -> dict[str, dict[str, torch.nn.Parameter]]:
    return {"network": mip_names(policy.model), "encoder": mip_names(policy.obs_encoder)}


@torch.no_grad()
def fill(parameters: dict[str, torch.nn.Parameter], shapes: dict[str, list[int]]) -> None:
    """Check that the parameters are MIP's, but for a head that it never trains, and set the weights."""
    used = {name: shape for name, shape in shapes.items() if not UNTRAINED_HEAD.match(name)}
    assert {name: list(parameter.shape) for name, parameter in parameters.items()} == used
    for name, value in golden.named_weights(used).items():
        parameters[name].copy_(value)


def fill_policy(policy, shapes) -> None:
    policy.set_normalizer(unit_normalizer(OBS, ACTION))
    for part, parameters in parts(policy).items():
        fill(parameters, shapes[part])


def build(backbone: str, shapes, *overrides: str):
    policy = build_policy(load_config("train", f"backbone={backbone}", "task=pusht_state", "preset=paper", *overrides))
    fill_policy(policy, shapes)
    return policy.eval()


def check_norms(ours, expected: torch.Tensor, shapes, **tolerance) -> None:
    """Compare norms by name; MIP has nan for parameters without a gradient: only those of the head."""
    theirs = dict(zip(shapes, expected.tolist(), strict=True))
    assert {name for name, norm in theirs.items() if np.isnan(norm)} <= {*filter(UNTRAINED_HEAD.match, theirs)}
    assert ours == pytest.approx({name: theirs[name] for name in ours}, **tolerance)


def check_gradients(policy, expected, shapes) -> None:
    for part, parameters in parts(policy).items():
        ours = {name: parameter.grad.norm().item() for name, parameter in parameters.items()}
        largest = max(ours.values())
        check_norms(ours, expected[part], shapes[part], rel=1e-4, abs=1e-6 * largest)


def feed(monkeypatch, loss: str, draws: list[torch.Tensor]) -> list[torch.Tensor]:
    """Let the next random numbers be MIP's; returns those that are left."""
    left = [draws[i] for i in DRAW_ORDER.get(loss, range(len(draws)))]
    monkeypatch.setattr(torch, "randn_like", lambda like: left.pop(0))
    monkeypatch.setattr(torch, "rand", lambda *size, **options: left.pop(0))
    return left


# ---------------------------------------------------------------------- networks
def check_forward(policy, case) -> torch.Tensor:
    batch, generator = MIP["batch"], policy.generator
    cond = generator.encode(batch["obs"])
    torch.testing.assert_close(cond, case["cond"], rtol=1e-5, atol=1e-5)
    one_time = generator(cond, batch["input"], batch["end"])
    torch.testing.assert_close(one_time, case["one_time"], rtol=1e-5, atol=1e-5)
    two_times = generator(cond, batch["input"], batch["end"], s=batch["start"])
    torch.testing.assert_close(two_times, case["two_times"], rtol=1e-5, atol=1e-5)
    return two_times


@pytest.mark.parametrize("backbone", BACKBONES)
def test_forward_and_gradients(backbone):
    case = MIP["small"][backbone]
    policy = build(backbone, case["shapes"], *SMALL[backbone])
    check_forward(policy, case).square().mean().backward()
    check_gradients(policy, case["gradients"], case["shapes"])


@torch.no_grad()
@pytest.mark.parametrize("backbone", BACKBONES)
def test_forward_at_the_published_size(backbone):
    case = MIP["published"][backbone]
    check_forward(build(backbone, case["shapes"]), case)


@torch.no_grad()
def test_image_encoder_at_the_published_size(monkeypatch):
    case = MIP["image"]
    config = load_config("train", "modality=image", "task=can_ph_image", "backbone=unet", "preset=paper")
    encoder = hydra.utils.instantiate(config.policy.obs_encoder)
    fill(mip_names(encoder), case["shapes"])
    obs = golden.named_weights(case["obs"], scale=1.0)
    torch.testing.assert_close(encoder.eval()(obs), case["central"], rtol=1e-5, atol=1e-5)
    left = feed(monkeypatch, "image", case["draws"])
    torch.testing.assert_close(encoder.train()(obs), case["random"], rtol=1e-5, atol=1e-5)
    assert not left


# ---------------------------------------------------------------------- objectives
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_losses_and_actions(backbone, loss, monkeypatch):
    case, batch = MIP["small"][backbone], MIP["batch"]
    policy = build(backbone, case["shapes"], *SMALL[backbone], *OBJECTIVES[loss])
    for steps, action in case["actions"][loss].items():
        if loss in ("flow", "mf"):
            policy.nfe = int(steps)
        predicted = policy.predict_action({"obs": batch["obs"]})["action_pred"]
        torch.testing.assert_close(predicted, action, rtol=1e-5, atol=1e-5)
    for expected in case["losses"][loss]:
        policy.set_progress(0.2 + 0.5 * expected["longest"])  # of the training, which sets the longest interval of mf
        with monkeypatch.context() as patch:
            left = feed(patch, loss, MIP["draws"][loss])
            value = policy.compute_loss({"obs": batch["obs"], "action": batch["action"]})
            assert not left
        assert value.item() == pytest.approx(expected["loss"], rel=1e-5)
        policy.zero_grad()
        value.backward()
        check_gradients(policy, expected["gradients"], case["shapes"])


def test_longest_interval():
    policy = build("mlp", MIP["small"]["mlp"]["shapes"], *SMALL["mlp"], *OBJECTIVES["mf"])
    for step, longest in MIP["longest_intervals"].items():
        policy.set_progress(int(step) / 300_000)
        assert policy.longest_interval() == pytest.approx(longest, abs=1e-12)


# ---------------------------------------------------------------------- training
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


@pytest.mark.parametrize("name", MIP["trainings"])
def test_training(name, tmp_path, data, monkeypatch):
    """20 steps by the training loop, with MIP's batch: gradient clipping, AdamW, learning rate, EMA."""
    case, batch = MIP["trainings"][name], MIP["batch"]
    values, steps, shapes = case["values"], len(case["losses"]), MIP["small"][case["network"]]["shapes"]
    overrides = [
        f"learning_rate={values['lr']}",
        f"optimizer.weight_decay={values['weight_decay']}",
        f"training.grad_clip_norm={values['grad_clip_norm']}",
        f"ema.rate={values['ema_rate']}",
    ]
    config = load_config(
        "train",
        f"backbone={case['network']}",
        "task=pusht_state",
        f"task.dataset.zarr_path={data}",
        "preset=paper",
        *SMALL[case["network"]],
        *OBJECTIVES[case["loss"]],
        *(overrides if name.endswith("visible") else ()),  # the others are the values of preset=paper
        "training.num_epochs=1",
        f"training.steps_per_epoch={steps}",
        "training.device=cpu",
    )
    run = hydra.utils.get_class(config._target_)(config, output_dir=str(tmp_path))
    run.prepare()
    for policy in (run.model, run.ema_model):
        fill_policy(policy, shapes)
    norms, clip = [], run.update.clip
    monkeypatch.setattr(run.update, "clip", lambda norm: (norms.append(norm.item()), clip(norm)))
    losses, rates = [], []
    for step in range(steps):
        rates.append(run.lr_scheduler.get_last_lr()[0])
        run.model.set_progress(step / steps)
        with monkeypatch.context() as patch:
            left = feed(patch, case["loss"], [draws[step] for draws in MIP["training_draws"][case["loss"]]])
            losses.append(run.optimise(iter([{"obs": batch["obs"], "action": batch["action"]}])))
            assert not left
    assert rates == pytest.approx(case["rates"], rel=1e-9)
    assert losses == pytest.approx(case["losses"], rel=1e-4)
    assert norms == pytest.approx(case["gradient_norms"], rel=1e-3)
    for policy, expected in ((run.model, case["norms"]), (run.ema_model, case["average_norms"])):
        for part, parameters in parts(policy).items():
            # A bias of attention's keys has no effect: its gradient is rounding, which AdamW turns into full steps.
            ours = {n: parameter.norm().item() for n, parameter in parameters.items() if "in_proj_bias" not in n}
            check_norms(ours, expected[part], shapes[part], rel=1e-4)
    run.ema_model.eval()
    for n, action in case["actions"].items():
        if case["loss"] == "mf":
            run.ema_model.nfe = int(n)
        predicted = run.ema_model.predict_action({"obs": batch["obs"]})["action_pred"]
        torch.testing.assert_close(predicted, action, rtol=1e-3, atol=1e-4)
