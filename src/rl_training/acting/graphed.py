"""A gradient as one captured CUDA graph: hundreds of small kernels in one launch instead of one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rl_training.acting.capture import Capture, Captured, CudaCapture
from rl_training.data.batch import tree_map
from rl_training.types import Batch

Gradient: TypeAlias = Callable[[Batch], dict[str, Tensor]]


class GraphedGradient:
    """A function that leaves a gradient behind and returns what to report, captured once it has run a few times.

    What it reads besides its batch and tensors written in place is captured as it was: `constants` are those numbers,
    and other constants, like another size of batch, are another capture. Where they keep changing, because they are
    scheduled, it goes on without.
    """

    WARM_UP = 4  # runs before a capture, in which libraries choose their kernels
    PATIENCE = 8  # captures

    def __init__(
        self, gradient: Gradient, constants: Callable[[], tuple[float, ...]], capture: Capture | None = None
    ) -> None:
        self.gradient, self.constants = gradient, constants
        self.capture = capture or CudaCapture()
        self.key: Any = None
        self.runs = 0  # with this key
        self.captures = 0
        self.graph: Captured | None = None
        self.batch: Batch = {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        key = (self.constants(), shapes(batch))
        if key != self.key:
            self.key, self.runs, self.graph, self.batch = key, 0, None, {}
        self.runs += 1
        if self.runs <= self.WARM_UP or (self.graph is None and self.captures == self.PATIENCE):
            report: dict[str, Tensor] = self.capture.beside(lambda: self.gradient(batch))
            return report
        if self.graph is None:
            self.captures += 1
            self.batch = tree_map(torch.clone, batch)
            self.graph = self.capture(lambda: self.gradient(self.batch))
        copy_into(self.batch, batch)
        self.graph.replay()
        return {name: value.clone() for name, value in self.graph.output.items()}


def shapes(tree: Any) -> Any:
    if isinstance(tree, dict):
        return tuple((key, shapes(branch)) for key, branch in tree.items())
    return tuple(tree.shape), tree.dtype


def copy_into(there: Any, tree: Any) -> None:
    if isinstance(tree, dict):
        for key, branch in tree.items():
            copy_into(there[key], branch)
    else:
        there.copy_(tree, non_blocking=True)
