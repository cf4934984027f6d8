"""Images of episodes: one environment of several is rendered after each reset and step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator

from rl_training.config import EnvOptions
from rl_training.envs.episodes import Envs, Episodes, SyncEnvs
from rl_training.envs.factory import check_env_id, spec_of
from rl_training.errors import InputError, MissingPackage
from rl_training.types import Array

MODE = "rgb_array"
USUAL_FPS = 30  # where an environment does not say how fast it is
ATARI_FPS = 60  # of the console
NO_SCREEN = {"MUJOCO_GL": "egl", "SDL_VIDEODRIVER": "dummy"}  # MuJoCo and pygame would look for a window


class Filmed(gym.Wrapper):
    """Passes an image to `show` for each observation of the episodes that are played.

    The first image of an episode is shown with its first step: an environment is reset once more after its last one.
    """

    def __init__(self, env: gym.Env, show: Callable[[Array], None]) -> None:
        super().__init__(env)
        self.show = show
        self.first: Array | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        self.first = image_of(self.env)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if self.first is not None:
            self.show(self.first)
            self.first = None
        self.show(image_of(self.env))
        return result


def film(envs: Envs, show: Callable[[Array], None]) -> Callable[[], None]:
    """Show the first of N environments. Returns the function that ends this."""
    assert isinstance(envs, SyncEnvs)  # see `filmed_kwargs`
    episodes = envs.envs[0]
    assert isinstance(episodes, Episodes)
    before = episodes.env
    episodes.env = Filmed(before, show)

    def end() -> None:
        episodes.env = before

    return end


def filmed_kwargs(env_id: str, env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The env_kwargs with which the environment can be filmed: in this process, drawing images.

    An InputError if it declares that it cannot.
    """
    check_env_id(env_id)
    spec = spec_of(env_id)
    if spec is not None and spec.entry_point is not None:
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
        modes = (getattr(creator, "metadata", None) or {}).get("render_modes")
        if modes is not None and MODE not in modes:
            known = ", ".join(map(str, modes)) or "none"
            raise InputError(f"{env_id} cannot be filmed: its render modes are {known}, and a video needs {MODE}")
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        for name, value in NO_SCREEN.items():
            os.environ.setdefault(name, value)
    return {**env_kwargs, "backend": "sync", "render_mode": MODE}


def frames_per_second(envs: Envs, env_kwargs: Mapping[str, Any]) -> float:
    """The real speed: there is an image for each step of the agent, which may be several of the environment."""
    assert isinstance(envs, SyncEnvs)
    wrappers = EnvOptions.of(env_kwargs).wrappers
    if wrappers.atari:
        return ATARI_FPS / (4 if wrappers.atari is True else wrappers.atari.frame_skip)
    fps = float(envs.envs[0].metadata.get("render_fps") or USUAL_FPS)
    return max(1.0, fps / (wrappers.action_repeat or 1))


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
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3):
        got = f"an array {image.shape} of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise InputError(f"{name} cannot be filmed: render() should give bytes [height, width, 3], got {got}")
    return image
