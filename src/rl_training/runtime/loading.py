"""Configs from YAML files, mappings or Python, with everything that is wrong with them reported at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_training.algorithms.base import without_effect
from rl_training.config import LONGEST_ENV_ID, MOST_STEPS, EnvOptions, Execution, Options, TrainConfig
from rl_training.envs.factory import check_env_id
from rl_training.envs.rendering import without_screen
from rl_training.errors import (
    ConfigError,
    Document,
    InputError,
    Problem,
    cut,
    nearest,
    parse_value,
    problems_of,
    read_document,
    shown,
)
from rl_training.runtime.callbacks import CallbackOptions
from rl_training.runtime.controls import Controls
from rl_training.runtime.execution import problems_elsewhere
from rl_training.runtime.limits import threads_problem
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.search_space import Space, corners, put
from rl_training.runtime.setup import device_problem
from rl_training.yaml_text import MOST_CHARACTERS

ANY_HORIZON = 1_000_000  # to find further problems if total_timesteps is itself one


def load_config(
    path: str | Path, *, overrides: Sequence[str] = (), allow_import: bool = True, **values: Any
) -> TrainConfig:
    """Read a YAML file, apply `key.subkey=value` overrides, and check the result.

    `values` replace top-level keys. `allow_import=False` refuses an env_id of the form `module:id`, which imports that
    module.
    """
    path = Path(path)
    document = read_document(_read_text(path), str(path))
    for override in overrides:
        apply_override(document, override)
    for key, value in values.items():
        replace_value(document, (key,), value, f"--{key.replace('_', '-')} {value}")
    return build_config(document.data, document=document, allow_import=allow_import)


def _read_text(path: Path) -> str:
    """The text of a file, or its beginning if it is too long for a config."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MOST_CHARACTERS + 1)
    except FileNotFoundError:
        folder = path.parent.iterdir() if path.parent.is_dir() else ()
        guess = nearest(path.name, (p.name for p in folder if p.suffix in (".yaml", ".yml")))
        raise ConfigError.of(f"{path}: there is no such file{guess}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        raise ConfigError.of(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def build_config(
    data: Mapping[str, Any], *, document: Document | None = None, allow_import: bool = True, needs_env: bool = True
) -> TrainConfig:
    """A checked TrainConfig from plain data; without `needs_env` the environment need not be installed."""
    problems: list[Problem] = []
    config: TrainConfig | None = None
    try:
        config = TrainConfig(**data)
    except ConfigError as error:
        problems += error.problems
    except TypeError:  # keys that are not strings
        problems += [Problem((shown(k),), "keys should be text") for k in data if not isinstance(k, str)]
    problems += check(data, allow_import=allow_import, needs_env=needs_env)
    if problems or config is None:
        raise ConfigError(dict.fromkeys(problems), document)
    return config


def check_config(config: TrainConfig) -> None:
    """The same checks for a config made in Python."""
    problems = check({f.name: getattr(config, f.name) for f in dataclasses.fields(config)}, allow_import=True)
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def as_config(given: TrainConfig | Mapping[str, Any] | str | Path) -> TrainConfig:
    """A checked config from a TrainConfig, a mapping of its keys, or the path of a YAML file."""
    if isinstance(given, TrainConfig):
        check_config(given)
        return given
    if isinstance(given, Mapping):
        return build_config(given)
    if isinstance(given, str | Path):
        return load_config(given)
    kind = type(given).__name__
    raise InputError(f"a config is a TrainConfig, a mapping of its keys or the path of a YAML file, got {kind}")


def check(data: Mapping[str, Any], *, allow_import: bool, needs_env: bool = True) -> list[Problem]:
    """All problems but wrong types of top-level keys, which TrainConfig reports: such keys are skipped here."""
    device, callbacks = data.get("device", "auto"), data.get("callbacks")
    env_id = data.get("env_id") if needs_env else None
    if needs_env and _draws(data):
        without_screen()  # before modules that register environments are imported
    return [
        *_check_algorithm(data),
        *_check_env_ids(env_id, allow_import),
        *_check_several(data),
        *_check_env_kwargs("env_kwargs", data),
        *_check_env_kwargs("eval_env_kwargs", data),
        *(_check_options(CallbackOptions, callbacks, ("callbacks",)) if isinstance(callbacks, Mapping) else ()),
        *_check_execution(data),
        *_check_early_stopping(data),
        *_check_tune(data),
        *_problems("device", device_problem(device) if isinstance(device, str) else None),
        *_problems("num_threads", threads_problem(data.get("num_threads", "auto"))),
    ]


