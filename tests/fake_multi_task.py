"""A small algorithm that learns several tasks: a linear policy for each, from that task's replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rl_training.acting.actor import NetworkOwner
from rl_training.algorithms.base import Learner, scalar, setting
from rl_training.algorithms.replay_based import replay_fields
from rl_training.data.replay import Replay
from rl_training.runtime.multi_task import run_multi_task
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.registry import Entry
from rl_training.types import Decision, Observation, Spaces, State


@dataclass(frozen=True)
class FakeHyperparameters:
    buffer_capacity: int = setting(120, "steps kept of each task", low=1)
    target: float | None = setting(None, "mean return at which a task leaves collection")
    learning_rate: float = scalar(0.01, "step size")


class FakeActor(NetworkOwner):
    """The policies of all tasks."""

    model: nn.ParameterList

    def __init__(self, spaces: list[Spaces], hp: Any, *, device: torch.device) -> None:
        assert isinstance(spaces, list)
        weights = [torch.randn(_size(task), int(task.action.n), dtype=torch.float64) for task in spaces]
        super().__init__(nn.ParameterList(weights).requires_grad_(False), device=device)
        self.spaces = spaces
        self.actors = [FakeTaskActor(self, task, hp) for task in range(len(spaces))]

    def for_task(self, task: int) -> FakeTaskActor:
        return self.actors[task]


class FakeTaskActor:
    def __init__(self, owner: FakeActor, task: int, hp: Any) -> None:
        self.owner, self.task, self.hp, self.spaces = owner, task, hp, owner.spaces[task]
        self.acted = 0

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        assert isinstance(obs, np.ndarray)
        assert obs.shape[1:] == self.spaces.observation.shape
        self.acted += explore
        best = (obs @ self.owner.model[self.task].numpy()).argmax(-1)
        random = rng.integers(self.spaces.action.n, size=len(obs))
        return Decision(np.where(rng.random(len(obs)) < 0.3 * explore, random, best), memory, {})


class FakeLearner(Learner):
    Hyperparameters = FakeHyperparameters
    prioritized = False
    device_columns = ()

    def __init__(self, actor: FakeActor, hp: Any, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.scores: list[dict[int, float]] = []
        self.finished: list[int] = []

    def active(self, task: int) -> bool:
        return task not in self.finished

    def note_scores(self, scores: dict[int, float]) -> None:
        self.scores.append(scores)
        target = self.hp.target
        self.finished += [t for t, s in scores.items() if target is not None and s >= target and self.active(t)]

    def learn(self, replays: Sequence[Replay]) -> dict[str, float]:
        losses = []
        for weight, replay in zip(self.actor.model, replays, strict=True):
            batch = replay.sample(4, self.rng, gamma=0.9)
            obs, action = batch["obs"].double(), batch["action"]
            error = batch["reward"].double() - (obs @ weight)[range(4), action]
            weight.index_add_(1, action, self.hp.learning_rate * (obs * error[:, None]).T)
            losses.append(float(error.square().mean()))
        self.gradient_steps += 1
        self.actor.version += 1
        return {"fake_loss": sum(losses) / len(losses)}

    def state_dict(self) -> State:
        return super().state_dict() | {"finished": list(self.finished)}

    def state_pattern(self) -> State:
        return super().state_pattern() | {"finished": [int]}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.finished = list(state["finished"])


def _size(spaces: Spaces) -> int:
    assert isinstance(spaces.observation, gym.spaces.Box)
    return int(np.prod(spaces.observation.shape))


FAKE_RECIPE = Recipe(
    "fake",
    "several tasks at once",
    FakeHyperparameters,
    FakeActor,
    FakeLearner,
    replay_fields,
    multi_task=True,
    raw_steps=True,
)
FAKE = Entry(FAKE_RECIPE, lambda config, **options: run_multi_task(config, FAKE_RECIPE, **options))
