"""What the algorithms share that learn from a replay: when to learn, from what, and the state to save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Tunable, scalar, setting
from rl_training.config import InputError
from rl_training.data.batch import to_device
from rl_training.data.fields import step_fields
from rl_training.data.machine import usable_bytes
from rl_training.data.replay import Replay
from rl_training.data.replay_layout import replay_bytes
from rl_training.types import Batch, Decision, Field, Observation, Spaces, State

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


class ReplayAlgorithm(Tunable, ABC):
    """Every env step is worth `utd_ratio` gradient steps, however many environments there are and however bundled."""

    hp: Any
    prioritized = False  # all transitions are drawn alike

    def __init__(self, spaces: Spaces, hp: Any, *, rng: np.random.Generator, device: torch.device | str) -> None:
        self.spaces, self.hp, self.rng, self.device = spaces, hp, rng, torch.device(device)
        self.gradient_steps = 0
        self.learned = 0  # env steps that have been paid for with gradient steps
        self.owed = 0.0  # the fraction of a gradient step that is left of them
        self.synced = 0  # the env step at which a target network last moved

    def extra_fields(self) -> dict[str, Field]:
        """The extras of `act`, which every step holds."""
        return {}

    def make_replay(self, num_envs: int) -> Replay:
        """The replay this algorithm learns from; an error where it would not fit into memory."""
        # Of a Dict with stacked entries every observation is kept whole: the entries may differ in what they stack.
        stack = self.spaces.frame_stack if isinstance(self.spaces.observation, gym.spaces.Box) else 1
        capacity, usable = self.hp.buffer_capacity, usable_bytes()
        fields = step_fields(self.spaces, self.extra_fields())
        kind: dict[str, Any] = {"frame_stack": stack, "prioritized": self.prioritized}
        observations, needed = replay_bytes(capacity, num_envs, fields, **kind)
        if usable is not None and needed > usable:
            raise InputError(
                f"buffer_capacity: {capacity:,} steps take {needed / 1e9:,.1f} GB, and there are {usable / 1e9:,.1f} "
                "GB of memory: lower it"
            )
        return Replay(capacity, num_envs, fields, **kind, device=self.replay_device(observations))

    def replay_device(self, needed: int) -> torch.device | None:
        """The GPU, where one learns and a quarter of its free memory is enough to keep all observations there too."""
        if self.device.type != "cuda" or not isinstance(self.spaces.observation, gym.spaces.Box):
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.device if 4 * needed <= free else None

    def warm_up(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        """Before learning starts every action of the model's space is alike."""
        space = self.spaces.action
        num_envs = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        if isinstance(space, gym.spaces.Discrete):
            return Decision(rng.integers(space.n, size=num_envs), memory, {})
        assert isinstance(space, gym.spaces.Box)
        shape = (num_envs, *space.shape)
        return Decision(rng.uniform(space.low, space.high, shape).astype(np.float32), memory, {})

    def learn(self, replay: Replay) -> dict[str, list[Tensor]]:
        """The gradient steps that are due; what they report stays on the device."""
        reports: dict[str, list[Tensor]] = {}
        for report in self.take_steps(replay, self.steps_due(replay.added)):
            for name, value in report.items():
                reports.setdefault(name, []).append(value)
            self.gradient_steps += 1
        return reports

    def take_steps(self, replay: Replay, count: int) -> Iterator[dict[str, Tensor]]:
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
    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        """One gradient step; returns numbers to report, without waiting for them."""

    def state_dict(self) -> State:
        return {
            "rng": self.rng.bit_generator.state,
            "gradient_steps": self.gradient_steps,
            "learned": self.learned,
            "owed": self.owed,
            "synced": self.synced,
        }

    def load_state_dict(self, state: State) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.gradient_steps = state["gradient_steps"]
        if not -1.0 < state["owed"] < 1.0:  # what is owed beyond one gradient step is taken at once
            raise ValueError(f"algorithm.owed should be less than one gradient step, got {state['owed']}")
        self.learned, self.owed, self.synced = state["learned"], state["owed"], state["synced"]
