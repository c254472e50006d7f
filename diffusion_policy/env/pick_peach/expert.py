"""Scripted demonstrations of Pick Peach, varied as those of a person are."""

from typing import Any

import numpy as np

from diffusion_policy.env.pick_peach.pick_peach_env import CONTROL_HZ, PEACH_RADIUS, PLATE, PLATE_TOP
from diffusion_policy.env.pick_peach.simulation import JOINTS, load_model

SIDES = ("left", "right")
SIDE_OFFSET = 0.055  # of a placement from the plate's middle line
DAMPING = 0.03  # of the inverse kinematics
MAX_TURN = 0.08  # radians of a joint in a control step
STEPS_AFTER = 15  # recorded after the success
TREMOR = 0.0008  # metres
TREMOR_TIME = 0.3  # seconds over which the tremor is correlated


def plan(joints: np.ndarray, peach: np.ndarray, placement: str, rng: np.random.Generator) -> np.ndarray:
    """Actions (T, 7) that bring the peach (x, y) to a side of the plate, from an arm at `joints` (6,).

    Speed, path, pitch and turn of the hand, height of the grasp, force and pauses are drawn from `rng`. The number of
    draws, and all that happens until the hand is above the plate's middle, do not depend on the side.
    """
    solver = ArmKinematics(joints)
    start = solver.pose()
    pace = rng.uniform(0.85, 1.3)
    pitch, hover_pitch = rng.uniform(0.9, 1.15), rng.uniform(0.85, 1.1)
    turn, roll = rng.normal(0, 0.08), rng.normal(0, 0.04)
    height = PEACH_RADIUS + rng.uniform(-0.004, 0.008)
    error = rng.normal(0, 0.003, 2)  # a person does not grasp in the very middle
    back = rng.uniform(0.06, 0.09)
    lift, hover = rng.uniform(0.1, 0.14), rng.uniform(0.11, 0.14)
    above = np.array([*(PLATE + rng.normal(0, 0.006, 2)), hover])
    offset, depth = SIDE_OFFSET + rng.uniform(-0.01, 0.01), rng.normal(0, 0.012)
    release = rng.uniform(0.006, 0.014)
    closed, squeeze, opening = rng.uniform(0.2, 0.35), rng.uniform(0.25, 0.4), rng.uniform(0.2, 0.35)
    pauses = rng.uniform(0.06, 0.2, 3)
    bumps = rng.normal(0, 0.012, (2, 3)) + [[0, 0, 0.01], [0, 0, 0.015]]

    grasp = np.array([*(peach + error), height])
    before = grasp + back * np.array([*(-np.cos(pitch) * _heading(grasp)), np.sin(pitch)])
    raised = grasp + [0, 0, lift]
    down = np.array(
        [PLATE[0] + depth, PLATE[1] + (offset if placement == "left" else -offset), PLATE_TOP + height + release]
    )
    up = down + [0, 0, 0.09]
    hand, carry, ready = (pitch, turn, roll), (hover_pitch, turn, roll), tuple(start[3:])
    script: list[tuple[float, np.ndarray, tuple, float, np.ndarray | None]] = [
        # seconds, position, pitch, turn and roll of the hand, gripper, bump of the path
        (1.1 * pace, before, hand, 1.0, bumps[0]),
        (0.6 * pace, grasp, hand, 1.0, None),
        (squeeze, grasp, hand, closed, None),
        (pauses[0], grasp, hand, closed, None),
        (0.7 * pace, raised, hand, closed, None),
        (1.2 * pace, above, carry, closed, bumps[1]),
        (pauses[1], above, carry, closed, None),
        (0.9 * pace, down, carry, closed, None),
        (pauses[2], down, carry, closed, None),
        (opening, down, carry, 1.0, None),
        (0.7 * pace, up, carry, 1.0, None),
        (0.4, up, carry, 1.0, None),
    ]
    poses, gripper = [], []
    last, held = np.array([*start[:3], *ready]), 1.0
    for seconds, position, hand_pose, grip, bump in script:
        goal = np.array([*position, *hand_pose])
        time = np.arange(1, round(seconds * CONTROL_HZ) + 1)[:, None] / max(1, round(seconds * CONTROL_HZ))
        path = last + (goal - last) * smooth(time)
        if bump is not None:
            path[:, :3] += bump * np.sin(np.pi * smooth(time))
        poses.append(path)
        gripper.append(held + (grip - held) * time[:, 0])
        last, held = goal, grip
    trajectory = np.concatenate(poses)
    trajectory[:, :3] += tremor(len(trajectory), rng)
    arm = np.stack([solver.follow(pose) for pose in trajectory])
    return np.concatenate([arm, np.concatenate(gripper)[:, None]], axis=1)


def smooth(time: np.ndarray) -> np.ndarray:
    """The path of least jerk from 0 to 1."""
    return time**3 * (10 - 15 * time + 6 * time**2)


