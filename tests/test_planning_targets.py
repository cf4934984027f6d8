"""What planning learns from, against episodes kept as lists: values, rewards, policies, masks and reanalysis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from naive_planning import (
    BOARD,
    DUEL,
    NUM_ACTIONS,
    PLAIN,
    TORQUE,
    Diary,
    Episode,
    make,
    naive_targets,
    new_replay,
    plan_anew,
    steps,
)
from naive_replay import Ends
from rl_training.algorithms.efficientzero import value_prefixes
from rl_training.data.batch import to_tensors
from rl_training.types import Array, Spaces

ENDS = {
    "both": Ends(),
    "terminated": Ends(0.3, 0),
    "truncated": Ends(0, 0.3),
    "long": Ends(0.02, 0.02),
    "cut": Ends(0.1, 0, cut=0.2),
}
every_end = pytest.mark.parametrize("ends", ENDS)
K = 3


def played(learner: Any, count: int = 70, *, ends: str = "both", num_envs: int = 2, seed: int = 0) -> Diary:
    diary = Diary(new_replay(learner, num_envs))
    return diary.play(steps(count, num_envs, spaces=learner.spaces, ends=ENDS[ends], seed=seed))


def all_places(diary: Diary, seed: int = 0) -> Array:
    return np.random.default_rng(seed).permutation(np.flatnonzero(diary.replay.valid))


def alone(obs: Any) -> Any:
    """A batch of one."""
    return {key: x[None] for key, x in obs.items()} if isinstance(obs, dict) else obs[None]


@torch.no_grad()
def value_of(model: Any, step: dict[str, Any], key: str = "obs") -> float:
    """A model's value of an observation of a step; there is one model for every diary."""
    kept = f"value of {key}"
    if kept not in step:
        step[kept] = float(model.initial(to_tensors(alone(step[key]), torch.device("cpu"))).value)
    return step[kept]


def expected(learner: Any, diary: Diary, index: Array, n: Any = None) -> list[list[dict[str, Any]]]:
    hp = learner.hp
    searched = hp.bootstrap == "search"
    return [
        naive_targets(
            episode,
            t,
            unroll=hp.unroll_steps,
            n=hp.n_step if n is None else n(episode, t),
            gamma=hp.gamma,
            players=learner.spaces.num_players,
            value=lambda step: float(step["root_value"]) if searched else value_of(learner.target_model, step),
            value_after=lambda step: value_of(learner.target_model, step, "next_obs"),
        )
        for episode, t in diary.at(index)
    ]


def assert_taught(batch: dict[str, Any], taught: list[list[dict[str, Any]]]) -> None:
    """Values, rewards, masks, actions and the first observations; of policies only where they are known."""
    assert batch["value"].dtype == batch["reward"].dtype == np.float32
    for b, sequence in enumerate(taught):
        for k, lesson in enumerate(sequence):
            known = lesson["step"] is not None
            assert batch["policy_mask"][b, k] == known
            assert batch["value_mask"][b, k] == (lesson["value"] is not None)
            if lesson["value"] is not None:
                assert batch["value"][b, k] == pytest.approx(lesson["value"], rel=1e-5, abs=1e-5)
            if k == len(sequence) - 1:
                continue  # a reward and an action for each step but the last
            assert batch["reward_mask"][b, k] == (lesson["reward"] is not None)
            if lesson["reward"] is not None:
                assert batch["reward"][b, k] == np.float32(lesson["reward"])
            if known:
                np.testing.assert_array_equal(batch["action"][b, k], lesson["step"]["action"])
        np.testing.assert_array_equal(batch["obs"][b], sequence[0]["step"]["obs"])
    assert batch["value"].shape == batch["policy_mask"].shape == batch["value_mask"].shape == (len(taught), K + 1)
    assert batch["reward"].shape == batch["reward_mask"].shape == batch["action"].shape[:2] == (len(taught), K)