def _problems(key: str, message: str | None) -> list[Problem]:
    return [] if message is None else [Problem((key,), message)]


def _check_algorithm(data: Mapping[str, Any]) -> list[Problem]:
    algo, kwargs = data.get("algo"), data.get("algo_kwargs")
    if not isinstance(algo, str):
        return []
    if algo not in ALGORITHMS:
        return _problems("algo", unknown_algorithm(algo))
    if not isinstance(kwargs, Mapping):
        return []
    horizon = data.get("schedule_horizon") or data.get("total_timesteps")
    if not isinstance(horizon, int | float) or not 1 <= horizon <= MOST_STEPS:
        horizon = ANY_HORIZON
    try:
        Controls(ALGORITHMS[algo].recipe.hyperparameters, kwargs, int(horizon))
    except ConfigError as error:
        return error.problems
    return []


def unknown_algorithm(name: str) -> str:
    return f"unknown algorithm {shown(name)}{nearest(name, ALGORITHMS)} (there are: {', '.join(ALGORITHMS)})"


def _check_env_ids(env_id: Any, allow_import: bool) -> list[Problem]:
    if not isinstance(env_id, list):
        return _check_env_id(env_id, ("env_id",), allow_import)
    return [p for i, name in enumerate(env_id) for p in _check_env_id(name, ("env_id", i), allow_import)]


def _check_env_id(env_id: Any, path: tuple[str | int, ...], allow_import: bool) -> list[Problem]:
    if not isinstance(env_id, str) or len(env_id) > LONGEST_ENV_ID:
        return []
    module, colon, _ = env_id.partition(":")
    if colon and not allow_import:
        return [Problem(path, f"{env_id!r} imports the module {module!r}, which runs its code: pass --allow-import")]
    try:
        check_env_id(env_id)
    except InputError as error:
        return [Problem(path, str(error))]
    return []


def _draws(data: Mapping[str, Any]) -> bool:
    """Whether an environment gives images; of a config that may have other mistakes."""
    given = [data.get(key) for key in ("env_kwargs", "eval_env_kwargs")]
    common = [kwargs for kwargs in given if isinstance(kwargs, Mapping)]
    of_tasks = [own for kwargs in common for own in kwargs.values() if isinstance(own, Mapping)]
    wrappers = [kwargs.get("wrappers") for kwargs in (*common, *of_tasks)]
    return any(isinstance(each, Mapping) and each.get("pixels") for each in wrappers)


def _check_several(data: Mapping[str, Any]) -> list[Problem]:
    """A list of environments is only for algorithms that learn several tasks."""
    algo = data.get("algo")
    if not isinstance(data.get("env_id"), list) or algo not in ALGORITHMS or ALGORITHMS[algo].recipe.multi_task:
        return []
    able = [name for name, entry in ALGORITHMS.items() if entry.recipe.multi_task]
    remedy = f", or use {' or '.join(able)}" if able else ""
    return _problems("env_id", f"{algo} trains in one environment; env_id should be one id{remedy}")


def _check_env_kwargs(key: str, data: Mapping[str, Any]) -> list[Problem]:
    kwargs, ids = data.get(key), data.get("env_id")
    if not isinstance(kwargs, Mapping):
        return []
    ids = ids if isinstance(ids, list) else []
    problems = _check_env_options({name: value for name, value in kwargs.items() if name not in ids}, (key,))
    for name, value in kwargs.items() if ids else ():
        path = (key, name)
        if name not in ids and not str(name).isidentifier():  # no argument of gymnasium.make has such a name
            known = [known for known in ids if isinstance(known, str)]
            problems.append(Problem(path, f"is none of the environments in env_id{nearest(str(name), known)}"))
        elif name in ids and not isinstance(value, Mapping):
            problems.append(Problem(path, f"should be a mapping of arguments for this task, got {shown(value)}"))
        elif name in ids:
            problems += _check_env_options(value, path)
    return problems


def _check_env_options(kwargs: Mapping[str, Any], path: tuple[str, ...]) -> list[Problem]:
    ours = {key: kwargs[key] for key in EnvOptions.model_fields if key in kwargs}
    return _check_options(EnvOptions, ours, path)


