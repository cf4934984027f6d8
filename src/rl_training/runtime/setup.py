"""Building the actor and the learner of a run, and choosing device, threads and kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import torch

from rl_training.algorithms.base import Learner
from rl_training.config import EnvOptions, TrainConfig
from rl_training.envs.factory import usable_cores
from rl_training.errors import InputError, shown
from rl_training.models.networks import is_image
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.evaluation import Player, check_evaluation
from rl_training.runtime.limits import check_bytes, networks_within_memory
from rl_training.runtime.randomness import generator, seed_of
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.restoring import checkpoint_errors
from rl_training.runtime.sources import Source
from rl_training.types import Fields, Spaces


class Agent(NamedTuple):
    actor: Any
    learner: Learner
    players: list[Player]  # of each task
    fields: list[Fields]  # of each task
    device: torch.device


def build_agent(
    config: TrainConfig, recipe: Recipe, controls: Controls, source: Source, resume: Checkpoint | None
) -> Agent:
    """The actor and the learner before any training; the actor plays in `source` from now on."""
    spaces, hp = source.spaces, controls.at(0)
    check_players(config, recipe, spaces)
    check_bytes(config, controls, spaces)
    device = pick_device(config.device, spaces, hp)
    where = f"{resume.path}: an actor and a learner for its config cannot be made" if resume else None
    with checkpoint_errors(where) if where else contextlib.nullcontext():
        actor, learner = build_actor_and_learner(config, recipe, spaces, hp, device)
    fields = [recipe.fields(task, hp) for task in spaces]
    actors = [recipe.actor_of(actor, task) for task in range(len(spaces))]
    source.attach(actors, fields)
    parts = zip(actors, spaces, source.normalizers, strict=True)
    players = [Player(*each, recipe.box_actions) for each in parts]
    check_evaluation(players, config)
    torch.set_num_threads(pick_threads(config.num_threads, learner.num_parameters, device))
    reuse_memory()
    return Agent(actor, learner, players, fields, device)


def with_env_defaults(config: TrainConfig, recipe: Recipe) -> TrainConfig:
    """The config with the algorithm's defaults for `num_envs` and normalisation, where it gives none."""
    if config.num_envs is None:
        config = dataclasses.replace(config, num_envs=recipe.num_envs)
    wrappers = EnvOptions.of(config.env_kwargs).wrappers
    preferred = {name: True for name in recipe.normalizes if getattr(wrappers, name) is None}
    if wrappers.atari or not preferred:
        return config
    complete = wrappers.model_copy(update=preferred).model_dump(exclude_unset=True)
    return dataclasses.replace(config, env_kwargs={**config.env_kwargs, "wrappers": complete})


def build_actor(config: TrainConfig, recipe: Recipe, spaces: Sequence[Spaces], hp: Any, device: torch.device) -> Any:
    """An actor before any training, without a learner; `spaces` of every task."""
    with building_networks(config, hp, device):
        return _make_actor(recipe, spaces, hp, device)


def build_actor_and_learner(
    config: TrainConfig, recipe: Recipe, spaces: Sequence[Spaces], hp: Any, device: torch.device
) -> tuple[Any, Learner]:
    """An actor and a learner, which share a network, before any training."""
    with building_networks(config, hp, device):
        actor = _make_actor(recipe, spaces, hp, device)
        return actor, recipe.learner(actor, hp, rng=generator(config.seed, "learner"))


def _make_actor(recipe: Recipe, spaces: Sequence[Spaces], hp: Any, device: torch.device) -> Any:
    if not recipe.multi_task and len(spaces) > 1:
        raise InputError(f"{recipe.name} trains in one environment, got {len(spaces)}: env_id should be one id")
    return recipe.actor(list(spaces) if recipe.multi_task else spaces[0], hp, device=device)


