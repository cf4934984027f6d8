"""The actor of recurrent policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_training.acting.actor import NetworkActor, decide, with_version, without
from rl_training.acting.exportable import Exportable, ExportedRecurrent
from rl_training.acting.paths import make_recurrent_forward
from rl_training.data.history import check_rows, num_rows
from rl_training.errors import InputError
from rl_training.models.recurrent import RecurrentActorCritic
from rl_training.types import Array, Decision, Field, Fields, Memory, Observation, Spaces


class RecurrentActor(NetworkActor):
    """Samples from a policy that remembers. Stores log-probability and value like ActorCriticActor."""

    model: RecurrentActorCritic

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        model = RecurrentActorCritic(
            spaces,
            hp.hidden_sizes,
            hp.activation,
            cell=hp.cell,
            recurrent_size=hp.recurrent_size,
            critic_memory=hp.critic_memory,
            log_std_init=hp.log_std_init,
        )
        super().__init__(model, spaces, hp, device=device)
        self.forward = make_recurrent_forward(model)

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        output, value, memory = self.forward(obs, checked_memory(memory, obs, self.model.memory_shape()))
        policy = self.model.heads.acting_policy(output)
        return decide(policy, value, memory, sample=explore or not self.hp.deterministic_eval, rng=rng)

    def exportable(self) -> Exportable:
        fields: Fields = {"policy": Field(self.model.memory_shape()["policy"], np.dtype(np.float32))}

        def scores(obs: Observation, memory: Memory) -> Array:
            return self.forward(obs, checked_memory(memory, obs, self.model.memory_shape()))[0]

        return Exportable(ExportedRecurrent(self.model), fields, without(self, deterministic_eval=True), scores)


class VersionedRecurrentActor(RecurrentActor):
    """Also stores the version of its weights, as VersionedActor does."""

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        return with_version(super().act(obs, memory, explore=explore, rng=rng), self.version)


def checked_memory(memory: Memory, obs: Observation, shape: Mapping[str, tuple[int, ...]]) -> Memory:
    """The memory for observations [N, ...]; zeros where it is empty. Raises an InputError where it does not fit.

    shape: of one environment's row of each part.
    """
    rows = num_rows(obs)
    shapes = {name: (rows, *each) for name, each in shape.items()}
    if not memory:
        return {name: np.zeros(each, np.float32) for name, each in shapes.items()}
    found = {name: tuple(part.shape) for name, part in memory.items()}
    if found != shapes:
        check_rows(len(next(iter(memory.values()))), obs)
        raise InputError(f"a memory of shapes {found} is not one of this policy, whose shapes are {shapes}")
    return memory
