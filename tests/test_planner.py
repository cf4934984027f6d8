"""Planning decisions: compiled and PyTorch searches agree, numbers of a call rule that call, masks and laws hold."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from naive_planning import BOARD, PLAIN, SMALL, TORQUE, Diary, board, make, new_replay, restore, steps, stir
from naive_search import Found, Leaf, World, naive_search
from rl_training import ALGORITHMS
from rl_training.acting.planning import Plan, Planner, search_arguments
from rl_training.algorithms.gumbel_muzero import GumbelMuZero
from rl_training.ops.tree import SearchConstants
from rl_training.types import Array, Spaces

ALGOS = ("muzero", "gumbel_muzero", "efficientzero")
TERNARY = {"value_limit": 0, "reward_limit": 0}
every_algorithm = pytest.mark.parametrize("algo", ALGOS)


def observe(count: int, seed: int = 0, size: int = 2) -> Array:
    return np.random.default_rng(seed).standard_normal((count, size), dtype=np.float32)


def boards(count: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    seen = [board(rng, i) for i in range(count)]
    return {key: np.stack([obs[key] for obs in seen]) for key in seen[0]}


def look_at(spaces: Spaces, count: int) -> Any:
    return boards(count) if spaces is BOARD else observe(count)


def quiet_plan(learner: Any, obs: Any, planner: Planner | None = None, num_simulations: int = 12) -> Plan:
    numbers: dict[str, Any] = {"temperature": 0.0, "num_simulations": num_simulations, "rng": np.random.default_rng(0)}
    if planner is None:
        return learner.actor.plan(obs, **numbers)
    return learner.actor.plan_with(planner, obs, learner.hp, **numbers)


def slow_planner(learner: Any, model: Any = None) -> Planner:
    """Through PyTorch, one call for each simulation."""
    planner = Planner(model or learner.model, learner.spaces, num_candidates=learner.hp.num_sampled_actions)
    planner.fusable = False
    return planner


def assert_same(fast: Plan, slow: Plan) -> None:
    np.testing.assert_array_equal(fast.visits, slow.visits)
    np.testing.assert_array_equal(fast.action, slow.action)
    np.testing.assert_allclose(fast.policy, slow.policy, atol=1e-4)
    np.testing.assert_allclose(fast.value, slow.value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("hidden_sizes", [(9,), (40, 70)], ids=str)
@pytest.mark.parametrize("limit", [0, 4])
def test_the_compiled_search_is_that_of_pytorch(activation: str, hidden_sizes: tuple[int, ...], limit: int) -> None:
    shapes = 0  # trees that differ
    for num_actions, latent_size in ((2, 6), (3, 37), (7, 8)):
        spaces = Spaces(PLAIN.observation, Discrete(num_actions))
        learner = make(
            "muzero", spaces, activation=activation, hidden_sizes=hidden_sizes, latent_size=latent_size,
            value_limit=limit, reward_limit=limit,
        )  # fmt: skip
        assert learner.actor.planner.fusable
        for count in (1, 2, 3, 5, 32, 40):
            obs = 3 * observe(count, seed=count)
            fast = quiet_plan(learner, obs, num_simulations=20)
            assert_same(fast, quiet_plan(learner, obs, slow_planner(learner), num_simulations=20))
            assert fast.visits.sum(1).tolist() == [20] * count
        assert np.ptp(fast.value) > 0.1
        shapes += len(np.unique(fast.visits, axis=0))
    assert shapes > 10


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-5, 1e-3, 0.05])
def test_the_compiled_search_scales_latents_of_a_small_range_as_pytorch_does(spread: float) -> None:
    """Those of random networks are wide. Here the numbers of a state, before they are scaled, hardly differ."""
    learner = make("muzero")
    model, obs = learner.model, observe(5)
    with torch.no_grad():
        features = torch.randn(200, model.next_state.in_features)
        usual = np.ptp(model.next_state(features).numpy(), axis=1).mean()
        for parameter in model.next_state.parameters():
            parameter.mul_(spread / float(usual))
        narrow = np.ptp(model.next_state(features).numpy(), axis=1).mean()
    assert narrow == pytest.approx(spread, rel=1e-3)
    learner.actor.planner.refresh()
    assert learner.actor.planner.fusable
    assert_same(quiet_plan(learner, obs), quiet_plan(learner, obs, slow_planner(learner)))


@pytest.mark.parametrize(("lstm_horizon", "lstm_size"), [(1, 33), (2, 5), (5, 64)])
@pytest.mark.parametrize(("activation", "limit"), [("relu", 4), ("tanh", 0)])
def test_the_compiled_search_of_value_prefixes_is_that_of_pytorch(
    lstm_horizon: int, lstm_size: int, activation: str, limit: int
) -> None:
    """In trees deeper than the horizon, so that LSTMs start from zero inside them."""
    shapes = 0  # trees that differ
    for num_actions, hidden_sizes in ((2, (40, 70)), (3, (9,))):
        learner = make(
            "efficientzero", Spaces(PLAIN.observation, Discrete(num_actions)), activation=activation,
            hidden_sizes=hidden_sizes, lstm_horizon=lstm_horizon, lstm_size=lstm_size, value_limit=limit,
            reward_limit=limit, pb_c_init=0.4,
        )  # fmt: skip
        assert learner.actor.planner.fusable
        slow = slow_planner(learner)
        for count in (1, 3, 40):
            obs = 3 * observe(count, seed=count)
            fast = quiet_plan(learner, obs, num_simulations=30)
            assert_same(fast, quiet_plan(learner, obs, slow, num_simulations=30))
        assert learner.actor.planner._search.tree.depth.max() > lstm_horizon
        rewards = [planner._search.tree.reward[:, 1:] for planner in (learner.actor.planner, slow)]
        np.testing.assert_allclose(*rewards, rtol=2e-5, atol=5e-5)
        shapes += len(np.unique(fast.visits, axis=0))
    assert shapes > 10


@pytest.mark.parametrize("q_rescale", ["tree", "node", "none"])
def test_the_compiled_gumbel_search_is_that_of_pytorch(q_rescale: str) -> None:
    for limit, activation in ((4, "relu"), (0, "tanh")):
        spaces = Spaces(PLAIN.observation, Discrete(5))
        learner = make(
            "gumbel_muzero", spaces, q_rescale=q_rescale, activation=activation, value_limit=limit, reward_limit=limit
        )
        for count in (1, 3, 40):
            obs = observe(count, seed=count)
            plans = [
                learner.actor.plan_with(
                    planner, obs, learner.hp, temperature=1.0, num_simulations=16, rng=np.random.default_rng(1)
                )
                for planner in (learner.actor.planner, slow_planner(learner))
            ]
            assert_same(*plans)


def test_the_compiled_search_of_boards_is_that_of_pytorch() -> None:
    """Two players, known bounds, legal moves."""
    for algo in ALGOS:
        learner, obs = make(algo, BOARD, **TERNARY), boards(40)
        assert learner.actor.planner.fusable
        assert_same(quiet_plan(learner, obs), quiet_plan(learner, obs, slow_planner(learner)))


def test_what_cannot_be_compiled_is_searched_all_the_same() -> None:
    image = Spaces(Box(0, 255, (4, 40, 40), np.uint8), Discrete(3), frame_stack=4)
    cases: list[tuple[str, Spaces, dict[str, Any]]] = [
        ("efficientzero", TORQUE, {}),
        ("efficientzero", image, {"channels": 4}),
        ("muzero", TORQUE, {}),
        ("muzero", PLAIN, {"activation": "elu"}),
        ("muzero", PLAIN, {"reward_limit": 0}),
        ("gumbel_muzero", image, {"channels": 4}),
    ]
    for algo, spaces, changes in cases:
        learner = make(algo, spaces, **changes)
        assert not learner.actor.planner.fusable
        obs = observe(3) if spaces is not image else np.random.default_rng(0).integers(0, 256, (3, 4, 40, 40), np.uint8)
        plan = quiet_plan(learner, obs)
        assert plan.visits.sum(1).tolist() == [12] * 3
        np.testing.assert_allclose(plan.policy.sum(1), 1, rtol=1e-5)


@torch.no_grad()
def naive_visits(name: str, learner: Any, obs: Array, num_simulations: int) -> tuple[list[int], bool]:
    """(visits [A] of one observation [1, ...] by these rules, one node at a time; whether no choice was close)"""
    model, gamma = learner.model, learner.hp.gamma

    def leaf(said: Any) -> Leaf:
        return Leaf(said.policy[0].numpy(), said.value.item(), said.reward.item(), gamma)

    def step(state: torch.Tensor, action: int) -> tuple[torch.Tensor, Leaf]:
        said = model.recurrent(state, torch.tensor([action]))
        return said.state, leaf(said)

    root = model.initial(torch.from_numpy(obs))
    world = World(step, root.state, leaf(root))
    found = naive_search(name, world, num_simulations=num_simulations, constants=SearchConstants())
    return found.visits, found.margin > 1e-4


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("algo", "name", "other"), [
    ("muzero", "MUZERO", "EFFICIENTZERO"),
    ("efficientzero", "EFFICIENTZERO", "MUZERO"),
])  # fmt: skip
def test_plans_are_those_of_the_papers_rules(algo: str, name: str, other: str, fused: bool) -> None:
    """An edge never visited counts 0 in MuZero's searches, and as the mean of its siblings in EfficientZero's."""
    learner, obs = make(algo, Spaces(PLAIN.observation, Discrete(6))), 3 * observe(8)
    planner = learner.actor.planner if fused else slow_planner(learner)
    assert planner.fusable == fused
    visits = quiet_plan(learner, obs, planner, num_simulations=15).visits
    expected = [naive_visits(name, learner, row[None], 15) for row in obs]
    others = [naive_visits(other, learner, row[None], 15) for row in obs]
    clear = [b for b in range(8) if expected[b][1] and others[b][1] and expected[b][0] != others[b][0]]
    assert len(clear) >= 3
    assert [visits[b].tolist() for b in clear] == [expected[b][0] for b in clear]


def told_apart(one: Plan, other: Plan) -> bool:
    return not np.allclose(one.value, other.value, rtol=1e-3)


@every_algorithm
def test_new_weights_are_searched_with(algo: str) -> None:
    """After a gradient step, after loading, after a move of the target."""
    learner, obs = make(algo, learning_rate=0.1, tau=0.5), observe(8)
    replay = Diary(new_replay(learner)).play(steps(30)).replay
    replay.columns["action"] %= 3
    before = quiet_plan(learner, obs)
    learner.one_step(replay)
    learned = quiet_plan(learner, obs)
    assert told_apart(before, learned)
    assert_same(learned, quiet_plan(learner, obs, slow_planner(learner)))

    target = quiet_plan(learner, obs, learner.target_planner)
    assert_same(target, quiet_plan(learner, obs, slow_planner(learner, learner.target_model)))
    learner.move_target()
    moved = quiet_plan(learner, obs, learner.target_planner)
    assert told_apart(target, moved)
    assert_same(moved, quiet_plan(learner, obs, slow_planner(learner, learner.target_model)))

    other = make(algo, seed=9, learning_rate=0.1)
    assert told_apart(quiet_plan(other, obs), learned)
    quiet_plan(other, obs, other.target_planner)
    restore(other, learner)
    assert_same(quiet_plan(other, obs), learned)
    assert_same(quiet_plan(other, obs, other.target_planner), moved)


def state_of(learner: Any) -> dict[str, Any]:
    """All that a checkpoint holds of a learner and its actor."""
    state = learner.actor.state_dict() | learner.state_dict()
    return state | {"optimizer": state.pop("optimizers")["model"]}


@every_algorithm
@pytest.mark.parametrize("spaces", [PLAIN, TORQUE, BOARD], ids=["plain", "continuous", "board"])
def test_planning_changes_nothing(algo: str, spaces: Spaces) -> None:
    learner = make(algo, spaces, **(TERNARY if spaces is BOARD else {}))
    obs = look_at(spaces, 4)
    seen, hp, state = copy.deepcopy(obs), learner.hp, copy.deepcopy(state_of(learner))
    rng = np.random.default_rng(0)
    numbers = {**search_arguments(hp, explore=True), "temperature": 0.7, "num_simulations": 9}
    learner.actor.plan(obs, rng=rng, **numbers)
    learner.actor.plan_with(learner.target_planner, obs, hp, rng=rng, **numbers)
    learner.actor.act(obs, {}, explore=True, rng=rng)
    learner.actor.act(obs, {}, explore=False, rng=rng)
    assert learner.hp is hp
    assert learner.actor.hp is hp
    assert learner.hp == dataclasses.replace(hp)
    after = state_of(learner)
    assert state.keys() == after.keys()
    for key in ("rng", "gradient_steps", "env_steps_used", "fraction_due", "target_moved_at", "version"):
        assert state[key] == after[key]
    for key in ("model", "target_model", "optimizer"):
        assert all(torch.equal(x, after[key][name]) for name, x in state[key].items())
    for one, other in zip(*(x.values() if isinstance(x, dict) else [x] for x in (seen, obs)), strict=True):
        np.testing.assert_array_equal(one, other)


@every_algorithm
@pytest.mark.parametrize("spaces", [PLAIN, TORQUE], ids=["plain", "continuous"])
def test_a_plan_is_its_generators(algo: str, spaces: Spaces) -> None:
    learner, obs = make(algo, spaces), observe(16)

    def draw(seed: int) -> list[Array]:
        options = {**search_arguments(learner.hp, explore=True), "temperature": 1.0, "num_simulations": 7}
        plan = learner.actor.plan(obs, rng=np.random.default_rng(seed), **options)
        return [plan.action, plan.policy, plan.value, plan.visits]

    for one, two in zip(draw(3), draw(3), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(draw(3)[0], draw(4)[0])


@every_algorithm
def test_simulations_are_those_of_the_call(algo: str) -> None:
    learner = make(algo)
    for count in (1, 30, 2, 7, 30):
        for batch in (3, 1):
            assert quiet_plan(learner, observe(batch), num_simulations=count).visits.sum(1).tolist() == [count] * batch
    assert learner.hp.num_simulations == SMALL["num_simulations"]
    with pytest.raises(ValueError, match="num_simulations should be at least 1, got 0"):
        quiet_plan(learner, observe(1), num_simulations=0)


@pytest.mark.parametrize("algo", ["muzero", "efficientzero"])
def test_temperature_chooses_the_action_and_nothing_else(algo: str) -> None:
    """The law of N^(1 / T), on one observation in many rows: what is learned from a search is not its business."""
    learner, rows = make(algo), 20_000
    obs = np.repeat(observe(1, seed=3), rows, 0)
    rng, plans = np.random.default_rng(0), {}
    for temperature in (0.0, 0.5, 1.0, 2.0):
        plans[temperature] = learner.actor.plan(obs, temperature=temperature, num_simulations=8, rng=rng)
        visits = plans[temperature].visits[0]
        assert (plans[temperature].visits == visits).all()
        np.testing.assert_allclose(plans[temperature].policy, np.broadcast_to(visits / 8, (rows, 3)), rtol=1e-6)
        if temperature == 0:
            assert set(plans[0.0].action.tolist()) == {int(visits.argmax())}
            assert np.sort(visits)[-2] > 0
            continue
        law = visits ** (1 / temperature) / (visits ** (1 / temperature)).sum()
        found = np.bincount(plans[temperature].action, minlength=3) / rows
        assert np.abs(found - law).sum() / 2 <= 0.015
    for plan in plans.values():
        np.testing.assert_array_equal(plan.value, plans[0.0].value)


def softmax(x: Array) -> Array:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


@torch.no_grad()
def improved_logits(learner: Any, obs: Array) -> Array:
    """[A] logits + sigma(q) where every action has been visited once, straight from the model."""
    hp, model = learner.hp, learner.model
    root = model.initial(torch.from_numpy(obs[:1]))
    size = model.policy_size
    said = model.recurrent(root.state.expand(size, -1), torch.arange(size))
    q = (said.reward + hp.gamma * said.value).double().numpy()
    span = q.max() - q.min()
    seen = {"none": q, "node": (q - q.min()) / span, "tree": (q - q.min()) / max(span, 0.01)}[hp.q_rescale]
    return root.policy[0].double().numpy() + (hp.c_visit + 1) * hp.c_scale * seen


@pytest.mark.parametrize("q_rescale", ["tree", "node", "none"])
@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_gumbels_temperature_is_that_of_the_improved_policy(temperature: float, q_rescale: str) -> None:
    """With as many simulations as actions each is visited once, and the law is exact: softmax((logits + sigma(q)) / T).
    What is learned is softmax(logits + sigma(q)), at any temperature."""
    rows = 5000
    spaces = Spaces(PLAIN.observation, Discrete(4))
    learner = make("gumbel_muzero", spaces, q_rescale=q_rescale, c_scale=0.003 if q_rescale == "none" else 0.05)
    obs = np.repeat(observe(1, seed=4), rows, 0)
    plan = learner.actor.plan(obs, temperature=temperature, num_simulations=4, rng=np.random.default_rng(0))
    assert (plan.visits == 1).all()
    logits = improved_logits(learner, obs)
    np.testing.assert_allclose(plan.policy, np.broadcast_to(softmax(logits), (rows, 4)), atol=1e-4)
    found = np.bincount(plan.action, minlength=4) / rows
    assert np.abs(found - softmax(logits / temperature)).sum() / 2 <= 0.03
    assert np.abs(softmax(logits * 4) - softmax(logits / 2)).sum() / 2 > 0.2  # laws that can be told apart


def test_gumbel_without_temperature_plays_the_best() -> None:
    learner = make("gumbel_muzero", q_rescale="none", c_scale=0.003)
    for seed in range(20):
        plan = learner.actor.plan(observe(32), temperature=0.0, num_simulations=3, rng=np.random.default_rng(seed))
        np.testing.assert_array_equal(plan.action, plan.policy.argmax(1))
    plan = learner.actor.plan(observe(32), temperature=1.0, num_simulations=3, rng=np.random.default_rng(0))
    assert (plan.action != plan.policy.argmax(1)).any()


def test_gumbel_considers_no_more_actions_than_it_is_told() -> None:
    spaces = Spaces(PLAIN.observation, Discrete(7))
    for most in (1, 2, 5):
        learner = make("gumbel_muzero", spaces, max_considered_actions=most)
        plan = learner.actor.plan(observe(64), temperature=1.0, num_simulations=20, rng=np.random.default_rng(0))
        assert ((plan.visits > 0).sum(1) == most).all()


@every_algorithm
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_legal_moves_are_played_and_learned(algo: str, temperature: float) -> None:
    learner = make(algo, BOARD, temperature=temperature, num_simulations=10, **TERNARY)
    obs = boards(200)
    legal = obs["action_mask"].astype(bool)
    assert (legal.sum(1) == 1).any()
    rng = np.random.default_rng(0)
    for explore in (True, False):
        decision = learner.actor.act(obs, {}, explore=explore, rng=rng)
        assert legal[np.arange(200), decision.action].all()
        policy = decision.extras["policy"]
        assert (policy[~legal] == 0).all()
        np.testing.assert_allclose(policy.sum(1), 1, rtol=1e-5)
        one = legal.sum(1) == 1
        np.testing.assert_allclose(policy[one].max(1), 1, rtol=1e-5)


def test_moves_beyond_the_root_need_not_be_legal() -> None:
    """The mask is the root's alone: what follows an illegal first move can be seen, not reached."""
    learner = make("muzero", BOARD, **TERNARY)
    obs = boards(5)
    everything = {**obs, "action_mask": np.ones_like(obs["action_mask"])}
    assert (quiet_plan(learner, everything, num_simulations=60).visits > 0).sum() > (
        quiet_plan(learner, obs, num_simulations=60).visits > 0
    ).sum()


