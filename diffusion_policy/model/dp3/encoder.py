"""DP3's encoder of a point cloud and the robot's state."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from einops import reduce, repeat
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin

IMAGINED = "imagin_robot"  # points of the robot's surface, computed from its joints; DP3's spelling


class PointNetEncoder(nn.Module):
    """Points (N, P, in_channels) -> (N, out_channels): MLP per point, maximum over points, projection with LayerNorm.

    In each channel only the point that attains the maximum receives a gradient. When gradients are recorded, a first
    pass without recording finds these critical points, and only they (about a tenth) pass through the MLP again. The
    gradients are the same, at half the time and a fraction of the memory.
    """

    def __init__(self, in_channels: int = 3, out_channels: int = 64, channels: Sequence[int] = (64, 128, 256)):
        super().__init__()
        widths = [in_channels, *channels]
        layers = [
            layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.LayerNorm(o), nn.ReLU(inplace=True))
        ]
        self.mlp = nn.Sequential(*layers)
        self.final_projection = nn.Sequential(nn.Linear(widths[-1], out_channels), nn.LayerNorm(out_channels))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            points = self.critical_points(points)
        return self.final_projection(reduce(self.mlp(points), "n p c -> n c", "max"))

    @torch.no_grad()
    def critical_points(self, points: torch.Tensor) -> torch.Tensor:
        """Select from each cloud (N, P, C) the points that attain the maximum of a channel -> (N, K, C).

        K is the largest count in the batch; clouds with fewer critical points are filled up with others.
        """
        features = self.mlp(points)  # (N, P, channels)
        top = features.amax(dim=1, keepdim=True)
        wins = ((features == top) & (top > 0)).any(dim=2)  # (N, P); a channel that is 0 everywhere has no gradient
        count = int(wins.sum(dim=1).max().clamp(min=1))
        rows = wins.float().topk(count, dim=1).indices
        return points.gather(1, repeat(rows, "n k -> n k c", c=points.shape[-1]))


class DP3Encoder(ModuleAttrMixin):
    """{key: (N, *shape)} -> (N, out_channels + state_channels[-1]), each frame independently.

    Args:
        shape_meta: {'obs': {'point_cloud': {shape: (P, 3 or more), type: point_cloud}, 'agent_pos': {shape: (D,)}}},
            and optionally 'imagin_robot' (Q, 3), whose points are added to the cloud.
        use_pc_color: use the first six numbers of a point, not only its position.
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
                f"this encoder observes point_cloud, agent_pos and optionally {IMAGINED}; "
                f"shape_meta has {', '.join(shapes)}."
            )
        self.point_width = 6 if use_pc_color else 3
        for key, shape in clouds.items():
            if len(shape) != 2 or shape[1] < self.point_width:
                raise ConfigError(
                    f"shape_meta.obs.{key}.shape must be (points, at least {self.point_width} numbers), "
                    f"not {list(shape)}."
                )
        self.cloud_keys = list(clouds)
        self.output_dim = out_channels + state_channels[-1]
        self.extractor = PointNetEncoder(self.point_width, out_channels, channels)
        widths = [*shapes["agent_pos"], *state_channels]
        layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.state_mlp = nn.Sequential(*layers[:-1])

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        points = torch.cat([obs[key][..., : self.point_width] for key in self.cloud_keys], dim=1)
        return torch.cat([self.extractor(points), self.state_mlp(obs["agent_pos"])], dim=-1)

    def output_shape(self) -> tuple[int, ...]:
        """(F,)."""
        return (self.output_dim,)
