"""Gradient steps on all parameters as one vector, and the averages of metrics.

With one vector, clipping is one norm and an optimizer one kernel. `torch.optim` is not used: its import takes longer
than that of the rest of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.data.state_check import compare_state
from rl_training.models.parameters import FlatParameters
from rl_training.types import Metrics, State


class Optimizer:
    """Updates a vector of parameters. Its state is the tensors in `state_names`."""

    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: FlatParameters) -> None:
        self.parameters = parameters
        self.gradient = parameters.gradient  # allocated here: networks that only act have none

    def step(self, lr: float) -> None:
        raise NotImplementedError

    def state_dict(self) -> State:
        return {name: getattr(self, name) for name in self.state_names}

    def load_state_dict(self, state: State) -> None:
        compare_state(self.state_dict(), state, "optimizer")  # copy_ would broadcast and round
        for name in self.state_names:
            getattr(self, name).copy_(state[name])


class Adam(Optimizer):
    """Kingma & Ba (arXiv:1412.6980): the kernel of torch.optim.Adam(fused=True)."""

    state_names = ("steps", "mean", "square")

    def __init__(
        self, parameters: FlatParameters, *, eps: float = 1e-5, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(parameters)
        self.eps, self.betas = eps, betas
        self.steps = torch.zeros((), device=parameters.vector.device)
        self.mean, self.square = torch.zeros_like(parameters.vector), torch.zeros_like(parameters.vector)

    def step(self, lr: float) -> None:
        if ADAM_KERNEL is None:
            public_adam_step(self, lr)
            return
        self.steps += 1
        ADAM_KERNEL(
            [self.parameters.vector], [self.gradient], [self.mean], [self.square], [], [self.steps],
            lr=lr, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps,
            weight_decay=0.0, amsgrad=False, maximize=False,
        )  # fmt: skip


ADAM_KERNEL: Any = getattr(torch, "_fused_adam_", None)  # of torch.optim.Adam(fused=True); not public


def public_adam_step(adam: Adam, lr: float) -> None:
    """The same kernel by way of torch.optim.Adam, whose overhead exceeds the kernel's time for small networks."""
    flat = adam.parameters
    parameter = torch.nn.Parameter(flat.vector)
    parameter.grad = adam.gradient
    optimizer = torch.optim.Adam([parameter], lr=lr, betas=adam.betas, eps=adam.eps, fused=True)
    optimizer.state[parameter] = {"step": adam.steps, "exp_avg": adam.mean, "exp_avg_sq": adam.square}
    optimizer.step()


class Jointly(Optimizer):
    """Optimizers of consecutive parts of a vector, which step together: clipping takes the norm over all of it."""

    def __init__(self, parameters: FlatParameters, parts: Sequence[Optimizer]) -> None:
        super().__init__(parameters)
        self.parts = parts

    def step(self, lr: float) -> None:
        for part in self.parts:
            part.step(lr)


class RMSprop(Optimizer):
    """Tieleman & Hinton (2012).

    `tf_style`: epsilon inside the root and an initial mean square of one, as in TensorFlow, which the published results
    of A2C on Atari used. The first steps are much smaller.
    """

    state_names = ("square",)

    def __init__(
        self, parameters: FlatParameters, *, alpha: float = 0.99, eps: float = 1e-5, tf_style: bool = False
    ) -> None:
        super().__init__(parameters)
        self.alpha, self.eps, self.tf_style = alpha, eps, tf_style
        self.square = torch.full_like(parameters.vector, 1.0 if tf_style else 0.0)

    def step(self, lr: float) -> None:
        gradient = self.gradient
        self.square.mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        root = (self.square + self.eps).sqrt_() if self.tf_style else self.square.sqrt().add_(self.eps)
        self.parameters.vector.addcdiv_(gradient, root, value=-lr)


@torch.no_grad()
def soft_update(target: nn.Module, model: nn.Module, tau: float) -> None:
    """Move a target network towards a model by `tau` (Polyak averaging). Buffers are copied."""
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        old.lerp_(new, tau)
    for statistic, newer in zip(target.buffers(), model.buffers(), strict=True):
        statistic.copy_(newer)


def backward(optimizer: Optimizer, loss: Tensor) -> None:
    """Write the gradient of `loss` with respect to the optimizer's parameters."""
    optimizer.gradient.zero_()
    # `inputs`: other networks in the loss, such as a critic, get no gradient.
    loss.backward(inputs=optimizer.parameters.parameters)  # type: ignore[no-untyped-call]


def descend(optimizer: Optimizer, loss: Tensor, *, lr: float) -> None:
    """One gradient step on `loss`."""
    backward(optimizer, loss)
    optimizer.step(lr)


def gradient_step(optimizer: Optimizer, loss: Tensor, *, lr: float, max_grad_norm: float | None) -> Tensor:
    """`descend` with gradient clipping. Returns the norm before clipping."""
    backward(optimizer, loss)
    return clipped_step(optimizer, lr=lr, max_grad_norm=max_grad_norm)


def clipped_step(optimizer: Optimizer, *, lr: float, max_grad_norm: float | None) -> Tensor:
    """One step on the gradient that is written, clipped. Returns the norm before clipping."""
    gradient = optimizer.gradient
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if max_grad_norm is not None:
        gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
    optimizer.step(lr)
    return norm


class MeanMetrics:
    """Averages metrics over gradient steps. They stay on the device until `mean` copies them together."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def add(self, **terms: Tensor) -> None:
        for name, value in terms.items():
            self.values.setdefault(name, []).append(value.detach())

    def mean(self) -> Metrics:
        if not self.values:
            return {}
        every = torch.stack([value for values in self.values.values() for value in values]).tolist()
        means, start = {}, 0
        for name, values in self.values.items():
            means[name] = sum(every[start : start + len(values)]) / len(values)
            start += len(values)
        return means
