"""Runs that differ in their seed alone, together; and what the groups differ in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rl_training.errors import InputError, nearest
from rl_training.reports.runs import Run
from rl_training.runtime.event_files import flat

# Keys of the config that change nothing in what is learned.
NO_DIFFERENCE = {
    "seed", "output_dir", "tags", "wandb", "log_interval", "log_info", "eval_interval", "eval_episodes",
    "checkpoint_interval", "keep_checkpoints", "tune",
}  # fmt: skip
LONGEST_VALUE = 40  # characters of a value in a name
LONGEST_NAME = 60  # characters of the differences in a name; the table has them all


@dataclass(frozen=True)
class Group:
    """Runs to be compared with other groups as one. `differences`: the keys in which the groups differ."""

    name: str
    runs: list[Run]
    differences: dict[str, str] = field(default_factory=dict)

    @property
    def strata(self) -> list[str]:
        """The task of each run: the bootstrap draws within tasks."""
        return [env_of(run) for run in self.runs]


def group_runs(runs: Sequence[Run], by: str = "config") -> list[Group]:
    """`by`: `config` (all but the seed and what changes nothing), `run` (each for itself), or keys of the config:
    `algo`, `algo,algo_kwargs.gamma`."""
    if not runs:
        raise InputError("there are no runs to group")
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(key_of(run, by), []).append(run)
    parts = list(members.values())
    differences = most_telling_first(differences_of([part[0] for part in parts], by))
    names = unique([name_of(part, found, by) for part, found in zip(parts, differences, strict=True)])
    order = [sorted(part, key=lambda run: (env_of(run), run.seed, run.name)) for part in parts]
    return [Group(*each) for each in zip(names, order, differences, strict=True)]


def env_of(run: Run) -> str:
    env = run.config.get("env_id", "")
    return env if isinstance(env, str) else "+".join(map(str, env))


def settings(run: Run) -> dict[str, Any]:
    """The flat config without what changes nothing."""
    return {key: value for key, value in flat(run.config).items() if key.split(".")[0] not in NO_DIFFERENCE}


def key_of(run: Run, by: str) -> str:
    """A text that runs of one group share."""
    if by == "run":
        return str(run.folders[-1])
    found = settings(run) if by == "config" else {key: value_of(run, key) for key in by.split(",")}
    return json.dumps(found, sort_keys=True, default=str)


def value_of(run: Run, key: str) -> Any:
    known = flat(run.config)
    if key in known:
        return known[key]
    short = [name for name in known if name.endswith(f".{key}")]  # clip_coef for algo_kwargs.clip_coef
    if len(short) == 1:
        return known[short[0]]
    if key.startswith("algo_kwargs.") or "." in key:  # of another algorithm
        return None
    raise InputError(f"--group-by {key}: {run.name} has no such key{nearest(key, ['config', 'run', *known])}")


def differences_of(runs: Sequence[Run], by: str) -> list[dict[str, str]]:
    """For one run of each group, the keys in which it differs from others. Hyperparameters are compared with groups of
    the same algorithm alone: others have others."""
    if by not in ("config", "run"):
        return [{key: shown(value_of(run, key)) for key in by.split(",")} for run in runs]
    found = [settings(run) | ({"seed": run.seed} if by == "run" else {}) for run in runs]
    result = []
    for own in found:
        peers = [other for other in found if other.get("algo") == own.get("algo")]
        keys = [key for key in own if differs(key, own, peers if key.startswith("algo_kwargs.") else found)]
        result.append({key: shown(own[key]) for key in keys})
    return result


def most_telling_first(differences: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """With the keys first that have the most values: a name may have to leave out the others."""
    values: dict[str, set[str]] = {}
    for own in differences:
        for key, text in own.items():
            values.setdefault(key, set()).add(text)
    return [dict(sorted(own.items(), key=lambda item: -len(values[item[0]]))) for own in differences]


def differs(key: str, own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    return any(other.get(key) != own[key] for other in others)


def name_of(runs: Sequence[Run], differences: Mapping[str, str], by: str) -> str:
    """`ppo on CartPole-v1, clip_coef 0.1`."""
    if by == "run":
        return runs[0].name
    rest = [f"{key.removeprefix('algo_kwargs.')} {text}" for key, text in differences.items()
            if key not in ("algo", "env_id")]  # fmt: skip
    fitting = sum(length <= LONGEST_NAME for length in accumulate(len(part) + 2 for part in rest))
    if fitting < len(rest):
        rest[fitting:] = [f"and {len(rest) - fitting} more"]
    envs = list(dict.fromkeys(env_of(run) for run in runs))
    algos = list(dict.fromkeys(str(run.config.get("algo", "")) for run in runs))
    title = f"{', '.join(algos)} on {envs[0] if len(envs) == 1 else f'{len(envs)} environments'}"
    return ", ".join([title, *rest])


def shown(value: Any) -> str:
    """A value in few characters; a schedule by its kind and its ends."""
    if isinstance(value, Mapping) and "kind" in value:
        ends = [f"{value[key]:g}" for key in ("start", "end") if isinstance(value.get(key), int | float)]
        text = f"{value['kind']} {' to '.join(ends)}".strip()
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def unique(names: Sequence[str]) -> list[str]:
    """Equal names, of values that are too long to be shown whole, are numbered."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result
