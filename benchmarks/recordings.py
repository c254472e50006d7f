"""Small recordings in the formats that diffusion_policy.dataset.recordings reads."""

from __future__ import annotations

import json
import pathlib

import numpy as np

FPS, HEIGHT, WIDTH = 20, 32, 48
CAMERA = "observation.images.front"


def episode(length: int, seed: int, state_dim: int = 4) -> dict[str, np.ndarray]:
    """A smooth random path; the action is the next state."""
    rng = np.random.default_rng(seed)
    path = np.cumsum(rng.normal(0, 0.1, (length + 1, state_dim)), axis=0).astype(np.float32)
    return {"state": path[:-1], "action": path[1:]}


def images(length: int, seed: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """uint8 (T, H, W, 3): a square that moves over a background of the seed's colour."""
    frames = np.full((length, height, width, 3), (60 + 40 * seed) % 200, np.uint8)
    for step in range(length):
        left = 2 * step % (width - 8)
        frames[step, 8:16, left : left + 8] = (220, 30, 30)
    return frames


def write_video(path: pathlib.Path, frames: np.ndarray, fps: int = FPS, codec: str = "h264") -> None:
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


def write_lerobot_v2(folder: pathlib.Path, lengths=(12, 9, 15), cameras: bool = True) -> pathlib.Path:
    """A LeRobotDataset v2.1 with names, two tasks, and one camera."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "meta").mkdir(parents=True)
    names = ["x", "y", "z", "grip"]
    vector = {"dtype": "float32", "shape": [4], "names": [names]}
    features = {"observation.state": vector, "action": vector}
    if cameras:
        features[CAMERA] = {"dtype": "video", "shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
    for key, dtype in (("timestamp", "float32"), ("frame_index", "int64"), ("episode_index", "int64")):
        features[key] = {"dtype": dtype, "shape": [1], "names": None}
    info = {
        "codebase_version": "v2.1",
        "total_episodes": len(lengths),
        "fps": FPS,
        "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": features,
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    lines = []
    for number, length in enumerate(lengths):
        values = episode(length, number)
        table = {
            "observation.state": pa.FixedSizeListArray.from_arrays(values["state"].reshape(-1), 4),
            "action": pa.FixedSizeListArray.from_arrays(values["action"].reshape(-1), 4),
            "timestamp": np.arange(length, dtype=np.float32) / FPS,
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
        }
        path = folder / f"data/chunk-000/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), path)
        if cameras:
            write_video(folder / f"videos/chunk-000/{CAMERA}/episode_{number:06d}.mp4", images(length, number))
        lines.append(json.dumps({"episode_index": number, "tasks": [f"task {number % 2}"], "length": length}))
    (folder / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_aloha(folder: pathlib.Path, lengths=(10, 7), compressed: bool = False) -> pathlib.Path:
    """ALOHA's episodes; compressed: images as JPEG, padded with zeros."""
    import cv2
    import h5py

    folder.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(lengths):
        values, frames = episode(length, number), images(length, number)
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = False
            file["action"] = values["action"]
            file["observations/qpos"] = values["state"]
            file["observations/qvel"] = np.gradient(values["state"], axis=0)
            if compressed:
                file.attrs["compress"] = True
                encoded = [cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, 95])[1] for frame in frames]
                padded = np.zeros((length, max(map(len, encoded))), np.uint8)
                for row, content in zip(padded, encoded, strict=True):
                    row[: len(content)] = content
                file["compress_len"] = np.array([list(map(len, encoded))], np.float64)
                file["observations/images/top"] = padded
            else:
                file["observations/images/top"] = frames
    return folder


def write_robomimic(path: pathlib.Path, lengths=(10, 7)) -> pathlib.Path:
    """A robomimic file with one camera."""
    import h5py

    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": FPS}})
        for number, length in enumerate(lengths):
            values, demo = episode(length, number), file.create_group(f"data/demo_{number}")
            demo["actions"], demo["rewards"] = values["action"].astype(np.float64), np.zeros(length)
            demo["obs/eef"], demo["next_obs/eef"] = values["state"], values["action"]
            demo["obs/agentview_image"] = images(length, number)
    return path


def write_npz(folder: pathlib.Path, lengths=(10, 7)) -> pathlib.Path:
    """One file per episode, with a rate and time stamps."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(lengths):
        times = np.arange(length) / FPS
        np.savez(folder / f"take_{number}.npz", **episode(length, number), fps=FPS, timestamp=times, note="text")
    return folder
