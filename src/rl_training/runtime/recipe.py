"""Recipes: all there is to know about an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_training.algorithms.base import Learner
from rl_training.types import BoxActions, Fields, Spaces


@dataclass(frozen=True)
class Recipe:
    name: str
    summary: str
    hyperparameters: type
    actor: Callable[..., Any]  # (spaces, hp, *, device) -> Actor; multi_task: spaces of all tasks, see `actor_of`
    learner: Callable[..., Learner]  # (actor, hp, *, rng)
    fields: Callable[[Spaces, Any], Fields]  # (spaces, hp): what a step holds, see data.fields
    box_actions: BoxActions = "clip"
    multi_task: bool = False  # whether it takes several environments: see runtime.multi_task
    two_players: bool = False  # whether it knows that the state after a move is the other player's
    normalizes: tuple[str, ...] = ()  # wrappers that are on where the config does not say; never on Atari
    raw_steps: bool = False  # whether steps are stored as they come and normalised when drawn: see EnvRunner
    random_start: bool = False  # whether actions are uniformly random before `learning_starts`
    actions: str = "Discrete, MultiDiscrete, MultiBinary, Box"
    observations: str = "Box (vectors, images), Discrete, MultiDiscrete, MultiBinary, Dict, Tuple"

    def actor_of(self, actor: Any, task: int) -> Any:
        """What plays in one task."""
        return actor.for_task(task) if self.multi_task else actor
