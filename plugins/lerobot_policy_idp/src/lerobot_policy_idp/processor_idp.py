"""Normalisation of IDP in LeRobot: its own steps, with the statistics of the dataset."""

from __future__ import annotations

from typing import Any

import torch
from lerobot.configs import NormalizationMode
from lerobot.processor import make_default_pre_post_processors

from lerobot_policy_idp.configuration_idp import IDPConfig

#: What each kind of normalisation needs to know.
NEEDED = {
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}


def make_idp_pre_post_processors(
    config: IDPConfig, dataset_stats: dict[str, dict[str, torch.Tensor]] | None = None
) -> tuple[Any, Any]:
    """Return what normalises batches for the policy, and what turns its actions back into the units of the dataset.

    Raises:
        ValueError: the statistics of a feature are missing. LeRobot would leave it as it is.
    """
    return make_default_pre_post_processors(config, usable(config, dataset_stats or {}))


def usable(config: IDPConfig, stats: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the statistics with the range of a constant number as 1.

    LeRobot divides by 1e-8 then: a robot whose joint moves by a hair for the first time would leave the data by far.
    """
    stats = {key: dict(values) for key, values in stats.items()}
    modes = {str(getattr(k, "value", k)): mode for k, mode in config.normalization_mapping.items()}
    for key, feature in {**(config.input_features or {}), **(config.output_features or {})}.items():
        needed = NEEDED.get(modes.get(feature.type.value, NormalizationMode.IDENTITY), ())
        missing = [name for name in needed if name not in stats.get(key, {})]
        if missing:
            raise ValueError(
                f"the dataset has no statistics {', '.join(missing)} of {key}, which its normalisation needs: compute "
                "them, or set policy.normalization_mapping"
            )
        if not needed:
            continue
        low, high = (torch.as_tensor(stats[key][name], dtype=torch.float32) for name in needed)
        shape = tuple(feature.shape)
        if not all(tuple(value.shape) == shape and bool(value.isfinite().all()) for value in (low, high)):
            raise ValueError(
                f"the statistics {', '.join(needed)} of {key} must be finite and of shape {shape}, got "
                f"{tuple(low.shape)} and {tuple(high.shape)}"
            )
        first, second = needed
        spread = high if first == "mean" else high - low
        fixed = torch.where(spread == 0, 1.0, spread)
        stats[key] |= {first: low, second: fixed if first == "mean" else torch.where(spread == 0, low + 1, high)}
    return stats
