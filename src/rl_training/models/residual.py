"""Residual towers over images and boards, as MuZero and EfficientZero (Ye et al., arXiv:2111.00210) have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.config import InputError
from rl_training.models.networks import _channels_first

MIN_SIDE_TO_SHRINK = 36  # smaller images, and boards, keep their size
HEAD_CHANNELS, HEAD_UNITS = 16, 32


class Planes(nn.Module):
    """Images or boards [B, ...] as planes [B, channels, height, width] of floats; bytes are scaled to [0, 1]."""

    def __init__(self, space: gym.Space) -> None:
        super().__init__()
        if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (2, 3, 4):
            raise InputError(
                f"network 'conv' needs images or the planes of a board (a Box of 2, 3 or 4 axes), not {space}: use "
                "network 'mlp'"
            )
        self.to_channels, self.shape = planes_first(space.shape)
        self.is_bytes = space.dtype == np.uint8

    def forward(self, obs: Tensor) -> Tensor:
        planes = self.to_channels(obs).to(torch.float32, memory_format=torch.channels_last)
        return planes / 255 if self.is_bytes else planes


def planes_first(shape: tuple[int, ...]) -> tuple[Callable[[Tensor], Tensor], tuple[int, int, int]]:
    """How to bring [B, *shape] to [B, C, H, W], and what C, H, W then are.

    A board may have more planes than a side has squares, so where two of three axes are equal, the third holds planes.
    """
    if len(shape) == 3 and shape[1] == shape[2]:
        return lambda x: x, shape
    if len(shape) == 3 and shape[0] == shape[1]:
        return lambda x: x.permute(0, 3, 1, 2), (shape[2], shape[0], shape[1])
    return _channels_first(shape)


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + two convolutions of x); the shortcut is x itself unless the block changes the shape."""

    def __init__(self, fan_in: int, fan_out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = normalized(fan_in, fan_out, stride), normalized(fan_out, fan_out)
        same = fan_in == fan_out and stride == 1
        self.shortcut = nn.Identity() if same else convolution(fan_in, fan_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class Dynamics(nn.Module):
    """The latent and the action, planes [B, channels + actions, H, W], to the next latent [B, channels, H, W].

    What the first convolution puts out is added to the latent.
    """

    def __init__(self, channels: int, action_planes: int, blocks: int) -> None:
        super().__init__()
        self.channels = channels
        self.first = normalized(channels + action_planes, channels)
        self.blocks = residual_blocks(channels, blocks)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.blocks(F.relu(x[:, : self.channels] + self.first(x))))


def convolution(fan_in: int, fan_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)


def normalized(fan_in: int, fan_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(convolution(fan_in, fan_out, stride), nn.BatchNorm2d(fan_out))


def residual_blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(ResidualBlock(channels, channels) for _ in range(count)))


def representation_tower(planes: tuple[int, int, int], channels: int, blocks: int) -> tuple[nn.Sequential, torch.Size]:
    """Planes [B, C, H, W] to latents, and the shape of one of those; large images become 16 times smaller each way."""
    shrinks = min(planes[1:]) >= MIN_SIDE_TO_SHRINK
    entry = shrinking(planes[0], channels) if shrinks else nn.Sequential(normalized(planes[0], channels), nn.ReLU())
    tower = nn.Sequential(entry, residual_blocks(channels, blocks))
    with torch.no_grad():
        shape = tower.eval()(torch.zeros(1, *planes)).shape[1:]
    return tower.train(), shape


def shrinking(planes: int, channels: int) -> nn.Sequential:
    half = channels // 2
    return nn.Sequential(
        normalized(planes, half, stride=2),
        nn.ReLU(),
        ResidualBlock(half, half),
        ResidualBlock(half, channels, stride=2),
        ResidualBlock(channels, channels),
        nn.AvgPool2d(3, stride=2, padding=1),
        ResidualBlock(channels, channels),
        nn.AvgPool2d(3, stride=2, padding=1),
    )


def places_on_board(actions: int, height: int, width: int) -> Tensor | None:
    """[A, H * W] 1 where an action may put a stone, if actions are a board's cells or its columns: convolutions, alike
    everywhere, would have to find the place of action number 3 by counting from the edge."""
    if actions == height * width:
        return torch.eye(actions)
    if actions == width:
        return torch.eye(actions).repeat(1, height)
    return None


def flat_features(latent_shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """The latent [B, C, H, W] as a vector, and that vector's size: a few channels of each cell."""
    channels, height, width = latent_shape
    layers = [nn.Conv2d(channels, HEAD_CHANNELS, 1, bias=False), nn.BatchNorm2d(HEAD_CHANNELS), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers), HEAD_CHANNELS * height * width


def dense_head(fan_in: int, last: Callable[[int], nn.Linear]) -> nn.Sequential:
    """One hidden layer, then what `last` makes for its units."""
    return nn.Sequential(nn.Linear(fan_in, HEAD_UNITS), nn.BatchNorm1d(HEAD_UNITS), nn.ReLU(), last(HEAD_UNITS))
