"""Beyond the paper: IDP with several modes in one network call.

The paper starts a proposal from p_0. Here p_0 has K points c_1 .. c_K, so that one observation has K proposals; a
potential with several wells trains them, and a small head learns how often the experts use each.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Unpack

import torch
from einops import rearrange
from torch import Tensor, nn

from idp_workspace.generator import Generator
from idp_workspace.geometry import unit
from idp_workspace.options import Above, AtLeast
from idp_workspace.policy.idp import IDPPolicy, potential
from idp_workspace.policy.idp_options import PAPER_PROPOSAL, IDPOptions
from idp_workspace.proposals import called, probe_energy
from idp_workspace.upstream_arguments import UpstreamArguments

HIDDEN = 64  # units of the head


@dataclasses.dataclass(frozen=True, kw_only=True)
class IDPMultimodalOptions(IDPOptions):
    """Options of IDP with several modes: those of IDP, except for the proposals from noise and the memory bank."""

    modes: Annotated[int, AtLeast(1)] = 2
    """Number K of codes: at least as many as the modes of the experts; two codes may share a mode. 1 is IDP."""
    mode_width: Annotated[float, Above(0)] = 0.2
    """Standard deviation of experts within a mode, in normalised actions: codes do not divide experts that are closer
    together than this."""
    same_mode: bool = True
    """Whether experts of the same mode count more as neighbours in the geometry."""
    draw: Literal["chunk", "episode", "likeliest"] = "chunk"
    """How acting chooses a code: by a random draw for each chunk; by one draw for an episode, which keeps the code from
    chunk to chunk; or the likeliest one, without chance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proposal != PAPER_PROPOSAL:
            raise ValueError(
                "proposal: idp_multimodal starts from its codes; use objective=idp for proposals from noise"
            )
        if self.bank_size:
            raise ValueError(
                f"bank_size={self.bank_size}: a memory bank does not know the modes of earlier experts; use bank_size=0"
            )


class ModeHead(nn.Module):
    """log p(k | phi) (B, K) from features phi (B, F); uniform before training."""

    edge_layers = ("net",)  # few and small matrices: AdamW trains them

    def __init__(self, features: int, modes: int):
        super().__init__()
        last = nn.Linear(HIDDEN, modes)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Linear(features, HIDDEN), nn.SiLU(), last)

    def forward(self, phi: Tensor) -> Tensor:
        return self.net(phi).log_softmax(dim=1)


