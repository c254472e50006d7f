"""Point clouds without a simulator: back-projection, crop, sampling, the dataset, DP3's encoder, the policies on it."""

import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.point_cloud import View, back_project, farthest_points, points_in_view
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.point_cloud_dataset import PointCloudDataset
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.dp3.encoder import DP3Encoder, PointNetEncoder
from diffusion_policy.workspace.open_loop import can_replay, evaluate_open_loop, replay
from idp_workspace.policy import IDPPolicy
from tests.util import write_point_clouds

EVERYWHERE = View(np.eye(3), np.zeros(3), np.full(3, -np.inf), np.full(3, np.inf))


def shape_meta(points=8, state=9, action=4, **more):
    return {
        "obs": {
            "point_cloud": {"shape": [points, 3], "type": "point_cloud"},
            "agent_pos": {"shape": [state], "type": "low_dim"},
            **more,
        },
        "action": {"shape": [action]},
    }


# ---------------------------------------------------------------------- geometry
def test_a_pixel_is_back_projected_along_its_ray():
    depth = np.full((4, 6), 2.0, np.float32)
    points = back_project(depth, fovy=90).reshape(4, 6, 3)  # the focal length is half the height: 2 pixels
    assert np.allclose(points[2, 3], (0, 0, 2))
    assert np.allclose(points[0, 0], (-3, -2, 2)) and np.allclose(points[3, 5], (2, 1, 2))
    assert points.dtype == np.float32


def test_the_view_turns_moves_and_crops():
    depth = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    flip = View(np.diag([1.0, -1.0, -1.0]), np.array([0, 0, 5.0]), np.full(3, -100.0), np.array([100, 100, 0.5]))
    points, pixels = points_in_view(depth, 60, flip)
    assert pixels.tolist() == [4, 5, 6, 7, 8]  # 5 - depth < 0.5
    assert np.allclose(points, back_project(depth, 60)[pixels] * [1, -1, -1] + [0, 0, 5])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_a_broken_renderer_s_depth_is_refused(bad):
    depth = np.ones((4, 4), np.float32)
    depth[1, 2] = bad
    with pytest.raises(DataError, match="1 of 16 pixels.*MUJOCO_GL"):
        points_in_view(depth, 60, EVERYWHERE)


def test_an_empty_crop_is_an_error():
    nowhere = View(np.eye(3), np.zeros(3), np.full(3, 1e3), np.full(3, 2e3))
    points, _ = points_in_view(np.ones((4, 4), np.float32), 60, nowhere)
    with pytest.raises(DataError, match="holds no point"):
        farthest_points(points, 8)
    with pytest.raises(ConfigError, match="at least one point"):
        farthest_points(np.zeros((3, 3), np.float32), 0)


def test_farthest_points_cover_as_well_as_the_exact_algorithm():
    pytest.importorskip("fpsample")
    points = np.random.default_rng(0).uniform(size=(2000, 3)).astype(np.float32)

    def radius(chosen):
        return np.linalg.norm(points[:, None] - points[None, chosen], axis=2).min(axis=1).max()

    exact, distance = [0], np.full(len(points), np.inf)
    for _ in range(127):
        distance = np.minimum(distance, np.linalg.norm(points - points[exact[-1]], axis=1))
        exact.append(int(distance.argmax()))
    chosen = farthest_points(points, 128)
    assert len(set(chosen.tolist())) == 128 and np.array_equal(chosen, farthest_points(points, 128))
    assert radius(chosen) < 1.05 * radius(exact) < 0.6 * radius(np.arange(128))
    # The first ones are a sample of their own: a stored cloud can be cut short.
    assert np.array_equal(farthest_points(points, 64), chosen[:64])


def test_too_few_points_are_repeated():
    points = np.random.default_rng(0).uniform(size=(5, 3)).astype(np.float32)
    assert farthest_points(points, 12).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    # ... which the encoder does not notice.
    encoder = PointNetEncoder(3, 8, (16, 16)).eval()
    with torch.no_grad():
        few, many = (encoder(torch.from_numpy(points[farthest_points(points, n)])[None]) for n in (5, 12))
    assert torch.allclose(few, many, atol=1e-6)


