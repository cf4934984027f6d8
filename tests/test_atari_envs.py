"""Atari: the fast path against the slow one, lives against whole games."""

from __future__ import annotations

import re
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs_for_tests import noted
from rl_training.config import AtariOptions, Wrappers
from rl_training.envs.atari import EpisodicLife, preprocess
from rl_training.envs.backends import LifeCounter, VectorEnvs
from rl_training.envs.episodes import SyncEnvs
from rl_training.envs.factory import EnvPlan, choose_backend, make_envs
from rl_training.envs.runner import EnvRunner
from rl_training.types import Decision

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

# Without no-ops and FIRE the two paths have no freedom left, so that they must agree in every byte.
EXACT = {"noop_max": 0, "fire_reset": False}


def make_runner(backend, env_id="ALE/Breakout-v5", training=True, num_envs=1, frame_stack=4, **atari):
    kwargs = {"backend": backend, "wrappers": {"atari": {**EXACT, **atari}, "frame_stack": frame_stack}}
    envs = make_envs(env_id, num_envs=num_envs, seed=1, env_kwargs=kwargs, training=training)
    return EnvRunner(envs, seed=5, training=training)


def random_act(num_actions, num_envs=1):
    def act(obs, memory, *, explore, rng):
        return Decision(rng.integers(num_actions, size=num_envs), {}, {})

    return act


def collect(runner, steps):
    act = random_act(runner.spaces.action.n, runner.num_envs)
    return [{key: np.array(value) for key, value in runner.step(act).items()} for _ in range(steps)]


@pytest.mark.parametrize("frame_stack", [4, None])
def test_vector_emulator_equals_single_games(frame_stack):
    fast, slow = make_runner("ale", frame_stack=frame_stack), make_runner("sync", frame_stack=frame_stack)
    assert isinstance(fast.envs, VectorEnvs)
    assert isinstance(slow.envs, SyncEnvs)
    assert fast.spaces == slow.spaces
    assert fast.spaces.observation.shape == ((4, 84, 84) if frame_stack else (84, 84))
    assert np.array_equal(fast.obs, slow.obs)
    lives_lost, games, others = 0, noted(fast), noted(slow)
    for mine, theirs in zip(collect(fast, 260), collect(slow, 260), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert np.array_equal(mine[key], theirs[key]), key
        lives_lost += int(mine["terminated"][0])
    assert games == others
    assert len(games) >= 1
    assert lives_lost >= 5, "a game of Breakout has five lives"


@pytest.mark.parametrize("backend", ["ale", "sync"])
def test_a_lost_life_ends_the_episode_but_not_the_game(backend):
    runner = make_runner(backend)
    games = noted(runner)
    steps = collect(runner, 260)
    ends = [t for t, step in enumerate(steps[:-1]) if step["terminated"][0]]
    game = games[0]
    lost = [t for t in ends if t < game.length - 1]
    assert len(lost) == 4, "the fifth life is the game"
    assert game.length - 1 in ends
    assert game.episode_return == sum(step["reward"][0] for step in steps[: game.length])
    for t in lost:
        assert np.array_equal(steps[t]["next_obs"], steps[t + 1]["obs"]), "the game goes on from there"
        assert steps[t + 1]["first"][0]
    assert not np.array_equal(steps[game.length - 1]["next_obs"], steps[game.length]["obs"])


@pytest.mark.parametrize("backend", ["ale", "sync"])
def test_evaluation_plays_whole_games(backend):
    runner = make_runner(backend, training=False)
    games = noted(runner)
    steps = collect(runner, 260)
    ends = [t for t, step in enumerate(steps) if step["terminated"][0]]
    assert ends
    assert len(ends) == len(games)


def test_lives_zero_is_not_a_lost_life():
    counter = LifeCounter(4)
    counter.lives = np.array([3, 1, 2, 0])
    over = np.array([False, False, True, False])
    assert counter.lost(np.array([2, 0, 1, 0]), over).tolist() == [True, False, False, False]
    assert counter.lives.tolist() == [2, 0, 1, 0]


class Lives(gym.Env):
    """Shows a given number of lives after every step; over at the last."""

    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, shown):
        self.shown = shown
        self.ale = self

    def lives(self):
        return self.shown[self.t]

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t, 0.0, self.t == len(self.shown) - 1, False, {}


def test_episodic_life_step_by_step():
    env = EpisodicLife(Lives([2, 2, 1, 1, 0, 0]))
    env.reset()
    ends = []
    for _ in range(5):
        obs, _, terminated, _, info = env.step(0)
        ends.append((terminated, info.get("episode_over", True)))
        if terminated:
            assert env.reset()[0] == (obs if obs < 5 else 0)
    assert ends == [(False, True), (True, False), (False, True), (False, True), (True, True)]


