"""MetaWorld's tasks observed through a point cloud, in DP3's frame and crop."""

from typing import Any

import numpy as np

from diffusion_policy.env.point_cloud_env import PointCloudEnv, dp3_view, known_task, require
from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer

#: By difficulty. The paper's tables have all but push-back.
LEVELS = {
    "easy": (
        "button-press",
        "button-press-topdown",
        "button-press-topdown-wall",
        "button-press-wall",
        "coffee-button",
        "dial-turn",
        "door-close",
        "door-lock",
        "door-open",
        "door-unlock",
        "drawer-close",
        "drawer-open",
        "faucet-close",
        "faucet-open",
        "handle-press",
        "handle-press-side",
        "handle-pull",
        "handle-pull-side",
        "lever-pull",
        "plate-slide",
        "plate-slide-back",
        "plate-slide-back-side",
        "plate-slide-side",
        "reach",
        "reach-wall",
        "window-close",
        "window-open",
        "peg-unplug-side",
    ),
    "medium": (
        "basketball",
        "bin-picking",
        "box-close",
        "coffee-pull",
        "coffee-push",
        "hammer",
        "peg-insert-side",
        "push-wall",
        "soccer",
        "sweep",
        "sweep-into",
    ),
    "hard": ("assembly", "hand-insert", "pick-out-of-hole", "pick-place", "push", "push-back"),
    "very_hard": ("shelf-place", "disassemble", "stick-pull", "stick-push", "pick-place-wall"),
}
TASKS = tuple(task for tasks in LEVELS.values() for task in tasks)

CAMERA, CAMERA_POSITION, SIZE = "corner2", (0.6, 0.295, 0.8), 128
NEAR, FAR = 0.1, 1.5  # clipping planes, in units of the scene's extent
TILT = (61.4, -7.0)  # degrees that turn the camera's view until z is up
LOW, HIGH = (-0.5, -1.5, -0.795), (1.0, -0.4, 100.0)  # excludes the table's surface
MAX_STEPS = 200


class MetaWorldEnv(PointCloudEnv):
    """agent_pos (9,): positions of the hand and its two fingertips. Action (4,): xyz motion of the hand, gripper force.

    Args:
        task_name: one of TASKS, without '-v3'.
        terminate_on_success: end the episode when it is solved. Success at any step counts, so the score is known then.
    """

    def __init__(self, task_name: str, num_points: int = 512, terminate_on_success: bool = True):
        self.task_name = known_task(task_name, TASKS, "MetaWorld")
        require("metaworld", "metaworld")
        choose_renderer()
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE

        make: Any = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{self.task_name}-v3-goal-observable"]
        self.env = make(seed=0)
        self.env._freeze_rand_vec = False  # a new start at every reset,
        self.env.seeded_rand_vec = True  # drawn from the environment's generator
        self.terminate_on_success = terminate_on_success
        model = self.env.model
        model.cam_pos[model.camera(CAMERA).id] = CAMERA_POSITION
        model.vis.map.znear, model.vis.map.zfar = NEAR, FAR
        self._look(
            model, self.env.data, CAMERA, SIZE, dp3_view(model, *TILT, (0, 0, 0), LOW, HIGH), num_points, action_dim=4
        )

    def _reset(self, seed: int | None) -> None:
        import mujoco

        if seed is not None:
            self.env.seed(seed)
        self.raw, _ = self.env.reset()
        mujoco.mj_forward(self.env.model, self.env.data)  # moves the camera to its new place
        self._place_markers()

    def _step(self, action: np.ndarray) -> tuple[bool, bool]:
        self.raw, _, _, _, info = self.env.step(action)
        self._place_markers()
        solved = bool(info["success"])
        return solved, solved and self.terminate_on_success

    def render(self) -> Any:
        return np.ascontiguousarray(super().render()[::-1, ::-1])  # the camera is mounted upside down

    def _place_markers(self) -> None:
        """Move the goal's visible markers, which MetaWorld's `step` does too early and `reset` not at all."""
        for site in self.env._target_site_config:
            self.env._set_pos_site(*site)

    def agent_pos(self) -> np.ndarray:
        return np.concatenate(
            [
                self.env.get_endeff_pos(),
                self.env._get_site_pos("rightEndEffector"),
                self.env._get_site_pos("leftEndEffector"),
            ]
        )


def expert_policy(task_name: str) -> Any:
    """MetaWorld's scripted expert; `get_action(raw observation (39,)) -> (4,)`."""
    from metaworld.policies import ENV_POLICY_MAP

    policy: Any = ENV_POLICY_MAP[f"{task_name}-v3"]
    return policy()
