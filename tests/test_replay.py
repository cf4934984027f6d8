"""A replay gives what a slow one that keeps whole observations would give, of exactly the steps that it should hold."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_replay import Ends, Make, NaiveReplay, Transition, frame, new_replay, parts, stream, vector
from rl_training.data.batch import tree_map
from rl_training.data.replay import Replay
from rl_training.types import Array, Batch

GAMMA = 0.9


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    return [leaf for branch in tree for leaf in leaves(branch)] if isinstance(tree, list) else [tree]


def row(tree: Any, i: int) -> Any:
    return tree_map(lambda x: x[i].numpy(), tree)


def names(batch: Batch) -> Array:
    """The number of the step that each row was drawn from."""
    return batch["action"].reshape(len(batch["action"]), -1)[:, 0].numpy().astype(np.int64)


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_equal(actual[key], value)
    else:
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual, expected)


def draw_all(replay: Replay, rng: np.random.Generator, **how: Any) -> dict[int, dict[str, Any]]:
    """Every transition that can be drawn, by its number (the chance to miss one is e^-50)."""
    batch = replay.sample(50 * replay.size, rng, **how)
    numbers, first = np.unique(names(batch), return_index=True)
    assert len(set(zip(names(batch).tolist(), batch["index"].tolist(), strict=True))) == len(numbers)
    assert len(np.unique(batch["index"].numpy())) == len(numbers)
    return {int(number): {key: row(x, i) for key, x in batch.items()} for number, i in zip(numbers, first, strict=True)}


def assert_holds(replay: Replay, naive: NaiveReplay, *, n_step: int = 1, gamma: float = GAMMA) -> None:
    """Exactly the expected transitions, each with every field exact (sums up to float32's rounding)."""
    expected = {t.name: t for t in naive.drawable()}
    assert replay.size == len(expected)
    if not expected:
        return
    found = draw_all(replay, np.random.default_rng(7), gamma=gamma, n_step=n_step)
    assert set(found) == set(expected)
    for number, got in found.items():
        want = naive.sampled(expected[number], gamma=gamma, n_step=n_step)
        for key in ("obs", "action", "next_obs"):
            assert_equal(got[key], want[key])
        assert got["reward"].dtype == got["discount"].dtype == np.float32
        assert got["reward"] == pytest.approx(want["reward"], rel=1e-6, abs=1e-6)
        assert got["discount"] == np.float32(want["discount"])


def both(replay: Replay, naive: NaiveReplay, steps: Any) -> None:
    for step in steps:
        naive.add(step)
        replay.add(step)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("make", [vector, parts], ids=["vector", "dict"])
def test_every_step_is_what_it_was_through_many_turns_of_the_ring(num_envs: int, make: Make) -> None:
    kind: dict[str, Any] = {"make": make, "continuous": make is parts}
    replay, naive = new_replay(40, num_envs, **kind), NaiveReplay(40, num_envs)  # 40 is no multiple of 3
    steps = stream(num_envs, **kind)
    for count in (1, 1, 5, 20, 30, 7, 300, 1, 1, 900):
        both(replay, naive, islice(steps, count))
        assert_holds(replay, naive)
    assert replay.added == sum(t is not None for rows in naive.rows for t in rows)


@pytest.mark.parametrize("n_step", [1, 2, 3, 5])
@pytest.mark.parametrize("ends", [Ends(), Ends(0, 0.3), Ends(0.3, 0), Ends(0.03, 0.03)], ids=str)
def test_rewards_of_n_steps_are_summed_up_to_the_end_of_the_episode(n_step: int, ends: Ends) -> None:
    replay, naive = new_replay(64, 2), NaiveReplay(64, 2)
    steps = stream(2, ends=ends)
    for count in (3, 40, 50):
        both(replay, naive, islice(steps, count))
        for gamma in (0.9, 1.0, 0.0):
            assert_holds(replay, naive, n_step=n_step, gamma=gamma)


@pytest.mark.parametrize("frame_stack", [2, 4])
@pytest.mark.parametrize("ends", [Ends(), Ends(0.02, 0.02), Ends(0.5, 0.3)], ids=str)
def test_stacks_are_rebuilt_from_single_frames(frame_stack: int, ends: Ends) -> None:
    shape = {"frame_stack": frame_stack}
    replay, naive = new_replay(50, 2, make=frame, **shape), NaiveReplay(50, 2, **shape)
    steps = stream(2, make=frame, ends=ends, **shape)
    for count in (1, 1, 1, 1, 20, 7, 25, 3, 200, 501):
        both(replay, naive, islice(steps, count))
        for n_step in (1, 3):
            assert_holds(replay, naive, n_step=n_step)


@given(
    num_envs=st.integers(1, 4),
    capacity=st.integers(1, 60),
    frame_stack=st.sampled_from([1, 2, 4]),
    n_step=st.integers(1, 5),
    ends=st.builds(Ends, *[st.sampled_from([0.0, 0.05, 0.5])] * 4),
    seed=st.integers(0, 99),
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_stream_in_any_ring(
    num_envs: int, capacity: int, frame_stack: int, n_step: int, ends: Ends, seed: int, counts: list[int]
) -> None:
    replay = new_replay(capacity, num_envs, make=frame, frame_stack=frame_stack)
    naive = NaiveReplay(capacity, num_envs, frame_stack)
    steps = stream(num_envs, seed=seed, make=frame, frame_stack=frame_stack, ends=ends)
    for count in counts:
        both(replay, naive, islice(steps, count))
        assert_holds(replay, naive, n_step=n_step)


@pytest.mark.parametrize("make", [lambda rng, k: np.array([k, -k], np.float64), lambda rng, k: np.array(k, np.int32)])
def test_observations_keep_their_type(make: Make) -> None:
    replay, naive = new_replay(30, 2, make=make), NaiveReplay(30, 2)
    both(replay, naive, islice(stream(2, make=make), 50))
    assert_holds(replay, naive)


def test_an_episode_that_began_before_the_replay_is_held_from_where_it_is_seen() -> None:
    for frame_stack in (1, 4):
        replay, naive = new_replay(30, 2, make=frame, frame_stack=frame_stack), NaiveReplay(30, 2, frame_stack)
        steps = stream(2, make=frame, frame_stack=frame_stack, ends=Ends(0, 0.1))
        next(steps)
        both(replay, naive, islice(steps, 9))
        assert_holds(replay, naive, n_step=2)


def test_an_episode_that_is_gone_counts_as_truncated() -> None:
    replay, naive = new_replay(60, 2), NaiveReplay(60, 2)
    both(replay, naive, islice(stream(2, ends=Ends(0, 0, 0, cut=0.3)), 40))
    assert sum(t.truncated for t in naive.drawable()) > 5
    assert_holds(replay, naive, n_step=5)


def arrays_of(thing: Any) -> list[Array]:
    """Every array that an object keeps."""
    values = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    found = [x for value in values for x in leaves(value)]
    return [x for x in found if isinstance(x, np.ndarray)]


def test_every_frame_is_stored_once() -> None:
    def make(rng: np.random.Generator, number: int) -> Array:
        return np.full((40, 50), number % 256, np.uint8)

    replay = new_replay(1000, 2, make=make, frame_stack=4)
    for step in islice(stream(2, make=make, frame_stack=4, ends=Ends(0.01, 0.01)), 400):
        replay.add(step)
    held = sum(x.nbytes for x in leaves(replay.state_dict()) if isinstance(x, np.ndarray))
    assert 800 * 2000 < held < 1000 * 2100
    assert sum(x.nbytes for x in arrays_of(replay.ring)) < 3 * 1000 * 2100


def counts_of(replay: Replay, batches: int, batch_size: int, **how: Any) -> dict[int, int]:
    rng = np.random.default_rng(3)
    drawn = [names(replay.sample(batch_size, rng, gamma=GAMMA, **how)) for _ in range(batches)]
    numbers, counts = np.unique(np.concatenate(drawn), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def assert_frequencies(counts: dict[int, int], probability: dict[int, float]) -> None:
    total = sum(counts.values())
    assert set(counts) <= set(probability)
    for number, p in probability.items():
        assert counts.get(number, 0) == pytest.approx(total * p, abs=5 * np.sqrt(total * p * (1 - p)) + 1e-9)


def test_uniform_draws_are_uniform_whatever_the_environments_hold() -> None:
    replay, naive = new_replay(40, 2), NaiveReplay(40, 2)
    rare = stream(2, ends=Ends(0.3, 0.3))
    for step in islice(rare, 200):
        step["terminated"][0] = step["truncated"][0] = False  # one environment's rows are nearly all steps
        step["first"][0] = replay.added == 0
        step["live"] = np.array([True, step.get("live", [True, True])[1]])
        both(replay, naive, [step])
    held = naive.drawable()
    assert sum(t.env == 0 for t in held) > 1.3 * sum(t.env == 1 for t in held)
    counts = counts_of(replay, 100, 1000)
    assert_frequencies(counts, {t.name: 1 / len(held) for t in held})
    expected = 100_000 / len(held)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(chi_square - (len(held) - 1)) < 5 * np.sqrt(2 * len(held))


class Priorities:
    """Sets random priorities on all that a replay holds, and knows what they make of the probabilities."""

    def __init__(self, replay: Replay, naive: NaiveReplay, *, exponent: float) -> None:
        self.replay, self.naive, self.exponent = replay, naive, exponent
        self.values: dict[int, float] = {}
        self.largest = 1.0

    def index(self) -> dict[int, int]:
        found = draw_all(self.replay, np.random.default_rng(1), gamma=GAMMA)
        return {number: int(entry["index"]) for number, entry in found.items()}

    def set(self, index: dict[int, int], priority: Array) -> None:
        self.replay.set_priorities(np.array(list(index.values())), priority)
        self.values.update(zip(index, priority.tolist(), strict=True))
        self.largest = max(self.largest, float(priority.max()))

    def see_new(self) -> None:
        """Whatever is drawable and was not before entered with the largest priority so far."""
        for t in self.naive.drawable():
            self.values.setdefault(t.name, self.largest)

    def probability(self) -> dict[int, float]:
        power = {t.name: self.values[t.name] ** self.exponent for t in self.naive.drawable()}
        return {number: p / sum(power.values()) for number, p in power.items()}


def prioritized(exponent: float = 0.6, steps: int = 70) -> tuple[Replay, NaiveReplay, Priorities, Any]:
    replay, naive = new_replay(50, 2, prioritized=True), NaiveReplay(50, 2)
    assert replay.priorities is not None
    replay.priorities.use_exponent(exponent)
    endless = stream(2)
    both(replay, naive, islice(endless, steps))
    priorities = Priorities(replay, naive, exponent=exponent)
    priorities.see_new()
    return replay, naive, priorities, endless


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_draws_follow_the_priorities(exponent: float) -> None:
    replay, _, priorities, _ = prioritized(exponent)
    index = priorities.index()
    priorities.set(index, np.random.default_rng(2).exponential(2.0, len(index)).astype(np.float32))
    assert_frequencies(counts_of(replay, 300, 256), priorities.probability())


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_undo_the_priorities(beta: float) -> None:
    replay, naive, priorities, _ = prioritized()
    index = priorities.index()
    priorities.set(index, np.random.default_rng(2).exponential(2.0, len(index)).astype(np.float32) + 0.01)
    batch = replay.sample(16, np.random.default_rng(0), gamma=GAMMA, beta=beta)
    probability = np.array([priorities.probability()[number] for number in names(batch).tolist()])
    weight = (len(naive.drawable()) * probability) ** -beta
    assert batch["weight"].dtype == torch.float32
    np.testing.assert_allclose(batch["weight"], weight / weight.max(), rtol=1e-5)
    assert "weight" not in uniform_batch()


def uniform_batch() -> Batch:
    replay = new_replay(10, 1)
    for step in islice(stream(1), 5):
        replay.add(step)
    return replay.sample(4, np.random.default_rng(0), gamma=GAMMA)


def test_draws_are_stratified() -> None:
    replay, _, priorities, _ = prioritized()
    index = priorities.index()
    priorities.set(index, np.random.default_rng(2).exponential(2.0, len(index)).astype(np.float32))
    rng = np.random.default_rng(5)
    for _ in range(50):
        drawn = names(replay.sample(512, rng, gamma=GAMMA))
        for number, p in priorities.probability().items():
            assert abs((drawn == number).sum() - 512 * p) < 2 + 1e-6


def test_new_steps_get_the_largest_priority_so_far() -> None:
    replay, _, priorities, endless = prioritized(steps=5)
    assert_frequencies(counts_of(replay, 100, 100), priorities.probability())
    index = priorities.index()
    priorities.set(index, np.linspace(0.5, 7.0, len(index)).astype(np.float32))
    priorities.set(index, np.full(len(index), 0.25, np.float32))
    both(replay, priorities.naive, islice(endless, 3))
    priorities.see_new()
    assert priorities.largest == 7
    assert_frequencies(counts_of(replay, 200, 256), priorities.probability())


def test_what_was_overwritten_is_never_drawn_again() -> None:
    replay, naive, priorities, endless = prioritized()
    for count in (1, 3, 10, 26, 60):
        index = priorities.index()
        both(replay, naive, islice(endless, count))
        replay.set_priorities(np.array(list(index.values())), np.full(len(index), 1000.0))
        expected = {t.name for t in naive.drawable()}
        assert replay.size == len(expected)
        assert set(counts_of(replay, 20, 512)) <= expected
        drawn = replay.sample(4096, np.random.default_rng(0), gamma=GAMMA)["index"].numpy()
        replay.set_priorities(drawn, np.ones(4096))
    both(replay, naive, islice(endless, 100))
    index = priorities.index()
    assert set(index) == {t.name for t in naive.drawable()}


def test_a_priority_of_zero_is_never_drawn() -> None:
    replay, _, priorities, _ = prioritized()
    index = priorities.index()
    dull = dict(list(index.items())[::2])
    priorities.set(dull, np.zeros(len(dull), np.float32))
    assert not set(counts_of(replay, 50, 512)) & set(dull)
    assert_frequencies(counts_of(replay, 50, 512), priorities.probability())


class Scaling:
    """Not linear, so that it matters what exactly is scaled."""

    def observation(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            return {key: self.observation(x) for key, x in obs.items()}
        return (obs * np.float32(0.5) + np.float32(1)).astype(np.float32)

    def scale_reward(self, reward: Array) -> Array:
        return np.clip(reward * np.float32(2), np.float32(-1), np.float32(1))


@pytest.mark.parametrize("case", [(vector, 1), (parts, 1), (frame, 4)], ids=["vector", "dict", "frames"])
def test_what_is_sampled_is_scaled_and_what_is_stored_is_not(case: tuple[Make, int]) -> None:
    make, frame_stack = case
    shape, scaling = {"frame_stack": frame_stack}, Scaling()
    replay, naive = new_replay(60, 2, make=make, scaling=scaling, **shape), NaiveReplay(60, 2, **shape)
    both(replay, naive, islice(stream(2, make=make, **shape), 80))
    plain = new_replay(60, 2, make=make, **shape)
    plain.load_state_dict(replay.state_dict())
    assert_holds(plain, naive)
    for t in (t for rows in naive.rows for t in rows if isinstance(t, Transition)):
        t.obs, t.next_obs = scaling.observation(t.obs), scaling.observation(t.next_obs)
        t.reward = float(scaling.scale_reward(np.float32(t.reward)))
    assert_holds(replay, naive, n_step=3)


def test_steps_are_copied_and_samples_are_the_callers() -> None:
    replay, naive = new_replay(20, 1), NaiveReplay(20, 1)
    both(replay, naive, islice(stream(1), 30))
    batch = replay.sample(64, np.random.default_rng(0), gamma=GAMMA)
    for x in leaves(batch):
        x.fill_(0)
    assert_holds(replay, naive)


def test_the_same_generator_draws_the_same() -> None:
    replays: list[Replay] = []
    for _ in range(2):
        replay = new_replay(20, 2)
        for step in islice(stream(2), 30):
            replay.add(step)
        replays.append(replay)
    first, second = (r.sample(32, np.random.default_rng(4), gamma=GAMMA, n_step=2) for r in replays)
    assert set(first) >= {"obs", "action", "reward", "discount", "next_obs", "index"}
    for key, x in first.items():
        assert torch.equal(x, second[key])
    assert first["index"].dtype == torch.int64
    other = replays[0].sample(32, np.random.default_rng(5), gamma=GAMMA)
    assert not torch.equal(first["index"], other["index"])


def naive_sequence(naive: NaiveReplay, start: Transition, length: int) -> list[Transition]:
    """The step and those that followed in its episode, as far as they are known."""
    rows = naive.rows[start.env]
    at = next(i for i, row in enumerate(rows) if row is start)
    known: list[Transition] = []
    for t in rows[at : at + length]:
        if t is None:
            break
        known.append(t)
    return known


def assert_sequences(replay: Replay, naive: NaiveReplay, length: int) -> None:
    index = np.random.default_rng(1).permutation(np.flatnonzero(replay.valid))
    by_name = {t.name: t for t in naive.drawable()}
    starts = [by_name[int(x.reshape(-1)[0])] for x in replay.columns["action"][index]]
    got = replay.sequences(index, length)
    assert got["place"].shape == got["reward"].shape == (*got["terminated"].shape[:1], length)
    np.testing.assert_array_equal(got["place"][:, 0], index)
    for b, start in enumerate(starts):
        known = naive_sequence(naive, start, length)
        assert got["steps"][b] == len(known) >= 1
        assert got["terminated"][b] == known[-1].terminated
        for key in ("action", "reward"):
            wanted = np.array([getattr(t, key) for t in known], got[key].dtype)
            np.testing.assert_array_equal(got[key][b, : len(known)], wanted)
        seen = replay.observations(got["place"][b, : len(known)])
        for i, t in enumerate(known):
            assert_equal(tree_map(lambda x, i=i: x[i], seen), t.obs)


def assert_histories(replay: Replay, naive: NaiveReplay, count: int) -> None:
    """Of every step that can be drawn, and of the observations that episodes ended with or are at now."""
    by_name = {t.name: t for t in naive.drawable()}
    drawable = {id(t) for t in by_name.values()}
    index = np.random.default_rng(1).permutation(np.flatnonzero(replay.valid))
    steps = [by_name[int(x.reshape(-1)[0])] for x in replay.columns["action"][index]]
    for offset in (0, 1):  # the places of the steps themselves, and of what they led to
        got = replay.history(replay.ring.after(index, offset), count)
        assert got["action"].shape[:2] == (len(index), count)
        for b, step in enumerate(steps):
            rows = naive.rows[step.env]
            at = next(i for i, row in enumerate(rows) if row is step) + offset
            known: list[Transition] = []
            for t in reversed(rows[max(0, at - count) : at]):
                if t is None or id(t) not in drawable:
                    break
                known.insert(0, t)
            assert got["length"][b] == len(known)
            assert not offset or known[-1] is step
            for i, t in enumerate(known, start=count - len(known)):
                np.testing.assert_array_equal(got["action"][b, i], t.action)
                assert_equal(tree_map(lambda x, b=b, i=i: x[b, i], got["obs"]), t.obs)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("ends", [Ends(), Ends(0, 0.3), Ends(0.02, 0.02), Ends(0, 0, cut=0.1)], ids=str)
def test_histories_go_back_to_the_beginning_of_the_episode(count: int, ends: Ends) -> None:
    for make, frame_stack, num_envs in ((vector, 1, 1), (parts, 1, 3), (frame, 4, 2)):
        kind = {"make": make, "continuous": make is parts, "frame_stack": frame_stack}
        replay, naive = new_replay(60, num_envs, **kind), NaiveReplay(60, num_envs, frame_stack)
        steps = stream(num_envs, ends=ends, **kind)
        for amount in (1, 3, 40, 150):
            both(replay, naive, islice(steps, amount))
            assert_histories(replay, naive, count)


@pytest.mark.parametrize("length", [1, 2, 6, 30])
@pytest.mark.parametrize("ends", [Ends(), Ends(0, 0.3), Ends(0.3, 0), Ends(0.02, 0.02), Ends(0, 0, cut=0.1)], ids=str)
def test_sequences_go_on_to_the_end_of_what_is_known(length: int, ends: Ends) -> None:
    for make, frame_stack, num_envs in ((vector, 1, 1), (parts, 1, 3), (frame, 4, 2)):
        kind = {"make": make, "continuous": make is parts, "frame_stack": frame_stack}
        replay, naive = new_replay(60, num_envs, **kind), NaiveReplay(60, num_envs, frame_stack)
        steps = stream(num_envs, ends=ends, **kind)
        for count in (1, 3, 40, 150):
            both(replay, naive, islice(steps, count))
            assert_sequences(replay, naive, length)


def test_sequences_are_scaled_like_samples() -> None:
    scaling = Scaling()
    replay, naive = new_replay(60, 2, scaling=scaling), NaiveReplay(60, 2)
    both(replay, naive, islice(stream(2), 80))
    for t in (t for rows in naive.rows for t in rows if isinstance(t, Transition)):
        t.obs, t.reward = scaling.observation(t.obs), float(scaling.scale_reward(np.float32(t.reward)))
    assert_sequences(replay, naive, 5)


def test_sequences_hold_every_column_and_are_the_callers() -> None:
    replay = new_replay(40, 2)
    for step in islice(stream(2), 30):
        replay.add(step)
    index = np.flatnonzero(replay.valid)[:7]
    before = {name: column.copy() for name, column in replay.columns.items()}
    got = replay.sequences(index, 4)
    assert got.keys() == replay.columns.keys() - {"first"} | {"place", "steps"}
    for name, x in got.items():
        if name in before and name != "terminated":
            np.testing.assert_array_equal(x[:, 0], before[name][index])
        x[...] = 0
    for name, column in before.items():
        np.testing.assert_array_equal(replay.columns[name], column)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_age_counts_env_steps_where_no_episode_ends(num_envs: int) -> None:
    replay = new_replay(60, num_envs)
    for step in islice(stream(num_envs, ends=Ends(0, 0, 0)), 100):
        replay.add(step)
    index = np.flatnonzero(replay.valid)
    step_of = replay.columns["action"][index] // num_envs  # streams number their actions, from num_envs on
    np.testing.assert_array_equal(replay.age(index), (101 - step_of) * num_envs)


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_age_is_at_most_off_by_the_rows_that_episodes_take(frame_stack: int) -> None:
    shape = {"frame_stack": frame_stack}
    replay, naive = new_replay(90, 2, make=frame, **shape), NaiveReplay(90, 2, **shape)
    steps = stream(2, make=frame, **shape)
    for count in (1, 10, 30, 200):
        both(replay, naive, islice(steps, count))
        index = np.flatnonzero(replay.valid)
        by_name = {t.name: t for t in naive.drawable()}
        for age, name in zip(replay.age(index), replay.columns["action"][index], strict=True):
            start = by_name[int(name)]
            rows = naive.rows[start.env]
            since = rows[next(i for i, row in enumerate(rows) if row is start) :]
            made = 2 * sum(t is not None for t in since)
            ended = sum(t is None for t in since)  # each end, and the frames before a beginning; or the row to come
            assert made <= age <= made + 2 * ended


def test_an_exponent_may_change_at_every_draw() -> None:
    """Without one the last is kept; what is added, set and removed meanwhile follows the one in force."""
    replay, naive, priorities, endless = prioritized(0.6)
    index = priorities.index()
    priorities.set(index, np.random.default_rng(2).exponential(2.0, len(index)).astype(np.float32) + 0.01)
    rng = np.random.default_rng(3)
    for exponent in (1.0, 0.0, 0.3, 0.0, 2.0, 0.6):
        replay.draw(4, rng, exponent=exponent)
        priorities.exponent = exponent
        assert_frequencies(counts_of(replay, 150, 256), priorities.probability())
        _, weight = replay.draw(64, rng, beta=1.0)
        assert weight is not None
        assert exponent > 0 or (weight == 1).all()
        both(replay, naive, islice(endless, 9))
        priorities.see_new()
        assert_frequencies(counts_of(replay, 150, 256), priorities.probability())
        some = dict(list(priorities.index().items())[::3])
        priorities.set(some, rng.exponential(2.0, len(some)).astype(np.float32) + 0.01)
        assert_frequencies(counts_of(replay, 150, 256), priorities.probability())
        assert set(counts_of(replay, 20, 512)) <= {t.name for t in naive.drawable()}


def test_weights_follow_the_exponent_of_their_draw() -> None:
    replay, naive, priorities, _ = prioritized(1.0)
    index = priorities.index()
    priorities.set(index, np.random.default_rng(2).exponential(2.0, len(index)).astype(np.float32) + 0.01)
    for exponent, beta in ((0.5, 1.0), (1.0, 0.4), (0.0, 0.7)):
        priorities.exponent = exponent
        batch = replay.sample(16, np.random.default_rng(0), gamma=GAMMA, beta=beta, exponent=exponent)
        probability = np.array([priorities.probability()[number] for number in names(batch).tolist()])
        weight = (len(naive.drawable()) * probability) ** -beta
        np.testing.assert_allclose(batch["weight"], weight / weight.max(), rtol=1e-5)


def test_an_exponent_is_saved_with_its_priorities() -> None:
    replay, _, priorities, _ = prioritized(0.6)
    index = priorities.index()
    priorities.set(index, np.random.default_rng(2).exponential(2.0, len(index)).astype(np.float32) + 0.01)
    replay.draw(4, np.random.default_rng(0), exponent=0.3)
    other = new_replay(50, 2, prioritized=True)
    other.load_state_dict(replay.state_dict())
    for exponent in (None, 0.3, 0.9):
        draws = [r.draw(64, np.random.default_rng(1), beta=0.5, exponent=exponent) for r in (replay, other)]
        for one, two in zip(*draws, strict=True):
            assert one is not None
            assert two is not None
            np.testing.assert_array_equal(one, two)
