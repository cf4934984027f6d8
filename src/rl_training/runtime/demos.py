"""Recording demonstrations: whole episodes of a trained policy, played as in evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.config import TrainConfig
from rl_training.data.batch import tree_map
from rl_training.data.demonstrations import Demonstrations, check_demonstrations, file_content
from rl_training.envs.demonstrations import join
from rl_training.envs.runner import EnvRunner
from rl_training.envs.spaces import action_map
from rl_training.envs.tasks import spaces_to_json
from rl_training.errors import InputError
from rl_training.runtime.atomic_files import write_atomic
from rl_training.runtime.evaluation import Player, make_runner, shares
from rl_training.runtime.randomness import own_global_state, seed_of
from rl_training.runtime.workflows import open_player
from rl_training.types import Step


def record_demonstrations(
    checkpoint: str | Path,
    path: str | Path,
    *,
    num_episodes: int = 20,
    seed: int | None = None,
    stochastic: bool = False,
    task: str | None = None,
    device: str = "auto",
    allow_import: bool = True,
) -> Demonstrations:
    """Play episodes with the policy of a checkpoint, or the newest of a run folder, and write them to an npz file.

    seed: of environments and actions, by default that of the run. stochastic: sample actions as in training.
    """
    if num_episodes < 1:
        raise InputError(f"num_episodes should be at least 1, got {num_episodes}")
    if (target := Path(path)).is_dir():
        raise InputError(f"{target} is a folder: give the file for the demonstrations")
    player, config, number = open_player(checkpoint, task=task, device=device, allow_import=allow_import)
    if player.spaces.num_players == 2:
        raise InputError(f"{config.tasks[number].env_id} is a game of two players: it has no one expert to imitate")
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    with own_global_state(seed_of(config.seed, "demonstrations", number)):
        demonstrations = play(player, config, number, num_episodes, explore=stochastic)
    content = file_content(demonstrations)
    try:
        write_atomic(target, lambda file: np.savez_compressed(file, **content))  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
    return demonstrations


def describe(demonstrations: Demonstrations) -> str:
    returns, lengths = demonstrations.returns, demonstrations.lengths
    return (
        f"episodes {len(lengths)}, steps {demonstrations.num_steps:,}\n"
        f"return   {returns.mean():.1f} ± {returns.std():.1f}\n"
        f"length   {lengths.mean():.1f}"
    )


def play(player: Player, config: TrainConfig, number: int, num_episodes: int, *, explore: bool) -> Demonstrations:
    """The episodes of each environment, one environment after the other."""
    remaining = shares(num_episodes)
    runner = make_runner(player, config, number, len(remaining), stream="demonstrations", raw_steps=True)
    try:
        steps: list[list[Step]] = [[] for _ in remaining]
        ends: list[list[int]] = [[] for _ in remaining]  # the number of steps up to the end of each episode
        while any(remaining):
            step = runner.step(player.actor.act, explore=explore)
            for env in np.flatnonzero(step.get("live", np.ones(len(remaining), bool))).tolist():
                if remaining[env]:
                    steps[env].append(_row(step, env))
            for env, *_ in runner.statistics.finished:
                if remaining[env]:
                    remaining[env] -= 1
                    ends[env].append(len(steps[env]))
        return _joined(runner, player, steps, ends)
    finally:
        runner.close()


ENTRIES = ("obs", "next_obs", "action", "reward", "terminated", "truncated")


def _row(step: Step, env: int) -> Step:
    """A copy: the arrays of a step are valid until the next."""
    return {key: tree_map(lambda x: np.array(x[env]), step[key]) for key in ENTRIES}


def _joined(runner: EnvRunner, player: Player, steps: list[list[Step]], ends: list[list[int]]) -> Demonstrations:
    rows = [row for own in steps for row in own]
    columns: dict[str, Any] = {key: join([tree_map(lambda x: x[None], row[key]) for row in rows]) for key in ENTRIES}
    spaces = spaces_to_json(runner)
    to_env, _ = action_map(runner.envs.single_action_space, player.box_actions)
    columns["action"] = np.asarray(to_env(columns["action"]))
    columns["reward"] = columns["reward"].astype(np.float32)
    lengths = [np.diff(own, prepend=0) for own in ends]
    demonstrations = Demonstrations(
        env_id=runner.envs.env_id,
        observation_space=spaces["env_observation"],
        action_space=spaces["env_action"],
        episode_end=np.cumsum(np.concatenate(lengths), dtype=np.int64),
        **columns,
    )
    check_demonstrations(demonstrations)
    return demonstrations
