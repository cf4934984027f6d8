"""Imagination of DreamerV3 on a CPU: compiled loops between matrix products, which are in float32 or bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.dreamer import DreamerModel
from rl_training.models.rssm import BLOCKS, GROUPS, Latent
from rl_training.ops import dreamer_kernels as kernels
from rl_training.ops.dreamer_cells import EPS, SHARE, array


class Layer:
    """A linear layer's weights in the type of the products, and the gain of the norm after it."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, gain: Tensor | None = None) -> None:
        self.weight, self.bias = linear.weight.detach().to(dtype), linear.bias.detach().to(dtype)
        self.gain = None if gain is None else gain.detach().numpy()

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        if self.gain is None:
            return product
        out = torch.empty_like(product)
        kernels.normed_silu(array(product), 0, self.gain, EPS, array(out), 0)
        return out


def layers(trunk: nn.Sequential, dtype: torch.dtype) -> list[Layer]:
    modules = list(trunk)
    return [Layer(linear, dtype, norm.gain) for linear, norm in zip(modules[::2], modules[1::2], strict=True)]  # type: ignore[arg-type]


class CompiledImagination:
    """Follows the policy in the model: the features of all states, and the actions. Make one for each gradient step."""

    def __init__(self, model: DreamerModel, dtype: torch.dtype) -> None:
        dynamics, policy = model.dynamics, model.policy
        self.model, self.dtype, self.size = model, dtype, model.size
        self.policy_layers = layers(policy.trunk, dtype)
        self.policy_output = Layer(policy.output, dtype)
        self.policy_spread = None if policy.spread is None else Layer(policy.spread, dtype)
        self.inputs = [layers(part, dtype)[0] for part in (dynamics.of_deter, dynamics.of_stoch, dynamics.of_action)]
        block, hidden = self.size.deter // BLOCKS, dynamics.hidden.weight.detach()
        self.hidden_deter = hidden[:, :block].to(dtype)
        self.hidden_inputs = hidden[:, block:].permute(0, 2, 1).flatten(0, 1).to(dtype)  # [D, 3 h]
        self.hidden_bias = dynamics.hidden.bias.detach().to(dtype)
        self.hidden_gain = dynamics.hidden_norm.gain.detach().view(BLOCKS, -1).numpy()
        self.gates = dynamics.gates.weight.detach().to(dtype)
        self.gates_bias = dynamics.gates.bias.detach().view(BLOCKS, 1, -1).to(dtype)
        self.prior_layers = layers(dynamics.prior_trunk, dtype)
        self.prior_logits = Layer(dynamics.prior_logits, dtype)

    @torch.no_grad()
    def __call__(self, start: Latent, prior_noise: Tensor, action_noise: Tensor) -> tuple[Tensor, Tensor]:
        """(features [H + 1, M, F], actions [H, M, ...]) from states [M, ...] and noise [H, M, ...]."""
        steps, count = prior_noise.shape[:2]
        width = self.size.deter + GROUPS * self.size.classes
        features = torch.empty(steps + 1, count, width, dtype=self.dtype)
        features[0] = start.features()
        deter, actions = start.deter.detach().contiguous(), []
        for t in range(steps):
            action = self.act(features[t], action_noise[t])
            deter = self.step(features[t], deter, self.model.policy.vector(action), features[t + 1])
            self.sample(features[t + 1], prior_noise[t])
            actions.append(action)
        return features, torch.stack(actions)

    def act(self, hidden: Tensor, noise: Tensor) -> Tensor:
        """Actions [M, ...] in states with features [M, F]."""
        for layer in self.policy_layers:
            hidden = layer(hidden)
        spread = None if self.policy_spread is None else self.policy_spread(hidden).float()
        return self.model.policy.of_outputs(self.policy_output(hidden).float(), spread).sample(noise)

    def step(self, features: Tensor, deter: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """The next state [M, D], in float32, and in the first columns of `after` [M, F]."""
        count, size = len(deter), self.size.deter
        own, sample = features[:, :size], features[:, size:]
        small = (action / action.abs().clamp(min=1)).to(self.dtype)
        inputs = torch.empty(count, 3 * self.size.hidden, dtype=self.dtype)
        for place, (x, layer) in enumerate(zip((own, sample, small), self.inputs, strict=True)):
            before = F.linear(x, layer.weight, layer.bias)
            kernels.normed_silu(array(before), 0, layer.gain, EPS, array(inputs), place * self.size.hidden)
        block_inputs = F.linear(inputs, self.hidden_inputs, self.hidden_bias).view(count, BLOCKS, -1).transpose(0, 1)
        before = torch.baddbmm(block_inputs, own.reshape(count, BLOCKS, -1).transpose(0, 1), self.hidden_deter)
        between = torch.empty(before.shape, dtype=self.dtype)
        kernels.block_normed_silu(array(before.contiguous()), self.hidden_gain, EPS, array(between))
        gates = torch.baddbmm(self.gates_bias, between, self.gates)
        new = torch.empty_like(deter)
        kernels.gru(array(gates.contiguous()), array(deter), array(new), array(after))
        return new

    def sample(self, features: Tensor, noise: Tensor) -> None:
        """Write samples of the prior after the state that `features` [M, F] begin with."""
        hidden = features[:, : self.size.deter]
        for layer in self.prior_layers:
            hidden = layer(hidden)
        logits = self.prior_logits(hidden)
        probs = torch.empty(logits.shape)
        kernels.mixed_sample(
            array(logits), array(noise.contiguous()), SHARE, array(probs), array(features), self.size.deter
        )
