"""DreamerV3's networks (Hafner et al., Nature 2025): world model, policy and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, cast

import gymnasium as gym
import torch
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.dreamer_layers import NormedMLP, NormedSiLU, linear, normed_silu, one_hot
from rl_training.models.dreamer_observations import DreamerDecoder, DreamerEncoder
from rl_training.models.rssm import GROUPS, RSSM, Latent
from rl_training.ops.distributions import BoundedGaussian, Categorical, MultiCategorical
from rl_training.ops.two_hot import symexp_bins, two_hot_loss, two_hot_mean
from rl_training.types import Number, Spaces

Function: TypeAlias = Callable[..., Tensor]
BINS = 255
LAYERS = 3  # hidden layers of encoder, decoder, policy and value; reward and continuation have one
POLICY_SCALE = 0.01  # of the initial weights of the policy's outputs


class Size(NamedTuple):
    """One size of all networks."""

    deter: int  # of the GRU's state
    hidden: int  # units of layers within the dynamics
    classes: int  # of each categorical latent
    units: int  # of all other perceptrons
    depth: int  # unit of the convolutions' channels


SIZES = {
    "1m": Size(512, 64, 4, 64, 4),
    "12m": Size(2048, 256, 16, 256, 16),
    "25m": Size(3072, 384, 24, 384, 24),
    "50m": Size(4096, 512, 32, 512, 32),
    "100m": Size(6144, 768, 48, 768, 48),
    "200m": Size(8192, 1024, 64, 1024, 64),
    "400m": Size(12288, 1536, 96, 1536, 96),
}


class Functions(NamedTuple):
    """One implementation of what the networks compute between matrix products."""

    normed_silu: Function = normed_silu
    two_hot_mean: Function = two_hot_mean
    two_hot_loss: Function = two_hot_loss


PLAIN = Functions()


class DreamerModel(nn.Module):
    """Observations and actions are [..., ...] with any leading axes."""

    bins: Tensor

    def __init__(self, spaces: Spaces, size: Size | str = "12m") -> None:
        super().__init__()
        self.size = size = SIZES[size] if isinstance(size, str) else size
        self.encoder = DreamerEncoder(spaces.observation, units=size.units, layers=LAYERS, depth=size.depth)
        self.policy = PolicyHead(spaces.action, size)
        self.dynamics = RSSM(
            self.encoder.size, self.policy.action_size, deter=size.deter, hidden=size.hidden, classes=size.classes
        )
        stoch = GROUPS * size.classes
        self.decoder = DreamerDecoder(
            spaces.observation, deter=size.deter, stoch=stoch, units=size.units, layers=LAYERS, depth=size.depth
        )
        self.reward = number_head(size, layers=1)
        self.continuation = ContinuationHead(size)
        self.value = number_head(size, layers=LAYERS)
        self.slow_value = number_head(size, layers=LAYERS).requires_grad_(False)
        self.slow_value.load_state_dict(self.value.state_dict())
        self.register_buffer("bins", symexp_bins(BINS), persistent=False)
        self.functions = PLAIN
        self.norms = [layer for layer in self.modules() if isinstance(layer, NormedSiLU)]

    def mean(self, logits: Tensor) -> Tensor:
        """Rewards or values [...] from logits [..., BINS]."""
        return self.functions.two_hot_mean(logits, self.bins)

    def loss(self, logits: Tensor, values: Tensor, others: Tensor | None = None, coefficient: Number = 0.0) -> Tensor:
        """The loss [...] of logits [..., BINS] for rewards or values [...], and `coefficient` times that for others."""
        return self.functions.two_hot_loss(logits, values, self.bins, others, coefficient)

    @contextmanager
    def using(self, functions: Functions) -> Iterator[None]:
        """A context in which the networks compute with these functions."""
        before = self.functions
        self._use(functions)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, functions: Functions) -> None:
        self.functions = functions
        for layer in self.norms:
            layer.function = functions.normed_silu


class Head(nn.Module):
    """A perceptron on latents."""

    def __init__(self, size: Size, layers: int) -> None:
        super().__init__()
        self.trunk = NormedMLP(size.deter + GROUPS * size.classes, size.units, layers)

    def hidden(self, latent: Latent | Tensor) -> Tensor:
        """latent: or its features."""
        return cast(Tensor, self.trunk(latent.features() if isinstance(latent, Latent) else latent))


class NumberHead(Head):
    """Latents to the logits [..., outputs] of a number's distribution."""

    def __init__(self, size: Size, layers: int, outputs: int, scale: float) -> None:
        super().__init__(size, layers)
        self.output = linear(size.units, outputs, scale)

    def forward(self, latent: Latent | Tensor) -> Tensor:
        return cast(Tensor, self.output(self.hidden(latent)))


def number_head(size: Size, *, layers: int) -> NumberHead:
    """For rewards and values: at first all logits are 0, and so is the mean."""
    return NumberHead(size, layers, BINS, 0.0)


class ContinuationHead(NumberHead):
    """Latents to the logit [...] of the probability that the episode goes on."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, 1, 1, 1.0)

    def forward(self, latent: Latent | Tensor) -> Tensor:
        return super().forward(latent).squeeze(-1).float()


Policy = Categorical | MultiCategorical | BoundedGaussian


class PolicyHead(Head):
    """Latents to policies. The dynamics read actions as vectors [..., action_size], categories as one-hots.

    Categorical policies are not mixed with the uniform distribution: the paper mixes 1 % in, its published code none.
    """

    def __init__(self, space: gym.Space, size: Size) -> None:
        super().__init__(size, LAYERS)
        self.counts: list[int] = []  # of each choice; none: actions are vectors
        if isinstance(space, gym.spaces.Discrete):
            self.counts = [int(space.n)]
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.counts = [int(n) for n in space.nvec]
        elif not (isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" and space.shape):
            raise InputError(
                f"no policy for action space {space}: supported are Discrete, MultiDiscrete (one-dimensional) and Box "
                "of floats; wrap the environment with gymnasium.wrappers.TransformAction"
            )
        self.single = isinstance(space, gym.spaces.Discrete)
        self.action_size = sum(self.counts) or math.prod(space.shape or ())
        outputs = self.action_size
        self.output = linear(size.units, outputs, POLICY_SCALE)
        self.spread = None if self.counts else linear(size.units, outputs, POLICY_SCALE)

    def forward(self, latent: Latent | Tensor) -> Policy:
        hidden = self.hidden(latent)
        spread = None if self.spread is None else self.spread(hidden).float()
        return self.of_outputs(self.output(hidden).float(), spread)

    def of_outputs(self, output: Tensor, spread: Tensor | None) -> Policy:
        if spread is not None:
            return BoundedGaussian(output, spread)
        return Categorical(output) if self.single else MultiCategorical(output, self.counts)

    def draw_noise(self, *shape: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[*shape, action_size]: what `sample` of a policy takes, drawn on the device of `like`."""
        noise = torch.empty(*shape, self.action_size, device=like.device)
        if self.spread is not None:
            return noise.normal_(generator=generator)
        return noise.exponential_(generator=generator).clamp_(min=torch.finfo(noise.dtype).tiny).log_()

    def vector(self, action: Tensor) -> Tensor:
        """Actions that a policy samples, to what the dynamics read: [..., action_size]. Those of a Box are vectors."""
        if self.spread is not None:
            return action.float()
        columns = [action] if self.single else action.unbind(-1)
        return torch.cat([one_hot(x, n) for x, n in zip(columns, self.counts, strict=True)], -1)
