"""Each algorithm learns, in seconds, what random play misses by far. The real bars are in benchmarks/accept.py."""

from __future__ import annotations

import pytest

from rl_training import TrainConfig, train

SHORT = {  # env steps, environments, bar, what learns fast
    "ppo": (25_000, 8, 300, {"num_steps": 32, "num_minibatches": 1, "update_epochs": 10, "gae_lambda": 0.9}),
    "trpo": (25_000, 8, 300, {"num_steps": 64, "max_kl": 0.02, "critic_minibatches": 4}),
    "a2c": (60_000, 8, 150, {"gae_lambda": 0.9}),
    "dqn": (12_000, 1, 100, {"double": True, "n_step": 3, "target_update_interval": 200, "utd_ratio": 0.5}),
}


@pytest.mark.parametrize("algo", SHORT)
def test_cartpole_is_learned(algo, tmp_path):
    """Random play lasts about 22 steps."""
    steps, num_envs, bar, kwargs = SHORT[algo]
    kwargs = {"gamma": 0.98, "learning_rate": 2e-3, **kwargs}
    config = TrainConfig(algo, "CartPole-v1", steps, tmp_path, 1, num_envs, eval_episodes=16, algo_kwargs=kwargs)
    assert train(config, progress="silent").metrics["eval_return_mean"] >= bar


def test_sac_learns_to_swing_up_a_pendulum(tmp_path):
    """Random play earns about -1200; upright from the start would be 0, and the best there is about -150."""
    kwargs = {"hidden_sizes": (64, 64), "batch_size": 128, "learning_rate": 2e-3, "learning_starts": 500}
    config = TrainConfig("sac", "Pendulum-v1", 6_000, tmp_path, 2, 1, eval_episodes=16, algo_kwargs=kwargs)
    assert train(config, progress="silent").metrics["eval_return_mean"] >= -500
