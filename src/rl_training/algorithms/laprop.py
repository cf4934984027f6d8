"""DreamerV3's optimizer: adaptive gradient clipping, then LaProp (Ziyin et al., arXiv:2002.04839)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.optim import Optimizer
from rl_training.models.parameters import FlatParameters
from rl_training.types import Number


class LaProp(Optimizer):
    """Clipped gradients are divided by their root mean square; the momentum is of the quotients, unlike Adam's.

    Clipping (AGC: Brock et al., arXiv:2102.06171) bounds the norm of each tensor's gradient by `clip` times the norm of
    the tensor, or times `min_norm` where that is larger: whole tensors, biases and gains of norms among them.
    """

    state_names = ("steps", "square", "momentum")

    def __init__(
        self,
        parameters: FlatParameters,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        clip: float = 0.3,
        min_norm: float = 1e-3,
    ) -> None:
        """betas: of the momentum and of the mean square. eps: added to the root."""
        super().__init__(parameters)
        self.betas, self.eps, self.min_norm = betas, eps, min_norm
        self.clip: Number = clip
        # A tensor, so that a captured step counts.
        self.steps = torch.zeros((), dtype=torch.float64, device=parameters.vector.device)
        self.square, self.momentum = torch.zeros_like(parameters.vector), torch.zeros_like(parameters.vector)
        self.weights, self.gradients = parameters.views(parameters.vector), parameters.views(parameters.gradient)

    @torch.no_grad()
    def step(self, lr: Number) -> None:
        """lr: a tensor [] on the device if the step is captured."""
        gradient, (beta1, beta2) = self.gradient, self.betas
        self.clip_gradient()
        self.steps += 1
        correction1, correction2 = (1 - beta**self.steps for beta in self.betas)
        self.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = self.square.sqrt().mul_(correction2.rsqrt().float()).add_(self.eps)
        self.momentum.lerp_(gradient.div_(root), 1 - beta1)
        self.parameters.vector.sub_(self.momentum * (lr / correction1).float())

    def clip_gradient(self) -> None:
        """Clip each tensor's gradient, in place."""
        limits = self.clip * tensor_norms(self.weights).clamp_(min=self.min_norm)
        norms = tensor_norms(self.gradients).clamp_(min=torch.finfo(torch.float32).tiny)  # 0 / 0 if `clip` is 0
        factors = (limits / norms).clamp_(max=1.0)
        torch._foreach_mul_(self.gradients, list(factors.unbind()))


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """[K] the norm of each of K tensors."""
    return torch.stack(torch._foreach_norm(tensors))
