"""ScaleZero's model in numpy, for searches on the CPU, where the overhead of a torch call exceeds the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.acting.fused import linear, numbers, transposed
from rl_training.acting.inference import TorchInference
from rl_training.models.moe import ScaledLinear
from rl_training.models.scalezero import TaskModel
from rl_training.models.world_transformer import Block
from rl_training.types import Array, History, Observation

Linear = tuple[Array, Array | None]  # weight [in, out], bias [out]


class NumpyInference(TorchInference):
    """`recurrent` in numpy, on copies of the weights. Call `refresh` after they have changed.

    cache [node, B, layers, 2, places + 1, heads, size of a head] holds keys and values. The last place is for the token
    of the next action. blocked [node, B, places + 1]: see TaskModel.
    """

    model: TaskModel

    def __init__(self, model: TaskModel) -> None:
        super().__init__(model)
        self.places, heads = model.places, model.model.transformer.size.heads
        self.shape = (model.cache_shape[0], 2, self.places + 1, heads, model.width // heads)
        self.cache = np.empty((0, 0, *self.shape), np.float32)
        self.blocked = np.empty((0, 0, self.places + 1), np.float32)
        self.refresh()

    def refresh(self) -> None:
        self.weights: TransformerWeights | None = None

    def initial(self, obs: Observation, num_simulations: int, history: History | None = None) -> Array:
        prediction = super().initial(obs, 0, history)
        nodes = num_simulations + 1
        if self.cache.shape[1] != self.batch or len(self.cache) < nodes:
            self.cache = np.zeros((nodes, self.batch, *self.shape), np.float32)
            self.blocked = np.zeros((nodes, self.batch, self.places + 1), np.float32)
        cache, _, blocked = (part.numpy() for part in torch.split(self.roots, self.model.row_sizes, 1))
        layers, _, _, *head = self.shape
        self.cache[0, :, :, :, :-1] = cache.reshape(self.batch, layers, 2, self.places, *head)
        self.blocked[0, :, :-1] = blocked
        self.trees = np.arange(self.batch)
        if self.weights is None:
            self.weights = read_weights(self.model)
        return prediction

    @torch.no_grad()
    def recurrent(self, node: int, parent: Array, action: Array) -> Array:
        weights, places = self.weights, self.places
        assert weights is not None
        past, blocked = self.cache[parent, self.trees], self.blocked[parent, self.trees]
        out = weights.token(weights.action[action], past, blocked)
        reward, hidden = weights.outcome(out)
        latent = layer_norm(hidden) + weights.task
        cache, now_blocked = self.cache[node], self.blocked[node]
        cache[:, :, :, : places - 1] = past[:, :, :, 2:]
        now_blocked[:, : max(places - 2, 0)] = blocked[:, 2:places]
        out = weights.token(latent, cache[:, :, :, :places], now_blocked[:, :places])
        policy, value = weights.prediction(out)
        return np.concatenate([policy, self.scalars(value, reward)], 1)

    def scalars(self, value: Array, reward: Array) -> Array:
        """[B, 2] Value and reward from their logits."""
        supports = (self.model.value_support, self.model.reward_support)
        if supports[0].size == supports[1].size:  # one support: one call
            return in_torch(supports[0].to_scalar, np.stack([value, reward], 1))
        both = zip(supports, (value, reward), strict=True)
        return np.stack([in_torch(support.to_scalar, logits) for support, logits in both], 1)


class NumpyBlock:
    def __init__(self, block: Block) -> None:
        experts = block.feed_forward
        self.attention_norm = norm_parameters(block.attention_norm)
        self.feed_forward_norm = norm_parameters(block.feed_forward_norm)
        self.query_key_value, self.project = scaled(block.query_key_value), scaled(block.project)
        self.shared_in, self.shared_out = scaled(experts.shared_in), scaled(experts.shared_out)
        self.gate = transposed(experts.gate.weight)
        self.expert_in, self.expert_out = concatenated(experts.expert_in), concatenated(experts.expert_out)
        self.num_experts, self.weighted = experts.num_experts, experts.routing == "probability"

    def attention(self, x: Array, cache: Array, bias: Array) -> Array:
        """x [B, width] -> [B, width]. Writes the last place of cache [B, 2, T, heads, size]. bias [B, heads, T]"""
        batch, _, _, heads, size = cache.shape
        normed = layer_norm(x, *self.attention_norm)
        projected = apply(normed, self.query_key_value).reshape(batch, 3, heads, size)
        cache[:, :, -1] = projected[:, 1:]
        scores = np.einsum("bhd,bthd->bht", projected[:, 0], cache[:, 0])
        scores *= np.float32(size**-0.5)
        scores += bias
        mixed = np.einsum("bht,bthd->bhd", in_torch(softmax, scores), cache[:, 1])
        return apply(mixed.reshape(batch, -1), self.project)

    def feed_forward(self, x: Array) -> Array:
        """[B, width] -> [B, width]"""
        x = layer_norm(x, *self.feed_forward_norm)
        rows = np.arange(len(x))
        probability = in_torch(softmax, x @ self.gate)
        expert = probability.argmax(1)
        both = (x @ self.expert_in).reshape(len(x), self.num_experts, -1)[rows, expert]
        half = both.shape[1] // 2
        hidden = in_torch(F.silu, both[:, :half]) * both[:, half:]
        routed: Array = (hidden @ self.expert_out).reshape(len(x), self.num_experts, -1)[rows, expert]
        if self.weighted:
            routed *= probability[rows, expert][:, None]
        routed += apply(in_torch(F.gelu, apply(x, self.shared_in)), self.shared_out)
        return routed


class TwoHeads:
    """Two heads with one product for their first layers. A norm after the last layer is left to the caller."""

    def __init__(self, *pair: nn.Sequential) -> None:
        weight, bias = zip(*(linear(head[0]) for head in pair), strict=True)
        self.first: Linear = (np.concatenate(weight, 1), np.concatenate(bias))
        norms = [cast(nn.LayerNorm, head[1]) for head in pair]
        self.gain = np.stack([numbers(norm.weight) for norm in norms])
        self.shift = np.stack([numbers(norm.bias) for norm in norms])
        self.last = [linear(head[3]) for head in pair]

    def __call__(self, x: Array) -> list[Array]:
        hidden = layer_norm(apply(x, self.first).reshape(len(x), 2, -1))
        hidden *= self.gain
        hidden += self.shift
        hidden = in_torch(F.gelu, hidden)
        return [apply(hidden[:, i], last) for i, last in enumerate(self.last)]


class TransformerWeights(NamedTuple):
    """The weights of one task's model."""

    action: Array  # [A, width] action tokens plus the task embedding
    task: Array | float  # [width] task embedding
    distance_bias: Array  # [heads, places + 1], the newest place last
    layers: list[NumpyBlock]
    norm: tuple[Tensor, Tensor]
    outcome: TwoHeads  # reward, and the latent before its norm
    prediction: TwoHeads  # policy, value

    def token(self, x: Array, cache: Array, blocked: Array) -> Array:
        """Outputs [B, width] at tokens x [B, width]. Writes the last place of cache [B, layers, 2, T, ...]."""
        bias = self.distance_bias[:, -cache.shape[3] :] + blocked[:, None]
        for i, layer in enumerate(self.layers):
            x = x + layer.attention(x, cache[:, i], bias)
            x = x + layer.feed_forward(x)
        return layer_norm(x, *self.norm)


