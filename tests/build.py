"""An algorithm as a run makes it: an actor, the learner that shares its network, and a replay for its steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training import ALGORITHMS
from rl_training.data.replay import Replay


def build(
    algo: str, spaces: Any, hp: Any, *, rng: np.random.Generator | None = None, device: str = "cpu", **options: Any
) -> Any:
    """A learner; its actor is `learner.actor`."""
    recipe = ALGORITHMS[algo].recipe
    actor = recipe.actor(spaces, hp, device=torch.device(device))
    return recipe.learner(actor, hp, rng=rng or np.random.default_rng(0), **options)


def make_replay(algo: str, learner: Any, spaces: Any, num_envs: int) -> Replay:
    return Replay(
        learner.hp.buffer_capacity,
        num_envs,
        ALGORITHMS[algo].recipe.fields(spaces, learner.hp),
        frame_stack=spaces.frame_stack if isinstance(spaces.observation, gym.spaces.Box) else 1,
        prioritized=learner.prioritized,
    )
