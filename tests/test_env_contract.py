"""Every backend gives the same stream of transitions, and the runner hands it on as documented."""

from __future__ import annotations

import re
import sys
import types
from collections import deque
from functools import partial
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import envs_for_tests
from envs_for_tests import CounterEnv, FakeEnvPool, Structured, noted
from rl_training.config import Wrappers
from rl_training.envs.backends import EnvPoolEnvs, VectorEnvs
from rl_training.envs.episodes import Episodes, SyncEnvs
from rl_training.envs.factory import (
    VECTOR_PAYS_FROM,
    EnvPlan,
    choose_backend,
    make_envs,
    nearest_env_ids,
    registered,
    split_env_kwargs,
)
from rl_training.envs.runner import RECENT, EnvRunner, FinishedEpisode
from rl_training.envs.spaces import action_map, model_space
from rl_training.errors import InputError
from rl_training.types import Decision

# (obs, action, reward, ended, next_obs), obs being (episode, step); the action is (episode + step) % 5.
LENGTH_3 = [
    ((0, 0), 0, 10, False, (0, 1)),
    ((0, 1), 1, 21, False, (0, 2)),
    ((0, 2), 2, 32, True, (0, 3)),
    ((1, 0), 1, 11, False, (1, 1)),
    ((1, 1), 2, 22, False, (1, 2)),
    ((1, 2), 3, 33, True, (1, 3)),
    ((2, 0), 2, 12, False, (2, 1)),
]
LENGTH_2 = [
    ((0, 0), 0, 10, False, (0, 1)),
    ((0, 1), 1, 21, True, (0, 2)),
    ((1, 0), 1, 11, False, (1, 1)),
    ((1, 1), 2, 22, True, (1, 2)),
    ((2, 0), 2, 12, False, (2, 1)),
    ((2, 1), 3, 23, True, (2, 2)),
    ((3, 0), 3, 13, False, (3, 1)),
]


def counters(ends):
    return [partial(CounterEnv, 3, ends), partial(CounterEnv, 2, ends)]


def seeded(make):
    return [lambda i=i, one=one: Episodes(one(), seed=0, index=i) for i, one in enumerate(make)]


BACKENDS = {
    "sync": lambda make: SyncEnvs(seeded(make)),
    "next_step": lambda make: VectorEnvs(SyncVectorEnv(make, autoreset_mode=AutoresetMode.NEXT_STEP)),
    "same_step": lambda make: VectorEnvs(SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)),
    "disabled": lambda make: VectorEnvs(SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED)),
    "async": lambda make: VectorEnvs(AsyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)),
    "async_next_step": lambda make: VectorEnvs(AsyncVectorEnv(make)),
    "envpool": lambda make: EnvPoolEnvs(FakeEnvPool([one() for one in make]), num_envs=len(make)),
}


def act(obs, memory, *, explore, rng):
    return Decision(obs.sum(axis=1).astype(np.int64) % 5, {}, {})


def constant(action):
    return lambda obs, memory, *, explore, rng: Decision(np.asarray(action), memory, {})


def live_rows(step, env):
    return "live" not in step or step["live"][env]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stream_is_the_same_on_every_backend(backend, ends):
    runner = EnvRunner(BACKENDS[backend](counters(ends)), seed=0)
    finished = noted(runner)
    streams, firsts, live_steps = ([], []), ([], []), 0
    for _ in range(12):
        step = runner.step(act)
        live_steps += runner.live_steps
        assert step["reward"].dtype == np.float32
        assert step["obs"].dtype == np.float32
        for env in (0, 1):
            if live_rows(step, env):
                row = tuple(np.array(step[key][env]).tolist() for key in ("obs", "action", "reward", ends, "next_obs"))
                streams[env].append((tuple(row[0]), *row[1:4], tuple(row[4])))
                firsts[env].append(bool(step["first"][env]))
                other = "truncated" if ends == "terminated" else "terminated"
                assert not step[other][env]
    runner.close()
    assert streams[0][:7] == LENGTH_3
    assert streams[1][:7] == LENGTH_2
    assert firsts[0][:7] == [True, False, False, True, False, False, True]
    assert firsts[1][:7] == [True, False, True, False, True, False, True]
    assert live_steps == len(streams[0]) + len(streams[1])
    assert [e for e in finished if e.env == 0][:2] == [FinishedEpisode(0, 63.0, 3), FinishedEpisode(0, 66.0, 3)]
    assert [e for e in finished if e.env == 1][:2] == [FinishedEpisode(1, 31.0, 2), FinishedEpisode(1, 33.0, 2)]
    assert list(runner.statistics.recent_returns) == [e.episode_return for e in finished]


