"""What a run is made of before its first step: actor and learner, the device, the threads, the folder."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
import yaml

from rl_training.algorithms.base import Learner
from rl_training.config import EnvOptions, InputError, TrainConfig, shown
from rl_training.envs.factory import usable_cores
from rl_training.models.networks import is_image
from rl_training.runtime.checkpoints import Checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.limits import networks_within_memory
from rl_training.runtime.randomness import generator, seed_of
from rl_training.runtime.recipe import Recipe
from rl_training.types import Spaces

LONGEST_NAME = 80  # characters for the environments in the name of a run's folder


@contextlib.contextmanager
def undone_on_error(run: Any, undo: contextlib.ExitStack) -> Iterator[None]:
    """A run that cannot be made leaves nothing behind: no folder, no process, no changed generator."""
    try:
        yield
    except BaseException:
        with undo:
            if "dir" in vars(run):
                shutil.rmtree(run.dir, ignore_errors=True)
        raise


def with_env_defaults(config: TrainConfig, recipe: Recipe) -> TrainConfig:
    """The config with what the algorithm prefers of its environments spelt out, where it says nothing of it."""
    if config.num_envs is None:
        config = dataclasses.replace(config, num_envs=recipe.num_envs)
    wrappers = EnvOptions.of(config.env_kwargs).wrappers
    preferred = {name: True for name in recipe.normalizes if getattr(wrappers, name) is None}
    if wrappers.atari or not preferred:
        return config
    spelt_out = wrappers.model_copy(update=preferred).model_dump(exclude_unset=True)
    return dataclasses.replace(config, env_kwargs={**config.env_kwargs, "wrappers": spelt_out})


def build_actor(config: TrainConfig, recipe: Recipe, spaces: Sequence[Spaces], hp: Any, device: torch.device) -> Any:
    """What plays, before any training; `spaces` of every task. A learner is not needed."""
    with building_networks(config, hp, device):
        return _make_actor(recipe, spaces, hp, device)


def build_actor_and_learner(
    config: TrainConfig, recipe: Recipe, spaces: Sequence[Spaces], hp: Any, device: torch.device
) -> tuple[Any, Learner]:
    """What plays and what learns, which share a network, before any training."""
    with building_networks(config, hp, device):
        actor = _make_actor(recipe, spaces, hp, device)
        return actor, recipe.learner(actor, hp, rng=generator(config.seed, "learner"))


def _make_actor(recipe: Recipe, spaces: Sequence[Spaces], hp: Any, device: torch.device) -> Any:
    if not recipe.multi_task and len(spaces) > 1:
        raise InputError(f"{recipe.name} trains in one environment, got {len(spaces)}: env_id should be one id")
    return recipe.actor(list(spaces) if recipe.multi_task else spaces[0], hp, device=device)


@contextlib.contextmanager
def building_networks(config: TrainConfig, hp: Any, device: torch.device) -> Iterator[None]:
    """Networks that are built here are decided by the config's seed alone, and fit into memory."""
    # One thread: orthogonal matrices differ in the last bit with more.
    with torch.random.fork_rng(devices=[]), one_thread(), networks_within_memory(hp, device):
        torch.manual_seed(seed_of(config.seed, "model"))
        yield


