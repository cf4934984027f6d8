"""Recording a video: whole episodes of a trained policy, played as in evaluation by one environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rl_training.envs.rendering import without_screen
from rl_training.envs.runner import FinishedEpisode
from rl_training.errors import InputError
from rl_training.runtime.evaluation import play
from rl_training.runtime.randomness import own_global_state, seed_of
from rl_training.runtime.video import recording
from rl_training.runtime.workflows import open_player


class Recording(NamedTuple):
    episodes: list[FinishedEpisode]
    frames: int
    fps: float


def record_video(
    checkpoint: str | Path,
    path: str | Path,
    *,
    num_episodes: int = 3,
    best: bool = False,
    stochastic: bool = False,
    seed: int | None = None,
    fps: float | None = None,
    task: str | None = None,
    device: str = "auto",
    allow_import: bool = True,
) -> Recording:
    """Play episodes with the policy of a checkpoint, or the newest of a run folder, and write them to a video.

    path: an .mp4 or .gif file. fps: images per second; None: the speed of the environment. The other options are those
    of `evaluate_checkpoint`.
    """
    if num_episodes < 1:
        raise InputError(f"num_episodes should be at least 1, got {num_episodes}")
    without_screen()  # before modules that register environments are imported
    player, config, number = open_player(checkpoint, task=task, best=best, device=device, allow_import=allow_import)
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    with (
        recording(path, config.tasks[number], fps) as video,
        own_global_state(seed_of(config.seed, "evaluation", number)),
    ):
        episodes = play(player, config, number, [num_episodes], explore=stochastic, film=video)
    assert episodes is not None  # nothing stops it here
    return Recording(episodes, video.frames, video.fps)


def describe(recorded: Recording) -> str:
    episodes, frames, fps = recorded
    returns = ", ".join(f"{episode.episode_return:.1f}" for episode in episodes)
    mean = fmean(episode.episode_return for episode in episodes)
    return (
        f"episodes {len(episodes)}, returns {returns} (mean {mean:.1f})\n"
        f"images   {frames:,} at {fps:g} per second, {frames / fps:.1f} s"
    )
