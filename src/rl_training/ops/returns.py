"""Return and advantage estimators. Time is the first axis of rollouts, [T, N], and the second of sequences, [B, L]."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rl_training.types import Array


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalized advantage estimation (Schulman et al., 2016, eq. 16), [T, N].

    `next_value[t]` is the value of the state that step t really led to, so a truncated episode is
    bootstrapped and a terminated one is not; neither leaks into the episode that follows it.
    """
    discount = gamma * ~terminated
    delta = reward + discount * next_value - value
    return backward_sum(delta, gae_lambda * discount * ~truncated)


def backward_sum(x: Tensor, decay: Tensor) -> Tensor:
    """y[t] = x[t] + decay[t] * y[t + 1], with y[T] = 0; [T, ...].

    Each pass doubles the span that y[t] covers: log2(T) passes over the array instead of one for each of T rows.
    """
    y, decay = x.clone(), decay.clone()
    span = 1
    while span < len(y):
        y[:-span] += decay[:-span] * y[span:]
        decay[:-span] *= decay[span:].clone()  # both sides overlap
        span *= 2
    return y


def bootstrap_after(steps: Array, n: int | Array, count: int) -> Array:
    """[B, count] How many rewards the n-step target of each of the first `count` steps sums before it bootstraps.

    The rewards of steps [B] of a sequence are known, that of the last step included. Where fewer than n are left, the
    target sums these and bootstraps from the state after the last step.
    """
    left = steps[:, None] - np.arange(count)
    after: Array = np.clip(np.minimum(left, np.asarray(n).reshape(-1, 1)), 0, None)
    return after


def n_step_sum(reward: Array, after: Array, discount: float) -> Array:
    """[B, count] sum over i < after[b, k] of discount^i reward[b, k + i], of reward [B, L].

    discount may be negative: in games of two players the next reward is the other's.
    """
    total = np.zeros(after.shape, np.float32)
    for i in range(int(after.max())):
        total += np.where(i < after, np.float32(discount**i) * reward[:, i : i + after.shape[1]], np.float32(0))
    return total