@every_algorithm
def test_acting_stores_what_learning_needs(algo: str) -> None:
    for spaces in (PLAIN, TORQUE):
        learner, obs = make(algo, spaces, num_simulations=6), observe(5)
        recipe = ALGORITHMS[algo].recipe
        assert not recipe.random_start  # the first searches too come with targets
        for explore in (True, False):
            decision = learner.actor.act(obs, {}, explore=explore, rng=np.random.default_rng(0))
            fields = recipe.fields(spaces, learner.hp)
            assert fields.keys() >= decision.extras.keys()
            for name, x in decision.extras.items():
                assert (x.shape[1:], x.dtype) == (fields[name].shape, fields[name].dtype)
            edges = 3 if spaces is PLAIN else SMALL["num_sampled_actions"]
            assert decision.extras["policy"].shape == (5, edges)
            assert decision.extras["root_value"].shape == (5,)
            assert {x.dtype for x in decision.extras.values()} == {np.dtype(np.float32)}
            assert ("candidates" in decision.extras) == (spaces is TORQUE)
            if spaces is TORQUE:
                candidates = decision.extras["candidates"]
                assert candidates.shape == (5, edges, 2)
                assert np.abs(candidates).max() < 1
                played = (candidates == decision.action[:, None]).all(-1)
                assert (played.sum(1) == 1).all()  # the action is one of the candidates
                assert (decision.extras["policy"][played] > 0).all()