def read_weights(model: TaskModel) -> TransformerWeights:
    whole, heads = model.model, model.heads
    task = 0.0 if whole.task_embedding is None else numbers(whole.task_embedding[model.task])
    bias = whole.transformer.bias(1, model.places + 1).detach()[:, 0]
    return TransformerWeights(
        action=numbers(heads.action.weight) + task,
        task=task,
        distance_bias=bias.numpy(),
        layers=[NumpyBlock(cast(Block, block)) for block in whole.transformer.blocks],
        norm=norm_parameters(whole.transformer.norm),
        outcome=TwoHeads(heads.reward, heads.latent),
        prediction=TwoHeads(heads.policy, heads.value),
    )


def norm_parameters(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight.detach(), norm.bias.detach()


def scaled(layer: ScaledLinear) -> Linear:
    return transposed(layer.effective()), None if layer.bias is None else numbers(layer.bias)


def concatenated(layer: ScaledLinear) -> Array:
    """The weights [copies, out, in] of a layer as one weight [in, copies * out]."""
    return transposed(layer.effective().flatten(0, 1))


def apply(x: Array, layer: Linear) -> Array:
    weight, bias = layer
    out = x @ weight
    if bias is not None:
        out += bias
    return out


def in_torch(function: Callable[[Tensor], Tensor], x: Array) -> Array:
    """Apply a function for which numpy would need several passes."""
    return function(torch.from_numpy(x)).numpy()


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Array, weight: Tensor | None = None, bias: Tensor | None = None) -> Array:
    return F.layer_norm(torch.from_numpy(x), x.shape[-1:], weight, bias).numpy()