def test_only_the_delayed_reset_has_dead_rows():
    for backend, has_dead in (("next_step", True), ("same_step", False), ("sync", False)):
        runner = EnvRunner(BACKENDS[backend](counters("terminated")), seed=0)
        assert any("live" in runner.step(act) for _ in range(8)) == has_dead


@pytest.mark.parametrize("backend", ["sync", "same_step", "next_step", "disabled"])
def test_arrays_are_valid_until_the_next_call(backend):
    runner = EnvRunner(BACKENDS[backend](counters("terminated")), seed=0)
    last, copies = {}, {}

    def checking(obs, memory, *, explore, rng):
        assert all(np.array_equal(last[key], value) for key, value in copies.items())
        return act(obs, memory, explore=explore, rng=rng)

    for _ in range(8):
        before = runner.obs.copy()
        last = runner.step(checking)
        assert np.array_equal(last["obs"], before)
        copies = {key: np.array(value) for key, value in last.items()}


@pytest.mark.parametrize("backend", ["sync", "same_step", "next_step"])
def test_memory_is_zero_where_an_episode_begins(backend):
    runner = EnvRunner(BACKENDS[backend](counters("terminated")), seed=0)
    seen = ([], [])

    def counting(obs, memory, *, explore, rng):
        count, h = memory.values() if memory else (np.zeros(2, np.int64), np.zeros((2, 1)))
        for env in (0, 1):
            seen[env].append((int(count[env]), int(h[env, 0])))
        return Decision(np.zeros(2, np.int64), {"count": count + 1, "h": h + 1}, {"count": count})

    live = ([], [])
    for _ in range(9):
        step = runner.step(counting)
        for env in (0, 1):
            if live_rows(step, env):
                live[env].append(seen[env][-1])
    assert live[0][:6] == [(0, 0), (1, 1), (2, 2)] * 2
    assert live[1][:6] == [(0, 0), (1, 1)] * 3


class Hidden(NamedTuple):
    h: np.ndarray


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (Hidden(np.zeros((2, 3))), "a memory of type Hidden: it should be a dict of arrays"),
        ((np.zeros((2, 3)),), "a memory of type tuple: it should be a dict of arrays"),
        (np.zeros((2, 3)), "a memory of type ndarray: it should be a dict of arrays"),
        ({"h": [0, 0]}, "memory 'h' should be an array with 2 rows.*list"),
        ({"h": np.zeros((3, 2))}, r"memory 'h' should be an array with 2 rows.*\(3, 2\)"),
    ],
    ids=["namedtuple", "tuple", "array", "list", "rows"],
)
def test_memory_is_a_dict_of_arrays(memory, message):
    """Anything else could not be given back by a checkpoint as it was."""
    runner = EnvRunner(BACKENDS["sync"](counters("terminated")), seed=0)
    with pytest.raises(InputError, match=message):
        runner.step(lambda obs, before, *, explore, rng: Decision(np.zeros(2, np.int64), memory, {}))


def test_a_runner_keeps_no_more_episodes_than_it_shows():
    runner = EnvRunner(BACKENDS["sync"](counters("terminated")), seed=0)
    for _ in range(400):
        runner.step(act)
    parts = vars(runner) | vars(runner.statistics)
    held = [value for value in parts.values() if isinstance(value, list | deque)]
    assert max(map(len, held)) <= RECENT


@pytest.mark.parametrize("backend", ["sync", "same_step", "next_step", "disabled", "async"])
def test_structured_observations_are_flat_and_count_from_zero(backend):
    runner = EnvRunner(BACKENDS[backend]([Structured, Structured]), seed=0)
    space = runner.spaces.observation
    assert list(space.spaces) == ["camera", "dials", "flags", "parts.0", "parts.1"]
    assert space["parts.0"] == spaces.Discrete(4)
    assert space["parts.1"].dtype == np.float32
    assert np.array_equal(space["dials"].nvec, [3, 4])
    assert not space["dials"].start.any()
    ts = []
    for _ in range(8):
        step = runner.step(constant([0, 2]))
        if not live_rows(step, 0):
            continue
        obs, next_obs = step["obs"], step["next_obs"]
        t = int(obs["camera"][0, 0, 0, 0])
        ts.append(t)
        assert obs["camera"].dtype == np.uint8
        assert obs["parts.0"].tolist() == [t, t]
        assert obs["parts.1"].dtype == np.float32
        assert next_obs["parts.1"][1].tolist() == pytest.approx([(t + 1) / 10] * 2)
        assert next_obs["dials"].tolist() == [[(t + 1) % 3, (t + 1) % 4]] * 2
        assert step["reward"].tolist() == [-1.0, 1.0], (
            "Discrete(3, start=-1): the model's 0, 2 are the environment's -1, 1"
        )
    runner.close()
    assert ts[:6] == [0, 1, 2] * 2