def test_evaluation_has_numbers_of_its_own() -> None:
    learner, seen = make("muzero", temperature=0.8, eval_num_simulations=9, eval_temperature=0.1), []
    plan = learner.actor.plan
    learner.actor.plan = lambda obs, **numbers: (seen.append(numbers), plan(obs, **numbers))[1]
    for explore in (True, False):
        learner.actor.act(observe(2), {}, explore=explore, rng=np.random.default_rng(0))
    for numbers in seen:
        del numbers["rng"]
    assert seen == [
        {"temperature": 0.8, "num_simulations": 5, "root_exploration_fraction": 0.25},
        {"temperature": 0.1, "num_simulations": 9, "root_exploration_fraction": 0.0},
    ]


@pytest.mark.parametrize("algo", ["muzero", "efficientzero"])
@pytest.mark.parametrize("spaces", [PLAIN, TORQUE], ids=["plain", "continuous"])
@torch.no_grad()
def test_noise_is_mixed_into_the_root_alone(algo: str, spaces: Spaces) -> None:
    """The priors of the root and of the one node below it, with noise and without."""
    learner, priors = make(algo, spaces), []
    for fraction in (0.0, 0.9):
        numbers = {"temperature": 0.0, "num_simulations": 1, "root_exploration_fraction": fraction}
        plan = learner.actor.plan(observe(4), rng=np.random.default_rng(0), **numbers)
        priors.append(learner.actor.planner._search.tree.prior[:, :2].copy())
    assert np.abs(priors[0][:, 0] - priors[1][:, 0]).max(1).min() > 0.1
    if spaces is TORQUE:  # a node's draws are all alike
        np.testing.assert_allclose(priors[0], 1 / SMALL["num_sampled_actions"], rtol=1e-5)
        np.testing.assert_allclose(priors[1][:, 1], 1 / SMALL["num_sampled_actions"], rtol=1e-5)
        return
    root = learner.model.initial(torch.from_numpy(observe(4)))
    leaf = learner.model.recurrent(root.state, torch.from_numpy(plan.action))
    np.testing.assert_allclose(priors[0][:, 0], root.policy.softmax(1), atol=1e-5)
    np.testing.assert_allclose(priors[1][:, 1], leaf.policy.softmax(1), atol=1e-5)


