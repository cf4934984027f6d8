"""The opponent "mcts": UCT with random playouts (Kocsis & Szepesvári, 2006), compiled by numba.

Only `opponent="mcts"` imports this module, and with it numba.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from rl_training.envs import board_games
from rl_training.envs.board_games import GameRules
from rl_training.types import Array

# Compiled in every process (3 s): the cache of numba would miss a change in board_games.
compiled = numba.njit(nogil=True)
landing = compiled(board_games.landing)
has_line = compiled(board_games.has_line)


def mcts_move(rules: GameRules, rollouts: int, own: int, other: int, rng: np.random.Generator) -> int:
    """The most visited move after `rollouts` playouts."""
    full = int(board_games.cells(rules).sum())
    num_actions = board_games.num_actions(rules)
    random = rng.integers(2**63, size=1, dtype=np.uint64)
    return int(search(rules, full, num_actions, own, other, rollouts, random).argmax())


@compiled
def search(rules: GameRules, full: int, num_actions: int, own: int, other: int, rollouts: int, random: Array) -> Array:
    """Visits [A] of the root's moves. The score of a node is the sum of its results for the player who moved there."""
    children = np.zeros((rollouts + 1, num_actions), np.int64)  # node 0 is the root: as a child it means none
    visits = np.zeros(rollouts + 1, np.int64)
    score = np.zeros(rollouts + 1, np.float64)
    path = np.zeros(rollouts + 2, np.int64)
    size = 1
    for _ in range(rollouts):
        mine, theirs, depth, node, won = own, other, 0, 0, -1.0
        while won < 0.0:
            action = select(rules, mine | theirs, children[node], visits, score, visits[node], random)
            mine, theirs = theirs, mine | landing(rules, mine | theirs, action)
            if has_line(rules, theirs):
                won = 1.0
            elif mine | theirs == full:
                won = 0.5
            if children[node, action] == 0:
                children[node, action] = size
                size += 1
                if won < 0.0:
                    won = 1.0 - playout(rules, full, num_actions, mine, theirs, random)
            node = children[node, action]
            depth += 1
            path[depth] = node
        for step in range(depth, -1, -1):
            visits[path[step]] += 1
            score[path[step]] += won
            won = 1.0 - won
    return np.array([visits[child] if child > 0 else 0 for child in children[0]])


@compiled
def select(
    rules: GameRules, occupied: int, children: Array, visits: Array, score: Array, total: int, random: Array
) -> int:
    """A random legal move that was not tried yet, else the move with the highest UCB1: mean + sqrt(2 ln N / n)."""
    highest, chosen, untried = -1.0, -1, 0
    for action in range(len(children)):
        if landing(rules, occupied, action) == 0:
            continue
        child = children[action]
        if child == 0:
            untried += 1
            if draw(random, untried) == 0:
                chosen = action
        elif untried == 0:
            bound = score[child] / visits[child] + math.sqrt(2.0 * math.log(total) / visits[child])
            if bound > highest:
                highest, chosen = bound, action
    return chosen


@compiled
def playout(rules: GameRules, full: int, num_actions: int, own: int, other: int, random: Array) -> float:
    """The result of random moves to the end: 1, 1/2 or 0 for the player to move, whose stones are `own`."""
    mine, theirs, won = own, other, 1.0
    while mine | theirs != full:
        bit = 0
        while bit == 0:
            bit = landing(rules, mine | theirs, draw(random, num_actions))
        mine, theirs = theirs, mine | bit
        if has_line(rules, theirs):
            return won
        won = 1.0 - won
    return 0.5


@compiled
def draw(random: Array, below: int) -> int:
    """A number in [0, below) from SplitMix64 (Steele et al., 2014). Its state is `random`, [1] uint64."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    bits = random[0]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return np.int64(((bits >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32))  # type: ignore[no-any-return]