def test_tuple_keys_are_numbers():
    space = model_space(spaces.Tuple((spaces.Discrete(2), spaces.Dict({"a": spaces.MultiBinary(2)}))))
    assert list(space.spaces) == ["0", "1.a"]


def test_unsupported_spaces_are_named():
    with pytest.raises(ValueError, match="Text"):
        model_space(spaces.Text(5))
    with pytest.raises(ValueError, match="Tuple"):
        action_map(spaces.Tuple((spaces.Discrete(2),)), "clip")


@pytest.mark.parametrize(("low", "high"), [(-2, 2), (0, 1), (5, 7)])
def test_scaled_actions_stay_in_bounds(low, high):
    env = Structured(spaces.Box(low, high, (3,), np.float32))
    runner = EnvRunner(SyncEnvs(seeded([lambda: env])), seed=0, box_actions="scale")
    assert runner.spaces.action == spaces.Box(-1, 1, (3,), np.float32)
    action = np.array([[-1.0, 0.0, 1.0]], np.float32)
    step = runner.step(constant(action))
    assert step["action"] is action
    assert env.received[-1].tolist() == [low, (low + high) / 2, high]
    assert env.received[-1].dtype == np.float32
    for a in np.linspace(-1.0, 1.0, 101, dtype=np.float32):
        runner.step(constant(np.full((1, 3), a, np.float32)))
        assert env.action_space.contains(env.received[-1])


def test_clipped_actions_are_kept_unclipped():
    env = Structured(spaces.Box(-1, 1, (2,), np.float32))
    runner = EnvRunner(SyncEnvs(seeded([lambda: env])), seed=0)
    step = runner.step(constant(np.array([[3.0, -0.5]], np.float32)))
    assert env.received[-1].tolist() == [1.0, -0.5]
    assert step["action"].tolist() == [[3.0, -0.5]]


def test_infinite_bounds_cannot_be_scaled_to():
    with pytest.raises(ValueError, match=r"inf.*finite.*Gaussian"):
        action_map(spaces.Box(-np.inf, np.inf, (1,), np.float32), "scale")


def test_discrete_kinds_of_action():
    multi, space = action_map(spaces.MultiDiscrete([3, 2], start=[1, 5]), "clip")
    assert multi(np.array([[0, 1]])).tolist() == [[1, 6]]
    assert np.array_equal(space.nvec, [3, 2])
    binary, _ = action_map(spaces.MultiBinary(2), "clip")
    assert binary(np.array([[1, 0]])).dtype == np.int8


def test_a_stream_does_not_depend_on_the_number_of_environments():
    def rewards(num_envs, backend="sync"):
        kwargs = {"backend": backend}
        envs = make_envs("RandomWalkForTests-v0", num_envs=num_envs, seed=7, env_kwargs=kwargs, training=True)
        runner = EnvRunner(envs, seed=0)
        rows = [runner.step(constant(np.zeros((num_envs, 1), np.float32)))["reward"].copy() for _ in range(120)]
        runner.close()
        return np.array(rows)

    few, many = rewards(2), rewards(5)
    assert np.array_equal(few, many[:, :2])
    assert not np.array_equal(many[:, 0], many[:, 1])
    assert not np.array_equal(few[:50, 0], few[50:100, 0]), "episodes have seeds of their own"
    assert np.array_equal(few, rewards(2, "async"))


def test_frame_stack_and_time_limit():
    kwargs = {"wrappers": {"frame_stack": 3, "time_limit": 2}, "length": 9}
    envs = make_envs("CounterForTests-v0", num_envs=1, seed=0, env_kwargs=kwargs, training=True)
    runner = EnvRunner(envs, seed=0)
    assert runner.spaces.observation.shape == (3, 2)
    steps = [{k: np.array(v) for k, v in runner.step(constant([0])).items()} for _ in range(3)]
    assert [s["truncated"][0] for s in steps] == [False, True, False]
    assert steps[0]["obs"][0, :, 1].tolist() == [0, 0, 0]
    assert steps[1]["next_obs"][0, :, 1].tolist() == [0, 1, 2], "the successor's stack is the old episode's"
    assert steps[2]["obs"][0].tolist() == [[0, 0], [0, 0], [1, 0]]
    replaced = make_envs("CartPole-v1", num_envs=1, seed=0, env_kwargs={"wrappers": {"time_limit": 5}}, training=True)
    assert replaced.envs[0].spec.max_episode_steps == 5


