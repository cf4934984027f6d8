"""Return and advantage estimators. Time is the first axis: [T, N]."""

from __future__ import annotations

from torch import Tensor


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
