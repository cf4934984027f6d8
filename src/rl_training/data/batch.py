"""Operations on batches of tensors and observations [N, ...] of arrays. Both may be nested dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.types import Array, Batch, Observation


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to a leaf, or to every leaf of (nested) dicts."""
    if isinstance(tree, dict):
        return {key: tree_map(function, branch) for key, branch in tree.items()}
    return function(tree)


def stacked(trees: Sequence[Any], axis: int = 0) -> Any:
    """Arrays, or nested dicts of them, joined along a new axis."""
    if isinstance(trees[0], dict):
        return {key: stacked([tree[key] for tree in trees], axis) for key in trees[0]}
    return np.stack(trees, axis)


def rows_of(tree: Any, rows: Any) -> Any:
    """Rows of arrays or tensors [M, ...]: a slice, a mask or indices."""
    return tree_map(lambda x: x[rows], tree)


def to_device(tree: Any, device: torch.device) -> Any:
    return tree if device.type == "cpu" else tree_map(lambda x: x.to(device, non_blocking=True), tree)


def to_tensors(tree: Any, device: torch.device) -> Any:
    """Arrays, or nested dicts of them, as tensors on the device. On the CPU they share memory."""
    return to_device(tree_map(torch.as_tensor, tree), device)


def to_array(x: Array | Tensor) -> Array:
    """A tensor on any device as an array; an array as it is."""
    return x.cpu().numpy() if isinstance(x, Tensor) else x


def upload(tree: Any, device: torch.device) -> Any:
    """Arrays or tensors, or nested dicts of them, as tensors on the device, without waiting for what runs there.

    A copy to a GPU would wait if its source was not pinned, or had gaps.
    """
    if device.type != "cuda":
        return to_tensors(tree, device)

    def copied(x: Any) -> Tensor:
        tensor = torch.as_tensor(x)
        return tensor if tensor.is_cuda else tensor.contiguous().pin_memory().to(device, non_blocking=True)

    return tree_map(copied, tree)


def flatten(batch: Batch) -> Batch:
    """[T, N, ...] -> [T * N, ...], without copying."""
    return {key: tree_map(lambda x: x.flatten(0, 1), entry) for key, entry in batch.items()}


def minibatches(batch: Batch, count: int, rng: np.random.Generator) -> Iterator[Batch]:
    """The steps of a batch [T, N, ...], shuffled, in `count` flat parts [B, ...] whose sizes differ by at most one."""
    return row_minibatches(flatten(batch), count, rng)


def row_minibatches(batch: Batch, count: int, rng: np.random.Generator) -> Iterator[Batch]:
    """The rows of a batch [M, ...], shuffled, in `count` parts [B, ...] whose sizes differ by at most one."""
    first = _first_leaf(batch)
    for index in _shuffled(len(first), count, rng, first.device):
        yield _select(batch, 0, index)


def env_minibatches(batch: Batch, count: int, rng: np.random.Generator) -> Iterator[Batch]:
    """The environments of a batch [T, N, ...], shuffled, in `count` parts [T, M, ...]; steps keep their order."""
    for index in _shuffled(batch["action"].shape[1], count, rng, batch["action"].device):
        yield _select(batch, 1, index)


def _first_leaf(tree: Any) -> Tensor:
    return _first_leaf(next(iter(tree.values()))) if isinstance(tree, dict) else tree


def _shuffled(size: int, count: int, rng: np.random.Generator, device: torch.device) -> tuple[Tensor, ...]:
    order = torch.from_numpy(rng.permutation(size)).to(device, non_blocking=True)
    return order.tensor_split(min(int(count), size))


def _select(batch: Batch, axis: int, index: Tensor) -> Batch:
    return {key: tree_map(lambda x: x.index_select(axis, index), entry) for key, entry in batch.items()}


def arrays_of(obs: Observation) -> dict[str, Array]:
    """The arrays of an observation by key; "" where it is a single array."""
    return obs if isinstance(obs, dict) else {"": obs}


def copied(obs: Observation) -> Observation:
    copy: Observation = tree_map(lambda x: x.copy(), obs)
    return copy


def put_rows(target: Observation, rows: Array, source: Observation) -> None:
    """Copy rows (a mask [N] or indices) from `source` to `target`."""
    arrays = arrays_of(source)
    for key, array in arrays_of(target).items():
        array[rows] = arrays[key][rows]


def same_row(one: Observation, other: Observation, index: int) -> bool:
    """Whether row `index` is equal in both. NaN equals NaN."""
    arrays = arrays_of(other)
    pairs = [(array[index], arrays[key][index]) for key, array in arrays_of(one).items()]
    return all(np.array_equal(row, other_row, equal_nan=row.dtype.kind == "f") for row, other_row in pairs)


def any_true(flags: Array) -> bool:
    """flags.any() for a few flags [N] (measured for 8: 0.2 against 1.6 microseconds)."""
    return 1 in flags.tobytes()
