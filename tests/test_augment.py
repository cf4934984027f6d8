"""Images shifted and dimmed, in every layout; all else as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from torch import Tensor

from rl_training.models.residual import planes_first
from rl_training.ops import augment
from rl_training.ops.augment import augmented, brightened, channels_last, shifted

LAYOUTS = {  # shape, and how to bring [B, *shape] to [B, images and channels, height, width]
    "HW": ((36, 40), lambda x: x.unsqueeze(1)),
    "CHW": ((3, 36, 40), lambda x: x),
    "HWC": ((36, 40, 3), lambda x: x.permute(0, 3, 1, 2)),
    "SHW": ((4, 36, 36), lambda x: x),
    "SCHW": ((4, 3, 36, 40), lambda x: x.flatten(1, 2)),
    "SHWC": ((4, 36, 40, 3), lambda x: x.permute(0, 1, 4, 2, 3).flatten(1, 2)),
    "many planes": ((50, 36, 36), lambda x: x),
    "many planes last": ((36, 36, 50), lambda x: x.permute(0, 3, 1, 2)),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def images(shape: tuple[int, ...], batch: int = 6, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(20, 200, (batch, *shape), dtype=np.uint8))


def change(obs: Any, space: Any, seed: int = 0) -> Any:
    return augmented(obs, space, np.random.default_rng(seed))


def moves_of(before: Tensor, after: Tensor) -> list[tuple[int, int]]:
    """By how many rows and columns each image [B, C, H, W] was moved, as the inner part shows; an error if by none."""
    found = []
    for one, other in zip(before.float(), after.float(), strict=True):
        height, width = one.shape[-2:]
        inner = other[:, 4 : height - 4, 4 : width - 4]
        fits = [
            (down, right)
            for down in range(9)
            for right in range(9)
            if torch.equal(one[:, down : down + height - 8, right : right + width - 8], inner)
        ]
        assert len(fits) == 1
        found.append((fits[0][0] - 4, fits[0][1] - 4))
    return found


@pytest.fixture
def bright(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brightness as it is: what is left are shifts."""
    monkeypatch.setattr(augment, "INTENSITY", 0.0)


@every_layout
def test_every_layout_is_shifted_in_height_and_width(layout: str, bright: None) -> None:
    shape, planes = LAYOUTS[layout]
    obs = images(shape, batch=12)
    after = change(obs, Box(0, 255, shape, np.uint8))
    assert after.shape == obs.shape
    assert after.dtype == torch.uint8
    moves = moves_of(planes(obs), planes(after))  # all planes of an observation together
    assert len(set(moves)) > 6  # each in its own way


@every_layout
def test_layouts_are_read_as_networks_read_them(layout: str) -> None:
    shape, planes = LAYOUTS[layout]
    obs = images(shape)
    to_planes, read = planes_first(shape)
    assert torch.equal(to_planes(obs), planes(obs))
    moved = obs.movedim(-1, 1) if channels_last(shape) else obs
    assert moved.shape[-2:] == read[1:]


@every_layout
def test_every_layout_is_dimmed_as_one(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "SHIFT", 0)
    shape, planes = LAYOUTS[layout]
    obs = images(shape, batch=12)
    after = change(obs, Box(0, 255, shape, np.uint8))
    ratio = (planes(after).double() / planes(obs).double()).flatten(1)
    assert (ratio.amax(1) - ratio.amin(1)).max() < 0.06  # one factor, up to the rounding of small numbers
    factors = ratio.mean(1)
    assert ((factors - 1).abs() < 0.11).all()
    assert factors.std() > 0.02


@every_layout
def test_no_shift_and_no_dimming_is_identity(layout: str, bright: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "SHIFT", 0)
    shape, _ = LAYOUTS[layout]
    obs = images(shape)
    assert torch.equal(change(obs, Box(0, 255, shape, np.uint8)), obs)


def test_shifts_reach_as_far_as_they_may_and_are_even() -> None:
    before = images((2, 36, 36), batch=2000)
    moves = np.array(moves_of(before, shifted(before, np.random.default_rng(1))))
    for axis in range(2):
        found = np.bincount(moves[:, axis] + 4, minlength=9) / 2000
        assert found == pytest.approx([1 / 9] * 9, abs=0.03)
    assert abs(np.corrcoef(moves.T)[0, 1]) < 0.08


def test_what_comes_in_stood_at_the_border() -> None:
    column = torch.arange(20, dtype=torch.uint8).expand(50, 1, 20, 20)
    after = shifted(column, np.random.default_rng(0))
    for image in after[:, 0]:
        right = int(image[0, 10]) - 10
        assert image.tolist() == [[min(max(x + right, 0), 19) for x in range(20)]] * 20


def test_dimming_is_cut_and_stays_a_byte() -> None:
    before = torch.full((4000, 1, 2, 2), 100, dtype=torch.uint8)
    after = brightened(before, np.random.default_rng(0))
    assert after.dtype == torch.uint8
    values = after[:, 0, 0, 0].float()
    assert (values.min(), values.max()) == (90, 110)
    assert values.mean().item() == pytest.approx(100, abs=0.3)  # neither darker nor lighter on the whole
    assert values.std().item() == pytest.approx(4.8, abs=0.4)
    white = torch.full((200, 1, 2, 2), 255, dtype=torch.uint8)
    assert brightened(white, np.random.default_rng(0)).max() == 255
    assert brightened(white, np.random.default_rng(0)).min() >= 229


def test_what_is_given_stays_as_it_is() -> None:
    obs = images((3, 36, 40))
    before = obs.clone()
    change(obs, Box(0, 255, (3, 36, 40), np.uint8))
    assert torch.equal(obs, before)


@pytest.mark.parametrize(
    "space",
    [
        Box(-1, 1, (4,), np.float32),
        Box(0, 255, (4,), np.uint8),
        Box(0, 255, (7, 7, 3), np.uint8),
        Box(0, 255, (17, 8, 8), np.uint8),
        Box(0, 255, (3, 40, 35), np.uint8),
        Box(0, 1, (2, 6, 7), np.float32),
        Discrete(5),
        MultiBinary(6),
    ],
    ids=str,
)
def test_what_is_no_image_is_left_alone(space: Any) -> None:
    space.seed(0)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(5)]))
    assert change(obs, space) is obs


def test_of_a_dict_the_images_are_changed() -> None:
    space = Dict(
        {
            "camera": Box(0, 255, (36, 40, 3), np.uint8),
            "second": Box(0, 255, (36, 40, 3), np.uint8),
            "pose": Box(-1, 1, (3,), np.float32),
            "action_mask": MultiBinary(4),
        }
    )
    camera = images((36, 40, 3))
    obs = {"camera": camera, "second": camera, "pose": torch.rand(6, 3), "action_mask": torch.ones(6, 4)}
    after = change(obs, space)
    assert list(after) == list(space.spaces)
    assert after["pose"] is obs["pose"]
    assert after["action_mask"] is obs["action_mask"]
    assert not torch.equal(after["camera"], camera)
    assert not torch.equal(after["camera"], after["second"])


def test_changes_are_the_generators_alone() -> None:
    space, obs = Box(0, 255, (3, 36, 40), np.uint8), images((3, 36, 40))
    torch.manual_seed(0)
    first = change(obs, space, seed=1)
    torch.manual_seed(1)
    assert torch.equal(first, change(obs, space, seed=1))
    assert not torch.equal(first, change(obs, space, seed=2))
    rng = np.random.default_rng(1)
    assert torch.equal(first, augmented(obs, space, rng))
    assert not torch.equal(first, augmented(obs, space, rng))
