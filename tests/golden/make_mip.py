"""Compute `mip_networks.npz` with MIP's own code: python -m tests.golden.make_mip FOLDER_OF_MIP_CHECKOUT.

It needs MIP's packages (torch, torchvision, tensordict, loguru, matplotlib) and no GPU. Weights and images follow from
names, see `named_weights`, and are not stored.
"""

import argparse
import sys
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.golden import FOLDER, named_weights, write_tree

OBS, ACTION, HORIZON, STEPS, BATCH = 5, 2, 16, 2, 4  # PushT from state
PUBLISHED = {
    "mlp": dict(network_type="mlp", emb_dim=512, num_layers=8, timestep_emb_dim=128),
    "transformer": dict(network_type="chitransformer", emb_dim=384, num_layers=8, n_heads=6),
    "unet": dict(network_type="chiunet", emb_dim=256, num_layers=6, model_dim=128, dim_mult=[1, 2, 2]),
}
SMALL = {
    "mlp": PUBLISHED["mlp"] | dict(emb_dim=16, num_layers=2),
    "transformer": PUBLISHED["transformer"] | dict(emb_dim=16, num_layers=2, n_heads=2),
    "unet": PUBLISHED["unet"] | dict(emb_dim=16, model_dim=32, dim_mult=[1, 2, 1]),
}
LOSSES = ("regression", "mip", "flow", "tsd", "straight_flow", "mf")
LONGEST_INTERVALS = {"mf": (1.0, 0.1)}
STEP_LIST = {"flow": (9, 3, 1), "mf": (9, 3, 1)}
# The values of MIP's configs, and others that make small effects visible.
PROTOCOL = dict(lr=1e-4, weight_decay=1e-5, grad_clip_norm=10.0, ema_rate=0.995)
VISIBLE = dict(lr=1e-2, weight_decay=0.1, grad_clip_norm=1.0, ema_rate=0.9)
TRAININGS = {
    "mlp": ("mlp", "mip", PROTOCOL),
    "transformer": ("transformer", "mip", PROTOCOL),
    "unet": ("unet", "mip", PROTOCOL),
    "mlp_visible": ("mlp", "mip", VISIBLE),
    "mlp_mf": ("mlp", "mf", PROTOCOL),
}
TRAINING_STEPS = 20
LOSS_DRAWS = ("normal_", "uniform_", "randn_like")
CAMERAS = ("agentview_image", "robot0_eye_in_hand_image")
LOW_DIM = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}


class Draws(TorchDispatchMode):
    """Records random tensors in the order in which they are drawn.

    MIP's losses draw by normal_, uniform_ and randn_like, its crops by rand. So does its encoder's dropout of
    conditions, which has no effect here.
    """

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.kinds:
            self.tensors.append(out.clone())
        return out


def make_agent(network: dict[str, Any], loss: str = "mip", **optimization: Any) -> Any:
    from mip.agent import TrainingAgent
    from mip.config import Config, LogConfig, NetworkConfig, OptimizationConfig, TaskConfig

    config = Config(
        optimization=OptimizationConfig(
            loss_type=loss,
            loss_scale=0.1,
            norm_type="l2",
            sample_mode="zero",
            t_two_step=0.9,
            warmup_ratio=0.2,
            rampup_ratio=0.5,
            device="cpu",
            use_compile=False,
            **optimization,
        ),
        # Dropout would make the order of random numbers part of the comparison.
        network=NetworkConfig(**network, dropout=0.0, attn_dropout=0.0, encoder_dropout=0.0),
        task=TaskConfig(obs_dim=OBS, act_dim=ACTION, obs_steps=STEPS, horizon=HORIZON),
        log=LogConfig("", "disabled", "", "", ""),
    )
    agent = TrainingAgent(config)
    for part in (agent.flow_map.net, agent.flow_map_ema.net, agent.encoder, agent.encoder_ema):
        fill(part)
    return agent


def shapes(module: torch.nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


@torch.no_grad()
def fill(module: torch.nn.Module) -> None:
    """Set the weights that follow from the names of the parameters."""
    weights = named_weights(shapes(module))
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])


