"""PushT's demonstrations as a LeRobotDataset, with the observations of gym-pusht, to train and evaluate in LeRobot.

    python examples/pusht_for_lerobot.py OUT [--data PUSHT.zarr] [--mirror] [--images]

The state is the agent's position, the environment's state the eight corners of the T, as gym-pusht's
`obs_type=environment_state_agent_pos` gives them. Without --data the demonstrations are those of `task=pusht_state`.
--mirror adds the mirror image of every episode, as preset=cpu does; --images adds the camera, if the data has one.
docs/lerobot.md continues from here.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import numpy as np
import pymunk
import torch

from diffusion_policy.common.command_line import reporting
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.conversion import to_lerobot
from diffusion_policy.dataset.pusht_source import AUTO, find_pusht
from diffusion_policy.dataset.recordings import open_recordings
from diffusion_policy.env.pusht.symmetry import mirror_images, mirror_positions, mirror_states
from diffusion_policy.env.pusht.tee import BAR, STEM, corners

FPS = 10


def block_corners(state: np.ndarray) -> np.ndarray:
    """The corners of the T's two rectangles (T, 16) in states (T, 5), in the order of the physics engine."""
    points = np.array([point for rect in (BAR, STEM) for point in pymunk.Poly(None, corners(rect)).get_vertices()])
    x, y, angle = (state[:, i, None] for i in (2, 3, 4))
    u, v = points.T
    rotated = [np.cos(angle) * u - np.sin(angle) * v, np.sin(angle) * u + np.cos(angle) * v]
    return np.stack([x + rotated[0], y + rotated[1]], axis=-1).reshape(len(state), -1)


def steps(state: np.ndarray, action: np.ndarray, images: np.ndarray | None) -> dict[str, np.ndarray]:
    """An episode under LeRobot's names."""
    out = {"observation.state": state[:, :2], "observation.environment_state": block_corners(state), "action": action}
    out = {key: value.astype(np.float32) for key, value in out.items()}
    return out if images is None else {**out, "observation.image": images.astype(np.uint8)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, help="the folder to write")
    parser.add_argument("--data", default=AUTO, help="a replay buffer of PushT (default: as task=pusht_state)")
    parser.add_argument("--mirror", action="store_true", help="add the mirror image of every episode")
    parser.add_argument("--images", action="store_true", help="add the camera")
    options = parser.parse_args(arguments)
    with reporting():
        source = ReplayBuffer.create_from_path(find_pusht(options.data)[0])
        if options.images and "img" not in source:
            raise ConfigError(f"{options.data} has no images (img): leave out --images")
        buffer = ReplayBuffer.create_empty_numpy()
        for index in range(source.n_episodes):
            episode = {key: np.asarray(value) for key, value in source.get_episode(index).items()}
            images = episode["img"] if options.images else None
            buffer.add_episode(steps(episode["state"], episode["action"], images))
            if options.mirror:
                state, action = (torch.from_numpy(episode[key]).float() for key in ("state", "action"))
                if images is not None:  # (T, H, W, 3)
                    images = mirror_images(torch.from_numpy(images).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
                buffer.add_episode(steps(mirror_states(state).numpy(), mirror_positions(action).numpy(), images))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "pusht.zarr"
            buffer.save_to_path(path)
            to_lerobot(open_recordings(path), options.output, images=options.images, fps=FPS)
    print(f"{options.output}: {buffer.n_episodes} episodes, {buffer.n_steps} steps")


if __name__ == "__main__":
    main()
