"""A small perceptron in numpy, on views of its torch weights and their gradients.

Below some hundred units a torch call, and autograd even more, costs more than the product it starts. Optimizers and
`load_state_dict` write in place, so the views never need a refresh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import nn

from rl_training.types import Array


class Layer(NamedTuple):
    weight: Array  # [out, in]
    bias: Array  # [out]
    activation: type | None
    weight_gradient: Array | None  # None where the weights have no gradient yet: see FlatParameters
    bias_gradient: Array | None


class NumpyMLP:
    """An nn.Sequential of Linear, Tanh and ReLU, evaluated into buffers that are reused."""

    def __init__(self, network: nn.Sequential) -> None:
        self.layers: list[Layer] = []
        modules = list(network)
        for linear, activation in zip(modules[::2], [*modules[1::2], None], strict=True):
            assert isinstance(linear, nn.Linear)
            weight, bias = linear.weight, linear.bias
            gradients = (None if p.grad is None else p.grad.numpy() for p in (weight, bias))
            kind = None if activation is None else type(activation)
            self.layers.append(Layer(weight.detach().numpy(), bias.detach().numpy(), kind, *gradients))
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
                ACTIVATIONS[layer.activation][0](out)
            x = out
        return x

    def backward(self, x: Array, gradient: Array) -> None:
        """Write the weights' gradients, given that of the outputs [N, out] of the last call, which was with x."""
        outputs = self.buffers[len(x)]
        for i in range(len(self.layers) - 1, -1, -1):
            layer, inputs = self.layers[i], outputs[i - 1] if i else x
            assert layer.weight_gradient is not None
            np.dot(gradient.T, inputs, out=layer.weight_gradient)
            np.sum(gradient, 0, out=layer.bias_gradient)
            if i:
                gradient = gradient.dot(layer.weight)
                before = self.layers[i - 1].activation
                assert before is not None
                ACTIVATIONS[before][1](gradient, inputs)


def is_simple(network: nn.Module) -> bool:
    """Whether NumpyMLP can stand for it."""
    if not isinstance(network, nn.Sequential):
        return False
    modules = list(network)
    return all(isinstance(m, nn.Linear) for m in modules[::2]) and all(type(m) in ACTIVATIONS for m in modules[1::2])


def _tanh(x: Array) -> None:
    np.tanh(x, out=x)


def _tanh_backward(gradient: Array, output: Array) -> None:
    gradient *= 1.0 - output * output


def _relu(x: Array) -> None:
    np.maximum(x, np.float32(0), out=x)


def _relu_backward(gradient: Array, output: Array) -> None:
    gradient *= output > 0


ACTIVATIONS: dict[type, Any] = {  # (x -> f(x), in place; gradient -> gradient f'(x), in place, from f(x))
    nn.Tanh: (_tanh, _tanh_backward),
    nn.ReLU: (_relu, _relu_backward),
}
