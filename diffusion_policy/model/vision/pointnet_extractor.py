"""DP3's encoder of a point cloud and a robot's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin

IMAGINED = "imagin_robot"  # points of the robot's surface, computed from its joints; DP3's spelling


class PointNetEncoder(nn.Module):
    """Points (N, P, in_channels) -> (N, out_channels): an MLP for each point, the maximum over points, a projection with LayerNorm.

    The maximum of a channel is one point's, so no other point has a gradient through it. Where gradients are recorded, the points that win
    a channel are found without recording, and only they, a tenth of all, go through again: the same gradients for half the time and a
    fraction of the memory.
    """

    def __init__(self, in_channels: int = 3, out_channels: int = 64, channels: Sequence[int] = (64, 128, 256)):
        super().__init__()
        widths = [in_channels, *channels]
        self.mlp = nn.Sequential(
            *[
                layer
                for i, o in zip(widths, widths[1:])
                for layer in (nn.Linear(i, o), nn.LayerNorm(o), nn.ReLU(inplace=True))
            ]
        )
        self.final_projection = nn.Sequential(nn.Linear(widths[-1], out_channels), nn.LayerNorm(out_channels))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            points = self.critical_points(points)
        return self.final_projection(self.mlp(points).amax(dim=1))

    @torch.no_grad()
    def critical_points(self, points: torch.Tensor) -> torch.Tensor:
        """(N, P, C) -> (N, K, C): of each cloud the points that have the maximum of a channel, and others, so that all have the same K."""
        features = self.mlp(points)  # (N, P, channels)
        top = features.amax(dim=1, keepdim=True)
        wins = ((features == top) & (top > 0)).any(dim=2)  # (N, P); a channel that is 0 everywhere has no gradient
        count = int(wins.sum(dim=1).max().clamp(min=1))
        rows = wins.float().topk(count, dim=1).indices
        return points.gather(1, rows[..., None].expand(-1, -1, points.shape[-1]))


class DP3Encoder(ModuleAttrMixin):
    """{key: (N, *shape)} -> (N, out_channels + state_channels[-1]), each frame for itself.

    shape_meta: {'obs': {'point_cloud': {shape: (P, 3 or more), type: point_cloud}, 'agent_pos': {shape: (D,)}}}, and 'imagin_robot' (Q, 3)
    if there is one, whose points join the cloud. Of a point, its position is used, with use_pc_color its first six numbers.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        out_channels: int = 64,
        channels: Sequence[int] = (64, 128, 256),
        state_channels: Sequence[int] = (64, 64),
        use_pc_color: bool = False,
    ):
        super().__init__()
        shapes = {key: tuple(entry["shape"]) for key, entry in shape_meta["obs"].items()}
        clouds = {key: shape for key, shape in shapes.items() if key in ("point_cloud", IMAGINED)}
        if {*shapes} - {*clouds} != {"agent_pos"} or "point_cloud" not in clouds:
            raise ConfigError(
                f"this encoder observes point_cloud, agent_pos and perhaps {IMAGINED}; shape_meta has {', '.join(shapes)}."
            )
        self.point_width = 6 if use_pc_color else 3
        for key, shape in clouds.items():
            if len(shape) != 2 or shape[1] < self.point_width:
                raise ConfigError(
                    f"shape_meta.obs.{key}.shape must be (points, at least {self.point_width} numbers), not {list(shape)}."
                )
        self.cloud_keys = list(clouds)
        self.output_dim = out_channels + state_channels[-1]
        self.extractor = PointNetEncoder(self.point_width, out_channels, channels)
        widths = [*shapes["agent_pos"], *state_channels]
        layers = [layer for i, o in zip(widths, widths[1:]) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.state_mlp = nn.Sequential(*layers[:-1])

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        points = torch.cat([obs[key][..., : self.point_width] for key in self.cloud_keys], dim=1)
        return torch.cat([self.extractor(points), self.state_mlp(obs["agent_pos"])], dim=-1)

    def output_shape(self) -> tuple[int, ...]:
        """(F,)"""
        return (self.output_dim,)
