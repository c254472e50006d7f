"""Expert of Tool-Hang."""

import numpy as np
from scipy.spatial.transform import Rotation

from diffusion_policy.env.robomimic.experts.base import CLOSE, OPEN, Goal, Obs, PoseExpert

# Points of the frame, from the corner at which its observed pose is: the rod goes down, the bar in the direction -x,
# and the bar's end has a post that points up.
GRIP = np.array([0.0, 0.0, -0.034])
TIP = np.array([0.0, 0.0, -0.2207])
END = np.array([-0.0912, 0.0, 0.0])
# Points of the stand and of the tool, from their centres.
HOLE = np.array([0.0, 0.045, 0.155])
BOTTOM = 0.15  # depth of the hole
RING = np.array([-0.0935, 0.0, 0.0])
WAY = np.array(  # of the ring around the post: slope, inward, high as in `ring_at`; between, 1 mm is free
    [
        [0.0, 0.0035, 0.009],
        [np.deg2rad(40), 0.0035, 0.005],
        [np.deg2rad(47), 0.0047, 0.0025],
        [np.deg2rad(47), 0.007, 0.001],
        [np.deg2rad(47), 0.012, 0.0],
    ]
)
# The frame stands with its bar away from the robot: in the other directions an arm's joint reaches its limit.
UPRIGHT = Rotation.from_rotvec([0.0, 0.0, np.pi])


