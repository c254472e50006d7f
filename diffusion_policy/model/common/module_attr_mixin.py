"""Device and dtype of a module, read from its parameters."""

import torch
from torch import nn


class ModuleAttrMixin(nn.Module):
    """Adds `device` and `dtype` to a module, also to one without weights.

    The zero-length `_dummy_variable` follows `.to()` when the module has no other parameter. It is part of every state
    dict of this family, so its name and shape are fixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dummy_variable = nn.Parameter(torch.empty(0))

    @property
    def device(self) -> torch.device:
        return self._dummy_variable.device  # the first parameter, without a search

    @property
    def dtype(self) -> torch.dtype:
        return self._dummy_variable.dtype
