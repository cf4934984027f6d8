"""Which transitions are worth learning from again: prioritized replay (Schaul et al., arXiv:1511.05952)."""

from __future__ import annotations

import numpy as np

from rl_training.data.state_check import compare_state
from rl_training.ops.sum_tree import add_up, find, make_tree, set_leaves
from rl_training.types import Array, State


class Priorities:
    """P(i) = p_i^a / sum_k p_k^a over `size` places, of which those with priority zero are empty."""

    def __init__(self, size: int) -> None:
        self.exponent = 1.0
        self.priority = np.zeros(size)
        self.tree = make_tree(size)
        self.leaves = self.tree[len(self.tree) // 2 :][:size]  # p^a
        self.largest = 1.0  # what a new transition gets, so that each is drawn soon

    def add(self, index: Array) -> None:
        self._put(index, np.full(len(index), self.largest))

    def remove(self, index: Array) -> None:
        self.priority[index] = 0.0
        set_leaves(self.tree, index, np.zeros(len(index)))

    def set(self, index: Array, priority: Array) -> None:
        priority = np.asarray(priority, np.float64)
        self._put(index, priority)
        self.largest = max(self.largest, float(priority.max(initial=0.0)))

    def _put(self, index: Array, priority: Array) -> None:
        self.priority[index] = priority
        set_leaves(self.tree, index, priority**self.exponent)

    def use_exponent(self, exponent: float) -> None:
        """Let P follow another exponent from now on; all leaves are made anew where it differs."""
        if exponent != self.exponent:
            self.exponent = exponent
            used = np.flatnonzero(self.priority)  # an empty place stays empty, though 0^0 is 1
            self.leaves[used] = self.priority[used] ** exponent
            add_up(self.tree)

    def draw(self, count: int, rng: np.random.Generator, beta: float, size: int) -> tuple[Array, Array]:
        """(places [B], one from each of B equal shares of the total; their weights (size P)^-beta / max [B])"""
        total = self.tree[1]
        index = find(self.tree, (np.arange(count) + rng.random(count)) * (total / count))
        weight = (self.leaves[index] * (size / total)) ** -beta
        return index, (weight / weight.max()).astype(np.float32)

    def state_dict(self) -> State:
        """Only the places in use."""
        used = np.flatnonzero(self.priority)
        return {
            "index": used,
            "priority": self.priority[used],
            "largest": self.largest,
            "exponent": self.exponent,
        }

    def load_state_dict(self, state: State) -> None:
        expected = {"index": np.ndarray, "priority": np.ndarray, "largest": float, "exponent": float}
        compare_state(expected, state, "priorities")
        index, priority = state["index"], state["priority"]
        compare_state(np.zeros(len(index), np.int64), index, "priorities.index")
        compare_state(np.zeros(len(index)), priority, "priorities.priority")
        # The compiled tree trusts its indices, and finds nothing where the total is no number.
        if len(index) and not 0 <= index.min() <= index.max() < len(self.priority):
            raise ValueError(f"priorities.index should lie in [0, {len(self.priority)})")
        numbers = np.array([*priority, state["largest"], state["exponent"]])
        if not (np.isfinite(numbers).all() and numbers.min() >= 0):
            raise ValueError("priorities should be finite and not negative")
        self.tree[:], self.priority[:] = 0.0, 0.0
        self.largest, self.exponent = state["largest"], state["exponent"]
        self._put(np.array(state["index"]), np.array(state["priority"]))
