"""The data that passes between the layers.

Acting and environments speak numpy, learning speaks torch: a rollout is written once, into arrays that tensors share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from torch import Tensor

Array: TypeAlias = np.ndarray
Observation: TypeAlias = np.ndarray | dict[str, np.ndarray]  # [N, ...]; a dict where the space is a Dict or Tuple
Step: TypeAlias = dict[str, Any]  # one step of N environments, numpy arrays [N, ...]; its memory may be tensors
Batch: TypeAlias = dict[str, Any]  # rollout [T, N, ...], transitions [B, ...], sequences [B, T, ...]; tensors
BoxActions: TypeAlias = Literal["clip", "scale"]  # how a policy's Box actions become the environment's: see action_map
Metrics: TypeAlias = dict[str, float]
Reports: TypeAlias = Mapping[str, float] | Mapping[str, list[Tensor]]  # of updates: means, or each one's on the device
Memory: TypeAlias = dict[str, np.ndarray | Tensor]  # recurrent state [N, ...]; {}: none. See data/recurrent.py
History: TypeAlias = dict[str, Any]  # steps before B observations: obs and action [B, P, ...], the newest last, and
#                                      length [B]: so many of the P there were, the others mean nothing
State: TypeAlias = dict[str, Any]  # for checkpoints: nested dicts and lists of tensors, arrays, plain scalars


class Weights(NamedTuple):
    """The weights of an actor, as a learner publishes them."""

    vector: Array  # [P] float32: all parameters, one after the other
    buffers: dict[str, Array]
    version: int  # of the policy: it grows with each update


class Decision(NamedTuple):
    """What `act` returns. The memory is new: `act` does not change the arrays that it got."""

    action: Array  # [N, ...] in model space; EnvRunner maps it to the environment's own
    memory: Memory  # the next `act` gets it, with zeros in the rows where an episode begins; {} for memoryless policies
    extras: dict[str, Array]  # stored with the step: logprob, value | policy, root_value | ...


class Field(NamedTuple):
    """One declared entry of a step: what each environment's row of it is."""

    shape: tuple[int, ...]
    dtype: np.dtype


Fields: TypeAlias = dict[str, Any]  # by name: a Field, or for a Dict observation a dict of them


@dataclass(frozen=True)
class Spaces:
    """One environment's spaces, as the model sees them."""

    observation: gym.Space
    action: gym.Space
    frame_stack: int = 1  # the observation's first axis holds so many of the newest frames, the oldest first
    num_players: int = 1  # 2: they move in turns, each sees its own side, and a reward is that of who has just moved


TensorTree: TypeAlias = Tensor | dict[str, Tensor]
