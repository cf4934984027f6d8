"""The values that reach the updates: the exact sequence, the same after a resume, and past the horizon."""

from __future__ import annotations

import pytest

from conftest import TINY
from rl_training import ALGORITHMS, resume_training, train


def iteration(algo):
    """Env steps between records of the tiny configs: a rollout of two environments, or a step of each."""
    return TINY[algo].get("num_steps", 1) * 2


def spy(log):
    return lambda run: log.append((run.step, run.algorithm.hp.learning_rate, run.algorithm.gamma))


def expected(step, horizon):
    progress = min(step, horizon - 1) / (horizon - 1)
    return step, 1e-3 * (1 - progress), 0.9 * (1 - progress) + 0.8 * progress


KWARGS = {
    "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0},
    "gamma": {"kind": "linear", "start": 0.9, "end": 0.8},
}


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_every_update_sees_the_value_of_its_step(algo, tiny_config):
    log = []
    total = 330  # not a multiple of a rollout: the last update is past the horizon
    train(tiny_config(algo, {"total_timesteps": total}, **KWARGS), callbacks=[spy(log)], progress="silent")
    every = iteration(algo)
    steps = range(every, total + every, every) if total % every else range(every, total + 1, every)
    assert log == [pytest.approx(expected(step, total)) for step in steps]
    assert log[-1][1:] == (0.0, pytest.approx(0.8))


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_the_sequence_goes_on_after_a_resume(algo, tiny_config):
    def stop(run):
        if run.step >= 128:
            run.stop("half way")

    first, second = [], []
    half = train(tiny_config(algo, **KWARGS), callbacks=[spy(first), stop], progress="silent")
    resume_training(half.run_dir, callbacks=[spy(second)], progress="silent")
    steps = range(iteration(algo), 256 + 1, iteration(algo))
    assert first + second == [pytest.approx(expected(step, 256)) for step in steps]


def test_the_reward_normaliser_shares_the_scheduled_gamma(tiny_config):
    seen = []
    config = {"env_kwargs": {"wrappers": {"normalize_reward": True}}}
    kwargs = {"gamma": {"kind": "linear", "start": 0.9, "end": 0.5}}
    note = lambda run: seen.append(run.runner.normalizer.gamma - run.algorithm.hp.gamma)  # noqa: E731
    train(tiny_config("ppo", config, **kwargs), callbacks=[note], progress="silent")
    assert seen == [0.0] * len(seen)
