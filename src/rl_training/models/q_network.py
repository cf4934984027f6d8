"""The Q-network of DQN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import gymnasium as gym
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.networks import Activation, Encoder, NatureCNN, is_image, make_encoder, mlp
from rl_training.types import Spaces, TensorTree


class QNetwork(nn.Module):
    """A perceptron on the encoded observation; on a single image the Nature CNN with one hidden layer of 512 units.

    dueling (Wang et al., arXiv:1511.06581): Q = V + A - mean A, from two perceptrons. Unlike in the paper, the gradient
    that enters the convolutions is not scaled by 1/sqrt(2): clipping its norm is enough for stability.
    """

    def __init__(
        self,
        spaces: Spaces,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "relu",
        *,
        dueling: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(spaces.action, gym.spaces.Discrete):
            raise InputError(
                f"a value for each action needs Discrete actions, not {spaces.action}: use sac or ppo, or a "
                "gymnasium.ActionWrapper that offers a choice of actions"
            )
        actions = int(spaces.action.n)
        self.encoder: Encoder
        if is_image(spaces.observation):
            assert isinstance(spaces.observation, gym.spaces.Box)
            self.encoder, hidden_sizes = NatureCNN(spaces.observation, "torch", dense=False), (512,)
        else:
            self.encoder = make_encoder(spaces.observation, "torch")
        heads = (1, actions) if dueling else (actions,)
        streams = [mlp([self.encoder.size, *hidden_sizes, out], activation, init="torch") for out in heads]
        self.head = Dueling(*streams) if dueling else streams[0]

    def forward(self, obs: TensorTree) -> Tensor:
        """Observations [B, ...] to Q-values [B, A]."""
        return cast(Tensor, self.head(self.encoder(obs)))


class Dueling(nn.Module):
    def __init__(self, value: nn.Module, advantage: nn.Module) -> None:
        super().__init__()
        self.value, self.advantage = value, advantage

    def forward(self, features: Tensor) -> Tensor:
        value, advantage = self.value(features), self.advantage(features)
        return cast(Tensor, value + advantage - advantage.mean(-1, keepdim=True))
