"""The actor-critics of phasic policy gradient: an auxiliary value head on the trunk of the policy."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
from torch import Tensor, nn

from rl_training.models.actor_critic import ActorCritic, number_head, to_numbers
from rl_training.models.networks import Activation, make_encoder
from rl_training.ops.distributions import Distribution
from rl_training.types import TensorTree


class DualActorCritic(ActorCritic):
    """Policy and value function share nothing: each has its own encoder."""

    def make_critic(self, observation: gym.Space, sizes: Sequence[int], activation: Activation) -> None:
        self.value_encoder = make_encoder(observation)
        super().make_critic(observation, sizes, activation)
        self.auxiliary_head = number_head(sizes[-1])

    def forward(self, obs: TensorTree) -> tuple[Distribution, Tensor]:
        return self.policy(obs), self.value(obs)

    def value(self, obs: TensorTree) -> Tensor:
        return self.value_of(self.value_encoder(obs))

    def with_auxiliary(self, obs: TensorTree) -> tuple[Distribution, Tensor, Tensor]:
        """(policies, values [B], auxiliary values [B]) of observations [B, ...]."""
        hidden = self.policy_trunk(self.encoder(obs))  # once, for two heads
        policy = self.action_head.make(self.policy_head(hidden), self.log_std)
        return policy, self.value(obs), to_numbers(self.auxiliary_head, hidden)

    def networks(self) -> tuple[nn.Module, nn.Sequential, nn.Sequential]:
        encoder, policy, value = super().networks()
        if not list(encoder.parameters()):  # an encoder without weights is as good as shared, and faster
            return encoder, policy, value
        return nn.Identity(), nn.Sequential(encoder, *policy), nn.Sequential(self.value_encoder, *value)


class DetachedActorCritic(ActorCritic):
    """Policy and value function share encoder and trunk. The gradient of the value stops at its head."""

    def make_critic(self, observation: gym.Space, sizes: Sequence[int], activation: Activation) -> None:
        super().make_critic(observation, sizes[-1:], activation)  # no hidden layers of its own
        self.auxiliary_head = number_head(sizes[-1])

    def value_of(self, features: Tensor) -> Tensor:
        return to_numbers(self.value_head, self.policy_trunk(features).detach())

    def with_auxiliary(self, obs: TensorTree) -> tuple[Distribution, Tensor, Tensor]:
        """(policies, values [B], auxiliary values [B]) of observations [B, ...]."""
        hidden = self.policy_trunk(self.encoder(obs))  # once, for three heads
        policy = self.action_head.make(self.policy_head(hidden), self.log_std)
        return policy, to_numbers(self.value_head, hidden.detach()), to_numbers(self.auxiliary_head, hidden)

    def networks(self) -> tuple[nn.Module, nn.Sequential, nn.Sequential]:
        encoder, policy, _ = super().networks()
        return encoder, policy, nn.Sequential(*self.policy_trunk, self.value_head)


PhasicActorCritic = DualActorCritic | DetachedActorCritic
ARCHITECTURES: dict[str, type[PhasicActorCritic]] = {"dual": DualActorCritic, "detach": DetachedActorCritic}