class IDPMultimodalPolicy(IDPPolicy):
    """IDP whose proposal starts from one of K codes, c_1 = 0 and the others fixed random chunks.

        y_k = f(o, c_k, 0)                                           K proposals
        q_k = softmax_k( -|y_k - a*|^2 / (2 width^2) )               the mode of the expert, without gradient
        m   = geometry of [phi(o) / |phi(o)|, q]                     neighbours: similar situation and same mode
        L   = sum_k q_k E(y_k) + lambda_prox E(z) - sum_k q_k log p(k | o)

        act: k = argmax_k( log p(k | o) + g_k ),  then f(o, c_k, 0)

    |.|^2 sums over action dimensions and averages over the chunk. The first sum is the gradient of a potential with K
    wells, -2 width^2 log sum_k exp(-|y_k - a*|^2 / (2 width^2)), in the metric of the geometry. Experts closer together
    than `mode_width` attract all codes alike, so that these agree and the policy is IDP there. Codes that are valid
    nowhere near an observation have a small p(k | o), and are not used.

    g is Gumbel noise, so that k has the probabilities p. With draw='episode' one g is kept for a whole episode: the
    code stays while it is probable, and changes when the observation says that the mode is another one. p comes from
    phi, which the network call needs anyway. With one mode it is IDP, to the last bit.
    """

    Options = IDPMultimodalOptions
    options: IDPMultimodalOptions
    codes: Tensor

    def __init__(self, options: IDPMultimodalOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        count, shape = self.options.modes, (self.generator.horizon, self.action_dim)
        codes = torch.randn(count - 1, *shape, generator=torch.Generator().manual_seed(0))
        self.register_buffer("codes", torch.cat([torch.zeros(1, *shape), codes]))
        self.head = ModeHead(feature_size(self.generator), count) if count > 1 else None
        self._noise: Tensor | None = None  # of the episodes that are being played, a row each
        self._in_episode = False
        self._usage: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ training
    def loss(self, cond: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        o, count = self.options, self.options.modes
        if self.head is None:
            return super().loss(cond, actions, mask)
        if mask is not None:
            raise ValueError("idp_multimodal does not know padded steps: use objective=idp")
        starts = self.codes.to(actions.dtype).repeat(len(actions), 1, 1)
        y, z = called(self, cond, actions, cond.repeat_interleave(count, dim=0), starts)
        r = rearrange(y, "(b k) h d -> b k h d", k=count) - actions.unsqueeze(1)
        q = responsibilities(r, o.mode_width)
        phi = self.generator.embedding(cond)
        m = self.excess(cond, actions, torch.cat([unit(phi), q], dim=1) if o.same_mode else phi)
        well = m.repeat_interleave(count, dim=0) if m.ndim else m
        e_k = rearrange(potential(r.flatten(0, 1) / o.t_star, well, o.energy_power), "(b k) h -> b k h", k=count)
        e_y, e_z = (q.unsqueeze(-1) * e_k).sum(dim=1).mean(), probe_energy(z, actions, m, o)
        log_p = self.head(phi)
        choice = -(q * log_p).sum(dim=1).mean()
        self._terms = {"loss/proposal": e_y.detach(), "loss/choice": choice.detach()}
        self._terms |= {"loss/probe": e_z.detach()} if len(z) else {}
        self._usage = {"modes/used": q.mean(dim=0), "modes/per_observation": log_p.detach().exp()}
        return o.loss_scale * (e_y + (self.probe_weight() * e_z.mean() if len(z) else 0) + choice)

    def get_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = super().get_optimizer(*arguments, **options)
        if self.head is not None:
            optimizer.add_param_group({"params": list(self.head.parameters()), "weight_decay": 0.0})
        return optimizer

    def metrics(self) -> dict[str, float]:
        """Return IDP's numbers, and how many codes the batch uses, and an observation (exp of the entropy)."""
        entropies = {name: -torch.special.xlogy(p, p).sum(-1).mean() for name, p in self._usage.items()}
        return super().metrics() | {name: entropy.exp().item() for name, entropy in entropies.items()}

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        code = self.codes[:1].expand(batch, -1, -1) if self.head is None else self.codes[self.choose(cond, batch)]
        y = self.generator(cond, code.to(self.dtype), 0.0)
        return y if self.nfe == 1 else self.generator(cond, y, self.options.t_star)

    def choose(self, cond: Tensor, batch: int) -> Tensor:
        """Return the code (batch,) of each observation: argmax_k log p(k | o) + g_k."""
        assert self.head is not None
        log_p = self.head(self.generator.embedding(cond))
        if self.options.draw == "likeliest":
            return log_p.argmax(dim=1)
        noise = self._noise if self._noise is not None else self.fresh_noise(batch)
        return (log_p + gumbel(noise)).argmax(dim=1)

    def fresh_noise(self, batch: int) -> Tensor:
        return torch.randn(batch, self.options.modes, device=self.device, dtype=self.dtype)

    def reset(self) -> None:
        """Begin new episodes, for draw='episode': each row of the batches that follow is one, until the next reset.

        Without it, as in a server whose batches mix clients, each chunk has a draw of its own.
        """
        self._noise, self._in_episode = None, True

    @torch.no_grad()
    def predict_action(self, obs_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.head is None or self.options.draw != "episode" or not self._in_episode:
            return super().predict_action(obs_dict)
        batch = next(iter(obs_dict.values())).shape[0]
        kept = self._noise
        self._noise = self.fresh_noise(batch) if kept is None or len(kept) != batch else kept
        return super().predict_action(obs_dict)


@torch.no_grad()
def responsibilities(r: Tensor, width: float) -> Tensor:
    """Return q (B, K), rows summing to one, from residuals y_k - a* (B, K, H, D)."""
    return (-r.square().sum(-1).mean(-1) / (2 * width**2)).softmax(dim=1)


def gumbel(noise: Tensor) -> Tensor:
    """Return Gumbel noise from normal noise: -log(-log Phi(n)).

    Normal, so that an exported graph takes it as its noise: a client that sends the same numbers again keeps the mode.
    """
    uniform = 0.5 * (1 + torch.erf(noise.float() / 2**0.5))
    return -(-uniform.clamp(1e-7, 1 - 1e-7).log()).log()


@torch.no_grad()
def feature_size(generator: Generator) -> int:
    """Return the size F of phi(o), from one pass of zeros through the encoder."""
    encoder, steps = generator.obs_encoder, generator.n_obs_steps
    zeros = {key: torch.zeros(1, steps, *entry.shape) for key, entry in generator.entries.items()}
    obs = zeros["obs"] if generator.obs_dim is not None else zeros
    training = encoder is not None and encoder.training
    if encoder is not None:
        encoder.eval()  # random crops would draw numbers
    size = generator.embedding(generator.encode(obs)).shape[1]
    if encoder is not None:
        encoder.train(training)
    return size
