"""Minibatches: of steps, and of environments whose steps stay together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_training.data.batch import env_minibatches, minibatches
from rl_training.types import Batch


def batch_of(num_steps: int, num_envs: int) -> Batch:
    """Every entry says which step of which environment it is: 1000 * environment + step."""
    number = 1000 * torch.arange(num_envs) + torch.arange(num_steps)[:, None]
    obs = {"a": number, "b": torch.stack([number, -number], -1)}
    return {"obs": obs, "action": number, "reward": number.float(), "value": number.double()}


def numbers(batch: Batch) -> torch.Tensor:
    """What all entries of a batch say; they are still one another's."""
    number = batch["action"]
    assert torch.equal(batch["obs"]["a"], number)
    assert torch.equal(batch["obs"]["b"], torch.stack([number, -number], -1))
    assert torch.equal(batch["reward"], number.float())
    assert torch.equal(batch["value"], number.double())
    return number


SIZES = [(8, 3), (10, 4), (8, 8), (7, 2), (3, 1), (1, 1), (2, 5)]  # environments, parts


@pytest.mark.parametrize(("num_envs", "count"), SIZES)
def test_minibatches_of_environments_keep_their_steps_whole_and_in_order(num_envs: int, count: int) -> None:
    batch, rng = batch_of(6, num_envs), np.random.default_rng(0)
    for _ in range(3):  # epochs
        parts = [numbers(part) for part in env_minibatches(batch, count, rng)]
        assert len(parts) == min(count, num_envs)
        assert all(part.shape == (6, part.shape[1]) for part in parts)
        widths = [part.shape[1] for part in parts]
        assert max(widths) - min(widths) <= 1
        every = torch.cat(parts, 1)
        assert (every % 1000 == torch.arange(6)[:, None]).all()
        assert (every // 1000 == every[0] // 1000).all()
        assert sorted((every[0] // 1000).tolist()) == list(range(num_envs))


@pytest.mark.parametrize(("num_envs", "count"), SIZES)
def test_minibatches_of_steps_are_flat_and_have_every_step_once(num_envs: int, count: int) -> None:
    batch, rng = batch_of(6, num_envs), np.random.default_rng(0)
    for _ in range(3):
        parts = [numbers(part) for part in minibatches(batch, count, rng)]
        assert len(parts) == min(count, 6 * num_envs)
        assert all(part.ndim == 1 for part in parts)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(torch.cat(parts).tolist()) == sorted(batch["action"].flatten().tolist())


def test_every_epoch_has_an_order_of_its_own_which_the_generator_decides() -> None:
    for cut in (env_minibatches, minibatches):
        one, other = np.random.default_rng(0), np.random.default_rng(0)
        orders = [torch.cat([numbers(part) for part in cut(batch_of(2, 16), 4, one)], -1).tolist() for _ in range(3)]
        again = [torch.cat([numbers(part) for part in cut(batch_of(2, 16), 4, other)], -1).tolist() for _ in range(3)]
        assert orders == again
        assert orders[0] != orders[1] != orders[2] != orders[0]
