"""The whole way from an environment's observation to its action, as one module on named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.acting.exportable import Exportable
from rl_training.data.normalize import LIMIT, Normalizer, RunningMeanStd
from rl_training.envs.spaces import ObservationLayout
from rl_training.types import Array, BoxActions, Observation, TensorTree

OBS, MEMORY, AFTER = "obs", "memory.", "next_memory."


class PolicyGraph(nn.Module):
    """Inputs: `obs`, or `obs.<key>` for the entries of a Dict observation, and `memory.<name>`, zeros at first.

    Outputs: `action`, `scores` (logits, Q-values or means that it was chosen by) and `next_memory.<name>`. All have a
    first axis of N environments.
    """

    def __init__(
        self,
        policy: Exportable,
        layout: ObservationLayout,
        env_action: gym.Space,
        box_actions: BoxActions,
        normalizer: Normalizer | None,
    ) -> None:
        super().__init__()
        self.network, self.memory_names = policy.network, list(policy.memory)
        statistics = normalizer.observation_statistics if normalizer else {}
        self.leaves = nn.ModuleDict(
            {input_name(leaf.key): ToModel(leaf.start, statistics.get(leaf.key)) for leaf in layout.leaves}
        )
        self.keys = [leaf.key for leaf in layout.leaves]
        self.single = layout.single
        self.to_env = to_env(env_action, box_actions)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = {key: self.leaves[input_name(key)](inputs[obs_name(key)]) for key in self.keys}
        obs: TensorTree = parts[""] if self.single else parts
        choice = self.network(obs, {name: inputs[MEMORY + name] for name in self.memory_names})
        after = {AFTER + name: choice.memory[name] for name in self.memory_names}
        return {"action": self.to_env(choice.action), "scores": choice.scores, **after}


def obs_name(key: str) -> str:
    return f"{OBS}.{key}" if key else OBS


def input_name(key: str) -> str:
    """A name that a submodule can have: without dots."""
    return "leaf_" + key.replace(".", "\N{MIDDLE DOT}")


def graph_inputs(layout: ObservationLayout, obs: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Observations in the model's arrays as the environment counts them, and a memory, by the names of inputs."""
    inputs = {}
    for leaf in layout.leaves:
        value = obs[leaf.key] if isinstance(obs, dict) else obs
        inputs[obs_name(leaf.key)] = value if leaf.start is None else value + leaf.start
    return {**inputs, **{MEMORY + name: x for name, x in memory.items()}}


class ToModel(nn.Module):
    """One array of an observation, counted from 0 and normalised."""

    start: Tensor | None
    offset: Tensor | None
    scale: Tensor | None

    def __init__(self, start: Any, statistics: RunningMeanStd | None) -> None:
        super().__init__()
        self.register_buffer("start", None if start is None else torch.as_tensor(np.array(start)))
        self.register_buffer("offset", None if statistics is None else number(statistics.offset))
        self.register_buffer("scale", None if statistics is None else number(statistics.scale))

    def forward(self, value: Tensor) -> Tensor:
        if self.start is not None:
            value = value - self.start
        if self.offset is not None and self.scale is not None:
            value = ((value - self.offset) * self.scale).clamp(-float(LIMIT), float(LIMIT))
        return value


def number(value: Any) -> Tensor:
    return torch.from_numpy(np.array(value, np.float32))


def to_env(space: gym.Space, box_actions: BoxActions) -> nn.Module:
    """From actions of the model to those of the environment, as `action_map` does in numpy."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return Shifted(np.asarray(space.start, np.int64))
    if isinstance(space, spaces.Box):
        return Bounded(space, scaled=box_actions == "scale")
    assert isinstance(space, spaces.MultiBinary)
    return nn.Identity()


class Shifted(nn.Module):
    start: Tensor

    def __init__(self, start: Array) -> None:
        super().__init__()
        self.register_buffer("start", torch.from_numpy(start))

    def forward(self, action: Tensor) -> Tensor:
        return action + self.start


class Bounded(nn.Module):
    """Actions in a Box: clipped to its bounds, or scaled to them from [-1, 1]."""

    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Box, *, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        self.register_buffer("low", torch.from_numpy(np.array(space.low)))
        self.register_buffer("high", torch.from_numpy(np.array(space.high)))

    def forward(self, action: Tensor) -> Tensor:
        action = action.to(self.low.dtype)
        if self.scaled:
            action = self.low + (action + 1.0) * (0.5 * (self.high - self.low))
        return torch.minimum(torch.maximum(action, self.low), self.high)
