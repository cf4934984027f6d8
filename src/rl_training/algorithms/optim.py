"""Gradient steps on all parameters as one vector, and the averaging of what an update reports.

One vector makes clipping one norm and an optimizer one kernel. Nothing here needs `torch.optim`, whose import takes
longer than that of the rest of torch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.data.state_check import compare_state
from rl_training.models.parameters import FlatParameters
from rl_training.types import Metrics, State


class Optimizer:
    """Moves a vector of parameters against its gradient; its state is the tensors named in `state_names`."""

    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: FlatParameters) -> None:
        self.parameters = parameters
        _ = parameters.gradient  # allocated here: a network that only acts has none

    def step(self, lr: float) -> None:
        raise NotImplementedError

    def state_dict(self) -> State:
        return {name: getattr(self, name) for name in self.state_names}

    def load_state_dict(self, state: State) -> None:
        compare_state(self.state_dict(), state, "optimizer")  # copy_ would stretch and round what does not fit
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
        fused_adam(self, lr)


ADAM_KERNEL: Any = getattr(torch, "_fused_adam_", None)  # of torch.optim.Adam(fused=True); not public


def fused_adam(adam: Adam, lr: float) -> None:
    """One step by torch's fused kernel."""
    if ADAM_KERNEL is None:
        public_fused_adam(adam, lr)
        return
    flat = adam.parameters
    adam.steps += 1
    ADAM_KERNEL(
        [flat.vector], [flat.gradient], [adam.mean], [adam.square], [], [adam.steps],
        lr=lr, beta1=adam.betas[0], beta2=adam.betas[1], eps=adam.eps,
        weight_decay=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip


def public_fused_adam(adam: Adam, lr: float) -> None:
    """The same kernel through torch.optim.Adam, which costs more than the kernel for small networks."""
    flat = adam.parameters
    parameter = torch.nn.Parameter(flat.vector)
    parameter.grad = flat.gradient
    optimizer = torch.optim.Adam([parameter], lr=lr, betas=adam.betas, eps=adam.eps, fused=True)
    optimizer.state[parameter] = {"step": adam.steps, "exp_avg": adam.mean, "exp_avg_sq": adam.square}
    optimizer.step()


class RMSprop(Optimizer):
    """Tieleman & Hinton (2012).

    `tf_style`: epsilon inside the root and a mean square that starts at one, as in TensorFlow, with which the published
    results of A2C on Atari were made. Its first steps are much smaller.
    """

    state_names = ("square",)

    def __init__(
        self, parameters: FlatParameters, *, alpha: float = 0.99, eps: float = 1e-5, tf_style: bool = False
    ) -> None:
        super().__init__(parameters)
        self.alpha, self.eps, self.tf_style = alpha, eps, tf_style
        self.square = torch.full_like(parameters.vector, 1.0 if tf_style else 0.0)

    def step(self, lr: float) -> None:
        gradient = self.parameters.gradient
        self.square.mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        root = (self.square + self.eps).sqrt_() if self.tf_style else self.square.sqrt().add_(self.eps)
        self.parameters.vector.addcdiv_(gradient, root, value=-lr)


@torch.no_grad()
def soft_update(target: nn.Module, model: nn.Module, tau: float) -> None:
    """Move a target network towards a model by `tau` (Polyak averaging); buffers are copied."""
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        old.lerp_(new, tau)
    for statistic, newer in zip(target.buffers(), model.buffers(), strict=True):
        statistic.copy_(newer)


def backward(optimizer: Optimizer, loss: Tensor) -> None:
    """Make the optimizer's gradient that of `loss`."""
    gradient = optimizer.parameters.gradient
    gradient.zero_()
    # Only these: what the loss passes through on its way, such as a critic, needs no gradient of its own.
    loss.backward(inputs=optimizer.parameters.parameters)  # type: ignore[no-untyped-call]


def descend(optimizer: Optimizer, loss: Tensor, *, lr: float) -> None:
    """One step down `loss`, at the learning rate in force now."""
    backward(optimizer, loss)
    optimizer.step(lr)


def gradient_step(optimizer: Optimizer, loss: Tensor, *, lr: float, max_grad_norm: float | None) -> Tensor:
    """`descend` with a gradient no longer than `max_grad_norm`; returns its norm before clipping."""
    backward(optimizer, loss)
    return clipped_step(optimizer, lr=lr, max_grad_norm=max_grad_norm)


def clipped_step(optimizer: Optimizer, *, lr: float, max_grad_norm: float | None) -> Tensor:
    """One step along the gradient as it is, shortened where it is longer; returns its norm before that."""
    gradient = optimizer.parameters.gradient
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if max_grad_norm is not None:
        gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
    optimizer.step(lr)
    return norm


class MeanMetrics:
    """Averages what each gradient step reports; stays on the device until asked, then comes in one piece."""

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
