"""Board games: the rules against brute force and known counts, the two sides' views, the opponents' strength."""

from __future__ import annotations

import copy
import functools
import itertools
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs_for_tests import noted
from rl_training.envs.board_games import (
    ConnectFour,
    TicTacToe,
    cells,
    has_line,
    landing,
    legal_actions,
    num_actions,
    perfect_move,
    random_move,
    solve,
)
from rl_training.envs.factory import make_envs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.runner_state import RunnerState
from rl_training.types import Decision

GAMES = {"TicTacToe-v0": TicTacToe, "ConnectFour-v0": ConnectFour}
SETTINGS = [
    ("TicTacToe-v0", {}),
    ("TicTacToe-v0", {"opponent": "random"}),
    ("TicTacToe-v0", {"opponent": "perfect"}),
    ("TicTacToe-v0", {"opponent": "mcts", "rollouts": 20}),
    ("ConnectFour-v0", {}),
    ("ConnectFour-v0", {"opponent": "random"}),
    ("ConnectFour-v0", {"opponent": "mcts", "rollouts": 20}),
]
each_game = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
each_setting = pytest.mark.parametrize(("env_id", "kwargs"), SETTINGS, ids=lambda v: str(v))


def full(rules):
    return int(cells(rules).sum())


def lines(rules):
    """Every winning line as a list of (row, column), by walking from each cell in four directions."""
    for row, column in itertools.product(range(rules.rows), range(rules.columns)):
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            line = [(row + k * down, column + k * right) for k in range(rules.line)]
            if all(0 <= r < rules.rows and 0 <= c < rules.columns for r, c in line):
                yield line


def bits(rules, places):
    grid = cells(rules)
    return sum(int(grid[place]) for place in places)


def played(rules, actions):
    """(stones of the player to move, the other's) after these actions."""
    own = other = 0
    for action in actions:
        own, other = other, own | landing(rules, own | other, action)
    return own, other


def play(rules, players, rng):
    """The number of the player who wins, or None."""
    own = other = 0
    for turn in itertools.cycle((0, 1)):
        bit = landing(rules, own | other, players[turn](own, other, rng))
        assert bit, f"player {turn} moved where it cannot"
        own, other = other, own | bit
        if has_line(rules, other):
            return turn
        if own | other == full(rules):
            return None
    return None


def results(rules, one, two, games, seed=0):
    """(won, drawn, lost) games of `one`, which begins every second."""
    rng, counts = np.random.default_rng(seed), [0, 0, 0]
    for game in range(games):
        side = game % 2
        winner = play(rules, (one, two) if side == 0 else (two, one), rng)
        counts[1 if winner is None else 0 if winner == side else 2] += 1
    return tuple(counts)


def mcts(rules, rollouts):
    from rl_training.envs.board_opponents import mcts_move

    return partial(mcts_move, rules, rollouts)


def test_every_game_of_tic_tac_toe():
    rules = TicTacToe.rules

    @functools.cache
    def count(own, other):
        """(games that the player to move wins, drawn, loses)."""
        if has_line(rules, other):
            return np.array([0, 0, 1])
        if own | other == full(rules):
            return np.array([0, 1, 0])
        after = [count(other, own | landing(rules, own | other, a)) for a in legal_actions(rules, own | other)]
        return sum(after)[::-1]

    assert count(0, 0).tolist() == [131184, 46080, 77904]
    assert count(0, 0).sum() == 255168


def test_positions_of_connect_four_by_depth():
    """OEIS A212693; wins become possible at the seventh stone, and nothing is played after one."""
    rules, positions, counts = ConnectFour.rules, {(0, 0)}, []
    for _ in range(8):
        positions = {
            (other, own | landing(rules, own | other, action))
            for own, other in positions
            if not has_line(rules, other)
            for action in legal_actions(rules, own | other)
        }
        counts.append(len(positions))
    assert counts == [7, 49, 238, 1120, 4263, 16422, 54859, 184275]


@each_game
def test_every_line_wins_and_no_line_short_of_a_stone_does(game):
    rules, found = game.rules, list(lines(game.rules))
    assert len(found) == {TicTacToe: 8, ConnectFour: 69}[game]
    for line in found:
        assert has_line(rules, bits(rules, line))
        assert not any(has_line(rules, bits(rules, [p for p in line if p != gap])) for gap in line)


