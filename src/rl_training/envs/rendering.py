"""Images that environments draw: for videos, and as observations."""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rl_training.errors import InputError, MissingPackage
from rl_training.types import Array

MODE = "rgb_array"
NO_SCREEN = {"MUJOCO_GL": "egl", "SDL_VIDEODRIVER": "dummy"}  # MuJoCo and pygame would look for a window


def without_screen() -> None:
    """Have MuJoCo and pygame draw in memory if this machine has no screen. Call it before they are imported."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        for name, value in NO_SCREEN.items():
            os.environ.setdefault(name, value)


def check_draws(env_id: str, spec: EnvSpec | None) -> None:
    """Raise an InputError if the environment declares that it draws no images. Makes nothing."""
    if spec is None or spec.entry_point is None:
        return
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    modes = (getattr(creator, "metadata", None) or {}).get("render_modes")
    if modes is not None and MODE not in modes:
        known = ", ".join(map(str, modes)) or "none"
        raise InputError(
            f"{env_id} draws no images: its render modes are {known}, and {MODE} is needed; an environment that can "
            "draw them declares it in metadata['render_modes']"
        )


def image_of(env: gym.Env) -> Array:
    """[H, W, 3] bytes"""
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    try:
        image: Any = env.render()
    except gym.error.DependencyNotInstalled as error:
        raise MissingPackage(f'{name} cannot be drawn: {error}; pip install "rl-training[video]"') from error
    except Exception as error:
        remedy = "; on a machine without a screen MuJoCo draws with MUJOCO_GL=egl or MUJOCO_GL=osmesa"
        remedy = remedy if "mujoco" in type(error).__module__ or "gl" in str(error).lower() else ""
        raise InputError(f"{name} cannot be drawn: {type(error).__name__}: {error}{remedy}") from error
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,) and image.size):
        got = f"an array {image.shape} of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise InputError(
            f"{name} cannot be drawn: render() should give bytes [height, width, 3], got {got}; correct it in a wrapper"
        )
    return image
