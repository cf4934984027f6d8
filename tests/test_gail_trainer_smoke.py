"""GAIL trains end to end, imitates an expert and not a random player, and needs its demonstrations to learn alone."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import envs_for_tests
from demonstrations_for_tests import play, play_randomly, random_demonstrations, save
from rl_training import (
    CheckpointError,
    ConfigError,
    InputError,
    TrainConfig,
    evaluate_checkpoint,
    load_policy,
    resume_training,
    train,
)
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.gail_trainer import train_gail
from smoke import check_run


def test_gail_trains_with_schedules(tiny_config):
    config = tiny_config(
        "gail",
        ent_coef_schedule={"kind": "linear", "start": 0.02, "end": 0.005},
        clip_coef_schedule={"kind": "cosine", "start": 0.3, "end": 0.1},
        disc_learning_rate={"kind": "linear", "start": 1e-3, "end": 1e-4},
        disc_updates={"kind": "linear", "start": 4, "end": 1},
    )
    result = train_gail(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "gail__CartPole-v1__seed0__smoke"
    ends = {"ent_coef": 0.005, "clip_coef": 0.1, "disc_learning_rate": 1e-4, "disc_updates": 1}
    assert {name: result.metrics[name] for name in ends} == pytest.approx(ends)
    assert {"policy_loss", "disc_loss", "disc_accuracy_expert", "learned_reward"} <= result.metrics.keys()
    assert result.metrics["train_return_mean"] > 5  # the environment's own reward


def test_trpo_as_the_generator(tiny_config):
    config = tiny_config("gail", generator="trpo", max_kl={"kind": "linear", "start": 0.05, "end": 0.02})
    result = train_gail(config, progress="silent")
    check_run(result, config)
    assert result.metrics["max_kl"] == pytest.approx(0.02)
    assert "clip_coef" not in result.metrics


@pytest.mark.parametrize(
    ("generator", "name"), [("ppo", "max_kl"), ("ppo", "cg_damping"), ("trpo", "clip_coef"), ("trpo", "vf_coef")]
)
def test_numbers_of_the_other_generator_are_refused(tiny_config, generator, name):
    other = {"ppo": "trpo", "trpo": "ppo"}[generator]
    with pytest.raises(ConfigError, match=rf"algo_kwargs.{name}: has no effect without generator: {other}"):
        train(tiny_config("gail", generator=generator, **{name: 0.1}), progress="silent")


@pytest.mark.parametrize("generator", ["ppo", "trpo"])
@pytest.mark.parametrize("normalized", [False, True])
def test_resume_is_exact(tiny_config, tmp_path, generator, normalized):
    env = {"env_kwargs": {"wrappers": {"normalize_observation": True}}} if normalized else {}
    whole = train(tiny_config("gail", {"total_timesteps": 192, **env}, generator=generator), progress="silent")
    half = tiny_config("gail", {"total_timesteps": 96, "schedule_horizon": 192, **env}, generator=generator)
    resumed = resume_training(train(half, progress="silent").run_dir, total_timesteps=192, progress="silent")
    one, other = (load_checkpoint(result.checkpoint_path).state for result in (whole, resumed))
    for part in ("actor", "learner"):
        assert_equal(one[part], other[part])


def assert_equal(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor | np.ndarray):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    else:
        assert one == other


def test_the_expert_is_seen_as_the_policy_sees(tiny_config):
    """The run's own normaliser, whose statistics move while it trains; without one, observations stay as they are."""
    seen = []
    note = lambda run: seen.append((run.learner.normalizer, run.source.normalizers[0]))  # noqa: E731
    wrappers = {"env_kwargs": {"wrappers": {"normalize_observation": True}}}
    for env in (wrappers, {}):
        train(tiny_config("gail", {"total_timesteps": 32, **env}), callbacks=[note], progress="silent")
    (one, other), (none, nothing) = seen
    assert one is other is not None
    assert none is nothing is None


class Punished(gym.RewardWrapper):
    def reward(self, reward):
        return -100 * reward


gym.register("PunishedCartPole-v0", lambda: Punished(gym.make("CartPole-v1")))


def test_the_environments_reward_reaches_no_weight(tiny_config):
    demos = random_demonstrations("CartPole-v1")
    runs = [
        train(tiny_config("gail", {"env_id": name}, demonstrations=demos), progress="silent")
        for name in ("CartPole-v1", "PunishedCartPole-v0")
    ]
    returns = [run.metrics["train_return_mean"] for run in runs]
    assert returns[1] == pytest.approx(-100 * returns[0])
    one, other = (load_checkpoint(run.checkpoint_path).state for run in runs)
    for part in ("actor", "learner"):
        assert_equal(one[part], other[part])