def tremor(steps: int, rng: np.random.Generator) -> np.ndarray:
    """Slow noise (steps, 3), that starts at 0."""
    keep = np.exp(-1 / (TREMOR_TIME * CONTROL_HZ))
    noise = np.zeros((steps, 3))
    draws = rng.normal(0, TREMOR * np.sqrt(1 - keep**2), (steps, 3))
    for step in range(1, steps):
        noise[step] = keep * noise[step - 1] + draws[step]
    return noise


def _heading(position: np.ndarray) -> np.ndarray:
    """The horizontal direction from the base to a position."""
    return position[:2] / np.linalg.norm(position[:2])


class ArmKinematics:
    """Joint positions that follow poses of the hand, by damped least squares.

    A pose is the position between the fingertips, the pitch of the hand, its turn away from the direction in which
    the base sees it, and its roll.
    """

    def __init__(self, joints: np.ndarray):
        import mujoco

        self.mujoco, self.model = mujoco, load_model()
        self.data = mujoco.MjData(self.model)
        arm = [self.model.joint(name) for name in JOINTS]
        self.qpos, self.dofs = [j.qposadr[0] for j in arm], [j.dofadr[0] for j in arm]
        self.limits = np.stack([joint.range for joint in arm], axis=1)
        self.site = self.model.site("pinch").id
        self.jacobian = np.zeros((6, self.model.nv))
        self._set(np.array(joints, dtype=np.float64))

    def _set(self, joints: np.ndarray) -> None:
        self.joints = np.clip(joints, *self.limits)
        self.data.qpos[self.qpos] = self.joints
        self.mujoco.mj_kinematics(self.model, self.data)
        self.mujoco.mj_comPos(self.model, self.data)

    def pose(self) -> np.ndarray:
        """(6,): x, y, z, pitch, turn, roll."""
        rotation, position = self.data.site_xmat[self.site].reshape(3, 3), self.data.site_xpos[self.site]
        turn = np.arctan2(rotation[1, 0], rotation[0, 0]) - np.arctan2(position[1], position[0])
        roll = np.arctan2(rotation[2, 1], rotation[2, 2])
        return np.array([*position, -np.arcsin(rotation[2, 0]), turn, roll])

    def follow(self, pose: np.ndarray, iterations: int = 2) -> np.ndarray:
        """Move the joints towards a pose; return them."""
        x, y, z, pitch, turn, roll = pose
        wanted = rotation_of(np.arctan2(y, x) + turn, pitch, roll)
        for _ in range(iterations):
            rotation = self.data.site_xmat[self.site].reshape(3, 3)
            twist = 0.5 * np.cross(rotation, wanted, axis=0).sum(axis=1)  # small rotations, as a vector
            error = np.concatenate([[x, y, z] - self.data.site_xpos[self.site], twist])
            self.mujoco.mj_jacSite(self.model, self.data, self.jacobian[:3], self.jacobian[3:], self.site)
            jacobian = self.jacobian[:, self.dofs]
            change = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + DAMPING**2 * np.eye(6), error)
            self._set(self.joints + np.clip(change, -MAX_TURN, MAX_TURN))
        return self.joints.copy()


def rotation_of(yaw: float, pitch: float, roll: float) -> np.ndarray:
    """Rotate about x by roll, then about y by pitch, then about z by yaw: a (3, 3) matrix."""
    (cy, cp, cr), (sy, sp, sr) = np.cos([yaw, pitch, roll]), np.sin([yaw, pitch, roll])
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    about_y = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    about_x = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    return about_z @ about_y @ about_x


def placement_of(seed: int) -> str:
    """The side of the plate in the demonstration of a seed.

    Two seeds from an even one have both sides, and both places of the peach; four have every combination once.
    """
    return SIDES[(seed + seed // 2) % 2]


def demonstrate(env: Any, seed: int) -> np.ndarray:
    """Start an episode of `env` and return the expert's actions for it."""
    env.reset(seed=seed)
    return plan(env.joint_positions()[:6], env.peach_start, placement_of(seed), np.random.default_rng([seed, 1]))


def record(env: Any, seed: int) -> dict[str, np.ndarray] | None:
    """Play a demonstration -> its steps {qpos, qvel, action, camera: (T, ...)}, or None if it failed.

    It ends shortly after the peach rests on the plate. Each observation is that before its action.
    """
    actions, steps, left = demonstrate(env, seed), [], None
    for action in actions:
        action = action.astype(np.float32)
        seen = {"qpos": env.joint_positions(), "qvel": env.joint_velocities()}
        steps.append({key: value.astype(np.float32) for key, value in seen.items()} | {"action": action} | env.images())
        _, solved, _, _, _ = env.step(action)
        left = STEPS_AFTER if solved and left is None else left and left - 1
        if left == 0:
            break
    if env.outcome()["placement"] != placement_of(seed):
        return None
    return {key: np.stack([step[key] for step in steps]) for key in steps[0]}
