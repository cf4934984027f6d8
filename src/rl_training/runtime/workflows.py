"""Train, resume, evaluate, predict: what the command line and users call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl_training.algorithms.base import Algorithm
from rl_training.config import InputError, TrainConfig, nearest
from rl_training.envs.runner import action_map
from rl_training.envs.spaces import ObservationLayout
from rl_training.envs.tasks import SavedSpaces, make_normalizer, spaces_from_json
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.evaluation import Player, evaluate, make_players
from rl_training.runtime.loading import build_config, check_config
from rl_training.runtime.policy import Policy
from rl_training.runtime.randomness import seed_of
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.run import TrainResult
from rl_training.runtime.setup import build_algorithm, pick_device
from rl_training.types import Metrics

__all__ = ["ALGORITHMS", "evaluate_checkpoint", "load_policy", "predict_checkpoint", "resume_training", "train"]

Extend = Literal["keep", "stretch"]
ACTING = ("algorithm", "normalizer")  # the parts of a checkpoint that a policy needs


def train(config: TrainConfig, *, callbacks: Sequence[Callback] = (), **options: Any) -> TrainResult:
    """Train as `config` says. Options: `run_suffix`, `progress` (auto, live, plain, silent)."""
    check_config(config)
    return ALGORITHMS[config.algo].train(config, callbacks=callbacks, **options)


def resume_training(
    path: str | Path,
    *,
    total_timesteps: int | None = None,
    extend: Extend = "keep",
    output_dir: str | Path | None = None,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
    allow_import: bool = True,
    **options: Any,
) -> TrainResult:
    """Go on from a checkpoint, in a new run folder that names its origin.

    With another `total_timesteps`, schedules keep the horizon they were started with and then hold their last value;
    `extend="stretch"` lets them run over the new one.
    """
    if extend not in ("keep", "stretch"):
        raise InputError(f"extend should be keep or stretch, got {extend!r}")
    checkpoint = open_checkpoint(path)
    changes: dict[str, Any] = {} if device is None else {"device": device}
    config = config_of(checkpoint, allow_import=allow_import, **changes)
    total = config.total_timesteps if total_timesteps is None else total_timesteps
    if total <= checkpoint.step:
        raise InputError(
            f"{checkpoint.path} is at step {checkpoint.step:,}, so there is nothing to train up to step {total:,}; "
            f"give total_timesteps more than {checkpoint.step:,}"
        )
    config = dataclasses.replace(
        config,
        total_timesteps=total,
        schedule_horizon=config.horizon if extend == "keep" and total != config.horizon else None,
        output_dir=Path(output_dir) if output_dir is not None else config.output_dir,
    )
    check_config(config)
    return ALGORITHMS[config.algo].train(config, callbacks=callbacks, resume=checkpoint, **options)


def evaluate_checkpoint(
    path: str | Path,
    *,
    num_episodes: int | None = None,
    task: str | None = None,
    device: str = "auto",
    allow_import: bool = True,
) -> Metrics:
    """Evaluate a checkpoint, or a run folder's newest, on fresh environments; of several tasks all, or one."""
    checkpoint = open_checkpoint(path, ACTING)
    config = config_of(checkpoint, allow_import=allow_import, device=device)
    only = None if task is None else task_number(checkpoint, task)
    metrics = evaluate(_restore(checkpoint, device).players, config, only=only, num_episodes=num_episodes)
    assert metrics is not None  # nothing stops it here
    return metrics


def load_policy(path: str | Path, *, task: str | None = None, device: str = "auto") -> Policy:
    """The trained policy, for use in a loop of your own; needs no environment. Of several tasks, name one."""
    checkpoint = open_checkpoint(path, ACTING)
    number = task_number(checkpoint, task)
    algorithm, players, spaces, seed = _restore(checkpoint, device)
    player, saved = players[number], spaces[number]
    to_env, _ = action_map(saved.env_action, player.box_actions)
    layout = ObservationLayout(saved.env_observation)
    return Policy(algorithm, player.act, layout, to_env, player.normalizer, seed_of(seed, "evaluation", number))


def predict_checkpoint(
    path: str | Path, obs: Any, *, deterministic: bool = True, task: str | None = None, device: str = "auto"
) -> Any:
    """The action for one observation, or for N of them."""
    return load_policy(path, task=task, device=device).act(obs, deterministic=deterministic)


def config_of(
    checkpoint: Checkpoint, *, needs_env: bool = True, allow_import: bool = True, **changes: Any
) -> TrainConfig:
    """The config a checkpoint was made with, and changes to it, checked as if it came from a file."""
    try:
        return build_config({**checkpoint.config, **changes}, allow_import=allow_import, needs_env=needs_env)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: its config cannot be used here: {error}") from error


def task_number(checkpoint: Checkpoint, task: str | None) -> int:
    """Which of the checkpoint's tasks is meant; needs no name where there is only one."""
    ids = checkpoint.info["env_id"]
    names = [ids] if isinstance(ids, str) else list(ids)
    if task in names:
        return names.index(task)
    if task is None and len(names) == 1:
        return 0
    if task is None:
        raise InputError(f"{checkpoint.path} has a policy for each of its tasks: give task, one of {', '.join(names)}")
    raise InputError(f"{checkpoint.path} has no task {task!r}{nearest(task, names)} (tasks: {', '.join(names)})")


class Restored(NamedTuple):
    """What a checkpoint gives back without an environment."""

    algorithm: Algorithm
    players: list[Player]
    spaces: list[SavedSpaces]
    seed: int


def _restore(checkpoint: Checkpoint, device: str) -> Restored:
    config = config_of(checkpoint, needs_env=False, device=device)
    recipe = ALGORITHMS[config.algo].recipe
    info, tasks = checkpoint.info["spaces"], config.tasks
    saved = [spaces_from_json(info if len(tasks) == 1 else info[task.env_id]) for task in tasks]
    spaces = [each.model for each in saved]
    hp = Controls(recipe.hyperparameters, config.algo_kwargs, config.horizon).at(checkpoint.step)
    algorithm = build_algorithm(config, recipe, spaces, hp, pick_device(device, spaces, hp))
    algorithm.load_state_dict(checkpoint.state["algorithm"])
    normalizers = [
        make_normalizer(task.env_kwargs, ObservationLayout(each.env_observation).space, 1)
        for task, each in zip(tasks, saved, strict=True)
    ]
    for number, normalizer in enumerate(normalizers):
        if normalizer is not None:
            state = checkpoint.state["normalizer"]
            normalizer.load_state_dict(state if len(tasks) == 1 else state[str(number)])
    return Restored(algorithm, make_players(algorithm, recipe, spaces, normalizers), saved, config.seed)
