"""A policy and a value function for any supported pair of spaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import gymnasium as gym
import torch
from torch import Tensor, nn

from rl_training.config import InputError
from rl_training.models.networks import Activation, NatureCNN, make_encoder, mlp
from rl_training.ops.distributions import Bernoulli, Categorical, DiagGaussian, Distribution, MultiCategorical, Numbers
from rl_training.types import Array, Spaces, TensorTree


class ActorCritic(nn.Module):
    """Separate perceptrons for policy and value on the encoded observation; linear heads where it is a single image.

    Only an encoder with weights (images) is shared between the two.
    """

    log_std: Tensor | None

    def __init__(
        self,
        spaces: Spaces,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "tanh",
        *,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.head = ActionHead(spaces.action)
        self.encoder = make_encoder(spaces.observation)
        hidden = () if isinstance(self.encoder, NatureCNN) else hidden_sizes
        self.policy = mlp([self.encoder.size, *hidden, self.head.size], activation, output_gain=0.01)
        self.critic = mlp([self.encoder.size, *hidden, 1], activation, output_gain=1.0)
        shape = self.head.log_std_shape
        self.log_std = None if shape is None else nn.Parameter(torch.full(shape, log_std_init))

    def forward(self, obs: TensorTree) -> tuple[Distribution, Tensor]:
        """The policy and the values [B] at observations [B, ...]."""
        features = self.encoder(obs)
        return self.head(self.policy(features), self.log_std), self.critic(features).squeeze(-1)

    def acting_policy(self, output: Array) -> Distribution:
        """The policy from outputs [N, head.size] of its network that came as an array."""
        log_std = None if self.log_std is None else self.log_std.detach().cpu().numpy()
        return self.head(output if self.head.takes_numpy else torch.from_numpy(output), log_std)

    def value(self, obs: TensorTree) -> Tensor:
        """[B]"""
        return cast(Tensor, self.critic(self.encoder(obs)).squeeze(-1))


class ActionHead:
    """What a network must put out for an action space, and the distribution that this makes."""

    def __init__(self, space: gym.Space) -> None:
        self.log_std_shape: tuple[int, ...] | None = None
        self.make: Callable[[Any], Distribution] | None = None
        self.takes_numpy = isinstance(space, gym.spaces.Discrete | gym.spaces.Box)
        if isinstance(space, gym.spaces.Discrete):
            self.size, self.make = int(space.n), Categorical
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            sizes = [int(n) for n in space.nvec]
            self.size, self.make = sum(sizes), lambda x: MultiCategorical(x, sizes)
        elif isinstance(space, gym.spaces.MultiBinary):
            shape = space.shape
            self.size, self.make = math.prod(shape), lambda x: Bernoulli(x.unflatten(-1, shape), len(shape))
        elif isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" and space.shape:
            self.size, self.log_std_shape = math.prod(space.shape), space.shape
        else:
            raise InputError(
                f"no policy for action space {space}: supported are Discrete, MultiDiscrete (one-dimensional), "
                "MultiBinary and Box of floats; wrap the environment with gymnasium.wrappers.TransformAction"
            )

    def __call__(self, output: Numbers, log_std: Numbers = None) -> Distribution:
        """From outputs [..., size]; ndarrays [N, size] will do if `takes_numpy`."""
        if self.make is not None:
            return self.make(output)
        shape = self.log_std_shape
        assert shape is not None
        return DiagGaussian(output if len(shape) == 1 else output.reshape(*output.shape[:-1], *shape), log_std)