# ---------------------------------------------------------------------- encoder
@pytest.mark.parametrize("dead", [False, True])
def test_the_gradient_through_the_points_that_win_is_the_gradient_through_all(dead):
    torch.manual_seed(0)
    encoder = PointNetEncoder(3, 16, (16, 32)).double()
    if dead:  # a channel that is 0 for every point
        torch.nn.init.constant_(encoder.mlp[-2].bias[3:4], -100.0)
    points = torch.randn(6, 200, 3, dtype=torch.float64)

    def gradients(features):
        encoder.zero_grad()
        (features.sin() * torch.arange(16)).sum().backward()
        return [p.grad.clone() for p in encoder.parameters()]

    plain = gradients(encoder.final_projection(encoder.mlp(points).amax(dim=1)))
    ours = gradients(encoder(points))
    assert encoder.critical_points(points).shape[1] < 60
    for a, b in zip(plain, ours, strict=False):
        assert torch.allclose(a, b, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(encoder(points), encoder.final_projection(encoder.mlp(points).amax(dim=1)))


def test_the_encoder_is_dp3_s():
    encoder = DP3Encoder(shape_meta(512, 24))
    sizes = {name: tuple(value.shape) for name, value in encoder.state_dict().items() if name.endswith("weight")}
    assert sizes == {
        "extractor.mlp.0.weight": (64, 3),
        "extractor.mlp.1.weight": (64,),
        "extractor.mlp.3.weight": (128, 64),
        "extractor.mlp.4.weight": (128,),
        "extractor.mlp.6.weight": (256, 128),
        "extractor.mlp.7.weight": (256,),
        "extractor.final_projection.0.weight": (64, 256),
        "extractor.final_projection.1.weight": (64,),
        "state_mlp.0.weight": (64, 24),
        "state_mlp.2.weight": (64, 64),
    }
    assert encoder.output_shape() == (128,)
    obs = {"point_cloud": torch.randn(3, 512, 3), "agent_pos": torch.randn(3, 24)}
    out = encoder(obs)
    shuffled = encoder({**obs, "point_cloud": obs["point_cloud"][:, torch.randperm(512)]})
    assert out.shape == (3, 128) and torch.allclose(out, shuffled, atol=1e-5)


def test_imagined_points_join_the_cloud():
    meta = shape_meta(8, 9, 4, imagin_robot={"shape": [5, 3], "type": "point_cloud"})
    encoder = DP3Encoder(meta).eval()
    obs = {"point_cloud": torch.randn(2, 8, 3), "imagin_robot": torch.randn(2, 5, 3), "agent_pos": torch.randn(2, 9)}
    with torch.no_grad():
        assert torch.allclose(
            encoder(obs)[:, :64], encoder.extractor(torch.cat([obs["point_cloud"], obs["imagin_robot"]], dim=1))
        )


@pytest.mark.parametrize(
    "obs, message",
    [
        ({"point_cloud": {"shape": [8, 3]}}, "observes point_cloud, agent_pos"),
        (
            {"point_cloud": {"shape": [8, 3]}, "agent_pos": {"shape": [9]}, "image": {"shape": [3, 8, 8]}},
            "observes point_cloud, agent_pos",
        ),
        ({"point_cloud": {"shape": [8, 2]}, "agent_pos": {"shape": [9]}}, "at least 3 numbers"),
    ],
)
def test_observations_the_encoder_cannot_take_are_refused(obs, message):
    with pytest.raises(ConfigError, match=message):
        DP3Encoder({"obs": obs})


def test_one_block_a_level_is_the_small_variant_and_two_are_as_before():
    torch.manual_seed(0)
    small = ConditionalUnet1D(
        4,
        global_cond_dim=256,
        diffusion_step_embed_dim=128,
        down_dims=(128, 256, 384),
        kernel_size=5,
        cond_predict_scale=True,
        blocks_per_level=1,
    )
    assert {name.split(".")[2] for name in small.state_dict() if name.startswith(("down_modules", "up_modules"))} == {
        "0",
        "1",
    }
    assert len(small.mid_modules) == 1 and small(torch.randn(2, 4, 4), 3, global_cond=torch.randn(2, 256)).shape == (
        2,
        4,
        4,
    )
    with pytest.raises(ConfigError, match="at least 1"):
        ConditionalUnet1D(4, blocks_per_level=0)


# ---------------------------------------------------------------------- dataset
def test_held_out_clouds_are_replayed_open_loop(tmp_path):
    """The evaluation of tasks whose simulator cannot be had, such as DexArt's."""

    class Mean:
        n_obs_steps, n_action_steps, device = 2, 2, torch.device("cpu")

        def predict_action(self, obs):
            assert obs["point_cloud"].shape[1:] == (2, 8, 3) and obs["agent_pos"].shape[1:] == (2, 9)
            return {"action": torch.zeros(len(obs["agent_pos"]), 2, 4)}

    path = write_point_clouds(tmp_path / "demos.zarr", lengths=(7, 5, 6), points=16)
    dataset = PointCloudDataset(
        path, shape_meta(8), horizon=4, pad_before=1, pad_after=1, n_obs_steps=2, val_ratio=0.4, seed=0
    )
    held_out = dataset.get_validation_dataset()
    assert can_replay(held_out)
    episode = replay(Mean(), held_out)[0]
    stored = ReplayBuffer.copy_from_path(str(path)).get_episode(episode.number)["action"]
    np.testing.assert_array_equal(episode.recorded, stored)
    assert -1 < evaluate_open_loop(Mean(), held_out, None)["variance_explained"] <= 0


def test_windows_of_clouds_and_numbers(tmp_path):
    path = write_point_clouds(tmp_path / "demos.zarr", lengths=(7, 5), points=16)
    stored = ReplayBuffer.copy_from_path(str(path))
    dataset = PointCloudDataset(path, shape_meta(8), horizon=4, pad_before=1, pad_after=2, n_obs_steps=2)
    assert len(dataset) == 7 + 5
    batch = dataset.get_batch([0, 11])
    assert batch["obs"]["point_cloud"].shape == (2, 2, 8, 3) and batch["action"].shape == (2, 4, 4)
    assert np.allclose(
        batch["obs"]["point_cloud"][0, 1], stored["point_cloud"][0, :8, :3]
    )  # the first points, without their colours
    assert np.allclose(batch["obs"]["agent_pos"][1], stored["state"][10:12])
    sample = dataset[3]
    assert sample["obs"]["agent_pos"].shape == (2, 9) and torch.equal(
        sample["action"], dataset.get_batch([3])["action"][0]
    )
    normalizer = dataset.get_normalizer()
    clouds = normalizer["point_cloud"].normalize(dataset.steps["point_cloud"])
    assert torch.allclose(clouds.amin((0, 1)), torch.tensor(-1.0)) and torch.allclose(
        clouds.amax((0, 1)), torch.tensor(1.0)
    )


def test_actions_can_be_clipped(tmp_path):
    path = write_point_clouds(tmp_path / "demos.zarr", action_scale=5.0)
    assert PointCloudDataset(path, shape_meta()).get_all_actions().abs().max() > 2
    assert PointCloudDataset(path, shape_meta(), action_limit=1.0).get_all_actions().abs().max() == 1
    with pytest.raises(ConfigError, match="action_limit"):
        PointCloudDataset(path, shape_meta(), action_limit=0)


def test_demonstrations_that_do_not_fit_are_refused(tmp_path):
    path = write_point_clouds(tmp_path / "demos.zarr", points=16)
    with pytest.raises(
        DataError, match=r"'point_cloud' has shape \(16, 6\) per step, but shape_meta asks for \(32, 3\)"
    ):
        PointCloudDataset(path, shape_meta(32))
    with pytest.raises(DataError, match=r"'state' has shape \(9,\) per step"):
        PointCloudDataset(path, shape_meta(state=8))
    with pytest.raises(DataError, match="'action' holds steps of shape"):
        PointCloudDataset(path, shape_meta(action=7))
    with pytest.raises(DataError, match="has no array 'imagin_robot' or 'imagined_robot'"):
        PointCloudDataset(path, shape_meta(imagin_robot={"shape": [96, 3], "type": "point_cloud"}))
    with pytest.raises(DataNotFoundError, match="no demonstrations at .*nowhere.zarr.*Type this"):
        PointCloudDataset(tmp_path / "nowhere.zarr", shape_meta(), how="Type this")
    write_point_clouds(tmp_path / "nan.zarr", broken=True)
    with pytest.raises(DataError, match="'point_cloud' holds NaN or infinity"):
        PointCloudDataset(tmp_path / "nan.zarr", shape_meta())


# ---------------------------------------------------------------------- policies
def test_a_policy_says_which_cloud_it_wanted():
    meta = shape_meta()
    policy = IDPPolicy(
        shape_meta=meta,
        obs_encoder=DP3Encoder(meta, 8, (8,), (8,)),
        horizon=4,
        n_obs_steps=2,
        n_action_steps=3,
        down_dims=(8, 16),
        diffusion_step_embed_dim=8,
    )
    obs = {"point_cloud": torch.zeros(1, 2, 9, 3), "agent_pos": torch.zeros(1, 2, 9)}
    with pytest.raises(
        ValueError, match=r"point_cloud must have shape \(batch, at least 2 steps, 8, 3\), got \(1, 2, 9, 3\)"
    ):
        policy.predict_action(obs)
    with pytest.raises(ValueError, match="type.*point_clout"):
        IDPPolicy(
            shape_meta={"obs": {"point_cloud": {"shape": [8, 3], "type": "point_clout"}}, "action": {"shape": [4]}},
            horizon=4,
            n_obs_steps=2,
            n_action_steps=3,
        )
