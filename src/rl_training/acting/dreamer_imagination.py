"""Imagination of DreamerV3 on a CPU: compiled loops between matrix products, which are in float32 or bfloat16."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.dreamer import DreamerModel
from rl_training.models.dreamer_layers import NORM_EPS
from rl_training.models.rssm import BLOCKS, UNIMIX, Latent
from rl_training.ops import dreamer_kernels as kernels
from rl_training.ops.dreamer_cells import array

EPS, SHARE = np.float32(NORM_EPS), np.float32(UNIMIX)


class Layer:
    """A linear layer's weights in the type of the products, and the gain of the norm after it."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, gain: Tensor | None = None) -> None:
        self.weight, self.bias = linear.weight.detach().to(dtype), linear.bias.detach().to(dtype)
        self.gain = None if gain is None else gain.detach().numpy()

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        return product if self.gain is None else normed(product, 0, self.gain)


def layers(trunk: nn.Sequential, dtype: torch.dtype) -> list[Layer]:
    modules = list(trunk)
    return [Layer(linear, dtype, norm.gain) for linear, norm in zip(modules[::2], modules[1::2], strict=True)]  # type: ignore[arg-type]


def normed(x: Tensor, column: int, gain: np.ndarray) -> Tensor:
    """Norm and SiLU of columns of x [M, X] from `column` on."""
    out = torch.empty(len(x), len(gain), dtype=x.dtype)
    kernels.normed_silu(array(x), column, gain, EPS, array(out), 0)
    return out


class CompiledImagination:
    """Follows the policy in the model: the features of all states, and the actions. Make one for each gradient step."""

    def __init__(self, model: DreamerModel, dtype: torch.dtype) -> None:
        dynamics, policy = model.dynamics, model.policy
        self.model, self.dtype, self.size = model, dtype, model.size
        self.policy_layers = layers(policy.trunk, dtype)
        self.policy_output = Layer(policy.output, dtype)
        self.policy_spread = None if policy.spread is None else Layer(policy.spread, dtype)
        self.inputs = [layers(part, dtype)[0] for part in (dynamics.of_deter, dynamics.of_stoch, dynamics.of_action)]
        self.first = self.joint_first_layer()
        block, hidden = self.size.deter // BLOCKS, dynamics.hidden.weight.detach()
        self.hidden_deter = hidden[:, :block].to(dtype)
        self.hidden_inputs = hidden[:, block:].permute(0, 2, 1).flatten(0, 1).to(dtype)  # [D, 3 h]
        self.hidden_bias = dynamics.hidden.bias.detach().to(dtype)
        self.hidden_gain = dynamics.hidden_norm.gain.detach().view(BLOCKS, -1).numpy()
        self.gates = dynamics.gates.weight.detach().to(dtype)
        self.gates_bias = dynamics.gates.bias.detach().view(BLOCKS, 1, -1).to(dtype)
        self.prior_layers = layers(dynamics.prior_trunk, dtype)
        self.prior_logits = Layer(dynamics.prior_logits, dtype)

    def joint_first_layer(self) -> tuple[Tensor, Tensor]:
        """One layer [2 h + u, F] on the features for the state's and the sample's inputs, and the policy's first."""
        of_deter, of_stoch, _ = self.inputs
        hidden, deter = of_deter.weight.shape
        weight = torch.zeros(2 * hidden, deter + of_stoch.weight.shape[1], dtype=self.dtype)
        weight[:hidden, :deter] = of_deter.weight
        weight[hidden:, deter:] = of_stoch.weight
        policy = self.policy_layers[0]
        return torch.cat([weight, policy.weight]), torch.cat([of_deter.bias, of_stoch.bias, policy.bias])

    @torch.no_grad()
    def __call__(self, start: Latent, prior_noise: Tensor, action_noise: Tensor) -> tuple[Tensor, Tensor]:
        """(features [H + 1, M, F], actions [H, M, ...]) from states [M, ...] and noise [H, M, ...]."""
        steps, count = prior_noise.shape[:2]
        features = torch.empty(steps + 1, count, self.first[0].shape[1], dtype=self.dtype)
        features[0] = start.features()
        deter, actions = start.deter.detach().contiguous(), []
        for t in range(steps):
            joint = F.linear(features[t], *self.first)
            action = self.act(joint, action_noise[t])
            deter = self.step(joint, features[t], deter, self.model.policy.vector(action), features[t + 1])
            self.sample(features[t + 1], prior_noise[t])
            actions.append(action)
        return features, torch.stack(actions)

    def act(self, joint: Tensor, noise: Tensor) -> Tensor:
        first, *later = self.policy_layers
        assert first.gain is not None
        hidden = normed(joint, 2 * self.size.hidden, first.gain)
        for layer in later:
            hidden = layer(hidden)
        spread = None if self.policy_spread is None else self.policy_spread(hidden).float()
        return self.model.policy.of_outputs(self.policy_output(hidden).float(), spread).sample(noise)

    def step(self, joint: Tensor, features: Tensor, deter: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """The next state [M, D], in float32, and in the first columns of `after` [M, F]."""
        hidden, count = self.size.hidden, len(deter)
        of_deter, of_stoch, of_action = self.inputs
        inputs = torch.empty(count, 3 * hidden, dtype=self.dtype)
        small = (action / action.abs().clamp(min=1)).to(self.dtype)
        by_action = F.linear(small, of_action.weight, of_action.bias)
        for place, (x, column, layer) in enumerate(
            [(joint, 0, of_deter), (joint, hidden, of_stoch), (by_action, 0, of_action)]
        ):
            kernels.normed_silu(array(x), column, layer.gain, EPS, array(inputs), place * hidden)
        block_inputs = F.linear(inputs, self.hidden_inputs, self.hidden_bias).view(count, BLOCKS, -1).transpose(0, 1)
        own = features[:, : self.size.deter].reshape(count, BLOCKS, -1).transpose(0, 1)
        before = torch.baddbmm(block_inputs, own, self.hidden_deter)
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
