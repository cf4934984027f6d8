"""A run goes on where it stopped: environments are brought back exactly, or named."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from envs_for_tests import RandomWalk, noted
from rl_training.data.batch import tree_map
from rl_training.data.normalize import Normalizer
from rl_training.envs import episodes
from rl_training.envs.factory import make_envs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.runner_state import RunnerState
from rl_training.types import Decision

ATARI = {"wrappers": {"atari": {"noop_max": 5}, "frame_stack": 2}, "backend": "sync"}
CASES = {
    "cartpole": ("CartPole-v1", {"backend": "sync"}, 60),
    "cartpole_vector": ("CartPole-v1", {"backend": "vector"}, 60),
    "cartpole_async": ("CartPole-v1", {"backend": "async"}, 60),
    "cartpole_repeat": ("CartPole-v1", {"wrappers": {"action_repeat": 3}}, 20),
    "cartpole_pixels": ("CartPole-v1", {"wrappers": {"pixels": True}}, 20),
    "cartpole_pixels_async": ("CartPole-v1", {"wrappers": {"pixels": True}, "backend": "async"}, 20),
    "pendulum": ("Pendulum-v1", {}, 30),
    "lunar_lander": ("LunarLander-v3", {}, 90),
    "half_cheetah": ("HalfCheetah-v5", {}, 25),
    "pong": ("ALE/Pong-v5", ATARI, 30),
    "breakout_lives": ("ALE/Breakout-v5", ATARI, 150),
    "breakout_sticky": ("ALE/Breakout-v5", {**ATARI, "wrappers": {"atari": {"sticky": 0.25, "noop_max": 2}}}, 20),
}


def make_runner(env_id, env_kwargs, seed=3, normalize=False):
    if env_id.startswith("ALE/"):
        pytest.importorskip("ale_py")
    envs = make_envs(env_id, num_envs=2, seed=seed, env_kwargs=env_kwargs, training=True)
    return EnvRunner(envs, seed=seed, normalizer=Normalizer(envs.single_observation_space, 2) if normalize else None)


def random_act(space):
    def act(obs, memory, *, explore, rng):
        if isinstance(space, spaces.Discrete):
            action = rng.integers(space.n, size=2)
        else:
            action = rng.normal(size=(2, *space.shape)).astype(np.float32)
        memory = memory or {"h": np.zeros((2, 1)), "n": np.zeros(2)}
        return Decision(action, {"h": memory["h"] + 1, "n": memory["n"] + 2}, {"age": memory["h"].copy()})

    return act


def collect(runner, steps):
    act = random_act(runner.spaces.action)
    return [tree_map(np.array, runner.step(act)) for _ in range(steps)]


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_equal(mine, theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_restored_runner_continues_bit_for_bit(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo leaves its log
    env_id, kwargs, steps = CASES[case]
    runner = make_runner(env_id, kwargs)
    collect(runner, steps)
    state = RunnerState(runner).state_dict()
    finished = noted(runner)
    uninterrupted = collect(runner, steps)
    returns = list(runner.statistics.recent_returns)
    runner.close()

    restored = make_runner(env_id, kwargs, seed=99)
    RunnerState(restored).load_state_dict(state)
    assert restored.not_restored == []
    again = noted(restored)
    assert_same(collect(restored, steps), uninterrupted)
    assert list(restored.statistics.recent_returns) == returns
    assert again == finished
    restored.close()


def test_normaliser_and_runner_together_continue_bit_for_bit():
    runner = make_runner("Pendulum-v1", {}, normalize=True)
    collect(runner, 20)
    state, statistics = RunnerState(runner).state_dict(), runner.normalizer.state_dict()
    uninterrupted = collect(runner, 20)
    restored = make_runner("Pendulum-v1", {}, seed=99, normalize=True)
    restored.normalizer.load_state_dict(statistics)
    RunnerState(restored).load_state_dict(state)
    assert_same(collect(restored, 20), uninterrupted)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_environment_that_cannot_be_replayed_is_named_and_begins_anew(backend):
    kwargs = {"honest": False, "backend": backend}
    runner = make_runner("RandomWalkForTests-v0", kwargs)
    collect(runner, 5)
    state = RunnerState(runner).state_dict()
    runner.close()
    restored = make_runner("RandomWalkForTests-v0", kwargs)
    RunnerState(restored).load_state_dict(state)
    assert restored.not_restored == [0, 1]
    assert restored.first.all()
    assert not restored.memory["h"].any()
    assert not np.array_equal(restored.obs, state["obs"])
    assert np.array_equal(restored.obs, restored.envs.obs)
    assert collect(restored, 1)[0]["first"].all()
    assert RunnerState(restored).state_dict()["lengths"].tolist() == [1, 1]
    restored.close()


def test_too_long_an_episode_is_not_kept(monkeypatch):
    monkeypatch.setattr(episodes, "MAX_ACTIONS", 4)
    runner = make_runner("RandomWalkForTests-v0", {})
    collect(runner, 5)
    state = RunnerState(runner).state_dict()
    restored = make_runner("RandomWalkForTests-v0", {})
    RunnerState(restored).load_state_dict(state)
    assert restored.not_restored == [0, 1]
    collect(restored, 60)
    restored.envs.reset()
    again = restored.envs.state()["episodes"][0]
    assert again["actions"] is not None, "the next episode is kept again"
    assert again["episode"] > state["envs"]["episodes"][0]["episode"]


def test_ale_vector_begins_anew_with_other_seeds():
    pytest.importorskip("ale_py")
    kwargs = {"wrappers": {"atari": True}, "backend": "ale"}
    runner = make_runner("ALE/Pong-v5", kwargs)
    state = RunnerState(runner).state_dict()
    begins = collect(runner, 30)
    assert_same(collect(make_runner("ALE/Pong-v5", kwargs), 30), begins)
    restored = make_runner("ALE/Pong-v5", kwargs)
    RunnerState(restored).load_state_dict(state)
    assert restored.not_restored == [0, 1]
    assert restored.first.all()
    others = collect(restored, 30)
    assert not np.array_equal(others[-1]["obs"], begins[-1]["obs"]), "not the first episodes once more"
    twice = make_runner("ALE/Pong-v5", kwargs)
    RunnerState(twice).load_state_dict(RunnerState(restored).state_dict())
    twice.rng = np.random.default_rng(3)  # the same actions again
    assert not np.array_equal(collect(twice, 30)[-1]["obs"], others[-1]["obs"])


def test_a_delayed_reset_is_remembered():
    kwargs = {"backend": "vector", "wrappers": {"time_limit": 4}}
    runner = make_runner("CartPole-v1", kwargs)
    assert collect(runner, 4)[-1]["truncated"].all()
    restored = make_runner("CartPole-v1", kwargs, seed=99)
    RunnerState(restored).load_state_dict(RunnerState(runner).state_dict())
    rows = collect(restored, 3)
    assert_same(rows, collect(runner, 3))
    assert not rows[0]["live"].any()


def test_a_vector_environment_with_other_attributes_is_not_trusted():
    runner = make_runner("CartPole-v1", {"backend": "vector"})
    runner.envs.env.unwrapped.history = [1, 2]
    restored = make_runner("CartPole-v1", {"backend": "vector"})
    RunnerState(restored).load_state_dict(RunnerState(runner).state_dict())
    assert restored.not_restored == [0, 1]


def test_state_of_other_environments_is_refused():
    sync = make_runner("CartPole-v1", {"backend": "sync"})
    vector = make_runner("CartPole-v1", {"backend": "vector"})
    with pytest.raises(ValueError, match="resume with the backend and num_envs"):
        RunnerState(vector).load_state_dict(RunnerState(sync).state_dict())
    three = make_envs("CartPole-v1", num_envs=3, seed=0, env_kwargs={}, training=True)
    with pytest.raises(ValueError, match="resume with the backend and num_envs"):
        three.load_state(sync.envs.state())


def test_actions_are_kept_even_if_the_caller_reuses_its_array():
    env = episodes.Episodes(RandomWalk(), seed=0, index=0)
    env.reset()
    action = np.zeros(1, np.float32)
    for value in (1.0, 2.0):
        action[:] = value
        env.step(action)
    assert env.state()["actions"].tolist() == [[1.0], [2.0]]
