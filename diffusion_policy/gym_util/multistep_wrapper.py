"""A wrapper that takes chunks of actions and returns stacks of observations."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import dill
import gymnasium as gym
import numpy as np
from gymnasium import spaces


def stack_repeated(x: np.ndarray, n: int) -> np.ndarray:
    """Stack n copies: (...) -> (n, ...)."""
    return np.repeat(np.expand_dims(x, axis=0), n, axis=0)


def repeated_box(box_space: spaces.Box, n: int) -> spaces.Box:
    """Space of n stacked samples of a Box."""
    return spaces.Box(
        low=stack_repeated(box_space.low, n), high=stack_repeated(box_space.high, n), dtype=box_space.dtype
    )


def repeated_space(space: spaces.Space, n: int) -> spaces.Space:
    """Space of n stacked samples of a Box, or of a Dict of Boxes."""
    if isinstance(space, spaces.Box):
        return repeated_box(space, n)
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: repeated_space(value, n) for key, value in space.items()})
    raise TypeError(f"only Box and Dict spaces can be stacked, not {type(space).__name__}")


def take_last_n(x: Iterable, n: int) -> np.ndarray:
    """Last n entries of a sequence as an array (min(n, len(x)), ...)."""
    x = list(x)
    return np.array(x[max(0, len(x) - n) :])


def dict_take_last_n(x: Mapping[str, Iterable], n: int) -> dict[str, np.ndarray]:
    """Apply `take_last_n` to every value."""
    return {key: take_last_n(value, n) for key, value in x.items()}


def aggregate(data: Sequence[float], method: str = "max") -> float:
    """Reduce a sequence of numbers; `method` is max, min, mean or sum."""
    reductions: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "mean": np.mean, "sum": np.sum}
    if method not in reductions:
        raise ValueError(f"unknown aggregation {method!r}, choose one of {sorted(reductions)}")
    return reductions[method](data)


def stack_last_n_obs(all_obs: Iterable[np.ndarray], n_steps: int) -> np.ndarray:
    """Stack the last n_steps arrays (...) -> (n_steps, ...); if there are fewer, repeat the oldest."""
    all_obs = list(all_obs)
    if not all_obs:
        raise ValueError("no observation to stack: call reset first")
    last = all_obs[-n_steps:]
    return np.stack([last[0]] * (n_steps - len(last)) + last)


class MultiStepWrapper(gym.Wrapper):
    """Executes n_action_steps actions per call and returns the last n_obs_steps observations.

    Observation: every array of the wrapped environment with a leading axis of n_obs_steps.
    Action: (up to n_action_steps, Da). When the episode ends, the rest of the chunk is dropped, and `step` changes
        nothing until `reset`.
    Reward: aggregate of all rewards since reset; with 'max', the best reward of the episode so far.
    Info: per key, the values of the last n_obs_steps steps (fewer at the start).

    An environment with expensive observations may have an attribute `observing`. It is set to False in the steps of a
    chunk whose observations are not returned.
    """

    def __init__(
        self,
        env: gym.Env,
        n_obs_steps: int,
        n_action_steps: int,
        max_episode_steps: int | None = None,
        reward_agg_method: str = "max",
    ):
        super().__init__(env)
        self.action_space = repeated_space(env.action_space, n_action_steps)
        self.observation_space = repeated_space(env.observation_space, n_obs_steps)
        self.max_episode_steps = max_episode_steps
        self.n_obs_steps = n_obs_steps
        self.n_action_steps = n_action_steps
        self.reward_agg_method = reward_agg_method
        self._clear()

    def _clear(self) -> None:
        self.obs: deque = deque(maxlen=self.n_obs_steps)
        self.reward: list[float] = []
        self.done: list[bool] = []
        self.info: defaultdict[str, deque] = defaultdict(lambda: deque(maxlen=self.n_obs_steps))
        self._terminated = self._truncated = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self._clear()
        self.obs.append(obs)
        return self._get_obs(self.n_obs_steps), info

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        may_skip = hasattr(self.unwrapped, "observing")
        for i, act in enumerate(action):
            if self._terminated or self._truncated:
                break
            if may_skip:
                self.unwrapped.observing = i >= len(action) - self.n_obs_steps  # type: ignore[attr-defined]
            obs, reward, self._terminated, self._truncated, info = self.env.step(act)
            self.obs.append(obs)
            self.reward.append(float(reward))
            if self.max_episode_steps is not None and len(self.reward) >= self.max_episode_steps:
                self._truncated = True
            self.done.append(self._terminated or self._truncated)
            for key, value in info.items():
                self.info[key].append(value)
        return (
            self._get_obs(self.n_obs_steps),
            float(aggregate(self.reward, self.reward_agg_method)),
            bool(self._terminated),
            bool(self._truncated),
            dict_take_last_n(self.info, self.n_obs_steps),
        )

    def _get_obs(self, n_steps: int = 1) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {key: stack_last_n_obs([obs[key] for obs in self.obs], n_steps) for key in self.observation_space}
        return stack_last_n_obs(self.obs, n_steps)

    def get_rewards(self) -> list[float]:
        """Reward of every environment step since reset."""
        return self.reward

    def get_attr(self, name: str) -> Any:
        """Attribute of this wrapper or of one below."""
        return self.get_wrapper_attr(name)

    def run_dill_function(self, dill_fn: bytes) -> Any:
        """Call a pickled function with this wrapper."""
        return dill.loads(dill_fn)(self)

    def get_infos(self) -> dict[str, list]:
        """Values of the last steps by key of info."""
        return {key: list(value) for key, value in self.info.items()}
