"""Rollouts on PushT, shared by the state, keypoint and image runners."""
import functools
import multiprocessing
import pathlib
import uuid

import gymnasium as gym
import numpy as np
import torch
import tqdm
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper
from diffusion_policy.gym_util.video_recording_wrapper import VideoRecorder, VideoRecordingWrapper


class RolloutEnv(gym.Wrapper):
    """One slot of the vector environment: plays the episode assigned to it, then waits.

    The end of an episode is reported as info['done'], not as termination: gymnasium's vector
    environments refuse to step a finished environment, and here the others still have to go on.
    A slot whose `episode` is None is done from the start.
    """

    def __init__(self, env, video):
        super().__init__(env)
        self.video = video
        self.episode = None

    def reset(self, *, seed=None, options=None):
        self.video.file_path = None if self.episode is None else self.episode["video"]
        self._reward, self._steps, self._done = 0.0, 0, self.episode is None
        self._obs, _ = self._named(self.env.reset, seed=seed, options=options)
        return self._obs, {}

    def step(self, action):
        if not self._done:
            self._obs, self._reward, terminated, truncated, _ = self._named(self.env.step, action)
            self._steps = len(self.env.get_rewards())
            self._done = terminated or truncated
            if self._done:
                self.video.video_recoder.stop()
        return self._obs, self._reward, False, False, {"done": self._done, "steps": self._steps}

    def _named(self, call, *args, **kwargs):
        """Call, and name the seed if it fails: the traceback of a worker process does not."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            seed = None if self.episode is None else self.episode["seed"]
            raise RuntimeError(f"the environment with seed {seed} failed in {call.__name__}: "
                               f"{type(error).__name__}: {error}") from error


def make_rollout_env(env_cls, env_kwargs, n_obs_steps, n_action_steps, max_steps, fps, crf):
    env = env_cls(**env_kwargs)
    video = VideoRecordingWrapper(
        env, VideoRecorder.create_h264(fps=fps, codec="h264", input_pix_fmt="rgb24", crf=crf),
        steps_per_render=max(env.control_hz // fps, 1))
    multistep = MultiStepWrapper(video, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps,
                                 max_episode_steps=max_steps)
    return RolloutEnv(multistep, video)


class PushTRunner:
    """Rolls a policy out from seeded starts; the score of an episode is its best reward.

    Environments are built at the first `run` and kept. With a deterministic policy the scores
    depend on the seeds alone: not on `n_envs`, not on `vector`, not on earlier runs.

    Args:
        env_cls, env_kwargs: the environment.
        n_train, train_start_seed: episodes from the seeds the demonstrations may have used.
        n_test, test_start_seed: episodes from other seeds.
        n_train_vis, n_test_vis: how many of them, from the first, are recorded as video.
        legacy_test: place the block of every episode, train ones included, the way published
            scores did (see `PushTEnv`).
        n_latency_steps: the policy sees observations that old, and its first actions, due before
            it answered, are dropped.
        past_action: also pass the last n_obs_steps - 1 executed actions as 'past_action'.
        n_envs: environments per batch, None for all at once.
        vector: 'sync' steps the environments in this process, 'async' one process each. A PushT
            step is cheaper than sending its result to another process, so 'sync' is the default.
    """

    def __init__(self, output_dir, env_cls, env_kwargs, n_train=10, n_train_vis=3, train_start_seed=0,
                 n_test=22, n_test_vis=6, legacy_test=False, test_start_seed=10000, max_steps=200,
                 n_obs_steps=8, n_action_steps=8, n_latency_steps=0, fps=10, crf=22,
                 past_action=False, tqdm_interval_sec=5.0, n_envs=None, vector="sync"):
        super().__init__(output_dir)
        if n_train + n_test < 1:
            raise ConfigError("n_train and n_test are both 0: there is no episode to run")
        if vector not in ("sync", "async"):
            raise ConfigError(f"vector must be 'sync' or 'async', not {vector!r}")
        if n_envs is not None and n_envs < 1:
            raise ConfigError(f"n_envs must be at least 1, or null for all episodes at once, not {n_envs}")
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
        self.episodes = []
        self._make_env = functools.partial(
            make_rollout_env, env_cls, dict(env_kwargs, legacy=legacy_test),
            n_obs_steps + n_latency_steps, n_action_steps, max_steps, fps, crf)
        self._env = None

    def policy_input(self, obs):
        """Stacked observations of the environments (N, To, ...) -> {name: array} for the policy."""
        raise NotImplementedError

    def run(self, policy):
        """-> {'<split>/sim_max_reward_<seed>', '<split>/sim_video_<seed>', '<split>/mean_score'}.

        Afterwards `self.episodes` holds one {split, seed, max_reward, steps, video} per episode.
        """
        self.episodes = []
        chunks = [self._plan[i:i + self.n_envs] for i in range(0, len(self._plan), self.n_envs)]
        try:
            # disable=None: no bar where nobody watches, such as a log file.
            with tqdm.tqdm(total=len(chunks) * self.max_steps, unit="step", leave=False, disable=None,
                           mininterval=self.tqdm_interval_sec) as bar:
                for i, chunk in enumerate(chunks):
                    bar.set_description(f"PushT rollouts, chunk {i + 1}/{len(chunks)}")
                    self.episodes += self._run_chunk(policy, chunk, bar)
                    bar.update((i + 1) * self.max_steps - bar.n)
                    bar.set_postfix(mean_score=np.mean([e["max_reward"] for e in self.episodes]))
        except BaseException:
            self.close()  # a vector environment that was interrupted cannot be stepped again
            raise
        return self._log()

    def close(self):
        """End the environments; the next `run` builds new ones."""
        if self._env is not None:
            self._env.close(**({"terminate": True} if self.vector == "async" else {}))
            self._env = None

    def _vector_env(self):
        if self._env is None:
            makers = [self._make_env] * self.n_envs
            if self.vector == "sync":
                self._env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
            else:
                # Not fork: libraries with threads of their own do not survive it.
                methods = multiprocessing.get_all_start_methods()
                self._env = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED,
                                           context="forkserver" if "forkserver" in methods else "spawn")
        return self._env

    def _run_chunk(self, policy, chunk, bar):
        """Play up to n_envs episodes side by side -> list of their results."""
        env = self._vector_env()
        episodes = [{"split": split, "seed": seed, "video": self._video_path(split, seed) if vis else None}
                    for split, seed, vis in chunk]
        slots = episodes + [None] * (self.n_envs - len(episodes))
        env.set_attr("episode", slots)
        obs, _ = env.reset(seed=[0 if slot is None else slot["seed"] for slot in slots])
        policy.reset()
        done = np.array([slot is None for slot in slots])
        reward, steps = np.zeros(self.n_envs), np.zeros(self.n_envs, dtype=int)
        past_action = None
        while not done.all():
            batch = self.policy_input(obs)
            if self.past_action and past_action is not None and self.n_obs_steps > 1:
                batch["past_action"] = past_action[:, -(self.n_obs_steps - 1):].astype(np.float32)
            action = self._predict(policy, batch)
            for i in np.flatnonzero(~done & ~np.isfinite(action).all(axis=(1, 2))):
                raise RuntimeError(f"the policy returned an action that is not finite, in the episode with "
                                   f"seed {slots[i]['seed']} after {steps[i]} steps")
            action = action[:, self.n_latency_steps:]
            if action.shape[1] == 0:
                raise ConfigError(f"the policy returned no action beyond the {self.n_latency_steps} lost to "
                                  "n_latency_steps: its n_action_steps must be larger")
            obs, reward, _, _, info = env.step(action)
            done, steps = info["done"], info["steps"]
            past_action = action
            bar.update(action.shape[1])
        return [{"split": e["split"], "seed": e["seed"], "max_reward": float(r), "steps": int(n),
                 "video": e["video"]} for e, r, n in zip(episodes, reward, steps)]

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
        log, scores = {}, {}
        for episode in self.episodes:
            split, seed = episode["split"], episode["seed"]
            log[f"{split}/sim_max_reward_{seed}"] = episode["max_reward"]
            if episode["video"] is not None:
                log[f"{split}/sim_video_{seed}"] = episode["video"]
            scores.setdefault(split, []).append(episode["max_reward"])
        log.update({f"{split}/mean_score": float(np.mean(values)) for split, values in scores.items()})
        return log
