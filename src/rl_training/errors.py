"""Errors in what the user gives, and the YAML files and values that they name by line and key."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rl_training.yaml_text import YamlError, read_yaml

MOST_PROBLEMS = 10  # shown by an error, which counts the others
MOST_SHOWN = 300  # characters of a name or a value in an error


class Problem(NamedTuple):
    """One mistake in a config, and the path of its key."""

    path: tuple[str | int, ...]
    message: str


class InputError(ValueError):
    """An error in the user's input. The message names it and the remedy, and needs no traceback."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, foreign or too new."""


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
        options = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
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
