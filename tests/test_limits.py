"""What would use up the machine is refused before it is built, with the key, its value and what to do."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from conftest import ENVS, TINY
from demonstrations_for_tests import random_demonstrations
from rl_training import ALGORITHMS, ConfigError, TrainConfig, evaluate_checkpoint, load_config, train
from rl_training.errors import InputError
from rl_training.runtime import limits
from rl_training.runtime.limits import networks_within_memory

LITTLE = 64 * 2**20


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(limits, "usable_bytes", lambda: LITTLE)


def refusal(tmp_path, algo, config=None, **kwargs) -> str:
    """The error of a run that must leave no folder behind."""
    kwargs = {"demonstrations": random_demonstrations(ENVS[algo]), **kwargs} if algo == "gail" else kwargs
    data = {"algo": algo, "env_id": ENVS[algo], "total_timesteps": 256, "num_envs": 2, "output_dir": tmp_path / "runs"}
    with pytest.raises(InputError) as caught:
        train({**data, **(config or {}), "algo_kwargs": {**TINY[algo], **kwargs}}, progress="silent")
    assert not (tmp_path / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize("count", [1024, 100_000, 1e9])
def test_more_threads_than_a_machine_can_run_are_refused(tmp_path, monkeypatch, count):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = refusal(tmp_path, "ppo", {"num_threads": count})
    assert found == f"num_threads: should be at most 32 on a machine of 8 cores, or auto, got {count:,}"


def test_a_checkpoint_of_a_larger_machine_is_evaluated_all_the_same(tiny_config, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 100)
    result = train(tiny_config("ppo", {"total_timesteps": 32, "num_threads": 2}), progress="silent")
    config = (result.checkpoint_path / "config.json").read_text()
    assert '"num_threads": 2' in config
    monkeypatch.setattr(limits, "FEWEST_THREADS", 1)
    monkeypatch.setattr(limits, "THREADS_PER_CORE", 0)
    with pytest.raises(ConfigError, match="num_threads"):
        load_config(result.run_dir / "config.yaml")
    assert evaluate_checkpoint(result.checkpoint_path, num_episodes=1)


@pytest.mark.parametrize(
    ("algo", "kwargs", "expected"),
    [
        ("ppo", {"num_steps": 1e12}, "algo_kwargs.num_steps: should be at most 2,147,483,647, got 1000000000000"),
        ("ppo", {"num_steps": 2**31 - 1}, "algo_kwargs.num_steps: a rollout (num_steps 2,147,483,647 x num_envs 2)"),
        ("ppg", {"policy_phase_updates": 10**6}, "algo_kwargs.policy_phase_updates: a policy phase ("),
        ("a2c", {"num_steps": 10**8}, "algo_kwargs.num_steps: a rollout"),
        ("dqn", {"batch_size": 10**9}, "algo_kwargs.batch_size: a batch (batch_size 1,000,000,000)"),
        ("dqn", {"n_step": 10**9}, "algo_kwargs.batch_size: a gradient step (batch_size 8 x n_step 1,000,000,000)"),
        ("sac", {"batch_size": 10**9}, "algo_kwargs.batch_size: a batch"),
        ("muzero", {"num_simulations": 10**9}, "algo_kwargs.num_simulations: a search"),
        ("muzero", {"num_simulations": {"kind": "linear", "start": 5, "end": 1e9}}, "num_simulations: a search"),
        ("muzero", {"eval_num_simulations": 10**9}, "algo_kwargs.eval_num_simulations: a search"),
        ("muzero", {"unroll_steps": 10**9}, "a batch (batch_size 8 x unroll_steps 1,000,000,000)"),
        ("muzero", {"value_limit": 10**9}, "a gradient step (batch_size 8 x value_limit 1,000,000,000)"),
        ("scalezero", {"batch_size": 10**9}, "algo_kwargs.batch_size: a batch"),
        ("gail", {"disc_batch_size": 10**9}, "algo_kwargs.disc_batch_size: a batch of the discriminator"),
    ],
)
def test_arrays_beyond_memory_are_refused(tmp_path, little_memory, algo, kwargs, expected):
    found = refusal(tmp_path, algo, **kwargs)
    assert expected in found
    assert "lower it" in found or "at most" in found


@pytest.mark.parametrize(
    ("algo", "kwargs", "named"),
    [
        ("ppo", {"hidden_sizes": [10**9]}, "lower hidden_sizes: [1000000000]"),
        ("ppo", {"hidden_sizes": [10**4, 10**4]}, "one layer is 10,000 x 10,000"),
        ("ppo", {"hidden_sizes": [2**31 - 1, 2**31 - 1]}, "lower hidden_sizes"),
        ("a2c", {"hidden_sizes": [500] * 30}, "lower hidden_sizes"),
        ("dqn", {"hidden_sizes": [10**9]}, "hidden_sizes"),
        ("sac", {"hidden_sizes": [10**9], "batch_size": 1}, "hidden_sizes"),
        ("muzero", {"latent_size": 10**6}, "lower latent_size: 1000000"),
        ("muzero", {"channels": 10**4, "network": "conv"}, "lower channels: 10000"),
        ("efficientzero", {"lstm_size": 10**4}, "lstm_size: 10000"),
        ("scalezero", {"width": 10**4}, "width: 10000"),
        ("scalezero", {"expert_size": 10**6}, "lower expert_size: 1000000"),
    ],
    ids=str,
)
def test_networks_beyond_memory_are_refused(tmp_path, little_memory, algo, kwargs, named):
    env = {"env_id": "TicTacToe-v0"} if "channels" in kwargs else {}
    found = refusal(tmp_path, algo, env, **kwargs)
    assert named in found
    assert "memory" in found


def test_networks_are_counted_with_gradient_and_optimizer(monkeypatch):
    """A layer of 1000 x 1000 has 1,001,000 parameters: four times 4 bytes of each are 16,016,000 bytes."""
    hp = ALGORITHMS["ppo"].recipe.hyperparameters()
    for there, fits in ((16_016_000, True), (16_015_999, False)):
        monkeypatch.setattr(limits, "usable_bytes", lambda there=there: there)
        try:
            with networks_within_memory(hp, torch.device("cpu")):
                nn.Linear(1000, 1000)
        except InputError:
            assert not fits
        else:
            assert fits
    monkeypatch.setattr(limits, "usable_bytes", lambda: 10)
    nn.Linear(1000, 1000)  # nothing is counted any more
    with pytest.raises(RuntimeError, match="shapes"), networks_within_memory(hp, torch.device("cpu")):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_envs": 10**9},
        {"total_timesteps": 10**18},
        {"eval_episodes": 10**9},
        {"env_id": [f"CartPole-v{i}" for i in range(1000)]},
        {"env_kwargs": {"wrappers": {"frame_stack": 10**9}}},
        {"env_kwargs": {"wrappers": {"action_repeat": 10**9}}},
        {"env_kwargs": {"wrappers": {"atari": {"screen_size": 10**6}}}},
    ],
    ids=lambda x: next(iter(x)),
)
def test_numbers_beyond_sense_are_refused_when_the_config_is_read(tmp_path, wrong):
    assert next(iter(wrong)) in refusal(tmp_path, "ppo", wrong)


def test_what_fits_is_not_refused(tmp_path):
    """The largest sizes that people use: estimates are from below."""
    kwargs = {"num_steps": 2048, "hidden_sizes": [1024, 1024]}
    config = TrainConfig("ppo", "CartPole-v1", 1, num_envs=64, output_dir=tmp_path, algo_kwargs=kwargs)
    spaces = [limits.Spaces(*_cartpole_spaces())]
    controls = limits.Controls(ALGORITHMS["ppo"].recipe.hyperparameters, kwargs, 1)
    limits.check_bytes(config, controls, spaces)


def _cartpole_spaces():
    import gymnasium as gym

    env = gym.make("CartPole-v1")
    return env.observation_space, env.action_space
