"""A module whose parameters are a nested dict with keys that come from data or from a checkpoint."""

from typing import Any

import torch
from torch import nn


class DictOfTensorMixin(nn.Module):
    """Holds `params_dict`, a nested `nn.ParameterDict`. Loading a state dict creates the keys found in it."""

    def __init__(self, params_dict: nn.ParameterDict | None = None):
        super().__init__()
        self.params_dict = nn.ParameterDict() if params_dict is None else params_dict

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _load_from_state_dict(
        self, state_dict: dict[str, torch.Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        prefix = prefix + "params_dict."
        tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if not tensors:
            return  # keep the present parameters; torch reports them as missing from the state dict

        present = next(self.parameters(), None)
        params_dict = nn.ParameterDict()
        for key, value in tensors.items():
            *parents, name = key.split(".")
            node = params_dict
            for parent in parents:
                if parent not in node:
                    node[parent] = nn.ParameterDict()
                node = node[parent]
            # Clone so that the checkpoint's memory is not shared. Keep the device this module was moved to.
            value = value.detach().clone()
            node[name] = nn.Parameter(value if present is None else value.to(present.device), requires_grad=False)
        self.params_dict = params_dict
