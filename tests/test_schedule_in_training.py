"""The values that reach the updates: the exact sequence, the same after a resume, and past the horizon."""

from __future__ import annotations

import pytest

from conftest import TINY, learning_rates
from rl_training import ALGORITHMS, resume_training, train
from rl_training.algorithms.laprop import LaProp
from rl_training.algorithms.optim import Adam, RMSprop
from rl_training.runtime import setup


def iteration(algo):
    """Env steps between records of the tiny configs: a rollout of two environments, or a step of each."""
    return TINY[algo].get("num_steps", 1) * 2


def spy(log):
    return lambda run: log.append((run.step, run.learner.hp.learning_rate, run.learner.hp.gamma))


def expected(step, horizon, algo=""):
    progress = min(step, horizon - 1) / (horizon - 1)
    gamma = 0.9 * (1 - progress) + 0.8 * progress
    if algo == "dreamer":
        gamma = 1 - 1 / (10 * (1 - progress) + 5 * progress)
    return step, 1e-3 * (1 - progress), gamma


LEARNING_RATE = {"learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0}}
KWARGS = LEARNING_RATE | {"gamma": {"kind": "linear", "start": 0.9, "end": 0.8}}


def kwargs_of(algo):
    """The discount factor falls from 0.9 to 0.8: DreamerV3 has its horizon, 1 / (1 - gamma), as a hyperparameter."""
    return LEARNING_RATE | {"horizon": {"kind": "linear", "start": 10, "end": 5}} if algo == "dreamer" else KWARGS


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_every_update_sees_the_value_of_its_step(algo, tiny_config):
    log = []
    total = 330  # not a multiple of a rollout: the last update is past the horizon
    train(tiny_config(algo, {"total_timesteps": total}, **kwargs_of(algo)), callbacks=[spy(log)], progress="silent")
    every = iteration(algo)
    steps = range(every, total + every, every) if total % every else range(every, total + 1, every)
    assert log == [pytest.approx(expected(step, total, algo)) for step in steps]
    assert log[-1][1:] == (0.0, pytest.approx(0.8))


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_every_gradient_step_has_the_learning_rate_of_its_step(algo, tiny_config, monkeypatch):
    """What the optimizers are given during an update, in all three loops, not what is in force after it."""
    used, seen = [], []
    for optimizer in (Adam, LaProp, RMSprop):
        step = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda self, lr, step=step: (used.append(lr), step(self, lr)))

    def note(run):
        seen.extend((run.step, lr) for lr in used)
        used.clear()

    kwargs = kwargs_of(algo) | learning_rates(algo, KWARGS["learning_rate"])
    if algo == "dreamer":
        kwargs["warmup_updates"] = 0  # else the optimizer is given a fraction of the rate
    train(tiny_config(algo, {"total_timesteps": 192}, **kwargs), callbacks=[note], progress="silent")
    assert len(seen) >= 8
    assert seen == [(step, pytest.approx(expected(step, 192)[1], rel=1e-9)) for step, _ in seen]


@pytest.mark.parametrize("algo", ["ppo", "dqn", "muzero", "scalezero"])
def test_an_update_reads_the_discount_of_its_step(algo, tiny_config, monkeypatch):
    """On entry to `update` or `learn`: the value that targets are made with."""
    used, seen = [], []
    build = setup.build_actor_and_learner

    def spied(*args):
        actor, learner = build(*args)
        name = "update" if "num_steps" in TINY[algo] else "learn"
        original = getattr(learner, name)

        def update(data):
            used.append(learner.hp.gamma)
            return original(data)

        setattr(learner, name, update)
        return actor, learner

    monkeypatch.setattr(setup, "build_actor_and_learner", spied)
    note = lambda run: seen.append((run.step, used.pop()))  # noqa: E731
    train(tiny_config(algo, {"total_timesteps": 128}, **KWARGS), callbacks=[note], progress="silent")
    assert used == []
    assert len(seen) == 128 // iteration(algo)
    assert seen == [(step, pytest.approx(expected(step, 128)[2], rel=1e-9)) for step, _ in seen]


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_the_sequence_goes_on_after_a_resume(algo, tiny_config):
    def stop(run):
        if run.step >= 128:
            run.stop("half way")

    first, second = [], []
    half = train(tiny_config(algo, **kwargs_of(algo)), callbacks=[spy(first), stop], progress="silent")
    resume_training(half.run_dir, callbacks=[spy(second)], progress="silent")
    steps = range(iteration(algo), 256 + 1, iteration(algo))
    assert first + second == [pytest.approx(expected(step, 256, algo)) for step in steps]


def test_the_reward_normaliser_shares_the_scheduled_gamma(tiny_config):
    seen = []
    config = {"env_kwargs": {"wrappers": {"normalize_reward": True}}}
    kwargs = {"gamma": {"kind": "linear", "start": 0.9, "end": 0.5}}
    note = lambda run: seen.append(run.source.normalizers[0].gamma - run.learner.hp.gamma)  # noqa: E731
    train(tiny_config("ppo", config, **kwargs), callbacks=[note], progress="silent")
    assert seen == [0.0] * len(seen)
