"""Models that a compiled search can hold inside: perceptrons on the CPU, read from their torch weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor, nn

from rl_training.models.efficientzero import EfficientZeroModel
from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.ops.support import Scalar
from rl_training.types import Array

if TYPE_CHECKING:
    from rl_training.ops.tree import Perceptrons, PrefixLSTM


def is_fusable(model: PlanningModel) -> bool:
    """Whether a model is on the CPU, has discrete actions, and consists of linear layers with tanh or ReLU between them
    and, for value prefixes, an LSTM."""
    if type(model) not in (MuZeroModel, EfficientZeroModel):
        return False
    assert isinstance(model, MuZeroModel)
    if model.is_tower or model.continuous:
        return False
    supports = {type(model.value_support), type(model.reward_support)}
    trunks = [model.dynamics_trunk, model.prediction_trunk]
    kinds = {type(part) for trunk in trunks for part in trunk.children()} - {nn.Linear}
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    return on_cpu and len(supports) == 1 and kinds in ({nn.Tanh}, {nn.ReLU})


def fused_network(model: MuZeroModel) -> tuple[Perceptrons, PrefixLSTM | None]:
    """The weights as they are now, in the order in which a search reads them."""
    if isinstance(model, EfficientZeroModel):
        return perceptrons(model, [linear(model.next_state)]), prefix_lstm(model)
    return perceptrons(model, [linear(model.next_state), linear(model.reward)]), None


def perceptrons(model: MuZeroModel, outcome: list[tuple[Array, Array]]) -> Perceptrons:
    """outcome: the layers that read the dynamics' features."""
    from rl_training.ops.tree import Perceptrons  # numba takes longer to import than all the rest

    (first, first_bias), *later = layers(model.dynamics_trunk)
    states = model.latent_size
    prediction = layers(model.prediction_trunk)
    heads = [linear(model.policy), linear(model.value)]
    return Perceptrons(
        of_action=filled(first[states:] + first_bias, 1),
        dynamics=(blocks(first[:states], of_units=False), *(blocks(weight) for weight, _ in later)),
        dynamics_bias=(filled(first_bias, 0), *(filled(bias, 0) for _, bias in later)),
        outcome=blocks(np.concatenate([weight for weight, _ in outcome], 1)),
        outcome_bias=np.concatenate([bias for _, bias in outcome]),
        prediction=tuple(blocks(weight, of_units=layer > 0) for layer, (weight, _) in enumerate(prediction)),
        prediction_bias=tuple(filled(bias, 0) for _, bias in prediction),
        heads=blocks(np.concatenate([weight for weight, _ in heads], 1)),
        heads_bias=np.concatenate([bias for _, bias in heads]),
        tanh=any(isinstance(part, nn.Tanh) for part in model.dynamics_trunk.children()),
        board=isinstance(model.value_support, Scalar),
    )


def prefix_lstm(model: EfficientZeroModel) -> PrefixLSTM:
    """The scale and the offset of the LayerNorm become part of the layer that follows it."""
    from rl_training.ops.tree import PrefixLSTM

    cell = model.lstm
    norm, head = cast(nn.Sequential, model.reward)
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = linear(head)
    return PrefixLSTM(
        features=blocks(numbers(cell.weight_ih).T),
        hidden=blocks(numbers(cell.weight_hh).T, of_units=False),
        bias=numbers(cell.bias_ih) + numbers(cell.bias_hh),
        reward=blocks(numbers(norm.weight)[:, None] * weight, of_units=False),
        reward_bias=bias + numbers(norm.bias) @ weight,
        horizon=model.lstm_horizon,
    )


def filled(array: Array, *axes: int) -> Array:
    """With zeros up to whole blocks of outputs."""
    from rl_training.ops.tile import LANES

    return np.pad(array, [(0, -size % LANES if axis in axes else 0) for axis, size in enumerate(array.shape)])


def blocks(weight: Array, *, of_units: bool = True) -> Array:
    """[in, out] -> [blocks, in, LANES]; the inputs are filled as well where they are units of the layer before."""
    from rl_training.ops.tile import LANES

    weight = filled(weight, 0, 1) if of_units else filled(weight, 1)
    return aligned(weight.reshape(len(weight), -1, LANES).swapaxes(0, 1))


def aligned(array: Array) -> Array:
    """A copy that begins where a cache line does: loads as wide as one would otherwise touch two each."""
    line = 64
    room = np.empty(array.nbytes + line, np.uint8)
    begin = -room.ctypes.data % line
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def layers(trunk: nn.Module) -> list[tuple[Array, Array]]:
    return [linear(part) for part in trunk.children() if isinstance(part, nn.Linear)]


def linear(module: nn.Module) -> tuple[Array, Array]:
    """(weight [in, out], bias [out])"""
    assert isinstance(module, nn.Linear)
    return np.ascontiguousarray(numbers(module.weight).T), numbers(module.bias)


def numbers(parameter: Tensor) -> Array:
    array: Array = parameter.detach().numpy().copy()
    return array
