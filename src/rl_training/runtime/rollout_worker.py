"""An actor with environments of its own, which plays rollouts on demand: in another process or on another machine."""

from __future__ import annotations

import time
import traceback
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from rl_training.config import Task
from rl_training.data.merged_statistics import Observed, observed, set_statistics
from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import memory_fields, part_fields
from rl_training.data.state_check import compare_state
from rl_training.envs.episodes import seed_process
from rl_training.envs.factory import adopt
from rl_training.envs.runner import FinishedEpisode
from rl_training.envs.runner_state import RunnerState
from rl_training.envs.tasks import spaces_to_json
from rl_training.errors import InputError
from rl_training.runtime.randomness import global_state, set_global_state
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.sources import fill, make_runner, try_act
from rl_training.types import Fields, Spaces, State, Weights


class WorkerPlan(NamedTuple):
    """All that it takes to make a worker."""

    worker: int  # its number
    recipe: Recipe
    task: Task
    num_envs: int
    seed: int
    device: str
    spec: EnvSpec | None  # of the environment in the learner's process: see `adopt`


class WorkerFacts(NamedTuple):
    spaces: Spaces
    spaces_json: dict[str, Any]
    env_observation: gym.Space  # before normalisation
    backend: str
    observed: Observed | None  # the normaliser has seen the first observations


class Order(NamedTuple):
    """What to play a rollout with, beside the weights."""

    hp: Any
    statistics: list[State] | None  # of the normaliser
    statistics_version: int


class Report(NamedTuple):
    """What is known of a rollout beside its steps."""

    worker: int
    version: int  # of the weights that played it
    env_steps: int
    episodes: list[FinishedEpisode]
    seconds: float
    observed: Observed | None


class RolloutWorker:
    """Environments, an actor, and a normaliser with statistics that the learner merges."""

    def __init__(self, plan: WorkerPlan) -> None:
        adopt(plan.task.env_id, plan.spec)
        torch.set_num_threads(1)
        seed_process(plan.seed)
        self.plan = plan
        self.runner = make_runner(plan.recipe, plan.task, plan.num_envs, plan.seed)
        self.actor: Any = None
        self.normalizer = self.runner.normalizer

    def facts(self) -> WorkerFacts:
        runner, envs, seen = self.runner, self.runner.envs, None
        if self.normalizer is not None:
            states = [statistics.state_dict() for statistics in self.normalizer.statistics()]
            seen = Observed(0, states, states)
        return WorkerFacts(
            runner.spaces, spaces_to_json(runner), envs.single_observation_space, type(envs).__name__, seen
        )

    def attach(self, hp: Any) -> Fields:
        """Make the actor. Gives the fields of the rollouts' parts, see `part_fields`."""
        plan, spaces = self.plan, self.runner.spaces
        self.actor = plan.recipe.actor(spaces, hp, device=torch.device(plan.device))
        self.fields = plan.recipe.fields(spaces, hp)
        memory = try_act(self.runner, self.actor).memory
        return part_fields(hp.num_steps, plan.num_envs, self.fields, memory_fields(memory))

    def play(self, order: Order, weights: Weights, rollout: Rollout) -> Report:
        """Fill the rollout, from the states where the last one ended."""
        started, actor = time.perf_counter(), self.actor
        actor.hp = order.hp
        if actor.version != weights.version or not self._loaded:
            actor.load(weights)
            self._loaded = True
        if self.normalizer is not None and order.statistics is not None:
            self.normalizer.gamma = getattr(order.hp, "gamma", self.normalizer.gamma)
            set_statistics(self.normalizer, order.statistics)
            if self._fresh:  # its observations were normalised before it knew the statistics of all
                self.runner.obs = self.normalizer.observation(self.runner.raw_obs)
        self._fresh = False
        episodes: list[FinishedEpisode] = []
        env_steps = fill(rollout, self.runner, actor.act, lambda _: episodes.extend(self.runner.statistics.finished))
        seen = observed(self.normalizer, order.statistics_version) if self.normalizer is not None else None
        return Report(self.plan.worker, weights.version, env_steps, episodes, time.perf_counter() - started, seen)

    _loaded = False  # whether the actor's weights are the learner's
    _fresh = True  # whether all environments have just begun

    def try_acting(self) -> None:
        try_act(self.runner, self.actor)

    def state_dict(self) -> State:
        """The statistics of the normaliser are the learner's; the returns of current episodes are here."""
        returns = self.normalizer.returns.copy() if self.normalizer is not None else np.zeros(0)
        state = {"runner": RunnerState(self.runner).state_dict(), "returns": returns, "generators": global_state()}
        plain: State = without_tensors(state)  # torch would pass them on in a way that only its own processes know
        return plain

    def load_state_dict(self, state: State | None, statistics: list[State] | None) -> list[int]:
        """Load a state, and return the environments that could not be restored: all where there is no state.

        statistics: of the normaliser, for the first observations of those.
        """
        if self.normalizer is not None and statistics is not None:
            set_statistics(self.normalizer, statistics)
        if state is None:
            return list(range(self.runner.num_envs))
        runner = RunnerState(self.runner)
        compare_state(runner.state_pattern(), state["runner"], "runner")
        if self.normalizer is not None:
            self.normalizer.returns = np.array(state["returns"], np.float64)
        runner.load_state_dict(state["runner"])
        set_global_state({**state["generators"], "torch": torch.tensor(state["generators"]["torch"])})
        self._fresh = False
        return self.runner.not_restored

    def do(self, command: str, argument: Any) -> Any:
        """Carry out any command but `play`, by its name."""
        if command == "state":
            return self.state_dict()
        if command == "load":
            return self.load_state_dict(*argument)
        if command == "try":
            return self.try_acting()
        assert command == "attach", command
        return self.attach(argument)

    def close(self) -> None:
        self.runner.close()


def described(error: BaseException) -> tuple[str, str]:
    """(message, traceback) of an error that a worker reports; as text, because any class may be raised."""
    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
    return (str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"), trace


def without_tensors(value: Any) -> Any:
    """A nested state with arrays in place of tensors."""
    if isinstance(value, dict):
        return {key: without_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_tensors(item) for item in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value
