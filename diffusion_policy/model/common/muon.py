"""Muon for hidden matrices and AdamW for the other parameters, as one optimiser."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_policy.model.diffusion.transformer_for_diffusion import MultiHeadAttention

log = logging.getLogger(__name__)

#: Layers whose weights are matrices.
LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, MultiHeadAttention)
#: Of the quintic x -> a x + b x^3 + c x^5 whose iteration moves all singular values towards 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al., 2024) for the groups with `muon: True`, AdamW for the others, with one state dict.

        B <- momentum B + G,    W <- W - lr max(1, rows / columns)^1/2 orthogonal(G + momentum B)

    Matrices of equal shape are orthogonalised together, and in float32: torch.optim.Muon handles one at a time, in
    bfloat16, which is slow on a CPU. Kernels of convolutions count as matrices (out, in x width).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        muon_lr: float = 0.02,
        momentum: float = 0.95,
        iterations: int = 5,
        **adamw: Any,
    ):
        super().__init__([group | {"lr": muon_lr} if group.get("muon") else group for group in params], lr=lr, **adamw)
        self.momentum = momentum
        self.iterations = iterations

    @staticmethod
    def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
        """The hidden matrices of a model, and its other parameters."""
        hidden = hidden_matrices(model)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in trained.items() if name in hidden], "muon": True},
            {"params": [p for name, p in trained.items() if name not in hidden], "muon": False},
        ]
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        log.info(
            "Muon trains %d hidden matrices (%d numbers), AdamW the other %d parameters (%d numbers)",
            len(groups[0]["params"]),
            sizes[0],
            len(groups[1]["params"]),
            sizes[1],
        )
        return groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group.get("muon"):
                self._update(group)
        super().step()  # skips the parameters without a gradient, which the update has taken
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        equal: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                rows, columns = parameter.flatten(1).shape
                equal[min(rows, columns), max(rows, columns), parameter.device].append(parameter)
        for parameters in equal.values():
            gradients, tall = [], [parameter.shape[0] > parameter.flatten(1).shape[1] for parameter in parameters]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    # AdamW expects a step in every state that it loads.
                    state["step"], state["momentum_buffer"] = torch.zeros(()), torch.zeros_like(parameter)
                state["step"] += 1
                gradient: Any = parameter.grad
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
                gradients.append(gradient.lerp(buffer, self.momentum).flatten(1))
            stacked = torch.stack([g.T if flip else g for g, flip in zip(gradients, tall, strict=True)])
            for parameter, flip, update in zip(parameters, tall, orthogonal(stacked, self.iterations), strict=True):
                update = (update.T if flip else update).reshape(parameter.shape)
                rows, columns = parameter.flatten(1).shape
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
                parameter.grad = None


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Matrices (N, r, c), r <= c, with their singular values moved towards 1 by Newton-Schulz iterations.

    x <- q x with q = a + b g + c g^2, g = x x^T. Everything but the first and the last product is done on g, which is
    smaller than x: g <- q g q.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    gram, product = x @ x.mT, None
    for remaining in reversed(range(iterations)):
        q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        q.diagonal(dim1=1, dim2=2).add_(a)
        product = q if product is None else q @ product
        if remaining:
            gram = q @ gram @ q
    return x if product is None else product @ x


def hidden_matrices(module: nn.Module) -> set[str]:
    """Names of the weights between hidden layers, which Muon trains.

    A network lists the layers that read data or write actions in `edge_layers`. Those, biases, norms and embeddings
    are left to AdamW.
    """
    names, edges = set(), set()
    for prefix, child in module.named_modules():
        edges |= {f"{prefix}.{edge}".lstrip(".") for edge in getattr(child, "edge_layers", ())}
        for name, parameter in child.named_parameters(recurse=False):
            if isinstance(child, LAYERS) and parameter.ndim > 1 and min(parameter.flatten(1).shape) > 1:
                names.add(f"{prefix}.{name}".lstrip("."))
    return {name for name in names if not any(name.startswith(f"{edge}.") for edge in edges)}
