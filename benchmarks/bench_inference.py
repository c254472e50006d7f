"""Inference for one observation: overhead of predict_action over its network; Diffusion Policy compared with IDP."""

import functools

import torch

from benchmarks.common import build, interleaved, ratio, row
from idp_workspace.policy import IDPPolicy

BACKBONES = ("transformer", "unet", "mlp")


def _overhead(backbone: str, rounds: int) -> dict:
    """predict_action / (encoder and backbone on tensors that are ready)."""
    policy, _ = build(f"train_idp_{backbone}_lowdim")
    policy.eval()
    obs = torch.randn(1, policy.n_obs_steps, policy.obs_dim)
    action, time = torch.zeros(1, policy.horizon, policy.action_dim), torch.zeros(1)

    @torch.no_grad()
    def bare():
        cond = policy.obs_encoder(obs)
        if backbone == "unet":
            return policy.model(action, time, global_cond=cond.flatten(1))
        return policy.model(action, time, cond=cond)

    times = interleaved(
        f"inference, {backbone}",
        {"policy": lambda: policy.predict_action({"obs": obs}), "bare": bare},
        rounds,
        warmup=20,
    )
    return row(
        f"predict_action / bare network call, {backbone}, batch 1",
        ratio(times["policy"], times["bare"]),
        "x",
        "<= 1.15",
        f"predict_action {1e3 * times['policy'].median:.2f} ms, network {1e3 * times['bare'].median:.2f} ms",
    )


def _diffusion(rounds: int) -> dict:
    """Diffusion Policy / IDP on one and the same network, so that only the sampling differs."""
    diffusion, cfg = build("train_diffusion_transformer_lowdim_pusht_workspace", obs_dim=20, action_dim=2)
    sizes = {name: cfg.policy[name] for name in ("horizon", "obs_dim", "action_dim", "n_obs_steps", "n_action_steps")}
    idp = IDPPolicy(model=diffusion.model, obs_as_cond=True, **sizes)
    idp.set_normalizer(diffusion.normalizer)
    obs = {"obs": torch.randn(1, diffusion.n_obs_steps, diffusion.obs_dim)}
    tasks = {
        name: functools.partial(policy.eval().predict_action, obs)
        for name, policy in (("diffusion", diffusion), ("idp", idp))
    }
    times = interleaved("inference, diffusion", tasks, rounds, repeats={"idp": 20})
    return row(
        f"Diffusion Policy ({diffusion.num_inference_steps} DDPM steps) / IDP, predict_action, batch 1",
        ratio(times["diffusion"], times["idp"]),
        "x",
        detail=f"Diffusion Policy {1e3 * times['diffusion'].median:.0f} ms, IDP {1e3 * times['idp'].median:.2f} ms",
    )


def run(quick: bool = False) -> list[dict]:
    rows = [_overhead(backbone, 100 if quick else 500) for backbone in BACKBONES]
    return [*rows, _diffusion(3 if quick else 7)]
