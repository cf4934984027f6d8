"""The config of a run: the keys of the YAML file, and errors that name line, key and remedy."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from rl_training.yaml_text import YamlError, read_yaml

C = TypeVar("C", bound=type)
MOST_STEPS = 10**15  # env steps of a run or an interval: 30 years at a million steps a second
MOST_ENVS = 2**16
MOST_TASKS = 128
LONGEST_ENV_ID = 200
MOST_PROBLEMS = 10  # shown by an error, which counts the others
MOST_SHOWN = 300  # characters of a name or a value in an error


def _number(value: Any) -> Any:
    """Refuse true and "0.3", which pydantic would convert to numbers."""
    if isinstance(value, bool | str | bytes):
        raise ValueError("should be a number")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError("should be a number below 1e308")
    return value


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_number)]  # pydantic also accepts 1e6, a float without a fraction
# Bounds stand before the validator: only there do they reach the JSON Schema.
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS), BeforeValidator(_number)]
Interval = Annotated[int, Field(ge=0, le=MOST_STEPS), BeforeValidator(_number)]


def _unless_none(value: Any, check: Callable[[Any], Any]) -> Any:
    return None if value is None else check(value)


# Declared as int, because a run replaces None by the default of its algorithm before it reads the number.
NumEnvs = Annotated[int, Field(ge=1, le=MOST_ENVS), BeforeValidator(_number), WrapValidator(_unless_none)]


def _env_ids(value: Any) -> Any:
    """Check for one id or a list of ids here, because pydantic would report both branches of the union."""
    ids = [value] if isinstance(value, str) else value
    if not isinstance(ids, list) or not ids or not all(isinstance(name, str) for name in ids):
        raise ValueError("should be the id of an environment, or a list of ids")
    if any(len(name) > LONGEST_ENV_ID for name in ids):
        raise ValueError(f"should be at most {LONGEST_ENV_ID} characters long")
    twice = next((name for name, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is given twice: each environment is one task")
    return value


IdList = Annotated[list[str], Field(min_length=1, max_length=MOST_TASKS, json_schema_extra={"uniqueItems": True})]
EnvIds = Annotated[str | IdList, BeforeValidator(_env_ids)]


class Options(BaseModel):
    """A mapping in the YAML file that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AtariOptions(Options):
    """Atari preprocessing (Machado et al., 2018; the constants of Mnih et al., 2015)."""

    noop_max: Int = Field(30, ge=0, le=10_000, description="maximum number of random no-op actions after a reset")
    frame_skip: Int = Field(4, ge=1, le=1_000, description="frames per action; the last two are max-pooled")
    screen_size: Int = Field(84, ge=16, le=1_024, description="height and width of the image in pixels")
    grayscale: StrictBool = Field(True, description="grayscale images (1 channel) instead of RGB (3 channels)")
    episodic_life: StrictBool = Field(True, description="training only: a lost life ends the episode, not the game")
    fire_reset: StrictBool = Field(True, description="press FIRE after a reset in games that wait for it")
    clip_reward: StrictBool = Field(True, description="training only: replace rewards by their sign")
    sticky: Float = Field(0.0, ge=0, le=1, description="sticky actions: probability of repeating the last action")


class Wrappers(Options):
    """Preprocessing between the environment and the algorithm, innermost first."""

    time_limit: Int | None = Field(
        None, ge=1, le=MOST_STEPS, description="truncate episodes after this many steps; replaces the registered limit"
    )
    action_repeat: Int | None = Field(
        None, ge=1, le=1_000, description="environment steps per action, which together count as one step"
    )
    atari: StrictBool | AtariOptions = Field(False, description="Atari preprocessing; true: with its defaults")
    frame_stack: Int | None = Field(
        None, ge=1, le=1_024, description="stack this many observations on a new first axis"
    )
    normalize_observation: StrictBool | None = Field(
        None,
        description="normalize by running mean and variance, clip to ±10; "
        "default: for a2c and recurrent_ppo, not on Atari",
    )
    normalize_reward: StrictBool | None = Field(
        None,
        description="divide by the return's deviation; "
        "default: ppo, a2c, trpo, ppg, recurrent_ppo, impala, appo; not on Atari",
    )


Backend = Literal["auto", "sync", "async", "vector", "ale", "envpool"]


