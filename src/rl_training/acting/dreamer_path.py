"""Ways through DreamerV3's networks in training: step by step in torch, or with compiled loops on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rl_training.acting.dreamer_imagination import Imagination
from rl_training.acting.dreamer_sequence import observe
from rl_training.models.dreamer import DreamerModel, Functions
from rl_training.models.rssm import Latent
from rl_training.ops.dreamer_steps import Steps

Precision: TypeAlias = Literal["auto", "float32", "bfloat16"]


class DreamerPath:
    """Each step is a few operations of torch.

    dtype: the type of matrix products; bfloat16: as torch.autocast does it, and with everything else in float32.
    """

    def __init__(self, model: DreamerModel, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model, dtype

    def products(self) -> Any:
        """A context for the forward pass: matrix products are of `dtype`."""
        device = next(self.model.parameters()).device.type
        # Casts are not kept: one made where there is no gradient would be used where one is needed.
        return torch.autocast(device, torch.bfloat16, self.dtype == torch.bfloat16, cache_enabled=False)

    def settings(self) -> Any:
        """A context for all of a gradient step, the backward pass included."""
        return nullcontext()

    def observe(
        self, tokens: Tensor, actions: Tensor, first: Tensor, carry: Latent, noise: Tensor
    ) -> tuple[Latent, Tensor]:
        """See RSSM.observe."""
        return self.model.dynamics.observe(tokens, actions, first, carry, noise)

    @torch.no_grad()
    def imagine(self, start: Latent, prior_noise: Tensor, action_noise: Tensor) -> tuple[Tensor, Tensor]:
        """Follow the policy in the model from latents [M, ...], for as many steps as there is noise [H, M, ...].

        Returns (features of all states [H + 1, M, F], actions [H, M, ...]).
        """
        latent, features, actions = start, [start.features()], []
        for now, noise in zip(prior_noise, action_noise, strict=True):
            action = self.model.policy(features[-1]).sample(noise)
            latent = self.model.dynamics.imagine(latent, self.model.policy.vector(action), now)
            features.append(latent.features())
            actions.append(action)
        return torch.stack(features), torch.stack(actions)


class StepsPath(DreamerPath):
    """The dynamics with the backward pass written out, and one implementation of what is between matrix products."""

    def __init__(
        self, model: DreamerModel, dtype: torch.dtype, steps: Steps, functions: Functions | None = None
    ) -> None:
        super().__init__(model, dtype)
        self.steps, self.functions = steps, functions or Functions(normed_silu=steps.normed_silu)

    def settings(self) -> Any:
        return self.model.using(self.functions)

    def observe(
        self, tokens: Tensor, actions: Tensor, first: Tensor, carry: Latent, noise: Tensor
    ) -> tuple[Latent, Tensor]:
        return observe(self.model.dynamics, tokens, actions, first, carry, noise, self.steps, self.dtype)

    def imagine(self, start: Latent, prior_noise: Tensor, action_noise: Tensor) -> tuple[Tensor, Tensor]:
        return Imagination(self.model, self.steps, self.dtype)(start, prior_noise, action_noise)
