"""The queue between actors and learner, with actors that play when the test says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

import envs_for_tests  # noqa: F401  (registers the environments)
from local_fleet import LocalFleet
from rl_training import ALGORITHMS
from rl_training.config import Execution
from rl_training.data.merged_statistics import MergedStatistics, observed, set_statistics
from rl_training.data.normalize import Normalizer
from rl_training.runtime.actor_pool import ActorPool
from rl_training.runtime.controls import Controls
from rl_training.runtime.fleet import ActorFault
from test_env_workers import wait_until

STEPS, EPISODE = 4, 10
BOTH = {"normalize_observation": True, "normalize_reward": True}
RAW = {"normalize_observation": False, "normalize_reward": False}


class Recorded(gym.Env):
    """Random observations and rewards, which are kept; without last observations, after which no policy acts."""

    everywhere: ClassVar[list[Recorded]] = []

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.observations: list[np.ndarray] = []
        self.rewards: list[tuple[float, bool]] = []  # (reward, whether the episode ends with it)
        self.everywhere.append(self)

    def _obs(self, over: bool = False) -> np.ndarray:
        obs = (3.0 + 2.0 * self.np_random.normal(size=2)).astype(np.float32)
        if not over:
            self.observations.append(obs)
        return obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        over = bool(self.np_random.random() < 0.3)
        self.rewards.append((float(self.np_random.normal()), over))
        return self._obs(over), self.rewards[-1][0], over, False, {}


gym.register("RecordedForTests-v0", Recorded)


@pytest.fixture
def make_pool(tiny_config: Any) -> Iterator[Any]:
    """`make_pool(actors=2, queue=3)`: a pool, its fleet, and the learner's actor."""
    pools = []

    def make(algo_kwargs: Any = None, env: Any = None, num_envs: int = 2, **execution: Any) -> Any:
        counter = {"env_id": "CounterForTests-v0", "env_kwargs": {"length": EPISODE, "wrappers": RAW}}
        config = tiny_config("impala", {**(env or counter), "num_envs": num_envs}, num_steps=STEPS)
        recipe, fleet = ALGORITHMS["impala"].recipe, LocalFleet()
        settings = Execution.of({"backend": "process", "actors": 1, **execution})
        pool = ActorPool(config, recipe, settings, fleet)
        pools.append(pool)
        hp = Controls.of(config, recipe.hyperparameters).at(0)
        actor = recipe.actor(pool.spaces[0], hp, device=torch.device("cpu"))
        pool.attach([actor], [recipe.fields(pool.spaces[0], hp)])
        return pool, fleet, actor

    yield make
    for pool in pools:
        pool.close()


def collect(pool: ActorPool) -> Any:
    return pool.collect(lambda steps: None)


def begins(rollout: Any) -> list[int]:
    """The step of its life at which each environment begins a rollout."""
    first = rollout.batch["obs"][0]
    return (first[:, 0] * EPISODE + first[:, 1]).int().tolist()


def test_the_oldest_is_learned_from_first_and_actors_wait_when_the_queue_is_full(make_pool):
    pool, fleet, _ = make_pool(queue=2)
    fleet.allowed = 100
    assert begins(collect(pool)) == [0, 0]
    assert pool.recent()["CounterForTests-v0"]["queue_fill"] == 0  # the learner had to wait
    assert wait_until(lambda: len(pool.queue) == 3, 10)  # two in the queue, and one that its actor has ready
    with pool.crew.changed:
        pool.crew.proceed()
        assert pool.crew.num_playing == 0
        assert fleet.allowed == 96
    for number in (1, 2, 3, 4):
        assert begins(collect(pool)) == [number * STEPS] * 2
        assert pool.env_steps == STEPS * 2
    assert pool.recent()["CounterForTests-v0"]["rollouts_dropped"] == 0


def test_a_full_queue_drops_the_oldest_and_its_steps_count(make_pool):
    pool, fleet, _ = make_pool(queue=2, when_full="drop")
    fleet.allowed = 1
    assert begins(collect(pool)) == [0, 0]
    for _ in range(5):
        assert wait_until(lambda: fleet.waiting, 10)
        fleet.play()
    assert wait_until(lambda: pool.metrics.dropped == 3 and len(pool.queue) == 2, 10)
    seen: list[int] = []
    rollout = pool.collect(seen.append)
    assert begins(rollout) == [4 * STEPS] * 2  # rollouts 1, 2, 3 are gone
    assert pool.env_steps == 4 * STEPS * 2
    assert seen[-1] == pool.env_steps
    assert pool.recent()["CounterForTests-v0"]["rollouts_dropped"] == 3
    assert begins(collect(pool)) == [5 * STEPS] * 2
    assert pool.env_steps == STEPS * 2
    assert fleet.released == 6


