"""Which entries of a trajectory are given (True) and which are generated (False)."""

from collections.abc import Sequence

import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin


class DummyMaskGenerator(ModuleAttrMixin):
    """A mask that marks every entry as given."""

    @torch.no_grad()
    def forward(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bool, device=self.device)


class LowdimMaskGenerator(ModuleAttrMixin):
    """Masks for trajectories [action | obs]: the first n observation steps are given.

    n is `max_n_obs_steps`, or uniform in 1 .. max_n_obs_steps without `fix_obs_steps`. With `action_visible`, the
    actions of the first n - 1 steps are given, too.
    """

    def __init__(
        self,
        action_dim: int,
        obs_dim: int,
        max_n_obs_steps: int = 2,
        fix_obs_steps: bool = True,
        action_visible: bool = False,
    ):
        super().__init__()
        self.action_dim = action_dim
        self.obs_dim = obs_dim
        self.max_n_obs_steps = max_n_obs_steps
        self.fix_obs_steps = fix_obs_steps
        self.action_visible = action_visible

    @torch.no_grad()
    def forward(self, shape: Sequence[int], seed: int | None = None) -> torch.Tensor:
        """shape = (B, T, action_dim + obs_dim) -> bool mask of that shape.

        Random lengths are drawn from `seed`, or from torch's global generator.
        """
        batch, n_step, dim = shape
        if dim != self.action_dim + self.obs_dim:
            raise ConfigError(
                f"The trajectory is {dim} wide, but action_dim + obs_dim = {self.action_dim} + {self.obs_dim}."
            )
        if self.fix_obs_steps:
            n_obs = torch.full((batch, 1, 1), self.max_n_obs_steps, device=self.device)
        else:
            generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
            n_obs = torch.randint(1, self.max_n_obs_steps + 1, (batch, 1, 1), generator=generator, device=self.device)

        step = torch.arange(n_step, device=self.device)[None, :, None]
        is_action = torch.arange(dim, device=self.device) < self.action_dim
        mask = (step < n_obs) & ~is_action
        if self.action_visible:
            mask = mask | ((step < n_obs - 1) & is_action)
        return mask
