"""Windows of consecutive rows, which may cross episodes, and columns that are written back."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_replay import Ends, Make, NaiveRows, Row, frame, new_replay, parts, stream, vector
from rl_training.data.batch import tree_map
from rl_training.data.replay import Replay
from rl_training.errors import InputError
from test_replay import Scaling, assert_equal, both, leaves
from test_replay_saving import through_a_file


def name_of(obs: Any) -> bytes:
    """Streams number their observations, and add noise: no two are equal."""
    parts = obs.values() if isinstance(obs, dict) else [obs]
    return b"".join(np.asarray(x).tobytes() for x in parts)


def starts_of(naive: NaiveRows, length: int) -> dict[bytes, tuple[int, list[Row]]]:
    found = {name_of(rows[0].obs): (env, rows) for env, rows in naive.windows(length)}
    assert len(found) == len(naive.windows(length))
    return found


def assert_window(got: dict[str, Any], b: int, rows: list[Row]) -> None:
    for k, row in enumerate(rows):
        assert_equal(tree_map(lambda x, k=k: np.asarray(x[b, k]), got["obs"]), row.obs)
        assert got["first"][b, k] == row.first
        assert got["step"][b, k] == row.step
        for name, value in row.columns.items():
            assert_equal(got[name][b, k], value)


def assert_windows(replay: Replay, naive: NaiveRows, length: int) -> None:
    """Exactly the expected windows are drawn (the chance to miss one is e^-30), each with every entry exact."""
    expected = starts_of(naive, length)
    rng = np.random.default_rng(7)
    if not expected:
        with pytest.raises(InputError, match=f"no environment has the {length} rows"):
            replay.windows(3, length, rng)
        return
    got = replay.windows(30 * len(expected), length, rng)
    assert got.keys() == replay.columns.keys() | {"obs", "step", "place"}
    assert got["first"].dtype == got["step"].dtype == bool
    assert got["place"].shape == got["step"].shape == (30 * len(expected), length)
    env, at = np.divmod(got["place"], replay.ring.length)
    assert (env == env[:, :1]).all()
    assert ((at[:, 1:] - at[:, :-1]) % replay.ring.length == 1).all()
    names = [name_of(tree_map(lambda x, b=b: x[b, 0], got["obs"])) for b in range(len(env))]
    assert set(names) == set(expected)
    for name, b in {name: b for b, name in enumerate(names)}.items():
        assert env[b, 0] == expected[name][0]
        assert_window(got, b, expected[name][1])


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("make", [vector, parts], ids=["vector", "dict"])
@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["host", "device"])
@pytest.mark.parametrize(
    "ends",
    [Ends(), Ends(0.3, 0), Ends(0, 0.3), Ends(0.02, 0.02), Ends(0, 0, cut=0.2), Ends(0.1, 0.1, cut=0.1)],
    ids=str,
)
def test_windows_are_all_runs_of_known_rows(num_envs: int, make: Make, device: torch.device | None, ends: Ends) -> None:
    kind: dict[str, Any] = {"make": make, "continuous": make is parts}
    replay, naive = new_replay(40, num_envs, **kind, device=device), NaiveRows(40, num_envs)
    steps = stream(num_envs, ends=ends, **kind)
    for count in (1, 1, 4, 13, 30, 1, 1, 150):  # past the end of the ring, more than once
        both(replay, naive, islice(steps, count))
        for length in (1, 2, 7):
            assert_windows(replay, naive, length)
    for x in leaves(replay.windows(2, 3, np.random.default_rng(0))["obs"]):
        assert isinstance(x, np.ndarray if device is None else torch.Tensor)


@given(
    num_envs=st.integers(1, 4),
    capacity=st.integers(1, 40),
    length=st.integers(1, 12),
    ends=st.builds(Ends, *[st.sampled_from([0.0, 0.05, 0.5])] * 4),
    seed=st.integers(0, 99),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_windows_of_any_stream_in_any_ring(
    num_envs: int, capacity: int, length: int, ends: Ends, seed: int, counts: list[int]
) -> None:
    replay, naive = new_replay(capacity, num_envs), NaiveRows(capacity, num_envs)
    steps = stream(num_envs, seed=seed, ends=ends)
    for count in counts:
        both(replay, naive, islice(steps, count))
        assert_windows(replay, naive, length)


def test_a_row_is_first_only_where_its_episode_begins() -> None:
    """Neither at the beginning of a window, nor where the replay began in the middle of an episode."""
    replay, naive, steps = new_replay(40, 2), NaiveRows(40, 2), stream(2, ends=Ends(0, 0, 0))
    next(steps)
    both(replay, naive, islice(steps, 9))
    assert_windows(replay, naive, 3)
    assert not replay.windows(50, 3, np.random.default_rng(0))["first"].any()


def uneven() -> tuple[Replay, NaiveRows]:
    """One environment's ring is full, one has a few rows, the last too few for windows of 5."""
    replay, naive = new_replay(90, 3), NaiveRows(90, 3)
    for number, step in enumerate(islice(stream(3, ends=Ends(0.1, 0.1, 0)), 100)):
        step["live"] = np.array([True, number < 9, number < 2])
        both(replay, naive, [step])
    return replay, naive


