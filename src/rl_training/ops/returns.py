"""Return and advantage estimators. Time is the first axis of rollouts, [T, N], and the second of sequences, [B, L]."""

from __future__ import annotations

from typing import cast

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

    `next_value[t]` is the value of the state after step t, before any reset. A truncated episode is bootstrapped from
    it, a terminated one is not; neither reads the next episode.
    """
    discount = gamma * ~terminated
    delta = reward + discount * next_value - value
    return backward_sum(delta, gae_lambda * discount * ~truncated)


def backward_sum(x: Tensor, decay: Tensor) -> Tensor:
    """y[t] = x[t] + decay[t] * y[t + 1], with y[T] = 0; [T, ...].

    Each pass doubles the span that y[t] covers: log2(T) passes over the array instead of T over its rows.
    """
    y, decay = x.clone(), decay.clone()
    span = 1
    while span < len(y):
        y[:-span] += decay[:-span] * y[span:]
        decay[:-span] *= decay[span:].clone()  # both sides overlap
        span *= 2
    return y


def bootstrap_after(steps: Array, n: int | Array, count: int) -> Array:
    """[B, count] The number of rewards in the n-step targets of the first `count` steps of sequences.

    The sequences have steps [B] known rewards. Where fewer than n are left, the target sums these and bootstraps from
    the state after the last step.
    """
    left = steps[:, None] - np.arange(count)
    return cast(Array, np.clip(np.minimum(left, np.asarray(n).reshape(-1, 1)), 0, None))


def n_step_sum(reward: Array, after: Array, discount: float) -> Array:
    """[B, count] Sums over i < after[b, k] of discount^i reward[b, k + i], for rewards [B, L].

    The discount is negative where two players alternate.
    """
    total = np.zeros(after.shape, np.float32)
    for i in range(int(after.max())):
        total += np.where(i < after, np.float32(discount**i) * reward[:, i : i + after.shape[1]], np.float32(0))
    return total
