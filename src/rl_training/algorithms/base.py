"""What every algorithm is: numbers it declares, something that acts, something that learns, a state to save."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints

import numpy as np

from rl_training.config import InputError
from rl_training.data.replay import Replay
from rl_training.data.rollout import Rollout
from rl_training.types import Decision, Field, Metrics, Observation, Reports, State

T = TypeVar("T")


def scalar(
    default: float | None,
    help: str,
    *,
    low: float = 0.0,
    high: float = math.inf,
    auto: bool = False,
    schedule: Callable[..., dict[str, Any]] | None = None,
    needs: tuple[str, Any] | None = None,
    atari: float | None = None,
) -> Any:
    """Declare a schedulable number with its default, bounds (inclusive) and meaning. None: switched off.

    auto: None is also spelt `auto`, because the algorithm then finds the number itself. schedule: where the config says
    nothing of the number, it takes this schedule, made from the settings that the function's parameters name. needs:
    another hyperparameter and its value without which this one has no effect: it is None then, and an error to give.
    atari: the default with Atari preprocessing, where the published one differs.
    """
    metadata = {"scalar": True, "low": low, "high": high, "help": help, "atari": atari}
    metadata |= {"auto": auto, "schedule": schedule, "needs": needs}
    return dataclasses.field(default=default, metadata=metadata)


def setting(
    default: T,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    needs: tuple[str, Any] | None = None,
    atari: T | None = None,
) -> T:
    """Declare what is fixed for a whole run: sizes, switches, choices (annotated as Literal). The rest: see scalar."""
    metadata = {"scalar": False, "low": low, "high": high, "help": help, "needs": needs, "atari": atari}
    return dataclasses.field(default=default, metadata=metadata)


def scalar_names(hyperparameters: type) -> tuple[str, ...]:
    """The schedulable fields of a Hyperparameters class, in order of declaration."""
    return tuple(f.name for f in dataclasses.fields(hyperparameters) if f.metadata.get("scalar"))


class Algorithm(Protocol):
    hp: Any  # the hyperparameters in force now; the run replaces it as training advances
    gradient_steps: int
    num_parameters: int

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        """Choose actions for N environments; all randomness comes from `rng`, which belongs to the caller."""
        ...

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class OnPolicyAlgorithm(Algorithm, Protocol):
    def extra_fields(self) -> dict[str, Field]:
        """The extras of `act`, which every step holds."""
        ...

    def update(self, rollout: Rollout) -> Metrics:
        """Learn from one rollout [T, N, ...]."""
        ...


class OffPolicyAlgorithm(Algorithm, Protocol):
    def make_replay(self, num_envs: int) -> Replay: ...

    def warm_up(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        """Acts in place of `act` before learning starts."""
        ...

    def learn(self, replay: Replay) -> Reports:
        """Called after every step of the environments: draw what is due, and learn from it."""
        ...


class MultiTaskAlgorithm(Algorithm, Protocol):
    """Learns several tasks at once, which it knows by their numbers. One that has `note_scores(dict[int, float])` is
    told the mean return of every task, by number, after an evaluation."""

    def act(
        self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator, task: int = 0
    ) -> Decision: ...

    def active(self, task: int) -> bool:
        """Whether the task still needs new experience."""
        ...

    def make_replay(self, num_envs: int, *, task: int) -> Replay: ...

    def learn(self, replays: Sequence[Replay]) -> Reports:
        """Called after every step of the active tasks, with the replays of all."""
        ...


@lru_cache
def _types_of(hyperparameters: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field takes."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(hyperparameters).items()}


def checked_scalar(hp: Any, name: str, value: Any) -> float | int | None:
    """A value for the scalar `name` of `hp`, by the rules for values of a config; InputError where it breaks one."""
    field = next(f for f in dataclasses.fields(hp) if f.name == name)
    declared: Any = type(hp)
    types, low, high = _types_of(declared)[name], field.metadata["low"], field.metadata["high"]
    if value is None and type(None) in types:
        return None
    if field.metadata.get("needs") and getattr(hp, field.metadata["needs"][0]) != field.metadata["needs"][1]:
        other, wanted = field.metadata["needs"]
        raise InputError(f"{name} has no effect without {other}: {'auto' if wanted is None else 'true'}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} should be a number, got {value!r}")
    if not low <= value <= high or not math.isfinite(value):
        raise InputError(f"{name} should be a finite number in [{low:g}, {high:g}], got {value}")
    number = float(value)
    if float in types:
        return number
    if not number.is_integer():
        raise InputError(f"{name} should be a whole number, got {value}")
    return int(number)


class hyperparameter:
    """Lets `algorithm.clip_coef` stand for `algorithm.hp.clip_coef`, read or written.

    During a run, a value that is written takes the place of the schedule from then on: see `Controls.take_writes`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, algorithm: Any, owner: type | None = None) -> Any:
        return self if algorithm is None else getattr(algorithm.hp, self.name)

    def __set__(self, algorithm: Any, value: float) -> None:
        algorithm.hp = dataclasses.replace(algorithm.hp, **{self.name: checked_scalar(algorithm.hp, self.name, value)})
        vars(algorithm).setdefault("written", set()).add(self.name)  # also where the value is the one in force


class Tunable:
    """Gives an algorithm an attribute for every scalar of its `Hyperparameters`: `algorithm.clip_coef`, ..."""

    Hyperparameters: ClassVar[type]

    def state_dict(self) -> State:
        raise NotImplementedError

    def state_pattern(self) -> State:
        """What a state that can be loaded looks like: see `compare_state`. Where entries vary, say how."""
        return self.state_dict()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in scalar_names(cls.Hyperparameters) if "Hyperparameters" in vars(cls) else ():
            attribute = hyperparameter()
            attribute.__set_name__(cls, name)
            setattr(cls, name, attribute)
