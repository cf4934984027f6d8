"""Observations that are images of what an environment draws."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F

from rl_training.config import PixelOptions
from rl_training.envs.rendering import image_of
from rl_training.errors import InputError
from rl_training.types import Array

PIXELS, STATE = "pixels", "state"  # keys of a Dict with both
LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue (ITU-R BT.601)


class Pixels(gym.ObservationWrapper):
    """Observes an image [size, size, C], or a Dict of it and the environment's own observation."""

    def __init__(self, env: gym.Env, options: PixelOptions | None = None) -> None:
        super().__init__(env)
        self.options = options = options or PixelOptions.model_validate({})
        shape = (options.size, options.size, 1 if options.grayscale else 3)
        self.observation_space: gym.Space = gym.spaces.Box(0, 255, shape, np.uint8)
        if options.keep_state:
            parts = parts_of(env.observation_space, env.observation_space)
            if PIXELS in parts:
                raise InputError(
                    "wrappers.pixels.keep_state: the environment's observation has a key 'pixels' already: rename it, "
                    "or leave keep_state out"
                )
            self.observation_space = gym.spaces.Dict({**parts, PIXELS: self.observation_space})

    def observation(self, observation: Any) -> Any:
        image = scaled(image_of(self.env), self.options.size, grayscale=self.options.grayscale)
        if not self.options.keep_state:
            return image
        return {**parts_of(self.env.observation_space, observation), PIXELS: image}


def parts_of(space: gym.Space, observation: Any) -> dict[str, Any]:
    """The parts of an observation by key: it may be one array."""
    return dict(observation) if isinstance(space, gym.spaces.Dict) else {STATE: observation}


def scaled(image: Array, size: int, *, grayscale: bool) -> Array:
    """[H, W, 3] -> [size, size, C] bytes. A pixel is the mean of those that it covers."""
    wide = image.astype(np.float32)
    channels = (wide @ LUMINANCE)[None] if grayscale else np.moveaxis(wide, -1, 0)
    small = F.adaptive_avg_pool2d(torch.from_numpy(np.ascontiguousarray(channels)), size)
    return np.moveaxis(small.round_().numpy().astype(np.uint8), 0, -1)
