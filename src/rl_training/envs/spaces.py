"""Conversion between the spaces of an environment and those of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.data.normalize import Normalizer
from rl_training.errors import InputError
from rl_training.types import Array, BoxActions, Observation, Spaces

if TYPE_CHECKING:
    from rl_training.envs.episodes import Envs

ActionMap: TypeAlias = Callable[[Array], Array]  # from the model's actions [N, ...] to the environments'


class Leaf(NamedTuple):
    """One array of an observation."""

    key: str  # the path joined by "."; "" where the observation is a single array
    path: tuple[Any, ...]  # the keys and indices that lead to it in the environment's observation
    space: gym.Space  # the model's
    start: Any  # the space's first number, which is subtracted so that the model counts from 0; None: it is 0


def model_space(space: gym.Space) -> gym.Space:
    """The model's observation space: a Box of float32 or uint8, a discrete space from 0, or a flat Dict of these."""
    leaves = list(_leaves(space))
    return leaves[0].space if leaves[0].key == "" else spaces.Dict({leaf.key: leaf.space for leaf in leaves})


def _leaves(space: gym.Space, path: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _leaves(child, (*path, index))
    else:
        yield Leaf(".".join(map(str, path)), path, *_plain(space))


def _plain(space: gym.Space) -> tuple[gym.Space, Any]:
    """(the model's space, start) of a space that is neither Dict nor Tuple. See `Leaf`."""
    if isinstance(space, spaces.Box):
        if space.dtype in (np.float32, np.uint8):
            return space, None
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return spaces.Box(low, high, space.shape, np.float32), None
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n)), int(space.start) or None
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec), space.start if np.any(space.start) else None
    if isinstance(space, spaces.MultiBinary):
        return space, None
    raise InputError(
        f"space {space} is not supported: use Box, Discrete, MultiDiscrete, MultiBinary, or (for observations) "
        "Dict and Tuple of those; a gymnasium.ObservationWrapper can turn it into one"
    )


def _dtype(space: gym.Space) -> np.dtype:
    return np.dtype(np.int64) if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else np.dtype(space.dtype)


class ObservationLayout:
    """Converts an environment's observations to the model's arrays [N, ...]."""

    def __init__(self, space: gym.Space) -> None:
        self.source = space
        self.space = model_space(space)
        self.leaves = list(_leaves(space))
        self.single = self.leaves[0].key == ""
        self.plain = self.single and self.leaves[0].start is None  # the environment's array is the model's

    def empty(self, num_envs: int) -> Observation:
        arrays = {leaf.key: np.zeros((num_envs, *(leaf.space.shape or ())), _dtype(leaf.space)) for leaf in self.leaves}
        return arrays[""] if self.single else arrays

    def write(self, buffer: Observation, index: int, obs: Any) -> None:
        """Write one environment's observation to row `index` of `buffer`."""
        if self.plain:
            buffer[index] = obs  # type: ignore[index]
            return
        for leaf in self.leaves:
            value = obs
            for part in leaf.path:
                value = value[part]
            array: Any = buffer if self.single else buffer[leaf.key]  # type: ignore[call-overload]
            array[index] = value if leaf.start is None else value - leaf.start

    def is_one(self, obs: Any) -> bool:
        """Whether `obs` is the observation of one environment. Otherwise it is a batch [N, ...]."""
        leaf = self.leaves[0]
        for part in leaf.path:
            obs = obs[part]
        return np.ndim(obs) == len(leaf.space.shape or ())

    def batch(self, obs: Any) -> Observation:
        """A vector environment's observations as the model's arrays [N, ...], copied only where they differ."""
        arrays = {}
        for leaf in self.leaves:
            value = obs
            for part in leaf.path:
                value = value[part]
            if leaf.start is not None:
                value = value - leaf.start
            arrays[leaf.key] = np.asarray(value, _dtype(leaf.space))
        return arrays[""] if self.single else arrays


def model_side(envs: Envs, box_actions: BoxActions, normalizer: Normalizer | None) -> tuple[ActionMap, Spaces]:
    """(the action map, the model's spaces)."""
    to_env, action = action_map(envs.single_action_space, box_actions)
    observation = envs.single_observation_space
    seen = normalizer.space(observation) if normalizer else observation
    return to_env, Spaces(seen, action, envs.frame_stack, envs.num_players)


def action_map(space: gym.Space, box_actions: BoxActions) -> tuple[ActionMap, gym.Space]:
    """(the action map, the model's action space).

    "clip" is for policies whose Box actions are unbounded, such as Gaussian ones: the environment gets the action
    clipped to its bounds. "scale" is for tanh policies: [-1, 1] is scaled to the bounds.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return (lambda action: action + start) if start else np.asarray, spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        starts = space.start
        return (lambda action: action + starts) if np.any(starts) else np.asarray, spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return lambda action: np.asarray(action).astype(np.int8), space
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return _scaled(space) if box_actions == "scale" else _clipped(space)
    raise InputError(
        f"action space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary or a Box of floats; "
        "a gymnasium.ActionWrapper can turn it into one"
    )


def _clipped(space: spaces.Box) -> tuple[ActionMap, gym.Space]:
    low, high, dtype = space.low, space.high, space.dtype

    def clip(action: Array) -> Array:
        return np.asarray(np.minimum(np.maximum(action, low), high), dtype)

    return clip, spaces.Box(low.astype(np.float32), high.astype(np.float32), space.shape, np.float32)


def _scaled(space: spaces.Box) -> tuple[ActionMap, gym.Space]:
    low, high, dtype = space.low, space.high, space.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        half_range = 0.5 * (high - low)
    if not np.isfinite(half_range).all():  # the range may overflow although the bounds are finite
        raise InputError(
            f"{space} is bounded by [{low.min()}, {high.max()}], but this algorithm's actions in [-1, 1] are scaled to "
            "the bounds: declare finite ones in the environment's action_space (a wrapper can), or use an algorithm "
            "with a Gaussian policy, such as ppo"
        )

    def scale(action: Array) -> Array:
        scaled = low + (action + 1.0) * half_range
        return np.asarray(np.minimum(np.maximum(scaled, low), high), dtype)  # rounding may cross a bound

    return scale, spaces.Box(-1.0, 1.0, space.shape, np.float32)


def sizes(space: gym.Space) -> Any:
    """The properties of a space that a model depends on, which the bounds of a Box are not."""
    if isinstance(space, spaces.Dict):
        return {key: sizes(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Box):
        return (space.shape, space.dtype)
    return space
