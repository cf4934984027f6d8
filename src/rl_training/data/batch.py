"""A batch is a dict of tensors, in which an observation may be a dict itself. These are the things we do to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.types import Batch


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to a leaf, or to every leaf of (nested) dicts."""
    if isinstance(tree, dict):
        return {key: tree_map(function, branch) for key, branch in tree.items()}
    return function(tree)


def to_device(tree: Any, device: torch.device) -> Any:
    return tree if device.type == "cpu" else tree_map(lambda x: x.to(device, non_blocking=True), tree)


def flatten(batch: Batch) -> Batch:
    """[T, N, ...] -> [T * N, ...], without copying."""
    return {key: tree_map(lambda x: x.flatten(0, 1), entry) for key, entry in batch.items()}


def select(batch: Batch, index: Tensor) -> Batch:
    """Rows of a flat batch."""
    return {key: tree_map(lambda x: x.index_select(0, index), entry) for key, entry in batch.items()}


def minibatches(batch: Batch, count: int, rng: np.random.Generator) -> Iterator[Batch]:
    """The rows of a flat batch, shuffled, in `count` parts whose sizes differ by at most one."""
    reference = batch["action"]
    order = torch.from_numpy(rng.permutation(len(reference))).to(reference.device, non_blocking=True)
    for index in order.tensor_split(min(int(count), len(order))):
        yield select(batch, index)
