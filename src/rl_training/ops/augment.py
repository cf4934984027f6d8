"""Image augmentation: random shifts (DrQ, Yarats et al., arXiv:2004.13649) and brightness (SPR, arXiv:2007.05929)."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

SHIFT = 4  # pixels at most in each direction
INTENSITY = 0.05  # standard deviation of the brightness factor, clipped at twice that
MIN_SIDE = 36  # smaller images, and boards, are not augmented: each cell has its own meaning


def augmented(obs: Any, space: gym.Space, rng: np.random.Generator) -> Any:
    """Observations [B, ...] of a space, with each uint8 image changed at random."""
    if isinstance(space, gym.spaces.Dict):
        return {key: augmented(obs[key], part, rng) for key, part in space.spaces.items()}
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3, 4):
        return obs
    images = obs.movedim(-1, 1) if channels_last(space.shape) else obs
    if min(images.shape[-2:]) < MIN_SIDE:
        return obs
    planes = images.flatten(1, -3) if images.ndim > 3 else images.unsqueeze(1)
    changed = brightened(shifted(planes, rng), rng).reshape(images.shape)
    return changed.movedim(1, -1) if channels_last(space.shape) else changed


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the last axis holds channels, in images [H, W], [C, H, W], [H, W, C] or stacks [S, H, W], [S, C, H, W],
    [S, H, W, C]: where two of three axes are equal, the third does; else the smaller of the last and the third-last."""
    if len(shape) == 3 and shape[1] == shape[2]:
        return False
    return len(shape) > 2 and (shape[-1] < shape[-3] or (len(shape) == 3 and shape[0] == shape[1]))


def shifted(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Images [B, C, H, W], each moved by up to SHIFT pixels. The border is repeated."""
    height, width = images.shape[2:]
    moves = torch.from_numpy(rng.integers(-SHIFT, SHIFT + 1, (2, len(images)))).to(images.device)
    rows, columns = (
        (move[:, None] + torch.arange(size, device=images.device)).clamp(0, size - 1)
        for move, size in zip(moves, (height, width), strict=True)
    )
    # One axis after the other: on a CPU this takes a third of the time of one index over all four axes.
    images = images.gather(2, rows[:, None, :, None].expand_as(images))
    return images.gather(3, columns[:, None, None, :].expand_as(images))


def brightened(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Images [B, C, H, W] of bytes, each multiplied by 1 + INTENSITY clip(N(0, 1), -2, 2)."""
    noise = np.clip(rng.standard_normal(len(images)), -2, 2)
    factor = torch.from_numpy(1 + INTENSITY * noise).float().to(images.device)
    return (images * factor[:, None, None, None]).round_().clamp_(0, 255).to(torch.uint8)
