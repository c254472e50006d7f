"""Point clouds: cost of a MetaWorld frame and its share of an evaluation, farthest-point sampling, DP3's encoder."""

import tempfile

import fpsample
import hydra
import numpy as np
import torch

from benchmarks.common import Still, cpu_ratio, interleaved, make_policy, peak_bytes, row, steps_per_s
from diffusion_policy.common.config_util import config_dir, register_configs, register_resolvers
from diffusion_policy.common.point_cloud import farthest_points, points_in_view
from diffusion_policy.env.metaworld.metaworld_wrapper import MetaWorldEnv
from diffusion_policy.env_runner.metaworld_runner import MetaworldRunner
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.dp3.encoder import PointNetEncoder

TASK, POINTS, ACTIONS = "assembly", 512, 8
WORKERS = (1, 2)


def exact_farthest(points: np.ndarray, count: int) -> np.ndarray:
    """Exact farthest-point sampling with numpy, column by column."""
    x, y, z = np.ascontiguousarray(points.T)
    distance, chosen, last = np.full(len(points), np.inf, np.float32), np.empty(count, np.int64), 0
    for i in range(count):
        chosen[i] = last
        np.minimum(distance, (x - x[last]) ** 2 + (y - y[last]) ** 2 + (z - z[last]) ** 2, out=distance)
        last = int(distance.argmax())
    return chosen


def frames(rounds: int) -> list[dict]:
    """Cost of the steps to a cloud, and the share of clouds in an evaluation chunk with a small policy."""
    env = MetaWorldEnv(TASK, POINTS)
    env.reset(seed=0)
    generator, view = env.generator, env.view
    depth = generator.depth()
    points, _ = points_in_view(depth, generator.fovy, view)
    chunks = MultiStepWrapper(env, n_obs_steps=2, n_action_steps=ACTIONS)
    obs, _ = chunks.reset(seed=0)
    policy = small_policy(obs)

    def chunk():
        seen, *_ = chunks.step(np.zeros((ACTIONS, 4)))
        policy.predict_action({key: torch.from_numpy(value)[None] for key, value in seen.items()})

    tasks = {
        "render": generator.depth,
        "back-project, crop": lambda: points_in_view(depth, generator.fovy, view),
        "sample": lambda: farthest_points(points, POINTS),
        "cloud": lambda: generator.point_cloud(view, POINTS),
        "chunk": chunk,
    }
    tasks |= {
        "fpsample, exact": lambda: fpsample.fps_sampling(points, POINTS, start_idx=0),
        "numpy, exact": lambda: exact_farthest(points, POINTS),
    }
    times = interleaved("frames", tasks, rounds, repeats={name: 3 for name in tasks if name != "chunk"})
    env.close()
    ms = {name: 1000 * t.median for name, t in times.items()}
    parts = ", ".join(f"{name} {ms[name]:.2f}" for name in ("render", "back-project, crop", "sample"))
    return [
        row(f"point cloud of a frame, {POINTS} of {len(points)} points", ms["cloud"], "ms", None, f"ms: {parts}"),
        row(
            f"its share of a step of an evaluation, 2 clouds for {ACTIONS} steps",
            200 * cpu_ratio(times["cloud"], times["chunk"]),
            "%",
            None,
            f"a chunk of {ACTIONS} steps with a small IDP policy takes {ms['chunk']:.1f} ms",
        ),
        row(
            "farthest points, exact with numpy / fpsample's buckets",
            cpu_ratio(times["numpy, exact"], times["sample"]),
            "x",
            "> 1",
        ),
        row(
            "farthest points, exact with fpsample / its buckets",
            cpu_ratio(times["fpsample, exact"], times["sample"]),
            "x",
            "> 1",
        ),
    ]


def small_policy(obs: dict[str, np.ndarray]):
    """IDP with the small preset, for such observations {key: (To, *shape)}."""
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        cfg = hydra.compose(
            "train_idp_mlp_pointcloud",
            ["preset=cpu", f"size.pointcloud.num_points={POINTS}", "horizon=16", f"n_action_steps={ACTIONS}"],
        )
    normalizer = LinearNormalizer()
    normalizer.fit({**{key: torch.from_numpy(value) for key, value in obs.items()}, "action": torch.randn(64, 4)})
    return make_policy(cfg.policy, normalizer).eval()


def encoder(rounds: int, frames: int, points: int) -> list[dict]:
    """DP3's encoder, forward and backward: through all points, and through the critical points only."""
    net = PointNetEncoder()
    clouds = torch.randn(frames, points, 3)
    tasks = {
        "all": lambda: net.final_projection(net.mlp(clouds).amax(dim=1)).sum().backward(),
        "winners": lambda: net(clouds).sum().backward(),
    }
    times = interleaved("encoder", tasks, rounds)
    memory = {name: peak_bytes(task) for name, task in tasks.items()}
    detail = f"{frames} clouds of {points} points, {net.critical_points(clouds).shape[1]} of them with a maximum"
    return [
        row(
            "DP3's encoder, forward and backward, through all points / those that win",
            cpu_ratio(times["all"], times["winners"]),
            "x",
            "> 1",
            detail,
        ),
        row("its peak memory, the same", memory["all"] / memory["winners"], "x", "> 1", detail),
    ]


def workers(steps: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        rates = {
            n: steps_per_s(
                MetaworldRunner(folder, TASK, POINTS, n_test=2 * max(WORKERS), n_test_vis=0, max_steps=steps, n_envs=n),
                Still(4),
                rounds,
            )
            for n in WORKERS
        }
    return row(
        f"evaluation of MetaWorld, {WORKERS[-1]} workers / 1",
        rates[WORKERS[-1]] / rates[1],
        "x",
        None,
        ", ".join(f"{n} worker(s) {rate:.0f} steps/s" for n, rate in rates.items()),
    )


def run(quick: bool = False) -> list[dict]:
    return [
        *frames(3 if quick else 20),
        *encoder(1 if quick else 4, 16 if quick else 128, POINTS),
        workers(16 if quick else 80, 1 if quick else 3),
    ]
