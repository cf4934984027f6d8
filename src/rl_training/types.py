"""The data that passes between the layers.

Acting and environments use numpy, learning uses torch: a rollout is written once, into arrays that tensors share.
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
Step: TypeAlias = dict[str, Any]  # one step of N environments: numpy arrays [N, ...]; its memory may be tensors
Batch: TypeAlias = dict[str, Any]  # rollout [T, N, ...], transitions [B, ...], sequences [B, T, ...]; tensors
BoxActions: TypeAlias = Literal["clip", "scale"]  # how Box actions of a policy are mapped to bounds: see action_map
Metrics: TypeAlias = dict[str, float]
Number: TypeAlias = float | Tensor  # a tensor [] where a captured graph reads it
Reports: TypeAlias = Mapping[str, float] | Mapping[str, list[Tensor]]  # of updates: means, or one tensor per update
Memory: TypeAlias = dict[str, np.ndarray | Tensor]  # recurrent state [N, ...]; {}: none. See data/recurrent.py
# The steps before B observations: obs and action [B, P, ...], the newest last, and length [B], the number of valid ones
History: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]  # for checkpoints: nested dicts and lists of tensors, arrays, plain scalars


class Weights(NamedTuple):
    """The weights of an actor, published by its learner."""

    vector: Array  # [P] float32: all parameters, one after the other
    buffers: dict[str, Array]
    version: int  # of the policy: it grows with each update


class Decision(NamedTuple):
    """The result of `act`. The memory is new: `act` does not change the arrays that it was given."""

    action: Array  # [N, ...] in model space; EnvRunner maps it to the environment's space
    memory: Memory  # for the next `act`, with zeros in the rows where an episode begins; {} for memoryless policies
    extras: dict[str, Array]  # stored with the step: logprob, value | policy, root_value | ...


class Trajectory(NamedTuple):
    """T observations with their rewards: arrays [T, ...] of an episode, [S, T, ...] of S samples of a world model."""

    obs: Observation
    reward: Array
    continuation: Array  # 1: the episode goes on, 0: it terminated; of a model, the probability that it goes on


class Field(NamedTuple):
    """One declared entry of a step: the shape and dtype of each environment's row."""

    shape: tuple[int, ...]
    dtype: np.dtype


Fields: TypeAlias = dict[str, Any]  # by name: a Field, or for a Dict observation a dict of them


@dataclass(frozen=True)
class Spaces:
    """The spaces of one environment, as the model sees them."""

    observation: gym.Space
    action: gym.Space
    frame_stack: int = 1  # length of the observation's first axis: the newest frames, the oldest of them first
    num_players: int = 1  # 2: they move in turns, each sees its own side, and a reward belongs to the last mover


TensorTree: TypeAlias = Tensor | dict[str, Tensor]
