"""A policy and a value function for any supported pair of spaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, cast

import gymnasium as gym
import torch
from torch import Tensor, nn

from rl_training.config import InputError
from rl_training.models.networks import Activation, Encoder, NatureCNN, initialize, make_encoder, mlp_trunk
from rl_training.ops.distributions import Bernoulli, Categorical, DiagGaussian, Distribution, MultiCategorical, Numbers
from rl_training.types import Array, Spaces, TensorTree

Architecture: TypeAlias = Literal["shared", "dual", "detach"]


class ActorCritic(nn.Module):
    """An encoder, and a trunk of hidden layers and a linear head for each of policy and value.

    Only encoders of images have weights. For a single image there are no trunks: the heads read its features.

    shared: policy and value share the encoder. dual: each has its own. detach: they share encoder and trunk, and the
    gradient of the value stops at its head. The last two have an auxiliary value head on the trunk of the policy.
    """

    log_std: Tensor | None
    value_encoder: Encoder | None  # where the value function does not read the policy's
    auxiliary_head: nn.Module | None

    def __init__(
        self,
        spaces: Spaces,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "tanh",
        *,
        log_std_init: float = 0.0,
        architecture: Architecture = "shared",
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.action_head = ActionHead(spaces.action)
        self.encoder = make_encoder(spaces.observation)
        sizes = [self.encoder.size, *(() if isinstance(self.encoder, NatureCNN) else hidden_sizes)]
        self.policy_trunk = mlp_trunk(sizes, activation)
        self.policy_head = initialize(nn.Linear(sizes[-1], self.action_head.size), "orthogonal", 0.01)
        two_encoders = architecture == "dual" and any(True for _ in self.encoder.parameters())
        self.value_encoder = make_encoder(spaces.observation) if two_encoders else None
        self.value_trunk = mlp_trunk([] if architecture == "detach" else sizes, activation)
        self.value_head = initialize(nn.Linear(sizes[-1], 1), "orthogonal", 1.0)
        head = None if architecture == "shared" else initialize(nn.Linear(sizes[-1], 1), "orthogonal", 1.0)
        self.auxiliary_head = head
        shape = self.action_head.log_std_shape
        self.log_std = None if shape is None else nn.Parameter(torch.full(shape, log_std_init))

    def forward(self, obs: TensorTree) -> tuple[Distribution, Tensor]:
        """(policies, values [B]) of observations [B, ...]."""
        features = self.encoder(obs)
        return self.policy_of(features), self.value_of(self.value_features(obs, features))

    def with_auxiliary(self, obs: TensorTree) -> tuple[Distribution, Tensor, Tensor]:
        """(policies, values [B], auxiliary values [B]) of observations [B, ...]."""
        assert self.auxiliary_head is not None
        features = self.encoder(obs)
        hidden = self.policy_trunk(features)  # once, for two heads
        policy = self.action_head.make(self.policy_head(hidden), self.log_std)
        return policy, self.value_of(self.value_features(obs, features)), to_numbers(self.auxiliary_head, hidden)

    def policy(self, obs: TensorTree) -> Distribution:
        """The policies of observations [B, ...]."""
        return self.policy_of(self.encoder(obs))

    @torch.no_grad()
    def fixed_policy(self, obs: TensorTree) -> Distribution:
        """The policies of observations [B, ...] as they are now: nothing of them follows the parameters."""
        output = self.policy_output(self.encoder(obs))
        return self.action_head.make(output, None if self.log_std is None else self.log_std.clone())

    def acting_policy(self, output: Array) -> Distribution:
        """The policy given by outputs [N, action_head.size] of its network, on the CPU."""
        log_std = None if self.log_std is None else self.log_std.detach().cpu().numpy()
        return self.action_head.make(output if self.action_head.takes_numpy else torch.from_numpy(output), log_std)

    def value(self, obs: TensorTree) -> Tensor:
        """Observations [B, ...] to values [B]."""
        return self.value_of((self.encoder if self.value_encoder is None else self.value_encoder)(obs))

    def value_features(self, obs: TensorTree, features: Tensor) -> Tensor:
        """[B, size] What the value function reads. `features`: those of the policy."""
        return features if self.value_encoder is None else self.value_encoder(obs)

    def policy_of(self, features: Tensor) -> Distribution:
        """The policies in states with features [B, size]."""
        return self.action_head.make(self.policy_output(features), self.log_std)

    def policy_output(self, features: Tensor) -> Tensor:
        """Features [B, size] to [B, action_head.size]."""
        return cast(Tensor, self.policy_head(self.policy_trunk(features)))

    def value_of(self, features: Tensor) -> Tensor:
        """Features [B, size] to values [B]."""
        if self.architecture == "detach":
            return to_numbers(self.value_head, self.policy_trunk(features).detach())
        return to_numbers(self.value_head, self.value_trunk(features))

    @property
    def shared_encoder(self) -> nn.Module:
        """What both of `networks` read: observations, if each has an encoder of its own."""
        return self.encoder if self.value_encoder is None else nn.Identity()

    def networks(self) -> tuple[nn.Sequential, nn.Sequential]:
        """(policy, value): each trunk with its head, behind its encoder if that is not shared."""
        trunk = self.policy_trunk if self.architecture == "detach" else self.value_trunk
        policy, value = [*self.policy_trunk, self.policy_head], [*trunk, self.value_head]
        if self.value_encoder is not None:
            policy, value = [self.encoder, *policy], [self.value_encoder, *value]
        return nn.Sequential(*policy), nn.Sequential(*value)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of the policy, with what it shares, of the value function, and of the auxiliary head if any.

        Each group is in one piece in the order of `parameters()`.
        """
        value = parameters_of(self.value_encoder, self.value_trunk, self.value_head)
        auxiliary = parameters_of(self.auxiliary_head)
        others = set(map(id, value + auxiliary))
        policy = [p for p in self.parameters() if id(p) not in others]
        return {"policy": policy, "value": value} | ({"auxiliary": auxiliary} if auxiliary else {})


def parameters_of(*parts: nn.Module | None) -> list[nn.Parameter]:
    return [p for part in parts if part is not None for p in part.parameters()]


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
