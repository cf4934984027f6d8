"""Spaces as JSON. A checkpoint holds them, so that it can be used without its environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import InputError


def space_to_json(space: gym.Space) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        bounds = {"low": _compact(space.low), "high": _compact(space.high)}
        return {"space": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"space": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"space": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"space": "MultiBinary", "n": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"space": "Dict", "spaces": {key: space_to_json(child) for key, child in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"space": "Tuple", "spaces": [space_to_json(child) for child in space.spaces]}
    raise InputError(
        f"space {space} cannot be written to a checkpoint: use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    )


def space_from_json(data: dict[str, Any]) -> gym.Space:
    kind = data["space"]
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (np.broadcast_to(np.array(data[bound], dtype), shape) for bound in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]), start=np.array(data["start"]))
    if kind == "MultiBinary":
        shape = data["n"]
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)  # a vector's shape is given as an int
    if kind == "Dict":
        return spaces.Dict({key: space_from_json(child) for key, child in data["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(child) for child in data["spaces"]])
    raise InputError(f"unknown space {kind!r} in a checkpoint")


def _compact(bound: np.ndarray) -> Any:
    """One number where all bounds are equal, as those of images are."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
