"""Each algorithm learns, in seconds, what random play misses by far. The real bars are in benchmarks/accept.py."""

from __future__ import annotations

import pytest

from rl_training import TrainConfig, train


@pytest.mark.parametrize(
    ("algo", "steps", "bar", "kwargs"),
    [
        ("ppo", 25_000, 300, {"num_steps": 32, "num_minibatches": 1, "update_epochs": 10, "learning_rate": 2e-3}),
        ("a2c", 60_000, 150, {"learning_rate": 2e-3}),
    ],
)
def test_cartpole_is_learned(algo, steps, bar, kwargs, tmp_path):
    """Random play lasts about 22 steps."""
    kwargs = {"gamma": 0.98, "gae_lambda": 0.9, **kwargs}
    config = TrainConfig(algo, "CartPole-v1", steps, tmp_path, seed=1, eval_episodes=16, algo_kwargs=kwargs)
    assert train(config, progress="silent").metrics["eval_return_mean"] >= bar
