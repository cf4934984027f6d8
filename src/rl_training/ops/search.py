"""Monte Carlo tree search of a learned model, B roots in one batch (MuZero, arXiv:1911.08265; Gumbel MuZero, Danihelka
et al., 2022; EfficientZero, arXiv:2111.00210).

There is one search. What makes a variant are `Rules`: how to choose at the root, how to choose below it, and what is
seen of Q in doing so. The network is the caller's: it is asked for one new node of every tree at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rl_training.ops import tree as compiled
from rl_training.ops.tree import Perceptrons, PrefixLSTM, SearchConstants, Tree, Variant, make_tree
from rl_training.types import Array


class Evaluation(NamedTuple):
    """A model's prediction for B new nodes."""

    logits: Array  # [B, A] of the policy
    value: Array  # [B]
    reward: Array  # [B] of the edges that led there; 0 for roots
    discount: Array | float  # of those edges: V(parent) = reward + discount V(child); negative where players alternate


class Packed(NamedTuple):
    """An Evaluation as the compiled code takes it, float32 in one piece."""

    prediction: Array  # [B, A + 2] logits, value, reward
    discount: Array  # [B]


Evaluate: TypeAlias = Callable[[int, Array, Array], Evaluation | Packed]
"""(node, parent [B], action [B]): node number `node` of every tree b is reached from node parent[b] by edge action[b].
The callee keeps the states of its nodes; the root's number is 0."""


class PartialEvaluate(NamedTuple):
    """An Evaluate that is asked for one part of the trees and answers later; meanwhile another part is grown."""

    edges: list[int]  # part i is trees edges[i] to edges[i + 1]
    ask: Callable[[int, int, Array, Array], None]  # (part, node, parent [trees], action [trees])
    answer: Callable[[int], Packed]  # of a part that was asked; with the discounts [B] of all trees


def at_once(evaluate: Evaluate, batch: int) -> PartialEvaluate:
    answers: list[Packed] = []

    def ask(part: int, node: int, parent: Array, action: Array) -> None:
        answers.append(_packed(evaluate(node, parent, action)))

    return PartialEvaluate([0, batch], ask, lambda part: answers.pop())


class Rules(NamedTuple):
    """A variant of the search: compiled functions, whose parameters ops.tree describes."""

    root: Any
    interior: Any
    q_transform: Any


MUZERO = Rules(compiled.puct, compiled.puct, compiled.by_tree)
EFFICIENTZERO = Rules(compiled.puct, compiled.puct, compiled.by_tree_or_mean)
MCTX_MUZERO = Rules(compiled.puct, compiled.puct, compiled.by_siblings)
GUMBEL = Rules(compiled.halving, compiled.improved, compiled.completed_by_node)
GUMBEL_TREE = Rules(compiled.halving, compiled.improved, compiled.completed_by_tree)
GUMBEL_RAW = Rules(compiled.halving, compiled.improved, compiled.completed)
KERNELS = {
    MUZERO: Variant(compiled.muzero, compiled.muzero_fused),
    EFFICIENTZERO: Variant(compiled.efficientzero, compiled.efficientzero_fused),
    GUMBEL: Variant(compiled.gumbel, compiled.gumbel_fused),
    GUMBEL_TREE: Variant(compiled.gumbel_tree, compiled.gumbel_tree_fused),
    GUMBEL_RAW: Variant(compiled.gumbel_raw, compiled.gumbel_raw_fused),
}


class SearchResult(NamedTuple):
    visits: Array  # [B, A] int32 of the root's edges
    q: Array  # [B, A] of the root's edges; 0 where never visited
    transformed: Array  # [B, A] what the rules see of it at the end
    value: Array  # [B] mean of the returns from the root; the network's own value counts as one
    depth: int  # of the deepest node


