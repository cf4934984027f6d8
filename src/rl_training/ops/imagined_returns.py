"""DreamerV3's returns, in imagination and on replayed sequences, and the scale by which advantages are divided."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.ops.returns import backward_sum
from rl_training.types import Number, State


def lambda_returns(
    reward: Tensor, discount: Tensor, bootstrap: Tensor, lam: Number, last: Tensor | None = None
) -> Tensor:
    """Lambda-returns [T, ...] of the first T of T + 1 states:

    R[t] = reward[t + 1] + discount[t + 1] ((1 - c) bootstrap[t + 1] + c R[t + 1]),  c = lam (1 - last[t + 1])

    with R[T] = bootstrap[T]. All arguments are [T + 1, ...]: the reward and the discount of arriving in a state, which
    is 0 where the episode terminated, a value of the state, and whether an episode ends there (None: nowhere).
    """
    kept = lam if last is None else lam * (1 - last[1:].to(reward.dtype))
    decay = discount[1:] * kept
    x = reward[1:] + discount[1:] * (1 - kept) * bootstrap[1:]
    x[-1] += decay[-1] * bootstrap[-1]
    return backward_sum(x, decay)


class PercentileScale:
    """The range of returns between their 5th and 95th percentile, as a moving average, at least `limit`.

    The average starts at 0 and is not corrected for that: where returns are large, the first scales are too small.
    """

    def __init__(
        self,
        *,
        rate: float = 0.01,
        limit: float = 1.0,
        low: float = 0.05,
        high: float = 0.95,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rate: Number = rate
        self.limit: Number = limit
        self.percentiles = (low, high)
        self.bounds = torch.zeros(2, device=device)  # the averages of both percentiles; written in place

    @torch.no_grad()
    def update(self, returns: Tensor) -> Tensor:
        """Take in returns [...]. Returns the new scale []."""
        ordered = returns.detach().float().flatten().sort().values
        self.bounds.lerp_(torch.stack([percentile(ordered, p) for p in self.percentiles]), self.rate)
        return self.scale

    @property
    def scale(self) -> Tensor:
        return (self.bounds[1] - self.bounds[0]).clamp(min=self.limit)

    def state_dict(self) -> State:
        return {"bounds": self.bounds}

    def load_state_dict(self, state: State) -> None:
        self.bounds.copy_(state["bounds"])


def percentile(ordered: Tensor, p: float) -> Tensor:
    """The p-quantile [] of sorted numbers [n], between neighbours linear: `torch.quantile` reads numbers back."""
    place = p * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