@pytest.mark.parametrize(("versions", "dropped"), [(3, 0), (4, 3)])
def test_rollouts_of_too_old_weights_are_dropped_and_counted(versions, dropped, make_pool):
    pool, fleet, actor = make_pool(queue=4, max_policy_lag=3)
    fleet.allowed = 4
    collect(pool)
    assert wait_until(lambda: len(pool.queue) == 3 and fleet.waiting, 10)
    actor.version += versions
    if dropped:  # the one that is ordered is of version 0 as well, so a fifth is needed
        fleet.allowed = 1
        threading.Timer(0.2, fleet.play).start()
    rollout = collect(pool)
    assert pool.recent()["CounterForTests-v0"]["rollouts_dropped"] == (dropped + 1 if dropped else 0)
    assert begins(rollout) == [(5 if dropped else 1) * STEPS] * 2
    assert (rollout.batch["version"] == (versions if dropped else 0)).all()
    assert pool.env_steps == (5 if dropped else 1) * STEPS * 2
    assert [weights.version for weights in fleet.weights] == [0, versions]


def test_weights_are_published_once_for_each_version_and_acted_with(make_pool):
    pool, fleet, actor = make_pool(queue=0)
    fleet.allowed = 100
    collect(pool)
    collect(pool)
    assert len(fleet.weights) == 1
    with torch.no_grad():
        actor.parameters.vector.add_(0.1)
    actor.version += 1
    rollout = collect(pool)
    assert len(fleet.weights) == 2
    np.testing.assert_array_equal(fleet.workers[0].actor.weights().vector, actor.weights().vector)
    assert (rollout.batch["version"] == 1).all()


def test_in_lock_step_nothing_depends_on_who_is_first(make_pool):
    found = []
    for first in (0, -1):
        env = {"env_id": "RandomWalkForTests-v0", "env_kwargs": {"wrappers": BOTH}}
        pool, fleet, _ = make_pool(env=env, num_envs=3, actors=3, queue=0)
        rollouts = []
        for _ in range(3):
            player = threading.Thread(target=lambda f=fleet, n=first: play_all(f, 3, n))
            player.start()
            rollout = collect(pool)
            rollouts.append({key: rollout.batch[key].clone() for key in ("obs", "action", "reward")})
            player.join()
        found.append((rollouts, pool.statistics.states(), pool.recent()))
    (one, statistics, recent), (other, others, recently) = found
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert str(statistics) == str(others)
    assert str(recent["RandomWalkForTests-v0"]["train_return_mean"]) == str(
        recently["RandomWalkForTests-v0"]["train_return_mean"]
    )


def play_all(fleet: LocalFleet, count: int, number: int) -> None:
    assert wait_until(lambda: len(fleet.waiting) == count, 10)
    for _ in range(count):
        fleet.play(number)