def expert(obs, space):
    """What pays in SixSteps, whose observation is the number of the step as a one-hot vector."""
    return np.array([envs_for_tests.SixSteps.PAYING[int(obs[0].argmax())]])


def imitate(demonstrations, tmp_path, seed, generator):
    path = save(Path(tmp_path) / f"{len(list(Path(tmp_path).iterdir()))}.npz", demonstrations)
    kwargs = {
        "demonstrations": path,
        "generator": generator,
        "num_steps": 24,
        "learning_rate": 5e-3,
        "disc_learning_rate": 5e-3,
        "disc_updates": 8,
        "disc_batch_size": 64,
        "gradient_penalty": 0.1,
        **({"num_minibatches": 2} if generator == "ppo" else {"max_kl": 0.05, "critic_minibatches": 2}),
    }
    config = TrainConfig("gail", "SixStepsForTests-v0", 4_800, Path(tmp_path) / "runs", seed, 8, algo_kwargs=kwargs)
    return train(config, progress="silent").metrics["eval_return_mean"]


@pytest.mark.parametrize("generator", ["ppo", "trpo"])
def test_an_expert_is_imitated_and_a_random_player_is_not(tmp_path, generator):
    """The expert earns 6, random play 1.5, and what avoids all that pays 0: the reward is not what is learned from."""
    good = play("SixStepsForTests-v0", {}, 120, expert)
    bad = dataclasses.replace(good, action=(good.action + 1) % 4)
    assert good.returns.tolist() == [6.0] * 20
    assert imitate(good, tmp_path, 0, generator) == 6
    assert imitate(bad, tmp_path, 0, generator) == 0
    if generator == "ppo":
        assert imitate(play_randomly("SixStepsForTests-v0", {}, 120), tmp_path, 0, generator) <= 4


def test_demonstrations_are_needed_to_train_and_to_resume_alone(tiny_config, tmp_path):
    path = tmp_path / "demos.npz"
    shutil.copy(random_demonstrations("CartPole-v1"), path)
    result = train(tiny_config("gail", {"total_timesteps": 64}, demonstrations=str(path)), progress="silent")
    save(path, play_randomly("CartPole-v1", {}, 41))
    with pytest.raises(CheckpointError, match=r"algo_kwargs.demonstrations: .*demos.npz has changed"):
        resume_training(result.run_dir, total_timesteps=128, progress="silent")
    path.unlink()
    assert evaluate_checkpoint(result.run_dir)["eval_return_mean"] == result.metrics["eval_return_mean"]
    assert load_policy(result.run_dir).act(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(InputError, match=r"algo_kwargs.demonstrations: .*demos.npz does not exist"):
        resume_training(result.run_dir, total_timesteps=128, progress="silent")


def test_normalising_the_environments_reward_is_refused(tiny_config):
    config = tiny_config("gail", {"env_kwargs": {"wrappers": {"normalize_reward": True}}})
    with pytest.raises(ConfigError, match=r"env_kwargs.wrappers.normalize_reward: has no effect: gail learns from"):
        train(config, progress="silent")


def refusal(tiny_config, path, monkeypatch, *, opens=False):
    """The error of a run that makes neither a folder nor, unless it `opens` one to compare spaces, an environment."""
    if not opens:
        monkeypatch.setattr("rl_training.runtime.sources.make_envs", lambda *_, **__: pytest.fail("too late"))
    config = tiny_config("gail", demonstrations=None if path is None else str(path))
    with pytest.raises(ConfigError) as caught:
        train(config, progress="silent")
    assert not config.output_dir.exists()
    text = str(caught.value)
    assert text.startswith("algo_kwargs.demonstrations: ")
    return text


def test_demonstrations_that_cannot_be_read_are_refused_at_once(tiny_config, tmp_path, monkeypatch):
    good, path = Path(random_demonstrations("CartPole-v1")).read_bytes(), tmp_path / "demos.npz"
    assert "rl-training demos" in refusal(tiny_config, None, monkeypatch)
    assert "does not exist" in refusal(tiny_config, path, monkeypatch)
    for content in (b"", good[: len(good) // 2], good[:-30], b"PK" + good[2:100], b"not an npz file"):
        path.write_bytes(content)
        assert "does not hold demonstrations" in refusal(tiny_config, path, monkeypatch)
    for at in range(60, len(good), len(good) // 6):
        path.write_bytes(good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
        try:
            assert "does not hold demonstrations" in refusal(tiny_config, path, monkeypatch)
        except pytest.fail.Exception:  # zip has bytes that mean nothing, such as dates
            continue


def test_demonstrations_of_another_environment_are_refused_before_a_folder_is_made(tiny_config, monkeypatch):
    text = refusal(tiny_config, random_demonstrations("Pendulum-v1"), monkeypatch, opens=True)
    assert "demonstrations of Pendulum-v1 have observations Box" in text
    assert "this environment has Box" in text
