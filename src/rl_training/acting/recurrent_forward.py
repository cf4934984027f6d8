"""Recurrent actor-critics in acting: one step of the cells, from a few observations and memories to arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from rl_training.acting.forward import NumpyMLP, flat
from rl_training.data.batch import to_tensors
from rl_training.models.recurrent import RecurrentActorCritic, RecurrentCore
from rl_training.types import Array, Memory, Observation

# (observations, memory) to (policy outputs [N, A], values [N, 1], the next memory), none of them overwritten later
RecurrentForward: TypeAlias = Callable[[Observation, Memory], tuple[Array, Array, Memory]]


class TorchRecurrentForward:
    """Any encoder and heads on any device. The memory is copied to the device and back."""

    def __init__(self, model: RecurrentActorCritic) -> None:
        self.model, self.device = model, next(model.parameters()).device

    @torch.no_grad()
    def __call__(self, obs: Observation, memory: Memory) -> tuple[Array, Array, Memory]:
        state = {name: torch.as_tensor(part, device=self.device) for name, part in memory.items()}
        output, value, after = self.model.step(to_tensors(obs, self.device), state)
        kept: Memory = {name: part.cpu().numpy() for name, part in after.items()}
        return output.cpu().numpy(), value.unsqueeze(-1).cpu().numpy(), kept


class NumpyRecurrentForward:
    """Vector observations on the CPU, on views of the torch weights, as in NumpyForward."""

    def __init__(self, model: RecurrentActorCritic) -> None:
        self.cells = {name: NumpyCell(core) for name, core in model.cores.items() if isinstance(core, RecurrentCore)}
        self.policy, self.value = (NumpyMLP(network) for network in model.networks())
        self.critic_remembers = model.value_layer is None

    def __call__(self, obs: Observation, memory: Memory) -> tuple[Array, Array, Memory]:
        features = flat(obs)
        after: Memory = {name: cell(features, np.asarray(memory[name])) for name, cell in self.cells.items()}
        outputs = {name: np.ascontiguousarray(state[:, 0]) for name, state in after.items()}
        policy = outputs["policy"]
        critic = outputs.get("value", policy) if self.critic_remembers else features
        return self.policy(policy).copy(), self.value(critic).copy(), after


class NumpyCell:
    """One step of an LSTM or GRU: equations and order of the gates as in torch.nn."""

    def __init__(self, core: RecurrentCore) -> None:
        layer, self.size = core.layer, core.size
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        self.weight_x, self.weight_h, self.bias_x, self.bias_h = (getattr(layer, n).detach().numpy() for n in names)
        self.step = self.lstm if core.is_lstm else self.gru

    def __call__(self, x: Array, state: Array) -> Array:
        """x [N, F] and state [N, K, size] to the next state."""
        hidden = np.ascontiguousarray(state[:, 0])
        from_x, from_h = x.dot(self.weight_x.T), hidden.dot(self.weight_h.T)
        from_x += self.bias_x
        from_h += self.bias_h
        return self.step(from_x, from_h, state)

    def lstm(self, from_x: Array, from_h: Array, state: Array) -> Array:
        size, gates, after = self.size, from_x, np.empty_like(state)
        gates += from_h
        content = np.tanh(gates[:, 2 * size : 3 * size])
        sigmoid(gates)
        hidden, cell = after[:, 0], after[:, 1]
        np.multiply(gates[:, size : 2 * size], state[:, 1], out=cell)
        content *= gates[:, :size]
        cell += content
        np.tanh(cell, out=hidden)
        hidden *= gates[:, 3 * size :]
        return after

    def gru(self, from_x: Array, from_h: Array, state: Array) -> Array:
        size = self.size
        gates = from_x[:, : 2 * size] + from_h[:, : 2 * size]
        sigmoid(gates)
        reset, update = gates[:, :size], gates[:, size:]
        content = from_h[:, 2 * size :]
        content *= reset
        content += from_x[:, 2 * size :]
        np.tanh(content, out=content)
        after: Array = content + update * (state[:, 0] - content)
        return after[:, None]


def sigmoid(x: Array) -> None:
    """In place. By tanh, which does not overflow."""
    x *= np.float32(0.5)
    np.tanh(x, out=x)
    x *= np.float32(0.5)
    x += np.float32(0.5)