def check_players(config: TrainConfig, recipe: Recipe, spaces: Sequence[Spaces]) -> None:
    """An error where two players move in turns and the algorithm would take the other's value for its own."""
    from rl_training.runtime.registry import ALGORITHMS  # which imports all recipes

    for task, seen in zip(config.tasks, spaces, strict=True):
        if seen.num_players == 2 and not recipe.two_players:
            able = " or ".join(name for name, entry in ALGORITHMS.items() if entry.recipe.two_players)
            raise InputError(
                f"{task.env_id} is a game of two players who move in turns, and {recipe.name} is for one: use {able}; "
                "or give env_kwargs an opponent, where the environment has one (TicTacToe-v0: opponent: random), and "
                "it is a game of one"
            )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def device_problem(name: str) -> str | None:
    """Why torch cannot use the device `name`; None if it can."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        return f"should be auto, cpu, cuda, cuda:<index> or mps, got {shown(name)}"
    there = torch.cuda.device_count()
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= there:
        return f"{name!r} is not available: torch sees {there} CUDA devices; use auto"
    if name == "mps" and not torch.backends.mps.is_available():
        return "'mps' is not available: it takes a Mac with Apple's GPU; use auto"
    return None


def pick_device(name: str, spaces: Sequence[Spaces], hp: Any) -> torch.device:
    """auto: a GPU pays for images and towers; small networks are faster where the environments are."""
    if (problem := device_problem(name)) is not None:
        raise InputError(f"device {problem}")
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)  # streams and graphs are made on the current device
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if has_convolutions(spaces, hp) and torch.cuda.is_available() else "cpu")


def has_convolutions(spaces: Sequence[Spaces], hp: Any) -> bool:
    images = any(is_image(part) for task in spaces for part in _parts(task.observation))
    return images or getattr(hp, "network", None) == "conv"


def _parts(space: gym.Space) -> list[gym.Space]:
    return list(space.spaces.values()) if isinstance(space, gym.spaces.Dict) else [space]


def pick_threads(setting: int | str, num_parameters: int, device: torch.device) -> int:
    """auto: two contending threads make small networks slower, so one below a million parameters."""
    if isinstance(setting, int):
        return setting
    small = num_parameters < 1_000_000
    return 1 if small or device.type != "cpu" else usable_cores()


def quick_kernels(device: torch.device, *, convolutions: bool) -> Callable[[], None]:
    """On a GPU, let convolutions try which kernel is the fastest for their sizes, which a run hardly changes; and round
    matrix products beside them as they round theirs (to TF32, by default). Returns what undoes that."""
    if device.type != "cuda":
        return lambda: None
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()

    def choose(benchmark: bool, precision: str) -> None:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(precision)

    choose(True, "high" if convolutions and torch.backends.cudnn.allow_tf32 else before[1])
    return lambda: choose(*before)


def reuse_memory() -> None:
    """Have the C library keep what is freed, for the next gradient step.

    glibc gives blocks above a threshold back to the system, page by page, and raises the threshold once it has seen a
    larger one freed. Without this, a gradient step of 256 x 256 layers takes some 150 page faults, 3 to 12 % of it.
    """
    torch.empty(7 << 20)


def make_run_dir(config: TrainConfig, suffix: str | None, resume: Checkpoint | None) -> Path:
    """A new folder `<algo>__<env>__seed<seed>__<suffix or time>`, which names its origin if the run has one."""
    if suffix is not None and not re.fullmatch(r"[\w.+-]+", suffix):
        raise InputError(f"run_suffix should be letters, digits and . _ + -, got {suffix!r}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    tail = suffix or (f"resumed-at-{resume.step}-{stamp}" if resume else stamp)
    name = f"{config.algo}__{_env_part(config)}__seed{config.seed}__{tail}"
    for attempt in range(1, 1000):
        path = config.output_dir / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if suffix:
                raise InputError(f"run folder {path} exists already; choose another run_suffix") from None
        except OSError as error:
            raise InputError(
                f"run folder {path} cannot be made: {error.strerror}; choose another output_dir"
            ) from error
    raise InputError(f"no free run folder beside {path}")


def _env_part(config: TrainConfig) -> str:
    """The environments in a folder's name; of a long list the beginning."""
    names = [re.sub(r"[^\w.-]+", "-", task.env_id) for task in config.tasks]
    shown = [name for i, name in enumerate(names) if i == 0 or len("+".join(names[: i + 1])) <= LONGEST_NAME]
    more = len(names) - len(shown)
    return "+".join(shown) + (f"+{more}-more" if more else "")


def wandb_options(config: TrainConfig) -> dict[str, Any] | None:
    if config.wandb is False:
        return None
    given = {} if config.wandb is True else dict(config.wandb)
    return {"project": "rl-training", "tags": config.tags or None} | given


def config_text(config: TrainConfig, controls: Controls) -> str:
    try:
        text: str = yaml.safe_dump(config_to_dict(config, controls), sort_keys=False)
        return text
    except yaml.YAMLError as error:
        raise InputError(
            f"the config holds what YAML cannot: {error}; use plain numbers, text, lists, dicts"
        ) from error


def config_to_dict(config: TrainConfig, controls: Controls | None = None) -> dict[str, Any]:
    """The config as YAML and JSON can hold it; with `controls`, every default of the algorithm spelt out."""
    data = asdict(config) | {"output_dir": str(config.output_dir)}
    if controls is not None:
        data["algo_kwargs"] = controls.resolved()
    return data