class ToolHangExpert(PoseExpert):
    """Put the frame into the stand, then hang the tool on it.

    Frame: above, down, grasp, lifted and raised upright, over the stand, in, open, away. Tool: above, down, grasp,
    lifted, its ring over the post, lowered and tilted around the corner, along the bar, open, away.
    """

    stages = (
        "above_frame",
        "down_frame",
        "grasp_frame",
        "lift_frame",
        "over_stand",
        "insert",
        "release_frame",
        "leave_frame",
        "rise",
        "above_tool",
        "down_tool",
        "grasp_tool",
        "lift_tool",
        "over_post",
        "lower",
        "tilt",
        "release_tool",
        "leave_tool",
    )
    patience = 150

    def draw(self) -> None:
        rng = self.rng
        self.hover = rng.uniform(0.06, 0.12, size=2)  # before the two grasps
        self.lean = rng.uniform(0.35, 0.75)  # of the hand against the frame, so that it stays above the table
        self.grip_frame = GRIP + [0.0, 0.0, rng.uniform(-0.01, 0.008)]
        self.grip_tool = np.array([rng.uniform(-0.022, -0.005), 0.0, rng.uniform(-0.004, 0.004)])
        self.detour = rng.normal(0.0, [0.03, 0.03, 0.015], size=(4, 3))
        self.squeeze = rng.integers(8, 15, size=2)
        self.carry = rng.uniform([1.18, 1.10], [1.22, 1.16])
        self.slope = np.deg2rad(rng.uniform(14.0, 24.0))  # of the ring over the post
        self.still = 0  # steps for which the hand has been near its goal
        self.done = 0.0  # part of the way around the post

    def again(self, obs: Obs) -> str | None:
        if self.waited <= self.patience:
            return None
        if obs["object"][-2] == 0.0:  # the frame does not stand
            return "above_frame"
        in_hand = (
            self.stages[self.stage] in ("over_post", "lower", "tilt") and np.ptp(obs["robot0_gripper_qpos"]) > 0.02
        )
        return "over_post" if in_hand else "above_tool"

    def steady(self, near: bool | np.bool_) -> bool:
        """Whether the last four observations were near."""
        self.still = self.still + 1 if near else 0
        return self.still >= 4

    # ------------------------------------------------------------------ what is where
    def hand(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        return obs["robot0_eef_pos"], Rotation.from_quat(obs["robot0_eef_quat"])

    def frame(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        return obs["object"][21:24], Rotation.from_quat(obs["object"][24:28])

    def tool(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        return obs["object"][35:38], Rotation.from_quat(obs["object"][38:42])

    def hole(self, obs: Obs) -> np.ndarray:
        return obs["object"][7:10] + Rotation.from_quat(obs["object"][10:14]).apply(HOLE)

    def approach(self, obs: Obs, point: np.ndarray, way: int) -> np.ndarray:
        """A point, with a detour while the hand is far from it."""
        away = np.linalg.norm(point - obs["robot0_eef_pos"])
        return point + self.detour[way] * np.clip(away / 0.1 - 0.2, 0.0, 1.0)

    # ------------------------------------------------------------------ the frame
    def at_frame(self, obs: Obs) -> tuple[np.ndarray, np.ndarray, Rotation]:
        """Point of the grasp, direction in which the hand points there, and its turn."""
        position, rotation = self.frame(obs)
        points = np.array([0.0, np.cos(self.lean), -np.sin(self.lean)])
        across = np.array([-1.0, 0.0, 0.0])
        grasp = Rotation.from_matrix(np.stack([np.cross(across, points), across, points], axis=1))
        _, now = self.hand(obs)
        return position + rotation.apply(self.grip_frame), rotation.apply(points), rotation * grasp * now.inv()

    def above_frame(self, obs: Obs) -> Goal:
        point, points, turn = self.at_frame(obs)
        target = point - self.hover[0] * points
        away = np.linalg.norm(target - obs["robot0_eef_pos"])
        return Goal(self.approach(obs, target, 0), turn, OPEN, away < 0.01 and turn.magnitude() < 0.06)

    def down_frame(self, obs: Obs) -> Goal:
        point, _, turn = self.at_frame(obs)
        return Goal(point, turn, OPEN, np.linalg.norm(point - obs["robot0_eef_pos"]) < 0.006, 0.8, 0.5)

    def grasp_frame(self, obs: Obs) -> Goal:
        return Goal(obs["robot0_eef_pos"], Rotation.identity(), CLOSE, self.waited >= self.squeeze[0], calm=0.0)

    def lift_frame(self, obs: Obs) -> Goal:
        hand, _ = self.hand(obs)
        if self.waited == 0:
            self.lifted = hand + [0.0, 0.03, 0.0]
        _, rotation = self.frame(obs)
        turn = UPRIGHT * rotation.inv()
        done = hand[2] > self.carry[0] - 0.03 and turn.magnitude() < 0.3
        target = np.array([*self.lifted[:2], self.carry[0]])
        return Goal(target, turn if hand[2] > 1.0 else Rotation.identity(), CLOSE, done, calm=0.5)

    def align_frame(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        """The way of the rod's tip to the top of the hole, and the turn that makes the rod upright."""
        position, rotation = self.frame(obs)
        return self.hole(obs) - position - rotation.apply(TIP), UPRIGHT * rotation.inv()

    def over_stand(self, obs: Obs) -> Goal:
        way, turn = self.align_frame(obs)
        way = way + [0.0, 0.0, 0.02]
        near = self.steady(np.linalg.norm(way) < 0.003 and turn.magnitude() < 0.02)
        target = self.approach(obs, obs["robot0_eef_pos"] + way, 1)
        return Goal(target, turn, CLOSE, near, calm=0.2)

    def insert(self, obs: Obs) -> Goal:
        way, turn = self.align_frame(obs)
        aligned = way[2] > 0.01 or (np.linalg.norm(way[:2]) < 0.002 and turn.magnitude() < 0.02)
        down = 0.015 if aligned else 0.0
        target = obs["robot0_eef_pos"] + [way[0], way[1], -down]
        return Goal(target, turn, CLOSE, way[2] > BOTTOM - 0.006, calm=0.05)

    def release_frame(self, obs: Obs) -> Goal:
        return Goal(obs["robot0_eef_pos"], Rotation.identity(), OPEN, self.waited >= 6, calm=0.0)

    def leave_frame(self, obs: Obs) -> Goal:
        hand, rotation = self.hand(obs)
        if self.waited == 0:
            self.left = hand - 0.1 * rotation.apply([0.0, 0.0, 1.0])
        return Goal(self.left, Rotation.identity(), OPEN, np.linalg.norm(self.left - hand) < 0.03)

    def rise(self, obs: Obs) -> Goal:
        """Above the frame, which stands between the hand and the tool."""
        hand, _ = self.hand(obs)
        target = np.array([*self.left[:2], self.carry[0]])
        return Goal(target, Rotation.identity(), OPEN, hand[2] > self.carry[0] - 0.04)

    # ------------------------------------------------------------------ the tool
    def at_tool(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        """Point of the grasp, and the hand's turn."""
        position, rotation = self.tool(obs)
        grasp = Rotation.from_rotvec([0.0, np.pi, 0.0])
        return position + rotation.apply(self.grip_tool), rotation * grasp * self.hand(obs)[1].inv()

    def above_tool(self, obs: Obs) -> Goal:
        point, turn = self.at_tool(obs)
        target = point + [0.0, 0.0, self.hover[1]]
        if np.linalg.norm((target - obs["robot0_eef_pos"])[:2]) > 0.1:
            target[2] = self.carry[0]
        away = np.linalg.norm(target - obs["robot0_eef_pos"])
        return Goal(self.approach(obs, target, 2), turn, OPEN, away < 0.01 and turn.magnitude() < 0.06)

    def down_tool(self, obs: Obs) -> Goal:
        point, turn = self.at_tool(obs)
        return Goal(point, turn, OPEN, np.linalg.norm(point - obs["robot0_eef_pos"]) < 0.006, 0.8, 0.5)

    def grasp_tool(self, obs: Obs) -> Goal:
        return Goal(obs["robot0_eef_pos"], Rotation.identity(), CLOSE, self.waited >= self.squeeze[1], calm=0.0)

    def lift_tool(self, obs: Obs) -> Goal:
        hand, _ = self.hand(obs)
        if self.waited == 0:
            self.lifted = hand + [0.02, 0.0, 0.0]
        target = np.array([*self.lifted[:2], self.carry[1]])
        return Goal(target, Rotation.identity(), CLOSE, hand[2] > self.carry[1] - 0.03, calm=0.5)

    def ring_at(self, obs: Obs, inward: float, high: float, slope: float) -> tuple[np.ndarray, Rotation]:
        """Way and turn that bring the ring to a point of the plane of the frame.

        Args:
            obs: the observation.
            inward: from the bar's end along the bar.
            high: above the bar's middle line.
            slope: angle of the ring's plane with the bar; 0 is around the post, a right angle around the bar.
        """
        corner, frame = self.frame(obs)
        along, up = frame.apply([1.0, 0.0, 0.0]), frame.apply([0.0, 0.0, 1.0])
        axis = np.cos(slope) * up - np.sin(slope) * along
        handle = -np.cos(slope) * along - np.sin(slope) * up
        wanted = Rotation.from_matrix(np.stack([handle, np.cross(axis, handle), axis], axis=1))
        position, rotation = self.tool(obs)
        point = corner + frame.apply(END) + inward * along + high * up
        return point - position - rotation.apply(RING), wanted * rotation.inv()

    def over_post(self, obs: Obs) -> Goal:
        way, turn = self.ring_at(obs, 0.0035, 0.045, self.slope)
        near = self.steady(np.linalg.norm(way) < 0.004 and turn.magnitude() < 0.04)
        return Goal(self.approach(obs, obs["robot0_eef_pos"] + way, 3), turn, CLOSE, near, calm=0.1)

    def lower(self, obs: Obs) -> Goal:
        way, turn = self.ring_at(obs, WAY[0, 1], WAY[0, 2], self.slope)
        down = way[2] if np.linalg.norm(way[:2]) < 0.003 else 0.0
        target = obs["robot0_eef_pos"] + [way[0], way[1], np.clip(down, -0.01, 0.01)]
        self.done = 0.0
        return Goal(target, turn, CLOSE, self.steady(np.linalg.norm(way) < 0.002), calm=0.05)

    def tilt(self, obs: Obs) -> Goal:
        slopes, inwards, heights = WAY.T
        slopes = np.concatenate([[self.slope], slopes[1:]])
        at = np.arange(len(WAY))
        way, turn = self.ring_at(
            obs,
            np.interp(self.done, at, inwards),
            np.interp(self.done, at, heights),
            np.interp(self.done, at, slopes),
        )
        near = np.linalg.norm(way) < 0.003 and turn.magnitude() < 0.1
        self.done += 0.1 * self.speed if near else 0.015  # where the ring is stuck, the hand pulls more and more
        inward, _, high = self.frame(obs)[1].inv().apply(self.ring_at(obs, 0.01, 0.0, 0.0)[0])
        around = inward < 0.0 and abs(high) < 0.004  # the arm may be stretched too far for the last of the way
        return Goal(obs["robot0_eef_pos"] + way, turn, CLOSE, around or self.done > at[-1], calm=0.05)

    def release_tool(self, obs: Obs) -> Goal:
        return Goal(obs["robot0_eef_pos"], Rotation.identity(), OPEN, self.waited >= 5, calm=0.0)

    def leave_tool(self, obs: Obs) -> Goal:
        hand, rotation = self.hand(obs)
        if self.waited == 0:
            self.left = hand - 0.12 * rotation.apply([0.0, 0.0, 1.0])
        return Goal(self.left, Rotation.identity(), OPEN, False)