@contextlib.contextmanager
def building_networks(config: TrainConfig, hp: Any, device: torch.device) -> Iterator[None]:
    """Here the config's seed alone decides the weights of new networks, which must fit into memory."""
    # One thread: orthogonal matrices differ in the last bit with more.
    with torch.random.fork_rng(devices=[]), one_thread(), networks_within_memory(hp, device):
        torch.manual_seed(seed_of(config.seed, "model"))
        yield


def check_players(config: TrainConfig, recipe: Recipe, spaces: Sequence[Spaces]) -> None:
    """Raise an InputError for a game of two players if the algorithm would take the other's value for its own."""
    from rl_training.runtime.registry import ALGORITHMS  # which imports all recipes

    for task, seen in zip(config.tasks, spaces, strict=True):
        if seen.num_players == 2 and not recipe.two_players:
            able = " or ".join(name for name, entry in ALGORITHMS.items() if entry.recipe.two_players)
            raise InputError(
                f"{task.env_id} is a game of two players who move in turns, and {recipe.name} is for one: use {able}; "
                "or give env_kwargs an opponent, if the environment has one (TicTacToe-v0: opponent: random)"
            )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def device_problem(name: str, *, auto: bool = True) -> str | None:
    """Why torch cannot use the device `name`; None if it can. auto: whether it may be `auto`."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name) or (name == "auto" and not auto):
        return f"should be {'auto, ' if auto else ''}cpu, cuda, cuda:<index> or mps, got {shown(name)}"
    count, remedy = torch.cuda.device_count(), "use auto" if auto else "use cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count:
        return f"{name!r} is not available: torch sees {count} CUDA devices; {remedy}"
    if name == "mps" and not torch.backends.mps.is_available():
        return f"'mps' is not available: it takes a Mac with Apple's GPU; {remedy}"
    return None


def pick_device(name: str, spaces: Sequence[Spaces], hp: Any) -> torch.device:
    """auto: a GPU for convolutions, if there is one; small networks are faster on the CPU, beside the environments."""
    if (problem := device_problem(name)) is not None:
        raise InputError(f"device {problem}")
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)  # CUDA streams and graphs use the current device
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if has_convolutions(spaces, hp) and torch.cuda.is_available() else "cpu")


def has_convolutions(spaces: Sequence[Spaces], hp: Any) -> bool:
    observations = [task.observation for task in spaces]
    parts = [list(obs.spaces.values()) if isinstance(obs, gym.spaces.Dict) else [obs] for obs in observations]
    return any(is_image(space) for group in parts for space in group) or getattr(hp, "network", None) == "conv"


def pick_threads(setting: int | str, num_parameters: int, device: torch.device) -> int:
    """auto: one thread below a million parameters, because two make small networks slower; else those it may use."""
    if isinstance(setting, int):
        return setting
    small = num_parameters < 1_000_000
    return 1 if small or device.type != "cpu" else int(min(usable_cores(), omp_threads()))


def omp_threads() -> float:
    """OMP_NUM_THREADS, by which several runs share a machine; infinity if it is not set."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(text) if text.isdigit() and int(text) else math.inf


def quick_kernels(device: torch.device, *, convolutions: bool) -> Callable[[], None]:
    """On a GPU, choose the fastest convolution kernels by trial, and give matrix products the precision of convolutions
    (TF32 by default) in networks that have both. Returns the function that undoes this."""
    if device.type != "cuda":
        return lambda: None
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()

    def choose(benchmark: bool, precision: str) -> None:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(precision)

    choose(True, "high" if convolutions and torch.backends.cudnn.allow_tf32 else before[1])
    return lambda: choose(*before)


def reuse_memory() -> None:
    """Make the C library keep freed memory for the next gradient step.

    glibc returns freed blocks above a threshold to the system, and raises the threshold when a larger block is freed,
    as here. Without it, a gradient step of 256 x 256 layers takes some 150 page faults, 3 to 12 % of its time.
    """
    torch.empty(7 << 20)
