"""The seed of a run decides what environments draw from the process-wide generators; the caller's are left alone."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import evaluate_checkpoint, resume_training, train
from rl_training.runtime.checkpoints import open_checkpoint


class Careless(gym.Env):
    """Its rewards, and with `seen` its observations, come from all three process-wide generators."""

    def __init__(self, seen: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.seen, self.t = seen, 0

    def _draw(self) -> float:
        return random.random() + np.random.random() + torch.rand(()).item()

    def _obs(self) -> Any:
        return np.array([self._draw() if self.seen else self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), self._draw() * float(1 + action), self.t == 7, False, {}


if "CarelessForTests-v0" not in gym.registry:
    gym.register("CarelessForTests-v0", Careless)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def trained(config: Any, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics of a run that finds the process's generators as another program left them."""
    seed_all(seed)
    result = train(config, progress="silent")
    metrics = {key: value for key, value in result.metrics.items() if key != "steps_per_second"}
    return open_checkpoint(result.run_dir).state["actor"]["model"], metrics


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_two_runs_of_one_seed_are_the_same(backend: str, seen: bool, tiny_config: Any) -> None:
    env_kwargs = {"backend": backend, "seen": seen}
    config = {"env_id": "CarelessForTests-v0", "env_kwargs": env_kwargs, "eval_interval": 64, "total_timesteps": 128}
    (one, metrics), (other, again) = (trained(tiny_config("ppo", config), seed) for seed in (1, 2))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert metrics == again
    third, _ = trained(tiny_config("ppo", config | {"seed": 5}), 1)
    assert not all(torch.equal(one[key], third[key]) for key in one)


@pytest.mark.parametrize(("backend", "seen"), [("sync", False), ("async", False), ("async", True)])
def test_resume_is_exact(backend: str, seen: bool, tiny_config: Any) -> None:
    """In `sync` the environments share the generators: what they saw of them cannot be replayed."""
    env_kwargs = {"backend": backend, "seen": seen}
    config = {"env_id": "CarelessForTests-v0", "env_kwargs": env_kwargs, "checkpoint_interval": 96}
    whole = train(tiny_config("ppo", config | {"total_timesteps": 192}), progress="silent")
    seed_all(9)
    (half,) = whole.run_dir.glob("checkpoints/step_96")
    again = resume_training(half, progress="silent")
    one, other = (open_checkpoint(run.run_dir).state["actor"]["model"] for run in (whole, again))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_evaluating_more_often_changes_nothing(tiny_config: Any) -> None:
    config = {"env_id": "CarelessForTests-v0", "total_timesteps": 128}
    one, _ = trained(tiny_config("ppo", config), 1)
    other, _ = trained(tiny_config("ppo", config | {"eval_interval": 32}), 1)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_evaluation_is_decided_by_the_seed(tiny_config: Any) -> None:
    result = train(tiny_config("ppo", {"env_id": "CarelessForTests-v0", "total_timesteps": 64}), progress="silent")
    seed_all(3)
    one = evaluate_checkpoint(result.run_dir)
    seed_all(4)
    assert evaluate_checkpoint(result.run_dir) == one == {key: result.metrics[key] for key in one}


def test_the_callers_generators_are_left_alone(tiny_config: Any) -> None:
    seed_all(3)
    expected = draws()
    seed_all(3)
    train(tiny_config("ppo", {"env_id": "CarelessForTests-v0", "total_timesteps": 64}), progress="silent")
    assert draws() == expected
    seed_all(3)
    with pytest.raises(ValueError, match="run_suffix"):
        train(tiny_config("ppo", {"env_id": "CarelessForTests-v0"}), progress="silent", run_suffix="a/b")
    assert draws() == expected, "nor where a run cannot begin"