def parts(agent: Any, suffix: str = "") -> dict[str, torch.nn.Module]:
    return {"network": getattr(agent, f"flow_map{suffix}").net, "encoder": getattr(agent, f"encoder{suffix}")}


def norms(modules: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Norms of the weights, in the order of the parameters."""
    return {part: torch.stack([p.detach().norm() for p in module.parameters()]) for part, module in modules.items()}


def gradients(agent: Any) -> dict[str, torch.Tensor]:
    """Norms of the gradients, in the order of the parameters and nan for those without one; removes the gradients."""
    out = {}
    for part, module in parts(agent).items():
        missing = torch.tensor(torch.nan)
        out[part] = torch.stack([missing if p.grad is None else p.grad.norm() for p in module.parameters()])
        module.zero_grad(set_to_none=True)
    return out


def forward(agent: Any, batch: dict[str, torch.Tensor], grad: bool) -> dict[str, Any]:
    """Outputs of network and encoder for two different times, and for equal ones, in evaluation mode."""
    agent.eval()
    x, s, t = batch["input"], batch["start"], batch["end"]
    cond = agent.encoder(batch["obs"], None)
    out = agent.flow_map.net(x, s, t, cond)[0]
    case = {"cond": cond.detach(), "two_times": out.detach()}
    case["one_time"] = agent.flow_map.net(x, t, t, cond)[0].detach()
    if grad:
        out.square().mean().backward()
        case["gradients"] = gradients(agent)
    return case


def loss_case(agent: Any, batch: dict[str, torch.Tensor], longest: float) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """One loss and its gradients; and the random numbers in it."""
    agent.eval()
    torch.manual_seed(0)
    # The fused kernels of attention have no forward-mode derivative, which `mf` needs.
    with sdpa_kernel(SDPBackend.MATH), Draws(*LOSS_DRAWS) as draws:
        loss, _ = agent.loss_fn(
            agent.config.optimization,
            agent.flow_map,
            agent.encoder,
            agent.interpolant,
            batch["action"],
            batch["obs"],
            torch.full((BATCH,), longest),
        )
    loss.backward()
    return {"longest": longest, "loss": loss.item(), "gradients": gradients(agent)}, draws.tensors


def train(
    network: str, loss: str, values: dict[str, float], batch: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Training steps as MIP's script makes them; and the random numbers in them, stacked over the steps."""
    from mip.scheduler import WarmupAnnealingScheduler

    agent = make_agent(SMALL[network], loss, gradient_steps=TRAINING_STEPS, **values)
    agent.train()
    o = agent.config.optimization
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(agent.optimizer, T_max=o.gradient_steps)
    longest = WarmupAnnealingScheduler(o.gradient_steps, o.warmup_ratio, o.rampup_ratio, o.min_value, o.max_value)
    torch.manual_seed(1)
    steps: list[list[torch.Tensor]] = []
    rows: dict[str, list[float]] = {"losses": [], "gradient_norms": [], "rates": []}
    for step in range(TRAINING_STEPS):
        rows["rates"].append(float(rate.get_last_lr()[0]))
        with Draws(*LOSS_DRAWS) as draws:
            info = agent.update(batch["action"], batch["obs"], torch.full((BATCH,), longest(step)))
        steps.append(draws.tensors)
        rate.step()
        rows["losses"].append(float(info["loss"]))
        rows["gradient_norms"].append(float(info["grad_norm"]))
    case = {
        "network": network,
        "loss": loss,
        "values": values,
        "actions": {str(n): agent.sample(batch["action"], batch["obs"], n) for n in STEP_LIST.get(loss, (1,))},
        "norms": norms(parts(agent)),
        "average_norms": norms(parts(agent, "_ema")),
    }
    return case | rows, [torch.stack(tensors) for tensors in zip(*steps)]


def put(stored: dict[str, list[torch.Tensor]], key: str, draws: list[torch.Tensor]) -> None:
    """Store random numbers once: they depend on the loss alone."""
    known = stored.setdefault(key, draws)
    if not all(torch.equal(a, b) for a, b in zip(known, draws, strict=True)):
        raise ValueError(f"{key}: the random numbers depend on the network")


def image_case() -> dict[str, Any]:
    """The image encoder at its published size, with central and with random crops."""
    from mip.encoders import MultiImageObsEncoder

    entries = {name: {"shape": [3, 84, 84], "type": "rgb"} for name in CAMERAS}
    entries |= {name: {"shape": [width], "type": "low_dim"} for name, width in LOW_DIM.items()}
    encoder = MultiImageObsEncoder(
        {"obs": entries},
        "resnet18",
        emb_dim=256,
        crop_shape=(76, 76),
        random_crop=True,
        use_group_norm=True,
        use_seq=True,
        keep_horizon_dims=True,
    )
    fill(encoder)
    layout = {name: [1, STEPS, *entry["shape"]] for name, entry in entries.items()}
    obs = named_weights(layout, scale=1.0)
    with torch.no_grad():
        central = encoder.eval()(obs)
        torch.manual_seed(0)
        with Draws("rand") as draws:
            randomly = encoder.train()(obs)
    case = {"obs": layout, "shapes": shapes(encoder), "draws": draws.tensors}
    return case | {"central": central, "random": randomly}


def longest_intervals() -> dict[str, float]:
    from mip.scheduler import WarmupAnnealingScheduler

    schedule = WarmupAnnealingScheduler(300_000, 0.2, 0.5, 0.0, 1.0)
    return {str(step): schedule(step) for step in (0, 59_999, 60_000, 100_000, 135_000, 209_999, 210_000, 299_999)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="folder of MIP's repository")
    sys.path.insert(0, parser.parse_args().checkout)
    import tensordict
    import torchvision
    from loguru import logger

    logger.remove()
    generator = np.random.RandomState(0)
    sizes = {
        "obs": (BATCH, STEPS, OBS),
        "action": (BATCH, HORIZON, ACTION),
        "input": (BATCH, HORIZON, ACTION),
        "start": (BATCH,),
        "end": (BATCH,),
    }
    batch = {
        key: torch.from_numpy(generator.uniform(0 if key in ("start", "end") else -1, 1, size)).float()
        for key, size in sizes.items()
    }
    tree: dict[str, Any] = {"batch": batch, "published": {}, "small": {}, "trainings": {}}
    tree["draws"], tree["training_draws"] = {}, {}
    for name in SMALL:
        agent = make_agent(PUBLISHED[name])
        tree["published"][name] = {
            "shapes": {part: shapes(module) for part, module in parts(agent).items()},
            **forward(agent, batch, grad=False),
        }
        agent = make_agent(SMALL[name])
        case = tree["small"][name] = {
            "shapes": {part: shapes(module) for part, module in parts(agent).items()},
            "losses": {},
            "actions": {},
            **forward(agent, batch, grad=True),
        }
        for loss in LOSSES:
            agent = make_agent(SMALL[name], loss)
            case["losses"][loss] = []
            for longest in LONGEST_INTERVALS.get(loss, (1.0,)):
                result, draws = loss_case(agent, batch, longest)
                case["losses"][loss].append(result)
                put(tree["draws"], loss, draws)
            case["actions"][loss] = {
                str(steps): agent.sample(batch["action"], batch["obs"], steps, use_ema=False)
                for steps in STEP_LIST.get(loss, (1,))
            }
    for name, training in TRAININGS.items():
        tree["trainings"][name], draws = train(*training, batch)
        put(tree["training_draws"], training[1], draws)
    tree["image"] = image_case()
    tree["longest_intervals"] = longest_intervals()
    write_tree("mip_networks", tree)
    packages = (torch, torchvision, tensordict, np)
    print(*(f"{package.__name__} {package.__version__}" for package in packages))
    print(f"{(FOLDER / 'mip_networks.npz').stat().st_size:,d} bytes")


if __name__ == "__main__":
    main()
