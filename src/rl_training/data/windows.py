"""Windows of a replay that were not drawn yet: what is new is learned from once, before anything is drawn at random."""

from __future__ import annotations

import numpy as np

from rl_training.data.replay import Replay
from rl_training.data.ring import Ring, draw_windows
from rl_training.data.state_check import MOST
from rl_training.types import Array, State


class NewWindows:
    """Cuts the rows of every environment into consecutive windows, each of which is taken once, the oldest first.

    Hafner et al. (2025) call it the online queue; theirs leaves out the first row. A window that became too old to be
    drawn is left out.
    """

    def __init__(self, num_envs: int, length: int) -> None:
        self.length = length
        self.next = np.zeros(num_envs, np.int64)  # [N] the row at which the next window starts

    @classmethod
    def of(cls, state: State, length: int) -> NewWindows:
        """Those of a saved state."""
        windows = cls(len(state["next"]), length)
        windows.load_state_dict(state)
        return windows

    def any_complete(self, ring: Ring) -> bool:
        """Whether a window can be drawn, new or not."""
        oldest, end = ring.complete_rows()
        return bool((end - oldest >= self.length).any())

    def take(self, ring: Ring, count: int) -> Array:
        """[W, L] Places of up to `count` windows."""
        oldest, end = ring.complete_rows()
        self.next = np.where(self.next > end, oldest, np.maximum(self.next, oldest))  # the replay may be a new one
        taken: list[tuple[int, int]] = []
        while len(taken) < count:
            ready = np.flatnonzero(end - self.next >= self.length)
            if not ready.size:
                break
            env = ready[np.argmin(self.next[ready])]
            taken.append((int(env), int(self.next[env])))
            self.next[env] += self.length
        start = np.array(taken, np.int64).reshape(-1, 2)
        return ring.places(start[:, :1], start[:, 1:] + np.arange(self.length))

    def state_dict(self) -> State:
        return {"next": self.next.copy()}

    def load_state_dict(self, state: State) -> None:
        found = state["next"]
        if found.shape != self.next.shape or not 0 <= found.min() <= found.max() < MOST // 2:
            raise ValueError(f"new_windows.next should be a row of each environment, got {found.tolist()}")
        self.next = found.copy()


def draw_new_first(replay: Replay, new: NewWindows, count: int, rng: np.random.Generator) -> Array:
    """[B, L] Places of windows: those that are new, and others drawn uniformly."""
    fresh = new.take(replay.ring, count)
    if len(fresh) == count:
        return fresh
    drawn = draw_windows(replay.ring, count - len(fresh), new.length, rng)
    return np.concatenate([fresh, drawn])