def test_an_action_that_lasts_is_several_steps_of_the_environment():
    kwargs = {"wrappers": {"action_repeat": 3, "time_limit": 4}}
    envs = make_envs("CartPole-v1", num_envs=VECTOR_PAYS_FROM, seed=5, env_kwargs=kwargs, training=True)
    runner = EnvRunner(envs, seed=0)
    plain = gym.make("CartPole-v1")
    plain.reset()
    plain.unwrapped.state = np.array(runner.step(constant([0] * VECTOR_PAYS_FROM))["next_obs"][0], np.float64)
    step = runner.step(constant([1] * VECTOR_PAYS_FROM))
    for _ in range(3):
        seen = plain.step(1)[0]
    np.testing.assert_allclose(step["next_obs"][0], seen, atol=1e-6)
    assert step["reward"][0] == 3
    for action in (0, 1):
        step = runner.step(constant([action] * VECTOR_PAYS_FROM))
    assert step["truncated"][0], "the limit counts the agent's steps"
    assert runner.statistics.finished[0][1:3] == (12, 4)


def test_an_action_lasts_no_longer_than_its_episode():
    kwargs = {"wrappers": {"action_repeat": 50}}
    runner = EnvRunner(make_envs("CartPole-v1", num_envs=1, seed=0, env_kwargs=kwargs, training=True), seed=0)
    step = runner.step(constant([0]))
    assert step["terminated"][0]
    assert 5 < step["reward"][0] < 15, "a pole that is always pushed one way falls within so many steps"
    assert abs(step["next_obs"][0, 2]) < 0.3, "it has just fallen: the limit is 0.21"


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("ConnectFour-v0", {}, "moves of both players"),
        ("CartPole-v1", {"backend": "vector"}, "takes no wrappers in vectorised form"),
        ("CartPole-v1", {"backend": "envpool"}, "cannot express wrappers.action_repeat"),
        ("ALE/Pong-v5", {"wrappers": {"atari": True}}, "wrappers.atari.frame_skip repeats"),
    ],
)
def test_where_actions_cannot_last(env_id, kwargs, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace())
    if env_id.startswith("ALE/"):
        pytest.importorskip("ale_py")
    kwargs = kwargs | {"wrappers": {"action_repeat": 2, **kwargs.get("wrappers", {})}}
    with pytest.raises(InputError, match=message):
        make_envs(env_id, num_envs=1, seed=0, env_kwargs=kwargs, training=True)
    if env_id == "ConnectFour-v0":
        make_envs(env_id, num_envs=1, seed=0, env_kwargs=kwargs | {"opponent": "random"}, training=True).close()


def test_reward_clipping_leaves_the_books_raw():
    envs = BACKENDS["sync"](counters("terminated"))
    runner = EnvRunner(envs, seed=0, clip_reward=True)
    finished = noted(runner)
    assert [runner.step(act)["reward"].tolist() for _ in range(3)] == [[1.0, 1.0]] * 3
    assert finished == [FinishedEpisode(1, 31.0, 2), FinishedEpisode(0, 63.0, 3)]
    evaluation = EnvRunner(BACKENDS["sync"](counters("terminated")), seed=0, clip_reward=True, training=False)
    assert evaluation.step(act)["reward"].tolist() == [10.0, 10.0]


def test_env_kwargs_are_split():
    options, rest = split_env_kwargs({"backend": "sync", "wrappers": {"frame_stack": 4}, "gravity": 9.0})
    assert (options.backend, options.wrappers.frame_stack, rest) == ("sync", 4, {"gravity": 9.0})


def test_registry_helpers_make_nothing():
    assert registered("CartPole-v1")
    assert registered("CartPole")
    assert registered("envs_for_tests:CounterForTests-v0")
    with pytest.raises(InputError, match="module 'no_such_module' cannot be imported: ModuleNotFoundError"):
        registered("no_such_module:Env-v0")
    assert not registered("CartPole-v77")
    assert nearest_env_ids("CartPole-v77")[0] == "CartPole-v1"
    assert "LunarLander-v3" in nearest_env_ids("LunarLander-v2")
    assert "CartPole-v1" in nearest_env_ids("CartPloe-v1")


