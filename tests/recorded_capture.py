"""Captures functions as CUDA graphs do, without a GPU: records their operations and repeats them on the same tensors.

Like a CUDA graph, a replay reads no Python: numbers, branches and the tensors themselves are those of the capture, and
the capture itself leaves tensors that were there before as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_BACK = {  # what a capture on a GPU refuses: the host would have to wait for a number
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []  # function, args, kwargs, the tensors it made
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors that were written to, as they were

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_BACK:
            raise RuntimeError(f"{func} cannot be captured")
        self.before += [(tensor, tensor.clone()) for tensor in written(func, args, kwargs or {})]
        output = func(*args, **(kwargs or {}))
        if is_view(func, output, args):
            return output  # it shows its tensor as it is now
        fresh = [] if func._schema.is_mutable else tensors(output)
        self.calls.append((func, args, kwargs or {}, fresh))
        return output

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, content in reversed(self.before):
            tensor.copy_(content)
        self.before = []


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a function writes to."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    writes = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for name in writes if name in given for tensor in tensors(given[name])]


def is_view(func: Any, output: Any, args: Any) -> bool:
    """Whether nothing was copied: where a view is not possible, `reshape` and its like make a tensor of their own."""
    memory = [x.untyped_storage().data_ptr() for x in tensors(args)]
    return func.is_view and all(x.untyped_storage().data_ptr() in memory for x in tensors(output))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Recorded:
    """What `CudaGraph` is on a GPU."""

    def __init__(self, function: Callable[[], Any]) -> None:
        with Recorder() as recorder:
            self.output = function()
        recorder.undo()
        self.calls = recorder.calls
        self.replays, self.under_way = 0, False

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, fresh in self.calls:
            output = func(*args, **kwargs)
            for kept, made in zip(fresh, tensors(output), strict=False):
                kept.copy_(made)

    def launch(self) -> None:
        assert not self.under_way, "asked again before it was answered"
        self.replay()
        self.under_way = True

    def wait(self) -> None:
        self.under_way = False


class RecordedCapture:
    """What `CudaCapture` is on a GPU. `made` are all that were captured."""

    def __init__(self) -> None:
        self.made: list[Recorded] = []
        self.runs = 0  # that were not captured

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.runs += 1
        return function()

    def __call__(self, function: Callable[[], Any]) -> Recorded:
        self.made.append(Recorded(function))
        return self.made[-1]
