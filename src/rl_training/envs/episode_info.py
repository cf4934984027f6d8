"""What environments say of an episode in `info`, at its last step: whether it was a success, and what the config asks
for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from rl_training.envs.faults import EnvironmentFault
from rl_training.types import Metrics

SUCCESS = "is_success"  # what Gymnasium-Robotics and others call it; logged wherever an environment has it
LOGGED = "logged"  # the key under which `Episodes` return the values of an episode
Values = dict[str, float]  # of one episode, by the key of its info


def keys_of(log_info: Sequence[str]) -> tuple[str, ...]:
    return (SUCCESS, *(key for key in log_info if key != SUCCESS))


def values_of(info: Mapping[str, Any], keys: Sequence[str], where: str) -> Values:
    """The numbers that a single environment gives at the end of an episode. where: for an error."""
    return {key: number_of(info[key], key, where) for key in keys if key in info}


def batch_values(infos: Mapping[str, Any], rows: Iterable[int], keys: Sequence[str], where: str) -> dict[int, Values]:
    """The same by environment, from the infos of a vectorised environment: arrays [N], with masks `_key` [N]."""
    present = [key for key in keys if key in infos]
    if not present:
        return {}

    def of(row: int) -> Values:
        return {key: number_of(infos[key][row], key, where) for key in present if mask_of(infos, key, row)}

    return {row: of(row) for row in rows}


def mask_of(infos: Mapping[str, Any], key: str, row: int) -> bool:
    mask = infos.get(f"_{key}")
    return mask is None or bool(mask[row])


def number_of(value: Any, key: str, where: str) -> float:
    """A bool, a number, or an array that holds one."""
    if np.size(value) == 1 and np.asarray(value).dtype.kind in "biuf":
        return float(np.asarray(value).reshape(()))
    raise EnvironmentFault(f"{where}: info[{key!r}] should be a number to be logged, got {value!r:.80}")


def info_means(prefix: str, episodes: Iterable[Mapping[str, float]]) -> Metrics:
    """By the name of the metric, the mean over the episodes that have a value."""
    found: dict[str, list[float]] = {}
    for values in episodes:
        for key, value in values.items():
            found.setdefault(metric_name(prefix, key), []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def metric_name(prefix: str, key: str) -> str:
    """`train_success_rate`, `eval_info_distance`."""
    return f"{prefix}_success_rate" if key == SUCCESS else f"{prefix}_info_{key}"
