"""Promises that every algorithm in the table keeps; adding one there adds it here.

Each test takes the name of an algorithm, so that another one can be put through all of it: see test_fake_algorithm.py.
"""

from __future__ import annotations

import dataclasses
import os
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import TINY
from elsewhere import actor_alone, play, play_elsewhere
from rl_training import ALGORITHMS, evaluate_checkpoint, load_policy, resume_training, train
from rl_training.algorithms.base import Learner
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.hyperparameters import hyperparameters_of
from smoke import check_run

ALGOS = sorted(ALGORITHMS)


def weights(path):
    return load_checkpoint(path).state["actor"]["model"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def quiet(config, **options):
    return train(config, progress="silent", **options)


TRAINED = {}
LEARNERS = {}  # of these runs, by their folder: each as it was at the end


def trained(tiny_config, algo, **config):
    """A run that several tests look at, and none changes."""
    key = algo, *config.items()
    if key not in TRAINED:
        seen = []
        result = TRAINED[key] = quiet(tiny_config(algo, config), callbacks=[lambda run: seen.append(run.learner)])
        LEARNERS[result.run_dir] = seen[-1]
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
    "max_line_search_steps": (4, 1),
    "free_nats": (0.0, 1.0),
    "max_considered_actions": (2, 1),
    "max_grad_norm": (0.05, 0.01),
    "n_step_decay": (1000, 20),
    "pb_c_base": (1.0, 20_000.0),
    "target_kl": (1e-5, 1e-6),
    "target_update_interval": (64, 8),
    "train_frequency": (1, 64),
    "warmup_updates": (4, 1000),
}
SCALARS = [
    (algo, name)
    for algo in ALGOS
    for name, field in hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters).items()
    if field.is_scalar
]

FIXED = {}


def what_it_needs(algo, field):
    """The setting without which a number has no effect, where a tiny run does not have it."""
    declared = hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters)
    values = {name: each.default for name, each in declared.items()} | TINY[algo]
    return {} if field.has_effect(values) else dict([field.needs])


def fixed_run(tiny_config, algo, name, start):
    """(metrics, weights) of a run with a number at `start`; one run serves all numbers that are there anyway."""
    field = hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters)[name]
    needs = what_it_needs(algo, field)
    anyway = field.schedule is None and start == TINY[algo].get(name, field.default) and not needs
    key = algo if anyway else (algo, name)
    if key not in FIXED:
        if anyway:
            result = trained(tiny_config, algo, total_timesteps=512)
        else:
            result = quiet(tiny_config(algo, {"total_timesteps": 512}, **needs, **{name: start}))
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
    needs = what_it_needs(algo, field)
    scheduled = quiet(tiny_config(algo, {"total_timesteps": 512}, **needs, **{name: schedule}))
    assert metrics[name] == pytest.approx(start)
    assert scheduled.metrics[name] == pytest.approx(end)
    assert not same(fixed, weights(scheduled.checkpoint_path))


@pytest.mark.parametrize("algo", ALGOS)
def test_scalars_are_readable_and_writable_on_the_learner(algo, tiny_config):
    seen = []
    config = tiny_config(algo, {"total_timesteps": 64}, learning_rate=2e-4)
    result = quiet(config, callbacks=[lambda run: seen.append(run.learner)])
    learner = seen[-1]
    assert learner.learning_rate == 2e-4
    learner.learning_rate = 1e-5
    assert learner.hp.learning_rate == 1e-5
    assert dataclasses.is_dataclass(learner.hp)
    assert load_policy(result.run_dir).actor.hp.learning_rate == 2e-4