@pytest.mark.parametrize("queue", [0, 3])
def test_statistics_are_those_of_all_that_was_seen(queue, make_pool):
    """Against the definition, over everything that the environments of three actors gave."""
    Recorded.everywhere.clear()
    env = {"env_id": "RecordedForTests-v0", "env_kwargs": {"wrappers": BOTH}}
    pool, fleet, _ = make_pool(env=env, num_envs=6, actors=3, queue=queue)
    fleet.allowed = 18
    for _ in range(4):
        collect(pool)
    assert wait_until(lambda: len(pool.queue) == (6 if queue else 0), 10)
    envs = [env for env in Recorded.everywhere if env.observations]
    rows = np.concatenate([env.observations for env in envs]).astype(float)
    returns = np.array([value for env in envs for value in discounted(env.rewards, 0.99)])
    observation, reward = pool.statistics.states()
    assert observation["count"] == len(rows) == 6 * (1 + STEPS * (18 if queue else 12) // 3)
    np.testing.assert_allclose(observation["mean"], rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(observation["squares"] / len(rows), rows.var(0), rtol=1e-10)
    assert reward["count"] == len(returns)
    np.testing.assert_allclose(reward["squares"] / len(returns), returns.var(), rtol=1e-6)
    if queue == 0:
        fleet.allowed = 3
        collect(pool)
        _, order, _ = fleet.last
        assert str(order.statistics) == str([observation, reward])  # what is sent out with the weights


def discounted(rewards: list[tuple[float, bool]], gamma: float) -> Iterator[float]:
    total = 0.0
    for reward, over in rewards:
        total = gamma * total + reward
        yield total
        total = 0.0 if over else total


def test_merged_statistics_are_those_of_one_normaliser_that_saw_all():
    """Actors add what they saw since they got statistics of different age."""
    space, rng = gym.spaces.Box(-1, 1, (3,), np.float32), np.random.default_rng(0)
    alone, learner = Normalizer(space, 2), Normalizer(space, 2)
    merged, actors = MergedStatistics(learner), [Normalizer(space, 2) for _ in range(3)]
    given = [(merged.states(), merged.version)] * 3
    for turn in range(12):
        who = turn * 5 % 3 if turn < 9 else 0
        states, version = given[who]
        set_statistics(actors[who], states)
        for _ in range(4):
            obs = rng.normal(size=(2, 3)).astype(np.float32) * 3 + turn
            alone.observe(obs)
            actors[who].observe(obs)
        merged.add(observed(actors[who], version))
        given[who] = merged.states(), merged.version
    merged.copy_to(learner)
    one, other = (normalizer.state_dict()["observation"][""] for normalizer in (alone, learner))
    assert one["count"] == other["count"] == 96
    np.testing.assert_allclose(one["mean"], other["mean"], rtol=1e-12)
    np.testing.assert_allclose(one["squares"], other["squares"], rtol=1e-10)
    value = rng.normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_allclose(alone.observation(value), learner.observation(value), rtol=1e-5)


def test_a_new_actor_knows_the_statistics_before_it_acts(make_pool):
    """Also for the observations with which its episodes begin."""
    env = {"env_id": "RecordedForTests-v0", "env_kwargs": {"wrappers": BOTH}}
    pool, fleet, _ = make_pool(env=env, queue=0)
    fleet.allowed = 50
    for _ in range(50):
        collect(pool)
    Recorded.everywhere.clear()
    fleet.die(0)
    fleet.allowed = 1
    rollout = collect(pool)
    assert pool.crew.restarts == 1
    raw = np.stack([env.observations[0] for env in Recorded.everywhere if env.observations])
    np.testing.assert_allclose(rollout.batch["obs"][0].numpy(), (raw - 3.0) / 2.0, atol=0.5)


def test_one_that_dies_is_started_with_another_seed_and_told_all(make_pool):
    pool, fleet, actor = make_pool(queue=2)
    fleet.allowed = 1
    collect(pool)
    actor.version = 5
    fleet.die(0)
    fleet.allowed = 1
    rollout = collect(pool)
    assert pool.notes == ["actor 0: it was told to die; it was started anew, in new episodes"]
    assert [plan.worker for plan in fleet.plans] == [0, 0]
    assert fleet.plans[0].seed != fleet.plans[1].seed
    assert begins(rollout) == [0, 0]
    assert (rollout.batch["version"] == 5).all()


def test_after_the_third_death_nothing_is_ordered_and_the_fault_is_raised(make_pool):
    pool, fleet, _ = make_pool(num_envs=4, actors=2, queue=4)
    fleet.allowed = 2
    collect(pool)
    for count in (1, 2, 3):
        assert wait_until(lambda: any(index == 1 for index, _, _ in fleet.waiting), 10)
        fleet.die(1, trace="where it was")
        assert wait_until(lambda n=count: pool.crew.restarts == n or pool.crew.failure is not None, 10)
    for _ in range(2):
        with pytest.raises(ActorFault, match=r"actor 1: it was told to die; it died 3 times within 100 rollouts"):
            collect(pool)
    assert pool.states() == [None, None]  # of a checkpoint of a run that failed
    assert pool.crew.restarts == 2


def test_metrics_say_who_waits(make_pool):
    pool, fleet, _ = make_pool(queue=2)
    fleet.allowed = 1
    collect(pool)
    pool.metrics._since -= 100.0  # as if so long a time had passed before the second rollout
    pool.metrics._came[0] -= 100.0
    fleet.play()
    collect(pool)
    metrics = pool.recent()["CounterForTests-v0"]
    assert metrics["actor_waiting"] > 0.9
    assert metrics["learner_waiting"] < 0.1
    assert metrics["learner_steps_per_second"] == pytest.approx(2 * STEPS * 2 / 100, rel=0.05)
    assert 0 <= metrics["queue_fill"] <= 1
    assert (metrics["rollouts_dropped"], metrics["actor_restarts"]) == (0, 0)


def test_generators_that_environments_may_use_are_restored(make_pool):
    """Those that belong to the process."""
    _, fleet, _ = make_pool()
    worker, drawn = fleet.workers[0], []
    state = worker.state_dict()
    for _ in range(2):
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
        worker.load_state_dict(state, None)
    assert drawn[0] == drawn[1]


def test_restored_actors_go_on_where_they_were(make_pool):
    pool, fleet, _ = make_pool(num_envs=4, actors=2, queue=4)
    fleet.allowed = 4
    collect(pool)
    assert wait_until(lambda: len(pool.queue) == 2 and len(fleet.waiting) == 2, 10)  # two rollouts under way
    threading.Timer(0.2, lambda: (fleet.play(), fleet.play())).start()
    states = pool.states()  # after these
    other, there, _ = make_pool(num_envs=4, actors=2, queue=4)
    other.load_states(states)
    assert other.not_restored() == {}
    there.allowed = 2
    assert begins(collect(other)) == [3 * STEPS] * 4
    third, alone, _ = make_pool(num_envs=4, actors=2, queue=4)
    third.load_states([states[0], None])
    assert third.not_restored() == {"CounterForTests-v0": ([2, 3], 4)}
    alone.allowed = 2
    assert sorted(begins(collect(third))) == [0, 0, 3 * STEPS, 3 * STEPS]
