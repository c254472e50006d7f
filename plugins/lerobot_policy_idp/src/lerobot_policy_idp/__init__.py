"""Implicit Drifting Policy in LeRobot. Importing this package registers the policy type `idp`, as LeRobot does."""

from lerobot_policy_idp.configuration_idp import IDPConfig
from lerobot_policy_idp.modeling_idp import IDPPolicy
from lerobot_policy_idp.processor_idp import make_idp_pre_post_processors

__all__ = ["IDPConfig", "IDPPolicy", "make_idp_pre_post_processors"]
