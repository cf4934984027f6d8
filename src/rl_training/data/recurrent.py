"""Recurrent memory: a dict of arrays or tensors [N, ...] with a row for each environment.

A row of zeros is the memory at the start of an episode. An empty dict is the memory before the first `act`, and that of
a memoryless policy. Tensors may be on any device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import any_true
from rl_training.errors import InputError
from rl_training.types import Array, Memory, Step


def check_memory(memory: Any, num_envs: int) -> Memory:
    """Return the memory that `act` returned. Raise an InputError where it is not as described above."""
    if not isinstance(memory, dict):
        raise InputError(
            f"act returned a memory of type {type(memory).__name__}: it should be a dict of arrays [{num_envs}, ...], "
            "or empty where there is none"
        )
    for key, value in memory.items():
        known = isinstance(value, np.ndarray | Tensor)
        if not known or value.shape[:1] != (num_envs,):
            got = f"shape {tuple(value.shape)}" if known else f"type {type(value).__name__}"
            raise InputError(f"memory {key!r} should be an array with {num_envs} rows, one for each environment: {got}")
    return memory


def remember(step: Step, before: Memory, after: Memory, first: Array) -> Memory:
    """Add to a step the memory that `act` got and the one it returned. Gives the latter for the next call.

    first [N]: where that call begins an episode, and gets zeros.
    """
    check_memory(after, len(first))
    if not after:
        return after
    step["memory"] = before or reset_rows(after, slice(None))  # the first `act` got {}, which means zeros
    step["next_memory"] = after
    return reset_rows(after, first) if any_true(first) else after


def reset_rows(memory: Memory, rows: Any) -> Memory:
    """A copy with zeros in `rows`: a mask [N], indices or a slice."""
    copy: Memory = {}
    for key, value in memory.items():
        if isinstance(value, Tensor):
            mask = np.zeros(len(value), bool)
            mask[rows] = True  # torch takes fewer kinds of indices than NumPy
            copy[key] = value.clone()
            copy[key][torch.from_numpy(mask).to(value.device)] = 0
        else:
            copy[key] = value.copy()
            copy[key][rows] = 0
    return copy


def select_rows(memory: Memory, rows: Any) -> Memory:
    """A copy of `rows`: a mask [N] or indices."""
    return {key: value[torch.as_tensor(rows) if isinstance(value, Tensor) else rows] for key, value in memory.items()}


def on_cpu(memory: Memory) -> Memory:
    """A copy on the CPU."""
    return {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v.copy() for k, v in memory.items()}
