"""Train, resume, evaluate, predict: the functions for users and the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl_training.config import TrainConfig
from rl_training.data.normalize import Normalizer
from rl_training.envs.rendering import without_screen
from rl_training.envs.spaces import ObservationLayout, action_map, sizes
from rl_training.envs.tasks import SavedSpaces, Together, make_normalizer, spaces_from_json
from rl_training.errors import CheckpointError, InputError, nearest
from rl_training.runtime.atomic_files import remove_abandoned
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpoint_format import MANIFEST, Checkpoint
from rl_training.runtime.checkpoints import best_of, open_checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.evaluation import EpisodesOfTasks, Player, metrics_of, play_tasks
from rl_training.runtime.loading import as_config, build_config, check_config
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.policy import Policy
from rl_training.runtime.randomness import seed_of
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.restoring import checkpoint_errors, restore_part
from rl_training.runtime.setup import build_actor, pick_device
from rl_training.runtime.sources import num_saved_envs
from rl_training.runtime.video import recording
from rl_training.types import BoxActions, Metrics

__all__ = ["ALGORITHMS", "evaluate_checkpoint", "load_policy", "predict_checkpoint", "resume_training", "train"]

Extend = Literal["keep", "stretch"]
ACTING = ("actor", "normalizer", "controls")  # the parts of a checkpoint that a policy needs


def train(
    config: TrainConfig | Mapping[str, Any] | str | Path, *, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    """Train with a config: a TrainConfig, a mapping of its keys, or the path of a YAML file.

    Options: `run_suffix`, `progress` (auto, live, plain, silent).
    """
    config = as_config(config)
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
    """Continue from a checkpoint, in a new run folder whose metadata name the origin.

    With another `total_timesteps`, schedules keep their horizon and then hold their last value; with
    `extend="stretch"` they run over the new total.
    """
    if extend not in ("keep", "stretch"):
        raise InputError(f"extend should be keep or stretch, got {extend!r}")
    checkpoint = open_checkpoint(path)
    if "run" not in checkpoint.state:
        raise CheckpointError(
            f"{checkpoint.path} holds a policy alone, without optimizers, environments and replay: its training cannot "
            "be resumed; resume the run folder that it was packed from, or train its config again"
        )
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
    _check_num_envs(checkpoint, config)
    remove_abandoned(checkpoint.path.parent)
    return ALGORITHMS[config.algo].train(config, callbacks=callbacks, resume=checkpoint, **options)


def _check_num_envs(checkpoint: Checkpoint, config: TrainConfig) -> None:
    """Compare the numbers of environments before that many are made: the number in a file may be huge."""
    with checkpoint_errors(f"{checkpoint.path / 'state.json'}: runner cannot be restored"):
        saved = num_saved_envs(checkpoint.state["runner"])
        if saved != config.num_envs:
            raise InputError(f"it has {saved} environments, but config.json has num_envs: {config.num_envs}")


def evaluate_checkpoint(path: str | Path, **options: Any) -> Metrics:
    """Evaluate a checkpoint, or the newest of a run folder, in new environments of all tasks or one.

    The options are those of `play_checkpoint`.
    """
    return play_checkpoint(path, **options).metrics


class Played(NamedTuple):
    """The evaluation of a checkpoint."""

    checkpoint: Checkpoint
    config: TrainConfig
    episodes: EpisodesOfTasks
    metrics: Metrics

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint.path),
            "global_step": self.checkpoint.step,
            "algo": self.config.algo,
            "seed": self.config.seed,
            **self.metrics,
            "returns": {env_id: [each.episode_return for each in played] for env_id, played in self.episodes.items()},
            "lengths": {env_id: [each.length for each in played] for env_id, played in self.episodes.items()},
        }


def play_checkpoint(
    path: str | Path,
    *,
    num_episodes: int | None = None,
    task: str | None = None,
    best: bool = False,
    stochastic: bool = False,
    seed: int | None = None,
    video: str | Path | None = None,
    device: str = "auto",
    allow_import: bool = True,
) -> Played:
    """Evaluate a checkpoint, or the newest of a run folder, in new environments of all tasks or one.

    best: take the run's checkpoint with the best evaluation. stochastic: sample actions, as in training. seed: of
    environments and actions, by default that of the run. video: an .mp4 or .gif file for the first environment.
    """
    checkpoint = open_checkpoint(best_of(path) if best else path, ACTING)
    if video is not None:
        without_screen()  # before modules that register environments are imported
    config = config_of(checkpoint, allow_import=allow_import, device=device, num_threads="auto")
    only = None if task is None and video is None else task_number(checkpoint, config, task)
    seeded = config if seed is None else dataclasses.replace(config, seed=seed)
    players = _restore(checkpoint, config).players
    with recording(video, config.tasks[only or 0]) if video is not None else nullcontext() as film:
        episodes = play_tasks(players, seeded, only=only, num_episodes=num_episodes, explore=stochastic, film=film)
    assert episodes is not None  # nothing stops it here
    return Played(checkpoint, seeded, episodes, metrics_of(episodes, players, config))


def open_player(
    path: str | Path,
    *,
    task: str | None = None,
    best: bool = False,
    device: str = "auto",
    allow_import: bool = True,
) -> tuple[Player, TrainConfig, int]:
    """(the actor of one task with what it plays with, the config, the number of the task)"""
    checkpoint = open_checkpoint(best_of(path) if best else path, ACTING)
    return player_of(checkpoint, task=task, device=device, allow_import=allow_import)


def player_of(
    checkpoint: Checkpoint, *, task: str | None = None, device: str = "auto", allow_import: bool = True
) -> tuple[Player, TrainConfig, int]:
    """`open_player` of a checkpoint that has been read."""
    config = config_of(checkpoint, allow_import=allow_import, device=device, num_threads="auto")
    number = task_number(checkpoint, config, task)
    return _restore(checkpoint, config).players[number], config, number


def load_policy(path: str | Path, *, task: str | None = None, device: str = "auto") -> Policy:
    """The trained policy, for use in a loop of your own, without an environment. Of several tasks, name one."""
    return open_policy(path, task=task, device=device).policy


class Opened(NamedTuple):
    """A policy, and what it was read from."""

    policy: Policy
    checkpoint: Checkpoint
    config: TrainConfig
    spaces: SavedSpaces
    box_actions: BoxActions
    env_id: str


def open_policy(path: str | Path, *, task: str | None = None, best: bool = False, device: str = "auto") -> Opened:
    checkpoint = open_checkpoint(best_of(path) if best else path, ACTING)
    config = config_of(checkpoint, needs_env=False, device=device, num_threads="auto")
    number = task_number(checkpoint, config, task)
    players, spaces, layouts = _restore(checkpoint, config)
    player = players[number]
    to_env, _ = action_map(spaces[number].env_action, player.box_actions)
    seed = seed_of(config.seed, "evaluation", number)
    policy = Policy(player.actor, layouts[number], to_env, player.normalizer, seed)
    return Opened(policy, checkpoint, config, spaces[number], player.box_actions, config.tasks[number].env_id)


def predict_checkpoint(
    path: str | Path, obs: Any, *, deterministic: bool = True, task: str | None = None, device: str = "auto"
) -> Any:
    """The action for one observation, or for N of them."""
    return load_policy(path, task=task, device=device).act(obs, deterministic=deterministic)


def config_of(
    checkpoint: Checkpoint, *, needs_env: bool = True, allow_import: bool = True, **changes: Any
) -> TrainConfig:
    """The config of a checkpoint with `changes`, checked like one from a file."""
    with checkpoint_errors(f"{checkpoint.path / 'config.json'}: its config cannot be used here"):
        return build_config({**checkpoint.config, **changes}, allow_import=allow_import, needs_env=needs_env)


def task_number(checkpoint: Checkpoint, config: TrainConfig, task: str | None) -> int:
    """The number of a task by its env_id, which may be None if there is only one task."""
    names = [each.env_id for each in config.tasks]
    if task in names:
        return names.index(task)
    if task is None and len(names) == 1:
        return 0
    if task is None:
        raise InputError(f"{checkpoint.path} has a policy for each of its tasks: give task, one of {', '.join(names)}")
    raise InputError(f"{checkpoint.path} has no task {task!r}{nearest(task, names)} (tasks: {', '.join(names)})")


class Restored(NamedTuple):
    """The parts of a policy that need no environment, for each task."""

    players: list[Player]
    spaces: list[SavedSpaces]
    layouts: list[ObservationLayout]


def _restore(checkpoint: Checkpoint, config: TrainConfig) -> Restored:
    recipe, tasks = ALGORITHMS[config.algo].recipe, config.tasks
    with checkpoint_errors(f"{checkpoint.path / MANIFEST}: its spaces cannot be used"):
        info = checkpoint.info["spaces"]
        saved = [spaces_from_json(info if len(tasks) == 1 else info[task.env_id]) for task in tasks]
        layouts = [ObservationLayout(each.env_observation) for each in saved]
        normalizers = [
            make_normalizer(task.env_kwargs, layout.space, 1) for task, layout in zip(tasks, layouts, strict=True)
        ]
        for each, layout, normalizer in zip(saved, layouts, normalizers, strict=True):
            _check_spaces(each, layout, normalizer, recipe.box_actions)
    spaces = [each.model for each in saved]
    controls = Controls.of(config, recipe.hyperparameters)
    restore_part(checkpoint, "controls", controls)
    hp = controls.at(checkpoint.step)
    with checkpoint_errors(f"{checkpoint.path}: an actor for its config and spaces cannot be made"):
        actor = build_actor(config, recipe, spaces, hp, pick_device(config.device, spaces, hp))
    restore_part(checkpoint, "actor", actor)
    present = {str(i): normalizer for i, normalizer in enumerate(normalizers) if normalizer is not None}
    if present:
        restore_part(checkpoint, "normalizer", present["0"] if len(tasks) == 1 else Together(present))
    actors = [recipe.actor_of(actor, task) for task in range(len(tasks))]
    players = [Player(*each, recipe.box_actions) for each in zip(actors, spaces, normalizers, strict=True)]
    return Restored(players, saved, layouts)


def _check_spaces(
    saved: SavedSpaces, layout: ObservationLayout, normalizer: Normalizer | None, box_actions: BoxActions
) -> None:
    """Raise an InputError if the spaces of the environment are not those of the model."""
    observation = normalizer.space(layout.space) if normalizer else layout.space
    _, action = action_map(saved.env_action, box_actions)
    pairs = {"observation": (observation, saved.model.observation), "action": (action, saved.model.action)}
    for what, (env, model) in pairs.items():
        if sizes(env) != sizes(model):
            raise InputError(f"{what}s of the environment are {env}, those of the model {model}")
