"""The feed-forward of ScaleZero's transformer (arXiv:2509.07945): a sparse mixture of experts with low-rank adapters.

Adapters are the paper's dynamic parameter scaling: when training stalls, the weights are frozen and the next adapter is
trained. The scales of the earlier parts stay trainable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALE_RANGE = 0.2  # scales of frozen parts are in 0.8 to 1.2
DOWN_STD = 0.01
Routing: TypeAlias = Literal["probability", "one"]


@dataclass(frozen=True)
class Adapters:
    """The low-rank adapters of each layer. The paper's: 4 of rank 64, alpha 32, dropout 0.1."""

    count: int = 4
    rank: int = 8
    alpha: float = 4.0  # an adapter is scaled by alpha / rank
    dropout: float = 0.0  # of an adapter's inputs in training, drawn by torch's global generator


class ScaledLinear(nn.Module):
    """A linear layer with weight W = a_0 W_0 + sum_j a_j (alpha / rank) B_j A_j over the adapters j = 1 .. stage.

    Stage 0 trains W_0 and the bias; stage s trains A_s, B_s and the scales a_0 .. a_{s-1}, where a = 1 + 0.2 tanh(.).
    The newest adapter's scale is 1 and B_s starts at zero: a new stage does not change the output at first.
    copies: the number of layers that share an input. The caller applies their weights [copies, out, in] of `effective`.
    Dropout removes the same inputs for all tokens of a call, so that W is one matrix. The authors draw for each token.
    """

    def __init__(self, fan_in: int, fan_out: int, adapters: Adapters, *, copies: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.adapters, self.stage = adapters, 0
        self.fixed: Tensor | None = None  # W while the weights do not change
        bound, lead = 1 / math.sqrt(fan_in), (copies,) if copies else ()  # bound: that of nn.Linear
        self.weight = nn.Parameter(torch.empty(*lead, fan_out, fan_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(fan_out).uniform_(-bound, bound)) if bias else None
        self.scale_logit = nn.Parameter(torch.zeros(*lead, adapters.count))  # the newest adapter has no scale
        self.down: list[nn.Parameter] = []  # A_j [.., rank, in]; a ParameterList would be slower
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
        if self.fixed is not None:
            return self.fixed
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
    """The SwiGLU expert that a linear gate chooses, and a GELU expert shared by all tokens.

    routing "probability": the chosen expert is weighted by its gate probability, so that the gate learns. "one": its
    weight is 1, as in the authors' code (a softmax over the best expert alone). Then no gradient reaches the gate,
    which keeps its initial weights. There is no balancing loss, as in the paper.
    """

    def __init__(
        self, width: int, expert_size: int, num_experts: int, adapters: Adapters, *, routing: Routing = "probability"
    ) -> None:
        super().__init__()
        self.num_experts, self.routing = num_experts, routing
        self.gate = nn.Linear(width, num_experts, bias=False)
        # Both factors of an expert's product come from one layer, and so share their adapters' A.
        self.expert_in = ScaledLinear(width, 2 * expert_size, adapters, copies=num_experts, bias=False)
        self.expert_out = ScaledLinear(expert_size, width, adapters, copies=num_experts, bias=False)
        # Unlike in the authors' code, the shared expert has adapters too.
        self.shared_in = ScaledLinear(width, expert_size, adapters)
        self.shared_out = ScaledLinear(expert_size, width, adapters)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [N, width] -> [N, width]"""
        weight, expert = self.gate(x).softmax(-1).max(-1)
        # A CUDA graph or an exported one needs the same shapes in each call; on a CPU idle experts should cost nothing.
        fixed_shapes = x.is_cuda or torch.compiler.is_compiling()
        routed = self.all_experts(x, expert) if fixed_shapes else self.chosen_experts(x, expert)
        if self.routing == "probability":
            routed = routed * weight.unsqueeze(-1)
        shared: Tensor = self.shared_out(F.gelu(self.shared_in(x)))
        return shared + routed

    def chosen_experts(self, x: Tensor, expert: Tensor) -> Tensor:
        """[N, width] The output of expert[n] for each token x[n]. Each expert runs once, on its own tokens."""
        rows: list[list[int]] = [[] for _ in range(self.num_experts)]
        for row, chosen in enumerate(expert.tolist()):
            rows[chosen].append(row)
        order = torch.tensor(list(chain(*rows)), device=x.device)
        groups = torch.split(x.index_select(0, order), [len(own) for own in rows])
        weights = zip(self.expert_in.effective().unbind(), self.expert_out.effective().unbind(), strict=True)
        outputs = [swiglu(group, *pair) for group, pair in zip(groups, weights, strict=True) if len(group)]
        return torch.empty_like(x).index_copy(0, order, torch.cat(outputs))

    def all_experts(self, x: Tensor, expert: Tensor) -> Tensor:
        """The same, with each expert run on all tokens."""
        outputs = swiglu(x, self.expert_in.effective(), self.expert_out.effective())
        return outputs.gather(0, expert[None, :, None].expand(1, -1, x.shape[1])).squeeze(0)


def swiglu(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
    """Shazeer (arXiv:2002.05202): (silu(x U) * x V) W, where weight_in [.., 2 hidden, in] is U and V concatenated.

    x [N, in] -> [.., N, out]
    """
    gate, value = (x @ weight_in.mT).chunk(2, -1)
    return (F.silu(gate) * value) @ weight_out.mT
