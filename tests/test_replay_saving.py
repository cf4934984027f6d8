"""A replay that was saved goes on as if nothing had happened, and can be saved while it is written to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from naive_replay import Ends, NaiveReplay, frame, new_replay, parts, stream, vector
from rl_training.data.replay import Replay
from rl_training.errors import InputError
from rl_training.runtime.checkpoints import load_checkpoint, save_checkpoint
from rl_training.types import Step
from test_replay import GAMMA, assert_holds, both, leaves

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of replay, of stream
    "uniform": ({}, {"make": vector}),
    "dict": ({}, {"make": parts, "continuous": True}),
    "frames": ({"frame_stack": 4}, {"make": frame, "frame_stack": 4}),
    "on a device": ({"device": torch.device("cpu")}, {"make": vector}),
    "frames on a device": ({"frame_stack": 4, "device": torch.device("cpu")}, {"make": frame, "frame_stack": 4}),
    "prioritized": ({"prioritized": True}, {"make": vector}),
    "prioritized frames": ({"prioritized": True, "frame_stack": 2}, {"make": frame, "frame_stack": 2}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def through_a_file(replay: Replay, path: Path, capacity: int, num_envs: int, **options: Any) -> Replay:
    save_checkpoint(path, state={"replay": replay.state_dict()}, config={}, info={"global_step": 0})
    loaded = new_replay(capacity, num_envs, **options)
    loaded.load_state_dict(load_checkpoint(path).state["replay"])
    return loaded


def assert_same(first: Any, second: Any) -> None:
    """Bit for bit; nested dicts and lists of arrays, tensors and scalars."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert list(first) == list(second)
        for key, value in first.items():
            assert_same(value, second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for x, y in zip(first, second, strict=True):
            assert_same(x, y)
    elif isinstance(first, np.ndarray | torch.Tensor):
        np.testing.assert_array_equal(first, second)
        assert first.dtype == second.dtype
    else:
        assert first == second


def learn_from(replay: Replay, rng: np.random.Generator) -> Any:
    """A draw, and what an algorithm might do then."""
    batch = replay.sample(16, rng, gamma=GAMMA, n_step=3, beta=0.5)
    if "weight" in batch:
        replay.set_priorities(batch["index"].numpy(), rng.exponential(2.0, 16))
    return batch


@every_kind
@pytest.mark.parametrize("count", [1, 13, 26, 100, 333])
def test_a_loaded_replay_draws_the_same_from_then_on(tmp_path: Path, kind: str, count: int) -> None:
    options, how = KINDS[kind]
    replay, naive = new_replay(50, 2, **options | how), NaiveReplay(50, 2, options.get("frame_stack", 1))
    rng, steps = np.random.default_rng(0), stream(2, **how)
    if replay.priorities is not None:
        replay.priorities.use_exponent(0.6)
    for step in islice(steps, count):
        both(replay, naive, [step])
        learn_from(replay, rng)
    loaded = through_a_file(replay, tmp_path / "step_0", 50, 2, **options | how)
    rngs = np.random.default_rng(9), np.random.default_rng(9)
    assert (loaded.size, loaded.added) == (replay.size, replay.added)
    assert_same(loaded.state_dict(), replay.state_dict())
    for step in islice(steps, 120):
        loaded.add(step)
        both(replay, naive, [step])
        assert_same(learn_from(loaded, rngs[0]), learn_from(replay, rngs[1]))
    assert_holds(loaded, naive, n_step=2)


@every_kind
def test_any_moment_is_good_for_saving(kind: str) -> None:
    options, how = KINDS[kind]
    replay, naive = new_replay(50, 2, **options | how), NaiveReplay(50, 2, options.get("frame_stack", 1))
    for step in islice(stream(2, **how, ends=Ends(0.2, 0.2)), 120):
        both(replay, naive, [step])
        loaded = new_replay(50, 2, **options | how)
        loaded.load_state_dict(replay.state_dict())
        assert loaded.size == replay.size
        assert_same(*(r.sample(8, np.random.default_rng(0), gamma=GAMMA) for r in (loaded, replay)))
        assert_holds(loaded, naive)


@every_kind
def test_an_empty_replay_can_be_saved(tmp_path: Path, kind: str) -> None:
    options, how = KINDS[kind]
    loaded = through_a_file(new_replay(50, 2, **options | how), tmp_path / "step_0", 50, 2, **options | how)
    naive = NaiveReplay(50, 2, options.get("frame_stack", 1))
    assert loaded.size == loaded.added == 0
    both(loaded, naive, islice(stream(2, **how), 70))
    assert_holds(loaded, naive)


@pytest.mark.parametrize("frame_stack", [1, 4])
@pytest.mark.parametrize("count", [1, 20, 77])
def test_an_episode_cut_by_a_resume_is_truncated(tmp_path: Path, frame_stack: int, count: int) -> None:
    shape = {"frame_stack": frame_stack}
    replay, naive = new_replay(50, 2, make=frame, **shape), NaiveReplay(50, 2, **shape)
    both(replay, naive, islice(stream(2, make=frame, ends=Ends(0, 0.02), **shape), count))
    in_progress = [rows[-2] for rows in naive.rows]
    loaded = through_a_file(replay, tmp_path / "step_0", 50, 2, make=frame, **shape)
    for step in islice(stream(2, seed=1, make=frame, ends=Ends(0, 0.1), **shape), 9):  # other environments, reset
        step["action"] += 10_000
        both(loaded, naive, [step])
        assert_holds(loaded, naive, n_step=3)
    assert all(t is not None and t.truncated for t in in_progress)


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "frames"])
def test_a_file_is_as_large_as_what_is_held(tmp_path: Path, kind: str) -> None:
    options, how = KINDS[kind]
    replay = new_replay(1_000_000, 2, **options | how)
    for step in islice(stream(2, **how), 50):
        replay.add(step)
    loaded = through_a_file(replay, tmp_path / "step_0", 1_000_000, 2, **options | how)
    assert sum(file.stat().st_size for file in (tmp_path / "step_0").iterdir()) < 30_000
    rngs = np.random.default_rng(0), np.random.default_rng(0)
    assert_same(learn_from(loaded, rngs[0]), learn_from(replay, rngs[1]))


