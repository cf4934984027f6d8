"""A sum tree: sampling in proportion to weights, and changes of weights, in O(log n) (Schaul et al., arXiv:1511.05952).

A tree is an array [2 * leaves], where `leaves` is a power of two. Node i is the sum of nodes 2i and 2i + 1, leaf j is
node leaves + j, node 1 is the total.
"""

from __future__ import annotations

import numba
import numpy as np

from rl_training.types import Array


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
