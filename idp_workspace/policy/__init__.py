"""One class an objective; each accepts the arguments of upstream's policies and its own."""
from idp_workspace.policy.idp import IDPPolicy
from idp_workspace.policy.naive_drifting import NaiveDriftingPolicy

__all__ = ["IDPPolicy", "NaiveDriftingPolicy"]
