"""DreamerV3's encoder and decoder: vectors, categories and images, alone or in a Dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.dreamer_layers import BlockLinear, NormedMLP, NormedSiLU, convolution, linear, one_hot
from rl_training.models.networks import channels_first, is_image
from rl_training.models.rssm import BLOCKS, Latent
from rl_training.ops.two_hot import symexp, symlog
from rl_training.types import TensorTree

MULTIPLES = (2, 3, 4, 4)  # channels of the convolutions, in units of `depth`; each halves the image
KERNEL = 5
SIDES = (48, 256)  # of an image after padding


class Vector:
    """A continuous observation: the network reads symlog(x), and predicts it with squared error."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.axes = tuple(shape), len(shape)
        self.size = math.prod(shape)

    def inputs(self, obs: Tensor) -> Tensor:
        """[..., *shape] -> [..., size]"""
        return symlog(flat(obs, self.axes).float())

    def loss(self, output: Tensor, obs: Tensor) -> Tensor:
        """[...] summed over the numbers of an observation."""
        return (output.float() - self.inputs(obs)).square().sum(-1)

    def observation(self, output: Tensor) -> Tensor:
        """Outputs [..., size] -> the predicted observation [..., *shape]."""
        return symexp(output.float()).reshape(*output.shape[:-1], *self.shape)


class Categories:
    """A discrete observation: one-hot vectors, predicted with cross-entropy."""

    def __init__(self, shape: Sequence[int], counts: Sequence[int]) -> None:
        self.shape, self.axes, self.counts = tuple(shape), len(shape), [int(n) for n in counts]
        self.size = sum(self.counts)

    def columns(self, obs: Tensor) -> tuple[Tensor, ...]:
        return flat(obs, self.axes).long().unbind(-1)

    def inputs(self, obs: Tensor) -> Tensor:
        return torch.cat([one_hot(x, n) for x, n in zip(self.columns(obs), self.counts, strict=True)], -1)

    def loss(self, output: Tensor, obs: Tensor) -> Tensor:
        parts = zip(torch.split(output.float(), self.counts, -1), self.columns(obs), strict=True)
        chosen = [F.log_softmax(part, -1).gather(-1, x.unsqueeze(-1)).squeeze(-1) for part, x in parts]
        return -torch.stack(chosen).sum(0)

    def observation(self, output: Tensor) -> Tensor:
        """The most likely categories."""
        likely = [part.argmax(-1) for part in torch.split(output, self.counts, -1)]
        return torch.stack(likely, -1).reshape(*output.shape[:-1], *self.shape)


