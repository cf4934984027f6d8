"""The base of algorithms that learn from a replay: when gradient steps and target updates are due."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from torch import Tensor, nn

from rl_training.algorithms.base import Learner, scalar, setting
from rl_training.data.batch import to_device
from rl_training.data.fields import step_fields
from rl_training.data.replay import Replay
from rl_training.types import Array, Batch, Fields, Spaces, State

R = TypeVar("R", Replay, Sequence[Replay])  # one replay, or one for each task
CAPACITY = "replay buffer size in env steps; an episode's end takes 1 extra entry (frame_stack if stacked)"


def annealing() -> dict[str, Any]:
    """Full correction matters most at the end of training (Schaul et al., section 3.4)."""
    return {"kind": "linear", "start": 0.4, "end": 1.0}


@dataclass(frozen=True)
class ReplayHyperparameters:
    hidden_sizes: tuple[int, ...] = setting((256, 256), "hidden layer sizes of each network", low=1)
    activation: Literal["tanh", "relu", "elu", "silu"] = setting("relu", "activation function of the hidden layers")
    buffer_capacity: int = setting(1_000_000, CAPACITY, low=1)
    batch_size: int = setting(256, "batch size: transitions per gradient step", low=1)
    learning_starts: int = setting(100, "env steps with uniformly random actions before learning starts", low=0)
    learning_rate: float = scalar(3e-4, "learning rate of the optimizer")
    gamma: float = scalar(0.99, "discount factor", high=1.0)
    tau: float = scalar(0.005, "soft update (Polyak) coefficient of the target network; 1: copy the weights", high=1.0)
    utd_ratio: float = scalar(1.0, "update-to-data ratio: gradient steps per env step, counted over all environments")
    train_frequency: int = scalar(1, "env steps between updates of utd_ratio * train_frequency gradient steps", low=1)


def replay_fields(spaces: Spaces, hp: Any) -> Fields:
    """A step holds its transition only."""
    return step_fields(spaces, {})


class ReplayLearner(Learner, Generic[R]):
    """Takes `utd_ratio` gradient steps per env step, counted over all environments."""

    prioritized = False  # whether the replay samples by priority
    device_columns: tuple[str, ...] = ()  # columns of the replay that should be on the learner's device
    PRIORITY_FLOOR = 1e-6  # so that each step can be sampled again

    def __init__(self, actor: Any, hp: Any, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.env_steps_used = 0  # for gradient steps
        self.fraction_due = 0.0  # of a gradient step

    def learn(self, replay: R) -> dict[str, list[Tensor]]:
        """Take the gradient steps that are due after a step of the environments. The metrics stay on the device."""
        reports: dict[str, list[Tensor]] = {}
        added = replay.added if isinstance(replay, Replay) else sum(each.added for each in replay)
        for report in self.take_steps(replay, self.steps_due(added)):
            for name, value in report.items():
                reports.setdefault(name, []).append(value)
            self.gradient_steps += 1
        self.actor.version += bool(reports)
        return reports

    def take_steps(self, replay: R, count: int) -> Iterator[dict[str, Tensor]]:
        """Take `count` gradient steps and yield the metrics of each."""
        for _ in range(count):
            yield self.one_step(replay)

    def steps_due(self, added: int) -> int:
        """Gradient steps to take after `added` env steps."""
        new = self.new_steps(added)
        if new < self.hp.train_frequency:
            return 0
        self.env_steps_used = added
        self.fraction_due += new * self.hp.utd_ratio
        due = int(self.fraction_due + 1e-9)  # ten times 0.1 is one
        self.fraction_due -= due
        return due

    def new_steps(self, added: int) -> int:
        """Of `added` env steps, those not yet used. Steps before `learning_starts` do not count."""
        if added < max(self.hp.learning_starts, self.env_steps_used):  # a run may be resumed without its replay
            self.env_steps_used = added
        return added - self.env_steps_used

    def sample(self, replay: Replay, **options: Any) -> Batch:
        """A batch on the device. Its index stays on the CPU."""
        batch = replay.sample(self.hp.batch_size, self.rng, gamma=self.hp.gamma, **options)
        return {key: value if key == "index" else to_device(value, self.device) for key, value in batch.items()}

    def set_priorities(self, replay: Replay, index: Array, error: Tensor) -> None:
        """Set the priorities of steps index [B] to the absolute errors [B]."""
        replay.set_priorities(index, error.abs().cpu().double().numpy() + self.PRIORITY_FLOOR)

    @abstractmethod
    def one_step(self, replay: R) -> dict[str, Tensor]:
        """Take one gradient step. Returns metrics on the device."""

    def state_dict(self) -> State:
        return super().state_dict() | {"env_steps_used": self.env_steps_used, "fraction_due": self.fraction_due}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if not -1.0 < state["fraction_due"] < 1.0:
            raise ValueError(f"learner.fraction_due should be between -1 and 1, got {state['fraction_due']}")
        self.env_steps_used, self.fraction_due = state["env_steps_used"], state["fraction_due"]


class TargetNetworkLearner(ReplayLearner[Replay]):
    """Moves a target network every `target_update_interval` env steps."""

    target_model: nn.Module

    def __init__(self, actor: Any, hp: Any, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.target_moved_at = 0  # env steps

    def learn(self, replay: Replay) -> dict[str, list[Tensor]]:
        self.target_moved_at = min(self.target_moved_at, replay.added)  # a run may be resumed without its replay
        since, interval = replay.added - self.target_moved_at, self.hp.target_update_interval
        if since >= interval:
            self.target_moved_at = replay.added - since % interval
            self.move_target()
        return super().learn(replay)

    @abstractmethod
    def move_target(self) -> None: ...

    def state_dict(self) -> State:
        own = {"target_moved_at": self.target_moved_at, "target_model": self.target_model.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.target_moved_at = state["target_moved_at"]
        self.target_model.load_state_dict(state["target_model"])
