"""The batched search does what a slow one of Python objects does, and what can be worked out by hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.event import install_recorder

from naive_search import VARIANTS, Found, Leaf, Trees, World, halving_plan, naive_search
from rl_training.ops import search as search_module
from rl_training.ops import tree as tree_module
from rl_training.ops.search import Rules, Search, SearchResult, considered_visits, gumbel_outcome
from rl_training.ops.tree import SearchConstants
from rl_training.types import Array

NAMES = list(VARIANTS)
SIMULATIONS = [1, 2, 3, 4, 7, 16, 50, 200]
CLEAR = 1e-5  # a search whose closest choice was closer than this may go either way in float32
DISCOUNTS = [0.997, 1.0, -1.0, None]  # None: another one for each edge


def rules(name: str) -> Rules:
    found: Rules = getattr(search_module, name)
    return found


def is_gumbel(name: str) -> bool:
    return name.startswith("GUMBEL")


def random_world(rng: np.random.Generator, num_actions: int, discount: float | None) -> World:
    """A random network whose states never come to rest, so that no two nodes are alike."""
    size = 4
    to_state = rng.normal(0, 1.5, (num_actions, size, size))
    bias = rng.normal(0, 1.5, (num_actions, size))
    to_logits, to_scalars = rng.normal(0, 1, (num_actions, size)), rng.normal(0, 0.3, (3, size))

    def told(state: Array) -> Leaf:
        value, reward, x = (to_scalars @ state).astype(np.float32)
        logits = (to_logits @ state).astype(np.float32)
        return Leaf(logits, value, reward, np.float32(math.cos(5 * x) if discount is None else discount))

    def model(state: Array, action: int) -> tuple[Array, Leaf]:
        state = np.sin(to_state[action] @ state + bias[action])
        return state, told(state)

    state = rng.uniform(-1, 1, size)
    return World(model, state, told(state)._replace(reward=0.0))


def random_mask(rng: np.random.Generator, num_actions: int) -> Array:
    legal = rng.random(num_actions) < rng.uniform(0.1, 0.9)
    legal[rng.integers(num_actions)] = True
    return legal


class Case:
    """A batch of random searches, each clear, and what the slow one finds."""

    def __init__(
        self, name: str, *, num_actions: int, num_simulations: int, batch: int, seed: int, setting: int, masked: bool
    ) -> None:
        rng = np.random.default_rng([NAMES.index(name), num_actions, num_simulations, seed, setting])
        self.name, self.num_simulations = name, num_simulations
        self.constants = random_constants(rng, name, known=setting % 2 == 1)
        self.worlds: list[World] = []
        self.found: list[Found] = []
        legal, gumbel = [], []
        while len(self.worlds) < batch:
            world = random_world(rng, num_actions, DISCOUNTS[setting % len(DISCOUNTS)])
            mask = random_mask(rng, num_actions) if masked else np.ones(num_actions, bool)
            noise = rng.gumbel(size=num_actions).astype(np.float32)
            found = naive_search(
                name,
                world,
                num_simulations=num_simulations,
                constants=self.constants,
                legal=mask if masked else None,
                gumbel=noise if is_gumbel(name) else None,
            )
            if found.margin > CLEAR:
                self.worlds.append(world)
                self.found.append(found)
                legal.append(mask)
                gumbel.append(noise)
        self.masked, self.legal, self.gumbel = masked, np.array(legal), np.array(gumbel)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_simulations": self.num_simulations,
            "legal": self.legal if self.masked else None,
            "gumbel": self.gumbel if is_gumbel(self.name) else None,
            "constants": self.constants,
        }

    def run(self, search: Search | None = None) -> SearchResult:
        trees = Trees(self.worlds)
        search = search or Search(self.legal.shape[1])
        result = search(rules(self.name), trees, trees.root, **self.options)
        assert all(len(states) == 1 + self.num_simulations for states in trees.states)
        return result

    def check(self, result: SearchResult) -> None:
        for b, found in enumerate(self.found):
            np.testing.assert_array_equal(result.visits[b], found.visits)
            np.testing.assert_allclose(result.q[b], found.q, rtol=0, atol=1e-4)
            legal = self.legal[b]
            np.testing.assert_allclose(
                result.transformed[b][legal], np.array(found.transformed)[legal], rtol=1e-4, atol=1e-3
            )
            assert result.value[b] == pytest.approx(found.value, abs=1e-4)
        assert result.depth == max(found.depth for found in self.found)

    def check_outcome(self, result: SearchResult) -> None:
        logits = Trees(self.worlds).root.logits
        legal = self.legal if self.masked else None
        action, target = gumbel_outcome(result, logits, legal, self.gumbel, self.constants)
        np.testing.assert_array_equal(action, [found.action for found in self.found])
        np.testing.assert_allclose(target, [found.target for found in self.found], rtol=0, atol=1e-3)


def random_constants(rng: np.random.Generator, name: str, *, known: bool) -> SearchConstants:
    constants = SearchConstants(
        pb_c_init=rng.uniform(0.5, 2.5),
        pb_c_base=float(rng.choice([19652.0, 100.0])),
        c_visit=float(rng.choice([50.0, 10.0])),
        c_scale=1.0 if name == "GUMBEL_RAW" else float(rng.choice([0.1, 0.3])),
        max_considered=int(rng.choice([1, 2, 3, 4, 7, 16])),
        floor=float(rng.choice([0.01, 0.3])),
    )
    return constants._replace(low=-1.0, high=1.0) if known else constants


def told_by(leaf: Callable[[tuple[int, ...]], Leaf]) -> World:
    """A world whose states are the actions taken so far."""
    return World(lambda path, action: ((*path, action), leaf((*path, action))), (), leaf(()))


def bandit(rewards: list[float], logits: list[float] | None = None) -> World:
    prior = np.array(logits or [0.0] * len(rewards), np.float32)
    return told_by(lambda path: Leaf(prior, 0.0, rewards[path[0]] if len(path) == 1 else 0.0))


def plan(
    name: str, world: World, num_simulations: int, constants: SearchConstants | None = None, **options: Any
) -> SearchResult:
    trees = Trees([world])
    if is_gumbel(name):
        options = {"gumbel": np.zeros((1, len(world.root.logits)), np.float32), **options}
    search = Search(len(world.root.logits))
    return search(
        rules(name), trees, trees.root, num_simulations=num_simulations, constants=constants or usual(name), **options
    )


def usual(name: str) -> SearchConstants:
    return SearchConstants(c_scale=1.0 if name == "GUMBEL_RAW" else 0.1)


def played(name: str, world: World, result: SearchResult) -> int:
    """Without noise."""
    if not is_gumbel(name):
        return int(result.visits[0].argmax())
    zero = np.zeros_like(result.q)
    return int(gumbel_outcome(result, world.root.logits[None], None, zero, usual(name))[0][0])


@pytest.mark.parametrize("num_simulations", SIMULATIONS)
@pytest.mark.parametrize("num_actions", [2, 3, 6, 18])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_slow_search(name, num_actions, num_simulations):
    for setting in range(num_actions % 2, 4, 2) if num_simulations == 200 else range(4):
        batch = 1 if num_simulations >= 50 else 1 + (num_simulations + setting) % 8
        masked = (num_simulations + num_actions + setting // 2) % 2 == 1
        case = Case(
            name,
            num_actions=num_actions,
            num_simulations=num_simulations,
            batch=batch,
            seed=0,
            setting=setting,
            masked=masked,
        )
        result = case.run()
        case.check(result)
        if is_gumbel(name):
            case.check_outcome(result)


def test_arrays_have_the_shapes_and_types_of_the_contract():
    case = Case("GUMBEL", num_actions=6, num_simulations=7, batch=3, seed=1, setting=0, masked=True)
    result = case.run()
    assert {key: (x.dtype.name, x.shape) for key, x in result._asdict().items() if key != "depth"} == {
        "visits": ("int32", (3, 6)),
        "q": ("float32", (3, 6)),
        "transformed": ("float32", (3, 6)),
        "value": ("float32", (3,)),
    }
    assert isinstance(result.depth, int)


@pytest.mark.parametrize("name", ["MUZERO", "EFFICIENTZERO", "MCTX_MUZERO"])
def test_visits_go_to_the_better_arm(name):
    rewards = [0.25, 0.75, 0.5]
    result = plan(name, bandit(rewards), 100)
    assert result.visits.sum() == 100
    assert result.visits[0].argsort().tolist() == [0, 2, 1]
    assert result.visits[0, 1] > 60


@pytest.mark.parametrize("name", NAMES)
def test_q_of_a_bandit_is_its_reward(name):
    rewards = [0.1, -0.7, 0.3]
    result = plan(name, bandit(rewards), 40)
    visits = result.visits[0]
    assert (visits > 0).all()
    np.testing.assert_array_equal(result.q[0], np.float32(rewards))
    assert result.value[0] == pytest.approx(float(visits @ np.float32(rewards)) / 41, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_edge_that_was_never_taken_has_no_q(name):
    result = plan(name, bandit([0.5, 0.6], [3.0, 0.0]), 1)
    assert result.visits.tolist() == [[1, 0]]
    assert result.q.tolist() == [[0.5, 0.0]]
    assert result.value[0] == pytest.approx(0.25)
    assert result.depth == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_first_of_equals_is_taken_at_the_root_and_below(name):
    trees = Trees([bandit([0.5] * 4)])
    taken: list[int] = []

    def evaluate(node: int, parent: Array, action: Array) -> search_module.Evaluation:
        taken.append(int(action[0]))
        return trees(node, parent, action)

    options = {"gumbel": np.zeros((1, 4), np.float32)} if is_gumbel(name) else {}
    legal = np.array([[False, True, False, False]])
    search = Search(4)
    search(rules(name), evaluate, trees.root, num_simulations=1, **options)
    trees = Trees(trees.worlds)
    search(rules(name), evaluate, trees.root, num_simulations=2, legal=legal, **options)
    assert taken == [0, 1, 0]


def test_the_root_of_puct_is_as_the_formula_says():
    """Two arms of Q 0 and 1 under tree-wide bounds: taken in the order that the scores give, step by step."""
    logits, (c1, c2, *_) = np.log([0.7, 0.3]), SearchConstants()
    visits = [0, 0]
    for n in range(1, 60):
        seen = [float(a) for a in (0, 1) if visits[a]]
        span = len(seen) > 1
        total = sum(visits) + 1
        rate = math.sqrt(total) * (c1 + math.log((total + c2 + 1) / c2))
        q = [0.0, 1.0 if visits[1] else 0.0]  # before the bounds are apart, Q itself: the same here
        assert span or q[0] == 0.0
        scores = [q[a] + p * rate / (1 + visits[a]) for a, p in enumerate([0.7, 0.3])]
        visits[int(np.argmax(scores))] += 1
        result = plan("MUZERO", bandit([0.0, 1.0], logits.tolist()), n)
        assert result.visits[0].tolist() == visits


@pytest.mark.parametrize("name", NAMES)
def test_the_best_line_of_two_moves_is_found(name):
    def leaf(path: tuple[int, ...]) -> Leaf:
        reward = {(0,): 0.3, (2, 1): 1.0}.get(path, 0.0)
        return Leaf(np.float32([0.5, 0.0, 0.0]), 0.0, reward)

    world = told_by(leaf)
    result = plan(name, world, 400)
    assert played(name, world, result) == 2
    assert result.q[0, 2] > result.q[0, 0] > result.q[0, 1]
    assert result.depth >= 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("known", [True, False])
def test_mate_in_one_is_found(name, known):
    def leaf(path: tuple[int, ...]) -> Leaf:
        mates = path[-1:] == (2,)
        return Leaf(np.float32([1.0, 0.5, 0.0, 0.0]), 0.0, float(mates), 0.0 if mates else -1.0)

    world = told_by(leaf)
    constants = usual(name)._replace(low=-1.0, high=1.0) if known else usual(name)
    result = plan(name, world, 32, constants)
    assert played(name, world, result) == 2
    assert result.q[0, 2] == 1.0
    assert (result.q[0, [0, 1, 3]] <= 0).all()  # there, the other side mates


@pytest.mark.parametrize("name", NAMES)
def test_a_move_that_lets_the_other_win_is_avoided(name):
    def leaf(path: tuple[int, ...]) -> Leaf:
        loses = path == (0, 1)
        return Leaf(np.float32([2.0, 1.0, 0.0]), 0.0, float(loses), 0.0 if loses else -1.0)

    world = told_by(leaf)
    result = plan(name, world, 64)
    assert played(name, world, result) != 0
    assert result.q[0, 0] < 0


@pytest.mark.parametrize("name", NAMES)
def test_a_value_is_good_for_who_moves_there(name):
    """The other side is content after move 0 and desperate after move 1."""
    values = {(): 0.0, (0,): 0.9, (1,): -0.9}

    def leaf(path: tuple[int, ...]) -> Leaf:
        sign = (-1.0) ** (len(path) - 1)
        return Leaf(np.float32([0.0, 0.0]), sign * values[path[:1]], 0.0, -1.0)

    world = told_by(leaf)
    result = plan(name, world, 20)
    assert played(name, world, result) == 1
    np.testing.assert_allclose(result.q[0], [-0.9, 0.9], rtol=1e-6)


def test_each_edge_has_its_own_discount():
    def leaf(path: tuple[int, ...]) -> Leaf:
        return Leaf(np.float32([0.0, 0.0]), 1.0, 0.0, [0.5, -0.25][path[-1]] if path else 1.0)

    result = plan("GUMBEL", told_by(leaf), 2)
    assert result.q.tolist() == [[0.5, -0.25]]
    assert result.value[0] == pytest.approx(1.25 / 3)


def test_a_discount_may_be_one_number():
    case = Case("MUZERO", num_actions=3, num_simulations=16, batch=3, seed=2, setting=0, masked=False)
    trees = Trees(case.worlds)

    def evaluate(node: int, parent: Array, action: Array) -> search_module.Evaluation:
        return trees(node, parent, action)._replace(discount=0.997)

    case.check(Search(3)(rules("MUZERO"), evaluate, trees.root._replace(discount=0.997), **case.options))


@pytest.mark.parametrize("num_simulations", [1, 5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_illegal_is_never_done_at_the_root_and_may_be_done_below(name, num_simulations):
    legal = np.array([[False, True, False, True, False]])
    logits = np.float32([9.0, 0.0, 20.0, 0.0, 0.0])
    taken: list[tuple[int, int]] = []
    trees = Trees([told_by(lambda path: Leaf(logits, 0.0, 0.01 * len(path) + 0.1 * sum(path)))])

    def evaluate(node: int, parent: Array, action: Array) -> search_module.Evaluation:
        taken.append((int(parent[0]), int(action[0])))
        return trees(node, parent, action)

    options: dict[str, Any] = {"num_simulations": num_simulations, "legal": legal, "constants": usual(name)}
    if is_gumbel(name):
        options["gumbel"] = np.float32([[50.0, 0.0, 50.0, 0.1, 50.0]])
    result = Search(5)(rules(name), evaluate, trees.root, **options)
    assert result.visits[0][~legal[0]].tolist() == [0, 0, 0]
    assert result.visits.sum() == num_simulations
    assert {action for parent, action in taken if parent == 0} <= {1, 3}
    assert num_simulations < 3 or 2 in {action for parent, action in taken if parent != 0}


@pytest.mark.parametrize("reward", [0.3, -2.0])
@pytest.mark.parametrize("name", NAMES)
def test_one_legal_action_gets_every_visit(name, reward):
    """Also where it is worse than the 0 of an edge that was never taken."""
    result = plan(name, bandit([0.1, 0.2, reward, 0.4]), 9, legal=np.array([[False, False, True, False]]))
    assert result.visits.tolist() == [[0, 0, 9, 0]]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_mask_is_no_mask(name):
    case = Case(name, num_actions=6, num_simulations=30, batch=4, seed=3, setting=0, masked=False)
    trees, options = Trees(case.worlds), {**case.options, "legal": np.ones((4, 6), bool)}
    masked = Search(6)(rules(name), trees, trees.root, **options)
    assert_same(masked, case.run())


def assert_same(one: SearchResult, other: SearchResult) -> None:
    """To the bit."""
    assert one.depth == other.depth
    for a, b in zip(one[:4], other[:4], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_search_gives_the_same_bits_whatever_was_searched_before(name):
    small = Case(name, num_actions=3, num_simulations=4, batch=2, seed=4, setting=0, masked=False)
    large = Case(name, num_actions=3, num_simulations=60, batch=5, seed=4, setting=1, masked=True)
    many = Case(name, num_actions=3, num_simulations=7, batch=8, seed=4, setting=2, masked=False)
    single = Case(name, num_actions=3, num_simulations=1, batch=5, seed=4, setting=0, masked=False)
    search = Search(3)
    for case in (small, small, large, single, small, many, large, many, small, single):
        assert_same(case.run(search), case.run())


def test_a_result_outlives_the_next_search():
    one = Case("GUMBEL", num_actions=3, num_simulations=16, batch=2, seed=5, setting=0, masked=False)
    other = Case("GUMBEL", num_actions=3, num_simulations=16, batch=2, seed=6, setting=1, masked=False)
    search = Search(3)
    result = one.run(search)
    other.run(search)
    one.check(result)


@pytest.mark.parametrize("name", NAMES)
def test_trees_of_a_batch_do_not_meet(name):
    case = Case(name, num_actions=6, num_simulations=24, batch=5, seed=7, setting=0, masked=True)
    together = case.run()
    for b in range(5):
        trees = Trees(case.worlds[b : b + 1])
        options = {**case.options, "legal": case.legal[b : b + 1]}
        if is_gumbel(name):
            options["gumbel"] = case.gumbel[b : b + 1]
        alone = Search(6)(rules(name), trees, trees.root, **options)
        for one, all_ in zip(alone[:4], together[:4], strict=True):
            np.testing.assert_array_equal(one[0], all_[b])


@pytest.mark.parametrize("edges", [[0, 5], [0, 2, 5], [0, 1, 3, 5]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_trees_may_take_turns(name, edges):
    case = Case(name, num_actions=6, num_simulations=24, batch=5, seed=7, setting=0, masked=True)
    trees = [Trees(case.worlds[begin:end]) for begin, end in pairwise(edges)]
    asked: dict[int, tuple[int, Array, Array]] = {}
    discount, waiting = np.zeros(5, np.float32), []

    def ask(part: int, node: int, parent: Array, action: Array) -> None:
        assert part not in asked
        asked[part] = node, parent.copy(), action.copy()

    def answer(part: int) -> search_module.Packed:
        waiting.append(len(asked))
        logits, value, reward, discounts = trees[part](*asked.pop(part))
        discount[edges[part] : edges[part + 1]] = discounts
        return search_module.Packed(
            np.concatenate([logits, np.stack([value, reward], 1)], 1, dtype=np.float32), discount
        )

    root = Trees(case.worlds).root
    result = Search(6)(rules(name), search_module.PartialEvaluate(edges, ask, answer), root, **case.options)
    for one, all_ in zip(result[:4], case.run()[:4], strict=True):
        np.testing.assert_array_equal(one, all_)
    assert not asked
    parts = len(edges) - 1
    assert waiting == [parts] * (24 * parts - parts) + list(range(parts, 0, -1))  # all others are at work meanwhile


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_is_not_changed(name):
    case = Case(name, num_actions=6, num_simulations=12, batch=3, seed=8, setting=1, masked=True)
    trees, told = Trees(case.worlds), []

    def evaluate(node: int, parent: Array, action: Array) -> search_module.Evaluation:
        evaluation = trees(node, parent, action)
        told.append((evaluation, [x.copy() for x in evaluation]))
        return evaluation

    root, options = trees.root, case.options
    given = [*root, case.legal, case.gumbel]
    before = [x.copy() for x in given]
    result = Search(6)(rules(name), evaluate, root, **options)
    gumbel_outcome(result, root.logits, case.legal, case.gumbel, case.constants)
    for evaluation, copies in [(given, before), *told]:
        for x, copy in zip(evaluation, copies, strict=True):
            np.testing.assert_array_equal(x, copy)


def compiled() -> dict[str, int]:
    """How many signatures each compiled function has."""
    return {
        f"{module.__name__}.{key}": len(value.signatures)
        for module in (tree_module, search_module)
        for key, value in vars(module).items()
        if hasattr(value, "signatures")
    }


@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_simulations_compiles_nothing(name):
    search = Search(3)

    def run(num_simulations: int, batch: int, masked: bool) -> None:
        Case(name, num_actions=3, num_simulations=num_simulations, batch=batch, seed=9, setting=0, masked=masked).run(
            search
        )

    run(5, 2, masked=False)
    before = compiled()
    assert sum(before.values()) > 0
    with install_recorder("numba:compile") as events:
        for num_simulations, batch in [(6, 2), (1, 1), (40, 3)]:
            run(num_simulations, batch, masked=num_simulations == 6)
    assert events.buffer == []
    assert compiled() == before


IN_ANOTHER_PROCESS = """
import sys
import numpy as np
from rl_training.ops import search as s

