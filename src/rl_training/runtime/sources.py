"""Sources of experience: environments and the actors that play in them."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch

from rl_training.acting.actor import Actor, RandomActor
from rl_training.config import Task, TrainConfig
from rl_training.data.normalize import Normalizer
from rl_training.data.rollout import Rollout
from rl_training.envs.episode_info import info_means
from rl_training.envs.factory import make_envs
from rl_training.envs.runner import Act, EnvRunner
from rl_training.envs.runner_state import RunnerState
from rl_training.envs.tasks import Together, clips_reward, make_normalizer, spaces_to_json
from rl_training.runtime.randomness import seed_of
from rl_training.runtime.recipe import Recipe
from rl_training.types import Decision, Fields, Metrics, Spaces, State, Step, Weights


class Source(Protocol):
    """The environments of a run, in this process or elsewhere, as the run uses them."""

    names: list[str]  # of the tasks
    spaces: list[Spaces]
    normalizers: list[Normalizer | None]
    env_steps: int  # of the last `step` or `collect`
    notes: list[str]  # what the user should know; the run shows and removes them
    not_exact: str  # why a resumed run is not, bit for bit, the one that was not interrupted; "": it is

    def attach(self, actors: Sequence[Actor], fields: Sequence[Fields]) -> None:
        """Set the actor of each task, and the fields of its steps."""

    def use(self, hp: Any) -> None:
        """Play with these hyperparameters from now on."""

    def collect(self, on_step: Callable[[int], None]) -> Rollout:
        """A rollout of `num_steps`, valid until the next; `on_step` is called with the env steps so far."""

    def recent(self) -> dict[str, Metrics]:
        """By task: means over the last finished episodes, NaN before the first, and what else the source measures."""

    def latest(self) -> dict[str, Metrics]:
        """By task: the means over the last finished episodes and the return of the last, at any time and from any
        thread."""

    def try_acting(self) -> None:
        """Choose actions and drop them: an error shows that actors, observations and memory do not fit together."""

    def parts(self) -> dict[str, Any]:
        """The parts of a checkpoint that belong to the source, in the order in which they are loaded."""

    def facts(self) -> dict[str, Any]:
        """For metadata.json: the backend, and the environments that could not be restored."""

    def not_restored(self) -> Mapping[str, tuple[list[int], int]]:
        """By task: the environments that could not be restored, and the number of all environments."""

    def spaces_json(self) -> dict[str, Any]:
        """The spaces for a checkpoint, from which a policy is loaded without an environment."""

    def close(self) -> None: ...


class SteppedSource(Source, Protocol):
    def step(self, task: int = 0, *, random: bool = False) -> Step:
        """Step every environment of a task once; `random`: with uniformly random actions."""


class LocalSource:
    """Environments that this process steps, with one runner for each task."""

    def __init__(self, names: Sequence[str], runners: Sequence[EnvRunner]) -> None:
        self.names, self.runners = list(names), list(runners)
        self.spaces = [runner.spaces for runner in self.runners]
        self.normalizers = [runner.normalizer for runner in self.runners]
        self.env_steps, self.notes, self.not_exact = 0, list[str](), ""
        self.actors: list[Actor] = []
        self._random = [RandomActor(spaces) for spaces in self.spaces]
        self._rollout: Rollout | None = None

    def attach(self, actors: Sequence[Actor], fields: Sequence[Fields]) -> None:
        self.actors, self.fields = list(actors), list(fields)

    def use(self, hp: Any) -> None:
        for actor, normalizer in zip(self.actors, self.normalizers, strict=True):
            actor.hp = hp
            if normalizer is not None and hasattr(hp, "gamma"):
                normalizer.gamma = hp.gamma

    def step(self, task: int = 0, *, random: bool = False) -> Step:
        runner = self.runners[task]
        step = runner.step(self._random[task].act if random else self.actors[task].act)
        self.env_steps = runner.live_steps
        return step

    def collect(self, on_step: Callable[[int], None]) -> Rollout:
        (runner,), (actor,), (fields,) = self.runners, self.actors, self.fields
        if self._rollout is None:
            self._rollout = Rollout(actor.hp.num_steps, runner.num_envs, fields)
        self.env_steps = fill(self._rollout, runner, actor.act, on_step)
        return self._rollout

    def recent(self) -> dict[str, Metrics]:
        return {name: _recent(runner) for name, runner in zip(self.names, self.runners, strict=True)}

    def latest(self) -> dict[str, Metrics]:
        each = zip(self.names, self.runners, strict=True)
        return {name: _recent(runner) | last_return(list(runner.statistics.recent_returns)) for name, runner in each}

    def try_acting(self) -> None:
        for runner, actor in zip(self.runners, self.actors, strict=True):
            try_act(runner, actor)

    def parts(self) -> dict[str, Any]:
        return parts_of(self.runners)

    def facts(self) -> dict[str, Any]:
        return {
            "backend": by_task(self.names, [type(runner.envs).__name__ for runner in self.runners]),
            "environments_not_restored": by_task(self.names, [runner.not_restored for runner in self.runners]),
        }

    def not_restored(self) -> Mapping[str, tuple[list[int], int]]:
        runners = zip(self.names, self.runners, strict=True)
        return {name: (runner.not_restored, runner.num_envs) for name, runner in runners if runner.not_restored}

    def spaces_json(self) -> dict[str, Any]:
        spaces: dict[str, Any] = by_task(self.names, [spaces_to_json(runner) for runner in self.runners])
        return spaces

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # if one fails, the others are closed nevertheless
            for runner in self.runners:
                closing.callback(runner.close)


def fill(rollout: Rollout, runner: EnvRunner, act: Act, on_step: Callable[[int], None]) -> int:
    """Begin the rollout anew and step until it is full. Gives the env steps, as `on_step` gets them so far."""
    rollout.reset()
    env_steps = 0
    while not rollout.full:
        rollout.add(runner.step(act))
        env_steps += runner.live_steps
        on_step(env_steps)
    return env_steps


def try_act(runner: EnvRunner, actor: Actor) -> Decision:
    """A decision that nothing follows from: see Source.try_acting."""
    return actor.act(runner.obs, runner.memory, explore=True, rng=np.random.default_rng(0))


def by_task(names: Sequence[str], values: Sequence[Any]) -> Any:
    """The only value, or the values by task."""
    return values[0] if len(values) == 1 else dict(zip(names, values, strict=True))


def num_saved_envs(runner: State) -> int:
    """The environments of a task, from the part `runner` of a checkpoint."""
    if "num_envs" in runner:  # of an actor pool
        return int(runner["num_envs"])
    return len(runner["first"] if "first" in runner else runner["0"]["first"])


def parts_of(runners: Sequence[EnvRunner]) -> dict[str, Any]:
    """See Source.parts."""
    normalizers = {str(i): r.normalizer for i, r in enumerate(runners) if r.normalizer is not None}
    states = {str(i): RunnerState(r) for i, r in enumerate(runners)}
    parts: dict[str, dict[str, Any]] = {"normalizer": normalizers, "runner": states}  # loaded in this order
    if len(runners) == 1:
        return {name: part["0"] for name, part in parts.items() if part}
    return {name: Together(part) for name, part in parts.items() if part}


class LaggingSource(LocalSource):
    """Environments of one task, played by an actor of its own, with the learner's weights of `lag` updates ago."""

    def __init__(
        self, names: Sequence[str], runners: Sequence[EnvRunner], *, lag: int, make_actor: Callable[..., Actor]
    ) -> None:
        super().__init__(names, runners)
        self.make_actor = make_actor
        self.published = PublishedWeights(lag + 1)

    def attach(self, actors: Sequence[Actor], fields: Sequence[Fields]) -> None:
        """The given actor is the learner's: its weights change with each update."""
        (self.newest,), (spaces,) = actors, self.spaces
        with torch.random.fork_rng(devices=[]):  # its first weights are not used
            lagging = self.make_actor(spaces, self.newest.hp, device=self.newest.device)
        super().attach([lagging], fields)

    def use(self, hp: Any) -> None:
        super().use(hp)
        self.newest.hp = hp

    def collect(self, on_step: Callable[[int], None]) -> Rollout:
        self.actors[0].load(self.published.add(self.newest))
        return super().collect(on_step)

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "published": self.published}


