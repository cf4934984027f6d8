"""ScaleZero's actors: one world model for several tasks, and for each task an actor with a memory of its last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.acting.actor import NetworkOwner
from rl_training.acting.exportable import Exportable, ExportedTask
from rl_training.acting.planning import (
    Plan,
    Planner,
    PriorActor,
    best_legal_of,
    plan_by_visits,
    plan_extras,
    search_arguments,
    searches,
)
from rl_training.data.history import check_history, empty_history, extended_history, to_history, to_memory
from rl_training.envs.spaces import ObservationLayout
from rl_training.models.moe import Adapters
from rl_training.models.scalezero import ScaleZeroModel
from rl_training.models.world_transformer import TransformerSize
from rl_training.types import Array, Decision, Field, Fields, History, Memory, Observation, Spaces, State, Weights


class ScaleZeroActor(NetworkOwner):
    """The networks of all tasks. `for_task` gives the actor of one task."""

    model: ScaleZeroModel

    def __init__(self, spaces: Sequence[Spaces], hp: Any, *, device: torch.device | str = "cpu") -> None:
        super().__init__(make_model(spaces, hp).eval(), device=device)
        self.spaces = list(spaces)
        self.stage = 0  # of the model when the planners were made
        self.actors = [TaskActor(self, task, hp) for task in range(len(self.spaces))]

    def for_task(self, task: int) -> TaskActor:
        return self.actors[task]

    def planner_of(self, model: ScaleZeroModel, task: int) -> Planner:
        """A planner for one task of another model: learners plan with their target network."""
        return Planner(model.for_task(task), self.spaces[task])

    def refresh(self) -> None:
        for actor in self.actors:
            actor.planner.refresh()

    def load(self, weights: Weights) -> None:
        super().load(weights)
        self.follow_stage()

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.follow_stage()

    def follow_stage(self) -> None:
        """Use the adapters of the loaded stage, and new planners: captured graphs are those of the old stage."""
        stage = int(self.model.stage)
        if stage != self.stage:
            self.model.set_stage(stage)
            self.rebuild()

    def rebuild(self) -> None:
        """Called after the parameters have moved in memory: captured graphs read the old memory."""
        self.stage = int(self.model.stage)
        for actor in self.actors:
            actor.planner = self.planner_of(self.model, actor.task)


class TaskActor:
    """Acts in one task by a search. Its memory is the history: the last steps of the episode, up to context - 1."""

    def __init__(self, owner: ScaleZeroActor, task: int, hp: Any) -> None:
        self.owner, self.task, self.hp = owner, task, hp
        self.spaces, self.device, self.num_parameters = owner.spaces[task], owner.device, owner.num_parameters
        self.planner = owner.planner_of(owner.model, task)

    @property
    def version(self) -> int:
        return self.owner.version

    @property
    def history_length(self) -> int:
        """Steps before the current observation in the context."""
        return self.owner.model.context - 1

    def plan(self, obs: Observation, **arguments: Any) -> Plan:
        """Search from observations [N, ...]. The arguments are those of `plan_by_visits`."""
        return plan_in_task(self.planner, self.owner.model, obs, self.hp, **arguments)

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        """memory: a history as flat arrays, of length 0 where an episode begins; empty at the first call."""
        history = None
        if self.history_length:
            history = to_history(memory) if memory else empty_history(obs, self.history_length)
            check_history(history, obs, self.history_length)
        plan = self.plan(obs, rng=rng, history=history, **search_arguments(self.hp, explore=explore))
        if history is not None:
            memory = to_memory(extended_history(history, obs, plan.action))
        return Decision(plan.action, memory, plan_extras(plan))

    def exportable(self) -> Exportable:
        prior = PriorInTask(self)
        network = ExportedTask(self.owner.model.for_task(self.task))
        return Exportable(network, prior.fields(), prior, prior.scores, searches(self.hp))

    def weights(self) -> Weights:
        return self.owner.weights()

    def load(self, weights: Weights) -> None:
        self.owner.load(weights)

    def state_dict(self) -> State:
        return self.owner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.owner.load_state_dict(state)


class PriorInTask:
    """Acts in one task by the policy that searches begin with. Its memory is that of the TaskActor."""

    def __init__(self, actor: TaskActor) -> None:
        self.actor, self.prior = actor, PriorActor(actor.planner)

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        action = best_legal_of(self.scores(obs, memory), obs)
        history = self.history(obs, memory)
        return Decision(action, {} if history is None else to_memory(extended_history(history, obs, action)), {})

    def scores(self, obs: Observation, memory: Memory) -> Array:
        return self.prior.scores(obs, self.history(obs, memory))

    def history(self, obs: Observation, memory: Memory) -> History | None:
        steps = self.actor.history_length
        if not steps:
            return None
        return to_history(memory) if memory else empty_history(obs, steps)

    def fields(self) -> Fields:
        one = zeros_of(self.actor.spaces.observation)
        history = self.history(one, {})
        parts = {} if history is None else to_memory(history)
        return {name: Field(part.shape[1:], part.dtype) for name, part in parts.items() if isinstance(part, np.ndarray)}


def zeros_of(space: gym.Space) -> Observation:
    """One observation [1, ...] of the model."""
    return ObservationLayout(space).empty(1)


def plan_in_task(planner: Planner, model: ScaleZeroModel, obs: Observation, hp: Any, **arguments: Any) -> Plan:
    with model.fixed_weights():
        return plan_by_visits(planner, obs, hp, **arguments)


def make_model(spaces: Sequence[Spaces], hp: Any) -> ScaleZeroModel:
    size = TransformerSize(hp.width, hp.layers, hp.heads, hp.num_experts, hp.expert_size)
    adapters = Adapters(hp.num_adapters, hp.adapter_rank, hp.adapter_alpha, hp.adapter_dropout)
    names = (
        "hidden_sizes", "activation", "context", "train_context", "value_limit", "reward_limit",
        "task_embedding", "routing",
    )  # fmt: skip
    return ScaleZeroModel(spaces, size, adapters, **{name: getattr(hp, name) for name in names})