class Search:
    """Searches, one after the other, in an arena that is kept: a changed number of simulations allocates nothing."""

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.tree: Tree | None = None
        self.states = np.empty((0, 0, 0), np.float32)

    def __call__(
        self,
        rules: Rules,
        evaluate: Evaluate | PartialEvaluate,
        root: Evaluation,
        *,
        num_simulations: int,
        legal: Array | None = None,
        gumbel: Array | None = None,
        constants: SearchConstants = SearchConstants(),  # noqa: B008
    ) -> SearchResult:
        """Ask `evaluate` for one node per simulation. legal [B, A] and gumbel [B, A], scaled noise, are of the root."""
        grow, _ = kernels(rules)
        batch = len(root.value)
        tree, table = self._prepare(rules, batch, num_simulations, legal, gumbel, constants)
        numbers, room = as_floats(constants), np.empty((2, self.num_actions), np.float32)
        partial = evaluate if isinstance(evaluate, PartialEvaluate) else at_once(evaluate, batch)
        parts = list(pairwise(partial.edges))
        grow(tree, 0, batch, compiled.ROOT, *_packed(root), table, numbers, room)
        for part, (begin, end) in enumerate(parts):
            partial.ask(part, 1, *tree.leaf[:, begin:end])
        for node in range(1, num_simulations + 1):
            for part, (begin, end) in enumerate(parts):
                grow(tree, begin, end, node, *partial.answer(part), table, numbers, room)
                if node < num_simulations:
                    partial.ask(part, node + 1, *tree.leaf[:, begin:end])
        return _result(tree)

    def fused(
        self,
        rules: Rules,
        network: Perceptrons,
        state: Array,
        root: Evaluation,
        *,
        lstm: PrefixLSTM | None = None,
        discount: float,
        num_simulations: int,
        legal: Array | None = None,
        gumbel: Array | None = None,
        constants: SearchConstants = SearchConstants(),  # noqa: B008
    ) -> SearchResult:
        """The same with a small network inside the compiled loop, where its rewards are value prefixes with their LSTM;
        state [B, S] is the root's."""
        _, run = kernels(rules)
        batch, size = state.shape
        tree, table = self._prepare(rules, batch, num_simulations, legal, gumbel, constants)
        if self.states.shape[0] <= num_simulations or self.states.shape[1:] != state.shape:
            nodes = max(num_simulations + 1, len(self.states))
            self.states = np.empty((nodes, batch, size), np.float32)
        self.states[0] = state
        prediction, discounts = _packed(root).prediction, np.full(batch, discount, np.float32)
        run(tree, network, lstm, self.states, prediction, discounts, table, as_floats(constants))
        return _result(tree)

    def _prepare(
        self,
        rules: Rules,
        batch: int,
        num_simulations: int,
        legal: Array | None,
        gumbel: Array | None,
        constants: SearchConstants,
    ) -> tuple[Tree, Array]:
        if num_simulations < 1:
            raise ValueError(f"num_simulations should be at least 1, got {num_simulations}")
        if legal is not None and not legal.any(1).all():
            raise ValueError("a root has no legal action: mask at most all but one")
        tree = self._arena(batch, num_simulations + 1)
        tree.legal[:] = True if legal is None else legal
        tree.gumbel[:] = 0.0 if gumbel is None else gumbel
        tree.low[:], tree.high[:] = constants.low, constants.high
        tree.depth[:] = 0
        tree.growth[:] = growth(constants.pb_c_init, constants.pb_c_base, len(tree.growth))
        if rules.root is not compiled.halving:
            tree.considered[:] = 0
            return tree, no_table(num_simulations)
        most = min(int(constants.max_considered), self.num_actions)
        tree.considered[:] = np.minimum(tree.legal.sum(1), most)
        return tree, considered_visits(most, num_simulations)

    def _arena(self, batch: int, nodes: int) -> Tree:
        """Arrays for so many trees and nodes: those of the last search, if they are large enough."""
        tree = self.tree
        if tree is None or tree.low.shape[0] != batch or tree.value.shape[1] < nodes:
            least = 0 if tree is None or tree.low.shape[0] != batch else tree.value.shape[1]
            tree = self.tree = make_tree(batch, max(nodes, least), self.num_actions)
        return tree


OWN = count()  # rules that do not ship


@lru_cache
def kernels(rules: Rules) -> Variant:
    return KERNELS.get(rules) or compiled.compose(*rules, label=f"own_{next(OWN)}")


def as_floats(constants: SearchConstants) -> SearchConstants:
    return SearchConstants(*map(float, constants))


def _packed(evaluation: Evaluation | Packed) -> Packed:
    if isinstance(evaluation, Packed):
        return evaluation
    logits, value, reward, discount = evaluation
    batch, actions = logits.shape
    prediction = np.empty((batch, actions + 2), np.float32)
    prediction[:, :actions], prediction[:, actions], prediction[:, actions + 1] = logits, value, reward
    discounts = np.empty(batch, np.float32)
    discounts[:] = discount
    return Packed(prediction, discounts)


