"""The residual towers of MuZero and EfficientZero (Ye et al., arXiv:2111.00210), for images and boards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.networks import channels_first, zero_linear
from rl_training.ops.augment import channels_last

Stem: TypeAlias = Literal["residual", "strided"]
MIN_SIDE_TO_SHRINK = 36  # smaller images, and boards, keep their size
CHANGE_GAIN = 10.0  # initial weight of the differences between images, relative to the newest image
HEAD_CHANNELS, HEAD_UNITS = 16, 32


class Planes(nn.Module):
    """Images or boards [B, ...] as float planes [B, C, H, W]; bytes are scaled to [0, 1]."""

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
    """`channels_first`, where of three axes two are equal, the third holds planes: a board may have many of them."""
    return channels_first(shape, last=channels_last(shape))


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + two convolutions of x). The shortcut is the identity unless the block changes the shape."""

    def __init__(self, fan_in: int, fan_out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = normalized(fan_in, fan_out, stride), normalized(fan_out, fan_out)
        same = fan_in == fan_out and stride == 1
        self.shortcut = nn.Identity() if same else convolution(fan_in, fan_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class Dynamics(nn.Module):
    """Planes [B, channels + actions, H, W] of latent and action to the next latent [B, channels, H, W].

    The output of the first convolution is added to the latent.
    """

    def __init__(self, channels: int, action_planes: int, blocks: int) -> None:
        super().__init__()
        self.channels = channels
        self.first = normalized(channels + action_planes, channels)
        self.blocks = residual_blocks(channels, blocks)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.blocks(F.relu(x[:, : self.channels] + self.first(x))))


class StackConvolution(nn.Conv2d):
    """A convolution over the newest image of a stack and the differences between consecutive images.

    Filters over the images themselves respond mostly to the background, and learn late to see small moving objects.
    The differences are folded into the filters, so the images are convolved only once.
    """

    fold: Tensor  # [C, C]

    def __init__(self, stack: int, fan_in: int, fan_out: int, size: int, stride: int, padding: int) -> None:
        super().__init__(fan_in, fan_out, size, stride, padding, bias=False)
        self.register_buffer("fold", newest_and_changes(stack).kron(torch.eye(fan_in // stack)))

    def forward(self, images: Tensor) -> Tensor:
        weight = torch.einsum("ochw,ci->oihw", self.weight, self.fold)
        return F.conv2d(images, weight, stride=self.stride, padding=self.padding)


def newest_and_changes(stack: int) -> Tensor:
    """[S, S] The matrix from S images, oldest first, to the newest image and the S - 1 scaled differences."""
    change = CHANGE_GAIN * (torch.eye(stack) - torch.eye(stack).roll(-1, 1))
    change[0] = torch.eye(stack)[-1]
    return change


def first_convolution(stack: int, fan_in: int, fan_out: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    """A normalised convolution over the planes of `stack` images."""
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
    """(a tower from planes [B, *planes] of `stack` images to latents, the shape of a latent).

    Height and width of large images are divided by 16.
    """
    make_stem = STEMS[stem] if min(planes[1:]) >= MIN_SIDE_TO_SHRINK else flat_stem
    tower = nn.Sequential(nn.Sequential(*make_stem(stack, planes[0], channels)), residual_blocks(channels, blocks))
    with torch.no_grad():
        shape = tower.eval()(torch.zeros(1, *planes)).shape[1:]
    return tower.train(), shape


def flat_stem(stack: int, planes: int, channels: int) -> list[nn.Module]:
    return [first_convolution(stack, planes, channels), nn.ReLU()]


def residual_stem(stack: int, planes: int, channels: int) -> list[nn.Module]:
    """EfficientZero's downsampling."""
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
    """Large strides first, with the Nature CNN's number of filters: a sixth of the work at 64 channels."""
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
    """[A, H * W] The cells where each action may put a stone, if actions are the cells or the columns of a board.

    Convolutions are the same at every cell. They would have to count from the border to find the cell of an action.
    """
    if actions == height * width:
        return torch.eye(actions)
    if actions == width:
        return torch.eye(actions).repeat(1, height)
    return None


def flat_features(latent_shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """(a 1x1 convolution of latents [B, C, H, W] to vectors, the size of a vector)."""
    channels, height, width = latent_shape
    layers = [nn.Conv2d(channels, HEAD_CHANNELS, 1, bias=False), nn.BatchNorm2d(HEAD_CHANNELS), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers), HEAD_CHANNELS * height * width


def dense_head(fan_in: int, outputs: int) -> nn.Sequential:
    """One hidden layer and a `zero_linear` layer."""
    hidden = [nn.Linear(fan_in, HEAD_UNITS), nn.BatchNorm1d(HEAD_UNITS), nn.ReLU()]
    return nn.Sequential(*hidden, zero_linear(HEAD_UNITS, outputs))
