"""The feed-forward of ScaleZero's transformer (arXiv:2509.07945): a sparse mixture of experts, on layers that can grow.

Growing is the paper's dynamic parameter scaling: when training stalls, the weights are frozen and the next low-rank
adapter takes over; how much each of the earlier parts counts stays free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALE_RANGE = 0.2  # a part may come to count for 0.8 to 1.2 of what it was
DOWN_STD = 0.01
Routing: TypeAlias = Literal["probability", "one"]


@dataclass(frozen=True)
class Adapters:
    """The low-rank adapters that every layer of a transformer has room for. The paper: 4 of rank 64, alpha 32, 0.1."""

    count: int = 4
    rank: int = 8
    alpha: float = 4.0  # an adapter's product counts alpha / rank times
    dropout: float = 0.0  # of an adapter's inputs in training, drawn by torch's own generator


class ScaledLinear(nn.Module):
    """A linear layer with weight W = a_0 W_0 + sum_j a_j (alpha / rank) B_j A_j over the adapters j = 1 .. stage.

    Stage 0 trains W_0 and the bias; stage s trains A_s, B_s and the scales a_0 .. a_{s-1}, where a = 1 + 0.2 tanh(.).
    The newest adapter's own scale is 1, and B_s starts at zero: a new stage changes nothing at once.
    copies: so many layers side by side, without bias, whose weights [copies, out, in] `effective` gives to be applied.
    Dropout takes the same inputs from all tokens of a call, where the authors' draws for each: W stays one matrix.
    """

    def __init__(self, fan_in: int, fan_out: int, adapters: Adapters, *, copies: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.adapters, self.stage = adapters, 0
        self.kept: Tensor | None = None
        bound, lead = 1 / math.sqrt(fan_in), (copies,) if copies else ()  # bound: as nn.Linear has it
        self.weight = nn.Parameter(torch.empty(*lead, fan_out, fan_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(fan_out).uniform_(-bound, bound)) if bias else None
        self.scale_logit = nn.Parameter(torch.zeros(*lead, adapters.count))  # of all scales but the last, which stays 1
        self.down: list[nn.Parameter] = []  # A_j [.., rank, in]; beside their names, a ParameterList being slow
        self.up: list[nn.Parameter] = []  # B_j [.., out, rank]
        for j in range(1, adapters.count + 1):
            self.down.append(nn.Parameter(torch.randn(*lead, adapters.rank, fan_in) * DOWN_STD))
            self.up.append(nn.Parameter(torch.zeros(*lead, fan_out, adapters.rank)))
            self.register_parameter(f"down{j}", self.down[-1])
            self.register_parameter(f"up{j}", self.up[-1])

    def trainable(self, stage: int) -> list[nn.Parameter]:
        if stage == 0:
            return [self.weight] if self.bias is None else [self.weight, self.bias]
        return [self.down[stage - 1], self.up[stage - 1], self.scale_logit]

    def effective(self) -> Tensor:
        """W [(copies,) out, in]"""
        if self.kept is not None:
            return self.kept
        return self.combine(self.adapters.dropout if self.training else 0.0)

    def combine(self, dropout: float) -> Tensor:
        if self.stage == 0:
            return self.weight
        scale = 1 + SCALE_RANGE * torch.tanh(self.scale_logit[..., : self.stage, None, None])
        earlier = [scale[..., j, :, :] * self.up[j - 1] for j in range(1, self.stage)]
        up = torch.cat([*earlier, self.up[self.stage - 1]], -1)
        down = torch.cat([*self.down[: self.stage]], -2)
        if dropout:
            down = down * F.dropout(torch.ones_like(down[..., :1, :]), dropout)
        return scale[..., 0, :, :] * self.weight + (self.adapters.alpha / self.adapters.rank) * (up @ down)

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        return F.linear(x, self.effective(), self.bias)


class MixtureOfExperts(nn.Module):
    """One of several SwiGLU experts, the one a linear gate prefers, and a GELU expert that all tokens share.

    routing "probability": the chosen expert counts as much as its probability among all, so that the gate learns.
    "one": it counts fully, as in the authors' code (a softmax over the best one alone): no gradient reaches the gate,
    which stays as it was drawn. There is no balancing loss, as there is none in the paper.
    """

    def __init__(
        self, width: int, expert_size: int, num_experts: int, adapters: Adapters, *, routing: Routing = "probability"
    ) -> None:
        super().__init__()
        self.num_experts, self.routing = num_experts, routing
        self.gate = nn.Linear(width, num_experts, bias=False)
        # Both inputs of an expert's product come from one layer, and so share their adapters' A.
        self.expert_in = ScaledLinear(width, 2 * expert_size, adapters, copies=num_experts, bias=False)
        self.expert_out = ScaledLinear(expert_size, width, adapters, copies=num_experts, bias=False)
        # Unlike in the authors' code this one has adapters too: it is a feed-forward like the others.
        self.shared_in = ScaledLinear(width, expert_size, adapters)
        self.shared_out = ScaledLinear(expert_size, width, adapters)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [N, width] -> [N, width]"""
        weight, expert = self.gate(x).softmax(-1).max(-1)
        # A CUDA graph of a search must have the same shapes each time; on CPUs idle experts should cost nothing.
        routed = self.all_experts(x, expert) if x.is_cuda else self.chosen_experts(x, expert)
        if self.routing == "probability":
            routed = routed * weight.unsqueeze(-1)
        shared: Tensor = self.shared_out(F.gelu(self.shared_in(x)))
        return shared + routed

    def chosen_experts(self, x: Tensor, expert: Tensor) -> Tensor:
        """What expert[n] [N] makes of token x[n] [N, width]. Each expert sees its own tokens only, all at once."""
        rows: list[list[int]] = [[] for _ in range(self.num_experts)]
        for row, chosen in enumerate(expert.tolist()):
            rows[chosen].append(row)
        order = torch.tensor(list(chain(*rows)), device=x.device)
        groups = torch.split(x.index_select(0, order), [len(own) for own in rows])
        weights = zip(self.expert_in.effective().unbind(), self.expert_out.effective().unbind(), strict=True)
        outputs = [swiglu(group, *pair) for group, pair in zip(groups, weights, strict=True) if len(group)]
        return torch.empty_like(x).index_copy(0, order, torch.cat(outputs))

    def all_experts(self, x: Tensor, expert: Tensor) -> Tensor:
        """The same, by way of what all of them make of all tokens."""
        outputs = swiglu(x, self.expert_in.effective(), self.expert_out.effective())
        return outputs.gather(0, expert[None, :, None].expand(1, -1, x.shape[1])).squeeze(0)


def swiglu(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
    """Shazeer (arXiv:2002.05202): (silu(x U) * x V) W, with U and V side by side in weight_in [.., 2 hidden, in].

    x [N, in] -> [.., N, out]
    """
    gate, value = (x @ weight_in.mT).chunk(2, -1)
    return (F.silu(gate) * value) @ weight_out.mT
