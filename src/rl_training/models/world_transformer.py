"""A causal transformer over (observation, action) tokens with cached keys and values (UniZero, arXiv:2406.10667)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.moe import Adapters, MixtureOfExperts, Routing, ScaledLinear

MAX_DISTANCE = 64  # larger distances between tokens share one bias
BLOCKED = -1e9  # added to the attention score of a masked token; unlike -inf, sums of it are safe


@dataclass(frozen=True)
class TransformerSize:
    """The defaults are for two CPU cores. The paper's: width 768, 4 layers, 24 heads, 8 experts of 3072 units."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    num_experts: int = 4
    expert_size: int = 128


class WorldTransformer(nn.Module):
    """Pre-norm blocks of causal attention and a mixture of experts, and a norm at the end.

    Positions enter as a learned bias per head and distance, added to the attention scores of all layers. UniZero adds
    an embedding of the absolute position to each token: cached keys are then wrong once the window slides. Distances
    do not change when the oldest tokens are dropped.
    """

    def __init__(self, size: TransformerSize, adapters: Adapters, *, routing: Routing = "probability") -> None:
        super().__init__()
        if size.width % size.heads:
            raise InputError(f"width {size.width} cannot be shared by {size.heads} heads: make it a multiple")
        self.size = size
        # Heads start with different ranges: Press et al. (arXiv:2108.12409).
        slopes = torch.exp2(-8 * torch.arange(1, size.heads + 1) / size.heads)
        self.distance_bias = nn.Parameter(-slopes[:, None] * torch.arange(MAX_DISTANCE))
        self.blocks = nn.ModuleList(Block(size, adapters, routing) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def bias(self, length: int, total: int, window: int | None = None) -> Tensor:
        """[heads, length, total] The bias on the attention scores of the newest `length` of `total` tokens.

        window: steps that a token sees, its own included; the first token is then an observation.
        """
        distance, mask = _distance_and_mask(length, total, window, self.distance_bias.device)
        return self.distance_bias[:, distance] + mask

    def forward(
        self, tokens: Tensor, bias: Tensor, past: Sequence[Tensor] | None = None, *, newest: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens [B, L, width] -> (outputs [B, L, width], each layer's keys and values [B, 2, P + L, width]).

        past: the keys and values of the P tokens before. bias [B or 1, heads, L, P + L]. newest: only the last `newest`
        outputs are computed, which saves most of the last block.
        """
        cache, last = [], len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            outputs = newest if i == last else None
            tokens, keys_values = block(tokens, bias, None if past is None else past[i], outputs or tokens.shape[1])
            cache.append(keys_values)
        return self.norm(tokens), cache


class Block(nn.Module):
    def __init__(self, size: TransformerSize, adapters: Adapters, routing: Routing) -> None:
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
    """[length, total] each: the distance between tokens, below MAX_DISTANCE; 0, or BLOCKED for tokens not seen."""
    with torch.inference_mode(False):  # the cached tensors may also be used in training
        newer, older = torch.arange(total - length, total)[:, None], torch.arange(total)[None]
        blocked = newer < older
        if window is not None:
            blocked |= newer // 2 - older // 2 >= window
        mask = torch.zeros(length, total).masked_fill(blocked, BLOCKED)
        return (newer - older).clamp(0, MAX_DISTANCE - 1).to(device), mask.to(device)
