"""A policy and a value function for any supported pair of spaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import gymnasium as gym
import torch
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.networks import Activation, NatureCNN, initialize, make_encoder, mlp_trunk
from rl_training.ops.distributions import Bernoulli, Categorical, DiagGaussian, Distribution, MultiCategorical, Numbers
from rl_training.types import Array, Spaces, TensorTree


class ActorCritic(nn.Module):
    """An encoder, and a trunk of hidden layers and a linear head for each of policy and value.

    Only encoders of images have weights, which policy and value share. For a single image there are no trunks: the
    heads read its features.
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
        self.action_head = ActionHead(spaces.action)
        self.encoder = make_encoder(spaces.observation)
        sizes = [self.encoder.size, *(() if isinstance(self.encoder, NatureCNN) else hidden_sizes)]
        self.policy_trunk = mlp_trunk(sizes, activation)
        self.policy_head = initialize(nn.Linear(sizes[-1], self.action_head.size), "orthogonal", 0.01)
        self.make_critic(spaces.observation, sizes, activation)
        shape = self.action_head.log_std_shape
        self.log_std = None if shape is None else nn.Parameter(torch.full(shape, log_std_init))

    def make_critic(self, observation: gym.Space, sizes: Sequence[int], activation: Activation) -> None:
        """sizes: those of the features and of the hidden layers."""
        self.value_trunk = mlp_trunk(sizes, activation)
        self.value_head = number_head(sizes[-1])

    def forward(self, obs: TensorTree) -> tuple[Distribution, Tensor]:
        """(policies, values [B]) of observations [B, ...]."""
        features = self.encoder(obs)
        return self.policy_of(features), self.value_of(features)

    def policy(self, obs: TensorTree) -> Distribution:
        """The policies of observations [B, ...]."""
        return self.policy_of(self.encoder(obs))

    def value(self, obs: TensorTree) -> Tensor:
        """Observations [B, ...] to values [B]."""
        return self.value_of(self.encoder(obs))

    def policy_of(self, features: Tensor) -> Distribution:
        """The policies in states with features [B, size]."""
        return self.action_head.make(self.policy_output(features), self.log_std)

    def policy_output(self, features: Tensor) -> Tensor:
        """Features [B, size] to [B, action_head.size]."""
        return cast(Tensor, self.policy_head(self.policy_trunk(features)))

    def value_of(self, features: Tensor) -> Tensor:
        """Features [B, size] to values [B]."""
        return to_numbers(self.value_head, self.value_trunk(features))

    def acting_policy(self, output: Array) -> Distribution:
        """The policy given by outputs [N, action_head.size] of its network, on the CPU."""
        log_std = None if self.log_std is None else self.log_std.detach().cpu().numpy()
        return self.action_head.make(output if self.action_head.takes_numpy else torch.from_numpy(output), log_std)

    def networks(self) -> tuple[nn.Module, nn.Sequential, nn.Sequential]:
        """(what policy and value share, policy, value): each of the last two is its own layers, with its head."""
        policy = nn.Sequential(*self.policy_trunk, self.policy_head)
        return self.encoder, policy, nn.Sequential(*self.value_trunk, self.value_head)


def parameter_groups(model: ActorCritic) -> dict[str, list[nn.Parameter]]:
    """The parameters of the policy, with what it shares, of the value function, and of an auxiliary head if any.

    The names of the last two begin with `value_` and `auxiliary_`. Each group is in one piece in the order of
    `parameters()`.
    """
    groups: dict[str, list[nn.Parameter]] = {"policy": [], "value": []}
    for name, parameter in model.named_parameters():
        part = name.split("_")[0]
        groups.setdefault(part if part in ("value", "auxiliary") else "policy", []).append(parameter)
    return groups


def number_head(size: int) -> nn.Linear:
    """Features [B, size] to [B, 1]."""
    head = nn.Linear(size, 1)
    initialize(head, "orthogonal", 1.0)
    return head


def to_numbers(head: nn.Module, features: Tensor) -> Tensor:
    """Features [B, size] to numbers [B], by a head with one output."""
    return cast(Tensor, head(features).squeeze(-1))


class ActionHead:
    """For an action space: the number of outputs of a policy, and the distribution made from them."""

    def __init__(self, space: gym.Space) -> None:
        self.log_std_shape: tuple[int, ...] | None = None
        self.takes_numpy = isinstance(space, gym.spaces.Discrete | gym.spaces.Box)
        self.make: Callable[[Numbers, Numbers], Distribution]  # from outputs [..., size] and log_std
        if isinstance(space, gym.spaces.Discrete):
            self.size, self.make = int(space.n), lambda x, _: Categorical(x)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            sizes = [int(n) for n in space.nvec]
            self.size, self.make = sum(sizes), lambda x, _: MultiCategorical(x, sizes)
        elif isinstance(space, gym.spaces.MultiBinary):
            shape = space.shape
            self.size, self.make = math.prod(shape), lambda x, _: Bernoulli(x.unflatten(-1, shape), len(shape))
        elif isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" and space.shape:
            self.size, self.log_std_shape = math.prod(space.shape), space.shape
            self.make = self.gaussian
        else:
            raise InputError(
                f"no policy for action space {space}: supported are Discrete, MultiDiscrete (one-dimensional), "
                "MultiBinary and Box of floats; wrap the environment with gymnasium.wrappers.TransformAction"
            )

    @staticmethod
    def gaussian(mean: Numbers, log_std: Numbers) -> DiagGaussian:
        shape = log_std.shape
        return DiagGaussian(mean if len(shape) == 1 else mean.reshape(*mean.shape[:-1], *shape), log_std)
