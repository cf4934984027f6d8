"""The searches of ops.search done slowly: one tree of Python objects at a time, float64, from the papers' formulas.

MuZero (arXiv 1911.08265, appendix B), EfficientZero (arXiv 2111.00210), Gumbel MuZero (Danihelka et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rl_training.ops.search import Evaluation
from rl_training.ops.tree import SearchConstants
from rl_training.types import Array


class Leaf(NamedTuple):
    """What a model says of one new node; logits [A]."""

    logits: Array
    value: float
    reward: float = 0.0
    discount: float = 1.0


Model = Callable[[Any, int], tuple[Any, Leaf]]  # (state, action) -> (next state, what is said of it)


class World(NamedTuple):
    """One tree's model and the state that the search starts from."""

    model: Model
    state: Any
    root: Leaf


class Trees:
    """Worlds side by side, as the batched search asks of them: it keeps the states, one for each node."""

    def __init__(self, worlds: list[World]) -> None:
        self.worlds, self.states = worlds, [[world.state] for world in worlds]

    @property
    def root(self) -> Evaluation:
        return stacked([world.root for world in self.worlds])

    def __call__(self, node: int, parent: Array, action: Array) -> Evaluation:
        assert parent.dtype == action.dtype == np.int64
        assert parent.shape == action.shape == (len(self.worlds),)
        leaves = []
        for world, states, above, edge in zip(self.worlds, self.states, parent, action, strict=True):
            assert 0 <= above < node == len(states)
            state, leaf = world.model(states[above], int(edge))
            states.append(state)
            leaves.append(leaf)
        return stacked(leaves)


def stacked(leaves: list[Leaf]) -> Evaluation:
    return Evaluation(*(np.array(column, np.float32) for column in zip(*leaves, strict=True)))


@dataclass(eq=False)
class Node:
    state: Any
    leaf: Leaf
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    visits: int = 1  # its own evaluation is the first
    total: float = 0.0

    def __post_init__(self) -> None:
        self.total = float(self.leaf.value)

    @property
    def mean(self) -> float:
        return self.total / self.visits

    @property
    def q(self) -> float:
        """Of the edge that leads here, as the parent sees it."""
        return float(self.leaf.reward) + float(self.leaf.discount) * self.mean

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else 1 + self.parent.depth

    def count(self, action: int) -> int:
        return self.children[action].visits if action in self.children else 0


@dataclass
class Tree:
    root: Node
    legal: list[int]
    gumbel: list[float]
    num_simulations: int
    constants: SearchConstants
    low: float = math.inf
    high: float = -math.inf
    margin: float = math.inf  # by how much the closest choice was won

    def choices(self, node: Node) -> list[int]:
        return self.legal if node is self.root else list(range(len(node.leaf.logits)))

    def prior(self, node: Node) -> list[float]:
        """[A], zero where illegal."""
        chosen = self.choices(node)
        probabilities = softmax([float(node.leaf.logits[a]) for a in chosen])
        prior = [0.0] * len(node.leaf.logits)
        for action, p in zip(chosen, probabilities, strict=True):
            prior[action] = p
        return prior

    def argmax(self, scores: dict[int, float]) -> int:
        best = max(scores, key=lambda action: (scores[action], -action))
        others = [score for action, score in scores.items() if action != best]
        self.margin = min([self.margin, *(scores[best] - score for score in others)])
        return best

    def back_up(self, leaf: Node) -> None:
        node, value = leaf, float(leaf.leaf.value)
        while node.parent is not None:
            value = float(node.leaf.reward) + float(node.leaf.discount) * value
            self.low, self.high = min(self.low, node.q), max(self.high, node.q)
            node = node.parent
            node.total, node.visits = node.total + value, node.visits + 1


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


Scores = Callable[[Tree, Node], dict[int, float]]
Transform = Callable[[Tree, Node], list[float]]  # [A]: what stands for Q at a node


