"""ScaleZero's model for searches on the CPU: in numpy, where a torch call costs more than the product it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.acting.inference import TorchInference
from rl_training.models.moe import ScaledLinear
from rl_training.models.scalezero import TaskModel
from rl_training.models.world_transformer import Block
from rl_training.types import Array, History, Observation

Linear = tuple[Array, Array | None]  # weight [in, out], bias [out]


class NumpyInference(TorchInference):
    """`recurrent` in numpy, on copies of the weights, which `refresh` is to be called for when these have changed.

    What nodes remember lies in memory [node, B, layers, 2, places + 1, heads, size of a head]; in the last place, the
    token of the action that leads on will stand. blocked [node, B, places + 1]: see TaskModel.
    """

    model: TaskModel

    def __init__(self, model: TaskModel) -> None:
        super().__init__(model)
        self.places, heads = model.places, model.model.transformer.size.heads
        self.shape = (model.cache_shape[0], 2, self.places + 1, heads, model.width // heads)
        self.memory = np.empty((0, 0, *self.shape), np.float32)
        self.blocked = np.empty((0, 0, self.places + 1), np.float32)
        self.refresh()

    def refresh(self) -> None:
        self.weights: TransformerWeights | None = None

    def initial(self, obs: Observation, num_simulations: int, history: History | None = None) -> Array:
        prediction = super().initial(obs, 0, history)
        nodes = num_simulations + 1
        if self.memory.shape[1] != self.batch or len(self.memory) < nodes:
            self.memory = np.zeros((nodes, self.batch, *self.shape), np.float32)
            self.blocked = np.zeros((nodes, self.batch, self.places + 1), np.float32)
        memory, _, blocked = (part.numpy() for part in torch.split(self.roots, self.model.row_sizes, 1))
        layers, _, _, *head = self.shape
        self.memory[0, :, :, :, :-1] = memory.reshape(self.batch, layers, 2, self.places, *head)
        self.blocked[0, :, :-1] = blocked
        self.trees = np.arange(self.batch)
        if self.weights is None:
            self.weights = read_weights(self.model)
        return prediction

    @torch.no_grad()
    def recurrent(self, node: int, parent: Array, action: Array) -> Array:
        weights, places = self.weights, self.places
        assert weights is not None
        past, blocked = self.memory[parent, self.trees], self.blocked[parent, self.trees]
        out = weights.token(weights.action[action], past, blocked)
        reward, hidden = weights.outcome(out)
        latent = layer_norm(hidden) + weights.task
        memory, now_blocked = self.memory[node], self.blocked[node]
        memory[:, :, :, : places - 1] = past[:, :, :, 2:]
        now_blocked[:, : max(places - 2, 0)] = blocked[:, 2:places]
        out = weights.token(latent, memory[:, :, :, :places], now_blocked[:, :places])
        policy, value = weights.prediction(out)
        return np.concatenate([policy, self.scalars(value, reward)], 1)

    def scalars(self, value: Array, reward: Array) -> Array:
        """[B, 2]"""
        supports = (self.model.value_support, self.model.reward_support)
        if supports[0].size == supports[1].size:  # then they are the same, and one call does
            return through(supports[0].to_scalar, np.stack([value, reward], 1))
        both = zip(supports, (value, reward), strict=True)
        return np.stack([through(support.to_scalar, logits) for support, logits in both], 1)


class NumpyBlock:
    """A block of the transformer."""

    def __init__(self, block: Block) -> None:
        experts = block.feed_forward
        self.attention_norm, self.feed_forward_norm = (
            NumpyNorm(block.attention_norm),
            NumpyNorm(block.feed_forward_norm),
        )
        self.query_key_value, self.project = scaled(block.query_key_value), scaled(block.project)
        self.shared_in, self.shared_out = scaled(experts.shared_in), scaled(experts.shared_out)
        self.gate = turned(experts.gate.weight)
        self.expert_in = side_by_side(experts.expert_in)
        self.expert_out = side_by_side(experts.expert_out)
        self.num_experts, self.weighted = experts.num_experts, experts.routing == "probability"

    def attend(self, x: Array, memory: Array, bias: Array) -> Array:
        """x [B, width], memory [B, 2, T, heads, size], whose last place is written to; bias [B, heads, T]"""
        batch, _, _, heads, size = memory.shape
        projected = apply(self.attention_norm(x), self.query_key_value).reshape(batch, 3, heads, size)
        memory[:, :, -1] = projected[:, 1:]
        scores = np.einsum("bhd,bthd->bht", projected[:, 0], memory[:, 0])
        scores *= np.float32(size**-0.5)
        scores += bias
        mixed = np.einsum("bht,bthd->bhd", through(softmax, scores), memory[:, 1])
        return apply(mixed.reshape(batch, -1), self.project)

    def feed(self, x: Array) -> Array:
        x = self.feed_forward_norm(x)
        rows = np.arange(len(x))
        probability = through(softmax, x @ self.gate)
        expert = probability.argmax(1)
        both = (x @ self.expert_in).reshape(len(x), self.num_experts, -1)[rows, expert]
        half = both.shape[1] // 2
        hidden = through(F.silu, both[:, :half]) * both[:, half:]
        routed: Array = (hidden @ self.expert_out).reshape(len(x), self.num_experts, -1)[rows, expert]
        if self.weighted:
            routed *= probability[rows, expert][:, None]
        routed += apply(through(F.gelu, apply(x, self.shared_in)), self.shared_out)
        return routed


class NumpyNorm:
    def __init__(self, norm: nn.LayerNorm) -> None:
        self.weight, self.bias, self.eps = norm.weight.detach(), norm.bias.detach(), norm.eps

    def __call__(self, x: Array) -> Array:
        normed: Array = F.layer_norm(torch.from_numpy(x), x.shape[-1:], self.weight, self.bias, self.eps).numpy()
        return normed


class TwoHeads:
    """Two heads that begin alike; of a third layer, if there is one, nothing is known here."""

    def __init__(self, first: nn.Sequential, second: nn.Sequential) -> None:
        pair = (first, second)
        weight, bias = zip(*(linear(head[0]) for head in pair), strict=True)
        self.first: Linear = (np.concatenate(weight, 1), np.concatenate(bias))
        norms = [cast(nn.LayerNorm, head[1]) for head in pair]
        self.gain, self.shift = (np.stack([array(getattr(n, name)) for n in norms]) for name in ("weight", "bias"))
        self.last = [linear(head[3]) for head in pair]

    def __call__(self, x: Array) -> list[Array]:
        hidden = layer_norm(apply(x, self.first).reshape(len(x), 2, -1))
        hidden *= self.gain
        hidden += self.shift
        hidden = through(F.gelu, hidden)
        return [apply(hidden[:, i], last) for i, last in enumerate(self.last)]


class TransformerWeights(NamedTuple):
    """Those of one task's model."""

    action: Array  # [A, width] tokens, with the task's embedding in them
    task: Array | float  # [width]
    distance_bias: Array  # [heads, places + 1] the nearest last
    layers: list[NumpyBlock]
    norm: NumpyNorm
    outcome: TwoHeads  # reward, and the latent before its norm
    prediction: TwoHeads  # policy, value

    def token(self, x: Array, memory: Array, blocked: Array) -> Array:
        """Outputs [B, width] at tokens x [B, width], which take the last place of memory [B, layers, 2, T, ...]."""
        bias = self.distance_bias[:, -memory.shape[3] :] + blocked[:, None]
        for i, layer in enumerate(self.layers):
            x = x + layer.attend(x, memory[:, i], bias)
            x = x + layer.feed(x)
        return self.norm(x)


