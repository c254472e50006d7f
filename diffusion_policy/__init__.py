"""Diffusion Policy's interface: policies, datasets, runners, workspaces.

    from diffusion_policy import load_policy

Upstream's `diffusion_policy` is a namespace package, and projects add modules to it from folders of their own. They
still can: `__path__` is what Python computes for a namespace package, every folder of this name in the order of
`sys.path`.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion_policy.policy.loading import load_policy

__all__ = ["load_policy"]
# The first line is the form by which tools, such as that of the API pages, recognise a namespace package.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
__path__ = list(dict.fromkeys([*pkgutil.extend_path([], __name__), *__path__]))


def __getattr__(name: str) -> Any:
    """Import `load_policy` at its first use: torch takes seconds, which `import diffusion_policy` must not."""
    if name != "load_policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diffusion_policy.policy.loading import load_policy

    return load_policy
