"""The networks of soft actor-critic: a squashed Gaussian policy and twin critics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.networks import Activation, make_encoder, mlp
from rl_training.ops.distributions import Numbers, TanhGaussian
from rl_training.types import Spaces, TensorTree

LOG_STD_RANGE = (-20.0, 2.0)
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "elu": partial(F.elu, inplace=True),
    "silu": partial(F.silu, inplace=True),
}


class SquashedGaussianPolicy(nn.Module):
    """The policy of soft actor-critic. Its actions are vectors [A]: a Box of several axes is flattened."""

    def __init__(self, spaces: Spaces, hidden_sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        assert spaces.action.shape is not None
        self.encoder = make_encoder(spaces.observation, "torch")
        outputs = 2 * math.prod(spaces.action.shape)
        self.network = mlp([self.encoder.size, *hidden_sizes, outputs], activation, init="torch")

    def forward(self, obs: TensorTree) -> TanhGaussian:
        """Observations [B, ...] to policies over actions [B, A]."""
        return self.policy(self.network(self.encoder(obs)))

    @staticmethod
    def policy(output: Numbers) -> TanhGaussian:
        """From outputs [B, 2 A] of the network, means first: a tensor or an array."""
        size = output.shape[-1] // 2
        return TanhGaussian(output[..., :size], output[..., size:].clip(*LOG_STD_RANGE))


class TwinCritic(nn.Module):
    """Two Q-values from one encoder. Unlike on-policy networks, critics of images have hidden layers: without any, the
    best action would be the same in every state."""

    def __init__(self, spaces: Spaces, hidden_sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        assert spaces.action.shape is not None
        self.encoder = make_encoder(spaces.observation, "torch")
        self.network = TwinMLP([self.encoder.size + math.prod(spaces.action.shape), *hidden_sizes, 1], activation)

    def forward(self, obs: TensorTree, action: Tensor) -> Tensor:
        """Observations [B, ...] and actions [B, A] to Q-values [2, B]."""
        return cast(Tensor, self.network(torch.cat([self.encoder(obs), action], -1)).squeeze(-1))


class TwinMLP(nn.Module):
    """Two perceptrons with the same input [B, in] and outputs [2, B, out].

    Each pair of layers is one batched product, which is faster than two. Activations work in place.
    """

    def __init__(self, sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        self.activation = IN_PLACE[activation]
        self.layers: list[tuple[nn.Parameter, nn.Parameter]] = []  # a ParameterList takes as long as a small product
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            bound = 1 / math.sqrt(fan_in)  # that of nn.Linear
            weight = nn.Parameter(torch.empty(2, fan_in, fan_out).uniform_(-bound, bound))
            bias = nn.Parameter(torch.empty(2, 1, fan_out).uniform_(-bound, bound))
            self.register_parameter(f"weight{i}", weight)
            self.register_parameter(f"bias{i}", bias)
            self.layers.append((weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(2, -1, -1)
        for i, (weight, bias) in enumerate(self.layers):
            x = torch.baddbmm(bias, self.activation(x) if i else x, weight)
        return x
