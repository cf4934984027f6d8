"""Fast inference for acting: a handful of observations in, a distribution and values on the CPU out.

For small perceptrons on the CPU a torch call costs more than the product it starts. There the network runs in numpy on
views of the torch weights: optimizers and `load_state_dict` write in place, so the views never need a refresh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from rl_training.models.actor_critic import ActorCritic
from rl_training.models.networks import Flatten
from rl_training.ops.distributions import Distribution
from rl_training.types import Array, Observation

Forward: TypeAlias = Callable[[Observation], tuple[Distribution, Array]]  # [N, ...] -> the policy and values [N]


def make_acting(model: ActorCritic) -> Forward:
    """The fastest forward pass for this model where it is now; make it anew after moving the model or its weights."""
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    plain = isinstance(model.encoder, Flatten) and not model.encoder.is_bytes
    if on_cpu and plain and _is_simple(model.policy) and _is_simple(model.critic):
        return NumpyForward(model)
    return TorchForward(model)


class TorchForward:
    """Any model on any device. Of the outputs only the last, small ones travel, in one piece."""

    def __init__(self, model: ActorCritic) -> None:
        self.model, self.device = model, next(model.parameters()).device

    @torch.no_grad()
    def __call__(self, obs: Observation) -> tuple[Distribution, Array]:
        model = self.model
        output, value = model.outputs(to_tensors(obs, self.device))
        packed = torch.cat([output, value.unsqueeze(-1)], -1).cpu()
        log_std = None if model.log_std is None else model.log_std.detach().cpu()
        return model.head(packed[:, :-1], log_std), packed[:, -1].numpy()


class NumpyForward:
    """Perceptrons on vectors, in numpy."""

    def __init__(self, model: ActorCritic) -> None:
        self.head = model.head
        self.log_std = None if model.log_std is None else model.log_std.detach().numpy()
        self.policy, self.critic = NumpyMLP(model.policy), NumpyMLP(model.critic)

    def __call__(self, obs: Observation) -> tuple[Distribution, Array]:
        x = np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)
        # Copies: what leaves here may outlive the next call, the buffers do not.
        output, value = self.policy(x).copy(), self.critic(x)[:, 0].copy()
        return self.head(output if self.head.takes_numpy else torch.from_numpy(output), self.log_std), value


class NumpyMLP:
    """An nn.Sequential of Linear, Tanh and ReLU, evaluated in numpy into buffers that are reused."""

    def __init__(self, network: nn.Sequential) -> None:
        self.layers: list[tuple[Array, Array, np.ufunc | None]] = []  # (W^T, b, activation)
        modules = list(network)
        for linear, activation in zip(modules[::2], [*modules[1::2], None], strict=True):
            assert isinstance(linear, nn.Linear)
            weight, bias = linear.weight.detach().numpy().T, linear.bias.detach().numpy()
            self.layers.append((weight, bias, None if activation is None else _ACTIVATIONS[type(activation)]))
        self.buffers: dict[int, list[Array]] = {}

    def __call__(self, x: Array) -> Array:
        """[N, in] -> [N, out], valid until the next call."""
        buffers = self.buffers.get(len(x))
        if buffers is None:
            buffers = [np.empty((len(x), len(bias)), np.float32) for _, bias, _ in self.layers]
            self.buffers[len(x)] = buffers
        for (weight, bias, activation), out in zip(self.layers, buffers, strict=True):
            x.dot(weight, out)
            np.add(out, bias, out)
            if activation is not None:
                activation(out, out)
            x = out
        return x


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, np.float32(0), out=out)


_ACTIVATIONS: dict[type, Any] = {nn.Tanh: np.tanh, nn.ReLU: _relu}


def _is_simple(network: nn.Sequential) -> bool:
    modules = list(network)
    return all(isinstance(m, nn.Linear) for m in modules[::2]) and all(type(m) in _ACTIVATIONS for m in modules[1::2])


def to_tensors(obs: Observation, device: torch.device) -> Any:
    """An observation as tensors on the device, sharing memory where that is the CPU."""
    if isinstance(obs, dict):
        return {key: torch.as_tensor(x, device=device) for key, x in obs.items()}
    return torch.as_tensor(obs, device=device)
