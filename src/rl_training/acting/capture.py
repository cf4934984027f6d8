"""Functions captured as CUDA graphs: one launch instead of one for each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # runs before a capture, in which libraries select kernels


class CudaCapture:
    """Captures functions without parameters on a CUDA device, by default the current one.

    A replay reads the current content of tensors. All else that a function reads is fixed at the capture. Tests have a
    class with these methods that needs no GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.stream: Any = None

    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy in host memory that the device can read and write."""
        return tensor.pin_memory()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Run before a capture. Not on the default stream, because autograd keeps references to streams."""
        self.stream = self.stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            output = function()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return output

    def __call__(self, function: Callable[[], Any]) -> CudaGraph:
        return CudaGraph(function, self.device)


class CudaGraph:
    """A captured function. `output` is its return value. Each replay writes to the same tensors."""

    def __init__(self, function: Callable[[], Any], device: torch.device | None) -> None:
        self.stream = torch.cuda.current_stream(device)  # the call takes as long as a kernel
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.output = function()
        except BaseException:
            torch.cuda.set_stream(self.stream)  # a failed capture does not restore it
            raise
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        self.graph.replay()

    def launch(self) -> None:
        """Start a replay. `wait` returns when it is done."""
        self.graph.replay()
        self.done.record(self.stream)

    def wait(self) -> None:
        self.done.synchronize()


def capture_after_warm_up(capture: CudaCapture, function: Callable[[], Any]) -> CudaGraph:
    for _ in range(WARM_UP):
        capture.warm_up(function)
    return capture(function)
