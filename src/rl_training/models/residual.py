"""Residual towers over images and boards, as MuZero and EfficientZero (Ye et al., arXiv:2111.00210) have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.config import InputError
from rl_training.models.networks import _channels_first

Stem: TypeAlias = Literal["residual", "strided"]
MIN_SIDE_TO_SHRINK = 36  # smaller images, and boards, keep their size
CHANGE_GAIN = 10.0  # how much more a tower sees at first of what changes than of what stands still
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


class StackConvolution(nn.Conv2d):
    """A convolution of the newest image of a stack, and of what changed from each image to the next.

    Filters over the images themselves see mostly what stands still, and late what is small and moves.
    These are folded into such filters, so that images are read no more often.
    """

    fold: Tensor  # [C, C]

    def __init__(self, stack: int, fan_in: int, fan_out: int, size: int, stride: int, padding: int) -> None:
        super().__init__(fan_in, fan_out, size, stride, padding, bias=False)
        self.register_buffer("fold", newest_and_changes(stack).kron(torch.eye(fan_in // stack)))

    def forward(self, images: Tensor) -> Tensor:
        weight = torch.einsum("ochw,ci->oihw", self.weight, self.fold)
        return F.conv2d(images, weight, stride=self.stride, padding=self.padding)


def newest_and_changes(stack: int) -> Tensor:
    """[S, S] What makes of S images, the oldest first, the newest one and S - 1 changes."""
    change = torch.eye(stack) - torch.eye(stack).roll(-1, 1)
    change[0] = 0
    change *= CHANGE_GAIN
    change[0, -1] = 1
    return change


def first_convolution(stack: int, fan_in: int, fan_out: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    """Of planes that hold `stack` images; normalised."""
    padding = (size - stride + 1) // 2
    if stack > 1 and fan_in % stack == 0:
        layer: nn.Conv2d = StackConvolution(stack, fan_in, fan_out, size, stride, padding)
    else:
        layer = nn.Conv2d(fan_in, fan_out, size, stride, padding, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(fan_out))


def convolution(fan_in: int, fan_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)


def normalized(fan_in: int, fan_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(convolution(fan_in, fan_out, stride), nn.BatchNorm2d(fan_out))


def residual_blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(ResidualBlock(channels, channels) for _ in range(count)))


def representation_tower(
    planes: tuple[int, int, int], channels: int, blocks: int, *, stack: int = 1, stem: Stem = "residual"
) -> tuple[nn.Sequential, torch.Size]:
    """Planes [B, C, H, W], of `stack` images, to latents, and the shape of one of those; large images become 16 times
    smaller each way."""
    enter = STEMS[stem] if min(planes[1:]) >= MIN_SIDE_TO_SHRINK else flat_stem
    entry = nn.Sequential(*enter(stack, planes[0], channels))
    tower = nn.Sequential(entry, residual_blocks(channels, blocks))
    with torch.no_grad():
        shape = tower.eval()(torch.zeros(1, *planes)).shape[1:]
    return tower.train(), shape


def flat_stem(stack: int, planes: int, channels: int) -> list[nn.Module]:
    return [first_convolution(stack, planes, channels), nn.ReLU()]


def residual_stem(stack: int, planes: int, channels: int) -> list[nn.Module]:
    """EfficientZero's."""
    half = channels // 2
    return [
        first_convolution(stack, planes, half, stride=2),
        nn.ReLU(),
        ResidualBlock(half, half),
        ResidualBlock(half, channels, stride=2),
        ResidualBlock(channels, channels),
        nn.AvgPool2d(3, stride=2, padding=1),
        ResidualBlock(channels, channels),
        nn.AvgPool2d(3, stride=2, padding=1),
    ]


def strided_stem(stack: int, planes: int, channels: int) -> list[nn.Module]:
    """Large steps first, as the Nature CNN takes them, with as many filters: with 64 planes a sixth of the work."""
    filters = min(channels, 32)
    return [
        first_convolution(stack, planes, filters, size=8, stride=4),
        nn.ReLU(),
        normalized(filters, channels, stride=2),
        nn.ReLU(),
        ResidualBlock(channels, channels),
        nn.AvgPool2d(3, stride=2, padding=1),
    ]


STEMS: dict[Stem, Callable[[int, int, int], list[nn.Module]]] = {"residual": residual_stem, "strided": strided_stem}


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