class EnvOptions(Options):
    """The keys of `env_kwargs` for this package; all others go to `gymnasium.make`."""

    backend: Backend = Field("auto", description="how environments are stepped; auto: the fastest suitable backend")
    wrappers: Wrappers = Field(default_factory=Wrappers, description="preprocessing, see the table of wrappers")
    env_timeout: Float = Field(
        600.0, gt=0, description="backend async: seconds after which an environment that does not answer is an error"
    )

    @classmethod
    def of(cls, env_kwargs: Mapping[str, Any]) -> EnvOptions:
        return cls.model_validate({key: value for key, value in env_kwargs.items() if key in cls.model_fields})


class Execution(Options):
    """Where the actors play, and how far they may be behind the learner."""

    backend: Literal["serial", "process", "ray"] = Field(
        "serial", description="serial: in the learner's process, in turns; process, ray: actors beside the learner"
    )
    simulate_lag: Int = Field(
        0,
        ge=0,
        le=10_000,
        description="serial: act with the weights of so many updates ago, to measure what lag does",
    )
    actors: Int = Field(2, ge=1, le=4_096, description="processes that play; num_envs is shared out among them")
    queue: Int | None = Field(
        None,
        ge=0,
        le=65_536,
        description="rollouts that may wait for the learner, the oldest is next; default: 2 for each actor; "
        "0: in lock-step, actors wait while the learner learns",
    )
    when_full: Literal["wait", "drop"] = Field(
        "wait", description="full queue: actors wait, or the oldest rollout is dropped and counted"
    )
    max_policy_lag: Int = Field(
        20, ge=0, le=MOST_STEPS, description="rollouts of weights that are more updates old are dropped and counted"
    )
    on_actor_death: Literal["restart", "fail"] = Field(
        "restart", description="restart: unless it dies three times within 100 rollouts; fail: the run ends"
    )
    actor_timeout: Float = Field(
        300.0, gt=0, description="seconds for a rollout after which an actor counts as hanging, and is killed"
    )
    actor_device: str = Field("cpu", description="device of the actors' networks, as for `device` but not auto")
    address: str | None = Field(
        None, description="ray: the cluster, or auto for the one of this machine; default: Ray is started here"
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Execution:
        for key in sorted(self.model_fields_set - {"backend"}):
            only = {"simulate_lag": ("serial",), "address": ("ray",)}.get(key, ("process", "ray"))
            if self.backend not in only:
                raise ValueError(f"{key} has no effect with backend: {self.backend}, only with {' or '.join(only)}")
        if self.queue == 0 and self.when_full == "drop":
            raise ValueError("when_full: drop has no effect with queue: 0, where actors wait for the learner")
        return self

    @property
    def queue_size(self) -> int:
        return 2 * self.actors if self.queue is None else self.queue

    @classmethod
    def of(cls, execution: Mapping[str, Any]) -> Execution:
        try:
            return cls.model_validate(dict(execution))
        except ValidationError as error:
            raise ConfigError(problems_of(error, ("execution",), cls.model_fields)) from None


def raises_config_errors(config: C) -> C:
    """Make the class raise a ConfigError, as for a YAML file with the same mistake, instead of pydantic's error."""
    validate = config.__init__  # type: ignore[misc]

    @functools.wraps(validate)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validate(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError(problems_of(error, (), config_fields())) from None

    config.__init__ = init  # type: ignore[misc]
    return config


@raises_config_errors
@dataclass(frozen=True, kw_only=False, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """The config of one training run; its fields are the keys of the YAML file."""

    algo: str = Field(description="name of the algorithm; `rl-training algorithms` lists them")
    env_id: EnvIds = Field(description="Gymnasium id or module:id; a list of ids if the algorithm trains several tasks")
    total_timesteps: Steps = Field(description="env steps to train for, counted over all environments and tasks")
    output_dir: Path = Field(default=Path("runs"), description="folder in which the run folder is created")
    seed: Int = Field(default=0, ge=0, description="random seed of environments, networks and sampling")
    num_envs: NumEnvs = Field(  # type: ignore[assignment]
        default=None,
        description="number of parallel environments, for each task; default: 8, or what the algorithm prefers",
    )
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, cuda:<index> or mps; auto: cuda, if available, for conv networks, else cpu",
    )
    eval_interval: Interval = Field(default=0, description="env steps between evaluations; 0: only at the end")
    eval_episodes: Int = Field(default=10, ge=1, le=1_000_000, description="episodes per evaluation, for each task")
    checkpoint_interval: Interval = Field(
        default=50_000, description="env steps between checkpoints; 0: only at the end"
    )
    keep_checkpoints: Int = Field(default=3, ge=0, description="newest checkpoints to keep besides the best; 0: all")
    log_interval: Steps = Field(default=2_000, description="env steps between log lines")
    num_threads: Annotated[Int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="PyTorch CPU threads; auto: 1, or all cores for large networks on a CPU"
    )
    tags: list[str] = Field(default_factory=list, description="tags saved with the run and sent to Weights & Biases")
    algo_kwargs: dict[str, Any] = Field(default_factory=dict, description="hyperparameters of the algorithm")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="environment arguments; wrappers and backend")
    eval_env_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="replace keys of env_kwargs in evaluation"
    )
    execution: dict[str, Any] = Field(default_factory=dict, description="actors of impala and appo, see below")
    callbacks: dict[str, Any] = Field(default_factory=dict, description="early_stopping and time_limit, see below")
    wandb: StrictBool | dict[str, Any] = Field(
        default=False, description="log to Weights & Biases too; a mapping is passed to wandb.init"
    )
    schedule_horizon: Int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="env steps that schedules run over; default: total_timesteps"
    )

    @property
    def uses_atari(self) -> bool:
        """Whether a task has Atari preprocessing, for which some hyperparameters have other defaults."""
        return any(EnvOptions.of(task.env_kwargs).wrappers.atari for task in self.tasks)

    @property
    def horizon(self) -> int:
        return self.schedule_horizon or self.total_timesteps

    @property
    def tasks(self) -> list[Task]:
        return tasks_of(self.env_id, self.env_kwargs, self.eval_env_kwargs)


