"""Networks in acting: from a few observations to the outputs of networks, as arrays.

For small perceptrons on the CPU the overhead of a torch call exceeds the work. They run in numpy, on views of the torch
weights. Optimizers and `load_state_dict` write in place, so the views never need a refresh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from rl_training.data.batch import to_tensors
from rl_training.types import Array, Observation

Forward: TypeAlias = Callable[[Observation], list[Array]]  # [N, ...] -> [N, out] of each network; not overwritten later


class TorchForward:
    """Any networks on any device. The outputs are copied to the host together."""

    def __init__(self, encoder: nn.Module, *networks: nn.Module) -> None:
        self.encoder, self.networks, self.device = encoder, networks, next(networks[0].parameters()).device

    @torch.no_grad()
    def __call__(self, obs: Observation) -> list[Array]:
        features = self.encoder(to_tensors(obs, self.device))
        outputs = [network(features) for network in self.networks]
        packed = torch.cat(outputs, -1).cpu().numpy()
        ends = np.cumsum([output.shape[-1] for output in outputs])[:-1]
        return np.split(packed, ends, -1)


class NumpyForward:
    """Perceptrons on vectors, in numpy."""

    def __init__(self, *networks: nn.Module) -> None:
        self.networks = [NumpyMLP(network) for network in networks if isinstance(network, nn.Sequential)]

    def __call__(self, obs: Observation) -> list[Array]:
        x = flat(obs)
        # Copies, because the next call overwrites the buffers.
        return [network(x).copy() for network in self.networks]


class NumpyLayer(NamedTuple):
    weight: Array  # [out, in]
    bias: Array  # [out]
    activation: type | None


class NumpyMLP:
    """An nn.Sequential of Linear, Tanh and ReLU layers, with reused buffers."""

    def __init__(self, network: nn.Sequential) -> None:
        self.layers: list[NumpyLayer] = []
        modules = list(network)
        for linear, activation in zip(modules[::2], [*modules[1::2], None], strict=True):
            assert isinstance(linear, nn.Linear)
            kind = None if activation is None else type(activation)
            self.layers.append(NumpyLayer(linear.weight.detach().numpy(), linear.bias.detach().numpy(), kind))
        self.buffers: dict[int, list[Array]] = {}

    def __call__(self, x: Array) -> Array:
        """[N, in] -> [N, out], valid until the next call."""
        buffers = self.buffers.get(len(x))
        if buffers is None:
            buffers = [np.empty((len(x), len(layer.bias)), np.float32) for layer in self.layers]
            self.buffers[len(x)] = buffers
        for layer, out in zip(self.layers, buffers, strict=True):
            x.dot(layer.weight.T, out)
            np.add(out, layer.bias, out)
            if layer.activation is not None:
                ACTIVATIONS[layer.activation](out)
            x = out
        return x


def is_numpy_mlp(network: nn.Module) -> bool:
    """Whether NumpyMLP can evaluate a network."""
    if not isinstance(network, nn.Sequential) or any(p.device.type != "cpu" for p in network.parameters()):
        return False
    modules = list(network)
    return all(isinstance(m, nn.Linear) for m in modules[::2]) and all(type(m) in ACTIVATIONS for m in modules[1::2])


ACTIVATIONS: dict[type, Callable[[Array], Array]] = {  # in place
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, np.float32(0), out=x),
}


def flat(obs: Observation) -> Array:
    """Observations [N, ...] of a plain Box as float32 vectors [N, size]."""
    return np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)
