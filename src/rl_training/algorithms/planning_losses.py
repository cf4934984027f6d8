"""The losses of an unrolled model (MuZero, arXiv:1911.08265, appendix G)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.muzero import PlanningModel
from rl_training.types import Batch


def unrolled_losses(
    model: PlanningModel, batch: Batch, weight: Tensor, reward_target: Tensor, *, gradient_scale: float
) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """(losses of policy, value and reward, each [B]; V - target [B] of the first steps; K + 1 states [B, S]).

    weight [K + 1] of the steps; reward_target [B, K].
    """
    states, rewards = model.unroll(model.represent(batch["obs"]), batch["action"], gradient_scale=gradient_scale)
    outputs = model.predict(torch.cat(states))
    policy, value = (x.view(len(states), -1, x.shape[1]).transpose(0, 1) for x in outputs)  # [B, K + 1, ...]
    value_loss = model.value_support.loss(value, batch["value"])
    reward_loss = model.reward_support.loss(rewards, reward_target)
    losses = {
        "policy": (weight * batch["policy_mask"] * policy_loss(policy, batch)).sum(1),
        "value": (weight * batch["value_mask"] * value_loss).sum(1),
        "reward": (weight[1:] * batch["reward_mask"] * reward_loss).sum(1),
    }
    error = model.value_support.to_scalar(value[:, 0].detach()) - batch["value"][:, 0]
    return losses, error, states


def step_weights(unroll_steps: int, unroll_coef: float, device: torch.device) -> Tensor:
    """[K + 1] 1 for the first step, unroll_coef / K for each of the K unrolled ones."""
    weight = torch.full((unroll_steps + 1,), unroll_coef / unroll_steps, device=device)
    weight[:1].fill_(1.0)  # weight[0] = 1 would copy from the host, which a CUDA graph cannot
    return weight


def policy_loss(policy: Tensor, batch: Batch) -> Tensor:
    """[B, K + 1] The cross-entropy of policies [B, K + 1, P] and those of the searches."""
    target: Tensor = batch["policy"]
    if "candidates" in batch:
        return -(target * squashed_log_prob(policy, batch["candidates"])).sum(-1)
    return -(target * F.log_softmax(policy, -1)).sum(-1)


def squashed_log_prob(policy: Tensor, action: Tensor) -> Tensor:
    """[..., A] Log-density of actions [..., A, D] = tanh(u), u ~ Normal(mean, std), in policies [..., 2 D]."""
    mean, log_std = policy.unsqueeze(-2).chunk(2, -1)
    u = torch.atanh(action)
    density = -0.5 * ((u - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
    return (density - torch.log1p(-action.square())).sum(-1)