class Task(NamedTuple):
    """One environment of a run, and its arguments."""

    env_id: str
    env_kwargs: dict[str, Any]
    eval_env_kwargs: dict[str, Any]  # all arguments in evaluation, those of env_kwargs included


def tasks_of(env_id: str | list[str], env_kwargs: Mapping[str, Any], eval_env_kwargs: Mapping[str, Any]) -> list[Task]:
    """With a list of ids, a key of the kwargs that is one of them holds arguments for that task alone."""
    several = [] if isinstance(env_id, str) else env_id

    def own(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
        common = {key: value for key, value in kwargs.items() if key not in several}
        return common | (dict(kwargs.get(name, {})) if name in several else {})

    return [
        Task(name, own(env_kwargs, name), own(env_kwargs, name) | own(eval_env_kwargs, name))
        for name in several or [str(env_id)]
    ]


@functools.lru_cache
def config_fields() -> dict[str, FieldInfo]:
    """The fields of TrainConfig, with their descriptions and bounds."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    fields = dataclasses.fields(TrainConfig)
    return {f.name: FieldInfo.from_annotated_attribute(hints[f.name], f.default) for f in fields}


class Problem(NamedTuple):
    """One mistake in a config, and the path of its key."""

    path: tuple[str | int, ...]
    message: str


class InputError(ValueError):
    """An error in the user's input. The message names it and the remedy, and needs no traceback."""


class MissingPackage(InputError, ImportError):
    """An optional package is needed and not installed."""


class ConfigError(InputError):
    """All mistakes in a config, each with its line if it was read from a file."""

    def __init__(self, problems: Iterable[Problem], document: Document | None = None) -> None:
        self.problems = list(problems)
        lines = [_describe(problem, document) for problem in self.problems[:MOST_PROBLEMS]]
        more = len(self.problems) - len(lines)
        super().__init__("\n".join([*lines, f"and {more:,} more"] if more else lines))

    @classmethod
    def of(cls, message: str, *path: str | int) -> ConfigError:
        """One mistake."""
        return cls([Problem(path, message)])


def _describe(problem: Problem, document: Document | None) -> str:
    key = cut(".".join(map(_printable, problem.path)))
    where = document.place(problem.path) if document else ""
    return f"{where}{key + ': ' if key else ''}{cut(problem.message, 3 * MOST_SHOWN)}"


def _printable(part: Any) -> str:
    """A key on one line."""
    text = shown(part) if not isinstance(part, str) else part
    return text if text.isprintable() else repr(text)


def cut(text: str, most: int = MOST_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class _Repr(reprlib.Repr):
    """A short `repr` of large or deep values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, MOST_SHOWN // 3, MOST_SHOWN // 3
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 10

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**30 else f"a whole number of {x.bit_length():,} bits"


def shown(value: Any) -> str:
    """`repr(value)` for a message, cut if it is long."""
    return cut(_Repr().repr(value))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'clip_coef'?`, or an empty text."""
    names = {k.lower(): k for k in known}
    guesses = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[guesses[0]]!r}?" if guesses else ""


def problems_of(
    error: ValidationError, path: tuple[str | int, ...], fields: Mapping[str, FieldInfo], keys: Iterable[str] = ()
) -> list[Problem]:
    """Pydantic's errors as problems under `path`. keys: those of a mapping in which the user may choose them."""
    return [_problem(detail, path, fields, set(keys)) for detail in error.errors(include_url=False)]


def _problem(detail: Any, path: tuple[str | int, ...], fields: Mapping[str, FieldInfo], keys: set[str]) -> Problem:
    unknown = detail["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    *outer, last = detail["loc"] or (None,)
    loc = tuple(p for p in outer if p in keys or not _is_union_branch(p))
    # A key of the user's may have the form of a union branch.
    if last is not None and (unknown or last in keys or not _is_union_branch(last)):
        loc = (*loc, last)
    pydantic_message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    message = PLAIN_MESSAGES.get(detail["type"], pydantic_message)
    if unknown:
        message = unknown_key(str(loc[-1]), _fields_at(loc[:-1], fields))
    elif detail["type"] in ("missing", "missing_argument"):
        message = "is missing, and has no default"
    elif detail["type"] in ("int_type", "float_type") and isinstance(detail["input"], Mapping):
        message = f"should be a number: it {FIXED}"
    elif not isinstance(detail["input"], Mapping):  # a whole mapping would hide the message
        message = f"{message}, got {shown(detail['input'])}"
    return Problem((*path, *loc), message)


FIXED = "is fixed for the whole run and cannot be scheduled"
SCHEDULE_PARTS = ("_schedule", "_warmup_steps")  # suffixes of the keys that schedule a scalar


def unknown_key(key: str, known: Iterable[str], what: str = "key") -> str:
    """The message for a key that is not `known`; a suffix for schedules shows that its stem cannot be scheduled."""
    known = list(known)
    stems = [key.removesuffix(part) for part in SCHEDULE_PARTS if key.endswith(part)]
    if stems and stems[0] in known:
        return f"{stems[0]} {FIXED}"
    return f"unknown {what}{nearest(key, known)}"


PLAIN_MESSAGES = {  # by the type of pydantic's error
    "model_type": "should be a mapping",
    "dict_type": "should be a mapping",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "path_type": "should be a path",
    "bool_type": "should be true or false",
    "int_type": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
}


def _is_union_branch(part: str | int) -> bool:
    """Pydantic puts the branch of a union into an error's location: `AtariOptions`, `int`, `literal['auto']`."""
    types = ("int", "float", "bool", "str", "none")
    return isinstance(part, str) and (part in types or bool(re.search(r"[A-Z\[(]", part)))


def _fields_at(loc: Iterable[str | int], fields: Mapping[str, FieldInfo]) -> Mapping[str, FieldInfo]:
    for part in loc:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        options = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, Options)]
        fields = options[0].model_fields if options else {}
    return fields


