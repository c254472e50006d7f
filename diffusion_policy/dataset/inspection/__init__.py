"""What is in a recording, and what in it would harm a policy. The command is scripts/inspect_data.py."""

from diffusion_policy.dataset.inspection.finding import Finding
from diffusion_policy.dataset.inspection.findings import find
from diffusion_policy.dataset.inspection.measure import Facts, measure

__all__ = ["Facts", "Finding", "find", "measure"]
