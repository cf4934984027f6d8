"""The config described to machines (JSON Schema, for editors) and to people (a reference in Markdown)."""

from __future__ import annotations

import math
from typing import Any, Union

from pydantic import TypeAdapter

from rl_training.config import AtariOptions, EnvOptions, Options, TrainConfig, Wrappers, config_fields
from rl_training.runtime.callbacks import CallbackOptions, EarlyStoppingOptions, TimeLimitOptions
from rl_training.runtime.controls import PARTS, Field, fields_of, names_of
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.schedules import KINDS
from rl_training.runtime.strict_types import type_name

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """A schema that completes and checks a whole YAML file, hyperparameters of the chosen algorithm included."""
    root = TypeAdapter(TrainConfig).json_schema()
    definitions = root.setdefault("$defs", {})
    definitions |= _schedule_definitions()
    mappings: dict[str, Any] = {"env_kwargs": EnvOptions, "eval_env_kwargs": EnvOptions, "callbacks": CallbackOptions}
    for key, model in mappings.items():
        schema = TypeAdapter(model).json_schema()
        definitions |= schema.pop("$defs", {})
        schema["additionalProperties"] = model is EnvOptions  # all other keys go to gymnasium.make, or are ids of tasks
        root["properties"][key] = schema
    root["properties"]["algo"] = {"enum": list(ALGORITHMS), "description": config_fields()["algo"].description}
    for algo, entry in ALGORITHMS.items():
        definitions[algo] = _kwargs_schema(entry.recipe.hyperparameters)
    root["allOf"] = [
        {
            "if": {"properties": {"algo": {"const": algo}}},
            "then": {"properties": {"algo_kwargs": {"$ref": f"#/$defs/{algo}"}}},
        }
        for algo in ALGORITHMS
    ]
    return {"$schema": SCHEMA_DIALECT, **root, "title": "rl_training config"}


def _schedule_definitions() -> dict[str, Any]:
    any_kind: Any = Union[tuple(KINDS.values())]  # noqa: UP007 - built from a table
    kinds = TypeAdapter(any_kind).json_schema()
    definitions: dict[str, Any] = kinds.pop("$defs")
    for name, cls in KINDS.items():
        schema = definitions[cls.__name__]
        properties = schema["properties"]
        properties["kind"] = properties["type"] = {"const": name}
        if "start" in properties:
            properties["value"] = properties["start"]
        schema["required"] = [key for key in schema.get("required", []) if key != "start"]
        schema["anyOf"] = [{"required": ["kind"]}, {"required": ["type"]}]
    words = [name for name, cls in KINDS.items() if not cls.needs]
    mapping = {"oneOf": [{"$ref": f"#/$defs/{cls.__name__}"} for cls in KINDS.values()]}
    segments = {"type": "array", "items": {"anyOf": [mapping, {"enum": words}]}}
    definitions["Sequence"]["properties"]["segments"] = segments
    return definitions | {
        "schedule": {"anyOf": [mapping, segments]},
        "schedule_or_word": {"anyOf": [mapping, segments, {"enum": words}, {"type": "number"}]},
    }


def _kwargs_schema(hyperparameters: type) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field in fields_of(hyperparameters).values():
        if not field.is_scalar:
            properties[field.name] = TypeAdapter(field.hint).json_schema() | _notes(field)
            continue
        number = {"type": "number"} | _limits(field)
        for name in names_of(field.name):
            plain, schedule, warmup = (name + part for part in PARTS)
            off = [{"type": "null"}] if field.optional else []
            allowed = [number, {"$ref": "#/$defs/schedule"}, *off, *([{"const": "auto"}] if field.auto else [])]
            properties[plain] = {"anyOf": allowed} | _notes(field)
            properties[schedule] = {"$ref": "#/$defs/schedule_or_word", "description": f"schedule of {name}"}
            properties[warmup] = {
                "type": ["integer", "string"],
                "description": f"warm-up of {name}, env steps or per cent",
            }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _limits(field: Field) -> dict[str, Any]:
    limits = {"minimum": field.low, "maximum": field.high}
    return {key: bound for key, bound in limits.items() if math.isfinite(bound)}


