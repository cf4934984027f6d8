"""The gradient of DQN's loss in numpy, for small networks, where the overhead of autograd exceeds the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.acting.forward import NumpyMLP, flat
from rl_training.models.q_network import QNetwork
from rl_training.types import Array, Batch


class QGradient:
    """Writes the gradient of the Huber loss, whose slope is the clipped error, to the parameters' `grad`."""

    def __init__(self, model: QNetwork, target_model: QNetwork) -> None:
        heads = cast(nn.Sequential, model.head), cast(nn.Sequential, target_model.head)
        self.network, self.target_network = map(NumpyMLP, heads)
        linear = [layer for layer in heads[0] if isinstance(layer, nn.Linear)]
        self.gradients = [(cast(Tensor, x.weight.grad).numpy(), cast(Tensor, x.bias.grad).numpy()) for x in linear]

    def __call__(self, batch: Batch, *, double: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, Q [B], Q - target [B]), like `DQN.gradient`."""
        arrays = {key: value.numpy() for key, value in batch.items()}
        obs, next_obs, rows = flat(arrays["obs"]), flat(arrays["next_obs"]), np.arange(len(arrays["reward"]))
        next_q = self.target_network(next_obs)
        value = next_q[rows, self.network(next_obs).argmax(1)] if double else next_q.max(1)
        all_q = self.network(obs)
        q = all_q[rows, arrays["action"]]
        error = q - (arrays["reward"] + arrays["discount"] * value)
        slope = error.clip(-1, 1)
        weight = arrays.get("weight", np.float32(1))
        gradient = np.zeros_like(all_q)
        gradient[rows, arrays["action"]] = slope * weight / np.float32(len(rows))
        self.backward(obs, gradient)
        loss = (slope * (error - 0.5 * slope) * weight).mean()  # e^2 / 2 if |e| <= 1, else |e| - 1/2
        return torch.as_tensor(loss), torch.from_numpy(q), torch.from_numpy(error)

    def backward(self, x: Array, gradient: Array) -> None:
        """Write the gradients of the weights, given that of the outputs [B, A] of the last call of the network on x."""
        layers, outputs = self.network.layers, self.network.buffers[len(x)]
        for i in range(len(layers) - 1, -1, -1):
            inputs = outputs[i - 1] if i else x
            weight_gradient, bias_gradient = self.gradients[i]
            np.dot(gradient.T, inputs, out=weight_gradient)
            np.sum(gradient, 0, out=bias_gradient)
            if i:
                gradient = gradient.dot(layers[i].weight)
                gradient *= SLOPES[layers[i - 1].activation](inputs)


SLOPES: dict[type | None, Callable[[Array], Array]] = {
    nn.Tanh: lambda y: 1.0 - y * y,
    nn.ReLU: lambda y: y > 0,
}  # f'(x) from y = f(x)
