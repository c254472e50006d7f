"""One class per objective. Each accepts the arguments of upstream's policies and its own options."""

from idp_workspace.policy.consistency import ConsistencyPolicy, ConsistencyTrainingPolicy
from idp_workspace.policy.consistency_flow import ConsistencyFlowPolicy
from idp_workspace.policy.diffusion import DDPMPolicy
from idp_workspace.policy.edm_teacher import EDMTeacherPolicy
from idp_workspace.policy.flow_matching import FlowMatchingPolicy
from idp_workspace.policy.idp import IDPPolicy
from idp_workspace.policy.idp_multimodal import IDPMultimodalPolicy
from idp_workspace.policy.mean_flow import MeanFlowPolicy
from idp_workspace.policy.mip import MIPPolicy
from idp_workspace.policy.naive_drifting import NaiveDriftingPolicy
from idp_workspace.policy.ofp import OFPPolicy
from idp_workspace.policy.one_step_diffusion import OneStepDiffusionPolicy
from idp_workspace.policy.regression import RegressionPolicy
from idp_workspace.policy.straight_flow import StraightFlowPolicy
from idp_workspace.policy.tsd import TSDPolicy

__all__ = [
    "ConsistencyFlowPolicy",
    "ConsistencyPolicy",
    "ConsistencyTrainingPolicy",
    "DDPMPolicy",
    "EDMTeacherPolicy",
    "FlowMatchingPolicy",
    "IDPMultimodalPolicy",
    "IDPPolicy",
    "MIPPolicy",
    "MeanFlowPolicy",
    "NaiveDriftingPolicy",
    "OFPPolicy",
    "OneStepDiffusionPolicy",
    "RegressionPolicy",
    "StraightFlowPolicy",
    "TSDPolicy",
]
