"""Functions captured as CUDA graphs: one launch instead of one per kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UP = 3  # runs before a capture, in which libraries choose their kernels


class Captured(Protocol):
    """A captured function. `output` is what it returned: each replay writes to the same tensors."""

    output: Any

    def replay(self) -> None: ...

    def launch(self) -> None:
        """Replay; `wait` then returns when it is done."""

    def wait(self) -> None: ...


class Capture(Protocol):
    """What captures functions without parameters. They read tensors that are written in place; all else that they read
    stays as it was when they were captured. The tests have one that does the same without a GPU."""

    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy in memory of the host that a device reads and writes itself."""
        ...

    def beside(self, function: Callable[[], Any]) -> Any:
        """Run a function as it runs before a capture."""
        ...

    def __call__(self, function: Callable[[], Any]) -> Captured: ...


def warmed_up(capture: Capture, function: Callable[[], Any]) -> Captured:
    """Captured after some runs."""
    for _ in range(WARM_UP):
        capture.beside(function)
    return capture(function)


class CudaCapture:
    """On a CUDA device, by default the current one."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.stream: Any = None

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def beside(self, function: Callable[[], Any]) -> Any:
        """On another stream, as captures want it: what autograd keeps of a stream is then not the default one's."""
        self.stream = self.stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            output = function()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return output

    def __call__(self, function: Callable[[], Any]) -> CudaGraph:
        return CudaGraph(function, self.device)


class CudaGraph:
    def __init__(self, function: Callable[[], Any], device: torch.device | None) -> None:
        self.stream = torch.cuda.current_stream(device)  # asking for it takes as long as a kernel
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        self.graph.replay()

    def launch(self) -> None:
        self.graph.replay()
        self.done.record(self.stream)

    def wait(self) -> None:
        self.done.synchronize()
