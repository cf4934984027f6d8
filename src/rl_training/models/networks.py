"""Networks that several algorithms use: perceptrons, the Nature CNN, and an encoder for each observation space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import InputError

Activation: TypeAlias = Literal["tanh", "relu", "elu", "silu"]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": partial(nn.ReLU, inplace=True),  # only the activation reads the output of a linear layer
    "elu": nn.ELU,
    "silu": nn.SiLU,
}
HIDDEN_GAIN = math.sqrt(2)
Init: TypeAlias = Literal["orthogonal", "torch"]  # torch: the default of nn.Linear and nn.Conv2d, usual in Q-learning


def initialize(layer: nn.Linear | nn.Conv2d, init: Init, gain: float = HIDDEN_GAIN) -> nn.Linear | nn.Conv2d:
    """Orthogonal: the weight is `gain` times an orthogonal matrix, the bias is zero."""
    if init == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer


def zero_linear(fan_in: int, fan_out: int) -> nn.Linear:
    """A linear layer initialised to zero: uniform policy, value 0 and reward 0 at first."""
    layer = nn.Linear(fan_in, fan_out)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(sizes: Sequence[int], activation: Activation = "tanh", *, init: Init = "orthogonal") -> nn.Sequential:
    """Linear layers with activations between them. The first of `sizes` is the input's."""
    return nn.Sequential(*list(mlp_trunk(sizes, activation, init=init))[:-1])


def mlp_trunk(sizes: Sequence[int], activation: Activation, *, init: Init = "orthogonal") -> nn.Sequential:
    """Linear layers, each followed by an activation. The first of `sizes` is the input's."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [initialize(nn.Linear(fan_in, fan_out), init), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


class NatureCNN(nn.Module):
    """The convolutional encoder of Mnih et al. (2015): uint8 images [B, ...] to features [B, 512] after a ReLU.

    Images are [H, W], [C, H, W], [H, W, C], or a stack [S, H, W], [S, C, H, W], [S, H, W, C] whose images become
    channels. Of the last and the third-last axis, the smaller one holds the channels.
    """

    MIN_SIDE = 36

    def __init__(self, space: gym.spaces.Box, init: Init = "orthogonal", *, dense: bool = True) -> None:
        """dense False: the features are the flattened convolutions, for heads with their own hidden layers."""
        super().__init__()
        last = len(space.shape) > 2 and space.shape[-1] < space.shape[-3]
        self.to_channels, (channels, height, width) = channels_first(space.shape, last=last)
        if min(height, width) < self.MIN_SIDE:
            raise InputError(
                f"images of shape {space.shape} are too small for the Nature CNN, which needs {self.MIN_SIDE} x "
                f"{self.MIN_SIDE}: resize them (gymnasium.wrappers.ResizeObservation) or make them vectors "
                "(gymnasium.wrappers.FlattenObservation)"
            )
        layers: list[nn.Module] = []
        for fan_in, fan_out, size, stride in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
            layers += [initialize(nn.Conv2d(fan_in, fan_out, size, stride), init), nn.ReLU(inplace=True)]
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            flat_size = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.size: int = 512 if dense else flat_size
        hidden = [initialize(nn.Linear(flat_size, self.size), init), nn.ReLU(inplace=True)] if dense else []
        self.dense = nn.Sequential(*hidden)
        self.convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 1.4 times as fast on CPUs

    def forward(self, obs: Tensor) -> Tensor:
        return self.features(self.pixels(obs))

    def pixels(self, obs: Tensor) -> Tensor:
        """Images [B, ...] as floats [B, C, H, W] in [0, 1]."""
        return self.to_channels(obs).to(torch.float32, memory_format=torch.channels_last).div_(255)

    def features(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.dense(self.convolutions(pixels)))


def channels_first(shape: tuple[int, ...], *, last: bool) -> tuple[Callable[[Tensor], Tensor], tuple[int, int, int]]:
    """(a function from images [B, *shape] to [B, C, H, W], (C, H, W)). last: the last axis holds the channels."""

    def to_channels(images: Tensor) -> Tensor:
        images = images.movedim(-1, -3) if last else images
        return images.unsqueeze(1) if len(shape) == 2 else images.flatten(1, -3)

    _, channels, height, width = to_channels(torch.empty(1, *shape)).shape
    return to_channels, (channels, height, width)


class Flatten(nn.Module):
    """A Box or MultiBinary observation as a float vector; bytes are scaled to [0, 1]."""

    def __init__(self, space: gym.Space) -> None:
        super().__init__()
        assert space.shape is not None
        self.size = math.prod(space.shape)
        self.is_bytes = isinstance(space, gym.spaces.Box) and space.dtype == np.uint8

    def forward(self, obs: Tensor) -> Tensor:
        flat = obs.reshape(obs.shape[0], -1).float()
        return flat / 255 if self.is_bytes else flat


class OneHot(nn.Module):
    """Categories 0 .. n - 1, one (Discrete) or several (MultiDiscrete), as a float vector."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.size = [int(n) for n in sizes], int(sum(sizes))

    def forward(self, obs: Tensor) -> Tensor:
        columns = obs.long().reshape(obs.shape[0], len(self.sizes)).unbind(1)
        return torch.cat([F.one_hot(x, n) for x, n in zip(columns, self.sizes, strict=True)], 1).float()


class DictEncoder(nn.Module):
    """The concatenated features of all entries of a Dict space."""

    def __init__(self, space: gym.spaces.Dict, init: Init = "orthogonal") -> None:
        super().__init__()
        self.keys = list(space.spaces)
        encoders = [make_encoder(part, init) for part in space.spaces.values()]
        self.size: int = sum(encoder.size for encoder in encoders)
        self.encoders = nn.ModuleList(encoders)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([encoder(obs[key]) for key, encoder in zip(self.keys, self.encoders, strict=True)], -1)


Encoder: TypeAlias = Flatten | OneHot | NatureCNN | DictEncoder


def make_encoder(space: gym.Space, init: Init = "orthogonal") -> Encoder:
    """Observations [B, ...] of a space (one array, or a flat dict of them) to features [B, encoder.size]."""
    if is_image(space):
        assert isinstance(space, gym.spaces.Box)
        return NatureCNN(space, init)
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        return Flatten(space)
    if isinstance(space, gym.spaces.Discrete):
        return OneHot([int(space.n)])
    if isinstance(space, gym.spaces.MultiDiscrete):
        return OneHot(space.nvec.flatten().tolist())
    if isinstance(space, gym.spaces.Dict):
        return DictEncoder(space, init)
    raise InputError(
        f"no network for observation space {space}: supported are Box, Discrete, MultiDiscrete, MultiBinary and "
        "Dict or Tuple of these; wrap the environment with gymnasium.wrappers.TransformObservation"
    )


def is_image(space: gym.Space) -> bool:
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3, 4)