def _result(tree: Tree) -> SearchResult:
    root = (slice(None), compiled.ROOT)
    return SearchResult(
        tree.visits[root].copy(),
        tree.q[root].copy(),
        tree.transformed.copy(),
        tree.value[root].copy(),
        int(tree.depth.max()),
    )


@lru_cache
def growth(pb_c_init: float, pb_c_base: float, length: int) -> Array:
    """[length] What the prior of an edge weighs in PUCT, before it is shared among its visits, of a node's visits."""
    visits = np.arange(length)
    weight: Array = np.sqrt(visits) * (pb_c_init + np.log((visits + pb_c_base + 1) / pb_c_base))
    return weight.astype(np.float32)


@lru_cache
def no_table(num_simulations: int) -> Array:
    return np.zeros((1, num_simulations), np.int32)


@lru_cache
def considered_visits(max_considered: int, num_simulations: int) -> Array:
    """[m + 1, n] Row k: how often an edge must have been visited to be chosen in the i-th simulation, of k edges.

    Sequential Halving: log2 k rounds of equal length; in each the edges still considered are visited equally often,
    and the better half goes on.
    """
    return np.array([_halving(k, num_simulations) for k in range(max_considered + 1)], np.int32)


def _halving(considered: int, simulations: int) -> list[int]:
    if considered <= 1:
        return list(range(simulations))
    rounds = math.ceil(math.log2(considered))
    wanted: list[int] = []
    visits, left = 0, considered
    while len(wanted) < simulations:
        for _ in range(max(1, simulations // (rounds * left))):
            wanted += [visits] * left
            visits += 1
        left = max(2, left // 2)
    return wanted[:simulations]


def with_dirichlet(
    logits: Array, legal: Array | None, *, fraction: float, alpha: float, rng: np.random.Generator
) -> Array:
    """Logits [B, A] of (1 - fraction) prior + fraction Dirichlet(alpha), over the legal actions."""
    if fraction == 0:
        return logits
    # With a small alpha all of a row's draws may underflow to zero: the largest then has it all.
    noise = np.maximum(rng.standard_gamma(alpha, logits.shape), 1e-30)
    prior = np.exp(log_softmax(logits, legal))
    if legal is not None:
        noise = noise * legal
    noise /= noise.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        mixed = np.log((1 - fraction) * prior + fraction * noise)
    return np.maximum(mixed, compiled.LEAST).astype(np.float32)  # type: ignore[no-any-return]


def log_softmax(logits: Array, legal: Array | None = None) -> Array:
    """Over the last axis; actions that are not legal have none of the probability."""
    if legal is not None:
        logits = np.where(legal, logits, compiled.LEAST)
    shifted = logits - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def act_by_visits(visits: Array, temperature: float, rng: np.random.Generator) -> Array:
    """[B] a ~ N(a)^(1 / temperature); 0: the most visited."""
    if temperature == 0:
        first: Array = visits.argmax(1)
        return first
    with np.errstate(divide="ignore"):
        weight = np.log(visits.astype(np.float64)) / temperature
    weight = np.exp(weight - weight.max(1, keepdims=True))
    below = np.cumsum(weight, 1)
    mass = rng.random(len(visits)) * below[:, -1]
    action: Array = (below <= mass[:, None]).sum(1)
    return action


def visit_policy(visits: Array) -> Array:
    """[B, A] MuZero's policy target: visit fractions, whatever the temperature."""
    policy: Array = (visits / visits.sum(1, keepdims=True)).astype(np.float32)
    return policy


def gumbel_outcome(
    result: SearchResult, logits: Array, legal: Array | None, gumbel: Array, constants: SearchConstants
) -> tuple[Array, Array]:
    """(action [B]: the best of g + logits + sigma(q) among the most visited; policy target [B, A], without noise)"""
    most = result.visits.max(1, keepdims=True)
    improved = log_softmax(logits, legal) + (constants.c_visit + most) * constants.c_scale * result.transformed
    score = np.where(result.visits == most, gumbel + improved, -np.inf)
    return score.argmax(1), np.exp(log_softmax(improved, legal)).astype(np.float32)
