"""Train, resume, evaluate, predict: what the command line and users call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rl_training.config import InputError, TrainConfig
from rl_training.envs.runner import action_map
from rl_training.envs.space_json import space_from_json
from rl_training.envs.spaces import ObservationLayout
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.evaluation import evaluate
from rl_training.runtime.loading import build_config, check_config
from rl_training.runtime.policy import Policy
from rl_training.runtime.randomness import seed_of
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.run import TrainResult
from rl_training.runtime.setup import build_algorithm, make_normalizer, pick_device
from rl_training.types import Metrics, Spaces

__all__ = ["ALGORITHMS", "evaluate_checkpoint", "load_policy", "predict_checkpoint", "resume_training", "train"]

Extend = Literal["keep", "stretch"]
ACTING = ("algorithm", "normalizer")  # the parts of a checkpoint that a policy needs


def train(config: TrainConfig, *, callbacks: Sequence[Callback] = (), **options: Any) -> TrainResult:
    """Train as `config` says. Options: `run_suffix`, `progress` (auto, plain, silent)."""
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
    path: str | Path, *, num_episodes: int | None = None, device: str = "auto", allow_import: bool = True
) -> Metrics:
    """Evaluate a checkpoint, or a run folder's newest, on fresh environments."""
    checkpoint = open_checkpoint(path, ACTING)
    config = config_of(checkpoint, allow_import=allow_import, device=device)
    policy = _policy(checkpoint, device)
    recipe = ALGORITHMS[config.algo].recipe
    metrics = evaluate(
        policy.algorithm,
        config,
        box_actions=recipe.box_actions,
        normalizer=policy.normalizer,
        num_episodes=num_episodes,
    )
    assert metrics is not None  # nothing stops it here
    return metrics


def load_policy(path: str | Path, *, device: str = "auto") -> Policy:
    """The trained policy, for use in a loop of your own; needs no environment."""
    return _policy(open_checkpoint(path, ACTING), device)


def predict_checkpoint(path: str | Path, obs: Any, *, deterministic: bool = True, device: str = "auto") -> Any:
    """The action for one observation, or for N of them."""
    return load_policy(path, device=device).act(obs, deterministic=deterministic)


def config_of(
    checkpoint: Checkpoint, *, needs_env: bool = True, allow_import: bool = True, **changes: Any
) -> TrainConfig:
    """The config a checkpoint was made with, and changes to it, checked as if it came from a file."""
    try:
        return build_config({**checkpoint.config, **changes}, allow_import=allow_import, needs_env=needs_env)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: its config cannot be used here: {error}") from error


def _policy(checkpoint: Checkpoint, device: str) -> Policy:
    config = config_of(checkpoint, needs_env=False, device=device)
    recipe = ALGORITHMS[config.algo].recipe
    saved = {name: space_from_json(data) for name, data in checkpoint.info["spaces"].items()}
    spaces = Spaces(saved["observation"], saved["action"])
    hp = Controls(recipe.hyperparameters, config.algo_kwargs, config.horizon).at(checkpoint.step)
    where: torch.device = pick_device(device, spaces)
    algorithm = build_algorithm(config, recipe, spaces, hp, where)
    algorithm.load_state_dict(checkpoint.state["algorithm"])
    layout = ObservationLayout(saved["env_observation"])
    normalizer = make_normalizer(config, layout.space, 1)
    if normalizer is not None:
        normalizer.load_state_dict(checkpoint.state["normalizer"])
    to_env, _ = action_map(saved["env_action"], recipe.box_actions)
    return Policy(algorithm, layout, to_env, normalizer, seed_of(config.seed, "evaluation"))
