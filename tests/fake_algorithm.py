"""A whole algorithm, as short as one can be: a linear softmax policy, trained by REINFORCE (Williams, 1992).

In the package its three sections would be three files, and the last line would stand in the table of algorithms.
"""

# ruff: noqa: E402

from __future__ import annotations

# --- acting/fake.py ---------------------------------------------------------------------------------------------------
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_training.acting.actor import NetworkActor
from rl_training.acting.forward import flat
from rl_training.ops.distributions import Categorical
from rl_training.types import Decision, Memory, Observation, Spaces


class SoftmaxActor(NetworkActor):
    """Samples in training, and takes the most likely action in evaluation."""

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        assert spaces.observation.shape is not None
        super().__init__(nn.Linear(math.prod(spaces.observation.shape), spaces.action.n), spaces, hp, device=device)

    @torch.no_grad()
    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        policy = Categorical(self.model(torch.from_numpy(flat(obs)).to(self.device)).cpu())
        action = policy.sample(policy.noise(rng)) if explore else policy.mode
        return Decision(action.numpy(), memory, {})


# --- algorithms/fake.py -----------------------------------------------------------------------------------------------
from dataclasses import dataclass

from rl_training.algorithms.base import Learner, scalar, setting
from rl_training.algorithms.optim import Adam, descend
from rl_training.data.batch import to_device
from rl_training.data.fields import step_fields
from rl_training.data.rollout import Rollout
from rl_training.ops.returns import backward_sum
from rl_training.types import Fields, Metrics

GAMMA = 0.99


@dataclass(frozen=True)
class FakeHyperparameters:
    num_steps: int = setting(64, "rollout length: env steps collected in each environment before an update", low=1)
    learning_rate: float = scalar(1e-2, "learning rate of the optimizer")


class Reinforce(Learner):
    Hyperparameters = FakeHyperparameters

    def __init__(self, actor: SoftmaxActor, hp: FakeHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.optimizers = {"model": Adam(actor.parameters)}

    def update(self, rollout: Rollout) -> Metrics:
        """One step up E[log pi(a|s) (G - mean G)], G being what the rollout still earned in the episode."""
        data = to_device(rollout.batch, self.device)
        value = backward_sum(data["reward"], GAMMA * ~(data["terminated"] | data["truncated"]))
        policy = Categorical(self.actor.model(data["obs"].flatten(2)))
        loss = -(policy.log_prob(data["action"]) * (value - value.mean())).mean()
        descend(self.optimizers["model"], loss, lr=self.hp.learning_rate)
        self.gradient_steps += 1
        self.actor.version += 1
        return {"policy_loss": loss.item()}


def fake_fields(spaces: Spaces, hp: FakeHyperparameters) -> Fields:
    return step_fields(spaces, {})


# --- runtime/fake_trainer.py ------------------------------------------------------------------------------------------
from rl_training.config import TrainConfig
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.registry import Entry

FAKE_RECIPE = Recipe(
    "fake", "REINFORCE", FakeHyperparameters, SoftmaxActor, Reinforce, fake_fields, actions="Discrete"
)  # fmt: skip


def train_fake(config: TrainConfig, **options: Any) -> TrainResult:
    return run_on_policy(config, FAKE_RECIPE, **options)


FAKE = Entry(FAKE_RECIPE, train_fake)  # the line in runtime/registry.py
