"""The replay loop: step every environment once, store the step, learn from the replay."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import torch

from rl_training.algorithms.replay_based import ReplayLearner
from rl_training.config import TrainConfig
from rl_training.data.replay import Replay
from rl_training.data.ring import replay_bytes
from rl_training.errors import InputError
from rl_training.runtime.limits import usable_bytes
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainingRun
from rl_training.runtime.sources import SteppedSource


def run_off_policy(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, prepare=keep_replay, **options) as run:
        learner, source = cast(ReplayLearner, run.learner), cast(SteppedSource, run.source)
        replay, starts = run.parts["replay"], learner.hp.learning_starts
        if starts >= config.total_timesteps:
            run.progress.message(f"nothing will be learned: learning starts at step {starts:,}, see learning_starts")
        while run.running:
            run.enter("collecting")
            replay.add(source.step(random=recipe.random_start and run.step < starts))
            run.advance(source.env_steps)
            run.enter("learning")
            run.record(learner.learn(replay))
        return run.finish()


def keep_replay(run: TrainingRun) -> None:
    run.keep("replay", make_replay(run), in_best=False)


def make_replay(run: TrainingRun, task: int = 0) -> Replay:
    """The replay of a task; an InputError if it would not fit into memory."""
    learner, spaces = cast(ReplayLearner, run.learner), run.source.spaces[task]
    # Observations with several entries are stored whole: their entries may stack different numbers of frames.
    stack = spaces.frame_stack if isinstance(spaces.observation, gym.spaces.Box) else 1
    capacity, num_envs, usable = learner.hp.buffer_capacity, run.config.num_envs, usable_bytes()
    kind: dict[str, Any] = {"frame_stack": stack, "prioritized": learner.prioritized}
    fields = run.fields[task]
    observations, needed = replay_bytes(capacity, num_envs, fields, **kind)
    if usable is not None and needed > usable:
        size, memory = f"{needed / 1e9:,.1f} GB", f"{usable / 1e9:,.1f} GB of memory"
        raise InputError(f"buffer_capacity: {capacity:,} steps take {size}, and there are {memory}: lower it")
    on_device = isinstance(spaces.observation, gym.spaces.Box) and fits_on(learner.device, observations)
    device = learner.device if on_device else None
    replay = Replay(capacity, num_envs, fields, **kind, device=device, scaling=run.source.normalizers[task])
    columns = {name: fields[name] for name in learner.device_columns}
    if columns and fits_on(learner.device, replay_bytes(capacity, num_envs, {**columns, "obs": {}})[1]):
        replay.keep_on_device(tuple(columns), learner.device)
    return replay


def fits_on(device: torch.device, needed: int) -> bool:
    """Whether a quarter of a GPU's free memory is enough to keep all observations there too."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return 4 * needed <= free
