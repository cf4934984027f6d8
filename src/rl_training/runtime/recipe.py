"""Recipes: what an algorithm consists of, and which environments it can train in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.algorithms.base import Learner
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.outcome import TrainResult
from rl_training.types import BoxActions, Fields, Spaces


@dataclass(frozen=True)
class Recipe:
    name: str
    summary: str
    hyperparameters: type
    actor: Callable[..., Any]  # (spaces, hp, *, device) -> Actor; multi_task: spaces of all tasks, see `actor_of`
    learner: Callable[..., Learner]  # (actor, hp, *, rng)
    fields: Callable[[Spaces, Any], Fields]  # (spaces, hp): the entries of a step, see data.fields
    box_actions: BoxActions = "clip"
    multi_task: bool = False  # whether it takes several environments: see runtime.multi_task
    two_players: bool = False  # whether it knows that the state after a move is the other player's
    normalizes: tuple[str, ...] = ()  # wrappers that are on by default; never on Atari
    num_envs: int = 8  # by default
    raw_steps: bool = False  # whether steps are stored as observed and normalised when sampled: see EnvRunner
    random_start: bool = False  # whether actions are uniformly random before `learning_starts`
    asynchronous: bool = False  # whether it can learn from actors with older weights: the config's `execution`
    actions: str = "Discrete, MultiDiscrete, MultiBinary, Box"
    observations: str = "Box (vectors, images), Discrete, MultiDiscrete, MultiBinary, Dict, Tuple"

    def actor_of(self, actor: Any, task: int) -> Any:
        """The actor of one task."""
        return actor.for_task(task) if self.multi_task else actor


def trainer(loop: Callable[..., TrainResult], recipe: Recipe) -> Callable[..., TrainResult]:
    """The function that trains an algorithm with a loop: `train(config, run_suffix=..., callbacks=...)`."""

    def train(
        config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
    ) -> TrainResult:
        return loop(config, recipe, run_suffix=run_suffix, callbacks=callbacks, **options)

    train.__name__, train.__doc__ = f"train_{recipe.name}", recipe.summary
    return train
