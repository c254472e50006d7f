"""Rollouts of a policy from seeded starts, for any environment. The runners of a task are thin subclasses."""

import collections
import functools
import itertools
import logging
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tqdm

from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.common.random_state import RandomState
from diffusion_policy.gym_util.rollout_slots import AsyncSlots, SlotFault, SyncSlots, make_rollout_env

log = logging.getLogger(__name__)

MAX_RESTARTS = 8  # of the environments in one evaluation; episodes not played by then are lost

Episode = tuple[str, int, bool]  # split, seed, whether it is recorded as video


class RolloutRunner:
    """Rolls out a policy from seeded starts; the score of an episode is its best reward.

    Environments are built at the first `run` and kept. With a deterministic policy the scores depend only on the seeds:
    not on `n_envs`, `vector`, earlier runs or faults.

    When an environment raises, or its process dies or hangs, all environments are closed and rebuilt, and the current
    episodes are played again from their seeds: together, and if that fails, one at a time. Episodes that still fail are
    in `lost`, and their split has no mean score.

    Args:
        output_dir: where videos are written, in media/.
        env_cls: the environment; it must have `control_hz` and render 'rgb_array'.
        env_kwargs: its arguments.
        n_train: episodes from seeds that the demonstrations may have used.
        n_train_vis: how many of them, from the first, are recorded as video.
        train_start_seed: the first of these seeds.
        n_test: episodes from other seeds.
        n_test_vis: how many of them, from the first, are recorded as video.
        test_start_seed: the first of these seeds.
        n_heldout: further episodes, reported as 'heldout/...', for protocols whose test seeds the demonstrations share.
        heldout_start_seed: the first of their seeds.
        n_latency_steps: age in steps of the observations that the policy sees; as many of its actions are dropped.
            'measured' takes the policy's latency on this machine at the environment's rate, before the first episode.
        past_action: also pass the last n_obs_steps - 1 executed actions as 'past_action'.
        n_envs: environments per batch, None for all at once.
        vector: 'sync' steps the environments in this process, 'async' in one process each. 'async' is faster when a
            step costs more than sending its result, and survives a crash.
        worker_timeout: seconds without an answer after which a process counts as hung; None waits forever.
        act_noise: standard deviation of noise on the actions, in their units, constant over each executed chunk and
            drawn from the episode's seed. It moves a policy that stands still. 0 is none.
    """

    title = "rollouts"  # of the progress bar
    draws_chunk = False  # whether the environment can draw a predicted chunk into its frames
    output_dir: str

    def __init__(
        self,
        output_dir: str,
        env_cls: Callable[..., Any],
        env_kwargs: dict[str, Any],
        n_train: int = 10,
        n_train_vis: int = 3,
        train_start_seed: int = 0,
        n_test: int = 22,
        n_test_vis: int = 6,
        test_start_seed: int = 10000,
        n_heldout: int = 0,
        heldout_start_seed: int = 100000,
        max_steps: int = 200,
        n_obs_steps: int = 8,
        n_action_steps: int = 8,
        n_latency_steps: int | str = 0,
        fps: int = 10,
        crf: int = 22,
        past_action: bool = False,
        tqdm_interval_sec: float = 5.0,
        n_envs: int | None = None,
        vector: str = "sync",
        worker_timeout: float | None = 300.0,
        act_noise: float = 0.0,
    ):
        super().__init__(output_dir)  # type: ignore[call-arg]  # of the base runner beside this class
        if n_train + n_test < 1:
            raise ConfigError("n_train and n_test are both 0: there is no episode to run")
        if vector not in ("sync", "async"):
            raise ConfigError(f"vector must be 'sync' or 'async', not {vector!r}")
        if not (isinstance(act_noise, (int, float)) and 0 <= act_noise < float("inf")):
            raise ConfigError(f"act_noise must be a number of at least 0, not {act_noise!r}")
        if n_envs is not None and n_envs < 1:
            raise ConfigError(f"n_envs must be at least 1, or null for all episodes at once, not {n_envs}")
        if n_latency_steps != "measured" and (not isinstance(n_latency_steps, int) or n_latency_steps < 0):
            raise ConfigError(f"n_latency_steps must be a whole number or 'measured', not {n_latency_steps!r}")
        if worker_timeout is not None and not worker_timeout > 0:
            raise ConfigError(
                f"worker_timeout must be a positive number of seconds, or null for none, not {worker_timeout}"
            )
        self._plan: list[Episode] = [("train", train_start_seed + i, i < n_train_vis) for i in range(n_train)]
        self._plan += [("test", test_start_seed + i, i < n_test_vis) for i in range(n_test)]
        self._plan += [("heldout", heldout_start_seed + i, False) for i in range(n_heldout)]
        self.n_envs = n_envs or len(self._plan)
        self._kept = range(len(self._plan))  # which of them are played, see keep_part
        self._rows: tuple[int, int] | None = None  # where the batch stands in that of all episodes, and its size
        self.n_obs_steps = n_obs_steps
        self.n_action_steps = n_action_steps
        self.measures_latency = n_latency_steps == "measured"
        self.n_latency_steps = 0 if isinstance(n_latency_steps, str) else n_latency_steps
        self.max_steps = max_steps
        self.past_action = past_action
        self.tqdm_interval_sec = tqdm_interval_sec
        self.vector = vector
        self.worker_timeout = worker_timeout
        self.act_noise = act_noise
        self.episodes: list[dict[str, Any]] = []
        self.lost: list[dict[str, Any]] = []
        self._make_env = functools.partial(
            make_rollout_env,
            env_cls,
            env_kwargs,
            n_obs_steps=n_obs_steps + self.n_latency_steps,
            n_action_steps=n_action_steps,
            max_steps=max_steps,
            fps=fps,
            crf=crf,
        )
        rate = getattr(env_cls, "control_hz", None)
        self.control_hz: float | None = rate if isinstance(rate, (int, float)) else None  # if known without an instance
        self._slots: SyncSlots | AsyncSlots | None = None
        self._n_slots = 0
        self._ever_built = False

    def policy_input(self, obs: Any) -> dict[str, np.ndarray]:
        """Convert stacked observations of the environments (N, To, ...) to the policy's {name: array}."""
        raise NotImplementedError

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """Convert actions of the policy (N, Ta, Da) to those of the environments."""
        return action

    def executed(self, action: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """What is executed of the policy's actions (N, Ta, Da) and its whole chunk from now on (N, H, Da)."""
        return action[:, self.n_latency_steps :]

    def start_options(self, split: str, seed: int) -> dict[str, Any] | None:
        """`options` for the environment's reset: a recorded start, or None to draw the start from the seed."""
        return None

    def run(self, policy: Any) -> dict[str, Any]:
        """Play all episodes -> {'<split>/sim_max_reward_<seed>', '<split>/sim_video_<seed>', '<split>/mean_score'}.

        Also '<split>/final_score', and for environments with a tool '<split>/path_length' and '<split>/ends_still', the
        share of episodes that fail and stand still at their end.

        Afterwards `self.episodes` holds one {split, seed, max_reward, steps, video, final_reward, ...} per played
        episode, and `self.lost` one {split, seed, reason} per lost episode. A split that lost episodes has
        '<split>/lost_episodes' instead of means: a mean over fewer episodes is not comparable.
        """
        if self.measures_latency:
            self._measure_latency(policy)
        self.episodes, self.lost = [], []
        self._faults = 0
        self._tracebacks: set[str | None] = set()
        chunks = self._chunks()
        try:
            # disable=None: no bar if the output is not a terminal.
            with tqdm.tqdm(
                total=len(chunks) * self.max_steps,
                unit="step",
                leave=False,
                disable=None,
                mininterval=self.tqdm_interval_sec,
            ) as bar:
                for i, (first, chunk) in enumerate(chunks):
                    bar.set_description(f"{self.title}, chunk {i + 1}/{len(chunks)}")
                    self._play(policy, chunk, bar, first)
                    bar.update((i + 1) * self.max_steps - bar.n)
                    if self.episodes:
                        bar.set_postfix(mean_score=np.mean([e["max_reward"] for e in self.episodes]))
        except BaseException:
            self.close()  # interrupted slots cannot be stepped again
            raise
        return self.summary(self.episodes, self.lost)

    def keep_part(self, index: int, count: int) -> None:
        """Play only part `index`, from 1, of the episodes in `count` parts of consecutive seeds.

        Their results are those of a run of all: the policy is called with the batch of all episodes, in which the ones
        of other parts are copies of this part's first, because rounding depends on the size of a batch.
        """
        total = len(self._plan)
        if count > total:
            raise ConfigError(f"{total} episodes cannot be divided into {count} shards: at most one shard an episode")
        self._kept = range((index - 1) * total // count, index * total // count)

    def _chunks(self) -> list[tuple[int, list[Episode]]]:
        """The episodes that are played together, and which slot the first one has."""
        chunks = []
        for start in range(0, len(self._plan), self.n_envs):
            kept = [i for i in range(start, min(start + self.n_envs, len(self._plan))) if i in self._kept]
            if kept:
                chunks.append((kept[0] - start, [self._plan[i] for i in kept]))
        return chunks

    def _measure_latency(self, policy: Any) -> None:
        """Set n_latency_steps to the policy's median latency at batch 1, rounded to control steps."""
        from diffusion_policy.workspace.measurement import latency

        if self.control_hz is None:
            raise ConfigError("n_latency_steps='measured': the rate of this environment is not known; give a number")
        split, seed, _ = self._plan[0]
        episode = {"split": split, "seed": seed, "video": None, "options": self.start_options(split, seed)}
        batch = self.policy_input(self._get_slots(1).reset([episode]))
        obs = {key: torch.from_numpy(value).to(policy.device) for key, value in batch.items()}
        seconds = latency(policy, obs, policy.device)["p50"] / 1000
        self.n_latency_steps = round(seconds * self.control_hz)
        log.info("latency %.1f ms: %d control steps at %g Hz", 1000 * seconds, self.n_latency_steps, self.control_hz)
        self.close()
        self._make_env.keywords["n_obs_steps"] = self.n_obs_steps + self.n_latency_steps

    def check(self, policy: Any) -> None:
        """Play the first chunk of one episode, so that sizes that do not fit are found before the training.

        Raises:
            ConfigError: the policy cannot act on the observations, or the environment does not accept the actions.
        """
        split, seed, _ = self._plan[0]
        episode = {"split": split, "seed": seed, "video": None, "options": self.start_options(split, seed)}
        name = type(policy).__name__
        try:
            slots = self._get_slots(1)
            obs = self.policy_input(slots.reset([episode]))
            policy.reset()
            action = self.executed(*self._predict(policy, obs))
            if action.shape[1] != self.n_action_steps:
                raise ConfigError(
                    f"task.env_runner.n_action_steps={self.n_action_steps}, but {name} returns {action.shape[1]} "
                    f"actions after n_latency_steps={self.n_latency_steps}"
                )
            slots.step(self.env_action(action))
        except SlotFault as fault:
            raise ConfigError(f"task.env_runner: {fault}") from fault
        except UserError:
            raise
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} does not fit the observations of task.env_runner: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the environments; the next `run` builds new ones."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _get_slots(self, count: int) -> SyncSlots | AsyncSlots:
        if self._slots is not None and self._n_slots != count:
            self.close()
        if self._slots is None:
            self._slots = (
                SyncSlots(self._make_env, count)
                if self.vector == "sync"
                else AsyncSlots(self._make_env, count, self.worker_timeout)
            )
            self._n_slots, self._ever_built = count, True
        return self._slots

    # ------------------------------------------------------------------ faults
    def _play(self, policy: Any, chunk: list[Episode], bar: tqdm.tqdm, first: int = 0) -> None:
        """Play the episodes of `chunk`: together, together again, then one at a time; then the rest is lost."""
        random_numbers = RandomState.capture()
        partial = len(self._kept) < len(self._plan)
        self._rows = (first, self.n_envs) if partial else None
        for _ in range(2):
            if self._try(policy, chunk, bar, len(chunk) if partial else self.n_envs) is None:
                return
            RandomState.restore(random_numbers)  # the next attempt draws the same numbers
        self._rows = None
        for episode in chunk:
            reason = self._try(policy, [episode], bar, 1)
            if reason is not None:
                split, seed, _ = episode
                self.lost.append({"split": split, "seed": seed, "reason": reason})

    def _try(self, policy: Any, chunk: list[Episode], bar: tqdm.tqdm, count: int) -> str | None:
        """Play the episodes of `chunk` in `count` slots; return None, or the reason of the failure."""
        if self._faults > MAX_RESTARTS:
            return f"was not played: the environments of this evaluation had failed {self._faults} times"
        episodes: list[dict[str, Any]] = [
            {
                "split": split,
                "seed": seed,
                "video": self._video_path(split, seed) if vis else None,
                "options": self.start_options(split, seed),
            }
            for split, seed, vis in chunk
        ]
        try:
            self.episodes += self._run_chunk(policy, episodes, bar, count)
            return None
        except SlotFault as fault:
            self.close()
            self._faults += 1
            for episode in episodes:
                if episode["video"] is not None:
                    pathlib.Path(episode["video"]).unlink(missing_ok=True)
            for slot, failure in fault.failures.items():
                which = f"with seed {chunk[slot][1]}" if slot < len(chunk) else "of an idle slot"
                new = failure.traceback not in self._tracebacks
                self._tracebacks.add(failure.traceback)
                log.warning(
                    "the environment %s %s%s",
                    which,
                    failure.reason,
                    f"\n{failure.traceback}" if new and failure.traceback else "",
                )
            if not self._ever_built and self._faults > 1:
                raise  # not an accident: the environment cannot be built at all
            return "; ".join(failure.reason for failure in fault.failures.values())

    # ------------------------------------------------------------------ episodes
    def _run_chunk(
        self, policy: Any, episodes: list[dict[str, Any]], bar: tqdm.tqdm, count: int
    ) -> list[dict[str, Any]]:
        """Play up to `count` episodes in parallel and return their results."""
        env = self._get_slots(count)
        slots = [*episodes, *[None] * (count - len(episodes))]
        obs = env.reset(slots)
        policy.reset()
        done = np.array([slot is None for slot in slots])
        reward, steps = np.zeros(count), np.zeros(count, dtype=int)
        past_action = None
        noise = ChunkNoise(self.act_noise, [slot["seed"] if slot else 0 for slot in slots]) if self.act_noise else None
        while not done.all():
            batch = self.policy_input(obs)
            if self.past_action and past_action is not None and self.n_obs_steps > 1:
                batch["past_action"] = past_action[:, -(self.n_obs_steps - 1) :].astype(np.float32)
            action, chunk = self._predict(policy, batch)
            for i in np.flatnonzero(~done & ~np.isfinite(action).all(axis=(1, 2))):
                raise RuntimeError(
                    f"the policy returned an action that is not finite, in the episode with "
                    f"seed {episodes[i]['seed']} after {steps[i]} steps"
                )
            action = self.executed(action, chunk)
            if noise is not None:
                action = action + noise(action)
            if action.shape[1] == 0:
                raise ConfigError(
                    f"the policy returned no action beyond the {self.n_latency_steps} lost to "
                    "n_latency_steps: its n_action_steps must be larger"
                )
            obs, reward, done, steps = env.step(self.env_action(action), chunk if self.draws_chunk else None)
            past_action = action
            bar.update(action.shape[1])
        return [
            {
                "split": e["split"],
                "seed": e["seed"],
                "max_reward": float(r),
                "steps": int(n),
                "video": self._name_video(e, float(r)),
                **seen,
            }
            for e, r, n, seen in zip(episodes, reward, steps, env.reports(count), strict=False)  # idle slots come last
        ]

    def _predict(self, policy: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """{name: (N, To, ...)} -> actions to execute (N, Ta, Da) and the predicted chunk (N, H, Da), float64.

        Observations stay float32 for every precision of the policy: half precision cannot represent positions up to 512
        pixels, and the policy normalises them first.
        """
        rows = slice(None)
        if self._rows is not None:
            first, size = self._rows
            rows = slice(first, first + len(next(iter(batch.values()))))
            batch = {key: _placed(value, rows, size) for key, value in batch.items()}
        obs = {key: torch.from_numpy(value).to(policy.device) for key, value in batch.items()}
        with torch.no_grad():
            result = policy.predict_action(obs)
        action = result["action"][rows].detach().to("cpu", torch.float64).numpy()
        chunk = result.get("action_pred", result["action"])[rows].detach().to("cpu", torch.float64).numpy()
        if chunk.shape[1] > action.shape[1]:
            chunk = chunk[:, self.n_obs_steps - 1 :]  # a chunk starts at the first observation
        return action, chunk

    def _video_path(self, split: str, seed: int) -> str:
        """Where an episode is recorded; `_name_video` gives it its name when its score is known."""
        folder = pathlib.Path(self.output_dir) / "media"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f".{split}_seed{seed}_{uuid.uuid4().hex[:8]}.mp4")

    def _name_video(self, episode: dict[str, Any], score: float) -> str | None:
        """Name a finished video after its score; the videos of earlier evaluations are kept. None if there is none."""
        recorded = pathlib.Path(episode["video"] or "")
        if not recorded.is_file():  # not asked for, or the episode ended before the first frame
            return None
        name = f"{episode['split']}_seed{episode['seed']}_score{score:.2f}"
        names = itertools.chain([f"{name}.mp4"], (f"{name}_{n}.mp4" for n in itertools.count(2)))
        path = next(path for path in map(recorded.with_name, names) if not path.exists())
        recorded.rename(path)
        return str(path)

    @classmethod
    def summary(cls, episodes: list[dict[str, Any]], lost: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what `run` returns, from the episodes that were played and those that were lost."""
        out: dict[str, Any] = {}
        scores: dict[str, list[float]] = {}
        for episode in episodes:
            split, seed = episode["split"], episode["seed"]
            out[f"{split}/sim_max_reward_{seed}"] = episode["max_reward"]
            if episode["video"] is not None:
                out[f"{split}/sim_video_{seed}"] = episode["video"]
            scores.setdefault(split, []).append(episode["max_reward"])
        counts = collections.Counter(episode["split"] for episode in lost)
        complete = [split for split in scores if split not in counts]
        out |= {f"{split}/mean_score": float(np.mean(scores[split])) for split in complete}
        for split in complete:  # after upstream's keys
            out |= _diagnosis(split, [episode for episode in episodes if episode["split"] == split])
        for split, count in counts.items():
            out[f"{split}/lost_episodes"] = count
            planned = count + len(scores.get(split, []))
            log.error(
                "this evaluation has no %s/mean_score: it lost %d of %d episodes: %s",
                split,
                count,
                planned,
                ", ".join(f"seed {e['seed']} {e['reason']}" for e in lost if e["split"] == split),
            )
        return out


def _placed(values: np.ndarray, rows: slice, size: int) -> np.ndarray:
    """Return a batch of `size` with the values in the given rows, and the first of them in the others."""
    batch = np.repeat(values[:1], size, axis=0)
    batch[rows] = values
    return batch


class ChunkNoise:
    """Gaussian noise (N, 1, Da) on executed chunks, one stream per episode, so that it does not depend on n_envs."""

    def __init__(self, std: float, seeds: list[int]):
        self.std = std
        self.streams = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, action: np.ndarray) -> np.ndarray:
        return np.stack([self.std * stream.standard_normal((1, action.shape[2])) for stream in self.streams])


def _diagnosis(split: str, episodes: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the episodes' statistics."""
    out = {f"{split}/final_score": float(np.mean([episode["final_reward"] for episode in episodes]))}
    if "ends_still" in episodes[0]:
        failed = [episode["ends_still"] and episode["max_reward"] < 1 for episode in episodes]
        out[f"{split}/ends_still"] = float(np.mean(failed))
        out[f"{split}/path_length"] = float(np.mean([episode["path_length"] for episode in episodes]))
    return out
