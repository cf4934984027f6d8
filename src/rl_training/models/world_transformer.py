"""A causal transformer over (observation, action) tokens that remembers keys and values (UniZero, arXiv:2406.10667)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.config import InputError
from rl_training.models.moe import Adapters, MixtureOfExperts, Routing, ScaledLinear

MAX_DISTANCE = 64  # tokens further back are all as far
BLOCKED = -1e9  # added to a score: nothing comes through, and unlike -inf it can be stored and summed safely


@dataclass(frozen=True)
class Size:
    """Of a transformer. The paper's is 768 wide, 4 layers, 24 heads, 8 experts of 3072; this one suits two cores."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    num_experts: int = 4
    expert_size: int = 128


class WorldTransformer(nn.Module):
    """Pre-norm blocks of causal attention and a mixture of experts, and a norm at the end.

    Positions enter as a learned number per head and distance, added to the attention scores of all layers. UniZero adds
    an embedding of the absolute position to each token: then, as the window slides, remembered keys are no longer those
    of their new position. A distance does not change when the oldest tokens are forgotten.
    """

    def __init__(self, size: Size, adapters: Adapters, *, routing: Routing = "probability") -> None:
        super().__init__()
        if size.width % size.heads:
            raise InputError(f"width {size.width} cannot be shared by {size.heads} heads: make it a multiple")
        self.size = size
        # To begin with, heads look back more or less far: Press et al. (arXiv:2108.12409).
        slopes = torch.exp2(-8 * torch.arange(1, size.heads + 1) / size.heads)
        self.distance_bias = nn.Parameter(-slopes[:, None] * torch.arange(MAX_DISTANCE))
        self.blocks = nn.ModuleList(Block(size, adapters, routing) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def bias(self, length: int, total: int, window: int | None = None) -> Tensor:
        """What is added to the scores [heads, length, total] of the newest `length` of `total` tokens.

        window: tokens see so many steps, their own included; the first of all tokens is then an observation.
        """
        distance, mask = _distance_and_mask(length, total, window, self.distance_bias.device)
        return self.distance_bias[:, distance] + mask

    def forward(
        self, tokens: Tensor, bias: Tensor, past: Sequence[Tensor] | None = None, *, newest: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens [B, L, width] after the P of `past` -> outputs [B, L, width], and keys and values to be remembered.

        Those are [B, 2, P + L, width] for each layer; bias is [B or 1, heads, L, P + L]. newest: the outputs are wanted
        of so many tokens only, [B, newest, width], which saves most of the last block.
        """
        memory, last = [], len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            outputs = newest if i == last else None
            tokens, keys_values = block(tokens, bias, None if past is None else past[i], outputs or tokens.shape[1])
            memory.append(keys_values)
        return self.norm(tokens), memory


class Block(nn.Module):
    def __init__(self, size: Size, adapters: Adapters, routing: Routing) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        # Queries, keys and values come from one layer, and so share their adapters' A.
        self.query_key_value = ScaledLinear(width, 3 * width, adapters)
        self.project = ScaledLinear(width, width, adapters)
        self.feed_forward = MixtureOfExperts(width, size.expert_size, size.num_experts, adapters, routing=routing)

    def forward(self, x: Tensor, bias: Tensor, past: Tensor | None, newest: int) -> tuple[Tensor, Tensor]:
        """x [B, L, width], past [B, 2, P, width] -> ([B, newest, width], [B, 2, P + L, width])"""
        attended, keys_values = self.attend(self.attention_norm(x), bias[:, :, -newest:], past, newest)
        x = x[:, -newest:] + attended
        fed = self.feed_forward(self.feed_forward_norm(x).flatten(0, 1))
        return x + fed.view_as(x), keys_values

    def attend(self, x: Tensor, bias: Tensor, past: Tensor | None, newest: int) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        projected = self.query_key_value(x).view(batch, length, 3, width)
        query = projected[:, -newest:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys_values = projected[:, :, 1:].transpose(1, 2)
        if past is not None:
            keys_values = torch.cat([past, keys_values], 2)
        keys, values = keys_values.unflatten(-1, (self.heads, -1)).transpose(2, 3).unbind(1)
        out = F.scaled_dot_product_attention(query, keys, values, bias)
        return self.project(out.transpose(1, 2).flatten(2)), keys_values


@cache
def _distance_and_mask(length: int, total: int, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many tokens back each lies [length, total], no further than the bias knows, and 0 or BLOCKED."""
    with torch.inference_mode(False):  # these outlive the call, and may be needed where gradients are
        newer, older = torch.arange(total - length, total)[:, None], torch.arange(total)[None]
        blocked = newer < older
        if window is not None:
            blocked |= newer // 2 - older // 2 >= window
        mask = torch.zeros(length, total).masked_fill(blocked, BLOCKED)
        return (newer - older).clamp(0, MAX_DISTANCE - 1).to(device), mask.to(device)
