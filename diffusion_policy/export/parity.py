"""Comparison of an exported graph with its policy, on observations of the dataset."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.config_util import build
from diffusion_policy.common.errors import UserError
from diffusion_policy.export.signature import Signature
from diffusion_policy.policy.graph_policy import as_bytes
from diffusion_policy.storage.safe_config import checked_config

#: Largest difference of an action, as a share of its range in the dataset.
TOLERANCE = 1e-4
COUNT = 64
DRAWN = "drawn between the dataset's smallest and largest values: the dataset is not here"


@dataclasses.dataclass(frozen=True)
class Parity:
    """The largest difference of a predicted action, as a share of its range, and where it was looked for."""

    largest_error: float
    observations: int
    source: str

    @property
    def holds(self) -> bool:
        return self.largest_error <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.largest_error:.1e} of the action range, over {self.observations} observations {self.source}"


def compare(policy: Any, exported: Any, signature: Signature, cfg: dict[str, Any], where: str) -> Parity:
    """Compare two policies on recorded observations, in one batch and one by one."""
    obs, source = recorded(signature, cfg, where)
    errors = [difference(policy, exported, obs, signature)]
    errors += [
        difference(policy, exported, {key: value[i : i + 1] for key, value in obs.items()}, signature) for i in range(4)
    ]
    return Parity(max(errors), len(next(iter(obs.values()))), source)


@torch.no_grad()
def difference(policy: Any, exported: Any, obs: dict[str, torch.Tensor], signature: Signature) -> float:
    """Return the largest difference between predicted actions, both from the same noise."""
    predictions = []
    for each in (policy, exported):
        torch.manual_seed(0)
        each.reset()
        predictions.append(each.predict_action(obs)["action_pred"].double())
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (signature.action.low, signature.action.high))
    span = torch.where(high > low, high - low, 1.0)
    return float(((predictions[0] - predictions[1]).abs() / span).max())


def recorded(signature: Signature, cfg: dict[str, Any], where: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return observations spread over the run's dataset, and where they are from; drawn ones if it is not here."""
    fields = [field for field in signature.inputs if field.kind != "noise"]
    try:
        section = checked_config(cfg, where, ("task.dataset",))
        dataset = build(OmegaConf.create(section), "task.dataset")
    except UserError:
        torch.manual_seed(0)
        return {field.name: field.example(COUNT) for field in fields}, DRAWN
    rows = torch.linspace(0, len(dataset) - 1, min(COUNT, len(dataset))).long().tolist()
    seen = [dataset[row]["obs"] for row in rows]
    out = {}
    for field in fields:
        values = torch.stack([torch.as_tensor(obs[field.name] if isinstance(obs, dict) else obs) for obs in seen])
        out[field.name] = as_bytes(field.name, values) if field.kind == "image" else values
    return {name: value[:, : signature.n_obs_steps] for name, value in out.items()}, "of the dataset"
