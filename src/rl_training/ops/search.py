"""Monte Carlo tree search with a learned model, for B roots in one batch (MuZero, arXiv:1911.08265; Gumbel MuZero,
Danihelka et al., 2022; EfficientZero, arXiv:2111.00210).

The variants differ in their `Rules`: how an edge is chosen at the root and below it, and how Q is transformed for that.
The caller evaluates the network, for one new node of all trees at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from rl_training.ops import tree as compiled
from rl_training.ops.tree import Perceptrons, PrefixLSTM, SearchConstants, Tree, Variant, make_tree
from rl_training.types import Array


class Evaluation(NamedTuple):
    """A model's prediction for B new nodes."""

    logits: Array  # [B, A] of the policy
    value: Array  # [B]
    reward: Array  # [B] of the edges to the nodes; 0 for roots
    discount: Array | float  # of those edges: V(parent) = reward + discount V(child); negative where players alternate


class Packed(NamedTuple):
    """An Evaluation in the float32 arrays of the compiled code."""

    prediction: Array  # [B, A + 2] logits, value, reward
    discount: Array  # [B]


Evaluate: TypeAlias = Callable[[int, Array, Array], Evaluation | Packed]
"""(node, parent [B], action [B]): node number `node` of tree b is the child of node parent[b] by edge action[b].
The callee keeps the states of the nodes. The root is number 0."""


class PartialEvaluate(NamedTuple):
    """An asynchronous Evaluate for parts of the trees: another part is grown between `ask` and `answer`."""

    bounds: list[int]  # part i is trees bounds[i] to bounds[i + 1]
    ask: Callable[[int, int, Array, Array], None]  # (part, node, parent [trees], action [trees])
    answer: Callable[[int], Packed]  # of the part asked last, with the discounts [B] of all trees


class CompiledNetwork(NamedTuple):
    """A small network that is compiled into the search, in the place of an Evaluate."""

    weights: tuple[Perceptrons, PrefixLSTM | None]
    state: Array  # [B, S] of the roots


def synchronous(evaluate: Evaluate, batch: int) -> PartialEvaluate:
    answers: list[Packed] = []

    def ask(part: int, node: int, parent: Array, action: Array) -> None:
        answers.append(_packed(evaluate(node, parent, action)))

    return PartialEvaluate([0, batch], ask, lambda part: answers.pop())


class Rules(NamedTuple):
    """The compiled functions of a variant. ops.tree documents their parameters."""

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
    q: Array  # [B, A] of the root's edges; 0 if unvisited
    transformed: Array  # [B, A] Q as the rules read it, after the search
    value: Array  # [B] mean of the network's value and the returns of all simulations
    depth: int  # of the deepest node


class Search:
    """Searches that reuse the arrays of the largest search so far."""

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.tree: Tree | None = None
        self.states = np.empty((0, 0, 0), np.float32)

    def __call__(
        self,
        rules: Rules,
        evaluate: Evaluate | PartialEvaluate | CompiledNetwork,
        root: Evaluation,
        *,
        num_simulations: int,
        legal: Array | None = None,
        gumbel: Array | None = None,
        constants: SearchConstants = SearchConstants(),  # noqa: B008
    ) -> SearchResult:
        """Evaluate once per simulation. legal [B, A] and gumbel [B, A] (scaled noise) are of the roots."""
        tree, table = self._prepare(rules, len(root.value), num_simulations, legal, gumbel, constants)
        floats = SearchConstants(*map(float, constants))
        if isinstance(evaluate, CompiledNetwork):
            self._run_compiled(rules, evaluate, tree, root, table, floats)
        else:
            self._run(rules, evaluate, tree, root, table, floats)
        return _result(tree)

    def _run(
        self, rules: Rules, evaluate: Any, tree: Tree, root: Evaluation, table: Array, constants: SearchConstants
    ) -> None:
        """`evaluate` is called for each new node of all trees."""
        grow, batch, num_simulations = kernels(rules).grow, len(root.value), table.shape[1]
        buffer = np.empty((2, self.num_actions), np.float32)
        partial = evaluate if isinstance(evaluate, PartialEvaluate) else synchronous(evaluate, batch)
        parts = list(pairwise(partial.bounds))
        grow(tree, 0, batch, compiled.ROOT, *_packed(root), table, constants, buffer)
        for part, (begin, end) in enumerate(parts):
            partial.ask(part, 1, *tree.leaf[:, begin:end])
        for node in range(1, num_simulations + 1):
            for part, (begin, end) in enumerate(parts):
                grow(tree, begin, end, node, *partial.answer(part), table, constants, buffer)
                if node < num_simulations:
                    partial.ask(part, node + 1, *tree.leaf[:, begin:end])

    def _run_compiled(
        self,
        rules: Rules,
        network: CompiledNetwork,
        tree: Tree,
        root: Evaluation,
        table: Array,
        constants: SearchConstants,
    ) -> None:
        if len(self.states) <= table.shape[1] or self.states.shape[1:] != network.state.shape:
            self.states = np.empty((table.shape[1] + 1, *network.state.shape), np.float32)
        self.states[0] = network.state
        kernels(rules).fused(tree, *network.weights, self.states, *_packed(root), table, constants)

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
        if self.tree is None or self.tree.value.shape[0] != batch or self.tree.value.shape[1] <= num_simulations:
            self.tree = make_tree(batch, num_simulations + 1, self.num_actions)
        tree = self.tree
        tree.legal[:] = True if legal is None else legal
        tree.gumbel[:] = 0.0 if gumbel is None else gumbel
        tree.low[:], tree.high[:] = constants.low, constants.high
        tree.depth[:] = 0
        tree.puct_factor[:] = puct_factor(constants.pb_c_init, constants.pb_c_base, len(tree.puct_factor))
        most = min(int(constants.max_considered), self.num_actions) if rules.root is compiled.halving else 0
        tree.considered[:] = np.minimum(tree.legal.sum(1), most) if most else 0
        return tree, considered_visits(most, num_simulations)


