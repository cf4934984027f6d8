"""Types as a config has to give them: pydantic would take `true` and "7" for numbers."""

from __future__ import annotations

from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, StrictBool, TypeAdapter, ValidationError

from rl_training.config import Float, Int


def accepts(hint: Any, value: Any) -> bool:
    try:
        adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


def type_name(hint: Any) -> str:
    """`float | None`, `tuple[int, ...]`, `rmsprop, adam` (the choices of a Literal)."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


@lru_cache
def adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(strict(hint))


def strict(hint: Any) -> Any:
    """The type as a config has to give it: true and "7" are not numbers, 1 is not true, and only a list is a list."""
    leaves = {int: Int, float: Float, bool: StrictBool}
    if get_origin(hint) is Literal or (hint not in leaves and not get_args(hint)):
        return hint
    if hint in leaves:
        return leaves[hint]
    arguments = tuple(each if each is Ellipsis else strict(each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        return Annotated[tuple[arguments], BeforeValidator(_list)]  # type: ignore[valid-type]
    return Union[arguments] if get_origin(hint) in (Union, UnionType) else get_origin(hint)[arguments]  # noqa: UP007


def _list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("should be a list")
    return value
