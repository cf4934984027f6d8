"""Fast inference for acting: a handful of observations in, what the networks make of them out, as arrays.

For small perceptrons on the CPU a torch call costs more than the product it starts. There the networks run in numpy on
views of the torch weights: optimizers and `load_state_dict` write in place, so the views never need a refresh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from rl_training.models.networks import Encoder, Flatten
from rl_training.models.numpy_mlp import NumpyMLP, is_simple
from rl_training.types import Array, Observation

Forward: TypeAlias = Callable[[Observation], list[Array]]  # [N, ...] -> [N, out] of each network, yours to keep


def make_forward(encoder: Encoder, *networks: nn.Module) -> Forward:
    """The fastest way through networks behind one encoder, where they are now; make it anew after moving them."""
    on_cpu = all(p.device.type == "cpu" for network in networks for p in network.parameters())
    plain = isinstance(encoder, Flatten) and not encoder.is_bytes
    if on_cpu and plain and all(is_simple(network) for network in networks):
        return NumpyForward(*networks)
    return TorchForward(encoder, *networks)


class TorchForward:
    """Any networks on any device. Of the outputs only the last, small ones travel, in one piece."""

    def __init__(self, encoder: Encoder, *networks: nn.Module) -> None:
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
        # Copies: what leaves here may outlive the next call, the buffers do not.
        return [network(x).copy() for network in self.networks]


def to_tensors(obs: Observation, device: torch.device) -> Any:
    """An observation as tensors on the device, sharing memory where that is the CPU."""
    if isinstance(obs, dict):
        return {key: to_tensors(x, device) for key, x in obs.items()}
    return torch.as_tensor(obs, device=device)


def flat(obs: Observation) -> Array:
    """Observations [N, ...] of a plain Box as float32 vectors [N, size]."""
    return np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)
