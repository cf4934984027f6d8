"""The parameters of a network as one vector, for optimizers and for actors in other processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rl_training.types import Weights

_ALIGNMENT = 16  # elements: parameters start at multiples of 64 bytes, as if allocated on their own


class FlatParameters:
    """One vector of all trainable parameters, and one of their gradients, allocated when an optimizer first uses it.

    Each parameter becomes a view of the vector. Modules and their `load_state_dict` work as before, as long as nothing
    replaces their tensors: move a model to its device first.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.offsets, size = [], 0
        for p in self.parameters:
            self.offsets.append(size)
            size += -(-p.numel() // _ALIGNMENT) * _ALIGNMENT
        self.vector = self.parameters[0].data.new_zeros(size)
        self._gradient: Tensor | None = None
        for p, view in zip(self.parameters, self.views(self.vector), strict=True):
            view.copy_(p.data)
            p.data = view

    @property
    def gradient(self) -> Tensor:
        """Each parameter's `grad` is a view of it."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.vector)
            for p, view in zip(self.parameters, self.views(self._gradient), strict=True):
                p.grad = view
        return self._gradient

    def views(self, vector: Tensor) -> list[Tensor]:
        """Views of `vector` with the parameters' shapes and strides: convolutions may be channels last."""
        places = zip(self.parameters, self.offsets, strict=True)
        return [vector.as_strided(p.shape, p.stride(), vector.storage_offset() + offset) for p, offset in places]

    def pack(self, tensors: Iterable[Tensor]) -> Tensor:
        """One vector of tensors with the parameters' shapes, such as their gradients."""
        vector = torch.zeros_like(self.vector)
        for view, tensor in zip(self.views(vector), tensors, strict=True):
            view.copy_(tensor)
        return vector

    def group(self, parameters: Sequence[nn.Parameter]) -> FlatParameters:
        """Consecutive parameters, as a slice of the same vectors."""
        begin = next(i for i, p in enumerate(self.parameters) if p is parameters[0])
        end = begin + len(parameters)
        if not all(p is q for p, q in zip(self.parameters[begin:end], parameters, strict=True)):
            raise ValueError("a parameter group should be consecutive parameters of the model")
        first, last = ([*self.offsets, len(self.vector)][i] for i in (begin, end))
        part = FlatParameters.__new__(FlatParameters)
        part.parameters = self.parameters[begin:end]
        part.offsets = [offset - first for offset in self.offsets[begin:end]]
        part.vector, part._gradient = self.vector[first:last], self.gradient[first:last]
        return part


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def pack_weights(model: nn.Module, version: int) -> Weights:
    """Copies of all parameters of a model, as one vector, and of its buffers."""
    vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu().numpy()
    return Weights(vector, {name: b.detach().cpu().numpy().copy() for name, b in model.named_buffers()}, version)


@torch.no_grad()
def unpack_weights(model: nn.Module, weights: Weights) -> None:
    """Write weights into a model of the same architecture, in place."""
    size = num_parameters(model)
    if len(weights.vector) != size:
        raise ValueError(f"{len(weights.vector):,} weights do not fit a network of {size:,} parameters")
    parts = torch.split(torch.from_numpy(weights.vector), [p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.copy_(part.view(parameter.shape))
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.from_numpy(weights.buffers[name]))
