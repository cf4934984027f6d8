"""PPO with recurrent memory: minibatches of whole sequences, trained through time.

The sequences of a rollout begin with the memory that acting stored, as a constant. After an update acting goes on with
the memory that the old weights computed, as is usual: it is not computed again from the beginning of the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import MeanMetrics
from rl_training.algorithms.ppo import LEARNED, PPO, PPOHyperparameters
from rl_training.data.batch import env_minibatches, flatten, to_device, tree_map
from rl_training.data.rollout import Rollout
from rl_training.models.recurrent import RecurrentActorCritic
from rl_training.ops.distributions import Distribution
from rl_training.types import Batch


@dataclass(frozen=True)
class RecurrentPPOHyperparameters(PPOHyperparameters):
    num_steps: int = setting(
        128,
        "rollout length: env steps collected in each environment before an update; gradients flow through all",
        low=1,
    )
    hidden_sizes: tuple[int, ...] = setting((64,), "hidden layer sizes after the memory; unused for a single image")
    cell: Literal["lstm", "gru"] = setting("lstm", "kind of recurrent cell")
    recurrent_size: int = setting(128, "size of the recurrent cell's output", low=1)
    critic_memory: Literal["separate", "shared", "none"] = setting(
        "separate", "separate: a recurrent cell for the critic; shared: the policy's, trained by both; none: no memory"
    )
    num_minibatches: int = scalar(
        4, "minibatches (gradient steps) per epoch, of whole environments: at most num_envs", low=1
    )


class RecurrentPPO(PPO):
    Hyperparameters = RecurrentPPOHyperparameters
    hp: RecurrentPPOHyperparameters
    model: RecurrentActorCritic  # type: ignore[assignment]

    def learning_batch(self, rollout: Rollout, metrics: MeanMetrics) -> Batch:
        return super().learning_batch(rollout, metrics) | {"memory": start_memory(rollout, self.device)}

    def epoch(self, batch: Batch) -> Iterator[Batch]:
        """The minibatches of one pass: their steps flat, M environments after one another in each of T steps."""
        batch = {key: batch[key] for key in (*LEARNED, "first", "memory")}
        for part in env_minibatches(batch, int(self.hp.num_minibatches), self.rng):
            yield flatten({key: part[key] for key in LEARNED}) | sequences(part)

    def predict(self, batch: Batch) -> tuple[Distribution, Tensor]:
        return cast(tuple[Distribution, Tensor], self.model(batch["obs"], batch["first"], batch["memory"]))

    @torch.no_grad()
    def end_values(self, after: Batch) -> Tensor:
        return remembered_values(self.model, to_device(after, self.device))


def start_memory(rollout: Rollout, device: torch.device) -> Batch:
    """The memory before the first step, as a batch entry [1, N, ...] for `env_minibatches`."""
    start: Batch = tree_map(lambda x: x.unsqueeze(0), to_device(rollout.start_memory, device))
    return start


def sequences(minibatch: Batch) -> Batch:
    """What the model needs beside observations: `first` [T, M] and the `memory` [M, ...] before them."""
    return {"first": minibatch["first"], "memory": tree_map(lambda x: x.squeeze(0), minibatch["memory"])}


def remembered_values(model: RecurrentActorCritic, after: Batch) -> Tensor:
    """[M] The values of next observations, read with the memory after the last step."""
    _, value, _ = model.step(after["obs"], after["memory"])
    return value