@torch.no_grad()
def test_continuous_candidates_are_draws_of_the_policy() -> None:
    learner = make("muzero", TORQUE, num_sampled_actions=2000)
    plan = quiet_plan(learner, observe(2), num_simulations=2)
    policy = learner.model.initial(torch.from_numpy(observe(2))).policy.numpy()
    mean, log_std = policy[:, :2], policy[:, 2:]
    assert plan.candidates is not None
    inside = np.abs(plan.candidates).max(-1) < 0.998
    for b in range(2):
        u = np.arctanh(plan.candidates[b][inside[b]].astype(np.float64))
        standard = (u - mean[b]) / np.exp(log_std[b])
        expected = np.random.default_rng(0).standard_normal((200_000, 2))
        kept = np.abs(np.tanh(mean[b] + np.exp(log_std[b]) * expected)).max(1) < 0.998
        expected = expected[kept]
        np.testing.assert_allclose(standard.mean(0), expected.mean(0), atol=0.12)
        np.testing.assert_allclose(standard.std(0), expected.std(0), atol=0.12)


def test_interior_candidates_are_those_of_their_nodes() -> None:
    """The action that leads to a node is one of the draws made at its parent."""
    learner = make("muzero", TORQUE, num_sampled_actions=3)
    drawn: list[Array] = []
    draw, recurrent = learner.actor.planner._sample_candidates, learner.actor.planner.inference.recurrent

    def spy_draw(prediction: Array, rng: Any) -> Array:
        drawn.append(draw(prediction, rng))
        return drawn[-1]

    def spy_recurrent(node: int, parent: Array, action: Array) -> Array:
        for b in range(2):
            assert (drawn[parent[b]][b] == action[b]).all(-1).any()
        return recurrent(node, parent, action)

    learner.actor.planner._sample_candidates, learner.actor.planner.inference.recurrent = spy_draw, spy_recurrent
    plan = quiet_plan(learner, observe(2), num_simulations=15)
    np.testing.assert_array_equal(plan.candidates, drawn[0])
    assert len(drawn) == 16


