"""Small synthetic datasets for tests and benchmarks."""

from __future__ import annotations

import pathlib

import numpy as np

from diffusion_policy.common.replay_buffer import ReplayBuffer


def write_pusht(path: pathlib.Path, episodes: int = 6, length: int = 30, seed: int = 0) -> pathlib.Path:
    """Write a small dataset with the keys and ranges of PushT, without its physics."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer.create_empty_numpy()
    for _ in range(episodes):
        state = np.concatenate([rng.uniform(50, 450, (length, 4)), rng.uniform(0, 2 * np.pi, (length, 1))], axis=1)
        buffer.add_episode(
            {
                "state": state.astype(np.float32),
                "keypoint": rng.uniform(50, 450, (length, 9, 2)).astype(np.float32),
                "action": rng.uniform(50, 450, (length, 2)).astype(np.float32),
            }
        )
    buffer.save_to_path(str(path))
    return path


def write_robomimic(
    path: pathlib.Path,
    lengths=(12, 15, 9),
    cameras=("agentview_image", "robot0_eye_in_hand_image"),
    size: int = 84,
    arms: int = 1,
    seed: int = 0,
    **storage,
) -> pathlib.Path:
    """Write a dataset with the keys of robomimic's image tasks and random values.

    `storage` are arguments of h5py's create_dataset.
    """
    import h5py

    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = '{"env_name": "Lift", "type": 1, "env_kwargs": {}}'
        for i, length in enumerate(lengths):
            demo = data.create_group(f"demo_{i}")
            demo.attrs["num_samples"] = length
            demo["actions"] = rng.uniform(-1, 1, (length, 7 * arms))
            demo["obs/object"] = rng.normal(size=(length, 10))
            for arm in range(arms):
                for key, width in (("eef_pos", 3), ("eef_quat", 4), ("gripper_qpos", 2)):
                    demo[f"obs/robot{arm}_{key}"] = rng.uniform(-1, 1, (length, width))
            for camera in cameras:
                demo.create_dataset(
                    f"obs/{camera}", data=rng.integers(0, 256, (length, size, size, 3), dtype=np.uint8), **storage
                )
    return path


def write_point_clouds(
    path: pathlib.Path,
    lengths=(12, 9, 14),
    points: int = 32,
    state: int = 9,
    action: int = 4,
    action_scale: float = 1.0,
    imagined: int = 0,
    broken: bool = False,
    seed: int = 0,
) -> pathlib.Path:
    """Demonstrations in DP3's layout with noise in them."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer.create_empty_numpy()
    for length in lengths:
        episode = {
            "point_cloud": rng.normal(size=(length, points, 6)),
            "state": rng.normal(size=(length, state)),
            "action": action_scale * rng.uniform(-1, 1, (length, action)),
        }
        if imagined:
            episode["imagined_robot"] = rng.normal(size=(length, imagined, 3))
        buffer.add_episode({key: value.astype(np.float32) for key, value in episode.items()})
    if broken:
        buffer["point_cloud"][3, 2, 1] = np.nan
    buffer.save_to_path(str(path))
    return path
