"""Models that a compiled search can hold inside: perceptrons on the CPU, read from their torch weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.ops.support import Scalar
from rl_training.types import Array

if TYPE_CHECKING:
    from rl_training.ops.tree import Perceptrons


def is_fusable(model: PlanningModel) -> bool:
    """Whether all of a transition is linear layers with tanh or ReLU between, on the CPU, for discrete actions."""
    if type(model) is not MuZeroModel or model.is_tower or model.continuous:
        return False
    supports = {type(model.value_support), type(model.reward_support)}
    trunks = [model.dynamics_trunk, model.prediction_trunk]
    kinds = {type(part) for trunk in trunks for part in trunk.children()} - {nn.Linear}
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    return on_cpu and len(supports) == 1 and kinds in ({nn.Tanh}, {nn.ReLU})


def perceptrons(model: MuZeroModel) -> Perceptrons:
    """The weights as they are now, in the order in which a search reads them."""
    from rl_training.ops.tile import LANES  # numba takes longer to import than all the rest
    from rl_training.ops.tree import Perceptrons

    def filled(array: Array, *axes: int) -> Array:
        """With zeros up to whole blocks."""
        return np.pad(array, [(0, -size % LANES if axis in axes else 0) for axis, size in enumerate(array.shape)])

    def blocks(weight: Array, *, of_units: bool = True) -> Array:
        """[in, out] -> [blocks, in, LANES]; the inputs are filled as well where they are units of the layer before."""
        weight = filled(weight, 0, 1) if of_units else filled(weight, 1)
        return aligned(weight.reshape(len(weight), -1, LANES).swapaxes(0, 1))

    (first, first_bias), *later = layers(model.dynamics_trunk)
    states = model.latent_size
    prediction = layers(model.prediction_trunk)
    heads = [linear(model.policy), linear(model.value)]
    outcome = [linear(model.next_state), linear(model.reward)]
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
    weight: Tensor = module.weight.detach()
    return np.ascontiguousarray(weight.numpy().T), module.bias.detach().numpy().copy()
