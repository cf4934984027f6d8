"""Two players in one environment: the spaces say so, and the books are those of the one who moves first."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from envs_for_tests import noted
from rl_training import ALGORITHMS, evaluate_checkpoint, load_policy, train
from rl_training.envs.factory import make_envs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.runner_state import RunnerState
from rl_training.errors import InputError
from rl_training.runtime import workflows
from rl_training.types import Decision


class Duel(gym.Env):
    """The players say 0 or 1 in turns. Who says 1 wins; after `length` words without one the next to speak has lost."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    num_players = 2

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        over = bool(action == 1) or self.t == self.length
        return np.zeros(2, np.float32), 1.0 if over else 0.0, over, False, {}


class Solo(Duel):
    num_players = 1


class Pass(gym.Env):
    """Who moves first may stop, for nothing, or pass: then the other player gets 1. Of one player, the same one."""

    observation_space = gym.spaces.Box(0, 2, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, num_players: int = 2) -> None:
        self.num_players = num_players

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == 2 or bool(action == 0)
        return np.full(1, self.t, np.float32), float(self.t == 2), over, False, {}


for name, cls in (("Duel", Duel), ("Solo", Solo), ("Pass", Pass)):
    if f"{name}ForTests-v0" not in gym.registry:
        gym.register(f"{name}ForTests-v0", cls)


def make_runner(env_id="DuelForTests-v0", num_envs=3, **env_kwargs):
    envs = make_envs(env_id, num_envs=num_envs, seed=0, env_kwargs=env_kwargs, training=True)
    return EnvRunner(envs, seed=0)


def says_one_at(*moments):
    """Environment i says 1 at its moment (None: never); all games begin together."""
    clock = iter(range(1, 1000))

    def act(obs, memory, *, explore, rng):
        now = next(clock)
        return Decision(np.array([int(now == moment) for moment in moments]), memory, {})

    return act


def test_the_return_is_that_of_who_moves_first():
    runner, act = make_runner(), says_one_at(1, 2, None)
    episodes = noted(runner)
    rewards = [runner.step(act)["reward"].copy() for _ in range(5)]
    assert np.array(rewards).sum(0).tolist() == [1.0, 1.0, 1.0]  # each for who had just moved
    finished = [(episode.env, episode.length, episode.episode_return) for episode in episodes]
    assert finished == [(0, 1, 1.0), (1, 2, -1.0), (2, 5, 1.0)]
    assert list(runner.statistics.recent_returns) == [1.0, -1.0, 1.0]


def test_alternating_goes_on_after_a_restore():
    runner = make_runner()
    for _ in range(3):
        runner.step(says_one_at(None, None, None))
    other = make_runner()
    RunnerState(other).load_state_dict(RunnerState(runner).state_dict())
    other.step(says_one_at(1, 1, 1))
    assert list(other.statistics.recent_returns) == [-1.0] * 3


def test_with_one_player_rewards_add_up():
    runner = make_runner("SoloForTests-v0")
    runner.step(says_one_at(None, None, None))
    runner.step(says_one_at(1, 1, 1))
    assert list(runner.statistics.recent_returns) == [1.0] * 3


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(("env_id", "players"), [("DuelForTests-v0", 2), ("SoloForTests-v0", 1), ("CartPole-v1", 1)])
def test_the_spaces_say_how_many_play(env_id, players, backend):
    runner = make_runner(env_id, backend=backend, wrappers={"frame_stack": 2}, num_envs=2)
    try:
        assert (runner.spaces.num_players, runner.spaces.frame_stack) == (players, 2)
    finally:
        runner.close()


def test_an_environments_own_vector_form_has_one_player():
    assert make_runner("CartPole-v1", backend="vector").spaces.num_players == 1


def test_a_checkpoint_remembers_players_and_frames(tiny_config, monkeypatch):
    config = {"env_id": "DuelForTests-v0", "env_kwargs": {"wrappers": {"frame_stack": 2}}}
    result = train(tiny_config("muzero", config), progress="silent")
    spaces = load_policy(result.run_dir).actor.spaces
    assert (spaces.num_players, spaces.frame_stack) == (2, 2)
    original = workflows.open_checkpoint

    def of_old(*args):
        checkpoint = original(*args)
        del checkpoint.info["spaces"]["num_players"], checkpoint.info["spaces"]["frame_stack"]
        return checkpoint

    monkeypatch.setattr(workflows, "open_checkpoint", of_old)
    assert load_policy(result.run_dir).actor.spaces.num_players == 1
    assert evaluate_checkpoint(result.run_dir)["eval_episodes"] == 2


def test_train_in_self_play_and_evaluate_against_an_opponent(tiny_config):
    config = {"env_id": "TicTacToe-v0", "eval_env_kwargs": {"opponent": "random"}, "eval_episodes": 20}
    metrics = train(tiny_config("muzero", config), progress="silent").metrics
    assert -1 <= metrics["eval_return_min"] <= metrics["eval_return_mean"] <= 1
    assert -1 <= metrics["train_return_mean"] <= 1


SELF_PLAY = [algo for algo, entry in ALGORITHMS.items() if entry.recipe.two_players]
FOR_ONE = [algo for algo in ALGORITHMS if algo not in SELF_PLAY]


@pytest.mark.parametrize(("num_players", "best"), [(2, 0.0), (1, 1.0)])
@pytest.mark.parametrize("algo", SELF_PLAY)
def test_what_the_other_player_gains_is_lost(algo, num_players, best, tiny_config):
    """The same moves and rewards: of two players the first must not pass, of one it must."""
    config = {"env_id": "PassForTests-v0", "env_kwargs": {"num_players": num_players}}
    config |= {"total_timesteps": 1000, "num_envs": 4, "eval_episodes": 4}
    learning = {"num_simulations": 8, "batch_size": 32, "learning_rate": 5e-3, "utd_ratio": 0.25, "gamma": 1.0}
    result = train(tiny_config(algo, config, **learning, reanalyse_ratio=0.0), progress="silent")
    assert result.metrics["eval_return_mean"] == best


@pytest.mark.parametrize("algo", FOR_ONE)
def test_algorithms_for_one_player_refuse_games_of_two(algo, tiny_config, tmp_path):
    config = tiny_config(algo, {"env_id": "TicTacToe-v0"})
    with pytest.raises(InputError, match=rf"TicTacToe-v0 .* {algo} is for one: use .*muzero.*opponent"):
        train(config, progress="silent")
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


def test_who_plays_games_of_two():
    assert set(SELF_PLAY) == {"muzero", "gumbel_muzero", "efficientzero", "scalezero"}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_against_an_opponent_it_is_a_game_of_one(algo, tiny_config):
    config = {"env_id": "TicTacToe-v0", "env_kwargs": {"opponent": "random"}, "total_timesteps": 64}
    assert -1 <= train(tiny_config(algo, config), progress="silent").metrics["eval_return_mean"] <= 1
