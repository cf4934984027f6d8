"""Memory and threads that a run needs at least, checked before it is built: errors name what to lower."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rl_training.config import TrainConfig
from rl_training.data.fields import field_of, num_bytes
from rl_training.errors import ConfigError, InputError, Problem
from rl_training.runtime.controls import Controls
from rl_training.runtime.preview import extremes
from rl_training.types import Spaces

COPIES = 4  # of a network in training: weights, gradient and the two means of Adam
FLOAT_BYTES = 4
STEP_BYTES = 18  # of a step in a rollout, without observation and action: reward, value, logprob, flags
NODE_FLOATS = 5  # of a search for each action of a node, at least
FEWEST_THREADS = 16  # allowed on any machine, so that a config can move to a smaller one
THREADS_PER_CORE = 4
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
ALLOCATION_ERRORS = ("allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


def usable_bytes() -> int | None:
    """Bytes of RAM that this process may use: the machine's or its container's limit. None where they are unknown."""
    limits = [int(text) for path in CONTAINER_LIMITS if (text := _read(path)).isdigit()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def threads_problem(setting: Any) -> str | None:
    """Why torch should not use so many threads: OpenMP ends the process if it cannot start them."""
    cores = os.cpu_count() or 1
    most = max(FEWEST_THREADS, THREADS_PER_CORE * cores)
    if not isinstance(setting, int | float) or setting <= most:
        return None
    return f"should be at most {most} on a machine of {cores} cores, or auto, got {setting:,}"


class Need(NamedTuple):
    """The fewest bytes that a part of a run takes, and the hyperparameters that determine them."""

    what: str
    bytes: float
    names: tuple[str, ...]


def check_bytes(config: TrainConfig, controls: Controls, spaces: Sequence[Spaces]) -> None:
    """Raise a ConfigError if a part of the run other than networks and replay cannot fit into memory."""
    usable = usable_bytes()
    if usable is None:
        return
    sizes = {name: largest(controls, name) for name in controls.declared} | {"num_envs": config.num_envs}
    problems = []
    for need in needs(sizes, config, spaces):
        if need.bytes > usable:
            values = " x ".join(f"{name} {sizes[name]:,.0f}" for name in need.names)
            least = f"{need.what} ({values}) takes at least {gigabytes(need.bytes)}"
            message = f"{least}, and there are {gigabytes(usable)} of memory: lower it"
            problems.append(Problem(("algo_kwargs", need.names[0]), message))
    if problems:
        raise ConfigError(problems)


def largest(controls: Controls, name: str) -> float:
    """The largest value of a hyperparameter in the run; the sum of a list; 0 for other types."""
    value = extremes(controls, name)[1] if name in controls.varying else getattr(controls.initial, name)
    if isinstance(value, tuple):
        return float(sum(value))
    return float(value) if isinstance(value, int | float) else 0.0


def needs(sizes: dict[str, float], config: TrainConfig, spaces: Sequence[Spaces]) -> Iterator[Need]:
    obs = max(num_bytes({"obs": field_of(task.observation)}) for task in spaces)
    action = max(num_bytes({"action": field_of(task.action)}) for task in spaces)
    if "num_steps" in sizes:
        steps = sizes["num_steps"] * config.num_envs
        yield Need("a rollout", steps * (obs + action + STEP_BYTES), ("num_steps", "num_envs"))
        if "policy_phase_updates" in sizes:
            samples = sizes["policy_phase_updates"] * steps
            determined_by = ("policy_phase_updates", "num_steps", "num_envs")
            yield Need("a policy phase", samples * (obs + FLOAT_BYTES), determined_by)
    if "batch_size" in sizes:
        rows = sizes["batch_size"] * (1 + sizes.get("unroll_steps", 0))
        names = tuple(name for name in ("batch_size", "unroll_steps") if name in sizes)
        yield Need("a batch", rows * (obs + action), names)
        for name in ("hidden_sizes", "value_limit", "reward_limit", "n_step"):
            if name in sizes:
                yield Need("a gradient step", sizes["batch_size"] * sizes[name] * FLOAT_BYTES, ("batch_size", name))
    if "disc_batch_size" in sizes:
        row = obs + action + sizes["disc_hidden_sizes"] * FLOAT_BYTES
        yield Need("a batch of the discriminator", 2 * sizes["disc_batch_size"] * row, ("disc_batch_size",))
    if "num_simulations" in sizes:
        actions = max(_num_actions(task.action, sizes) for task in spaces)
        node = NODE_FLOATS * actions * FLOAT_BYTES
        yield Need("a search", sizes["num_simulations"] * config.num_envs * node, ("num_simulations", "num_envs"))
        yield Need("a search", sizes.get("eval_num_simulations", 0) * node, ("eval_num_simulations",))


def _num_actions(space: gym.Space, sizes: dict[str, float]) -> float:
    return float(space.n) if isinstance(space, gym.spaces.Discrete) else sizes.get("num_sampled_actions", 1.0)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


@contextlib.contextmanager
def networks_within_memory(hp: Any, device: torch.device) -> Iterator[None]:
    """Raise an InputError if the networks that are built here would not fit into memory in training.

    Parameters are counted as modules register them, before their memory is first written to.
    """
    usable: float | None = usable_bytes()
    if device.type == "cuda":
        usable = min(usable or math.inf, torch.cuda.get_device_properties(device).total_memory)
    total = 0

    def count(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal total
        if parameter is None:
            return
        total += parameter.numel() * parameter.element_size()
        if usable is not None and COPIES * total > usable:
            raise InputError(_too_large(hp, f"more than {gigabytes(COPIES * total)}", usable, tuple(parameter.shape)))

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in ALLOCATION_ERRORS):
            raise
        raise InputError(_too_large(hp, "more than can be allocated", usable, ())) from error
    finally:
        handle.remove()


def _too_large(hp: Any, needed: str, usable: float | None, shape: tuple[int, ...]) -> str:
    layer = f" (one layer is {' x '.join(f'{side:,}' for side in shape)})" if shape else ""
    memory = f", and there are {gigabytes(usable)} of memory" if usable is not None else ""
    sizes = ", ".join(f"{name}: {list(v) if isinstance(v, tuple) else v}" for name, v in _sizes(hp, shape).items())
    return f"the networks take {needed} in training{layer}{memory}: lower {sizes}"


def _sizes(hp: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """The settings that determine the longest side of a layer of this shape, or else the largest settings."""
    settings = {f.name: getattr(hp, f.name) for f in dataclasses.fields(hp) if not f.metadata.get("scalar")}
    numbers = {
        name: value if isinstance(value, tuple) else (value,)
        for name, value in settings.items()
        if isinstance(value, int | tuple) and not isinstance(value, bool)
    }
    side = max(shape, default=0)
    named = {name: settings[name] for name, each in numbers.items() if _determines(max(each, default=0), side)}
    by_size = sorted(numbers, key=lambda name: -max(numbers[name], default=0))
    return named or {name: settings[name] for name in by_size[:3]}


def _determines(size: int, side: int) -> bool:
    """Whether a layer's side follows from a setting: gates and experts are multiples of it, atoms -size .. size."""
    return 0 < size <= side and (side == 2 * size + 1 or (side % size == 0 and side <= 8 * size))
