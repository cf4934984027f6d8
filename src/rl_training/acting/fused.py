"""The weights of models that run inside the compiled search: small perceptrons on the CPU."""

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
    """Whether a model is on the CPU, has discrete actions, and has linear layers with tanh or ReLU between them, and an
    LSTM for value prefixes."""
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
    """Copies of the weights in the layout of the compiled search."""
    if isinstance(model, EfficientZeroModel):
        return perceptrons(model, [linear(model.next_state)]), prefix_lstm(model)
    return perceptrons(model, [linear(model.next_state), linear(model.reward)]), None


def perceptrons(model: MuZeroModel, outcome: list[tuple[Array, Array]]) -> Perceptrons:
    """outcome: the layers on the dynamics' features."""
    from rl_training.ops.tree import Perceptrons  # here, because importing numba is slow

    (first, first_bias), *later = layers(model.dynamics_trunk)
    states = model.latent_size
    prediction = layers(model.prediction_trunk)
    heads = [linear(model.policy), linear(model.value)]
    return Perceptrons(
        of_action=padded(first[states:] + first_bias, 1),
        dynamics=(blocks(first[:states], pad_inputs=False), *(blocks(weight) for weight, _ in later)),
        dynamics_bias=(padded(first_bias, 0), *(padded(bias, 0) for _, bias in later)),
        outcome=blocks(np.concatenate([weight for weight, _ in outcome], 1)),
        outcome_bias=np.concatenate([bias for _, bias in outcome]),
        prediction=tuple(blocks(weight, pad_inputs=layer > 0) for layer, (weight, _) in enumerate(prediction)),
        prediction_bias=tuple(padded(bias, 0) for _, bias in prediction),
        heads=blocks(np.concatenate([weight for weight, _ in heads], 1)),
        heads_bias=np.concatenate([bias for _, bias in heads]),
        tanh=any(isinstance(part, nn.Tanh) for part in model.dynamics_trunk.children()),
        board=isinstance(model.value_support, Scalar),
    )


def prefix_lstm(model: EfficientZeroModel) -> PrefixLSTM:
    """The gain and the bias of the LayerNorm are folded into the next layer."""
    from rl_training.ops.tree import PrefixLSTM

    cell = model.lstm
    norm, head = cast(nn.Sequential, model.reward)
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = linear(head)
    return PrefixLSTM(
        features=blocks(numbers(cell.weight_ih).T),
        hidden=blocks(numbers(cell.weight_hh).T, pad_inputs=False),
        bias=numbers(cell.bias_ih) + numbers(cell.bias_hh),
        reward=blocks(numbers(norm.weight)[:, None] * weight, pad_inputs=False),
        reward_bias=bias + numbers(norm.bias) @ weight,
        horizon=model.lstm_horizon,
    )


def padded(array: Array, *axes: int) -> Array:
    """Axes padded with zeros to whole blocks."""
    from rl_training.ops.tile import LANES

    return np.pad(array, [(0, -size % LANES if axis in axes else 0) for axis, size in enumerate(array.shape)])


def blocks(weight: Array, *, pad_inputs: bool = True) -> Array:
    """[in, out] -> [blocks, in, LANES]. Inputs are padded if they are the padded outputs of a layer."""
    from rl_training.ops.tile import LANES

    weight = padded(weight, 0, 1) if pad_inputs else padded(weight, 1)
    return aligned(weight.reshape(len(weight), -1, LANES).swapaxes(0, 1))


def aligned(array: Array) -> Array:
    """A copy aligned to cache lines: otherwise each load as wide as a line would touch two."""
    line = 64  # bytes
    buffer = np.empty(array.nbytes + line, np.uint8)
    begin = -buffer.ctypes.data % line
    copy = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def layers(trunk: nn.Module) -> list[tuple[Array, Array]]:
    return [linear(part) for part in trunk.children() if isinstance(part, nn.Linear)]


def linear(module: nn.Module) -> tuple[Array, Array]:
    """(weight [in, out], bias [out])"""
    assert isinstance(module, nn.Linear)
    return transposed(module.weight), numbers(module.bias)


def transposed(weight: Tensor) -> Array:
    """[out, in] -> a copy [in, out], with which small products take a third of the time."""
    return np.array(weight.detach().numpy().T, order="C")


def numbers(parameter: Tensor) -> Array:
    return cast(Array, parameter.detach().numpy().copy())