@each_game
def test_lines_on_random_positions(game):
    rules, rng, found = game.rules, np.random.default_rng(0), 0
    for _ in range(2000):
        stones = rng.random((rules.rows, rules.columns)) < rng.choice([0.3, 0.5, 0.7])
        expected = any(all(stones[place] for place in line) for line in lines(rules))
        assert has_line(rules, int(cells(rules)[stones].sum())) == expected
        found += expected
    assert 500 < found < 1900


def test_stones_fall_and_a_full_column_is_closed():
    rules, occupied = ConnectFour.rules, 0
    for row in range(5, -1, -1):
        assert landing(rules, occupied, 3) == cells(rules)[row, 3]
        occupied |= landing(rules, occupied, 3)
    assert landing(rules, occupied, 3) == 0
    assert legal_actions(rules, occupied) == [0, 1, 2, 4, 5, 6]
    assert legal_actions(rules, full(rules)) == []


class Naive:
    """The same games on a grid of marks, for comparison: 1 and -1 are the first and the second player."""

    def __init__(self, rules):
        self.rules, self.grid, self.turn = rules, np.zeros((rules.rows, rules.columns), int), 1

    def place(self, action):
        if not self.rules.gravity:
            return divmod(action, self.rules.columns)
        return int((self.grid[:, action] == 0).sum()) - 1, action

    def legal(self):
        places = [self.place(action) for action in range(num_actions(self.rules))]
        return [row >= 0 and self.grid[row, column] == 0 for row, column in places]

    def move(self, action):
        """Whether it wins."""
        self.grid[self.place(action)] = self.turn
        won = any(all(self.grid[place] == self.turn for place in line) for line in lines(self.rules))
        self.turn = -self.turn
        return won


@pytest.mark.parametrize("env_id", GAMES)
def test_self_play_against_a_naive_game(env_id):
    env, rng, ends = gym.make(env_id), np.random.default_rng(1), []
    game = env.unwrapped
    for _ in range(60):
        obs, _ = env.reset()
        naive, terminated = Naive(game.rules), False
        while not terminated:
            assert game.to_play == (0 if naive.turn == 1 else 1)
            assert obs["action_mask"].tolist() == naive.legal()
            action = rng.choice(np.flatnonzero(obs["action_mask"]))
            mover = game.to_play
            obs, reward, terminated, truncated, _ = env.step(action)
            won = naive.move(action)
            assert np.array_equal(obs["observation"], [naive.grid == naive.turn, naive.grid == -naive.turn])
            assert (reward, terminated, truncated) == (float(won), won or not any(naive.legal()), False)
            assert game.winner == (mover if won else None)
        assert obs["action_mask"].all(), "a mask can always be normalised"
        ends.append(game.winner)
    assert {0, 1} <= set(ends)
    assert env_id != "TicTacToe-v0" or None in ends


@each_setting
def test_spaces_and_the_environment_checker(env_id, kwargs, recwarn):
    env = gym.make(env_id, **kwargs)
    assert env.unwrapped.num_players == (1 if kwargs else 2)
    shape, actions = {"TicTacToe-v0": ((2, 3, 3), 9), "ConnectFour-v0": ((2, 6, 7), 7)}[env_id]
    assert env.observation_space == gym.spaces.Dict(
        {"observation": gym.spaces.Box(0, 1, shape, np.float32), "action_mask": gym.spaces.MultiBinary(actions)}
    )
    assert env.action_space == gym.spaces.Discrete(actions)
    check_env(env.unwrapped)
    assert not [str(warning.message) for warning in recwarn if "gym" in str(warning.filename)]


def test_an_illegal_action_loses_at_once():
    env = ConnectFour()
    env.reset()
    for _ in range(6):
        before, reward, terminated, _, _ = env.step(2)
        assert (reward, terminated) == (0.0, False)
    assert env.to_play == 0
    after, reward, terminated, truncated, _ = env.step(2)
    assert (reward, terminated, truncated, env.winner) == (-1.0, True, False, 1)
    assert np.array_equal(after["observation"], before["observation"][::-1]), "no stone was set"
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(0)


