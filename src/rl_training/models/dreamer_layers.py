"""The layers of DreamerV3: linear layers in blocks, and RMS norms with SiLU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.ops.dreamer_steps import NORM_EPS

STD_OF_TRUNCATED = 0.8796256610342398  # the standard deviation of a normal distribution cut off at +-2


def init_weight(weight: Tensor, fan_in: int, scale: float = 1.0) -> None:
    """A normal distribution cut off at two standard deviations, with the standard deviation scale / sqrt(fan_in)."""
    if scale == 0.0:
        nn.init.zeros_(weight)
        return
    std = scale / (STD_OF_TRUNCATED * math.sqrt(fan_in))
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def linear(fan_in: int, fan_out: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out)
    init_weight(layer.weight, fan_in, scale)
    nn.init.zeros_(layer.bias)
    return layer


def convolution(fan_in: int, fan_out: int, kernel: int) -> nn.Conv2d:
    layer = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2)
    init_weight(layer.weight, fan_in * kernel * kernel)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def one_hot(index: Tensor, count: int) -> Tensor:
    """[...] -> [..., count], without the checks of `F.one_hot`, which read numbers back."""
    return (index.unsqueeze(-1) == torch.arange(count, device=index.device)).float()


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """[..., n] -> [..., *sizes, n / prod(sizes)]"""
    return x.reshape(*x.shape[:-1], *sizes, -1)


class BlockLinear(nn.Module):
    """Independent linear layers for `blocks` parts of the input: [..., in] -> [..., out]."""

    def __init__(self, fan_in: int, fan_out: int, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, fan_in // blocks, fan_out // blocks))
        self.bias = nn.Parameter(torch.zeros(fan_out))
        # The width of the whole input counts as fan-in, not that of a block: the GRU's gates have no norm after them.
        init_weight(self.weight, fan_in)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_blocks(split_last(x, self.blocks))

    def of_blocks(self, x: Tensor) -> Tensor:
        """[..., blocks, in / blocks] -> [..., out]"""
        lead = x.shape[:-2]
        product = torch.bmm(x.flatten(0, -3).transpose(0, 1), self.weight).transpose(0, 1)
        return product.reshape(*lead, -1) + self.bias


def normed_silu(x: Tensor, gain: Tensor) -> Tensor:
    """SiLU of numbers [..., n] that are divided by their root mean square and multiplied by gain [n].

    The norm is computed in float32.
    """
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * gain
    return F.silu(normed.to(x.dtype))


class NormedSiLU(nn.Module):
    """`normed_silu` with a learned gain."""

    function: Callable[..., Tensor] = staticmethod(normed_silu)  # or another implementation

    def __init__(self, size: int, dim: int = -1) -> None:
        """dim: the axis of the numbers."""
        super().__init__()
        self.dim = dim
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.movedim(self.dim, -1), self.gain).movedim(-1, self.dim)


class NormedMLP(nn.Sequential):
    """`depth` linear layers of `units`, each with norm and SiLU: [..., fan_in] -> [..., units]."""

    def __init__(self, fan_in: int, units: int, depth: int) -> None:
        layers: list[nn.Module] = []
        for layer in range(depth):
            layers += [linear(units if layer else fan_in, units), NormedSiLU(units)]
        super().__init__(*layers)