class Document(NamedTuple):
    """A YAML file: its data, and the line of each key."""

    name: str
    data: dict[str, Any]
    lines: dict[tuple[str | int, ...], int]
    replaced: dict[tuple[str | int, ...], str]  # by key: the command-line option that replaced its value

    def place(self, path: tuple[str | int, ...]) -> str:
        """`configs/ppo/cartpole.yaml, line 9: ` for the key, or for the innermost mapping around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.replaced:
                return f"{cut(self.replaced[path[:end]])}: "
            if path[:end] in self.lines:
                return f"{self.name}, line {self.lines[path[:end]]}: "
        return f"{self.name}: "


def parse_value(text: str, name: str) -> Any:
    """A value of the command line, as YAML."""
    return _parse(text, name)[0]


def _parse(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """The data and its YAML node."""
    try:
        return read_yaml(text)
    except YamlError as error:
        line = f", line {error.line}" if error.line else ""
        raise ConfigError.of(f"{cut(name)}{line}: {error.problem}") from error


def read_document(text: str, name: str) -> Document:
    """Parse a YAML text that is empty or a mapping."""
    data, node = _parse(text, name)
    data = {} if node is None else data
    if not isinstance(data, dict):
        raise ConfigError.of(f"{name}: a config is a mapping of keys, got {type(data).__name__}")
    lines: dict[tuple[str | int, ...], int] = {}
    _note_lines(node, (), lines, set())
    return Document(name, data, lines, {})


def _note_lines(
    node: yaml.Node | None, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], seen: set[int]
) -> None:
    if id(node) in seen:  # an alias, which has the lines of its anchor
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key.start_mark, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(i, value.start_mark, value) for i, value in enumerate(node.value)]
    else:
        return
    for name, mark, value in children:
        place = (*path, name)
        lines[place] = mark.line + 1
        _note_lines(value, place, lines, seen)
