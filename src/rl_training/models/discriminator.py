"""The discriminator of adversarial imitation: how much a state and an action look like the expert's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.networks import Activation, NatureCNN, initialize, make_encoder, mlp_trunk
from rl_training.types import Array, Spaces, TensorTree

Points: TypeAlias = tuple[Tensor, ...]  # a vector [B, D], then images [B, C, H, W]: all that can be interpolated
LIMIT = 10.0  # of the normalised vector


class Discriminator(nn.Module):
    """The logit L(s, a) of D(s, a) = sigmoid(L), the probability that the expert was in s and took a.

    Categories become one-hot vectors, and Box actions are clipped to their bounds as the environment does. All that is
    not an image is one vector, normalised by statistics that `use_statistics` sets.
    """

    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, spaces: Spaces, hidden_sizes: Sequence[int] = (64, 64), activation: Activation = "tanh") -> None:
        super().__init__()
        seen = spaces.observation
        parts = seen.spaces if isinstance(seen, gym.spaces.Dict) else {"": seen}
        encoders = {key: make_encoder(part) for key, part in parts.items()}
        self.image_keys = [key for key, encoder in encoders.items() if isinstance(encoder, NatureCNN)]
        self.vector_keys = [key for key in encoders if key not in self.image_keys]
        self.images = nn.ModuleList(encoders[key] for key in self.image_keys)
        self.vectors = nn.ModuleList(encoders[key] for key in self.vector_keys)
        self.action = make_encoder(spaces.action)
        self.clips = isinstance(spaces.action, gym.spaces.Box)
        if isinstance(spaces.action, gym.spaces.Box):
            self.register_buffer("low", torch.as_tensor(spaces.action.low, dtype=torch.float32), persistent=False)
            self.register_buffer("high", torch.as_tensor(spaces.action.high, dtype=torch.float32), persistent=False)
        self.vector_size: int = sum(encoders[key].size for key in self.vector_keys) + self.action.size
        self.register_buffer("mean", torch.zeros(self.vector_size))
        self.register_buffer("scale", torch.ones(self.vector_size))
        sizes = [self.vector_size + sum(encoders[key].size for key in self.image_keys), *hidden_sizes]
        self.trunk = mlp_trunk(sizes, activation)
        self.head = initialize(nn.Linear(sizes[-1], 1), "orthogonal", 1.0)

    def forward(self, points: Points) -> Tensor:
        """Points to logits [B]."""
        vector, *pixels = points
        features = [cnn.features(image) for cnn, image in zip(self._cnns(), pixels, strict=True)]
        return cast(Tensor, self.head(self.trunk(torch.cat([vector, *features], -1))).squeeze(-1))

    def points(self, obs: TensorTree, action: Tensor) -> Points:
        """Observations and actions [B, ...] as the network takes them."""
        vector = ((self.vector(obs, action) - self.mean) * self.scale).clamp(-LIMIT, LIMIT)
        return vector, *(cnn.pixels(_part(obs, key)) for key, cnn in zip(self.image_keys, self._cnns(), strict=True))

    def vector(self, obs: TensorTree, action: Tensor) -> Tensor:
        """[B, D] What is not an image, before it is normalised."""
        parts = [encoder(_part(obs, key)) for key, encoder in zip(self.vector_keys, self.vectors, strict=True)]
        executed = action.clamp(self.low, self.high) if self.clips else action
        return torch.cat([*parts, self.action(executed)], -1)

    def use_statistics(self, mean: Array, std: Array) -> None:
        """The mean and deviation [D] of the vector."""
        self.mean.copy_(torch.from_numpy(mean.astype(np.float32)))
        self.scale.copy_(torch.from_numpy((1.0 / std).astype(np.float32)))

    def _cnns(self) -> list[NatureCNN]:
        return cast(list[NatureCNN], list(self.images))


def interpolate(one: Points, other: Points, weight: Tensor) -> Points:
    """weight [B] of `one`, the rest of `other`: one-hot vectors are mixed like all else."""
    return tuple(torch.lerp(b, a, weight.view(-1, *[1] * (a.dim() - 1))) for a, b in zip(one, other, strict=True))


def gradient_penalty(discriminator: Discriminator, points: Points) -> Tensor:
    """E[(|dL/dx| - 1)^2] at these points (Gulrajani et al., arXiv:1704.00028)."""
    points = tuple(point.detach().requires_grad_() for point in points)
    gradients = torch.autograd.grad(discriminator(points).sum(), points, create_graph=True)
    square = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
    return ((square + 1e-12).sqrt() - 1).square().mean()


def _part(obs: TensorTree, key: str) -> Tensor:
    return obs[key] if isinstance(obs, dict) else obs
