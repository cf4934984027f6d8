"""What to train, on what, for how long: the shape of the YAML file, and errors that name line, key and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo


def _number(value: Any) -> Any:
    """YAML's true and "0.3" are not numbers, though pydantic would take them for one."""
    if isinstance(value, bool | str):
        raise ValueError("should be a number")
    return value


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_number)]  # 1e6 is an int here: pydantic takes floats without a fraction


def _env_ids(value: Any) -> Any:
    """One id, or a list of several: one message for whatever else it is."""
    ids = [value] if isinstance(value, str) else value
    if not isinstance(ids, list) or not ids or not all(isinstance(name, str) for name in ids):
        raise ValueError("should be the id of an environment, or a list of ids")
    twice = [name for name in dict.fromkeys(ids) if ids.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands twice: each environment is one task")
    return value


IdList = Annotated[list[str], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
EnvIds = Annotated[str | IdList, BeforeValidator(_env_ids)]


class Options(BaseModel):
    """A mapping in the YAML file whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AtariOptions(Options):
    """Atari preprocessing (Machado et al., 2018; the constants of Mnih et al., 2015)."""

    noop_max: Int = Field(30, ge=0, description="random no-ops at the start of a game, at most")
    frame_skip: Int = Field(4, ge=1, description="frames an action is held; the last two are max-pooled")
    screen_size: Int = Field(84, ge=16, description="side of the square image")
    grayscale: StrictBool = Field(True, description="one channel instead of three")
    episodic_life: StrictBool = Field(True, description="training only: a lost life ends the episode, not the game")
    fire_reset: StrictBool = Field(True, description="press FIRE after a reset where the game waits for it")
    clip_reward: StrictBool = Field(True, description="training only: learn from the sign of the reward")
    sticky: Float = Field(0.0, ge=0, le=1, description="probability that the previous action is repeated")


class Wrappers(Options):
    """What stands between the environment and the algorithm, innermost first."""

    time_limit: Int | None = Field(
        None, ge=1, description="truncate after this many steps (replaces the registered limit)"
    )
    action_repeat: Int | None = Field(
        None, ge=1, description="each action lasts so many of the environment's steps; a step is then all of them"
    )
    atari: StrictBool | AtariOptions = Field(False, description="Atari preprocessing; true for the defaults")
    frame_stack: Int | None = Field(None, ge=1, description="stack this many observations along a new first axis")
    normalize_observation: StrictBool = Field(False, description="by running mean and variance, clipped to +-10")
    normalize_reward: StrictBool = Field(
        False, description="by the running deviation of the discounted return, clipped to +-10"
    )


Backend = Literal["auto", "sync", "async", "vector", "ale", "envpool"]


class EnvOptions(Options):
    """The keys of `env_kwargs` that are ours; all others go to `gymnasium.make`."""

    backend: Backend = Field("auto", description="how the environments are stepped; auto: the fastest that is right")
    wrappers: Wrappers = Field(default_factory=Wrappers, description="preprocessing, see the table of wrappers")
    env_timeout: Float = Field(
        600.0, gt=0, description="backend async: seconds after which an environment that does not answer is an error"
    )


@dataclass(frozen=True, kw_only=False, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """One training run. Keys of the YAML file map one to one."""

    algo: str = Field(description="name of the algorithm, see `rl-training algorithms`")
    env_id: EnvIds = Field(
        description="id of a registered Gymnasium environment, or module:id; a list where the algorithm takes several"
    )
    total_timesteps: Int = Field(ge=1, description="env steps to train for, counted over all environments and tasks")
    output_dir: Path = Field(default=Path("runs"), description="folder in which the run's own folder is made")
    seed: Int = Field(default=0, ge=0, description="decides everything that is random")
    num_envs: Int = Field(default=8, ge=1, description="environments stepped side by side, for each task")
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, cuda:1, mps; auto: cuda where there is one and it pays, for images and towers",
    )
    eval_interval: Int = Field(default=0, ge=0, description="env steps between evaluations; 0: only at the end")
    eval_episodes: Int = Field(default=10, ge=1, description="episodes per evaluation, of each task")
    checkpoint_interval: Int = Field(
        default=50_000, ge=0, description="env steps between checkpoints; 0: only at the end"
    )
    keep_checkpoints: Int = Field(default=3, ge=0, description="newest checkpoints kept beside the best; 0: all")
    log_interval: Int = Field(default=2_000, ge=1, description="env steps between lines of the log")
    num_threads: Annotated[Int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        default="auto", description="torch threads; auto: 1 for small networks on a CPU"
    )
    tags: list[str] = Field(default_factory=list, description="words to find the run again by")
    algo_kwargs: dict[str, Any] = Field(default_factory=dict, description="the algorithm's hyperparameters")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="to the environment; and wrappers, backend")
    eval_env_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keys that stand in for those of env_kwargs where the policy is evaluated"
    )
    callbacks: dict[str, Any] = Field(default_factory=dict, description="early_stopping, time_limit")
    wandb: StrictBool | dict[str, Any] = Field(
        default=False, description="log to Weights & Biases too; a mapping goes to its init"
    )
    schedule_horizon: Int | None = Field(
        default=None, ge=1, description="env steps that schedules run over; default: all"
    )

    @property
    def horizon(self) -> int:
        return self.schedule_horizon or self.total_timesteps

    @property
    def tasks(self) -> list[Task]:
        return tasks_of(self.env_id, self.env_kwargs, self.eval_env_kwargs)


class Task(NamedTuple):
    """One environment of a run, and what it is made with."""

    env_id: str
    env_kwargs: dict[str, Any]
    eval_env_kwargs: dict[str, Any]  # the whole of what evaluation makes it with


def tasks_of(env_id: str | list[str], env_kwargs: Mapping[str, Any], eval_env_kwargs: Mapping[str, Any]) -> list[Task]:
    """With a list of ids, a key of the kwargs that is one of them holds what is for that task alone."""
    several = [] if isinstance(env_id, str) else env_id

    def own(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
        common = {key: value for key, value in kwargs.items() if key not in several}
        return common | (dict(kwargs.get(name, {})) if name in several else {})

    return [
        Task(name, own(env_kwargs, name), own(env_kwargs, name) | own(eval_env_kwargs, name))
        for name in several or [str(env_id)]
    ]


def config_fields() -> dict[str, FieldInfo]:
    return TrainConfig.__pydantic_fields__  # type: ignore[attr-defined, no-any-return]


class Problem(NamedTuple):
    """One thing that is wrong with a config, and where."""

    path: tuple[str | int, ...]
    message: str


class InputError(ValueError):
    """Something the user gave does not fit; the message names it and the remedy, and needs no traceback."""


class MissingPackage(InputError, ImportError):
    """Something optional is needed that is not installed."""


class ConfigError(InputError):
    """Everything that is wrong with a config, at once; each with file and line where there are any."""

    def __init__(self, problems: Iterable[Problem], document: Document | None = None) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(_describe(problem, document) for problem in self.problems))


def _describe(problem: Problem, document: Document | None) -> str:
    key = ".".join(map(str, problem.path))
    where = document.place(problem.path) if document else ""
    return f"{where}{key + ': ' if key else ''}{problem.message}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'clip_coef'?`, or nothing."""
    names = {k.lower(): k for k in known}
    guesses = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[guesses[0]]!r}?" if guesses else ""


def problems_of(error: ValidationError, path: tuple[str | int, ...], fields: Mapping[str, FieldInfo]) -> list[Problem]:
    """Pydantic's errors in our words, under `path`."""
    return [_problem(detail, path, fields) for detail in error.errors()]


def _problem(detail: Any, path: tuple[str | int, ...], fields: Mapping[str, FieldInfo]) -> Problem:
    unknown = detail["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    *outer, last = detail["loc"] or (None,)
    loc = tuple(p for p in outer if not _is_union_branch(p))
    if last is not None and (unknown or not _is_union_branch(last)):  # the user's own word may look like a branch
        loc = (*loc, last)
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    if unknown:
        known = _fields_at(loc[:-1], fields)
        message = f"unknown key{nearest(str(loc[-1]), known)}"
    elif detail["type"] in ("missing", "missing_argument"):
        message = "is missing, and has no default"
    elif not isinstance(detail["input"], Mapping):  # a whole mapping would bury the message
        message = f"{PLAIN_WORDS.get(detail['type'], message)}, got {detail['input']!r}"
    return Problem((*path, *loc), message)


PLAIN_WORDS = {
    "model_type": "should be a mapping",
    "dict_type": "should be a mapping",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "path_type": "should be a path",
    "bool_type": "should be true or false",
}


def _is_union_branch(part: str | int) -> bool:
    """Pydantic names the branch of a union in an error's location: `AtariOptions`, `int`, `literal['auto']`."""
    return isinstance(part, str) and (
        part in ("int", "float", "bool", "str", "none") or bool(re.search(r"[A-Z\[(]", part))
    )


def _fields_at(loc: Iterable[str | int], fields: Mapping[str, FieldInfo]) -> Mapping[str, FieldInfo]:
    for part in loc:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        options = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, Options)]
        fields = options[0].model_fields if options else {}
    return fields


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 3e-4 is a number (YAML 1.1 asks for a dot), a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1  # type: ignore[no-untyped-call]
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} stands twice, first in line {seen[key]}", problem_mark=key_node.start_mark
                )
            if isinstance(key, Hashable):  # super() refuses the others, with their line
                seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class Document(NamedTuple):
    """A YAML file: its data, and the line on which each key stands."""

    name: str
    data: dict[str, Any]
    lines: dict[tuple[str | int, ...], int]
    replaced: dict[tuple[str | int, ...], str]  # what the command line said instead

    def place(self, path: tuple[str | int, ...]) -> str:
        """`configs/ppo/cartpole.yaml, line 9: ` for the key, or for the nearest mapping around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.replaced:
                return f"{self.replaced[path[:end]]}: "
            if path[:end] in self.lines:
                return f"{self.name}, line {self.lines[path[:end]]}: "
        return f"{self.name}: "


def parse_value(text: str, name: str) -> Any:
    """A value from the command line, read as YAML reads it."""
    return _parse(text, name)[0]


def _parse(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """The data and the node it was made from."""
    try:
        loader = _Loader(text)  # a SafeLoader: data only
        node = loader.get_single_node()  # type: ignore[no-untyped-call]
        return (loader.construct_document(node) if node else None), node  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError([Problem((), f"{name}{line}: {error.problem}")]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: !!int abc, 2020-13-45
        raise ConfigError([Problem((), f"{name}: not YAML: {error}")]) from error


def read_document(text: str, name: str) -> Document:
    """Parse YAML with lines; anything but a mapping at the top is an error."""
    data, node = _parse(text, name)
    data = {} if node is None else data
    if not isinstance(data, dict):
        raise ConfigError([Problem((), f"{name}: a config is a mapping of keys, got {type(data).__name__}")])
    lines: dict[tuple[str | int, ...], int] = {}
    _note_lines(node, (), lines, set())
    return Document(name, data, lines, {})


def _note_lines(
    node: yaml.Node | None, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], seen: set[int]
) -> None:
    if id(node) in seen:  # an alias: noted where its anchor stands, and it may contain itself
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