def test_a_box_of_any_shape_is_acted_in() -> None:
    spaces = Spaces(PLAIN.observation, Box(-1, 1, (2, 3), np.float32))
    learner = make("gumbel_muzero", spaces)
    plan = quiet_plan(learner, observe(4))
    assert plan.action.shape == (4, 2, 3)
    assert plan.candidates is not None
    assert plan.candidates.shape == (4, SMALL["num_sampled_actions"], 6)


def test_two_players_see_each_others_values() -> None:
    """The root's value of one simulation: the mean of its own word and of r - gamma v of what follows."""
    learner = make("muzero", BOARD, gamma=0.9, **TERNARY)
    single = make("muzero", dataclasses.replace(BOARD, num_players=1), gamma=0.9, **TERNARY)
    restore(single, learner)
    obs = boards(6)
    tensors = {key: torch.from_numpy(x) for key, x in obs.items()}
    for planned, sign in ((learner, -1.0), (single, 1.0)):
        plan = quiet_plan(planned, obs, num_simulations=1)
        with torch.no_grad():
            root = planned.model.initial(tensors)
            leaf = planned.model.recurrent(root.state, torch.from_numpy(plan.action))
        expected = (root.value + leaf.reward + sign * 0.9 * leaf.value) / 2
        np.testing.assert_allclose(plan.value, expected, atol=1e-5)


