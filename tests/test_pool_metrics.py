"""What is counted of actors elsewhere, on a clock of our own: speeds, waiting, queue, dropped rollouts, restarts."""

from __future__ import annotations

import math

import pytest

from rl_training.config import Execution
from rl_training.envs.runner import FinishedEpisode
from rl_training.runtime import pool_metrics
from rl_training.runtime.pool_metrics import PoolMetrics
from rl_training.runtime.rollout_worker import Report


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pool_metrics, "time", clock)
    return clock


def of(**execution: object) -> PoolMetrics:
    return PoolMetrics(Execution.of({"backend": "process", "actors": 2, "queue": 4, **execution}))


def rollout(worker: int, seconds: float, env_steps: int = 50) -> Report:
    return Report(worker, version=0, env_steps=env_steps, episodes=[], seconds=seconds, observed=None)


def arrivals(metrics: PoolMetrics, clock: Clock, *, every: float, seconds: float, count: int) -> None:
    """Rollouts of two workers in turns."""
    for number in range(count):
        clock.now += every / 2
        metrics.arrived(rollout(number % 2, seconds))


def test_actors_wait_for_what_they_do_not_play(clock: Clock) -> None:
    metrics = of()
    arrivals(metrics, clock, every=4.0, seconds=3.0, count=10)
    found = metrics.read([], 0)
    assert found["actor_waiting"] == pytest.approx(0.25), "3 of every 4 seconds are played"
    assert found["actor_steps_per_second"] == pytest.approx(10 * 50 / 20.0)


@pytest.mark.parametrize("window", [1, 3, 7])
def test_a_log_interval_shorter_than_a_rollout_changes_nothing(window: int, clock: Clock) -> None:
    """A rollout belongs to the time in which it was played, not to the window in which it came."""
    metrics, seen = of(), []
    for _ in range(8):
        arrivals(metrics, clock, every=20.0, seconds=15.0, count=2)
        for _ in range(window):
            metrics.learned_steps += 1
            seen.append(metrics.read([], 0)["actor_waiting"])
            metrics._since -= 1.0  # the next reading begins a new window
    assert seen[window:] == pytest.approx([0.25] * (7 * window))


def test_before_a_second_rollout_nothing_is_known_of_waiting(clock: Clock) -> None:
    metrics = of()
    clock.now += 10.0
    metrics.arrived(rollout(0, 1.0))
    assert metrics.read([], 0)["actor_waiting"] == 0.0


def test_the_learner_waits_inside_the_block(clock: Clock) -> None:
    metrics = of()
    for _ in range(5):
        with metrics.waiting():
            clock.now += 0.5
        metrics.learned_steps += 100
        clock.now += 1.5
    found = metrics.read([], 0)
    assert found["learner_waiting"] == pytest.approx(0.25)
    assert found["learner_steps_per_second"] == pytest.approx(50.0)


def test_the_fill_is_a_mean_and_at_most_one(clock: Clock) -> None:
    metrics = of()
    for length in (0, 2, 4, 6):  # actors that finish what they play may exceed it
        metrics.looked(length)
    clock.now += 1.0
    assert metrics.read([], 0)["queue_fill"] == pytest.approx((0 + 0.5 + 1 + 1) / 4)


def test_speeds_are_those_since_the_last_reading_and_counts_those_of_the_run(clock: Clock) -> None:
    metrics = of()
    metrics.dropped = 3
    metrics.learned_steps = 1000
    clock.now += 1.0
    first = metrics.read([FinishedEpisode(0, 10.0, 5), FinishedEpisode(1, 20.0, 15)], 1)
    assert (first["train_return_mean"], first["train_length_mean"]) == (15.0, 10.0)
    assert first["learner_steps_per_second"] == pytest.approx(1000.0)
    metrics.dropped += 1
    metrics.learned_steps = 4000
    clock.now += 0.1
    soon = metrics.read([], 2)
    assert soon["learner_steps_per_second"] == pytest.approx(1000.0), "too short a time to measure a speed"
    assert (soon["rollouts_dropped"], soon["actor_restarts"]) == (4, 2)
    assert math.isnan(soon["train_return_mean"])
    clock.now += 1.9
    assert metrics.read([], 2)["learner_steps_per_second"] == pytest.approx(2000.0)


def test_a_line_after_the_last_update_repeats_the_speeds(clock: Clock) -> None:
    """As after the last evaluation."""
    metrics = of()
    metrics.looked(2)
    metrics.learned_steps = 1000
    clock.now += 1.0
    first = metrics.read([], 0)
    clock.now += 30.0
    last = metrics.read([], 0)
    assert last["learner_steps_per_second"] == first["learner_steps_per_second"] == pytest.approx(1000.0)
    assert last["queue_fill"] == first["queue_fill"] == 0.5
