"""Promises that every algorithm in the table keeps; adding one there adds it here."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import TINY
from rl_training import ALGORITHMS, evaluate_checkpoint, load_policy, resume_training, train
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.hyperparameters import hyperparameters_of
from smoke import check_run

ALGOS = sorted(ALGORITHMS)


def weights(path):
    return load_checkpoint(path).state["algorithm"]["model"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def quiet(config, **options):
    return train(config, progress="silent", **options)


TRAINED = {}


def trained(tiny_config, algo, **config):
    """A run that several tests look at, and none changes."""
    key = algo, *config.items()
    if key not in TRAINED:
        TRAINED[key] = quiet(tiny_config(algo, config))
    return TRAINED[key]


@pytest.mark.parametrize("algo", ALGOS)
def test_trains_saves_evaluates_and_predicts(algo, tiny_config):
    config = tiny_config(algo)
    result = trained(tiny_config, algo)
    check_run(result, config)
    again = evaluate_checkpoint(result.run_dir)
    assert again["eval_return_mean"] == result.metrics["eval_return_mean"]
    policy, env = load_policy(result.checkpoint_path), gym.make(config.env_id)
    obs, _ = env.reset(seed=0)
    assert env.action_space.contains(policy.act(obs))
    policy.reset()  # other environments: a policy that remembers is to forget the one before
    assert all(env.action_space.contains(action) for action in policy.act(np.stack([obs] * 3)))


@pytest.mark.parametrize("algo", ALGOS)
def test_the_seed_decides_everything(algo, tiny_config):
    first, second, other = trained(tiny_config, algo), quiet(tiny_config(algo)), quiet(tiny_config(algo, {"seed": 4}))
    assert same(weights(first.checkpoint_path), weights(second.checkpoint_path))
    assert not same(weights(first.checkpoint_path), weights(other.checkpoint_path))
    assert first.metrics["eval_return_mean"] == second.metrics["eval_return_mean"]


@pytest.mark.parametrize("algo", ALGOS)
def test_evaluating_more_often_changes_nothing(algo, tiny_config):
    never, often = trained(tiny_config, algo), quiet(tiny_config(algo, {"eval_interval": 32}))
    assert same(weights(never.checkpoint_path), weights(often.checkpoint_path))


@pytest.mark.parametrize("algo", ALGOS)
def test_resume_is_exact(algo, tiny_config, tmp_path):
    whole = trained(tiny_config, algo, total_timesteps=512)
    half = quiet(tiny_config(algo, {"total_timesteps": 256, "schedule_horizon": 512}))
    resumed = resume_training(half.run_dir, total_timesteps=512, output_dir=tmp_path / "resumed", progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics["eval_return_mean"] == whole.metrics["eval_return_mean"]
    assert resumed.metrics["train_return_mean"] == whole.metrics["train_return_mean"]


def assert_same_future(one, other):
    """Everything that decides what comes next: weights, optimizers, generators, replay, normalisers, environments."""
    first, second = load_checkpoint(one).state, load_checkpoint(other).state
    assert first.keys() == second.keys()
    for part in first.keys() - {"run"}:  # the clock and the log, which the metrics show
        assert_equal_state(first[part], second[part], part)


def assert_equal_state(one, other, path="state"):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal_state(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal_state(a, b, f"{path}[{i}]")
    elif isinstance(one, torch.Tensor | np.ndarray):
        assert np.array_equal(np.asarray(one), np.asarray(other)), path
    else:
        assert one == other, path


def end_of(field):
    """A value that differs from the default and lies in bounds."""
    if field.is_int:
        return max(int(field.low), int(field.default) - 1) if field.default > max(field.low, 1) else field.default + 1
    return min(field.default / 2, field.high) if field.default > 0 else min(0.5, field.high)


TIGHT = {  # limits that a run of 512 steps would not reach at their defaults
    "clip_coef": (0.01, 0.001),
    "clip_vf_coef": (0.02, 0.01),
    "max_considered_actions": (2, 1),
    "max_grad_norm": (0.05, 0.01),
    "n_step_decay": (1000, 20),
    "pb_c_base": (1.0, 20_000.0),
    "target_kl": (1e-5, 1e-6),
    "target_update_interval": (64, 8),
    "train_frequency": (1, 64),
}
SCALARS = [
    (algo, name)
    for algo in ALGOS
    for name, field in hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters).items()
    if field.is_scalar
]

FIXED = {}


def fixed_run(tiny_config, algo, name, start):
    """(metrics, weights) of a run with a number at `start`; one run serves all numbers that are there anyway."""
    field = hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters)[name]
    anyway = field.schedule is None and start == TINY[algo].get(name, field.default)
    key = algo if anyway else (algo, name)
    if key not in FIXED:
        if anyway:
            result = trained(tiny_config, algo, total_timesteps=512)
        else:
            result = quiet(tiny_config(algo, {"total_timesteps": 512}, **{name: start}))
        FIXED[key] = result.metrics, weights(result.checkpoint_path)
    return FIXED[key]


@pytest.mark.parametrize(("algo", "name"), SCALARS)
def test_every_scalar_can_be_scheduled_is_logged_and_matters(algo, name, tiny_config):
    """Trained twice with different schedules, the weights differ; the end of the schedule is in the final metrics."""
    field = hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters)[name]
    start = TINY[algo].get(name, field.default)
    start = 0.02 if start is None else start
    end = end_of(field._replace(default=start))
    start, end = TIGHT.get(name, (start, end))
    metrics, fixed = fixed_run(tiny_config, algo, name, start)
    schedule = {"kind": "linear", "start": start, "end": end}
    scheduled = quiet(tiny_config(algo, {"total_timesteps": 512}, **{name: schedule}))
    assert metrics[name] == pytest.approx(start)
    assert scheduled.metrics[name] == pytest.approx(end)
    assert not same(fixed, weights(scheduled.checkpoint_path))


@pytest.mark.parametrize("algo", ALGOS)
def test_scalars_are_readable_and_writable_on_the_algorithm(algo, tiny_config):
    config = tiny_config(algo, {"total_timesteps": 64}, learning_rate=2e-4)
    algorithm = load_policy(quiet(config).run_dir).algorithm
    assert algorithm.learning_rate == 2e-4
    algorithm.learning_rate = 1e-5
    assert algorithm.hp.learning_rate == 1e-5
    assert dataclasses.is_dataclass(algorithm.hp)