def by_naive_search(learner: Any, obs: dict[str, Array], *, known: bool) -> list[Found]:
    """Searches of boards by the learner's model, one by one; `known`: outcomes are known to lie between -1 and 1."""
    model, hp = learner.model, learner.hp
    gumbel = isinstance(learner, GumbelMuZero)
    own = ("c_visit", "c_scale") if gumbel else ("pb_c_init", "pb_c_base")
    constants = SearchConstants(**{name: getattr(hp, name) for name in own})
    constants = constants._replace(low=-1.0, high=1.0) if known else constants

    def leaf(output: Any, reward: float) -> Leaf:
        return Leaf(output.policy[0].numpy(), output.value.item(), reward, -hp.gamma)

    @torch.no_grad()
    def follow(state: Any, action: int) -> tuple[Any, Leaf]:
        output = model.recurrent(state, torch.tensor([action]))
        return output.state, leaf(output, output.reward.item())

    found = []
    for row in range(len(obs["action_mask"])):
        with torch.no_grad():
            root = model.initial({key: torch.from_numpy(x[row : row + 1]) for key, x in obs.items()})
        world = World(follow, root.state, leaf(root, 0.0))
        name, legal = "GUMBEL_TREE" if gumbel else "MUZERO", obs["action_mask"][row]
        found.append(naive_search(name, world, num_simulations=12, constants=constants, legal=legal))
    return found


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("algo", ["muzero", "gumbel_muzero"])
def test_games_are_searched_with_their_known_bounds(algo: str, fused: bool) -> None:
    learner, obs = make(algo, BOARD, **TERNARY), boards(40)
    assert learner.actor.planner.fusable
    plan = quiet_plan(learner, obs, None if fused else slow_planner(learner))
    known, unknown = (by_naive_search(learner, obs, known=known) for known in (True, False))
    clear = [row for row, found in enumerate(known) if found.margin > 1e-4]
    assert len(clear) > 30
    for row in clear:
        assert plan.visits[row].tolist() == known[row].visits
        if algo == "gumbel_muzero":
            np.testing.assert_allclose(plan.policy[row], known[row].target, atol=1e-3)
    outcome = "target" if algo == "gumbel_muzero" else "visits"
    others = sum(
        not np.allclose(getattr(known[row], outcome), getattr(unknown[row], outcome), atol=1e-2) for row in clear
    )
    assert others > 10, "a search that finds its bounds by itself comes to something else"


def test_stirred_models_differ_from_their_targets() -> None:
    """Of the helper that the tests above rest on."""
    learner = make("muzero")
    one, other = (next(model.parameters()) for model in (learner.model, learner.target_model))
    assert not torch.allclose(one, other)
    before = one.clone()
    stir(learner.model, 0.0)
    assert torch.equal(before, one)


@every_algorithm
@pytest.mark.parametrize(
    ("name", "value"),
    [("network", "mlp"), ("channels", 4), ("blocks", 2), ("stem", "strided"), ("value_limit", 9), ("reward_limit", 9)],
)
def test_a_setting_of_the_towers_makes_another_model(algo: str, name: str, value: Any) -> None:
    spaces = Spaces(Box(0, 255, (4, 36, 36), np.uint8), Discrete(3), frame_stack=4)
    usual = {"network": "auto", "channels": 8}
    assert str(make(algo, spaces, **usual).model) != str(make(algo, spaces, **{**usual, name: value}).model)
