"""Demonstrations from a file or a Minari dataset, in the spaces of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.data.batch import rows_of
from rl_training.data.demonstrations import Demonstrations, check_demonstrations, read_demonstrations
from rl_training.envs.faults import out_of_range
from rl_training.envs.space_json import space_from_json, space_to_json
from rl_training.envs.spaces import ObservationLayout, model_space, sizes
from rl_training.errors import InputError, MissingPackage
from rl_training.types import Array, Observation, Spaces

MINARI = "minari:"  # before the name of a dataset


def load_demonstrations(source: str) -> Demonstrations:
    """From the file of `rl-training demos`, `minari:NAME`, or the folder of a Minari dataset. Raises an InputError."""
    if source.startswith(MINARI) or Path(source).is_dir():
        return from_minari(source)
    return read_demonstrations(source)


def in_model_spaces(demonstrations: Demonstrations, spaces: Spaces) -> tuple[Observation, Array]:
    """(observations, actions) [S, ...] as a model with these spaces reads them, but for normalisation."""
    try:
        observation = model_space(space_from_json(demonstrations.observation_space))
        env_action = space_from_json(demonstrations.action_space)
        start = getattr(env_action, "start", 0)
        action = model_space(env_action)
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"their spaces cannot be read: {type(error).__name__}: {error}") from error
    for what, found, wanted in (
        ("observation", observation, spaces.observation),
        ("action", action, spaces.action),
    ):
        if sizes(found) != sizes(wanted):
            raise InputError(
                f"demonstrations of {demonstrations.env_id} have {what}s {found}, this environment has {wanted}: "
                "record them in this environment, with the same wrappers"
            )
    actions = demonstrations.action - start if np.any(start) else demonstrations.action
    _check_arrays("observation", observation, demonstrations.obs)
    _check_arrays("action", action, actions)
    return demonstrations.obs, actions.astype(np.float32 if isinstance(action, gym.spaces.Box) else actions.dtype)


def _check_arrays(what: str, space: gym.Space, arrays: Any) -> None:
    """Raise an InputError where arrays [S, ...] are not of their space."""
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(arrays, dict) or arrays.keys() != space.spaces.keys():
            raise InputError(f"{what}s lack some of {', '.join(space.spaces)}")
        for key, part in space.spaces.items():
            _check_arrays(f"{what} {key!r}", part, arrays[key])
        return
    if isinstance(arrays, dict) or arrays.shape[1:] != (space.shape or ()):
        raise InputError(f"{what}s of {space} should be one array of that shape")
    if isinstance(space, gym.spaces.Box) and (space.dtype == np.uint8) != (arrays.dtype == np.uint8):
        raise InputError(f"{what}s of {space} should have dtype {space.dtype}, got {arrays.dtype}")
    counted = isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    if counted and (arrays.dtype.kind not in "iu" or out_of_range(space, arrays).any()):  # type: ignore[arg-type]
        raise InputError(f"some {what}s are not in {space}")


def from_minari(source: str) -> Demonstrations:
    """A dataset that is on this machine. Raises an InputError."""
    try:
        import minari
    except ImportError as error:
        raise MissingPackage(f'{source} is a Minari dataset: pip install "rl-training[minari]"') from error
    name = source.removeprefix(MINARI)
    try:
        if source.startswith(MINARI):
            dataset = minari.load_dataset(name)
        else:
            folder = Path(name)
            dataset = minari.MinariDataset(folder / "data" if (folder / "data").is_dir() else folder)
        episodes = list(dataset.iterate_episodes())
        return _of_episodes(name, dataset.observation_space, dataset.action_space, episodes)
    except InputError:
        raise
    except Exception as error:  # whatever the package raises for what it cannot read
        raise InputError(f"{source} cannot be read as a Minari dataset: {type(error).__name__}: {error}") from error


def _of_episodes(
    name: str, observation_space: gym.Space, action_space: gym.Space, episodes: Sequence[Any]
) -> Demonstrations:
    """An episode of n steps has n + 1 observations, nested as its space is."""
    if not episodes:
        raise InputError(f"the Minari dataset {name} has no episodes")
    layout = ObservationLayout(observation_space)
    seen = [layout.batch(episode.observations) for episode in episodes]
    found = Demonstrations(
        env_id=name,
        observation_space=space_to_json(observation_space),
        action_space=space_to_json(action_space),
        obs=join([rows_of(obs, slice(None, -1)) for obs in seen]),
        next_obs=join([rows_of(obs, slice(1, None)) for obs in seen]),
        action=np.concatenate([np.asarray(episode.actions) for episode in episodes]),
        reward=np.concatenate([episode.rewards for episode in episodes]).astype(np.float32),
        terminated=np.concatenate([episode.terminations for episode in episodes]).astype(bool),
        truncated=np.concatenate([episode.truncations for episode in episodes]).astype(bool),
        episode_end=np.cumsum([len(episode.rewards) for episode in episodes], dtype=np.int64),
    )
    check_demonstrations(found)
    return found


def join(parts: Sequence[Observation]) -> Observation:
    """Observations [S, ...] of several parts, one after the other."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: np.concatenate([part[key] for part in parts]) for key in first}  # type: ignore[call-overload]
    return np.concatenate(parts)  # type: ignore[arg-type]