said = s.Evaluation(np.zeros((1, 2), np.float32), np.ones(1, np.float32), np.zeros(1, np.float32), 0.5)
for name in sys.argv[1:]:
    result = s.Search(2)(
        getattr(s, name), lambda *_: said, said, num_simulations=1, gumbel=np.zeros((1, 2), np.float32)
    )
    print(*result.transformed[0])
"""


def test_kernels_that_two_processes_compiled_work_in_a_third(tmp_path):
    """Numba numbers what it compiles anew in each process: two closures of one name, kept on disk, are one symbol."""

    def start(*names: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, *names]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    alone = [process.communicate()[0].strip() for process in (start("MUZERO"), start("GUMBEL_TREE"))]
    assert alone == ["0.5 0.0", "0.0 1.0"]  # Q itself, and v_mix beyond the bounds
    assert start("MUZERO", "GUMBEL_TREE").communicate()[0].split("\n")[:2] == alone


PUBLISHED = [  # the examples that mctx's tests print
    (8, 24, [0] * 8 + [1] * 4 + [2] * 4 + [3, 3, 4, 4, 5, 5, 6, 6]),
    (8, 47, [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4 + [x for i in range(4, 17) for x in (i, i)] + [17]),
    (8, 2, [0, 0]),
    (8, 13, [0] * 8 + [1] * 4 + [2]),
    (7, 24, [0] * 7 + [1] * 3 + [2] * 3 + [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]),
    (1, 16, list(range(16))),
    (0, 16, list(range(16))),
    (4, 8, [0, 0, 0, 0, 1, 1, 2, 2]),
]


@pytest.mark.parametrize(("considered", "num_simulations", "expected"), PUBLISHED)
def test_published_plans_of_sequential_halving(considered, num_simulations, expected):
    for largest in (considered, 16):
        assert considered_visits(largest, num_simulations)[considered].tolist() == expected


@pytest.mark.parametrize("num_simulations", SIMULATIONS)
@pytest.mark.parametrize("largest", [1, 2, 3, 5, 16, 40])
def test_a_plan_of_halving_can_be_played_and_spends_the_budget(largest, num_simulations):
    table = considered_visits(largest, num_simulations)
    assert table.dtype == np.int32
    assert table.shape == (largest + 1, num_simulations)
    for considered in range(1, largest + 1):
        row = table[considered].tolist()
        assert row == halving_plan(considered, num_simulations)
        arms = [0] * considered
        for turn in row:
            arms[arms.index(turn)] += 1  # the best of those whose turn it is: here the first
        assert sum(arms) == num_simulations
        assert sum(count > 0 for count in arms) == min(considered, num_simulations)
        assert arms == sorted(arms, reverse=True)
        assert arms[0] - arms[min(1, considered - 1)] <= 1  # the last round is between two


@pytest.mark.parametrize("max_considered", [1, 2, 4, 16])
def test_gumbel_considers_the_best_by_noise_and_logits(max_considered):
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(1, 10)).astype(np.float32)
    logits = rng.normal(size=10).astype(np.float32)
    legal = np.array([[True] * 8 + [False] * 2])
    result = plan(
        "GUMBEL",
        bandit([0.0] * 10, logits.tolist()),
        16,
        SearchConstants(c_scale=0.0, max_considered=max_considered),
        gumbel=noise,
        legal=legal,
    )
    best = np.argsort(-(noise[0] + logits)[:8])[: min(max_considered, 8)]
    assert set(np.flatnonzero(result.visits[0])) == set(best.tolist())
    in_order = result.visits[0][best]
    assert (np.diff(in_order) <= 0).all()


def test_gumbel_rescales_by_the_node_by_the_tree_or_not_at_all():
    """Rewards 1, 2 and 3 under bounds 0 to 10: a third each, a tenth each, or themselves."""
    constants = SearchConstants(c_scale=0.1, low=0.0, high=10.0)
    transformed = {
        name: plan(name, bandit([1.0, 2.0, 3.0]), 12, constants).transformed[0]
        for name in ("GUMBEL", "GUMBEL_TREE", "GUMBEL_RAW")
    }
    np.testing.assert_allclose(transformed["GUMBEL"], [0, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(transformed["GUMBEL_TREE"], [0.1, 0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(transformed["GUMBEL_RAW"], [1, 2, 3], atol=1e-6)


@pytest.mark.parametrize("name", ["GUMBEL_TREE", "EFFICIENTZERO"])
def test_a_small_range_is_not_blown_up_beyond_the_floor(name):
    """Of a hundredth, unless another is given."""
    result = plan(name, bandit([0.001, 0.002, 0.003]), 30, SearchConstants(c_scale=0.1))
    np.testing.assert_allclose(result.transformed[0], [0.1, 0.2, 0.3], atol=1e-5)  # the smallest Q is 0, further down


@pytest.mark.parametrize("name", ["MUZERO", "MCTX_MUZERO", "GUMBEL"])
def test_where_there_is_no_floor_the_scale_of_rewards_does_not_matter(name):
    """Powers of two, so that nothing is rounded: the smaller range of Q is about a millionth."""
    rewards = np.array([0.25, 0.75, 0.5])
    large, small = (plan(name, bandit((scale * rewards).tolist()), 40) for scale in (1.0, 2.0**-20))
    assert small.visits.tolist() == large.visits.tolist()
    np.testing.assert_array_equal(small.transformed, large.transformed)
    assert np.ptp(large.transformed) > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_logits_count_relative_to_those_of_legal_edges(name):
    """What is illegal has no share of the prior, however unlikely all that is legal was thought to be."""
    legal, logits = np.array([[False, True, True, True]]), np.array([0.0, 1.0, 0.0, 0.5])
    results = [
        plan(name, bandit([0.0, 0.1, 0.3, 0.2], (logits - shift).tolist()), 30, legal=legal) for shift in (0, 64)
    ]
    assert results[0].visits.tolist() == results[1].visits.tolist()
    np.testing.assert_allclose(*(result.transformed[0, 1:] for result in results), rtol=1e-5)


@pytest.mark.parametrize(("value", "expected"), [(-9.0, 0.0), (0.5, 0.0), (0.504, 0.2), (9.0, 1.0)])
def test_a_mixed_value_beyond_the_tree_is_taken_for_its_bound(value, expected):
    """One edge visited, so that v_mix = (v + 0.5) / 2, on a scale that begins at 0.5 and is a hundredth wide."""
    world = bandit([0.5, 0.6, 0.7], [3.0, 0.0, 0.0])
    world = world._replace(root=world.root._replace(value=value))
    result = plan("GUMBEL_TREE", world, 1, SearchConstants(c_scale=0.1, floor=0.01))
    np.testing.assert_allclose(result.transformed[0], [0.0, expected, expected], atol=1e-4)


def test_what_was_not_visited_is_completed_by_the_mixed_value():
    """Two of three visited once each: v_mix = (v + 2 * mean of the two by prior) / 3, by hand."""
    prior, rewards = np.array([0.5, 0.3, 0.2]), [0.4, 0.8, 0.0]
    world = bandit(rewards, np.log(prior).tolist())
    world = world._replace(root=world.root._replace(value=1.0))
    result = plan("GUMBEL_RAW", world, 2, SearchConstants(c_scale=0.0))
    mixed = (1.0 + 2 * (0.5 * 0.4 + 0.3 * 0.8) / 0.8) / 3
    assert result.visits.tolist() == [[1, 1, 0]]
    np.testing.assert_allclose(result.transformed[0], [0.4, 0.8, mixed], rtol=1e-6)


@pytest.mark.parametrize(("noise", "expected"), [(0.4, 0), (0.6, 1)])
def test_the_outcome_of_gumbel_by_hand(noise, expected):
    """sigma = (c_visit + most visits) * c_scale = 5; the action is of the most visited, the target of all legal.

    Scores of the first two: 0.5, and 0 + noise.
    """
    result = SearchResult(
        visits=np.int32([[3, 3, 1, 0]]),
        q=np.float32([[0.1, 0.2, 0.9, 0.0]]),
        transformed=np.float32([[0.1, 0.2, 0.9, 0.5]]),
        value=np.float32([0.0]),
        depth=2,
    )
    logits, gumbel = np.float32([[0.0, -1.0, 5.0, 0.0]]), np.float32([[0.0, noise, 9.0, 99.0]])
    legal, constants = np.array([[True, True, True, False]]), SearchConstants(c_visit=7.0, c_scale=0.5)
    action, target = gumbel_outcome(result, logits, legal, gumbel, constants)
    assert action.tolist() == [expected]
    weights = np.exp([0.5, 0.0, 9.5, -np.inf])
    np.testing.assert_allclose(target[0], weights / weights.sum(), rtol=1e-5)


@njit
def least_visited(tree, b, node, wanted, constants, q, scratch):  # type: ignore[no-untyped-def]
    return tree.visits[b, node].argmin()


@njit
def last_edge(tree, b, node, wanted, constants, q, scratch):  # type: ignore[no-untyped-def]
    return len(q) - 1


@njit
def quarter(tree, b, node, constants, out):  # type: ignore[no-untyped-def]
    out[:] = 0.25


def test_a_users_own_rules_are_obeyed():
    taken: list[tuple[int, int]] = []
    world = random_world(np.random.default_rng(0), 4, 1.0)
    trees = Trees([world])

    def evaluate(node: int, parent: Array, action: Array) -> search_module.Evaluation:
        taken.append((int(parent[0]), int(action[0])))
        return trees(node, parent, action)

    result = Search(4)(Rules(least_visited, last_edge, quarter), evaluate, trees.root, num_simulations=10)
    assert result.visits.tolist() == [[3, 3, 2, 2]]
    assert [action for parent, action in taken if parent == 0] == [0, 1, 2, 3]
    assert [action for parent, action in taken if parent != 0] == [3] * 6
    assert result.transformed.tolist() == [[0.25] * 4]
    assert result.depth == 3
    total = world.root.value + (result.visits * result.q).sum()  # backing up is the search's part, not the rules'
    assert result.value[0] == pytest.approx(total / 11, abs=1e-6)
