"""V-trace: value targets and advantages from actions of another policy (Espeholt et al., arXiv:1802.01561)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.ops.returns import backward_sum


class VTrace(NamedTuple):
    target: Tensor  # [T, N] v_s, of the value function
    advantage: Tensor  # [T, N] r_s + gamma v_{s+1} - V(x_s), not yet weighted by a ratio


@torch.no_grad()
def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Eq. 1 of the paper, [T, N]; `log_ratio` is log pi(a|x) - log mu(a|x), mu being the policy that acted.

    `next_value[t]` is the value of the state after step t, before any reset. A truncated episode is bootstrapped from
    it, a terminated one is not; neither reads the next episode. Within an episode it is `value[t + 1]`.

    The paper has lambda in the trace alone (its remark 2). Here v_{s+1} of an advantage is the same mixture of lambda
    v_{s+1} + (1 - lambda) V(x_{s+1}): with pi = mu advantages are those of GAE(lambda), and targets are them plus V.
    """
    ratio = log_ratio.exp()
    discount = gamma * ~terminated
    trace = gae_lambda * ~truncated
    delta = ratio.clamp(max=rho_bar) * (reward + discount * next_value - value)
    excess = backward_sum(delta, discount * trace * ratio.clamp(max=c_bar))  # v_s - V(x_s)
    next_excess = torch.zeros_like(excess)
    next_excess[:-1] = excess[1:]
    advantage = reward + discount * (next_value + trace * next_excess) - value
    return VTrace(value + excess, advantage)


def importance_weight(log_ratio: Tensor, bar: float) -> Tensor:
    """min(bar, pi / mu), without gradient."""
    return log_ratio.detach().exp().clamp(max=bar)
