"""Affine normalisation y = x * scale + offset, fitted per field and saved in the policy's state dict.

A field's parameters are `offset` (D,), `scale` (D,) and `input_stats.{max,mean,min,std}` (D,). D is the product of the
last `last_n_dims` dimensions of the data.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.model.common.dict_of_tensor_mixin import DictOfTensorMixin

DEFAULT_FIELD = "_default"

Array = np.ndarray | torch.Tensor


class LinearNormalizer(DictOfTensorMixin):
    """One normaliser per field of a dict; a bare array is the single field `_default`."""

    @torch.no_grad()
    def fit(
        self,
        data: Array | Mapping[str, Array],
        last_n_dims: int = 1,
        dtype: torch.dtype = torch.float32,
        mode: str = "limits",
        output_max: float = 1.0,
        output_min: float = -1.0,
        range_eps: float = 1e-4,
        fit_offset: bool = True,
    ) -> None:
        """Fit each field of `data`, a dict of (..., D) arrays or tensors (or one such array).

        The modes 'limits' and 'gaussian' are upstream's: the range to [output_min, output_max], or mean 0 and deviation
        1; a dimension whose range or deviation is below range_eps is only shifted. 'min_max' is MIP's: every range,
        however small, to [output_min, output_max]; a constant dimension to output_min. It always fits an offset.
        """
        fields = data if isinstance(data, Mapping) else {DEFAULT_FIELD: data}
        for key, value in fields.items():
            self.params_dict[key] = _fit(
                value, last_n_dims, dtype, mode, output_max, output_min, range_eps, fit_offset, key
            )

    def __init__(self, params_dict: nn.ParameterDict | None = None):
        super().__init__(params_dict)
        self._fields: dict[str, SingleFieldLinearNormalizer] = {}

    def __getitem__(self, key: str) -> "SingleFieldLinearNormalizer":
        fitted = self.params_dict
        if key not in fitted:
            known = ", ".join(fitted.keys()) or "none"
            raise ConfigError(
                f"The normaliser has no field {key!r}; fitted fields: {known}. Fit it on data with that key "
                f"(dataset.get_normalizer() and policy.set_normalizer()) before it is used."
            )
        field, parameters = self._fields.get(key), fitted[key]
        if field is None or field.params_dict is not parameters:  # making a module takes longer than using it
            field = self._fields[key] = SingleFieldLinearNormalizer(parameters)
        return field

    def __setitem__(self, key: str, value: "SingleFieldLinearNormalizer") -> None:
        self.params_dict[key] = value.params_dict

    def normalize(self, x: Any) -> Any:
        """Normalise x (..., D), or a dict of such fields, and keep the shapes."""
        if isinstance(x, dict):
            return {key: self[key].normalize(value) for key, value in x.items()}
        return self[DEFAULT_FIELD].normalize(x)

    def unnormalize(self, x: Any) -> Any:
        """The inverse of `normalize`."""
        if isinstance(x, dict):
            return {key: self[key].unnormalize(value) for key, value in x.items()}
        return self[DEFAULT_FIELD].unnormalize(x)

    def forward(self, x: Any) -> Any:
        return self.normalize(x)

    def get_input_stats(self) -> dict:
        """{field: {max, mean, min, std: (D,)}} of the fitted data; without the outer level for a bare array."""
        return self._per_field(SingleFieldLinearNormalizer.get_input_stats)

    def get_output_stats(self) -> dict:
        """The statistics of `get_input_stats` for the normalised data."""
        return self._per_field(SingleFieldLinearNormalizer.get_output_stats)

    def _per_field(self, stats_of: Callable[["SingleFieldLinearNormalizer"], dict]) -> dict:
        if len(self.params_dict) == 1 and DEFAULT_FIELD in self.params_dict:
            return stats_of(self[DEFAULT_FIELD])
        return {key: stats_of(self[key]) for key in self.params_dict.keys()}


class SingleFieldLinearNormalizer(DictOfTensorMixin):
    """The normaliser of one (..., D) field."""

    @torch.no_grad()
    def fit(
        self,
        data: Array,
        last_n_dims: int = 1,
        dtype: torch.dtype = torch.float32,
        mode: str = "limits",
        output_max: float = 1.0,
        output_min: float = -1.0,
        range_eps: float = 1e-4,
        fit_offset: bool = True,
    ) -> None:
        """Fit on `data` (..., D)."""
        self.params_dict = _fit(
            data, last_n_dims, dtype, mode, output_max, output_min, range_eps, fit_offset, DEFAULT_FIELD
        )

    @classmethod
    def create_fit(cls, data: Array, **kwargs: Any) -> "SingleFieldLinearNormalizer":
        """Fit a new normaliser on `data`; keyword arguments as in `fit`."""
        normalizer = cls()
        normalizer.fit(data, **kwargs)
        return normalizer

    @classmethod
    def create_manual(
        cls, scale: Array, offset: Array, input_stats_dict: dict[str, Array]
    ) -> "SingleFieldLinearNormalizer":
        """scale, offset and each of input_stats_dict's max, mean, min, std: (D,)."""
        scale, offset = _as_tensor(scale).flatten(), _as_tensor(offset).flatten()
        stats = {key: _as_tensor(value).flatten() for key, value in input_stats_dict.items()}
        for name, value in {"offset": offset, **stats}.items():
            if value.shape != scale.shape or value.dtype != scale.dtype:
                raise ConfigError(
                    f"{name} is {tuple(value.shape)} {value.dtype}, but scale is {tuple(scale.shape)} {scale.dtype}."
                )
        return cls(_pack(scale, offset, stats, requires_grad=True))

    @classmethod
    def create_identity(cls, dtype: torch.dtype = torch.float32) -> "SingleFieldLinearNormalizer":
        """y = x for data of any size."""
        one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
        return cls.create_manual(one, zero, {"min": -one, "max": one, "mean": zero, "std": one})

    def normalize(self, x: Array) -> torch.Tensor:
        """Normalise an array or tensor (..., D), in the normaliser's dtype and on its device."""
        x, scale, offset = self._operands(x)
        if x.shape[-1:] == scale.shape:
            return x * scale + offset
        return (x.reshape(-1, len(scale)) * scale + offset).reshape(x.shape)

    def unnormalize(self, x: Array) -> torch.Tensor:
        """The inverse of `normalize`."""
        x, scale, offset = self._operands(x)
        if x.shape[-1:] == scale.shape:
            return (x - offset) / scale
        return ((x.reshape(-1, len(scale)) - offset) / scale).reshape(x.shape)

    def forward(self, x: Array) -> torch.Tensor:
        return self.normalize(x)

    def get_input_stats(self) -> dict:
        """{max, mean, min, std: (D,)} of the fitted data."""
        self._require_fitted()
        return dict(self.params_dict["input_stats"].items())

    def get_output_stats(self) -> dict:
        """{max, mean, min, std: (D,)} of the normalised data."""
        stats = self.get_input_stats()
        std = stats.pop("std") * self.params_dict["scale"].abs()
        return {**dict_apply(stats, self.normalize), "std": std}

    def _operands(self, x: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._require_fitted()
        parameters = self.params_dict
        scale, offset = parameters["scale"], parameters["offset"]
        x = _as_tensor(x).to(device=scale.device, dtype=scale.dtype)
        if x.shape[-1:] != scale.shape and x.numel() % len(scale):
            raise ConfigError(f"Data of shape {tuple(x.shape)} does not fit a normaliser of size {len(scale)}.")
        return x, scale, offset

    def _require_fitted(self) -> None:
        if "scale" not in self.params_dict:
            raise ConfigError("The normaliser was never fitted: call fit() or load its state dict first.")


def _as_tensor(x: Array) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(np.asarray(x))


def _pack(
    scale: torch.Tensor, offset: torch.Tensor, stats: dict[str, torch.Tensor], requires_grad: bool
) -> nn.ParameterDict:
    def parameters(tensors: dict[str, torch.Tensor]) -> nn.ParameterDict:
        return nn.ParameterDict(
            {name: nn.Parameter(tensors[name].clone(), requires_grad=requires_grad) for name in sorted(tensors)}
        )

    params_dict = parameters({"offset": offset, "scale": scale})
    params_dict["input_stats"] = parameters(stats)
    return params_dict


def _fit(
    data: Array,
    last_n_dims: int,
    dtype: torch.dtype,
    mode: str,
    output_max: float,
    output_min: float,
    range_eps: float,
    fit_offset: bool,
    name: str,
) -> nn.ParameterDict:
    """Fit on data (..., D) over `last_n_dims` trailing dimensions; 0 gives one scalar normaliser."""
    if mode not in ("limits", "gaussian", "min_max"):
        raise ConfigError(f"Unknown normaliser mode {mode!r}: use 'limits', 'gaussian' or 'min_max'.")
    if output_max <= output_min or (mode == "limits" and not fit_offset and not output_min < 0 < output_max):
        raise ConfigError(
            f"The output range [{output_min}, {output_max}] is empty, or excludes 0 while fit_offset is off."
        )
    data = _as_tensor(data).to(dtype)
    size = math.prod(data.shape[data.ndim - last_n_dims :])
    data = data.reshape(-1, size)  # (N, D)
    if len(data) == 0 or not torch.isfinite(data).all():
        raise DataError(f"Cannot fit a normaliser for {name!r}: the data is empty, or holds NaN or infinity.")

    stats = {"min": data.amin(0), "max": data.amax(0), "mean": data.mean(0), "std": data.std(0)}

    if mode == "min_max":
        input_range = stats["max"] - stats["min"]
        scale = (output_max - output_min) / torch.where(input_range == 0, 1, input_range)
        offset = output_min - scale * stats["min"]
    # Upstream's modes: a nearly constant dimension keeps scale 1, or its rounding errors would be amplified.
    elif mode == "limits" and fit_offset:
        input_range = stats["max"] - stats["min"]
        flat = input_range < range_eps
        scale = (output_max - output_min) / torch.where(flat, output_max - output_min, input_range)
        offset = torch.where(flat, (output_max + output_min) / 2 - stats["min"], output_min - scale * stats["min"])
    elif mode == "limits":
        output_abs = min(abs(output_min), abs(output_max))
        input_abs = torch.maximum(stats["min"].abs(), stats["max"].abs())
        scale = output_abs / torch.where(input_abs < range_eps, output_abs, input_abs)
        offset = torch.zeros_like(scale)
    else:
        moving = stats["std"] >= range_eps  # False also for the undefined std of a single sample
        scale = 1 / torch.where(moving, stats["std"], 1)
        offset = -stats["mean"] * scale if fit_offset else torch.zeros_like(scale)
    return _pack(scale, offset, stats, requires_grad=False)
