"""Advantages, and returns in general, of rollouts [T, N]."""

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