def tree_wide(tree: Tree, node: Node) -> list[float]:
    """MuZero, equation 5: by the bounds of the whole tree once they are apart; an edge never taken has 0."""
    low, span = (tree.low, tree.high - tree.low) if tree.high > tree.low else (0.0, 1.0)
    return [(node.children[a].q - low) / span if node.count(a) else 0.0 for a in range(len(node.leaf.logits))]


def mean_q(tree: Tree, node: Node) -> float:
    """EfficientZero's guess for an edge never taken: the mean of those taken and of the guess one node above."""
    taken = [child.q for child in node.children.values()]
    if node.parent is None:
        return sum(taken) / len(taken) if taken else 0.0
    return (mean_q(tree, node.parent) + sum(taken)) / (1 + len(taken))


def with_mean_q(tree: Tree, node: Node) -> list[float]:
    guess = mean_q(tree, node)
    q = [node.children[a].q if node.count(a) else guess for a in range(len(node.leaf.logits))]
    return by_bounds(tree, q)


def by_bounds(tree: Tree, q: list[float]) -> list[float]:
    if tree.high < tree.low:
        return [0.0] * len(q)  # nothing was seen yet: all are alike
    return [(x - tree.low) / max(tree.high - tree.low, tree.constants.floor) for x in q]


def by_parent_and_siblings(tree: Tree, node: Node) -> list[float]:
    """mctx: bounds of the node's own mean and its edges' Q; an edge never taken has the lowest."""
    seen = [node.mean, *(child.q for child in node.children.values())]
    low, span = min(seen), max(max(seen) - min(seen), 1e-8)
    return [(node.children[a].q - low) / span if node.count(a) else 0.0 for a in range(len(node.leaf.logits))]


def completed(tree: Tree, node: Node) -> list[float]:
    """Gumbel MuZero, equation 10 and appendix D: v_mix where an edge was never taken."""
    prior, taken, count = tree.prior(node), node.children, node.visits - 1
    mass = sum(prior[a] for a in taken)
    weighted = sum(prior[a] * child.q for a, child in taken.items()) / mass if taken else 0.0
    mixed = (float(node.leaf.value) + count * weighted) / (1 + count)
    return [taken[a].q if a in taken else mixed for a in range(len(node.leaf.logits))]


def completed_by_node(tree: Tree, node: Node) -> list[float]:
    q = completed(tree, node)
    return [(x - min(q)) / max(max(q) - min(q), 1e-8) for x in q]


def completed_by_tree(tree: Tree, node: Node) -> list[float]:
    """EfficientZero-V2: v_mix may lie beyond what the tree has seen, and is then taken for its bound."""
    return [min(max(x, 0.0), 1.0) for x in by_bounds(tree, completed(tree, node))]


def puct(transform: Transform) -> Scores:
    """MuZero, equation 2."""

    def scores(tree: Tree, node: Node) -> dict[int, float]:
        c1, c2, total = tree.constants.pb_c_init, tree.constants.pb_c_base, node.visits
        rate = math.sqrt(total) * (c1 + math.log((total + c2 + 1) / c2))
        q, prior = transform(tree, node), tree.prior(node)
        return {a: q[a] + prior[a] * rate / (1 + node.count(a)) for a in tree.choices(node)}

    return scores


def improved_logits(tree: Tree, node: Node, transform: Transform) -> list[float]:
    """logits + sigma(q), Gumbel MuZero, equation 8."""
    most = max(node.count(a) for a in range(len(node.leaf.logits)))
    scale = (tree.constants.c_visit + most) * tree.constants.c_scale
    return [float(x) + scale * q for x, q in zip(node.leaf.logits, transform(tree, node), strict=True)]


def halving(transform: Transform) -> Scores:
    """The best by noise, logits and Q of the edges whose turn it is."""

    def scores(tree: Tree, node: Node) -> dict[int, float]:
        considered = min(int(tree.constants.max_considered), len(tree.legal))
        turn = halving_plan(considered, tree.num_simulations)[node.visits - 1]
        logits = improved_logits(tree, node, transform)
        return {a: tree.gumbel[a] + logits[a] for a in tree.legal if node.count(a) == turn}

    return scores