def _notes(field: Field) -> dict[str, Any]:
    return {"description": field.help, "default": default_of(field)}


def default_of(field: Field) -> Any:
    """The default as a config would spell it."""
    if field.schedule is not None:
        return field.schedule()
    if field.auto and field.default is None:
        return "auto"
    return list(field.default) if isinstance(field.default, tuple) else field.default


def reference() -> str:
    """docs/config.md, made from the code."""
    parts = [
        "# Config reference",
        "Made by `rl-training config reference`; a test keeps it true.",
        "Check a file with `rl-training config check FILE`, see it with all defaults with `config show FILE`, and let "
        "an editor check it as you type with `rl-training config schema > schema.json`.",
        "## Top level",
        _options_table(config_fields()),
        "## env_kwargs",
        "Goes to `gymnasium.make`, except:",
        _options_table(EnvOptions.model_fields),
        "Where `env_id` is a list, a key that is one of the ids holds what is for that environment alone; the others "
        "are for all. `eval_env_kwargs` is written the same way and replaces whole keys: with `wrappers` in it, those "
        "of `env_kwargs` are not used in evaluation, except that observations are normalised as in training.",
        "### wrappers",
        _options_table(Wrappers.model_fields),
        "### wrappers.atari",
        _options_table(AtariOptions.model_fields),
        "## callbacks",
        _options_table(CallbackOptions.model_fields),
        "### early_stopping",
        _options_table(EarlyStoppingOptions.model_fields),
        "### time_limit",
        _options_table(TimeLimitOptions.model_fields),
        "## algo_kwargs",
        "Scalars take a number or a [schedule](schedules.md); settings are fixed for the run. With "
        "`wrappers.atari`, some defaults are those published for Atari.",
    ]
    for algo, entry in ALGORITHMS.items():
        recipe = entry.recipe
        spaces = f"Actions: {recipe.actions}. Observations: {recipe.observations}."
        spaces += " Takes a list of environments." if recipe.multi_task else ""
        spaces += " Learns games of two players by playing both sides." if recipe.two_players else ""
        parts += [f"### {algo}", f"{recipe.summary}. {spaces}", _hyperparameter_table(recipe.hyperparameters)]
    return "\n\n".join(parts) + "\n"


def _options_table(fields: Any) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, info in fields.items():
        default = "required" if info.is_required() else _default(info)
        rows.append(f"| `{name}` | {default} | {_cell(info.description or '')} |")
    return "\n".join(rows)


def _default(info: Any) -> str:
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Options):
        return "see below"
    return f"`{value}`" if value not in ({}, [], None) else "none"


def _hyperparameter_table(hyperparameters: type) -> str:
    rows = ["| hyperparameter | | type | default | bounds | meaning |", "|---|---|---|---|---|---|"]
    on_atari = fields_of(hyperparameters, atari=True)
    for field in fields_of(hyperparameters).values():
        kind = "scalar" if field.is_scalar else "setting"
        cells = (
            f"`{field.name}`",
            kind,
            _cell(type_name(field.hint)),
            f"`{default_text(field)}`{_atari_text(field, on_atari[field.name])}",
            field.bounds,
            _cell(field.help),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def default_text(field: Field) -> str:
    """The same in one line, as YAML has it."""
    default = default_of(field)
    if not field.schedule:
        return str(default)
    return "{" + ", ".join(f"{key}: {value}" for key, value in default.items()) + "}"


def _atari_text(field: Field, on_atari: Field) -> str:
    """What follows a default that is another one with Atari preprocessing."""
    text = default_text(on_atari)
    return "" if text == default_text(field) else f" (Atari: `{text}`)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