@pytest.mark.parametrize("seed", range(4))
def test_an_illegal_action_loses_against_an_opponent(seed):
    env = TicTacToe(opponent="random")
    obs, _ = env.reset(seed=seed)
    action = np.flatnonzero(obs["action_mask"])[0]
    before = env.step(action)[0]
    after, reward, terminated, truncated, _ = env.step(action)
    assert (reward, terminated, truncated, env.winner) == (-1.0, True, False, 1 - env.agent)
    assert np.array_equal(after["observation"], before["observation"]), "nor does the opponent move again"


@each_game
def test_what_cannot_be_played_is_an_error(game):
    env = game()
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(0)
    env.reset()
    for action in (-1, num_actions(game.rules)):
        with pytest.raises(ValueError, match=f"has no action {action}: use 0 to"):
            env.step(action)
    with pytest.raises(ValueError, match=r"'perfect'.*ConnectFour.*use 'mcts'"):
        ConnectFour(opponent="perfect")
    with pytest.raises(ValueError, match=r"no opponent 'prefect': use random, perfect, mcts, or None"):
        game(opponent="prefect")
    for rollouts in (0, 50.0):
        with pytest.raises(ValueError, match=f"whole number of rollouts from 1 on, not {rollouts}"):
            game(opponent="mcts", rollouts=rollouts)


def test_the_board_as_text():
    env = gym.make("ConnectFour-v0", render_mode="ansi")
    env.reset()
    for action in (3, 3, 4):
        env.step(action)
    assert env.render() == ". . . . . . .\n" * 4 + ". . . O . . .\n" + ". . . X X . .\n"
    env = gym.make("TicTacToe-v0", render_mode="ansi")
    env.reset()
    for action in (1, 8, 3):
        env.step(action)
    assert env.render() == ". X .\nX . .\n. . O\n"
    assert TicTacToe().render() is None


@pytest.mark.parametrize("env_id", GAMES)
def test_with_an_opponent_all_is_seen_by_the_agent(env_id):
    env, rng, began, rewards = gym.make(env_id, opponent="random"), np.random.default_rng(2), [], []
    game = env.unwrapped
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        began.append(game.agent == 0)
        expected_own = np.zeros_like(obs["observation"][0])
        assert obs["observation"].sum(axis=(1, 2)).tolist() == [0, game.agent]
        terminated = False
        while not terminated:
            assert game.to_play == game.agent
            own, other = obs["observation"]
            naive = Naive(game.rules)
            naive.grid = (own - other).astype(int)
            assert obs["action_mask"].tolist() == naive.legal()
            action = rng.choice(np.flatnonzero(obs["action_mask"]))
            expected_own[naive.place(action)] = 1
            obs, reward, terminated, truncated, _ = env.step(action)
            assert np.array_equal(obs["observation"][0], expected_own)
            assert not truncated
            assert terminated or reward == 0.0
        assert obs["action_mask"].all()
        assert reward == (0.0 if game.winner is None else 1.0 if game.winner == game.agent else -1.0)
        own, other = (int(cells(game.rules)[plane == 1].sum()) for plane in obs["observation"])
        assert reward == float(has_line(game.rules, own)) - float(has_line(game.rules, other))
        rewards.append(reward)
    assert 70 < sum(began) < 130
    assert {1.0, -1.0} <= set(rewards)


@each_setting
def test_an_episode_is_its_seed_and_its_actions(env_id, kwargs):
    def episode(seed):
        env = gym.make(env_id, **kwargs)
        env.np_random.random(3)
        obs, _ = env.reset(seed=seed)
        seen, terminated = [obs], False
        while not terminated:
            obs, reward, terminated, _, _ = env.step(np.flatnonzero(obs["action_mask"])[-1])
            seen += [obs, reward]
        return str(seen)

    assert [episode(seed) for seed in range(5)] == [episode(seed) for seed in range(5)]
    assert len({episode(seed) for seed in range(20)}) > (3 if kwargs else 0)


def test_minimax():
    rules = TicTacToe.rules
    assert solve(rules, 0, 0) == (0, tuple(range(9)))
    assert solve(rules, *played(rules, [0])) == (0, (4,)), "only the centre answers a corner"
    assert solve(rules, *played(rules, [0, 1]))[0] == 1
    assert solve(rules, *played(rules, [0, 3, 1, 4])) == (1, (2,))
    assert solve(rules, *played(rules, [0, 4, 1])) == (0, (2,))
    assert solve(rules, *played(rules, [0, 1, 4]))[0] == -1


