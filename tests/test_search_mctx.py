"""The Gumbel and PUCT searches visit what mctx's do, to the count, where mctx is installed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from rl_training.ops.search import GUMBEL, GUMBEL_RAW, MCTX_MUZERO, Evaluation, Knobs, Search, gumbel_outcome
from rl_training.types import Array

mctx = pytest.importorskip("mctx")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

KEY = jax.random.PRNGKey(3)
UNSCALED = functools.partial(
    mctx.qtransform_completed_by_mix_value, value_scale=1.0, maxvisit_init=20.0, rescale_values=False
)
BATCH, STATES = 16, 4096
SIZES = [(2, 50), (3, 7), (6, 16), (18, 2), (18, 50)]  # actions, simulations
WAYS = [(False, 1.0, 0.997), (True, 1.0, -1.0), (True, 0.0, 1.0)]  # masked, scale of the noise, discount


class Table:
    """A model of numbered states that leads anywhere, the same numbers for both searches."""

    def __init__(self, num_actions: int, discount: float) -> None:
        rng = np.random.default_rng([num_actions, round(abs(discount) * 1000)])
        self.discount = discount
        self.next = rng.integers(0, STATES, (STATES, num_actions))
        self.logits = rng.normal(0, 1.5, (STATES, num_actions)).astype(np.float32)
        self.value, self.reward = rng.normal(0, 0.5, (2, STATES)).astype(np.float32)
        self.start = rng.integers(0, STATES, BATCH)
        legal = rng.random((BATCH, num_actions)) < rng.uniform(0.2, 0.9, (BATCH, 1))
        legal[np.arange(BATCH), rng.integers(0, num_actions, BATCH)] = True
        self.legal = legal

    def say(self, state: Array, *, root: bool = False) -> Evaluation:
        reward = np.zeros(BATCH, np.float32) if root else self.reward[state]
        return Evaluation(self.logits[state], self.value[state], reward, np.full(BATCH, self.discount, np.float32))

    def ours(self, rules: Any, num_simulations: int, **options: Any) -> Any:
        states, rows = np.zeros((num_simulations + 1, BATCH), np.int64), np.arange(BATCH)
        states[0] = self.start

        def evaluate(node: int, parent: Array, action: Array) -> Evaluation:
            states[node] = self.next[states[parent, rows], action]
            return self.say(states[node])

        root = self.say(self.start, root=True)
        return Search(self.next.shape[1])(rules, evaluate, root, num_simulations=num_simulations, **options)

    def theirs(self, policy: str, num_simulations: int, *, masked: bool, **traced: float) -> Any:
        tables = tuple(jnp.asarray(x) for x in (self.next, self.logits, self.value, self.reward))
        invalid = ~self.legal if masked else np.zeros_like(self.legal)
        params = (*tables, jnp.full(BATCH, self.discount, jnp.float32))
        return compiled(policy, num_simulations)(params, jnp.asarray(self.start), jnp.asarray(invalid), **traced)


def recurrent(params: Any, key: Any, action: Any, state: Any) -> Any:
    following, logits, value, reward, discount = params
    state = following[state, action]
    said = mctx.RecurrentFnOutput(
        reward=reward[state], discount=discount, prior_logits=logits[state], value=value[state]
    )
    return said, state


@functools.cache
def compiled(policy: str, num_simulations: int) -> Any:
    search = {
        "gumbel": functools.partial(mctx.gumbel_muzero_policy, max_num_considered_actions=5),
        "raw": functools.partial(mctx.gumbel_muzero_policy, qtransform=UNSCALED),
        "puct": functools.partial(mctx.muzero_policy, dirichlet_fraction=0.0, pb_c_init=1.5, pb_c_base=300.0),
    }[policy]

    def run(params: Any, start: Any, invalid: Any, **traced: Any) -> Any:
        root = mctx.RootFnOutput(prior_logits=params[1][start], value=params[2][start], embedding=start)
        return search(params, KEY, root, recurrent, num_simulations, invalid_actions=invalid, **traced)

    return jax.jit(run)


def assert_same(ours: Any, theirs: Any) -> None:
    summary = theirs.search_tree.summary()
    np.testing.assert_array_equal(ours.visits, np.asarray(summary.visit_counts))
    visited = ours.visits > 0
    np.testing.assert_allclose(ours.q[visited], np.asarray(summary.qvalues)[visited], atol=1e-5)
    np.testing.assert_allclose(ours.value, np.asarray(summary.value), atol=1e-5)


def check_gumbel(table: Table, rules: Any, theirs: Any, knobs: Knobs, *, masked: bool, budget: int) -> None:
    """With the noise that mctx drew."""
    noise = np.asarray(theirs.search_tree.extra_data.root_gumbel)
    legal = table.legal if masked else None
    ours = table.ours(rules, budget, legal=legal, gumbel=noise, knobs=knobs)
    assert_same(ours, theirs)
    action, target = gumbel_outcome(ours, table.logits[table.start], legal, noise, knobs)
    np.testing.assert_array_equal(action, np.asarray(theirs.action))
    np.testing.assert_allclose(target, np.asarray(theirs.action_weights), atol=1e-3)


@pytest.mark.parametrize(("num_actions", "num_simulations"), SIZES)
@pytest.mark.parametrize(("masked", "scale", "discount"), WAYS)
def test_gumbel_is_mctx(num_actions, num_simulations, masked, scale, discount):
    table = Table(num_actions, discount)
    theirs = table.theirs("gumbel", num_simulations, masked=masked, gumbel_scale=scale)
    knobs = Knobs(c_scale=0.1, max_considered=5)
    check_gumbel(table, GUMBEL, theirs, knobs, masked=masked, budget=num_simulations)


@pytest.mark.parametrize(("masked", "scale", "discount"), WAYS)
def test_unscaled_gumbel_is_mctx_without_rescaling(masked, scale, discount):
    table = Table(6, discount)
    theirs = table.theirs("raw", 20, masked=masked, gumbel_scale=scale)
    check_gumbel(table, GUMBEL_RAW, theirs, Knobs(c_scale=1.0, c_visit=20.0), masked=masked, budget=20)


@pytest.mark.parametrize(("num_actions", "num_simulations"), SIZES)
@pytest.mark.parametrize(("masked", "_", "discount"), WAYS)
def test_puct_is_mctx(num_actions, num_simulations, masked, _, discount):
    table = Table(num_actions, discount)
    theirs = table.theirs("puct", num_simulations, masked=masked)
    knobs = Knobs(pb_c_init=1.5, pb_c_base=300.0)
    ours = table.ours(MCTX_MUZERO, num_simulations, legal=table.legal if masked else None, knobs=knobs)
    assert_same(ours, theirs)
