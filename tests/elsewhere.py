"""An actor alone, here or in another process: from an algorithm's name, spaces as JSON, hyperparameters, weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_training import ALGORITHMS
from rl_training.envs.tasks import spaces_from_json
from rl_training.types import Observation, Weights


def actor_alone(algo: str, spaces_json: Mapping[str, Any], hp: Any) -> Any:
    """What `recipe.actor` gives, without a learner, with weights of its own."""
    recipe, spaces = ALGORITHMS[algo].recipe, spaces_from_json(spaces_json).model
    return recipe.actor([spaces] if recipe.multi_task else spaces, hp, device=torch.device("cpu"))


def play(algo: str, actor: Any, observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """All that the actor decides, step by step, first by its best knowledge and then exploring."""
    decisions = []
    for explore in (False, True):
        rng, memory = np.random.default_rng(7), {}
        for obs in observations:
            made = ALGORITHMS[algo].recipe.actor_of(actor, 0).act(obs, memory, explore=explore, rng=rng)
            memory = made.memory or {}
            decisions.append({"action": made.action, "extras": made.extras, "memory": memory})
    return decisions


def play_elsewhere(
    algo: str,
    spaces_json: Mapping[str, Any],
    hp: Any,
    weights: Weights,
    observations: Sequence[Observation],
    entry: Any = None,
) -> tuple[Weights, list[dict[str, Any]], int]:
    """To be called in another process: (weights, decisions, process id). entry: where the table there has none."""
    torch.set_num_threads(1)
    if entry is not None:
        ALGORITHMS[algo] = entry
    actor = actor_alone(algo, spaces_json, hp)
    actor.load(weights)
    return actor.weights(), play(algo, actor, observations), os.getpid()
