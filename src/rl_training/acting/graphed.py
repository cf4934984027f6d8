"""A gradient, or a whole gradient step, as one captured CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rl_training.acting.capture import CudaCapture, CudaGraph
from rl_training.data.batch import tree_map
from rl_training.types import Batch

Gradient: TypeAlias = Callable[[Batch], dict[str, Tensor]]


class GraphedGradient:
    """A function of tensors that computes a gradient and returns metrics, captured after WARM_UP runs.

    A capture fixes all other numbers that the function reads: `constants` returns them. Other constants, like another
    batch size, need another capture. There are MAX_CAPTURES, and one more in every RUNS_OF_A_CAPTURE runs: a schedule
    may change them all the time. Without one the function runs as it is.
    """

    WARM_UP = 4  # runs before a capture, in which libraries select kernels
    MAX_CAPTURES = 8
    RUNS_OF_A_CAPTURE = 100

    def __init__(
        self,
        gradient: Gradient,
        constants: Callable[[], tuple[float, ...]] = tuple,
        capture: CudaCapture | None = None,
    ) -> None:
        self.gradient, self.constants = gradient, constants
        self.capture = capture or CudaCapture()
        self.key: Any = None
        self.runs = 0  # with this key
        self.all_runs = 0
        self.captures = 0
        self.can_capture = True
        self.graph: CudaGraph | None = None
        self.batch: Batch = {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        key = self.constants(), tree_map(lambda x: (x.shape, x.dtype), batch)
        if key != self.key:
            self.key, self.runs, self.graph, self.batch = key, 0, None, {}
        self.runs += 1
        self.all_runs += 1
        if self.runs > self.WARM_UP and self.graph is None and self.captures < self.most_captures():
            self.graph = self.captured(batch)
        if self.graph is None:
            metrics: dict[str, Tensor] = self.capture.warm_up(lambda: self.gradient(batch))
            return metrics
        copy_into(self.batch, batch)
        self.graph.replay()
        return {name: value.clone() for name, value in self.graph.output.items()}

    def captured(self, batch: Batch) -> CudaGraph | None:
        """A capture runs nothing: where it fails, nothing has changed, and the function goes on as it is."""
        self.captures += 1
        self.batch = tree_map(torch.clone, batch)
        errors: list[Exception] = []

        def gradient() -> dict[str, Tensor]:
            try:
                return self.gradient(self.batch)
            except Exception as error:
                errors.append(error)
                raise

        try:
            return self.capture(gradient)
        except Exception as error:
            first = errors[0] if errors else error  # ending a failed capture raises another error
            cause = (str(first).strip() or type(first).__name__).splitlines()[0]
            warnings.warn(f"a gradient cannot be captured as a CUDA graph ({cause}): it runs slower", stacklevel=2)
            self.can_capture, self.batch = False, {}
            return None

    def most_captures(self) -> int:
        return 0 if not self.can_capture else self.MAX_CAPTURES + self.all_runs // self.RUNS_OF_A_CAPTURE


def copy_into(target: Any, tree: Any) -> None:
    if isinstance(tree, dict):
        for key, branch in tree.items():
            copy_into(target[key], branch)
    else:
        target.copy_(tree, non_blocking=True)
