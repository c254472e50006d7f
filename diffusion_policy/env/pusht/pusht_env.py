"""PushT: a round agent pushes a T-shaped block onto a goal pose, simulated in 2D."""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pymunk
from gymnasium import spaces

from diffusion_policy.env.pusht import tee

WINDOW = 512
AGENT_RADIUS = 15
WALL_RADIUS = 2
WALLS = (((5, 506), (5, 5)), ((5, 5), (506, 5)), ((506, 5), (506, 506)), ((5, 506), (506, 506)))
SUCCESS_COVERAGE = 0.95
WALL_COLOR = (211, 211, 211, 255)
AGENT_COLOR = (65, 105, 225, 255)
BLOCK_COLOR = (119, 136, 153, 255)


class PushTEnv(gym.Env):
    """State PushT.

    Observation (5,): agent x y, block x y (body origin), block angle in [0, 2 pi).
    Action (2,): absolute target position of the agent in pixels, reached by a PD controller.
    Reward: fraction of the goal covered by the block, divided by 0.95 and clipped at 1.

    The start is drawn from `numpy.random.RandomState(seed)`. The seed is kept until another one is given, so `reset()`
    without a seed repeats the same start.

    Args:
        legacy: set the block's position before its angle. The rotation is about the centre of gravity, so the body
            origin moves away from the given position. Published test scores were measured that way.
        block_cog: centre of gravity of the block, (x, y) in its frame.
        damping: fraction of the block's velocity kept per second; None means 0: the block only moves while pushed.
        render_action: mark the last action on rendered frames.
        render_size: side of the rendered frames.
        reset_to_state: (5,) start used instead of the seed's; `reset(options={'state': ...})` does so for one episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    window_size = WINDOW
    sim_hz = 100
    control_hz = 10
    k_p, k_v = 100, 20
    still_distance = 5.0  # pixels

    def __init__(
        self,
        legacy: bool = False,
        block_cog: Sequence[float] | None = None,
        damping: float | None = None,
        render_action: bool = True,
        render_size: int = 96,
        reset_to_state: Sequence[float] | np.ndarray | None = None,
        render_mode: str = "rgb_array",
    ):
        self.legacy = legacy
        self.block_cog = block_cog
        self.damping = damping
        self.render_action = render_action
        self.render_size = render_size
        self.reset_to_state = reset_to_state
        self.render_mode = render_mode

        high = np.array([WINDOW, WINDOW, WINDOW, WINDOW, 2 * np.pi])
        self.observation_space = spaces.Box(np.zeros(5), high, dtype=np.float64)
        self.action_space = spaces.Box(0.0, float(WINDOW), shape=(2,), dtype=np.float64)

        self.goal_pose = np.array([256, 256, np.pi / 4])
        self.space: Any = None
        self.latest_action: np.ndarray | None = None
        self._renderer: Any = None
        self._coverage_of: tuple[Any, float] = (None, 0.0)  # poses of goal and block, and their coverage
        self.seed()

    def seed(self, seed: int | None = None) -> None:
        """Fix the start of the next episodes; without `seed`, choose a random one."""
        self._seed = int(np.random.randint(0, 25536)) if seed is None else int(seed)
        self._np_random = np.random.default_rng(self._seed)
        self._np_random_seed = self._seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seed(seed)
        self._setup()
        state = (options or {}).get("state")
        if state is None:
            state = self.reset_to_state
        if state is None:
            draw = np.random.RandomState(self._seed)
            state = [
                draw.randint(50, 450),
                draw.randint(50, 450),
                draw.randint(100, 400),
                draw.randint(100, 400),
                draw.randn() * 2 * np.pi - np.pi,
            ]
        self._set_state(state)
        return self._get_obs(), self._get_info()

    def step(self, action: np.ndarray | None) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move towards `action` (2,) for one control period; None observes without simulating."""
        self.n_contact_points = 0
        if action is not None:
            self.latest_action = action
            self._simulate(float(action[0]), float(action[1]))
        coverage = self._coverage()
        reward = min(max(coverage / SUCCESS_COVERAGE, 0.0), 1.0)
        return self._get_obs(), reward, coverage > SUCCESS_COVERAGE, False, self._get_info()

    def render(self) -> Any:
        """Frame (render_size, render_size, 3) uint8."""
        return self._render_frame(self.render_action)

    def render_large(self, size: int, chunk: np.ndarray | None) -> np.ndarray:
        """Frame (size, size, 3) uint8 for videos, with a predicted chunk of target positions (H, 2)."""
        frame = self._render_frame(self.render_action, size)
        if chunk is not None:
            self._renderer.mark_path(frame, chunk)
        return frame

    @property
    def tool_position(self) -> tuple[float, float]:
        """Where the agent is."""
        return tuple(self.agent.position)

    def close(self) -> None:
        self._renderer = None

    # Physics

    def _setup(self) -> None:
        """Build a new world: the cached contacts of a used one would change the first steps."""
        self.space = pymunk.Space()
        self.space.gravity = 0, 0
        self.space.damping = 0.0 if self.damping is None else self.damping
        walls = [pymunk.Segment(self.space.static_body, a, b, WALL_RADIUS) for a, b in WALLS]
        self.space.add(*walls)

        self.agent = pymunk.Body(body_type=pymunk.Body.KINEMATIC)
        self.agent.position = (256, 400)
        circle = pymunk.Circle(self.agent, AGENT_RADIUS)
        self.space.add(self.agent, circle)

        # Both moments are the bar's: every published dataset was recorded with this inertia.
        bar, stem = tee.corners(tee.BAR), tee.corners(tee.STEM)
        self.block = pymunk.Body(1, 2 * pymunk.moment_for_poly(1, bar))
        shapes = [pymunk.Poly(self.block, bar), pymunk.Poly(self.block, stem)]
        self.block.center_of_gravity = (shapes[0].center_of_gravity + shapes[1].center_of_gravity) / 2
        self.block.angle = 0
        self.block.position = (256, 300)
        self.space.add(self.block, *shapes)
        if self.block_cog is not None:
            self.block.center_of_gravity = tuple(self.block_cog)
        for shape, color in [
            *((wall, WALL_COLOR) for wall in walls),
            (circle, AGENT_COLOR),
            *((shape, BLOCK_COLOR) for shape in shapes),
        ]:
            shape.color = color

        if hasattr(self.space, "on_collision"):
            self.space.on_collision(0, 0, post_solve=self._count_contacts)
        else:  # pymunk < 7
            self.space.add_collision_handler(0, 0).post_solve = self._count_contacts
        self.n_contact_points = 0
        self.latest_action = None

    def _count_contacts(self, arbiter: Any, space: Any, data: Any) -> None:
        self.n_contact_points += len(arbiter.contact_point_set.points)

    def _set_state(self, state: Any) -> None:
        """Place agent and block at `state` (5,), then run one physics step to resolve overlaps."""
        state = np.asarray(state, dtype=np.float64).tolist()
        if len(state) != 5 or not all(map(math.isfinite, state)):
            raise ValueError(f"a PushT state is 5 finite numbers (agent xy, block xy, angle), got {state}")
        self.agent.position = state[:2]
        if self.legacy:
            self.block.position = state[2:4]
            self.block.angle = state[4]
        else:
            self.block.angle = state[4]
            self.block.position = state[2:4]
        self.space.step(1.0 / self.sim_hz)
        self._read_block()

    def _simulate(self, target_x: float, target_y: float) -> None:
        """Simulate one control period.

        The agent is kinematic, so nothing pushes it back. Its path is integrated here, in the engine's order, which is
        faster than reading it after every substep.
        """
        dt = 1.0 / self.sim_hz
        agent, space_step, k_p, k_v = self.agent, self.space.step, self.k_p, self.k_v
        x, y = agent.position
        vx, vy = agent.velocity
        for _ in range(self.sim_hz // self.control_hz):
            vx += (k_p * (target_x - x) + k_v * (0 - vx)) * dt
            vy += (k_p * (target_y - y) + k_v * (0 - vy)) * dt
            agent.velocity = vx, vy
            space_step(dt)
            x += vx * dt
            y += vy * dt
        self._read_block()

    def _read_block(self) -> None:
        block = self.block
        x, y = block.position
        self._block_pose = (x, y, block.angle)

    def _coverage(self) -> float:
        """Fraction of the goal's area covered by the block, cached while the block does not move."""
        poses = (tuple(self.goal_pose.tolist()), self._block_pose)
        if poses != self._coverage_of[0]:
            self._coverage_of = (poses, tee.shared_area(*poses) / tee.AREA)
        return self._coverage_of[1]

    # Observation

    def _get_obs(self) -> Any:
        x, y = self.agent.position
        bx, by, angle = self._block_pose
        return np.array([x, y, bx, by, angle % (2 * math.pi)])

    def _get_info(self) -> dict[str, Any]:
        substeps = self.sim_hz // self.control_hz
        return {
            "pos_agent": np.array(self.agent.position),
            "vel_agent": np.array(self.agent.velocity),
            "block_pose": np.array(self._block_pose),
            "goal_pose": self.goal_pose.copy(),
            "n_contacts": -(-self.n_contact_points // substeps),
        }

    def _render_frame(self, mark_action: bool, size: int | None = None) -> np.ndarray:
        """Frame (size, size, 3) uint8, with or without a cross at the last action; size: render_size, if None."""
        if self._renderer is None:
            from diffusion_policy.env.pusht.pusht_render import Renderer

            self._renderer = Renderer()
        frame = self._renderer.draw(self.space, tuple(self.goal_pose.tolist()), size or self.render_size)
        if mark_action and self.latest_action is not None:
            self._renderer.mark_action(frame, self.latest_action)
        return frame
