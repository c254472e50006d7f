"""Rollouts of a policy from seeded starts, for any environment; the runners of a task are thin subclasses."""

import collections
import functools
import logging
import pathlib
import uuid

import numpy as np
import torch
import tqdm

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.random_state import RandomState
from diffusion_policy.gym_util.rollout_slots import AsyncSlots, SlotFault, SyncSlots, make_rollout_env

log = logging.getLogger(__name__)

MAX_RESTARTS = 8  # of the environments in one evaluation; what is not played by then is lost


class RolloutRunner:
    """Rolls a policy out from seeded starts; the score of an episode is its best reward.

    Environments are built at the first `run` and kept. With a deterministic policy the scores
    depend on the seeds alone: not on `n_envs`, not on `vector`, not on earlier runs, not on faults.

    When an environment raises, or its process dies or hangs, all are ended and built anew, and the
    episodes that were being played are played again from their seeds: together, and if that fails
    too one at a time. What still fails is in `lost`, and its split has no mean score.

    Args:
        env_cls, env_kwargs: the environment; it has `control_hz`, and renders 'rgb_array'.
        n_train, train_start_seed: episodes from the seeds the demonstrations may have used.
        n_test, test_start_seed: episodes from other seeds.
        n_train_vis, n_test_vis: how many of them, from the first, are recorded as video.
        n_latency_steps: the policy sees observations that old, and its first actions, due before
            it answered, are dropped.
        past_action: also pass the last n_obs_steps - 1 executed actions as 'past_action'.
        n_envs: environments per batch, None for all at once.
        vector: 'sync' steps the environments in this process, 'async' in one process each, which
            pays when a step costs more than sending its result, and survives one that crashes.
        worker_timeout: seconds without any answer after which such a process counts as hung; None
            waits for ever.
    """

    title = "rollouts"  # of the progress bar

    def __init__(
        self,
        output_dir,
        env_cls,
        env_kwargs,
        n_train=10,
        n_train_vis=3,
        train_start_seed=0,
        n_test=22,
        n_test_vis=6,
        test_start_seed=10000,
        max_steps=200,
        n_obs_steps=8,
        n_action_steps=8,
        n_latency_steps=0,
        fps=10,
        crf=22,
        past_action=False,
        tqdm_interval_sec=5.0,
        n_envs=None,
        vector="sync",
        worker_timeout=300.0,
    ):
        super().__init__(output_dir)
        if n_train + n_test < 1:
            raise ConfigError("n_train and n_test are both 0: there is no episode to run")
        if vector not in ("sync", "async"):
            raise ConfigError(f"vector must be 'sync' or 'async', not {vector!r}")
        if n_envs is not None and n_envs < 1:
            raise ConfigError(f"n_envs must be at least 1, or null for all episodes at once, not {n_envs}")
        if worker_timeout is not None and not worker_timeout > 0:
            raise ConfigError(
                f"worker_timeout must be a positive number of seconds, or null for none, not {worker_timeout}"
            )
        self._plan = [("train", train_start_seed + i, i < n_train_vis) for i in range(n_train)]
        self._plan += [("test", test_start_seed + i, i < n_test_vis) for i in range(n_test)]
        self.n_envs = n_envs or len(self._plan)
        self.n_obs_steps = n_obs_steps
        self.n_action_steps = n_action_steps
        self.n_latency_steps = n_latency_steps
        self.max_steps = max_steps
        self.past_action = past_action
        self.tqdm_interval_sec = tqdm_interval_sec
        self.vector = vector
        self.worker_timeout = worker_timeout
        self.episodes = []
        self.lost = []
        self._make_env = functools.partial(
            make_rollout_env, env_cls, env_kwargs, n_obs_steps + n_latency_steps, n_action_steps, max_steps, fps, crf
        )
        self._slots = None
        self._n_slots = 0
        self._ever_built = False

    def policy_input(self, obs):
        """Stacked observations of the environments (N, To, ...) -> {name: array} for the policy."""
        raise NotImplementedError

    def env_action(self, action):
        """Actions of the policy (N, Ta, Da) -> those of the environments."""
        return action

    def start_options(self, split, seed):
        """`options` of the environment's reset for this episode: a recorded start, or None for the one that the seed gives."""
        return None

    def run(self, policy):
        """-> {'<split>/sim_max_reward_<seed>', '<split>/sim_video_<seed>', '<split>/mean_score'}.

        Afterwards `self.episodes` holds one {split, seed, max_reward, steps, video} per episode that
        was played, and `self.lost` one {split, seed, reason} per episode that could not be. A split
        that lost some has '<split>/lost_episodes', how many, instead of a mean over fewer.
        """
        self.episodes, self.lost = [], []
        self._faults, self._tracebacks = 0, set()
        chunks = [self._plan[i : i + self.n_envs] for i in range(0, len(self._plan), self.n_envs)]
        try:
            # disable=None: no bar where nobody watches, such as a log file.
            with tqdm.tqdm(
                total=len(chunks) * self.max_steps,
                unit="step",
                leave=False,
                disable=None,
                mininterval=self.tqdm_interval_sec,
            ) as bar:
                for i, chunk in enumerate(chunks):
                    bar.set_description(f"{self.title}, chunk {i + 1}/{len(chunks)}")
                    self._play(policy, chunk, bar)
                    bar.update((i + 1) * self.max_steps - bar.n)
                    if self.episodes:
                        bar.set_postfix(mean_score=np.mean([e["max_reward"] for e in self.episodes]))
        except BaseException:
            self.close()  # slots that were interrupted cannot be stepped again
            raise
        return self._log()

    def close(self):
        """End the environments; the next `run` builds new ones."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _get_slots(self, count):
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
    def _play(self, policy, chunk, bar):
        """Play the episodes of `chunk`: together, together again, one at a time; then those left are lost."""
        random_numbers = RandomState.capture()
        for _ in range(2):
            if self._try(policy, chunk, bar, self.n_envs) is None:
                return
            RandomState.restore(random_numbers)  # so that the next try is what this one would have been
        for episode in chunk:
            reason = self._try(policy, [episode], bar, 1)
            if reason is not None:
                split, seed, _ = episode
                self.lost.append({"split": split, "seed": seed, "reason": reason})

    def _try(self, policy, chunk, bar, count):
        """Play the episodes of `chunk` in `count` slots -> None, or what went wrong."""
        if self._faults > MAX_RESTARTS:
            return f"was not played: the environments of this evaluation had failed {self._faults} times"
        episodes = [
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
                raise  # not an accident: an environment that cannot be built is for the user to mend
            return "; ".join(failure.reason for failure in fault.failures.values())

    # ------------------------------------------------------------------ episodes
    def _run_chunk(self, policy, episodes, bar, count):
        """Play up to `count` episodes side by side -> list of their results."""
        env = self._get_slots(count)
        slots = episodes + [None] * (count - len(episodes))
        obs = env.reset(slots)
        policy.reset()
        done = np.array([slot is None for slot in slots])
        reward, steps = np.zeros(count), np.zeros(count, dtype=int)
        past_action = None
        while not done.all():
            batch = self.policy_input(obs)
            if self.past_action and past_action is not None and self.n_obs_steps > 1:
                batch["past_action"] = past_action[:, -(self.n_obs_steps - 1) :].astype(np.float32)
            action = self._predict(policy, batch)
            for i in np.flatnonzero(~done & ~np.isfinite(action).all(axis=(1, 2))):
                raise RuntimeError(
                    f"the policy returned an action that is not finite, in the episode with "
                    f"seed {slots[i]['seed']} after {steps[i]} steps"
                )
            action = action[:, self.n_latency_steps :]
            if action.shape[1] == 0:
                raise ConfigError(
                    f"the policy returned no action beyond the {self.n_latency_steps} lost to "
                    "n_latency_steps: its n_action_steps must be larger"
                )
            obs, reward, done, steps = env.step(self.env_action(action))
            past_action = action
            bar.update(action.shape[1])
        return [
            {"split": e["split"], "seed": e["seed"], "max_reward": float(r), "steps": int(n), "video": e["video"]}
            for e, r, n in zip(episodes, reward, steps)
        ]

    def _predict(self, policy, batch):
        """{name: (N, To, ...)} -> actions (N, Ta, Da) float64.

        Observations stay float32 whatever the policy computes in: pixels up to 512 do not survive
        half precision, and normalising them is the policy's first step.
        """
        batch = {key: torch.from_numpy(value).to(policy.device) for key, value in batch.items()}
        with torch.no_grad():
            action = policy.predict_action(batch)["action"]
        return action.detach().to("cpu", torch.float64).numpy()

    def _video_path(self, split, seed):
        """A new name at every run, so that the videos of an epoch survive the next one."""
        folder = pathlib.Path(self.output_dir) / "media"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"{split}_{seed}_{uuid.uuid4().hex[:8]}.mp4")

    def _log(self):
        out, scores = {}, {}
        for episode in self.episodes:
            split, seed = episode["split"], episode["seed"]
            out[f"{split}/sim_max_reward_{seed}"] = episode["max_reward"]
            if episode["video"] is not None:
                out[f"{split}/sim_video_{seed}"] = episode["video"]
            scores.setdefault(split, []).append(episode["max_reward"])
        lost = collections.Counter(episode["split"] for episode in self.lost)
        out.update(
            {f"{split}/mean_score": float(np.mean(values)) for split, values in scores.items() if split not in lost}
        )
        for split, count in lost.items():
            out[f"{split}/lost_episodes"] = count
            planned = count + len(scores.get(split, []))
            log.error(
                "this evaluation has no %s/mean_score: it lost %d of %d episodes: %s",
                split,
                count,
                planned,
                ", ".join(f"seed {e['seed']} {e['reason']}" for e in self.lost if e["split"] == split),
            )
        return out