def test_large_arrays_are_not_copied_for_a_checkpoint() -> None:
    replay = new_replay(50, 2)
    for step in islice(stream(2), 100):
        replay.add(step)
    first, second = ([x.ctypes.data for x in leaves(replay.state_dict()["obs"])] for _ in range(2))
    assert first == second
    assert all(x.flags.c_contiguous and x.base is not None for x in leaves(replay.state_dict()["obs"]))


@pytest.mark.parametrize(("capacity", "num_envs"), [(60, 2), (50, 1)])
def test_another_shape_is_refused(capacity: int, num_envs: int) -> None:
    replay = new_replay(50, 2)
    for step in islice(stream(2), 10):
        replay.add(step)
    with pytest.raises(InputError, match="buffer_capacity"):
        new_replay(capacity, num_envs).load_state_dict(replay.state_dict())


def copy_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copy_of(value) for value in state]
    return state.copy() if isinstance(state, np.ndarray) else state


class Writer(threading.Thread):
    """Adds steps to both replays; `written` says when it is through."""

    def __init__(self, replay: Replay, naive: NaiveReplay, steps: Iterator[Step]) -> None:
        super().__init__(daemon=True)
        self.replay, self.naive, self.steps = replay, naive, steps
        self.written = threading.Event()
        self.count = 0

    def run(self) -> None:
        for step in self.steps:
            self.naive.add(step)
            self.replay.add(step)
            self.count += 1
        self.written.set()


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "frames"])
@pytest.mark.parametrize("filled", [20, 444])
def test_what_is_held_stays_while_steps_go_on_and_then_they_wait(kind: str, filled: int) -> None:
    options, how = KINDS[kind]
    replay, naive = new_replay(600, 2, **options | how), NaiveReplay(600, 2, options.get("frame_stack", 1))
    steps = stream(2, **how)
    both(replay, naive, islice(steps, filled))
    release = replay.hold()
    state = replay.state_dict()
    before = copy_of(state)
    writer = Writer(replay, naive, islice(steps, 800))
    writer.start()
    assert not writer.written.wait(0.3)  # never, as long as it is held: there is not so much room
    assert writer.count > 0
    assert_same(state, before)
    release()
    assert writer.written.wait(60)
    assert_holds(replay, naive)
    with pytest.raises(AssertionError):
        assert_same(state, before)  # a view, after all


