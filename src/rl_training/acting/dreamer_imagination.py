"""Imagination of DreamerV3 with weights that are cast once, and one implementation of what is between the products."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.acting.dreamer_sequence import SequenceWeights, Trace, one_step, parameters
from rl_training.models.dreamer import DreamerModel
from rl_training.models.rssm import Latent, bounded
from rl_training.ops.dreamer_steps import Steps


class Layer:
    """A linear layer with its weights in the type of the products, and the gain of the norm after it."""

    def __init__(self, linear: nn.Module, steps: Steps, dtype: torch.dtype, gain: Tensor | None = None) -> None:
        weight, bias = (cast(Tensor, parameter).detach() for parameter in (linear.weight, linear.bias))
        self.weight, self.bias = weight.to(dtype), bias.to(dtype)
        self.steps, self.gain = steps, gain

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        return product if self.gain is None else self.steps.norm_silu(product, self.gain)


def layers(trunk: nn.Sequential, steps: Steps, dtype: torch.dtype) -> list[Layer]:
    modules = list(trunk)
    gains = [cast(Tensor, norm.gain).detach() for norm in modules[1::2]]
    return [Layer(linear, steps, dtype, gain) for linear, gain in zip(modules[::2], gains, strict=True)]


class Imagination:
    """Follows the policy in the model. Make one for each gradient step."""

    def __init__(self, model: DreamerModel, steps: Steps, dtype: torch.dtype) -> None:
        dynamics, policy = model.dynamics, model.policy
        self.policy, self.size, self.steps, self.dtype = policy, model.size, steps, dtype
        self.policy_layers = layers(policy.trunk, steps, dtype)
        self.policy_output = Layer(policy.output, steps, dtype)
        self.policy_spread = None if policy.spread is None else Layer(policy.spread, steps, dtype)
        self.of_action = layers(dynamics.of_action, steps, dtype)[0]
        self.weights = SequenceWeights(parameters(dynamics), dtype)
        self.prior_layers = layers(dynamics.prior_trunk, steps, dtype)
        self.prior_logits = Layer(dynamics.prior_logits, steps, dtype)

    @torch.no_grad()
    def __call__(self, start: Latent, prior_noise: Tensor, action_noise: Tensor) -> tuple[Tensor, Tensor]:
        """(features [H + 1, M, F], actions [H, M, ...]) from states [M, ...] and noise [H, M, ...]."""
        first = start.features()
        features = first.new_empty(len(prior_noise) + 1, *first.shape, dtype=self.dtype)
        features[0] = first
        deter, actions = start.deter.contiguous(), []
        for t in range(len(prior_noise)):
            action = self.act(features[t], action_noise[t])
            deter = self.step(features[t], deter, bounded(self.policy.vector(action)), features[t + 1])
            self.sample(features[t + 1], prior_noise[t])
            actions.append(action)
        return features, torch.stack(actions)

    def act(self, hidden: Tensor, noise: Tensor) -> Tensor:
        """Actions [M, ...] in states with features [M, F]."""
        for layer in self.policy_layers:
            hidden = layer(hidden)
        spread = None if self.policy_spread is None else self.policy_spread(hidden).float()
        return self.policy.of_outputs(self.policy_output(hidden).float(), spread).sample(noise)

    def step(self, features: Tensor, deter: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """The next state [M, D], in float32, and in the first columns of `after` [M, F]."""
        size, by_action = self.size.deter, self.of_action(action.to(self.dtype))
        new = one_step(self.weights, self.steps, Trace(), deter, features[:, size:], by_action)
        after[:, :size] = new
        return new

    def prior(self, features: Tensor) -> Tensor:
        """The logits [M, S C] of latents after the state that `features` [M, F] begin with."""
        hidden = features[:, : self.size.deter]
        for layer in self.prior_layers:
            hidden = layer(hidden)
        return self.prior_logits(hidden)

    def sample(self, features: Tensor, noise: Tensor) -> None:
        """Write samples of the prior after the state that `features` begin with."""
        features[:, self.size.deter :] = self.steps.mixed_sample(self.prior(features), noise)[1]