def in_proportion(transform: Transform) -> Scores:
    """Gumbel MuZero, equation 14: visits grow towards the improved policy."""

    def scores(tree: Tree, node: Node) -> dict[int, float]:
        improved = softmax(improved_logits(tree, node, transform))
        return {a: p - node.count(a) / node.visits for a, p in enumerate(improved)}

    return scores


def halving_plan(considered: int, num_simulations: int) -> list[int]:
    """How often the edge of each simulation was taken before: rounds of equal budget over ever fewer edges."""
    rounds = max(1, math.ceil(math.log2(max(1, considered))))
    taken, plan = [0] * max(1, considered), []
    while len(plan) < num_simulations:
        for _ in range(max(1, num_simulations // (rounds * len(taken)))):
            plan += taken
            taken = [count + 1 for count in taken]
        taken = taken[: max(min(2, len(taken)), len(taken) // 2)]
    return plan[:num_simulations]


class Variant(NamedTuple):
    root: Scores
    interior: Scores
    transform: Transform


VARIANTS = {
    "MUZERO": Variant(puct(tree_wide), puct(tree_wide), tree_wide),
    "EFFICIENTZERO": Variant(puct(with_mean_q), puct(with_mean_q), with_mean_q),
    "MCTX_MUZERO": Variant(puct(by_parent_and_siblings), puct(by_parent_and_siblings), by_parent_and_siblings),
    "GUMBEL": Variant(halving(completed_by_node), in_proportion(completed_by_node), completed_by_node),
    "GUMBEL_TREE": Variant(halving(completed_by_tree), in_proportion(completed_by_tree), completed_by_tree),
    "GUMBEL_RAW": Variant(halving(completed), in_proportion(completed), completed),
}


class Found(NamedTuple):
    """As SearchResult, of one tree; and what follows from it for Gumbel's variants."""

    visits: list[int]
    q: list[float]
    transformed: list[float]
    value: float
    depth: int
    margin: float
    action: int
    target: list[float]


def naive_search(
    name: str,
    world: World,
    *,
    num_simulations: int,
    constants: SearchConstants,
    legal: Array | None = None,
    gumbel: Array | None = None,
) -> Found:
    """legal, gumbel [A]."""
    variant, num_actions = VARIANTS[name], len(world.root.logits)
    choices = list(range(num_actions)) if legal is None else [int(a) for a in np.flatnonzero(legal)]
    noise = [0.0] * num_actions if gumbel is None else [float(g) for g in gumbel]
    root = Node(world.state, world.root)
    tree, depth = Tree(root, choices, noise, num_simulations, constants, constants.low, constants.high), 0
    for _ in range(num_simulations):
        leaf = grow(tree, variant, world.model)
        tree.back_up(leaf)
        depth = max(depth, leaf.depth)
    action, target = outcome(tree, variant)
    return Found(
        visits=[root.count(a) for a in range(num_actions)],
        q=[root.children[a].q if a in root.children else 0.0 for a in range(num_actions)],
        transformed=variant.transform(tree, root),
        value=root.mean,
        depth=depth,
        margin=tree.margin,
        action=action,
        target=target,
    )


def grow(tree: Tree, variant: Variant, model: Model) -> Node:
    """From the root along the best edges to one never taken, and the new node at its end."""
    node, action = tree.root, tree.argmax(variant.root(tree, tree.root))
    while action in node.children:
        node = node.children[action]
        action = tree.argmax(variant.interior(tree, node))
    state, leaf = model(node.state, action)
    node.children[action] = Node(state, leaf, parent=node)
    return node.children[action]


def outcome(tree: Tree, variant: Variant) -> tuple[int, list[float]]:
    """Gumbel's action, the best of the most visited, and its policy target [A]."""
    logits = improved_logits(tree, tree.root, variant.transform)
    most = max(tree.root.count(a) for a in tree.legal)
    action = tree.argmax({a: tree.gumbel[a] + logits[a] for a in tree.legal if tree.root.count(a) == most})
    improved = dict(zip(tree.legal, softmax([logits[a] for a in tree.legal]), strict=True))
    return action, [improved.get(a, 0.0) for a in range(len(logits))]