def test_perfect_play():
    perfect, random = (partial(move, TicTacToe.rules) for move in (perfect_move, random_move))
    assert results(TicTacToe.rules, perfect, perfect, 100) == (0, 100, 0)
    won, _, lost = results(TicTacToe.rules, perfect, random, 200)
    assert won > 150
    assert lost == 0
    rng = np.random.default_rng(0)
    assert {perfect(0, 0, rng) for _ in range(200)} == set(range(9)), "games differ"


WIN_OR_BLOCK = [
    (TicTacToe, [0, 3, 1, 4], 2),
    (TicTacToe, [0, 4, 1], 2),
    (ConnectFour, [3, 0, 3, 0, 3, 1], 3),
    (ConnectFour, [3, 0, 3, 0, 3], 3),
    (ConnectFour, [0, 0, 1, 1, 2, 2], 3),
    (ConnectFour, [0, 6, 1, 6, 2], 3),
    (ConnectFour, [0, 1, 1, 2, 2, 3, 2, 3, 3, 6], 3),
    (ConnectFour, [0, 1, 1, 2, 3, 2, 2, 3, 3], 3),
]


@pytest.mark.parametrize(("game", "actions", "answer"), WIN_OR_BLOCK)
def test_search_wins_in_one_and_blocks_a_loss_in_one(game, actions, answer):
    own, other = played(game.rules, actions)
    stones = {action: landing(game.rules, own | other, action) for action in legal_actions(game.rules, own | other)}
    wins, threats = ([a for a, bit in stones.items() if has_line(game.rules, side | bit)] for side in (own, other))
    assert (wins or threats) == [answer], "the position is what it says"
    rng = np.random.default_rng(0)
    assert [mcts(game.rules, 1000)(own, other, rng) for _ in range(10)] == [answer] * 10


def test_search_agrees_with_minimax():
    rules, rng, wrong = TicTacToe.rules, np.random.default_rng(0), []
    for _ in range(150):
        actions = rng.permutation(9)[: rng.integers(8)]
        own, other = played(rules, actions)
        if not has_line(rules, own) and not has_line(rules, other):
            wrong += [mcts(rules, 10_000)(own, other, rng) not in solve(rules, own, other)[1]]
    assert len(wrong) > 80
    assert not any(wrong)


@pytest.mark.parametrize(("game", "rollouts"), [(TicTacToe, 1000), (ConnectFour, 200)])
def test_search_beats_random_play(game, rollouts):
    won, drawn, _ = results(game.rules, mcts(game.rules, rollouts), partial(random_move, game.rules), 200)
    assert won + drawn > 190
    assert won > (190 if game is ConnectFour else 170)


def test_more_search_beats_less():
    won, _, lost = results(ConnectFour.rules, mcts(ConnectFour.rules, 1000), mcts(ConnectFour.rules, 100), 80)
    assert won > 60
    assert lost < 20


@each_game
def test_visits_are_the_rollouts(game):
    from rl_training.envs.board_opponents import search

    rules, rng = game.rules, np.random.default_rng(0)

    def visits(rollouts, own, other, seed):
        random = np.array([seed], np.uint64)
        return search(rules, full(rules), num_actions(rules), own, other, rollouts, random).tolist()

    for rollouts in (1, 5, 300):
        own, other = played(rules, rng.integers(num_actions(rules), size=3))
        found = visits(rollouts, own, other, 7)
        assert sum(found) == rollouts
        assert all(landing(rules, own | other, action) for action, count in enumerate(found) if count)
        assert visits(rollouts, own, other, 7) == found
    assert len({str(visits(300, 0, 0, seed)) for seed in range(5)}) == 5
    assert min(visits(num_actions(rules), 0, 0, 1)) == 1, "each move once before any twice"
    firsts = np.sum([visits(1, 0, 0, seed) for seed in range(3000)], axis=0) * num_actions(rules) / 3000
    assert np.abs(firsts - 1).max() < 0.25, "in any order"


