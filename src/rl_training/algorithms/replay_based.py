"""What the algorithms share that learn from a replay: when gradient steps and target updates are due."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from torch import Tensor

from rl_training.algorithms.base import Learner, scalar, setting
from rl_training.data.batch import to_device
from rl_training.data.fields import step_fields
from rl_training.data.replay import Replay
from rl_training.types import Batch, Fields, Spaces, State

R = TypeVar("R", Replay, Sequence[Replay])  # what is learned from: a replay, or those of several tasks
CAPACITY = "replay buffer size in env steps; an episode's end takes 1 extra entry (frame_stack if stacked)"


def annealing() -> dict[str, Any]:
    """The full correction matters most at the end, when learning converges (section 3.4 of Schaul et al.)."""
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
    """A step holds nothing beside its transition."""
    return step_fields(spaces, {})


class ReplayLearner(Learner, Generic[R]):
    """Every env step is worth `utd_ratio` gradient steps, however many environments there are."""

    prioritized = False  # whether the replay draws steps by priority

    def __init__(self, actor: Any, hp: Any, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.learned = 0  # env steps that gradient steps have been taken for
        self.owed = 0.0  # the fraction of a gradient step that is left of them
        self.synced = 0  # the env step at which a target network last moved

    def learn(self, replay: R) -> dict[str, list[Tensor]]:
        """Take the gradient steps that are due after a step of the environments; reports stay on the device."""
        reports: dict[str, list[Tensor]] = {}
        added = replay.added if isinstance(replay, Replay) else sum(each.added for each in replay)
        for report in self.take_steps(replay, self.steps_due(added)):
            for name, value in report.items():
                reports.setdefault(name, []).append(value)
            self.gradient_steps += 1
        self.actor.version += bool(reports)
        return reports

    def take_steps(self, replay: R, count: int) -> Iterator[dict[str, Tensor]]:
        """So many gradient steps, and what each reports."""
        for _ in range(count):
            yield self.one_step(replay)

    def steps_due(self, added: int) -> int:
        """Gradient steps to take after `added` env steps: none before learning starts, and nothing to catch up then."""
        hp = self.hp
        if added < max(hp.learning_starts, self.learned):  # a run may be resumed without its replay
            self.learned = added
            return 0
        new = added - self.learned
        if new < hp.train_frequency:
            return 0
        self.learned = added
        self.owed += new * hp.utd_ratio
        due = int(self.owed + 1e-9)  # ten times 0.1 is one
        self.owed -= due
        return due

    def target_is_due(self, replay: Replay) -> bool:
        """Whether `target_update_interval` env steps have passed; late by less than one step of the environments."""
        self.synced = min(self.synced, replay.added)  # a run may be resumed without its replay
        since, interval = replay.added - self.synced, self.hp.target_update_interval
        if since < interval:
            return False
        self.synced = replay.added - since % interval
        return True

    def sample(self, replay: Replay, **how: Any) -> Batch:
        """A batch on the device, but for its index, which is of use only here."""
        batch = replay.sample(self.hp.batch_size, self.rng, gamma=self.hp.gamma, **how)
        return {key: value if key == "index" else to_device(value, self.device) for key, value in batch.items()}

    @abstractmethod
    def one_step(self, replay: R) -> dict[str, Tensor]:
        """One gradient step; returns numbers to report, without waiting for them."""

    def state_dict(self) -> State:
        return super().state_dict() | {"learned": self.learned, "owed": self.owed, "synced": self.synced}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if not -1.0 < state["owed"] < 1.0:  # what is owed beyond one gradient step is taken at once
            raise ValueError(f"learner.owed should be less than one gradient step, got {state['owed']}")
        self.learned, self.owed, self.synced = state["learned"], state["owed"], state["synced"]
