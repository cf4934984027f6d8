"""The declaration of hyperparameters, and the base class of learners."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, cast, get_args, get_type_hints

import numpy as np

from rl_training.algorithms.optim import Optimizer
from rl_training.errors import InputError
from rl_training.types import State, Weights

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
    atari: float | Callable[..., dict[str, Any]] | None = None,
) -> Any:
    """Declare a schedulable number with its default, bounds (inclusive) and help text. None: switched off.

    auto: None is also spelt `auto`, because the algorithm then chooses the number. schedule: the default schedule, a
    function of the settings that its parameters name. needs: another hyperparameter and its value without which this
    one has no effect: it is then None, and a config that gives it is an error.
    atari: the default with Atari preprocessing, where the published one differs: a number, or a schedule.
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
    """Declare a setting that is fixed for a run: a size, a switch, a choice (annotated as Literal). See `scalar`."""
    metadata = {"scalar": False, "low": low, "high": high, "help": help, "needs": needs, "atari": atari}
    return dataclasses.field(default=default, metadata=metadata)


def inherited(hyperparameters: type, name: str, *, needs: tuple[str, Any]) -> Any:
    """Declare a field of another class again, as one that `needs` another hyperparameter; its help names the value."""
    field = next(f for f in dataclasses.fields(hyperparameters) if f.name == name)
    metadata = {**field.metadata, "needs": needs, "help": f"{needs[1]}: {field.metadata['help']}"}
    return dataclasses.field(default=field.default, metadata=metadata)


def without_effect(needs: tuple[str, Any]) -> str:
    """The error of giving a hyperparameter whose `needs` are not met."""
    other, value = needs
    words = {None: "auto", True: "true", False: "false"}
    return f"has no effect without {other}: {words.get(value, value)}"


def scalar_names(hyperparameters: type) -> tuple[str, ...]:
    """The schedulable fields of a Hyperparameters class, in order of declaration."""
    return tuple(f.name for f in dataclasses.fields(hyperparameters) if f.metadata.get("scalar"))


@lru_cache
def _types_of(hyperparameters: type) -> dict[str, tuple[Any, ...]]:
    """The accepted types of each field."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(hyperparameters).items()}


def checked_scalar(hp: Any, name: str, value: Any) -> float | int | None:
    """The value for the scalar `name` of `hp`, checked like a value of a config. Raises InputError."""
    field = next(f for f in dataclasses.fields(hp) if f.name == name)
    declared: Any = type(hp)
    types, low, high = _types_of(declared)[name], field.metadata["low"], field.metadata["high"]
    if value is None and type(None) in types:
        return None
    if field.metadata.get("needs") and getattr(hp, field.metadata["needs"][0]) != field.metadata["needs"][1]:
        raise InputError(f"{name} {without_effect(field.metadata['needs'])}")
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
    """The attribute `learner.clip_coef` reads and writes `learner.hp.clip_coef`.

    During a run a written value replaces the schedule: see `Controls.take_writes`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, learner: Any, owner: type | None = None) -> Any:
        return self if learner is None else getattr(learner.hp, self.name)

    def __set__(self, learner: Any, value: float) -> None:
        learner.hp = dataclasses.replace(learner.hp, **{self.name: checked_scalar(learner.hp, self.name, value)})
        vars(learner).setdefault("written", set()).add(self.name)  # even if the value is unchanged


class Learner:
    """Optimizers and the current hyperparameters. The learner shares the network of its actor.

    Each scalar of a subclass's `Hyperparameters` becomes an attribute: `learner.clip_coef`, ... On-policy learners have
    `update(rollout)`, replay-based learners `learn(replay)`.
    """

    Hyperparameters: ClassVar[type]
    hp: Any  # the current hyperparameters: the run replaces them as training advances
    gradient_steps: int = 0

    def __init__(self, actor: Any, hp: Any, *, rng: np.random.Generator) -> None:
        self.actor, self.hp, self.rng, self.device = actor, hp, rng, actor.device
        self.num_parameters: int = actor.num_parameters
        self.optimizers: dict[str, Optimizer] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in scalar_names(cls.Hyperparameters) if "Hyperparameters" in vars(cls) else ():
            setattr(cls, name, hyperparameter(name))

    def weights(self) -> Weights:
        """The actor's weights, for actors in other processes."""
        return cast(Weights, self.actor.weights())

    def state_dict(self) -> State:
        """The state of the learner without that of its actor."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "rng": self.rng.bit_generator.state,
            "gradient_steps": self.gradient_steps,
        }

    def state_pattern(self) -> State:
        """The pattern of loadable states, for `compare_state`. Override it where entries vary."""
        return self.state_dict()

    def load_state_dict(self, state: State) -> None:
        """To be called after the actor's."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.rng.bit_generator.state = state["rng"]
        self.gradient_steps = state["gradient_steps"]
