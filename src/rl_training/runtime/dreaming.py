"""A look at a world model: an episode that was played beside what the model predicts of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.config import TrainConfig
from rl_training.data.batch import stacked, tree_map
from rl_training.data.normalize import Normalizer
from rl_training.envs.tasks import clips_reward
from rl_training.errors import InputError
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.checkpoints import best_of, open_checkpoint
from rl_training.runtime.evaluation import Player, make_runner
from rl_training.runtime.open_loop import OpenLoop
from rl_training.runtime.open_loop_plots import check_targets
from rl_training.runtime.randomness import generator, own_global_state, seed_of
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.workflows import ACTING, config_of, player_of
from rl_training.types import Array, Observation, Trajectory

LONGEST = 10_000  # observations


def dream_checkpoint(
    checkpoint: str | Path,
    *,
    png: str | Path | None = None,
    gif: str | Path | None = None,
    context: int = 5,
    steps: int = 45,
    samples: int = 8,
    best: bool = False,
    stochastic: bool = False,
    seed: int | None = None,
    fps: float = 10.0,
    device: str = "auto",
    allow_import: bool = True,
) -> OpenLoop:
    """Play an episode with the policy of a checkpoint, or the newest of a run folder, and predict it with its model.

    The model sees the first `context` observations and imagines up to `steps` more. png, gif: files to draw it to; fps:
    images per second of the gif. The other options are those of `evaluate_checkpoint`.
    """
    check_numbers(context, steps, samples)
    targets = check_targets(png, gif, fps)
    opened = open_checkpoint(best_of(checkpoint) if best else checkpoint, ACTING)
    check_algorithm(opened)
    player, config, number = player_of(opened, device=device, allow_import=allow_import)
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    with own_global_state(seed_of(config.seed, "evaluation", number)):
        true, actions = play(player, config, number, context + steps, explore=stochastic)
    if len(true.reward) <= context:
        raise InputError(
            f"the episode ended after {len(true.reward)} observations and nothing is left to imagine: lower context, "
            f"which is {context}, or give another seed"
        )
    predicted = predict(player, true.obs, actions, context=context, samples=samples, seed=config.seed)
    result = OpenLoop(config.tasks[number].env_id, opened.step, context, true, predicted)
    for target, write in targets:
        write(result, target)
    return result


def check_numbers(context: int, steps: int, samples: int) -> None:
    for name, number in {"context": context, "steps": steps, "samples": samples}.items():
        if number < 1:
            raise InputError(f"{name} should be at least 1, got {number}")
    if context + steps > LONGEST:
        raise InputError(f"context and steps should be at most {LONGEST:,} together, got {context + steps:,}")


def check_algorithm(checkpoint: Checkpoint) -> None:
    """Raise an InputError where the policy has no world model that predicts observations."""
    algo = config_of(checkpoint, needs_env=False).algo
    known = [name for name, entry in ALGORITHMS.items() if hasattr(entry.recipe.actor, "open_loop")]
    if algo not in known:
        raise InputError(
            f"{checkpoint.path} was trained by {algo}, which has no model that predicts observations: give a run of "
            f"{' or '.join(known)}"
        )


def play(player: Player, config: TrainConfig, number: int, length: int, *, explore: bool) -> tuple[Trajectory, Array]:
    """(up to `length` observations of an episode, as the environment gives them; the actions between them)"""
    runner = make_runner(player, config, number, 1, raw_steps=True)
    sign = (
        np.sign if clips_reward(config.tasks[number].env_kwargs) else np.asarray
    )  # the model predicts what it learned
    try:
        obs, rewards, goes_on, actions = [copied_row(runner.raw_obs)], [0.0], [1.0], []
        while len(obs) < length and goes_on[-1]:
            step = runner.step(player.actor.act, explore=explore)
            obs.append(copied_row(step["next_obs"]))
            actions.append(np.array(step["action"][0]))
            rewards.append(float(sign(step["reward"][0])))
            goes_on.append(1.0 - step["terminated"][0])
            if step["truncated"][0]:
                break
    finally:
        runner.close()
    true = Trajectory(stacked(obs), np.array(rewards, np.float32), np.array(goes_on, np.float32))
    return true, np.array(actions)


def copied_row(obs: Observation) -> Any:
    """That of the only environment. The arrays of a step are valid until the next."""
    return tree_map(lambda x: np.array(x[0]), obs)


def predict(player: Player, obs: Observation, actions: Array, *, context: int, samples: int, seed: int) -> Trajectory:
    """Predictions in the units of the environment, as the observations [T, ...] are."""
    normalizer = player.normalizer
    seen = obs if normalizer is None else normalizer.observation(obs)
    rng = generator(seed, "imagination")
    predicted = player.actor.open_loop(seen, actions, context=context, samples=samples, rng=rng)  # type: ignore[attr-defined]
    return predicted if normalizer is None else in_units_of_environment(predicted, normalizer)


def in_units_of_environment(predicted: Trajectory, normalizer: Normalizer) -> Trajectory:
    obs, reward = normalizer.original_observation(predicted.obs), normalizer.original_reward(predicted.reward)
    return predicted._replace(obs=obs, reward=reward)