@pytest.mark.parametrize("backend", ["sync", "same_step"])
def test_lost_lives_and_whole_games_in_a_batch(backend):
    def make():
        return EpisodicLife(Lives([2, 2, 1, 1, 0, 0]))

    vector = SyncVectorEnv([make, make], autoreset_mode=AutoresetMode.SAME_STEP)
    envs = SyncEnvs([make, make]) if backend == "sync" else VectorEnvs(vector)
    envs.reset()
    rows = []
    for _ in range(6):
        step = envs.step(np.zeros(2, np.int64))
        rows.append((bool(step.terminated[1]), bool(step.episode_over[1]), int(step.next_obs[1]), int(step.obs[1])))
    assert rows == [
        (False, False, 1, 1),
        (True, False, 2, 2),
        (False, False, 3, 3),
        (False, False, 4, 4),
        (True, True, 5, 0),
        (False, False, 1, 1),
    ]


def test_fire_is_pressed_only_where_it_exists():
    def pressed(env_id):
        env = gym.make(env_id, frameskip=1, repeat_action_probability=0.0)
        actions = []
        inner, step = env.unwrapped, env.unwrapped.step
        inner.step = lambda action: (actions.append(inner.get_action_meanings()[action]), step(action))[1]
        preprocess(env, AtariOptions(noop_max=0)).reset(seed=0)
        return set(actions)

    assert pressed("ALE/Breakout-v5") == {"FIRE"}
    assert pressed("ALE/Freeway-v5") == set()


def test_no_ops_follow_the_seed_without_reloading():
    env = preprocess(gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0), AtariOptions())
    env.unwrapped.load_game = lambda: pytest.fail("seeding reloaded the ROM")

    def frames(seed):
        env.reset(seed=seed)
        return env.unwrapped.ale.getEpisodeFrameNumber()

    first = [frames(seed) for seed in range(6)]
    assert first == [frames(seed) for seed in range(6)]
    assert len(set(first)) > 1


def test_automatic_backend():
    def chosen(env_id="ALE/Pong-v5", kwargs=None, **wrappers):
        return choose_backend(EnvPlan(env_id, 8, 0, Wrappers(**wrappers), kwargs or {}, True))

    assert chosen(atari=True) == "ale"
    assert chosen("PongNoFrameskip-v4", atari=True) == "ale"
    assert chosen(atari=False) == "sync"
    assert chosen(atari=True, time_limit=100) == "sync"
    assert chosen(atari=True, kwargs={"full_action_space": True}) == "ale"
    assert chosen(atari=True, kwargs={"mode": 1}) == "sync"


def test_time_limit_counts_the_agents_steps():
    kwargs = {"wrappers": {"atari": True, "time_limit": 6}}
    envs = make_envs("ALE/Pong-v5", num_envs=1, seed=1, env_kwargs=kwargs, training=True)
    runner = EnvRunner(envs, seed=0)
    assert [bool(step["truncated"][0]) for step in collect(runner, 7)] == [False] * 5 + [True, False]


@pytest.mark.parametrize("backend", ["ale", "sync"])
def test_colour_and_size(backend):
    runner = make_runner(backend, grayscale=False, screen_size=42, frame_stack=2)
    assert runner.spaces.observation.shape == (2, 42, 42, 3)
    assert collect(runner, 1)[0]["next_obs"].shape == (1, 2, 42, 42, 3)


def test_raw_games_and_full_action_space():
    raw = make_envs("ALE/Pong-v5", num_envs=1, seed=0, env_kwargs={"obs_type": "ram"}, training=True)
    assert raw.single_observation_space.shape == (128,)
    kwargs = {"full_action_space": True, "wrappers": {"atari": True}}
    assert make_envs("ALE/Pong-v5", num_envs=1, seed=0, env_kwargs=kwargs, training=True).single_action_space.n == 18


def test_errors(monkeypatch):
    def make(**kwargs):
        return make_envs("ALE/Pong-v5", num_envs=1, seed=0, env_kwargs=kwargs, training=True)

    with pytest.raises(ValueError, match=r"env_kwargs.frameskip.*wrappers.atari.frame_skip"):
        make(frameskip=4, wrappers={"atari": True})
    with pytest.raises(ValueError, match=r"'ale' cannot express wrappers.time_limit"):
        make(backend="ale", wrappers={"atari": True, "time_limit": 5})
    with pytest.raises(ValueError, match=r"'ale' cannot express .*without wrappers.atari"):
        make(backend="ale")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ImportError, match=re.escape('pip install "rl-training[atari]"')):
        make()