class Image:
    """An image of bytes, or a stack of them: channels first, padded to sides that four halvings divide.

    The published encoder takes only images with three axes and such sides, where nothing is padded.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.last = len(shape) > 2 and shape[-1] < shape[-3]  # whether the last axis holds the channels
        self.to_channels: Callable[[Tensor], Tensor]
        self.to_channels, (self.channels, self.height, self.width) = channels_first(shape, last=self.last)
        self.shape, self.axes = shape, len(shape)

    def pixels(self, obs: Tensor) -> Tensor:
        """Bytes [B, *shape] -> [B, C, H, W] in [0, 1]."""
        return self.to_channels(obs).float() / 255

    def inputs(self, obs: Tensor, height: int, width: int) -> Tensor:
        """[B, *shape] -> [B, C, height, width], from -.5 to .5."""
        return F.pad(self.pixels(obs) - 0.5, self.padding(height, width))

    def padding(self, height: int, width: int) -> tuple[int, int, int, int]:
        """(left, right, top, bottom)"""
        x, y = width - self.width, height - self.height
        return x // 2, x - x // 2, y // 2, y - y // 2

    def cropped(self, image: Tensor) -> Tensor:
        """[..., C, height, width] -> [..., C, H, W]"""
        left, _, top, _ = self.padding(*image.shape[-2:])
        return image[..., top : top + self.height, left : left + self.width]

    def loss(self, output: Tensor, obs: Tensor) -> Tensor:
        """[...] squared error summed over the pixels. output [..., C, H, W]."""
        lead = output.shape[:-3]
        target = self.pixels(obs.flatten(0, len(lead) - 1))
        return (output.float().flatten(0, -4) - target).square().sum((-3, -2, -1)).reshape(lead)

    def observation(self, output: Tensor) -> Tensor:
        """Outputs [..., C, H, W] in [0, 1] -> bytes [..., *shape]."""
        pixels = (output.float().clamp(0, 1) * 255).round().to(torch.uint8)
        lead = output.shape[:-3]
        if not self.last:
            return pixels.reshape(*lead, *self.shape)
        *stack, height, width, channels = self.shape
        return pixels.reshape(*lead, *stack, channels, height, width).movedim(-3, -1)


Part = Vector | Categories | Image


def flat(obs: Tensor, axes: int) -> Tensor:
    """The last `axes` axes as one, which is added where there are none."""
    return obs.flatten(-axes) if axes else obs.unsqueeze(-1)


def observation_parts(space: gym.Space) -> dict[str, Part]:
    """The arrays of an observation by key, sorted; the key of a single array is "observation"."""
    entries = space.spaces.items() if isinstance(space, gym.spaces.Dict) else [("observation", space)]
    return {key: make_part(part) for key, part in sorted(entries)}


def make_part(space: gym.Space) -> Part:
    shape = space.shape or ()
    if is_image(space):
        return Image(shape)
    if isinstance(space, gym.spaces.Discrete):
        return Categories((), [int(space.n)])
    if isinstance(space, gym.spaces.MultiDiscrete):
        return Categories(shape, space.nvec.flatten().tolist())
    if isinstance(space, gym.spaces.MultiBinary):
        return Categories(shape, [2] * math.prod(shape))
    if isinstance(space, gym.spaces.Box):
        return Vector(shape)
    raise InputError(
        f"no network for observation space {space}: supported are Box, Discrete, MultiDiscrete, MultiBinary and "
        "Dict or Tuple of these; wrap the environment with gymnasium.wrappers.TransformObservation"
    )


def interleaved(images: Tensor) -> Tensor:
    """Images [B, C, H, W] with channels last in memory, where convolutions of few channels are faster."""
    return images.contiguous(memory_format=torch.channels_last)


def by_key(obs: TensorTree) -> dict[str, Tensor]:
    return obs if isinstance(obs, dict) else {"observation": obs}


def padded_sides(images: dict[str, Image]) -> tuple[int, int]:
    """The height and width to which all images are padded: multiples of 16."""
    step, (least, most) = 2 ** len(MULTIPLES), SIDES
    sides = []
    for side in ("height", "width"):
        largest = max(getattr(image, side) for image in images.values())
        if largest > most:
            shapes = ", ".join(f"{key}: {image.shape}" for key, image in images.items())
            raise InputError(
                f"images of a {side} of {largest} ({shapes}) are too large for DreamerV3's encoder, which takes up to "
                f"{most}: resize them (gymnasium.wrappers.ResizeObservation), usually to 64 x 64"
            )
        sides.append(max(least, -(-largest // step) * step))
    return sides[0], sides[1]


class ObservationParts(nn.Module):
    """The parts of an observation that share a network: numbers (vectors and categories), and images."""

    def __init__(self, space: gym.Space) -> None:
        super().__init__()
        parts = observation_parts(space)
        self.numbers = {key: part for key, part in parts.items() if not isinstance(part, Image)}
        self.images = {key: part for key, part in parts.items() if isinstance(part, Image)}
        self.parts = {**self.numbers, **self.images}
        self.sides = padded_sides(self.images) if self.images else (0, 0)
        self.channels = sum(image.channels for image in self.images.values())
        self.smallest = tuple(side // 2 ** len(MULTIPLES) for side in self.sides)  # sides after the last convolution


class DreamerEncoder(ObservationParts):
    """Observations [..., ...] to tokens [..., size]: a perceptron for all numbers, convolutions for all images."""

    def __init__(self, space: gym.Space, *, units: int, layers: int, depth: int) -> None:
        super().__init__(space)
        self.size = 0
        if self.numbers:
            self.mlp = NormedMLP(sum(part.size for part in self.numbers.values()), units, layers)
            self.size += units
        if self.images:
            self.cnn = nn.Sequential(*self.convolutions(depth))
            self.size += depth * MULTIPLES[-1] * math.prod(self.smallest)

    def convolutions(self, depth: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        channels = self.channels
        for multiple in MULTIPLES:
            out = multiple * depth
            layers += [convolution(channels, out, KERNEL), nn.MaxPool2d(2), NormedSiLU(out, dim=-3)]
            channels = out
        return layers

    def forward(self, obs: TensorTree) -> Tensor:
        parts, tokens = by_key(obs), []
        if self.numbers:
            inputs = [part.inputs(parts[key]) for key, part in self.numbers.items()]
            tokens.append(self.mlp(torch.cat(inputs, -1)))
        if self.images:
            tokens.append(self.of_images(parts))
        return torch.cat(tokens, -1)

    def of_images(self, parts: dict[str, Tensor]) -> Tensor:
        key, image = next(iter(self.images.items()))
        lead = parts[key].shape[: -image.axes]
        pixels = [image.inputs(parts[key].flatten(0, len(lead) - 1), *self.sides) for key, image in self.images.items()]
        return cast(Tensor, self.cnn(interleaved(torch.cat(pixels, -3))).flatten(1).reshape(*lead, -1))


class DreamerDecoder(ObservationParts):
    """Predicts observations from latents: outputs [..., size] of numbers, images [..., C, H, W] in [0, 1]."""

    def __init__(self, space: gym.Space, *, deter: int, stoch: int, units: int, layers: int, depth: int) -> None:
        """stoch: the size of a flattened sample."""
        super().__init__(space)
        if self.numbers:
            self.mlp = NormedMLP(deter + stoch, units, layers)
            self.outputs = nn.ModuleList(linear(units, part.size) for part in self.numbers.values())
        if self.images:
            self.cnn = ImageDecoder(self.channels, self.smallest, deter=deter, stoch=stoch, units=units, depth=depth)

    def forward(self, latent: Latent) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        if self.numbers:
            hidden = self.mlp(latent.features())
            outputs |= {key: head(hidden) for key, head in zip(self.numbers, self.outputs, strict=True)}
        if self.images:
            channels = [image.channels for image in self.images.values()]
            parts = torch.split(self.cnn(latent), channels, -3)
            for (key, image), part in zip(self.images.items(), parts, strict=True):
                outputs[key] = image.cropped(part)
        return outputs

    def losses(self, outputs: dict[str, Tensor], obs: TensorTree) -> dict[str, Tensor]:
        """The loss [...] of each key, summed over what the key holds."""
        parts = by_key(obs)
        return {key: part.loss(outputs[key], parts[key]) for key, part in self.parts.items()}

    def observations(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The predicted observations, in their own shapes and units."""
        return {key: part.observation(outputs[key]) for key, part in self.parts.items()}