def test_errors_name_thing_and_remedy():
    make = partial(make_envs, num_envs=1, seed=0, training=True)
    with pytest.raises(ValueError, match=r"'LunarLander-v2'.*did you mean 'LunarLander-v3'"):
        make("LunarLander-v2", env_kwargs={})
    with pytest.raises(ValueError, match=r"'CartPole-v1'.*'gravty'"):
        make("CartPole-v1", env_kwargs={"gravty": 3})
    with pytest.raises(ValueError, match=r"wrappers.atari.*CartPole-v1"):
        make("CartPole-v1", env_kwargs={"wrappers": {"atari": True}})
    with pytest.raises(ValueError, match=r"Pendulum-v1 has no vectorised form"):
        make("Pendulum-v1", env_kwargs={"backend": "vector"})
    with pytest.raises(ImportError, match="pip install envpool"):
        make("CartPole-v1", env_kwargs={"backend": "envpool"})


@pytest.mark.parametrize(
    ("env_id", "extra"), [("HalfCheetah-v5", "mujoco"), ("LunarLander-v3", "box2d"), ("CartPole-v1", None)]
)
def test_a_missing_package_is_named(monkeypatch, env_id, extra):
    def fail(*args, **kwargs):
        raise gym.error.DependencyNotInstalled("it is not installed")

    monkeypatch.setattr(gym, "make", fail)
    remedy = f'; pip install "rl-training[{extra}]"' if extra else ""
    with pytest.raises(ImportError, match=re.escape(f"{env_id!r} cannot be made: it is not installed{remedy}") + "$"):
        make_envs(env_id, num_envs=1, seed=0, env_kwargs={}, training=True)


def test_automatic_backend():
    def chosen(env_id, num_envs, **wrappers):
        return choose_backend(EnvPlan(env_id, num_envs, 0, Wrappers(**wrappers), {}, True))

    assert chosen("CartPole-v1", 4) == "sync"
    assert chosen("CartPole-v1", 64) == "vector"
    assert chosen("CartPole-v1", 64, frame_stack=2) == "sync"
    assert chosen("Pendulum-v1", 64) == "sync"
    assert chosen("phys2d/CartPole-v1", 64) == "sync", "needs jax"


def test_cartpole_vector_time_limit_and_contract():
    kwargs = {"backend": "vector", "wrappers": {"time_limit": 4}}
    runner = EnvRunner(make_envs("CartPole-v1", num_envs=3, seed=0, env_kwargs=kwargs, training=True), seed=0)
    lives, finished = [], noted(runner)
    for _ in range(10):
        step = runner.step(constant([0, 1, 0]))
        lives.append(runner.live_steps)
        if "live" not in step:
            assert step["reward"].tolist() == [1.0, 1.0, 1.0]
    assert lives == [3, 3, 3, 3, 0, 3, 3, 3, 3, 0]
    assert finished == [FinishedEpisode(i, 4.0, 4) for i in range(3)] * 2


def test_envpool_is_made_with_our_options(monkeypatch):
    made = {}

    def make_gymnasium(name, *, num_envs, seed, **kwargs):
        made.update(kwargs, name=name, num_envs=num_envs)
        return FakeEnvPool([CounterEnv() for _ in range(num_envs)])

    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace(make_gymnasium=make_gymnasium))
    kwargs = {"backend": "envpool", "wrappers": {"time_limit": 7}}
    envs = make_envs("CartPole-v1", num_envs=2, seed=0, env_kwargs=kwargs, training=True)
    assert made == {"name": "CartPole-v1", "num_envs": 2, "max_episode_steps": 7}
    assert envs.reset().shape == (2, 2)
    wrappers = {"atari": {"sticky": 0.25}, "frame_stack": 4}
    make_envs("ALE/Pong-v5", num_envs=2, seed=0, env_kwargs={**kwargs, "wrappers": wrappers}, training=True)
    assert made["name"] == "Pong-v5"
    assert (made["reward_clip"], made["episodic_life"], made["stack_num"]) == (False, False, 4)
    assert made["repeat_action_probability"] == 0.25


def test_user_environment_by_module():
    envs = make_envs("envs_for_tests:CounterForTests-v0", num_envs=1, seed=0, env_kwargs={"length": 1}, training=True)
    assert isinstance(envs.envs[0].unwrapped, envs_for_tests.CounterEnv)
    assert isinstance(envs.envs[0], gym.Wrapper)