class PublishedWeights:
    """The newest weights of a learner, up to `size` versions."""

    def __init__(self, size: int) -> None:
        self.versions: deque[Weights] = deque(maxlen=size)

    def add(self, actor: Actor) -> Weights:
        """Copy the actor's weights, if they are new. Returns the oldest."""
        if not self.versions or self.versions[-1].version != actor.version:
            self.versions.append(actor.weights())
        return self.versions[0]

    def state_dict(self) -> State:
        return {"versions": [weights._asdict() for weights in self.versions]}

    def state_pattern(self) -> State:
        return {"versions": [dict]}

    def load_state_dict(self, state: State) -> None:
        self.versions.clear()
        self.versions.extend(Weights(**weights) for weights in state["versions"])


def make_runner(recipe: Recipe, task: Task, num_envs: int, seed: int) -> EnvRunner:
    """The training environments of a task."""
    how: dict[str, Any] = {"env_kwargs": task.env_kwargs, "training": True, "log_info": task.log_info}
    envs = make_envs(task.env_id, num_envs=num_envs, seed=seed, **how)
    try:
        return EnvRunner(
            envs,
            seed=seed,
            box_actions=recipe.box_actions,
            normalizer=make_normalizer(task.env_kwargs, envs.single_observation_space, num_envs),
            clip_reward=clips_reward(task.env_kwargs),
            raw_steps=recipe.raw_steps,
        )
    except BaseException:
        envs.close()
        raise


def open_local(config: TrainConfig, recipe: Recipe, *, simulate_lag: int = 0) -> LocalSource:
    """The training environments of every task, in this process."""
    runners: list[EnvRunner] = []
    with contextlib.ExitStack() as closing:
        for number, task in enumerate(config.tasks):
            runner = make_runner(recipe, task, config.num_envs, seed_of(config.seed, "environments", number))
            closing.callback(runner.close)
            runners.append(runner)
        closing.pop_all()
    names = [task.env_id for task in config.tasks]
    if simulate_lag:
        return LaggingSource(names, runners, lag=simulate_lag, make_actor=recipe.actor)
    return LocalSource(names, runners)


def _recent(runner: EnvRunner) -> Metrics:
    own = runner.statistics  # copied at once, because another thread may add to it meanwhile
    return episode_means(list(own.recent_returns), list(own.recent_lengths), list(own.recent_infos))


def last_return(returns: Sequence[float]) -> Metrics:
    return {"train_return_last": returns[-1]} if returns else {}


def episode_means(
    returns: Collection[float], lengths: Collection[int], infos: Collection[Mapping[str, float]]
) -> Metrics:
    """Of the last finished episodes of training."""
    return {
        "train_return_mean": fmean(returns) if returns else math.nan,
        "train_length_mean": fmean(lengths) if lengths else math.nan,
        **info_means("train", infos),
    }