class ImageDecoder(nn.Module):
    """Latents to images: a small one from both parts of the latent, doubled before each convolution."""

    def __init__(
        self, channels: int, smallest: tuple[int, ...], *, deter: int, stoch: int, units: int, depth: int
    ) -> None:
        super().__init__()
        self.smallest, self.channels = smallest, MULTIPLES[-1] * depth
        size = math.prod(smallest) * self.channels
        self.of_deter = BlockLinear(deter, size, BLOCKS)
        self.of_stoch = nn.Sequential(linear(stoch, 2 * units), NormedSiLU(2 * units), linear(2 * units, size))
        self.norm = NormedSiLU(self.channels, dim=-3)
        layers: list[nn.Module] = []
        widths = [multiple * depth for multiple in MULTIPLES]
        for fan_in, fan_out in zip(widths[:0:-1], widths[-2::-1], strict=True):
            layers += [nn.Upsample(scale_factor=2), convolution(fan_in, fan_out, KERNEL), NormedSiLU(fan_out, dim=-3)]
        layers += [nn.Upsample(scale_factor=2), convolution(widths[0], channels, KERNEL), nn.Sigmoid()]
        self.layers = nn.Sequential(*layers)

    def forward(self, latent: Latent) -> Tensor:
        lead = latent.deter.shape[:-1]
        # Each block of the linear layer makes some of the channels, everywhere in the image.
        of_deter = self.of_deter(latent.deter).reshape(-1, self.channels, *self.smallest)
        of_stoch = self.of_stoch(latent.stoch.flatten(-2)).reshape(-1, self.channels, *self.smallest)
        return cast(Tensor, self.layers(self.norm(interleaved(of_deter + of_stoch))).unflatten(0, lead))