def test_all_windows_are_equally_likely_whatever_the_environments_hold() -> None:
    length = 5
    replay, naive = uneven()
    assert_windows(replay, naive, length)
    expected = starts_of(naive, length)
    per_env = [sum(env == i for env, _ in expected.values()) for i in range(3)]
    assert per_env[0] > 2 * per_env[1] > 0 == per_env[2]
    place = replay.windows(2000 * len(expected), length, np.random.default_rng(3))["place"][:, 0]
    _, counts = np.unique(place, return_counts=True)
    assert len(counts) == len(expected)
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert abs(chi_square - (len(counts) - 1)) < 5 * np.sqrt(2 * len(counts))


def test_windows_are_scaled_like_samples() -> None:
    scaling = Scaling()
    replay, naive = new_replay(40, 2, scaling=scaling), NaiveRows(40, 2)
    both(replay, naive, islice(stream(2), 60))
    for row in (row for rows in naive.rows for row in rows):
        row.obs = scaling.observation(row.obs)
        row.columns["reward"] = scaling.scale_reward(row.columns["reward"])
    assert_windows(replay, naive, 6)


def test_the_same_generator_draws_the_same_windows_which_are_the_callers() -> None:
    replay, naive = new_replay(40, 2), NaiveRows(40, 2)
    both(replay, naive, islice(stream(2), 60))
    first, second = (replay.windows(8, 4, np.random.default_rng(4)) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name])
        x[...] = 0
    assert_windows(replay, naive, 4)


@pytest.mark.parametrize("count", [1, 20, 77])
def test_windows_after_a_checkpoint(tmp_path: Path, count: int) -> None:
    replay, naive = new_replay(40, 2), NaiveRows(40, 2)
    both(replay, naive, islice(stream(2, ends=Ends(0.05, 0.05)), count))
    loaded = through_a_file(replay, tmp_path / "step_0", 40, 2)
    assert_windows(loaded, naive, 1)
    assert_windows(loaded, naive, 6)
    # Other environments: those that were in an episode could not be restored.
    for step in islice(stream(2, seed=1, ends=Ends(0.05, 0.05)), 30):
        both(loaded, naive, [step])
        assert_windows(loaded, naive, 4)
    truncated = [row for rows in naive.rows for row in rows if row.columns["truncated"]]
    assert truncated
    assert all(row.step for row in truncated)


def test_an_empty_replay_has_no_windows() -> None:
    with pytest.raises(
        InputError, match="no environment has the 2 rows of a window yet, the most is 0: add more steps"
    ):
        new_replay(40, 2).windows(4, 2, np.random.default_rng(0))


def test_windows_of_stacked_frames_are_refused() -> None:
    replay = new_replay(40, 2, make=frame, frame_stack=4)
    for step in islice(stream(2, make=frame, frame_stack=4), 20):
        replay.add(step)
    with pytest.raises(InputError, match=r"remove frame_stack from env_kwargs\.wrappers"):
        replay.windows(4, 2, np.random.default_rng(0))


def filled() -> Replay:
    replay = new_replay(40, 2, make=parts, continuous=True)
    for step in islice(stream(2, make=parts, continuous=True), 70):
        replay.add(step)
    return replay


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)], ids=str)
def test_columns_are_written_at_places_of_any_shape(shape: tuple[int, ...]) -> None:
    replay, rng = filled(), np.random.default_rng(0)
    before = {name: column.copy() for name, column in replay.columns.items()}
    places = rng.permutation(len(replay.valid))[: int(np.prod(shape))].reshape(shape)
    new = {
        "logprob": rng.standard_normal(shape, dtype=np.float32),
        "action": rng.standard_normal((*shape, 2), dtype=np.float32),
    }
    replay.put(places, **new)
    for name, column in replay.columns.items():
        if name in new:
            np.testing.assert_array_equal(column[places], new[name])
            before[name][places] = new[name]
        np.testing.assert_array_equal(column, before[name])


def test_windows_give_what_was_put_and_new_rows_do_not() -> None:
    """At last observations too, until the ring comes round: a row there is then zero again."""
    replay, steps, rng = new_replay(40, 2), stream(2), np.random.default_rng(0)
    for step in islice(steps, 60):
        replay.add(step)
    window = replay.windows(400, 4, rng)
    assert not window["step"].all()
    replay.put(window["place"], logprob=np.full((400, 4), 7, np.float32))
    assert (replay.windows(400, 4, rng)["logprob"] == 7).all()
    for step in islice(steps, 60):
        replay.add(step)
    window = replay.windows(400, 4, rng)
    assert not (window["logprob"] == 7).any()
    assert not window["logprob"][~window["step"]].any()


def test_put_refuses_what_it_cannot_write() -> None:
    replay, place = filled(), np.arange(6).reshape(2, 3)
    before = replay.columns["logprob"].copy()
    new = np.ones((2, 3), np.float32)
    for name in ("latent", "obs", "step"):
        with pytest.raises(InputError, match=f"no column '{name}'.*extra_fields"):
            replay.put(place, logprob=new, **{name: new})
    for shape in ((3,), (2, 3, 1), ()):
        with pytest.raises(InputError, match=r"'logprob' have shape .*, expected \(2, 3\)"):
            replay.put(place, logprob=np.ones(shape, np.float32))
    np.testing.assert_array_equal(replay.columns["logprob"], before)
