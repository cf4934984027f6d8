"""Reading YAML within bounds: the size of a text with all aliases expanded is counted before data is built."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

MOST_CHARACTERS = 500_000  # of a text, and of all its scalars with every alias expanded
MOST_NODES = 20_000  # keys, values, lists and mappings, with every alias expanded
MOST_LEVELS = 50  # of nesting; Python's recursion limit is reached at about 300
MOST_DIGITS = 100  # characters of a number: 1:59:59 is a number in YAML, read in quadratic time


class YamlError(ValueError):
    """Text that is not valid YAML; `line` counts from 1, and is None if unknown."""

    def __init__(self, problem: str, line: int | None) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


def read_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """The data and its node; both None if the text is empty."""
    if len(text) > MOST_CHARACTERS:
        raise YamlError(f"more than {MOST_CHARACTERS:,} characters: too long for a config", None)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()  # type: ignore[no-untyped-call]
        return (loader.construct_document(node) if node else None), node  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(str(error.problem), mark.line + 1 if mark else None) from error
    except yaml.YAMLError as error:
        raise YamlError(f"not YAML: {error}", None) from error


class _Loader(yaml.SafeLoader):
    """Builds plain data. 3e-4 is a number (YAML 1.1 demands a dot), and a repeated key is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._characters = self._level = 0
        self._extents: dict[yaml.Node, tuple[int, int, int]] = {}  # nodes, characters and levels inside each node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and count it; an alias counts as much as its anchor."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._nodes, self._characters
        self._level += 1
        self._check_bounds(event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._level -= 1
        if node is None:
            return None
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:  # the anchor is not complete yet
                raise _marked(f"the anchor {event.anchor!r} contains itself", event.start_mark)
            nodes, characters, levels = self._extents[node]
        else:
            inner = self._nodes - before[0], self._characters - before[1]
            own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            nodes, characters, levels = 1, own, 1 + max((self._extents[x][2] for x in _children(node)), default=0)
            self._extents[node] = (inner[0] + nodes, inner[1] + characters, levels)
        self._nodes += nodes
        self._characters += characters
        self._check_bounds(event.start_mark, levels)
        return node

    def _check_bounds(self, mark: Any, levels: int = 0) -> None:
        for what, count, most in (
            ("levels of nesting", self._level + levels, MOST_LEVELS),
            ("keys and values, aliases written out,", self._nodes, MOST_NODES),
            ("characters, aliases written out,", self._characters, MOST_CHARACTERS),
        ):
            if count > most:
                raise _marked(f"more than {most:,} {what} are too many for a config", mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Turn the Python errors that PyYAML raises for invalid scalars (`!!bool 7`, 2020-13-45) into YAML errors."""
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > MOST_DIGITS:
            raise _marked(f"a number of {len(node.value):,} characters; {MOST_DIGITS} are the most", node.start_mark)
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            written = repr(node.value[:50]) if isinstance(node, yaml.ScalarNode) else "this"
            raise _marked(f"{written} is not a valid {kind}", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in seen:
                raise _marked(f"key {key!r} is given twice, first in line {seen[key]}", key_node.start_mark)
            if isinstance(key, Hashable):  # for others, super() raises an error with the line
                seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _marked(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
