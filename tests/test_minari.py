"""Demonstrations from Minari datasets on this machine; the package is optional."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rl_training import train
from rl_training.envs.demonstrations import load_demonstrations
from rl_training.errors import MissingPackage


def test_a_missing_package_is_named(tiny_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(MissingPackage, match=r'minari:x-v0 is a Minari dataset: pip install "rl-training\[minari\]"'):
        load_demonstrations("minari:x-v0")


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """(id, folder, what was recorded) of 3 episodes of random play."""
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    env = minari.DataCollector(gym.make("CartPole-v1", max_episode_steps=12))
    env.action_space.seed(0)
    rows = []
    for episode in range(3):
        obs, _ = env.reset(seed=episode)
        over = False
        while not over:
            action = env.action_space.sample()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, action, reward, next_obs, terminated, truncated))
            obs, over = next_obs, terminated or truncated
    env.create_dataset("cartpole/random-v0")
    return "minari:cartpole/random-v0", tmp_path / "minari" / "cartpole" / "random-v0", rows


def test_a_dataset_is_read_by_its_name_and_by_its_folder(dataset):
    name, folder, rows = dataset
    for source in (name, str(folder), str(Path(folder) / "data")):
        found = load_demonstrations(source)
        for column, expected in zip(
            (found.obs, found.action, found.reward, found.next_obs, found.terminated, found.truncated),
            zip(*rows, strict=True),
            strict=True,
        ):
            np.testing.assert_array_equal(column, np.stack(expected))
        ends = np.flatnonzero(found.terminated | found.truncated) + 1
        np.testing.assert_array_equal(found.episode_end, ends)


def test_gail_learns_from_a_dataset(dataset, tiny_config):
    result = train(tiny_config("gail", {"total_timesteps": 64}, demonstrations=dataset[0]), progress="silent")
    assert result.metrics["gradient_steps"] > 0


def test_a_dataset_that_is_not_here_is_an_error(dataset, tiny_config, tmp_path):
    (tmp_path / "empty").mkdir()
    for source in ("minari:cartpole/nothing-v0", str(tmp_path / "empty")):
        config = tiny_config("gail", demonstrations=source)
        with pytest.raises(ValueError, match=r"algo_kwargs.demonstrations: .* cannot be read as a Minari dataset"):
            train(config, progress="silent")
