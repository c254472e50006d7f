"""One class an objective; each accepts the arguments of upstream's policies and its own."""
from idp_workspace.policy.diffusion import DDPMPolicy
from idp_workspace.policy.flow import FlowMatchingPolicy
from idp_workspace.policy.flow_policy import ConsistencyFlowPolicy
from idp_workspace.policy.idp import IDPPolicy
from idp_workspace.policy.mip import MIPPolicy
from idp_workspace.policy.naive_drifting import NaiveDriftingPolicy
from idp_workspace.policy.regression import RegressionPolicy
from idp_workspace.policy.straight_flow import StraightFlowPolicy
from idp_workspace.policy.tsd import TSDPolicy

__all__ = [
    "ConsistencyFlowPolicy", "DDPMPolicy", "FlowMatchingPolicy", "IDPPolicy", "MIPPolicy", "NaiveDriftingPolicy", "RegressionPolicy",
    "StraightFlowPolicy", "TSDPolicy",
]