def read_weights(model: TaskModel) -> TransformerWeights:
    whole, heads = model.model, model.heads
    task = 0.0 if whole.task_embedding is None else array(whole.task_embedding)[model.task]
    bias = whole.transformer.bias(1, model.places + 1).detach()[:, 0]
    return TransformerWeights(
        action=array(heads.action.weight) + task,
        task=task,
        distance_bias=bias.numpy(),
        layers=[NumpyBlock(cast(Block, block)) for block in whole.transformer.blocks],
        norm=NumpyNorm(whole.transformer.norm),
        outcome=TwoHeads(heads.reward, heads.latent),
        prediction=TwoHeads(heads.policy, heads.value),
    )


def array(parameter: Tensor) -> Array:
    view: Array = parameter.detach().numpy()
    return view


def turned(weight: Tensor) -> Array:
    """[out, in] -> [in, out], a copy: small products with it take a third of the time."""
    return np.ascontiguousarray(array(weight).T)


def linear(module: nn.Module) -> tuple[Array, Array]:
    assert isinstance(module, nn.Linear)
    return turned(module.weight), array(module.bias)


def scaled(layer: ScaledLinear) -> Linear:
    return turned(layer.effective()), None if layer.bias is None else array(layer.bias)


def side_by_side(layer: ScaledLinear) -> Array:
    """Copies [copies, out, in] as one weight [in, copies * out]."""
    return turned(layer.effective().flatten(0, 1))


def apply(x: Array, layer: Linear) -> Array:
    weight, bias = layer
    out = x @ weight
    if bias is not None:
        out += bias
    return out


def through(function: Callable[[Tensor], Tensor], x: Array) -> Array:
    """Of functions that numpy would need several passes for."""
    out: Array = function(torch.from_numpy(x)).numpy()
    return out


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Array) -> Array:
    out: Array = F.layer_norm(torch.from_numpy(x), x.shape[-1:]).numpy()
    return out