@every_end
@pytest.mark.parametrize("n_step", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("spaces", [PLAIN, DUEL], ids=["one player", "two players"])
@pytest.mark.parametrize("bootstrap", ["target", "search"])
def test_targets_are_those_of_lists(ends: str, n_step: int, spaces: Spaces, bootstrap: str) -> None:
    learner = make("muzero", spaces, n_step=n_step, bootstrap=bootstrap)
    diary = played(learner, ends=ends)
    index = all_places(diary)
    batch = learner.targets(diary.replay, index)
    assert_taught(batch, expected(learner, diary, index))
    for b, (episode, t) in enumerate(diary.at(index)):
        for k, step in enumerate(episode.steps[t : t + K + 1]):
            np.testing.assert_array_equal(batch["policy"][b, k], step["policy"])


def test_every_kind_of_sequence_is_among_them() -> None:
    """What the oracle says of the cases above: an end in every place, of either kind, and none."""
    kinds = set()
    for ends in ENDS:
        learner = make("muzero")
        diary = played(learner, ends=ends)
        for episode, t in diary.at(all_places(diary)):
            left = min(len(episode.steps) - t, K + 2)
            kinds.add((left, "terminated" if episode.terminated else "truncated" if episode.closed else "running"))
    assert kinds == {(left, kind) for left in range(1, K + 3) for kind in ("terminated", "truncated", "running")}


@pytest.mark.parametrize(
    ("terminated", "players", "values"),
    [
        (True, 1, [1 + 0.5 * 2 + 0.25 * 8, 2 + 0.5 * 4, 4.0, 0.0]),
        (True, 2, [1 - 0.5 * 2 + 0.25 * 8, 2 - 0.5 * 4, 4.0, 0.0]),
        (False, 1, [1 + 0.5 * 2 + 0.25 * 8, 2 + 0.5 * 4 + 0.25 * 16, 4 + 0.5 * 16, None]),
        (False, 2, [1 - 0.5 * 2 + 0.25 * 8, 2 - 0.5 * 4 + 0.25 * 16, 4 - 0.5 * 16, None]),
    ],
)
def test_the_oracle_by_hand(terminated: bool, players: int, values: list[float | None]) -> None:
    """Three steps with rewards 1, 2, 4, each in a state worth 8, n-step 2; what they end in is worth 16, or 0."""
    episode = Episode(0, [{"reward": reward} for reward in (1.0, 2.0, 4.0)], terminated, True)
    constants = {"unroll": 3, "n": 2, "gamma": 0.5, "players": players}
    lessons = naive_targets(episode, 0, **constants, value=lambda step: 8.0, value_after=lambda step: 16.0)
    assert [lesson["value"] for lesson in lessons] == values


ACTED, FINAL = 3.0, -2.0  # values that a network gives states that were acted in, and the one that came last


def one_episode(learner: Any, rewards: list[float], end: str) -> Any:
    """A replay of one episode that ended thus, or still runs; observations are [0, t]. The target network's values are
    ACTED and FINAL, those of searches -1."""
    replay, length = new_replay(learner, 1), len(rewards)
    for t, reward in enumerate(rewards):
        flags = {flag: np.array([t == length - 1 and end == flag]) for flag in ("terminated", "truncated")}
        obs = np.array([[0, t], [0, t + 1]], np.float32)
        step = {"obs": obs[:1], "next_obs": obs[1:], "first": np.array([t == 0]), "action": np.array([0]), **flags}
        step |= {"reward": np.array([reward], np.float32), "root_value": np.array([-1.0], np.float32)}
        replay.add(step | {"policy": np.full((1, NUM_ACTIONS), 1 / 3, np.float32)})

    def values(obs: Array) -> Array:
        return np.where(obs[:, 1] == length, np.float32(FINAL), np.float32(ACTED))

    learner.target_planner.values = values
    return replay


@pytest.mark.parametrize("bootstrap", ["target", "search"])
@pytest.mark.parametrize("players", [1, 2])
@pytest.mark.parametrize("end", ["terminated", "truncated", "runs"])
def test_the_reward_of_the_last_step_is_in_the_targets(end: str, players: int, bootstrap: str) -> None:
    """Rewards 0, 0, 0, 1: beyond a termination there is nothing, beyond any other step the value of what it led to."""
    gamma = 0.9 if players == 1 else -0.9
    learner = make("muzero", PLAIN if players == 1 else DUEL, n_step=10, bootstrap=bootstrap)
    replay = one_episode(learner, [0.0, 0.0, 0.0, 1.0], end)
    batch = learner.targets(replay, np.flatnonzero(replay.valid))
    end_value = 1.0 if end == "terminated" else 1.0 + gamma * FINAL
    returns = [gamma**3 * end_value, gamma**2 * end_value, gamma * end_value, end_value]
    assert batch["value"][0].tolist() == pytest.approx(returns)
    assert batch["value"][:, 0].tolist() == pytest.approx(returns)
    # The step after the last one: worth 0 and known after a termination, not taught otherwise.
    assert batch["value"][1, 3] == 0
    assert batch["value_mask"][1].tolist() == [1, 1, 1, end == "terminated"]
    assert batch["policy_mask"][1].tolist() == [1, 1, 1, 0]
    assert batch["reward_mask"][1].tolist() == [1, 1, 1]
    assert batch["reward_mask"][2].tolist() == [1, 1, end == "terminated"]
    assert batch["reward"][1].tolist() == [0, 0, 1]


@pytest.mark.parametrize(("bootstrap", "inside"), [("target", ACTED), ("search", -1.0)])
def test_fewer_steps_than_are_left_bootstrap_inside_the_episode(bootstrap: str, inside: float) -> None:
    learner = make("muzero", n_step=2, bootstrap=bootstrap)
    replay = one_episode(learner, [0.0, 0.0, 0.0, 1.0], "truncated")
    value = learner.targets(replay, np.flatnonzero(replay.valid)[:1])["value"][0]
    last = 1 + 0.9 * FINAL
    assert value.tolist() == pytest.approx([0.81 * inside, 0.81 * inside, 0.9 * last, last])


def test_steps_to_bootstrap_may_differ_between_sequences() -> None:
    learner = make("efficientzero", n_step=3)
    learner.steps_to_bootstrap = lambda replay, index: np.array([3, 1, 2, 2])
    replay = one_episode(learner, [0.0, 0.0, 0.0, 1.0], "truncated")
    value = learner.targets(replay, np.flatnonzero(replay.valid))["value"][:, 0]
    last = 1 + 0.9 * FINAL
    assert value.tolist() == pytest.approx([0.729 * ACTED, 0.9 * ACTED, 0.9 * last, last])


def test_beyond_an_end_any_action_is_played() -> None:
    for spaces in (PLAIN, TORQUE):
        learner = make("muzero", spaces)
        diary = played(learner, ends="terminated")
        index = all_places(diary)
        anything = []
        for _ in range(20):
            batch = learner.targets(diary.replay, index)
            beyond = (batch["reward_mask"] == 1) & (batch["policy_mask"][:, :-1] == 0)
            anything.append(batch["action"][beyond])
        drawn = np.concatenate(anything)
        assert len(drawn) > 1000
        if spaces is PLAIN:
            assert np.bincount(drawn, minlength=NUM_ACTIONS) / len(drawn) == pytest.approx([1 / 3] * 3, abs=0.05)
        else:
            assert drawn.shape[1:] == (2,)
            assert drawn.dtype == np.float32
            assert np.abs(drawn).max() <= 1
            assert drawn.mean(0) == pytest.approx([0, 0], abs=0.05)
            assert drawn.std(0) == pytest.approx([3**-0.5] * 2, abs=0.03)


@pytest.mark.parametrize("bootstrap", ["target", "search"])
def test_continuous_actions_come_with_their_candidates(bootstrap: str) -> None:
    learner = make("muzero", TORQUE, n_step=2, bootstrap=bootstrap)
    diary = played(learner)
    index = all_places(diary)
    batch = learner.targets(diary.replay, index)
    assert_taught(batch, expected(learner, diary, index))
    for b, (episode, t) in enumerate(diary.at(index)):
        for k, step in enumerate(episode.steps[t : t + K + 1]):
            np.testing.assert_array_equal(batch["policy"][b, k], step["policy"])
            np.testing.assert_array_equal(batch["candidates"][b, k], step["candidates"])


def test_masked_boards_are_learned_whole() -> None:
    learner = make("muzero", BOARD, n_step=4, value_limit=0, reward_limit=0)
    diary = played(learner)
    index = all_places(diary)
    batch = learner.targets(diary.replay, index)
    whole = batch.pop("obs")
    for b, (episode, t) in enumerate(diary.at(index)):
        for key, x in episode.steps[t]["obs"].items():
            np.testing.assert_array_equal(whole[key][b], x)
    taught = expected(learner, diary, index)
    for row in taught:
        row[0]["step"]["obs"] = 0.0
    assert_taught(batch | {"obs": np.zeros(len(index))}, taught)


QUIET: dict[str, dict[str, Any]] = {
    "muzero": {"root_exploration_fraction": 0.0},
    "gumbel_muzero": {"temperature": 0.0},
    "efficientzero": {"root_exploration_fraction": 0.0},
}


def renewed(learner: Any, diary: Diary, index: Array) -> Array:
    """[B, K + 1] which known policies are not those that were stored; each is that, or the target network's now."""
    before = {key: column.copy() for key, column in diary.replay.columns.items()}
    batch = learner.targets(diary.replay, index)
    for key, column in before.items():
        np.testing.assert_array_equal(diary.replay.columns[key], column)  # what is stored stays
    fresh = np.zeros((len(index), K + 1), bool)
    for b, (episode, t) in enumerate(diary.at(index)):
        for k, step in enumerate(episode.steps[t : t + K + 1]):
            fresh[b, k] = not np.array_equal(batch["policy"][b, k], step["policy"])
            obs = step["obs"]
            if fresh[b, k]:
                if "now" not in step:
                    step["now"] = plan_anew(learner, learner.target_model, alone(obs))[0]
                np.testing.assert_allclose(batch["policy"][b, k], step["now"], atol=1e-5)
                if isinstance(obs, dict):
                    assert (batch["policy"][b, k][obs["action_mask"] == 0] == 0).all()
    return fresh


@pytest.mark.parametrize("spaces", [PLAIN, BOARD], ids=["plain", "board"])
@pytest.mark.parametrize("algo", ["muzero", "gumbel_muzero", "efficientzero"])
def test_policies_are_searched_anew_by_the_target_network(algo: str, spaces: Spaces) -> None:
    limits = {"value_limit": 0, "reward_limit": 0} if spaces is BOARD else {}
    learner = make(algo, spaces, reanalyse_ratio=1.0, **QUIET[algo], **limits)
    diary = played(learner, 30)
    index = all_places(diary)
    fresh = renewed(learner, diary, index)
    for row, (episode, t) in zip(fresh, diary.at(index), strict=True):
        assert row.tolist() == [t + k < len(episode.steps) for k in range(K + 1)]
    obs = learner.targets(diary.replay, index)["obs"]
    ours, theirs = (plan_anew(learner, model, obs) for model in (learner.model, learner.target_model))
    assert (np.abs(ours - theirs).max(1) > 0.1).mean() > 0.1  # the two networks can be told apart


@pytest.mark.parametrize("algo", QUIET)
def test_they_are_searched_with_the_noise_of_play(algo: str) -> None:
    loud = dict.fromkeys(QUIET[algo], 1.0)
    for numbers, alike in ((QUIET[algo], True), (loud, False)):
        learner = make(algo, reanalyse_ratio=1.0, **numbers)
        diary = played(learner)
        index = all_places(diary)
        first, second = (learner.targets(diary.replay, index)["policy"] for _ in range(2))
        assert np.allclose(first, second) == alike


def test_some_sequences_are_searched_anew_and_those_wholly() -> None:
    learner = make("muzero", reanalyse_ratio=0.3, **QUIET["muzero"])
    diary = played(learner)
    index = np.tile(all_places(diary), 5)
    fresh = renewed(learner, diary, index)
    for row, (episode, t) in zip(fresh, diary.at(index), strict=True):
        left = min(len(episode.steps) - t, K + 1)
        assert row.tolist() in ([False] * (K + 1), [True] * left + [False] * (K + 1 - left))
    assert fresh[:, 0].mean() == pytest.approx(0.3, abs=4 * (0.21 / len(index)) ** 0.5)
    assert not renewed(make("muzero"), diary, index).any()


def test_candidates_are_drawn_anew_with_their_policies() -> None:
    learner = make("gumbel_muzero", TORQUE, reanalyse_ratio=0.5)
    diary = played(learner)
    index = all_places(diary)
    batch = learner.targets(diary.replay, index)
    fresh = []
    for b, (episode, t) in enumerate(diary.at(index)):
        for k, step in enumerate(episode.steps[t : t + K + 1]):
            kept = [np.array_equal(batch[key][b, k], step[key]) for key in ("policy", "candidates")]
            assert kept[0] == kept[1]
            fresh.append(not kept[0])
    assert 0.3 < np.mean(fresh) < 0.7
    assert batch["policy"].sum(-1)[batch["policy_mask"] == 1] == pytest.approx(1, rel=1e-5)


def test_reanalysis_leaves_values_and_rewards_alone() -> None:
    batches = []
    for ratio in (0.0, 1.0):
        learner = make("muzero", reanalyse_ratio=ratio)
        diary = played(learner)
        batches.append(learner.targets(diary.replay, all_places(diary)))
    for key in ("value", "reward", "value_mask", "policy_mask", "reward_mask"):
        np.testing.assert_array_equal(batches[0][key], batches[1][key])


@every_end
@pytest.mark.parametrize("decay", [7, 20, 1000])
def test_old_experience_bootstraps_earlier(ends: str, decay: int) -> None:
    learner = make("efficientzero", n_step=5, n_step_decay=decay)
    diary = played(learner, ends=ends)
    index = all_places(diary)

    def shrunk(episode: Episode, t: int) -> int:
        return max(1, 5 - diary.age(episode, t) // decay)

    used = {shrunk(*place) for place in diary.at(index)}
    assert used == {7: {1, 2, 3, 4, 5}, 20: {1, 2, 3, 4, 5}, 1000: {5}}[decay]
    assert_taught(learner.targets(diary.replay, index), expected(learner, diary, index, n=shrunk))


def test_the_observations_that_followed_are_there() -> None:
    """Beyond what is known of an episode, the first of the sequence stands in: others would enter batch statistics."""
    learner = make("efficientzero")
    diary = played(learner)
    index = all_places(diary)
    batch = learner.targets(diary.replay, index)
    following = batch["next_obs"].reshape(len(index), K, -1)
    for b, (episode, t) in enumerate(diary.at(index)):
        known = episode.steps[t + 1 : t + K + 1]
        for k, step in enumerate([*known, *[episode.steps[t]] * (K - len(known))]):
            np.testing.assert_array_equal(following[b, k], step["obs"])


@pytest.mark.parametrize("horizon", [1, 2, 3, 5])
def test_value_prefixes_begin_anew_with_the_lstm(horizon: int) -> None:
    learner = make("efficientzero", lstm_horizon=horizon)
    diary = played(learner, ends="terminated")
    index = all_places(diary)
    batch = learner.targets(diary.replay, index)
    prefixes = value_prefixes(torch.from_numpy(batch["reward"]), learner.hp.lstm_horizon).numpy()
    assert prefixes.shape == (len(index), K)
    for b, (episode, t) in enumerate(diary.at(index)):
        total = 0.0
        for k in range(K):
            step = episode.steps[t + k] if t + k < len(episode.steps) else None
            total = (0.0 if k % horizon == 0 else total) + (float(step["reward"]) if step else 0.0)
            if batch["reward_mask"][b, k]:
                assert prefixes[b, k] == pytest.approx(total, rel=1e-5, abs=1e-6)


def test_targets_move_nothing() -> None:
    """Neither the networks nor the replay; the generator is the learner's own."""
    learner = make("efficientzero", reanalyse_ratio=1.0)
    diary = played(learner)
    state = {key: x.clone() for key, x in learner.model.state_dict().items()}
    target = {key: x.clone() for key, x in learner.target_model.state_dict().items()}
    priority = diary.replay.priorities.priority.copy()
    learner.targets(diary.replay, all_places(diary))
    assert all(torch.equal(x, learner.model.state_dict()[key]) for key, x in state.items())
    assert all(torch.equal(x, learner.target_model.state_dict()[key]) for key, x in target.items())
    np.testing.assert_array_equal(diary.replay.priorities.priority, priority)
