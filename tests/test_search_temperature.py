"""What is done with a search: actions by visits or by Gumbel noise, at any temperature, and better than the prior."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_training.ops.search import (
    GUMBEL,
    GUMBEL_RAW,
    GUMBEL_TREE,
    MUZERO,
    Evaluation,
    Rules,
    Search,
    SearchResult,
    act_by_visits,
    considered_visits,
    gumbel_outcome,
    with_dirichlet,
)
from rl_training.ops.tree import SearchConstants
from rl_training.types import Array

TENTH = SearchConstants(c_scale=0.1)
RULES = {"GUMBEL": GUMBEL, "GUMBEL_TREE": GUMBEL_TREE, "GUMBEL_RAW": GUMBEL_RAW}


class Bandits:
    """B bandits of exact Q [B, A]: whatever follows, a state is worth what the arm that was drawn first is."""

    def __init__(self, q: Array, logits: Array) -> None:
        self.q, self.logits = q.astype(np.float32), logits.astype(np.float32)
        self.prior = softmax(self.logits)
        self.rows, self.zero = np.arange(len(q)), np.zeros(len(q), np.float32)
        self.first = np.zeros((1, len(q)), np.int64)  # [nodes, B] the first arm on the way to a node

    @property
    def root(self) -> Evaluation:
        return Evaluation(self.logits, (self.prior * self.q).sum(1), self.zero, 1.0)

    def __call__(self, node: int, parent: Array, action: Array) -> Evaluation:
        first = np.where(parent == 0, action, self.first[parent, self.rows])
        self.first[node] = first
        return Evaluation(self.logits, self.q[self.rows, first], self.zero, 1.0)

    def search(self, rules: Rules, num_simulations: int, **options: Any) -> SearchResult:
        self.first = np.zeros((num_simulations + 1, len(self.q)), np.int64)
        return Search(self.q.shape[1])(rules, self, self.root, num_simulations=num_simulations, **options)

    def by_gumbel(
        self, rules: Rules, num_simulations: int, noise: Array, constants: SearchConstants = TENTH
    ) -> tuple[SearchResult, Array, Array]:
        result = self.search(rules, num_simulations, gumbel=noise, constants=constants)
        return (result, *gumbel_outcome(result, self.logits, None, noise, constants))

    def gain(self, action: Array) -> Array:
        """[B] of the arms played, over what the prior would have won."""
        return self.q[self.rows, action] - (self.prior * self.q).sum(1)


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def gumbel_noise(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return rng.gumbel(size=shape).astype(np.float32)


def variation(action: Array, expected: Array) -> float:
    """Total variation between the actions drawn and their law [A]."""
    found = np.bincount(action, minlength=len(expected)) / len(action)
    return float(np.abs(found - expected).sum() / 2)


def random_bandits(rng: np.random.Generator, count: int, arms: int = 16) -> Bandits:
    return Bandits(rng.random((count, arms)), rng.normal(size=(count, arms)))


LAW_Q = np.array([0.9, 0.1, 0.6, 0.3])
LAW_LOGITS = np.array([-2.0, 1.5, 0.0, 0.5])


@pytest.mark.parametrize(("name", "num_simulations"), [("GUMBEL", 4), ("GUMBEL", 16), ("GUMBEL_RAW", 8)])
@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_the_played_action_is_a_sample_of_the_improved_policy_at_a_temperature(temperature, name, num_simulations):
    """argmax(tau g + x) is a sample of softmax(x / tau), where x = logits + sigma(q); the target is softmax(x)."""
    rng, rows = np.random.default_rng(0), 2000
    bandits = Bandits(np.tile(LAW_Q, (rows, 1)), np.tile(LAW_LOGITS, (rows, 1)))
    seen = (LAW_Q - 0.1) / 0.8 if name == "GUMBEL" else LAW_Q
    most = considered_visits(16, num_simulations)[4].max() + 1
    improved = LAW_LOGITS + (50 + most) * 0.1 * seen
    actions = []
    for _ in range(10):
        noise = np.float32(temperature) * gumbel_noise(rng, (rows, 4))
        result, action, target = bandits.by_gumbel(RULES[name], num_simulations, noise)
        assert (result.visits > 0).all()
        np.testing.assert_allclose(target, np.tile(softmax(improved), (rows, 1)), atol=1e-5)
        actions.append(action)
    assert variation(np.concatenate(actions), softmax(improved / temperature)) <= 0.02


@pytest.mark.parametrize("name", RULES)
def test_without_noise_gumbel_always_plays_its_best(name):
    bandits = random_bandits(np.random.default_rng(2), 500, arms=4)
    _, action, target = bandits.by_gumbel(RULES[name], 16, np.zeros((500, 4), np.float32))
    best = target.max(1) - 1e-6 <= target[bandits.rows, action]
    assert best.all()


GAINS = {2: 0.16, 4: 0.27, 16: 0.29, 50: 0.32}  # of sixteen arms, logits normal, Q uniform


@pytest.mark.parametrize("num_simulations", GAINS)
def test_few_simulations_are_worth_more_to_gumbel_than_to_puct(num_simulations):
    """The mean over bandits, up to three of its standard errors."""
    rng, rows = np.random.default_rng(0), 20_000 if num_simulations <= 4 else 4000
    bandits = random_bandits(rng, rows)
    _, action, _ = bandits.by_gumbel(GUMBEL, num_simulations, gumbel_noise(rng, (rows, 16)))
    gain = bandits.gain(action)
    assert gain.mean() + 3 * gain.std() / np.sqrt(rows) >= GAINS[num_simulations]
    visits = bandits.search(MUZERO, num_simulations).visits
    for other in (visits.argmax(1), act_by_visits(visits, 1.0, rng)):
        assert gain.mean() > 1.8 * bandits.gain(other).mean()


@pytest.mark.parametrize("num_simulations", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("name", RULES)
def test_the_played_action_is_no_worse_than_the_prior(name, num_simulations):
    """Bandit by bandit, the mean over the noise; also where the prior has the best arm already, or the worst."""
    rng, rows = np.random.default_rng(num_simulations), 3000
    q = np.array([0.1, 0.8, 0.3, 0.5, 0.9])
    for logits in (3 * q, -3 * q, 0 * q, np.array([0.0, 3.0, 0.0, 0.0, 0.0])):
        bandits = Bandits(np.tile(q, (rows, 1)), np.tile(logits, (rows, 1)))
        _, action, _ = bandits.by_gumbel(RULES[name], num_simulations, gumbel_noise(rng, (rows, 5)))
        gain = bandits.gain(action)
        assert gain.mean() > -3 * gain.std() / np.sqrt(rows)
        assert num_simulations < 4 or gain.mean() > 0.03


@pytest.mark.parametrize("num_simulations", [16, 50])
@pytest.mark.parametrize("name", RULES)
def test_the_policy_target_improves_on_the_prior_in_every_bandit(name, num_simulations):
    """All arms visited, so that every Q is exact: section 4 of the paper."""
    rng = np.random.default_rng(5)
    bandits = random_bandits(rng, 1000)
    result, _, target = bandits.by_gumbel(RULES[name], num_simulations, gumbel_noise(rng, (1000, 16)))
    assert (result.visits > 0).all()
    np.testing.assert_allclose(target.sum(1), 1.0, rtol=1e-5)
    assert (((target - bandits.prior) * bandits.q).sum(1) > 0).all()


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_actions_are_drawn_in_proportion_to_powers_of_visits(temperature):
    visits = np.array([5, 0, 20, 10, 15], np.int32)
    law = visits ** (1 / temperature) / (visits ** (1 / temperature)).sum()
    action = act_by_visits(np.tile(visits, (50_000, 1)), temperature, np.random.default_rng(0))
    assert action.shape == (50_000,)
    assert not (action == 1).any()
    assert variation(action, law) <= 0.01


def test_each_row_is_drawn_by_its_own_visits():
    visits = np.array([[9, 0, 0], [0, 0, 4], [0, 7, 0]] * 50, np.int32)
    action = act_by_visits(visits, 1.0, np.random.default_rng(0))
    assert action.tolist() == [0, 2, 1] * 50


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_no_temperature_is_the_most_visited(temperature):
    visits = np.array([[1, 700, 3], [200, 199, 0], [0, 0, 1]], np.int32)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert act_by_visits(visits, temperature, rng)[[0, 2]].tolist() == [1, 2]
    assert act_by_visits(visits, 0.0, np.random.default_rng(0))[1] == 0


def test_the_first_of_equals_is_taken_without_a_temperature():
    visits = np.array([[2, 5, 5, 1], [4, 4, 4, 4]], np.int32)
    assert act_by_visits(visits, 0.0, np.random.default_rng(0)).tolist() == [1, 0]


def test_draws_are_the_generators_alone():
    visits = np.random.default_rng(0).integers(1, 50, (100, 6)).astype(np.int32)
    one, two, other = (act_by_visits(visits, 1.0, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert one.tolist() == two.tolist() != other.tolist()


DIRICHLET_LOGITS = np.float32([[2.0, -1.0, 0.0, 0.5, 5.0]])
LEGAL = np.array([[True, True, False, True, False]])


def masked_softmax(logits: Array, legal: Array | None) -> Array:
    return softmax(logits if legal is None else np.where(legal, logits, -np.inf))


@pytest.mark.parametrize("legal", [None, LEGAL], ids=["all", "some"])
def test_no_dirichlet_noise_leaves_the_prior(legal):
    noisy = with_dirichlet(DIRICHLET_LOGITS, legal, fraction=0.0, alpha=0.3, rng=np.random.default_rng(0))
    np.testing.assert_allclose(masked_softmax(noisy, legal), masked_softmax(DIRICHLET_LOGITS, legal), rtol=1e-5)


@pytest.mark.parametrize("legal", [None, LEGAL], ids=["all", "some"])
@pytest.mark.parametrize("alpha", [0.03, 0.3, 1.0, 10.0])
def test_all_dirichlet_noise_is_dirichlet(alpha, legal):
    """Nothing of the logits; mean 1 / k over k legal actions and the variance of the distribution."""
    rows = 20_000
    logits = np.tile(DIRICHLET_LOGITS, (rows, 1))
    mask = None if legal is None else np.tile(legal, (rows, 1))
    noise, again = (
        softmax(with_dirichlet(x, mask, fraction=1.0, alpha=alpha, rng=np.random.default_rng(1)))
        for x in (logits, -logits)
    )
    np.testing.assert_allclose(noise, again, atol=1e-6)
    chosen = np.ones(5, bool) if legal is None else legal[0]
    count = chosen.sum()
    assert (noise[:, ~chosen] == 0).all()
    np.testing.assert_allclose(noise.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(noise[:, chosen].mean(0), 1 / count, atol=0.012)
    variance = (count - 1) / count**2 / (count * alpha + 1)
    np.testing.assert_allclose(noise[:, chosen].var(0), variance, rtol=0.05)


@pytest.mark.parametrize("fraction", [0.25, 0.6])
def test_dirichlet_noise_is_mixed_in_by_its_fraction(fraction):
    rows = 20_000
    logits, legal = np.tile(DIRICHLET_LOGITS, (rows, 1)), np.tile(LEGAL, (rows, 1))
    mixed = softmax(with_dirichlet(logits, legal, fraction=fraction, alpha=0.3, rng=np.random.default_rng(2)))
    pure = softmax(with_dirichlet(logits, legal, fraction=1.0, alpha=0.3, rng=np.random.default_rng(2)))
    prior = masked_softmax(DIRICHLET_LOGITS, LEGAL)[0]
    np.testing.assert_allclose(mixed, (1 - fraction) * prior + fraction * pure, atol=1e-5)
    np.testing.assert_allclose(mixed.mean(0), (1 - fraction) * prior + fraction * LEGAL[0] / 3, atol=0.01)
    assert (mixed[:, ~LEGAL[0]] == 0).all()
    assert len(np.unique(mixed[:, 0])) > rows / 2  # every row has its own


def test_dirichlet_noise_searches_and_changes_nothing_given():
    logits, legal = np.tile(DIRICHLET_LOGITS, (3, 1)), np.tile(LEGAL, (3, 1))
    before = logits.copy()
    noisy = with_dirichlet(logits, legal, fraction=0.25, alpha=0.3, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(logits, before)
    assert noisy.dtype == np.float32
    bandits = Bandits(np.tile(np.linspace(0, 1, 5), (3, 1)), noisy)
    visits = bandits.search(MUZERO, 20, legal=legal).visits
    assert visits.sum(1).tolist() == [20] * 3
    assert (visits[~legal] == 0).all()