def observations(env_id, *, steps=4, num_envs=16):
    """[N, ...] for each of some steps of random play."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    seen = [env.reset(seed=0)[0]]
    while len(seen) < steps * num_envs:
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        seen.append(env.reset()[0] if terminated or truncated else obs)
    return np.stack(seen).reshape(steps, num_envs, *env.observation_space.shape)


def saved_spaces(result):
    return load_checkpoint(result.checkpoint_path).info["spaces"]


@pytest.mark.parametrize("algo", ALGOS)
def test_an_actor_alone_plays_as_the_learners_own(algo, tiny_config):
    result, obs = trained(tiny_config, algo), observations(tiny_config(algo).env_id)
    learner = LEARNERS[result.run_dir]
    expected, published = play(algo, learner.actor, obs), learner.weights()
    alone = actor_alone(algo, saved_spaces(result), learner.hp)
    assert not np.array_equal(alone.weights().vector, published.vector)
    play(algo, alone, obs)  # by weights of its own, of which nothing may stay
    alone.load(published)
    assert_equal_state(play(algo, alone, obs), expected)
    assert_equal_state(alone.weights()._asdict(), published._asdict())
    assert alone.version == learner.actor.version == published.version


@pytest.mark.parametrize("algo", ALGOS)
def test_an_actor_in_another_process_plays_as_the_learners_own(algo, tiny_config, other_process):
    result, obs = trained(tiny_config, algo), observations(tiny_config(algo).env_id)
    learner = LEARNERS[result.run_dir]
    entry = None if algo in ALGOS else ALGORITHMS[algo]  # that of a test is not in the table there
    given = algo, saved_spaces(result), learner.hp, learner.weights(), obs, entry
    weights, decisions, process = other_process.submit(play_elsewhere, *given).result(timeout=300)
    assert process != os.getpid()
    assert_equal_state(weights._asdict(), learner.weights()._asdict())
    assert_equal_state(decisions, play(algo, learner.actor, obs))


@pytest.mark.parametrize("algo", ALGOS)
def test_weights_are_one_vector_that_fits_only_its_own_network(algo, tiny_config):
    learner = LEARNERS[trained(tiny_config, algo).run_dir]
    published, size = learner.weights(), sum(p.numel() for p in learner.actor.model.parameters())
    assert published.vector.dtype == np.float32
    assert published.vector.shape == (size,)
    assert learner.actor.num_parameters == size
    for vector in (published.vector[:-1], np.append(published.vector, np.float32(0))):
        with pytest.raises(ValueError, match=rf"\b{len(vector):,} weights .*\b{size:,} parameters"):
            learner.actor.load(published._replace(vector=vector, version=published.version + 1))
    assert_equal_state(learner.weights()._asdict(), published._asdict())  # nothing was loaded
    published.vector[:] = 0
    assert learner.weights().vector.any()  # a copy: what was published stays as it is while training goes on


@pytest.mark.parametrize("algo", ALGOS)
def test_the_version_grows_from_update_to_update_and_survives_a_resume(algo, tiny_config):
    def note(run):
        seen.append((run.learner.gradient_steps, run.learner.weights().version))
        if len(seen) > 1:
            (steps, version), (more_steps, newer) = seen[-2:]
            assert newer > version if more_steps > steps else newer == version

    seen = []
    half = quiet(tiny_config(algo, {"total_timesteps": 128}), callbacks=[note])
    assert seen[-1][1] > 1
    last = seen[-1]
    assert load_policy(half.run_dir).actor.version == last[1]
    resume_training(half.run_dir, total_timesteps=256, callbacks=[note], progress="silent")
    assert seen[-1][1] > last[1]


@pytest.mark.parametrize("algo", ALGOS)
def test_playing_needs_no_learner(algo, tiny_config, tmp_path, monkeypatch):
    result = trained(tiny_config, algo)
    path = tmp_path / result.checkpoint_path.name
    shutil.copytree(result.checkpoint_path, path)
    (path / "learner.safetensors").unlink()

    def refuse(*_, **__):
        raise AssertionError("a learner was built")

    entry = ALGORITHMS[algo]
    monkeypatch.setitem(ALGORITHMS, algo, entry._replace(recipe=dataclasses.replace(entry.recipe, learner=refuse)))
    monkeypatch.setattr(Learner, "__init__", refuse)
    with pytest.raises(AssertionError, match="a learner was built"):
        quiet(tiny_config(algo))
    assert evaluate_checkpoint(path)["eval_return_mean"] == result.metrics["eval_return_mean"]
    env = gym.make(tiny_config(algo).env_id)
    obs, _ = env.reset(seed=0)
    assert env.action_space.contains(load_policy(path).act(obs))
