"""SAC trains end to end: on vectors, images and nested observations, its schedules in the final metrics."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest

from rl_training import evaluate_checkpoint, load_config, predict_checkpoint, resume_training, train
from rl_training.errors import ConfigError, InputError
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.sac_trainer import train_sac
from smoke import check_run


def test_sac_trains_with_scheduled_numbers(tiny_config):
    config = tiny_config(
        "sac",
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
        critic_learning_rate_schedule={"kind": "cosine", "start": 1e-3, "end": 1e-4},
        target_entropy={"kind": "linear", "start": -1.0, "end": -2.0},
        tau_schedule={"kind": "linear", "start": 0.05, "end": 0.01},
    )
    result = train_sac(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "sac__Pendulum-v1__seed0__smoke"
    ends = {"learning_rate": 0.0, "critic_learning_rate": 1e-4, "target_entropy": -2.0, "tau": 0.01}
    assert {name: result.metrics[name] for name in ends} == pytest.approx(ends)
    assert {"actor_loss", "critic_loss", "alpha", "alpha_loss", "entropy", "q_value"} <= result.metrics.keys()
    again = evaluate_checkpoint(result.run_dir)
    assert again["eval_return_mean"] == result.metrics["eval_return_mean"]
    action = predict_checkpoint(result.checkpoint_path, [1.0, 0.0, 0.0])
    assert action.shape == (1,)
    assert abs(action.item()) <= 2.0


def test_automatic_numbers_are_spelt_auto_and_logged(tiny_config):
    metrics = train(tiny_config("sac", alpha="auto", target_entropy="auto"), progress="silent").metrics
    assert metrics["target_entropy"] == -1.0
    assert 0 < metrics["alpha"] < 1


def test_a_fixed_temperature_can_be_scheduled(tiny_config):
    result = train(tiny_config("sac", alpha={"kind": "linear", "start": 0.2, "end": 0.05}), progress="silent")
    assert result.metrics["alpha"] == pytest.approx(0.05)
    assert "alpha_loss" not in result.metrics
    saved = load_config(result.run_dir / "config.yaml").algo_kwargs
    assert not {"target_entropy", "initial_alpha", "alpha_learning_rate"} & saved.keys()


@pytest.mark.parametrize("name", ["target_entropy", "alpha_learning_rate", "initial_alpha"])
def test_what_a_fixed_temperature_leaves_without_effect_is_an_error(tiny_config, name):
    with pytest.raises(ConfigError, match=rf"{name}.*has no effect without alpha: auto"):
        train(tiny_config("sac", alpha=0.2, **{name: 0.5}), progress="silent")
    with pytest.raises(ConfigError, match="is auto, so 'alpha_schedule' has no effect"):
        train(tiny_config("sac", alpha="auto", alpha_schedule="linear"), progress="silent")


@pytest.mark.parametrize(("num_envs", "utd_ratio"), [(1, 1.0), (4, 1.0), (3, 0.3), (2, 2.5)])
def test_gradient_steps_per_env_step_hold_for_any_number_of_environments(tiny_config, num_envs, utd_ratio):
    config = {"num_envs": num_envs, "total_timesteps": 120}
    metrics = train(tiny_config("sac", config, utd_ratio=utd_ratio, learning_starts=0), progress="silent").metrics
    assert metrics["gradient_steps"] == math.floor(metrics["global_step"] * utd_ratio + 1e-9)


def test_actions_are_uniform_until_learning_starts(tiny_config):
    config = {"num_envs": 4, "total_timesteps": 2000}
    kwargs = {"buffer_capacity": 2100, "learning_starts": 2000, "utd_ratio": 0.01}
    result = train(tiny_config("sac", config, **kwargs), progress="silent")
    columns = load_checkpoint(result.checkpoint_path).state["replay"]["columns"]
    valid = load_checkpoint(result.checkpoint_path).state["replay"]["valid"]
    action = [a for part, there in zip(columns["action"], valid, strict=True) for a in part[there, 0].tolist()]
    assert len(action) == 2000
    for quantile in (0.25, 0.5, 0.75):
        share = sum(a < 2 * quantile - 1 for a in action) / 2000
        assert abs(share - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / 2000)


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_the_replay_keeps_raw_steps_and_gives_normalised_ones(tiny_config, algo):
    """By the statistics of the moment they are drawn, which are those that the policy sees its observations by."""
    looks = []

    def look(run):
        replay, (runner,) = run.parts["replay"], run.source.runners
        index, _ = replay.draw(16, np.random.default_rng(0))
        batch, raw = replay.transitions(index, gamma=0.9), replay.obs[index]
        np.testing.assert_array_equal(batch["obs"], runner.normalizer.observation(raw))
        np.testing.assert_array_equal(batch["reward"], runner.normalizer.scale_reward(replay.columns["reward"][index]))
        np.testing.assert_array_equal(runner.obs, runner.normalizer.observation(runner.envs.obs))
        if replay.ring.in_episode.all():
            newest = replay.ring.place_at_cursor(np.arange(2))
            np.testing.assert_array_equal(replay.obs[newest], runner.envs.obs)
            looks.append(np.abs(batch["obs"].numpy() - raw).max())

    config = {"env_kwargs": {"wrappers": {"normalize_observation": True, "normalize_reward": True}}}
    kwargs = {"n_step": 1} if algo == "dqn" else {}
    train(tiny_config(algo, config, **kwargs), callbacks=[look], progress="silent")
    assert max(looks) > 0.1


@pytest.mark.parametrize("learning_starts", [0, 32])
def test_sac_resumes_from_best_with_an_empty_replay(tiny_config, capsys, learning_starts):
    config = tiny_config("sac", {"eval_interval": 256}, learning_starts=learning_starts, utd_ratio=1.0)
    result = train(config, progress="silent")
    resumed = resume_training(result.run_dir / "checkpoints" / "best", total_timesteps=512, progress="plain")
    assert "holds no replay" in capsys.readouterr().out
    steps = resumed.metrics["gradient_steps"] - result.metrics["gradient_steps"]
    assert 256 - max(learning_starts, 2) <= steps <= 256


def test_bounds_that_are_finite_only_in_name_are_an_error(tiny_config):
    with pytest.raises(InputError, match="finite"):
        train(tiny_config("sac", {"env_id": "EndlessBox-v0"}), progress="silent")


class EndlessBox(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,))
    largest = np.finfo(np.float32).max
    action_space = gym.spaces.Box(-largest, largest, (1,))


gym.register("EndlessBox-v0", entry_point=EndlessBox)
