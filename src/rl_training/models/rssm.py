"""DreamerV3's recurrent state-space model: a block GRU with categorical latents (Hafner et al., Nature 2025)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_training.models.dreamer_layers import BlockLinear, NormedMLP, NormedSiLU, linear, one_hot, split_last
from rl_training.ops.dreamer_steps import UNIMIX
from rl_training.types import Number

BLOCKS = 8
GROUPS = 32
PRIOR_LAYERS, POSTERIOR_LAYERS = 2, 1


class Latent(NamedTuple):
    """The state of the model."""

    deter: Tensor  # [..., D] the GRU's
    stoch: Tensor  # [..., S, C] one-hot samples of S categorical distributions

    def features(self) -> Tensor:
        """[..., D + S C] what the heads read."""
        return torch.cat([self.deter, self.stoch.flatten(-2)], -1)

    def detached(self) -> Latent:
        return Latent(self.deter.detach(), self.stoch.detach())


class RSSM(nn.Module):
    """Probabilities of latents are given as logits [..., S, C] that are log-probabilities, `UNIMIX` included."""

    def __init__(
        self, tokens: int, actions: int, *, deter: int, hidden: int, classes: int, groups: int = GROUPS
    ) -> None:
        """tokens, actions: the sizes of an encoded observation and of an action's vector."""
        super().__init__()
        self.deter, self.groups, self.classes = deter, groups, classes
        stoch = groups * classes
        self.of_deter = NormedMLP(deter, hidden, 1)
        self.of_stoch = NormedMLP(stoch, hidden, 1)
        self.of_action = NormedMLP(actions, hidden, 1)
        self.hidden = BlockLinear(deter + BLOCKS * 3 * hidden, deter, BLOCKS)
        self.hidden_norm = NormedSiLU(deter)
        self.gates = BlockLinear(deter, 3 * deter, BLOCKS)
        self.prior_trunk = NormedMLP(deter, hidden, PRIOR_LAYERS)
        self.prior_logits = linear(hidden, stoch)
        self.posterior_trunk = NormedMLP(deter + tokens, hidden, POSTERIOR_LAYERS)
        self.posterior_logits = linear(hidden, stoch)

    def initial(self, *shape: int) -> Latent:
        """Zeros, where an episode begins."""
        zeros = self.gates.bias.new_zeros
        return Latent(zeros(*shape, self.deter), zeros(*shape, self.groups, self.classes))

    def deterministic(self, latent: Latent, action: Tensor, first: Tensor | None = None) -> Tensor:
        """The GRU's next state [..., D] after actions [..., A].

        first [...]: where an episode begins. There the latent and the action count as zeros.
        """
        deter, stoch = latent.deter, latent.stoch.flatten(-2)
        if first is not None:
            kept = ~first.bool().unsqueeze(-1)
            deter, stoch, action = deter * kept, stoch * kept, action * kept
        inputs = torch.cat([self.of_deter(deter), self.of_stoch(stoch), self.of_action(bounded(action))], -1)
        return self.gru(deter, inputs)

    def gru(self, deter: Tensor, inputs: Tensor) -> Tensor:
        """Each block sees its part of the state and all of the inputs [..., 3 hidden]."""
        everywhere = inputs.unsqueeze(-2).expand(*inputs.shape[:-1], BLOCKS, inputs.shape[-1])
        seen = torch.cat([split_last(deter, BLOCKS).to(inputs.dtype), everywhere], -1)
        hidden = self.hidden_norm(self.hidden.of_blocks(seen))
        parts = split_last(self.gates(hidden), BLOCKS, 3).unbind(-2)
        reset, candidate, update = (part.flatten(-2) for part in parts)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(deter, candidate.to(deter.dtype), torch.sigmoid(update - 1).to(deter.dtype))

    def prior(self, deter: Tensor) -> Tensor:
        """Logits [..., S, C] of the latents that the model expects."""
        return self.mixed(self.prior_logits(self.prior_trunk(deter)))

    def posterior(self, deter: Tensor, tokens: Tensor) -> Tensor:
        """Logits [..., S, C] of the latents that an observation shows. tokens [..., E]: the observation, encoded."""
        return self.mixed(self.posterior_logits(self.posterior_trunk(torch.cat([deter, tokens.to(deter.dtype)], -1))))

    def mixed(self, logits: Tensor) -> Tensor:
        probs = split_last(logits.float(), self.groups).softmax(-1)
        return torch.log((1 - UNIMIX) * probs + UNIMIX / self.classes)

    def sample(self, logits: Tensor, noise: Tensor | None = None) -> Tensor:
        """One-hot samples [..., S, C], whose gradient is that of the probabilities. noise [..., S]: uniform numbers."""
        probs = logits.exp()
        if noise is None:
            noise = torch.rand(logits.shape[:-1], device=logits.device)
        return one_hot(inverse_cdf(probs.detach(), noise), self.classes) + (probs - probs.detach())

    def imagine(self, latent: Latent, action: Tensor, noise: Tensor | None = None) -> Latent:
        """The next state after actions [..., A], without an observation."""
        deter = self.deterministic(latent, action)
        return Latent(deter, self.sample(self.prior(deter), noise))

    def observe(
        self, tokens: Tensor, actions: Tensor, first: Tensor, carry: Latent, noise: Tensor | None = None
    ) -> tuple[Latent, Tensor]:
        """(states [T, N, ...], logits of the posteriors [T, N, S, C]) of sequences of observations.

        tokens [T, N, E]; actions [T, N, A]: those before each observation; first [T, N]: whether an episode begins with
        it; carry [N, ...]: the states before; noise [T, N, S].
        """
        deters, stochs, posteriors = [], [], []
        for t in range(len(tokens)):
            deter = self.deterministic(carry, actions[t], first[t])
            logits = self.posterior(deter, tokens[t])
            carry = Latent(deter, self.sample(logits, None if noise is None else noise[t]))
            deters.append(carry.deter)
            stochs.append(carry.stoch)
            posteriors.append(logits)
        return Latent(torch.stack(deters), torch.stack(stochs)), torch.stack(posteriors)

    def kl_losses(self, posterior: Tensor, prior: Tensor, free_nats: Number) -> tuple[Tensor, Tensor]:
        """(dynamics [...], representation [...]): KL(posterior || prior), where one trains the prior, the other the
        posterior. `free_nats` of the sum over all groups are not penalised."""
        dynamics = kl(posterior.detach(), prior).clamp(min=free_nats)
        representation = kl(posterior, prior.detach()).clamp(min=free_nats)
        return dynamics, representation


def bounded(action: Tensor) -> Tensor:
    """Actions beyond [-1, 1] keep their sign only. The divisor is a constant to the gradient."""
    return action / action.detach().abs().clamp(min=1)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Categories [...] with probabilities [..., C], chosen by uniform numbers [...] in [0, 1)."""
    below = probs.cumsum(-1)[..., :-1] <= uniform.unsqueeze(-1)  # the last sum, 1, may be rounded
    return below.sum(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) [...] of log-probabilities [..., S, C], summed over the groups."""
    return (p.exp() * (p - q)).sum((-2, -1))


def entropy(logits: Tensor) -> Tensor:
    """[...] of log-probabilities [..., S, C], summed over the groups."""
    return -(logits.exp() * logits).sum((-2, -1))
