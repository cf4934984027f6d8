"""Descriptions of the config: a JSON Schema for editors, and a reference in Markdown."""

from __future__ import annotations

import math
from typing import Any, Union

from pydantic import TypeAdapter

from rl_training.config import (
    AtariOptions,
    EnvOptions,
    Execution,
    Options,
    PixelOptions,
    TrainConfig,
    Wrappers,
    config_fields,
)
from rl_training.runtime.callbacks import CallbackOptions, EarlyStoppingOptions, TimeLimitOptions
from rl_training.runtime.hyperparameters import PARTS, Hyperparameter, hyperparameters_of, names_of, type_name
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.schedules import KINDS

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config, with the hyperparameters of the chosen algorithm."""
    root = TypeAdapter(TrainConfig).json_schema()
    definitions = root.setdefault("$defs", {})
    definitions |= _schedule_definitions()
    mappings: dict[str, Any] = {"env_kwargs": EnvOptions, "eval_env_kwargs": EnvOptions, "callbacks": CallbackOptions}
    mappings["execution"] = Execution
    for key, model in mappings.items():
        schema = TypeAdapter(model).json_schema()
        definitions |= schema.pop("$defs", {})
        schema["additionalProperties"] = model is EnvOptions  # keys for gymnasium.make, or ids of tasks
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
    plain_kinds = {"enum": [name for name, cls in KINDS.items() if not cls.needs]}
    mapping = {"oneOf": [{"$ref": f"#/$defs/{cls.__name__}"} for cls in KINDS.values()]}
    segments = {"type": "array", "items": {"anyOf": [mapping, plain_kinds]}}
    definitions["Sequence"]["properties"]["segments"] = segments
    return definitions | {
        "schedule": {"anyOf": [mapping, segments]},
        "schedule_or_kind": {"anyOf": [mapping, segments, plain_kinds, {"type": "number"}]},
    }


def _kwargs_schema(hyperparameters: type) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for declared in hyperparameters_of(hyperparameters).values():
        notes = {"description": declared.help, "default": declared.config_default}
        if not declared.is_scalar:
            properties[declared.name] = TypeAdapter(declared.hint).json_schema() | notes
            continue
        bounds = {"minimum": declared.low, "maximum": declared.high}
        allowed: list[dict[str, Any]] = [
            {"type": "number", **{key: bound for key, bound in bounds.items() if math.isfinite(bound)}},
            {"$ref": "#/$defs/schedule"},
            *([{"type": "null"}] if declared.optional else []),
            *([{"const": "auto"}] if declared.auto else []),
        ]
        for name in names_of(declared.name):
            plain, schedule, warmup = (name + part for part in PARTS)
            about_warmup = f"warm-up of {name}, env steps or per cent"
            properties[plain] = {"anyOf": allowed} | notes
            properties[schedule] = {"$ref": "#/$defs/schedule_or_kind", "description": f"schedule of {name}"}
            properties[warmup] = {"type": ["integer", "string"], "description": about_warmup}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def reference() -> str:
    """The content of docs/config.md."""
    parts = [
        "# Config reference",
        "Made by `rl-training config reference`; a test checks that it is up to date.",
        "Check a file with `rl-training config check FILE`, see it with all defaults with `config show FILE`, and let "
        "an editor check it as you type with `rl-training config schema > schema.json`.",
        "## Top level",
        _options_table(config_fields()),
        "## env_kwargs",
        "Goes to `gymnasium.make`, except:",
        _options_table(EnvOptions.model_fields),
        "Where `env_id` is a list, a key that is one of the ids holds the arguments of that environment alone; the "
        "other keys hold for all. `eval_env_kwargs` has the same form and replaces whole keys: with `wrappers` in it, "
        "those of `env_kwargs` are not used in evaluation, except that observations are normalised as in training.",
        "### wrappers",
        _options_table(Wrappers.model_fields),
        "### wrappers.atari",
        _options_table(AtariOptions.model_fields),
        "### wrappers.pixels",
        "An image shows no velocities: algorithms without memory need `frame_stack` too. Drawing needs the extra "
        "`video` for Gymnasium's classic control, and EGL or OSMesa for MuJoCo on a machine without a screen. "
        "In a loop of your own, `rl_training.envs.pixels.Pixels(env)` gives the same images.",
        _options_table(PixelOptions.model_fields),
        "## execution",
        _options_table(Execution.model_fields),
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
    on_atari = hyperparameters_of(hyperparameters, atari=True)
    for name, declared in hyperparameters_of(hyperparameters).items():
        cells = (
            f"`{name}`",
            "scalar" if declared.is_scalar else "setting",
            _cell(type_name(declared.hint)),
            _default_cell(declared, on_atari[name]),
            declared.bounds,
            _cell(declared.help),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _default_cell(declared: Hyperparameter, on_atari: Hyperparameter) -> str:
    same = declared.default_text == on_atari.default_text
    atari = "" if same else f" (Atari: `{on_atari.default_text}`)"
    return f"`{declared.default_text}`{atari}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
