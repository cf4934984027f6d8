"""Demonstrations of random play, for runs that only have to learn from something."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.data.batch import copied
from rl_training.data.demonstrations import Demonstrations, file_content
from rl_training.envs.factory import make_envs
from rl_training.envs.space_json import space_to_json

FILES: dict[str, str] = {}
NAMES = ("obs", "next_obs", "action", "reward", "terminated", "truncated")


def random_demonstrations(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> str:
    """The path of a file with 40 steps of random play; each is made once."""
    key = json.dumps([env_id, env_kwargs or {}])
    if key not in FILES:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        FILES[key] = save(Path(folder) / "demonstrations.npz", play_randomly(env_id, env_kwargs or {}, 40))
    return FILES[key]


def play_randomly(env_id: str, env_kwargs: Mapping[str, Any], num_steps: int) -> Demonstrations:
    return play(env_id, env_kwargs, num_steps, lambda obs, space: np.asarray(space.sample())[None])


def play(
    env_id: str, env_kwargs: Mapping[str, Any], num_steps: int, choose: Callable[[Any, gym.Space], np.ndarray]
) -> Demonstrations:
    """choose: from observations [1, ...] and the action space to actions [1, ...]."""
    envs = make_envs(env_id, num_envs=1, seed=0, env_kwargs=env_kwargs, training=False)
    space = envs.single_action_space
    space.seed(0)
    obs, rows = copied(envs.reset()), []
    for _ in range(num_steps):
        action = choose(obs, space)
        result = envs.step(action)
        flags = (result.reward.copy(), result.terminated.copy(), result.truncated.copy())  # valid until the next step
        rows.append((obs, copied(result.next_obs), action, *flags))
        obs = copied(result.obs)
    envs.close()
    columns = {name: together([row[i] for row in rows]) for i, name in enumerate(NAMES)}
    ends = np.flatnonzero(columns["terminated"] | columns["truncated"]) + 1
    return Demonstrations(
        env_id=env_id,
        observation_space=space_to_json(envs.layout.source),
        action_space=space_to_json(space),
        episode_end=np.unique([*ends, num_steps]).astype(np.int64),
        **columns,
    )


def together(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: together([part[key] for part in parts]) for key in parts[0]}
    array = np.concatenate(parts)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def save(path: Path, demonstrations: Demonstrations) -> str:
    np.savez_compressed(path, **file_content(demonstrations))
    return str(path)
