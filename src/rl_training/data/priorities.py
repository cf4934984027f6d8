"""Prioritized experience replay (Schaul et al., arXiv:1511.05952): priorities, and draws in proportion to them.

A sum tree gives draws and changes in O(log n). It is an array [2 * leaves], where `leaves` is a power of two. Node i is
the sum of nodes 2i and 2i + 1, leaf j is node leaves + j, node 1 is the total.
"""

from __future__ import annotations

import numba
import numpy as np

from rl_training.data.state_check import compare_state
from rl_training.types import Array, State


class Priorities:
    """P(i) = p_i^a / sum_k p_k^a for the places i of a ring. A place of priority 0 is never drawn."""

    def __init__(self, places: int) -> None:
        self.exponent = 1.0  # a
        self.priority = np.zeros(places)  # p
        self.tree = make_tree(places)
        self.leaves = self.tree[len(self.tree) // 2 :][:places]  # p^a
        self.largest = 1.0  # the priority of a new step, so that every step is drawn soon

    def add(self, place: Array) -> None:
        """Give new steps at places [B] the largest priority so far."""
        self._write(place, np.full(len(place), self.largest))

    def remove(self, place: Array) -> None:
        """Never draw places [B] again."""
        self.priority[place] = 0.0
        set_leaves(self.tree, place, np.zeros(len(place)))

    def set(self, place: Array, priority: Array) -> None:
        """Give places [B] the priorities [B]."""
        priority = np.asarray(priority, np.float64)
        self._write(place, priority)
        self.largest = max(self.largest, float(priority.max(initial=0.0)))

    def _write(self, place: Array, priority: Array) -> None:
        self.priority[place] = priority
        set_leaves(self.tree, place, priority**self.exponent)

    def use_exponent(self, exponent: float) -> None:
        """Use this exponent from now on. Where it is another one, all leaves are computed again."""
        if exponent != self.exponent:
            self.exponent = exponent
            used = np.flatnonzero(self.priority)  # 0^0 is 1, but a place of priority 0 must not be drawn
            self.leaves[used] = self.priority[used] ** exponent
            add_up(self.tree)

    def draw(self, count: int, rng: np.random.Generator, beta: float, size: int) -> tuple[Array, Array]:
        """(places [B], one from each of B equal shares of the total; their weights (size * P)^-beta / maximum [B])"""
        total = self.tree[1]
        place = find(self.tree, (np.arange(count) + rng.random(count)) * (total / count))
        weight = (self.leaves[place] * (size / total)) ** -beta
        return place, (weight / weight.max()).astype(np.float32)

    def state_dict(self) -> State:
        """The places whose priority is not 0."""
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
        # The compiled functions of the tree do not check indices, and cannot draw where the total is no number.
        if len(index) and not 0 <= index.min() <= index.max() < len(self.priority):
            raise ValueError(f"priorities.index should lie in [0, {len(self.priority)})")
        numbers = np.array([*priority, state["largest"], state["exponent"]])
        if not (np.isfinite(numbers).all() and numbers.min() >= 0):
            raise ValueError("priorities should be finite and not negative")
        self.tree[:], self.priority[:] = 0.0, 0.0
        self.largest, self.exponent = state["largest"], state["exponent"]
        self._write(np.array(state["index"]), np.array(state["priority"]))


def make_tree(size: int) -> Array:
    """A tree of at least `size` leaves, all zero."""
    return np.zeros(2 << max(size - 1, 0).bit_length(), np.float64)


@numba.njit(cache=True, nogil=True)
def set_leaves(tree: Array, index: Array, value: Array) -> None:
    """Set leaves index [B] to value [B]. The sums above them are recomputed: rounding errors do not accumulate."""
    leaves = len(tree) // 2
    for k in range(len(index)):
        node = leaves + index[k]
        tree[node] = value[k]
        while node > 1:
            node //= 2
            tree[node] = tree[2 * node] + tree[2 * node + 1]


@numba.njit(cache=True, nogil=True)
def add_up(tree: Array) -> None:
    """Recompute all sums from the leaves."""
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]


@numba.njit(cache=True, nogil=True)
def find(tree: Array, mass: Array) -> Array:
    """The leaves [B] at cumulative weights mass [B]; never a leaf of weight zero."""
    leaves = len(tree) // 2
    found = np.empty(len(mass), np.int64)
    for k in range(len(mass)):
        node, rest = 1, mass[k]
        while node < leaves:
            left = tree[2 * node]
            # The second condition: by rounding, a mass may be just above the total.
            if rest < left or tree[2 * node + 1] == 0.0:
                node = 2 * node
            else:
                rest -= left
                node = 2 * node + 1
        found[k] = node - leaves
    return found
