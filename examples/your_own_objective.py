"""Write a new objective as one class and train it with every backbone.

    python examples/your_own_objective.py

An objective is a dataclass of options, how to compute the loss, and how to sample an action. Everything else
(backbones, encoders, normalisation, checkpoints, evaluation) works unchanged. With `train.py`:

    python train.py --config-name=train_regression_mlp_lowdim preset=debug \
        policy._target_=examples.your_own_objective.HuberPolicy +policy.delta=0.05
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from torch import Tensor, nn

from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.mip.networks import ChiTransformer, ChiUnet, ResidualMLP, StateEncoder
from idp_workspace.options import Above
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.policy.regression import RegressionOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuberOptions(RegressionOptions):
    """Options of the objective, beside those of regression, whose config it uses; construction checks them."""

    delta: Annotated[float, Above(0)] = 0.1
    loss_scale: float = 1.0


class HuberPolicy(GeneratorPolicy):
    """L = scale mean huber(f(o, 0, 0) - a*): quadratic below `delta`, linear above. It acts with the same call."""

    Options = HuberOptions
    options: HuberOptions

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        """Compute the scalar loss from the encoded observation and normalised expert chunks (B, H, D)."""
        prediction = self.generator(cond, self.zeros(len(actions)), 0.0)
        return self.options.loss_scale * nn.functional.huber_loss(prediction, actions, delta=self.options.delta)

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        """Generate normalised chunks (batch, H, D)."""
        return self.generator(cond, self.zeros(batch), 0.0)


OBS_DIM, ACTION_DIM, HORIZON, N_OBS_STEPS, WIDTH = 3, 2, 8, 2, 32


def backbones() -> dict[str, tuple[nn.Module, dict[str, bool]]]:
    """Small networks of each kind, and how each takes the observation."""
    sizes = {"horizon": HORIZON, "n_obs_steps": N_OBS_STEPS, "n_emb": WIDTH}
    return {
        "mlp": (ResidualMLP(ACTION_DIM, ACTION_DIM, n_layer=2, p_drop=0.0, **sizes), {"obs_as_cond": True}),
        "transformer": (ChiTransformer(ACTION_DIM, ACTION_DIM, n_layer=2, n_head=2, **sizes), {"obs_as_cond": True}),
        "unet": (
            ChiUnet(ACTION_DIM, N_OBS_STEPS * WIDTH, WIDTH, WIDTH, down_dims=(16, 32)),
            {"obs_as_global_cond": True},
        ),
    }


def make_batch(size: int) -> dict[str, Tensor]:
    """Expert chunks that are a function of the observation."""
    obs = torch.rand(size, N_OBS_STEPS, OBS_DIM) * 2 - 1
    times = torch.linspace(0, 1, HORIZON)[:, None]
    action = obs[:, -1:, :2] + times * obs[:, -1:, 2:].expand(-1, HORIZON, ACTION_DIM)
    return {"obs": obs, "action": action}


def main(steps: int = 60) -> dict[str, tuple[float, float]]:
    """Train the objective with each backbone; return the loss before and after, on the same batch."""
    torch.manual_seed(0)
    data = make_batch(2048)
    normalizer = LinearNormalizer()
    normalizer.fit({"obs": data["obs"], "action": data["action"]})
    losses = {}
    for name, (model, conditioning) in backbones().items():
        policy = HuberPolicy(
            model=model,
            obs_encoder=StateEncoder(OBS_DIM, N_OBS_STEPS, WIDTH),
            obs_dim=OBS_DIM,
            action_dim=ACTION_DIM,
            horizon=HORIZON,
            n_obs_steps=N_OBS_STEPS,
            n_action_steps=4,
            delta=0.05,
            **conditioning,
        )
        policy.set_normalizer(normalizer)
        optimizer = policy.get_optimizer(learning_rate=3e-3)
        before = policy.compute_loss(data).item()
        for _ in range(steps):
            optimizer.zero_grad()
            policy.compute_loss(make_batch(128)).backward()
            optimizer.step()
        losses[name] = (before, policy.eval().compute_loss(data).item())
        action = policy.predict_action({"obs": data["obs"][:1]})["action"]
        print(f"{name:12s} loss {before:.4f} -> {losses[name][1]:.4f}, action {tuple(action.shape)}")
    return losses


if __name__ == "__main__":
    main()
