"""Scripted experts that solve Lift, Can, Square and Tool-Hang, for demonstrations where no human ones are available.

An expert is a small state machine: in every stage the hand moves to a point above, at or away from the object, and the
stage ends when the hand is there. Heights, offsets and speed are drawn for each episode, so that demonstrations differ.
"""

from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.robomimic.experts.base import REACH, TURN, PoseExpert, ScriptedExpert
from diffusion_policy.env.robomimic.experts.pick import CanExpert, LiftExpert
from diffusion_policy.env.robomimic.experts.square import SquareExpert
from diffusion_policy.env.robomimic.experts.tool_hang import ToolHangExpert


def env_args(task: str) -> dict[str, Any]:
    """env_args of a dataset of this task recorded here, as robomimic's for robosuite 1.5, in the world frame."""
    arm = {
        "type": "OSC_POSE",
        "input_max": 1,
        "input_min": -1,
        "output_max": [REACH] * 3 + [TURN] * 3,
        "output_min": [-REACH] * 3 + [-TURN] * 3,
        "kp": 150,
        "damping_ratio": 1,
        "impedance_mode": "fixed",
        "kp_limits": [0, 300],
        "damping_ratio_limits": [0, 10],
        "position_limits": None,
        "orientation_limits": None,
        "uncouple_pos_ori": True,
        "input_type": "delta",
        "input_ref_frame": "world",
        "interpolation": None,
        "ramp_ratio": 0.2,
        "gripper": {"type": "GRIP"},
    }
    name, extra = TASKS[task]
    robots = ["Panda", "Panda"] if "env_configuration" in extra else ["Panda"]
    return {
        "env_name": name,
        "env_version": "1.5.1",
        "type": 1,
        "env_kwargs": {
            "robots": robots,
            "controller_configs": {"type": "BASIC", "body_parts": {"right": arm}},
            "control_freq": 20,
            "reward_shaping": False,
            **extra,
        },
    }


# robomimic's name of a task -> robosuite's, and further arguments of its environment
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lift": ("Lift", {}),
    "can": ("PickPlaceCan", {}),
    "square": ("NutAssemblySquare", {}),
    "tool_hang": ("ToolHang", {}),
    "transport": ("TwoArmTransport", {"env_configuration": "opposed"}),
}


EXPERTS: dict[str, type[ScriptedExpert] | type[PoseExpert]] = {
    "lift": LiftExpert,
    "can": CanExpert,
    "square": SquareExpert,
    "tool_hang": ToolHangExpert,
}


def make_expert(task: str, rng: np.random.Generator) -> ScriptedExpert | PoseExpert:
    """The expert of a task; its variations are drawn from `rng`."""
    if task not in EXPERTS:
        raise ConfigError(f"no scripted expert for {task!r}; experts exist for: {', '.join(EXPERTS)}.")
    return EXPERTS[task](rng)
