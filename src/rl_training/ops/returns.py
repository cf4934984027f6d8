"""Return and advantage estimators on numpy arrays. Time is the first axis: [T, N]."""

from __future__ import annotations

import numpy as np

from rl_training.types import Array


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    *,
    gamma: float,
    gae_lambda: float,
) -> Array:
    """Generalized advantage estimation (Schulman et al., 2016, eq. 16), [T, N].

    `next_value[t]` is the value of the state that step t really led to, so a truncated episode is
    bootstrapped and a terminated one is not; neither leaks into the episode that follows it.
    """
    discount = np.float32(gamma) * ~terminated
    delta = reward + discount * next_value - value
    return backward_sum(delta, np.float32(gae_lambda) * discount * ~truncated)


def backward_sum(x: Array, decay: Array) -> Array:
    """y[t] = x[t] + decay[t] * y[t + 1], with y[T] = 0; [T, ...].

    Each pass doubles the span that y[t] covers: log2(T) passes over the array instead of one for each of T rows.
    """
    y: Array = x.copy()
    decay = decay.copy()
    span = 1
    while span < len(y):
        y[:-span] += decay[:-span] * y[span:]
        decay[:-span] *= decay[span:]
        span *= 2
    return y
