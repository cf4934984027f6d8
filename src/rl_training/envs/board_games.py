"""Tic-tac-toe and Connect Four as Gymnasium environments, for self-play or against an opponent.

A position is two bitboards, one for each player. A column has rows + 1 bits, the lowest cell first. The bit above the
top cell is always empty, so that no line crosses the edge of the board. The functions of a game take only integers:
numba compiles them too (board_opponents).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import InputError
from rl_training.types import Array

SOLVABLE = 9  # cells; tic-tac-toe has 5,478 positions, Connect Four 4.5e12
OPPONENTS = ("random", "perfect", "mcts")
Opponent: TypeAlias = Callable[[int, int, np.random.Generator], int]  # (own stones, the other's, randomness) -> action


class GameRules(NamedTuple):
    """`line` stones in a row win. An action is a column with gravity, else a cell, counted row by row from the top."""

    rows: int
    columns: int
    line: int
    gravity: bool


def num_actions(rules: GameRules) -> int:
    return rules.columns if rules.gravity else rules.rows * rules.columns


def landing(rules: GameRules, occupied: int, action: int) -> int:
    """The bit of the cell where the stone of an action lands; 0 where the action is illegal."""
    height = rules.rows + 1
    if rules.gravity:
        lowest = 1 << (action * height)
        whole_column = lowest * ((1 << rules.rows) - 1)
        return (occupied + lowest) & whole_column  # the carry runs up to the first empty cell
    row, column = action // rules.columns, action % rules.columns
    return (1 << (column * height + rules.rows - 1 - row)) & ~occupied


def has_line(rules: GameRules, stones: int) -> bool:
    height = rules.rows + 1
    for shift in (1, height - 1, height, height + 1):  # vertical, falling diagonal, horizontal, rising diagonal
        run = stones
        for _ in range(rules.line - 1):
            run &= run >> shift
        if run != 0:
            return True
    return False


def legal_actions(rules: GameRules, occupied: int) -> list[int]:
    return [action for action in range(num_actions(rules)) if landing(rules, occupied, action)]


def cells(rules: GameRules) -> Array:
    """The bit of every cell [rows, columns]; row 0 is the top one."""
    free = rules._replace(gravity=False)
    bits = [landing(free, 0, action) for action in range(num_actions(free))]
    return np.array(bits, np.int64).reshape(rules.rows, rules.columns)


def random_move(rules: GameRules, own: int, other: int, rng: np.random.Generator) -> int:
    actions = legal_actions(rules, own | other)
    return actions[rng.integers(len(actions))]


@functools.cache
def solve(rules: GameRules, own: int, other: int) -> tuple[int, tuple[int, ...]]:
    """(the minimax value for the player to move: 1, 0 or -1; all moves with this value)."""
    if has_line(rules, other):
        return -1, ()
    values = {}
    for action in legal_actions(rules, own | other):
        values[action] = -solve(rules, other, own | landing(rules, own | other, action))[0]
    best = max(values.values(), default=0)
    return best, tuple(action for action, value in values.items() if value == best)


def perfect_move(rules: GameRules, own: int, other: int, rng: np.random.Generator) -> int:
    """One of the best moves, at random, so that games differ."""
    actions = solve(rules, own, other)[1]
    return actions[rng.integers(len(actions))]


class BoardGame(gym.Env):
    """A game of two players. Player 0 moves first. An illegal action loses the game, with reward -1.

    The observation is {"observation": [2, rows, columns], the own stones and the other player's; "action_mask": [A],
    the legal actions, or all ones when the game is over}.
    Without an opponent `step` acts for both players in turns. The observation is that of the player to move, and the
    reward that of the player who has just moved: 1 for a win, else 0.
    An opponent is "random", "perfect", or "mcts" with `rollouts` playouts for each move. It moves within `step`. The
    seed of `reset` decides which player the agent is. Observation and reward are the agent's: 1, 0 or -1 at the end.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  as gym.Env declares it
    rules: ClassVar[GameRules]

    def __init__(self, opponent: str | None = None, rollouts: int = 1000, render_mode: str | None = None) -> None:
        rules = self.rules
        self.render_mode = render_mode
        self.num_players = 2 if opponent is None else 1
        self.agent: int | None = None  # the player that `step` acts for; None: both, in turns
        self.to_play = 0
        self.winner: int | None = None  # None: the game is not over, or a draw
        self.over = True
        self._opponent = None if opponent is None else self._make_opponent(opponent, rollouts)
        self._stones = [0, 0]
        self._num_actions = num_actions(rules)
        self._cells = cells(rules)
        self._board = int(self._cells.sum())
        self._last_cells = self._cells[0] if rules.gravity else self._cells.ravel()  # [A] while free: legal
        self.action_space = spaces.Discrete(self._num_actions)
        self.observation_space = spaces.Dict(
            {
                "observation": spaces.Box(0.0, 1.0, (2, rules.rows, rules.columns), np.float32),
                "action_mask": spaces.MultiBinary(self._num_actions),
            }
        )

    @classmethod
    def _make_opponent(cls, name: str, rollouts: int) -> Opponent:
        if name == "random":
            return functools.partial(random_move, cls.rules)
        if name == "perfect":
            if cells(cls.rules).size > SOLVABLE:
                raise InputError(
                    f"opponent 'perfect' solves a game to its end, which is out of reach for {cls.__name__}: "
                    "use 'mcts' with as many rollouts as there is time for, or 'random'"
                )
            return functools.partial(perfect_move, cls.rules)
        if name == "mcts":
            if not isinstance(rollouts, int) or rollouts < 1:
                raise InputError(f"opponent 'mcts' takes a whole number of rollouts from 1 on, not {rollouts!r}")
            from rl_training.envs.board_opponents import mcts_move  # numba takes longer to import than all the rest

            return functools.partial(mcts_move, cls.rules, rollouts)
        raise InputError(f"{cls.__name__} has no opponent {name!r}: use {', '.join(OPPONENTS)}, or None for self-play")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        super().reset(seed=seed)
        self._stones = [0, 0]
        self.to_play, self.winner, self.over = 0, None, False
        if self._opponent:
            self.agent = int(self.np_random.integers(2))
            if self.agent == 1:
                self._reply(self._opponent)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        if self.over:
            raise gym.error.ResetNeeded(f"this game of {type(self).__name__} is over or has not begun: call reset()")
        mover = self.to_play
        self._play(int(action))
        if self._opponent and not self.over:
            self._reply(self._opponent)
        reward = 0.0 if self.winner is None else 1.0 if self.winner == mover else -1.0
        return self._observation(), reward, self.over, False, {}

    def _reply(self, opponent: Opponent) -> None:
        self._play(opponent(self._stones[self.to_play], self._stones[1 - self.to_play], self.np_random))

    def _play(self, action: int) -> None:
        """Make a move for the player to move."""
        if not 0 <= action < self._num_actions:
            raise InputError(f"{type(self).__name__} has no action {action}: use 0 to {self._num_actions - 1}")
        mover, other = self.to_play, 1 - self.to_play
        bit = landing(self.rules, self._stones[0] | self._stones[1], action)
        self._stones[mover] |= bit
        if not bit:
            self.winner = other
        elif has_line(self.rules, self._stones[mover]):
            self.winner = mover
        self.over = self.winner is not None or self._stones[0] | self._stones[1] == self._board
        self.to_play = other

    def _observation(self) -> dict[str, Array]:
        own = self.to_play if self.agent is None else self.agent
        stones = np.array([self._stones[own], self._stones[1 - own]], np.int64)
        occupied = 0 if self.over else self._stones[0] | self._stones[1]
        return {
            "observation": (stones[:, None, None] & self._cells != 0).astype(np.float32),
            "action_mask": (self._last_cells & occupied == 0).astype(np.int8),
        }

    def render(self) -> str | None:  # type: ignore[override]
        """The board as text. X is player 0."""
        if self.render_mode is None:
            return None
        marks = np.where(self._cells & self._stones[0], "X", np.where(self._cells & self._stones[1], "O", "."))
        return "".join(" ".join(row) + "\n" for row in marks)


class TicTacToe(BoardGame):
    rules = GameRules(rows=3, columns=3, line=3, gravity=False)


class ConnectFour(BoardGame):
    rules = GameRules(rows=6, columns=7, line=4, gravity=True)


for _game in (TicTacToe, ConnectFour):
    gym.register(f"{_game.__name__}-v0", f"{__name__}:{_game.__name__}")
