"""A small algorithm that learns several tasks: a linear policy for each, from that task's replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.algorithms.base import Tunable, scalar, setting
from rl_training.data.fields import step_fields
from rl_training.data.replay import Replay
from rl_training.runtime.multi_task import run_multi_task
from rl_training.runtime.registry import Entry
from rl_training.runtime.setup import Recipe
from rl_training.types import Decision, Observation, Spaces, State


@dataclass(frozen=True)
class FakeHyperparameters:
    buffer_capacity: int = setting(120, "steps kept of each task", low=1)
    target: float | None = setting(None, "mean return at which a task leaves collection")
    learning_rate: float = scalar(0.01, "step size")


class FakeMultiTask(Tunable):
    Hyperparameters = FakeHyperparameters

    def __init__(self, spaces: list[Spaces], hp: Any, *, rng: np.random.Generator, device: torch.device) -> None:
        assert isinstance(spaces, list)
        self.spaces, self.hp, self.rng = spaces, hp, rng
        self.gradient_steps = 0
        self.weights = [torch.randn(_size(task), int(task.action.n), dtype=torch.float64) for task in spaces]
        self.num_parameters = sum(weight.numel() for weight in self.weights)
        self.scores: list[dict[int, float]] = []
        self.finished: list[int] = []
        self.acted = [0] * len(spaces)

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator, task: int = 0) -> Decision:
        assert isinstance(obs, np.ndarray)
        assert obs.shape[1:] == self.spaces[task].observation.shape
        self.acted[task] += explore
        best = (obs @ self.weights[task].numpy()).argmax(-1)
        random = rng.integers(self.spaces[task].action.n, size=len(obs))
        return Decision(np.where(rng.random(len(obs)) < 0.3 * explore, random, best), memory, {})

    def active(self, task: int) -> bool:
        return task not in self.finished

    def note_scores(self, scores: dict[int, float]) -> None:
        self.scores.append(scores)
        target = self.hp.target
        self.finished += [t for t, s in scores.items() if target is not None and s >= target and self.active(t)]

    def make_replay(self, num_envs: int, *, task: int) -> Replay:
        return Replay(self.hp.buffer_capacity, num_envs, step_fields(self.spaces[task], {}))

    def learn(self, replays: Sequence[Replay]) -> dict[str, float]:
        losses = []
        for weight, replay in zip(self.weights, replays, strict=True):
            batch = replay.sample(4, self.rng, gamma=0.9)
            obs, action = batch["obs"].double(), batch["action"]
            error = batch["reward"].double() - (obs @ weight)[range(4), action]
            weight.index_add_(1, action, self.hp.learning_rate * (obs * error[:, None]).T)
            losses.append(float(error.square().mean()))
        self.gradient_steps += 1
        return {"fake_loss": sum(losses) / len(losses)}

    def state_dict(self) -> State:
        return {
            "model": {f"task_{i}": weight for i, weight in enumerate(self.weights)},
            "rng": self.rng.bit_generator.state,
            "gradient_steps": self.gradient_steps,
            "finished": list(self.finished),
        }

    def load_state_dict(self, state: State) -> None:
        for i, weight in enumerate(self.weights):
            weight.copy_(state["model"][f"task_{i}"])
        self.rng.bit_generator.state = state["rng"]
        self.gradient_steps, self.finished = state["gradient_steps"], list(state["finished"])


def _size(spaces: Spaces) -> int:
    assert isinstance(spaces.observation, gym.spaces.Box)
    return int(np.prod(spaces.observation.shape))


FAKE_RECIPE = Recipe(
    "fake", "several tasks at once", FakeHyperparameters, FakeMultiTask, multi_task=True, raw_steps=True
)
FAKE = Entry(FAKE_RECIPE, lambda config, **options: run_multi_task(config, FAKE_RECIPE, **options))