def _check_options(options: type[Options], data: Mapping[str, Any], path: tuple[str, ...]) -> list[Problem]:
    try:
        options.model_validate(dict(data))
    except ValidationError as error:
        return problems_of(error, path, options.model_fields)
    return []


def _check_execution(data: Mapping[str, Any]) -> list[Problem]:
    """Actors that lag behind are only for algorithms that correct for it."""
    algo, execution = data.get("algo"), data.get("execution")
    if not execution or not isinstance(execution, Mapping):
        return []
    if algo in ALGORITHMS and not ALGORITHMS[algo].recipe.asynchronous:
        able = " or ".join(name for name, entry in ALGORITHMS.items() if entry.recipe.asynchronous)
        return _problems("execution", f"{algo} acts with the newest weights alone: leave it out, or use {able}")
    if problems := _check_options(Execution, execution, ("execution",)):
        return problems
    num_envs = data.get("num_envs") or (ALGORITHMS[algo].recipe.num_envs if algo in ALGORITHMS else 0)
    return problems_elsewhere(Execution.of(execution), num_envs if isinstance(num_envs, int) else 0)


def _check_early_stopping(data: Mapping[str, Any]) -> list[Problem]:
    """Early stopping needs evaluations during training."""
    callbacks, interval, total = data.get("callbacks"), data.get("eval_interval", 0), data.get("total_timesteps")
    if not isinstance(callbacks, Mapping) or not callbacks.get("early_stopping"):
        return []
    if not isinstance(interval, int) or not isinstance(total, int) or 1 <= interval <= total:
        return []
    message = f"uses evaluations, but with eval_interval {interval} there is none before the end: set eval_interval"
    return [Problem(("callbacks", "early_stopping"), message)]


def _check_tune(data: Mapping[str, Any]) -> list[Problem]:
    """Each key of a search space with its extreme values, and each of its choices, must make a valid config."""
    spec, algo = data.get("tune"), data.get("algo")
    if not spec or not isinstance(algo, str) or algo not in ALGORITHMS:
        return []
    fixed = {key: value for key, value in data.items() if key != "tune"}
    try:
        space = Space(spec, algo)
    except ConfigError as error:
        return error.problems
    known = set(_all_problems(fixed))
    return [problem for key in space.nodes for problem in _check_tuned(space, fixed, key, known)]


def _check_tuned(space: Space, data: dict[str, Any], key: str, known: set[Problem]) -> list[Problem]:
    needs = space.needed_by(key)
    if needs is not None and f"algo_kwargs.{needs[0]}" in space.nodes:
        data = copy.deepcopy(data)
        put(data, f"algo_kwargs.{needs[0]}", needs[1])
    if not space.has_effect(key, data):
        return [Problem(("tune", key), without_effect(needs) if needs else "has no effect")]
    path = tuple(key.split("."))
    found: list[Problem] = []
    for corner in corners(space, data, key):
        for problem in _all_problems(corner):
            if problem not in known and not found:
                inner = problem.path[len(path) :] if problem.path[: len(path)] == path else problem.path
                where = f"{'.'.join(map(str, inner))}: " if inner else ""
                found.append(Problem(("tune", key), f"{where}{problem.message}"))
    return found


def _all_problems(data: dict[str, Any]) -> list[Problem]:
    try:
        build_config(data, needs_env=False)
    except ConfigError as error:
        return error.problems
    return []


def apply_override(document: Document, override: str) -> None:
    """`algo_kwargs.clip_coef=0.1` sets that key, and makes the mappings around it."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError.of(f"--set takes key=value, such as algo_kwargs.clip_coef=0.1, got {shown(override)}")
    target: Any = document.data
    for part in path[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError.of(f"--set {cut(override)}: {cut(part)!r} is not a mapping")
    replace_value(document, path, parse_value(text, f"--set {override}"), f"--set {override}")


def replace_value(document: Document, path: tuple[str, ...], value: Any, origin: str) -> None:
    """Set a key of an existing mapping; errors about it then name `origin`, not a line of the file."""
    target = document.data
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    document.replaced[path] = origin
    for stale in [line for line in document.lines if line[: len(path)] == path]:
        del document.lines[stale]