@pytest.mark.parametrize("filled", [20, 444])
def test_a_state_that_was_held_is_that_of_the_moment(tmp_path: Path, filled: int) -> None:
    replay, naive = new_replay(400, 2), NaiveReplay(400, 2)
    steps = stream(2)
    both(replay, naive, islice(steps, filled))
    release = replay.hold()
    state = replay.state_dict()
    both(replay, NaiveReplay(400, 2), islice(steps, 5))
    save_checkpoint(tmp_path / "step_0", state={"replay": state}, config={}, info={"global_step": 0})
    release()
    loaded = new_replay(400, 2)
    loaded.load_state_dict(load_checkpoint(tmp_path / "step_0").state["replay"])
    assert_holds(loaded, naive, n_step=3)


def test_nothing_held_changes_at_whatever_moment_it_began() -> None:
    for kind in ("uniform", "frames"):
        options, how = KINDS[kind]
        replay, steps = new_replay(600, 2, **options | how), stream(2, **how, ends=Ends(0.1, 0.1))
        for _ in range(150):
            release = replay.hold()
            state = replay.state_dict()
            before = copy_of(state)
            for step in islice(steps, 2):
                replay.add(step)
            assert_same(state, before)
            release()
            for step in islice(steps, 3):
                replay.add(step)


def test_draws_go_on_while_it_is_held() -> None:
    replay, naive = new_replay(400, 2), NaiveReplay(400, 2)
    steps = stream(2)
    both(replay, naive, islice(steps, 500))
    release = replay.hold()
    for step in islice(steps, 6):
        both(replay, naive, [step])
        assert_holds(replay, naive, n_step=2)
    release()
    both(replay, naive, islice(steps, 500))
    assert_holds(replay, naive, n_step=2)


def started(job: Callable[[], None]) -> threading.Event:
    """Run it in a thread; the event says when it has ended."""
    ended = threading.Event()

    def run() -> None:
        job()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended


@pytest.mark.parametrize("filled", [20, 500])
def test_what_is_put_waits_for_the_rows_that_are_held(filled: int) -> None:
    replay, steps = new_replay(400, 2), stream(2)
    for step in islice(steps, filled):
        replay.add(step)
    places = [replay.windows(8, 5, np.random.default_rng(0))["place"]]  # held by two
    releases = [replay.hold()]
    replay.add(next(steps))
    places.append(np.flatnonzero(replay.ring.age(np.arange(len(replay.valid))) == 1))  # the newest: held by the second
    releases.append(replay.hold())
    state = replay.state_dict()
    before = copy_of(state)
    ended = [started(lambda p=place: replay.put(p, logprob=np.full(p.shape, 7, np.float32))) for place in places]
    for release in releases:
        assert not any(event.wait(0.2) for event in ended)
        assert_same(state, before)
        release()
    for event, place in zip(ended, places, strict=True):
        assert event.wait(60)
        assert (replay.columns["logprob"][place] == 7).all()


@pytest.mark.parametrize("filled", [20, 500])
def test_what_is_put_to_rows_that_are_not_held_does_not_wait(filled: int) -> None:
    replay, steps = new_replay(400, 2), stream(2, ends=Ends(0, 0, 0))
    for step in islice(steps, filled):
        replay.add(step)
    release = replay.hold()
    state = replay.state_dict()
    before = copy_of(state)
    for step in islice(steps, 5):
        replay.add(step)
    for offset in range(-5, 0):
        place = replay.ring.place_at_cursor(np.arange(2), offset)
        assert started(lambda place=place: replay.put(place, logprob=np.full(2, 7, np.float32))).wait(20)
        assert (replay.columns["logprob"][place] == 7).all()
    assert_same(state, before)
    held = replay.ring.place_at_cursor(np.arange(2), -6)
    assert not started(lambda: replay.put(held, logprob=np.full(2, 7, np.float32))).wait(0.2)
    release()


def test_an_episode_that_is_cut_waits_for_its_last_row_that_is_held() -> None:
    replay, steps = new_replay(400, 2), stream(2, ends=Ends(0, 0, 0))
    for step in islice(steps, 20):
        replay.add(step)
    release = replay.hold()
    state = replay.state_dict()
    before = copy_of(state)
    ended = started(lambda: replay.add(next(stream(2, seed=1))))
    assert not ended.wait(0.2)
    assert_same(state, before)
    release()
    assert ended.wait(60)
    assert replay.columns["truncated"].sum() == 2