def test_playouts_are_uniform():
    """Against the exact expectation of uniformly random tic-tac-toe."""
    from rl_training.envs.board_opponents import draw, playout

    rules = TicTacToe.rules

    @functools.cache
    def expected(own, other):
        if has_line(rules, other):
            return 0.0
        after = [expected(other, own | landing(rules, own | other, a)) for a in legal_actions(rules, own | other)]
        return 1.0 - sum(after) / len(after) if after else 0.5

    random = np.array([3], np.uint64)
    for actions in ([], [4], [0, 1], [0, 4, 8]):
        own, other = played(rules, actions)
        mean = np.mean([playout(rules, full(rules), 9, own, other, random) for _ in range(20_000)])
        assert mean == pytest.approx(expected(own, other), abs=0.012)
    counts = np.bincount([draw(random, 7) for _ in range(70_000)], minlength=7)
    assert np.abs(counts - 10_000).max() < 400
    assert len(counts) == 7


@each_game
def test_compiled_rules_are_the_rules(game):
    from rl_training.envs import board_opponents

    rules, rng = game.rules, np.random.default_rng(0)
    for _ in range(500):
        own, other = played(rules, rng.integers(num_actions(rules), size=rng.integers(30)))
        assert board_opponents.has_line(rules, other) == has_line(rules, other)
        for action in range(num_actions(rules)):
            assert board_opponents.landing(rules, own | other, action) == landing(rules, own | other, action)


def test_the_factory_knows_the_ids_and_numba_waits_until_it_is_needed():
    code = (
        "import sys\n"
        "from rl_training.envs.factory import make_envs, nearest_env_ids, registered\n"
        "assert registered('TicTacToe-v0') and registered('ConnectFour')\n"
        "assert nearest_env_ids('ConectFour-v0')[0] == 'ConnectFour-v0'\n"
        "def make(**kwargs):\n"
        "    make_envs('TicTacToe-v0', num_envs=1, seed=0, env_kwargs=kwargs, training=True).reset()\n"
        "make(), make(opponent='random'), make(opponent='perfect')\n"
        "assert 'numba' not in sys.modules\n"
        "make(opponent='mcts', rollouts=1)\n"
        "assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def legal_play(obs, memory, *, explore, rng):
    scores = rng.random(obs["action_mask"].shape) * obs["action_mask"]
    return Decision(scores.argmax(axis=1), {}, {})


def make_runner(env_id, kwargs, seed=0):
    return EnvRunner(make_envs(env_id, num_envs=3, seed=seed, env_kwargs=kwargs, training=True), seed=seed)


def collect(runner, steps):
    return [copy.deepcopy(runner.step(legal_play)) for _ in range(steps)]


@each_setting
def test_the_runner_plays_them(env_id, kwargs):
    runner = make_runner(env_id, kwargs)
    finished = noted(runner)
    steps = collect(runner, 150)
    assert len(finished) == sum(int(step["terminated"].sum()) for step in steps)
    assert {float(reward) for step in steps for reward in step["reward"]} <= {0.0, 1.0} | ({-1.0} if kwargs else set())
    assert len(finished) > 10
    for step, after in itertools.pairwise(steps):
        assert not step["truncated"].any()
        assert step["next_obs"]["action_mask"][step["terminated"]].all()
        assert np.array_equal(after["first"], step["terminated"])
        assert (after["obs"]["observation"][after["first"]].sum(axis=(1, 2, 3)) <= 1).all()
        assert (step["obs"]["action_mask"][np.arange(3), step["action"]] == 1).all()


@pytest.mark.parametrize(
    ("env_id", "kwargs"), [*SETTINGS, ("ConnectFour-v0", {"opponent": "random", "backend": "async"})], ids=str
)
def test_games_go_on_where_they_stopped(env_id, kwargs):
    runner = make_runner(env_id, kwargs)
    collect(runner, 25)
    state = RunnerState(runner).state_dict()
    uninterrupted = collect(runner, 25)
    runner.close()
    restored = make_runner(env_id, kwargs, seed=9)
    RunnerState(restored).load_state_dict(state)
    assert restored.not_restored == []
    again = collect(restored, 25)
    restored.close()
    assert str(again) == str(uninterrupted)
    assert any(step["terminated"].any() for step in again)