UNCACHED = count()  # labels of rules that are not in KERNELS


@lru_cache
def kernels(rules: Rules) -> Variant:
    return KERNELS.get(rules) or compiled.compose(*rules, label=f"uncached_{next(UNCACHED)}")


def _packed(evaluation: Evaluation | Packed) -> Packed:
    if isinstance(evaluation, Packed):
        return evaluation
    logits, value, reward, discount = evaluation
    batch, actions = logits.shape
    prediction = np.empty((batch, actions + 2), np.float32)
    prediction[:, :actions], prediction[:, actions], prediction[:, actions + 1] = logits, value, reward
    return Packed(prediction, np.full(batch, discount, np.float32))


def _result(tree: Tree) -> SearchResult:
    visits, q, value = (array[:, compiled.ROOT].copy() for array in (tree.visits, tree.q, tree.value))
    return SearchResult(visits, q, tree.transformed.copy(), value, int(tree.depth.max()))


@lru_cache
def puct_factor(pb_c_init: float, pb_c_base: float, length: int) -> Array:
    """[length] The factor of PUCT on prior / (1 + visits of the edge), for 0, 1, 2, .. visits of a node."""
    visits = np.arange(length)
    factor: Array = np.sqrt(visits) * (pb_c_init + np.log((visits + pb_c_base + 1) / pb_c_base))
    return factor.astype(np.float32)


@lru_cache
def considered_visits(max_considered: int, num_simulations: int) -> Array:
    """[m + 1, n] In row k, for k edges: the visits that an edge must have to be chosen in the i-th simulation.

    Sequential Halving has log2 k rounds of equal length. In each round the edges still considered are visited equally
    often; the better half enters the next round.
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
    # With a small alpha all draws of a row may underflow to zero. The minimum keeps their sum positive.
    noise = np.maximum(rng.standard_gamma(alpha, logits.shape), 1e-30)
    prior = np.exp(log_softmax(logits, legal))
    if legal is not None:
        noise = noise * legal
    noise /= noise.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        mixed = np.log((1 - fraction) * prior + fraction * noise)
    return np.maximum(mixed, compiled.LEAST).astype(np.float32)  # type: ignore[no-any-return]


def log_softmax(logits: Array, legal: Array | None = None) -> Array:
    """Over the last axis. Illegal actions have probability 0."""
    if legal is not None:
        logits = np.where(legal, logits, compiled.LEAST)
    shifted = logits - logits.max(-1, keepdims=True)
    return cast(Array, shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def act_by_visits(visits: Array, temperature: float, rng: np.random.Generator) -> Array:
    """[B] Actions a ~ N(a)^(1 / temperature); with temperature 0 the most visited."""
    if temperature == 0:
        return cast(Array, visits.argmax(1))
    with np.errstate(divide="ignore"):
        weight = np.log(visits.astype(np.float64)) / temperature
    weight = np.exp(weight - weight.max(1, keepdims=True))
    below = np.cumsum(weight, 1)
    mass = rng.random(len(visits)) * below[:, -1]
    return cast(Array, (below <= mass[:, None]).sum(1))


def visit_policy(visits: Array) -> Array:
    """[B, A] MuZero's policy target: visit fractions, without the temperature."""
    return cast(Array, (visits / visits.sum(1, keepdims=True)).astype(np.float32))


def gumbel_outcome(
    result: SearchResult, logits: Array, legal: Array | None, gumbel: Array, constants: SearchConstants
) -> tuple[Array, Array]:
    """(actions [B]: the best g + logits + sigma(q) among the most visited; policy targets [B, A] without noise)."""
    most = result.visits.max(1, keepdims=True)
    improved = log_softmax(logits, legal) + (constants.c_visit + most) * constants.c_scale * result.transformed
    score = np.where(result.visits == most, gumbel + improved, -np.inf)
    return score.argmax(1), np.exp(log_softmax(improved, legal)).astype(np.float32)
