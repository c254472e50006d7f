"""Recordings with videos: decoding them into the frame cache, and fetching a batch of their frames."""

import json
import pathlib
import resource
import shutil
import tempfile
import time

import hydra
import numpy as np
from omegaconf import OmegaConf

from benchmarks.common import fetch_and_step, interleaved, ratio, row
from benchmarks.recordings import CAMERA, write_lerobot_v2
from diffusion_policy.common.config_util import config_dir, register_configs, register_resolvers
from diffusion_policy.dataset.recorded_config import describe
from diffusion_policy.dataset.recorded_frames import camera_frames
from diffusion_policy.dataset.recordings import open_recordings

FPS, HEIGHT, WIDTH = 30, 480, 640
SIZE = (96, 128)  # of the cached frames


def write_camera(path: pathlib.Path, length: int, seed: int) -> None:
    """A video that scrolls over a random image, encoded as lerobot does: AV1, every second frame a key frame."""
    import av
    import cv2

    rng = np.random.default_rng(seed)
    scene = cv2.resize(rng.integers(0, 256, (40, 80, 3), np.uint8), (2 * WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libsvtav1", rate=FPS, options={"g": "2", "crf": "30", "preset": "12"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for step in range(length):
            shown = np.ascontiguousarray(scene[:, step % WIDTH : step % WIDTH + WIDTH])
            file.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        file.mux(stream.encode())


def write_recording(folder: pathlib.Path, lengths: tuple[int, ...]) -> pathlib.Path:
    """Write a LeRobotDataset v2.1 with a camera of 640 x 480 at 30 Hz."""
    write_lerobot_v2(folder, lengths)
    info = json.loads((folder / "meta/info.json").read_text())
    info["fps"] = FPS
    info["features"][CAMERA]["shape"] = [HEIGHT, WIDTH, 3]
    (folder / "meta/info.json").write_text(json.dumps(info))
    for number, length in enumerate(lengths):
        write_camera(folder / f"videos/chunk-000/{CAMERA}/episode_{number:06d}.mp4", length, number)
    return folder


def processor_time() -> float:
    """Seconds of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _decoding(folder: pathlib.Path, rounds: int) -> dict:
    """Seconds of recording / seconds of processor time, readers and their start included."""
    rates = []
    for _ in range(rounds):
        recordings = open_recordings(folder)
        before = processor_time()
        with tempfile.TemporaryDirectory() as cache:
            frames = camera_frames(recordings, range(len(recordings)), {CAMERA: SIZE}, cache)
        for reader in recordings.pool.idle:
            reader.close()  # so that its time counts
        rates.append(len(frames) / FPS / (processor_time() - before))
    return row(
        "decoding videos into the frame cache, real time per core",
        sorted(rates)[len(rates) // 2],
        "x",
        ">= 5",
        f"{len(frames)} frames of {WIDTH} x {HEIGHT}, AV1, {FPS} Hz, scaled to {SIZE[1]} x {SIZE[0]}; processor time",
    )


def _fetching(folder: pathlib.Path, rounds: int) -> dict:
    """Fetching a batch in the training process / training step."""
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        overrides = ["task=my_data", f"task.path={folder}", f"task.cache_dir={folder}", "preset=cpu"]
        cfg = hydra.compose("train_idp_unet_image", overrides)
    describe(cfg)
    OmegaConf.resolve(cfg)
    dataset = hydra.utils.instantiate(cfg.task.dataset)
    times = interleaved("recordings, images", fetch_and_step(cfg, dataset), rounds, warmup=1)
    return row(
        "fetching a batch of a recording's frames, share of the IDP step",
        100 * ratio(times["fetch"], times["step"]),
        "%",
        "<= 5",
        f"preset=cpu, one camera of {SIZE[1]} x {SIZE[0]}, batch {cfg.dataloader.batch_size}, no workers: fetch "
        f"{1e3 * times['fetch'].median:.2f} ms, step {times['step'].median:.2f} s",
    )


def run(quick: bool = False) -> list[dict]:
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        write_recording(folder / "robot", (80,) * 2 if quick else (150,) * 4)
        return [_decoding(folder / "robot", 1 if quick else 3), _fetching(folder / "robot", 2 if quick else 7)]
    finally:
        shutil.rmtree(folder)
