"""Checkpoints that are written while training goes on hold the moment they were asked for, and no error is lost."""

from __future__ import annotations

import json
import os
import signal
import threading

import numpy as np
import pytest
import torch

from rl_training import CheckpointError, evaluate_checkpoint, load_policy
from rl_training.data.fields import fields_of
from rl_training.data.replay import Replay
from rl_training.runtime import run_checkpoints
from rl_training.runtime.a2c_trainer import A2C_RECIPE
from rl_training.runtime.callbacks import EarlyStopping
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.metrics import TrainingDiverged
from rl_training.runtime.outcome import TrainingFailed
from rl_training.runtime.run import TrainingRun
from rl_training.runtime.saving import Saver, copied_state
from test_contract import assert_equal_state


class Patient(Saver):
    """Its jobs go on only once someone waits for them, so that a test decides what happens before."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def join(self):
        if self._thread is not None:
            self.gate.set()
        super().join()


class Ring:
    """Stands for what is too large to copy: gives views, which may change whenever it is not held."""

    def __init__(self):
        self.data = np.arange(100, dtype=np.float32)
        self.holds = self.released = 0

    def hold(self):
        self.holds += 1
        return self.release

    def release(self):
        self.released += 1

    @property
    def held(self):
        return self.holds > self.released

    def state_dict(self):
        assert self.held
        return {"data": [self.data[:60], self.data[60:]]}

    def load_state_dict(self, state):
        self.data = np.concatenate(state["data"])


def test_a_job_waits_for_the_one_before():
    saver, order = Patient(), []

    def first():
        saver.gate.wait()
        order.append(1)

    saver.start(first)
    saver.start(lambda: order.append(2))
    saver.wait()
    assert order == [1, 2]


def test_an_error_is_raised_once_and_is_the_original_one():
    saver, error = Saver(), OSError("no space left")

    def fail():
        raise error

    for then in (saver.wait, lambda: saver.start(lambda: None)):
        saver.start(fail)
        saver.join()
        with pytest.raises(OSError) as caught:
            then()
        assert caught.value is error
        saver.wait()


def test_a_job_that_was_not_waited_for_is_finished_all_the_same():
    saver, seen = Saver(), []
    thread = threading.Thread(target=lambda: saver.start(lambda: seen.append(threading.current_thread().daemon)))
    thread.daemon = True  # a thread inherits this, unless told otherwise
    thread.start()
    thread.join()
    saver.wait()
    assert seen == [False]


def test_a_hold_is_released_where_no_thread_can_be_had(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    saver, ring = Saver(), Ring()
    with pytest.raises(RuntimeError, match="new thread"):
        saver.save({"ring": ring}, lambda state: None, wait=False)
    assert not ring.held
    saver.wait()


def test_a_copied_state_is_its_own():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    state = {"a": [parameter, parameter.detach().T, (np.ones(2), 3)], "b": {"c": "text", "d": None}}
    copy = copied_state(state)
    with torch.no_grad():
        parameter.fill_(5)
    state["a"][2][0][:] = 5
    state["b"]["c"] = "changed"
    assert copy["a"][0].sum() == copy["a"][1].sum() == 6
    assert not copy["a"][0].requires_grad
    assert copy["a"][1].shape == (3, 2)
    assert copy["a"][2][0].tolist() == [1, 1]
    assert copy["a"][2][1] == 3
    assert copy["b"] == {"c": "text", "d": None}


@pytest.fixture
def make_run(tiny_config):
    def make(part=None, config=None, **options):
        run = TrainingRun(tiny_config("a2c", config), A2C_RECIPE, **{"progress": "silent", **options})
        run.checkpoints.saver = Patient()
        if part is not None:
            run.keep("ring", part)
        return run

    return make


@pytest.fixture
def writes(monkeypatch):
    """Where each checkpoint was written from; in a thread, the writing waits until someone waits for it."""
    threads, original = [], run_checkpoints.save_checkpoint

    def write(path, **content):
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            write.gate.wait()
        if write.error is not None:
            raise write.error
        return original(path, **content)

    write.error = None
    monkeypatch.setattr(run_checkpoints, "save_checkpoint", write)
    write.threads = threads
    return write


def begin(run, writes):
    writes.gate = run.checkpoints.saver.gate
    run.advance(16)
    return run


def go_on(run, steps=16):
    """Training, as far as a checkpoint sees it: weights, generators, observations, the clock, the ring."""
    run.checkpoints.saver.gate.clear()
    run.learner.optimizers["model"].parameters.vector.add_(1.0)
    run.source.step()
    run.advance(steps)


def test_a_checkpoint_holds_the_moment_it_was_asked_for(make_run, writes):
    ring = Ring()
    with make_run(ring) as run:
        begin(run, writes)
        expected = copied_state({name: part.state_dict() for name, part in run.parts.items() if name != "ring"})
        path = run.save(wait=False)
        assert ring.held
        assert not path.exists()
        go_on(run)
        run.checkpoints.saver.wait()
        assert not ring.held
        loaded = load_checkpoint(path)
    assert loaded.step == 16
    assert np.concatenate(loaded.state.pop("ring")["data"]).tolist() == ring.data.tolist()
    assert loaded.state["run"].pop("wall_seconds") >= expected["run"].pop("wall_seconds")
    assert_equal_state(loaded.state, expected)
    assert threading.main_thread() not in writes.threads


def test_whoever_asks_for_a_checkpoint_gets_one_that_is_there(make_run, writes):
    ring = Ring()
    with make_run(ring) as run:
        begin(run, writes)
        assert load_checkpoint(run.save()).step == 16
        assert not ring.held
        go_on(run)
        path = run.save(wait=False)
        assert not path.exists()
        assert run.save() == path
        assert load_checkpoint(path).step == 32
        assert len(writes.threads) == 2, "the one that was under way, not another"


def test_without_a_large_part_a_checkpoint_is_written_at_once(make_run, writes):
    with make_run() as run:
        begin(run, writes)
        assert load_checkpoint(run.save(wait=False)).step == 16
    assert writes.threads == [threading.main_thread()]


def test_the_checkpoints_of_a_run_do_not_keep_it_waiting(make_run, writes):
    with make_run(Ring(), {"checkpoint_interval": 16}) as run:
        begin(run, writes).record({"loss": 1.0})
        path = run.dir / "checkpoints" / "step_16"
        assert not path.exists()
    assert load_checkpoint(path).step == 16
    assert threading.main_thread() not in writes.threads


def test_a_failed_write_is_told_by_the_next_save_and_can_be_made_again(make_run, writes):
    ring = Ring()
    with make_run(ring) as run:
        begin(run, writes)
        writes.error = OSError("no space left")
        run.save(wait=False)
        with pytest.raises(TrainingFailed) as caught:
            run.save(wait=False)
        assert caught.value.__cause__ is writes.error
        assert not ring.held
        assert run.checkpoint_path is None
        writes.error = None
        assert load_checkpoint(run.save()).step == 16


def test_a_failed_write_is_told_at_the_end(make_run, writes):
    with pytest.raises(TrainingFailed, match="no space left"), make_run(Ring()) as run:
        begin(run, writes)
        writes.error = OSError("no space left")
        run.save(wait=False)
        run.finish()


def test_a_best_that_cannot_be_written_is_told_at_the_end(make_run, writes):
    with make_run(Ring()) as run:
        begin(run, writes)
        run.save()
        writes.error = OSError("no space left")
        with pytest.raises(TrainingFailed, match="no space left"):
            run.finish()
    assert json.loads((run.dir / "metadata.json").read_text())["status"] != "finished"


def test_leaving_without_an_end_waits_and_tells(make_run, writes):
    with make_run(Ring()) as run:
        path = begin(run, writes).save(wait=False)
    assert load_checkpoint(path).step == 16
    with pytest.raises(TrainingFailed, match="no space left"), make_run(Ring()) as run:
        begin(run, writes)
        writes.error = OSError("no space left")
        run.save(wait=False)
    assert "no space left" in json.loads((run.dir / "metadata.json").read_text())["status"]


def test_a_failed_write_hides_no_other_error(make_run, writes, capsys):
    ring = Ring()
    with pytest.raises(RuntimeError, match="on purpose"), make_run(ring, progress="plain") as run:
        begin(run, writes)
        writes.error = OSError("no space left")
        run.save(wait=False)
        raise RuntimeError("on purpose")
    assert not ring.held
    assert "step_16 cannot be written: no space left" in capsys.readouterr().out
    assert "on purpose" in json.loads((run.dir / "metadata.json").read_text())["status"]


def test_the_old_checkpoint_stays_until_the_new_one_is_whole(make_run, writes):
    with make_run(Ring(), {"keep_checkpoints": 1}) as run:
        begin(run, writes)
        old = run.save()
        go_on(run)
        new = run.save(wait=False)
        assert load_checkpoint(old).step == 16
        assert run.checkpoint_path == new
        assert new.exists()
        assert not old.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_divergence_names_a_checkpoint_that_is_there(make_run, writes, fails):
    with pytest.raises(TrainingDiverged) as caught, make_run(Ring(), {"keep_checkpoints": 1}) as run:
        begin(run, writes)
        old = run.save()
        go_on(run)
        writes.error = OSError("no space left") if fails else None
        new = run.save(wait=False)
        run.record({"loss": float("nan")})
    there, gone = (old, new) if fails else (new, old)
    assert f"last good checkpoint is {there}" in str(caught.value)
    assert there.exists()
    assert not gone.exists()


def test_what_has_diverged_is_not_saved(make_run, writes):
    with make_run() as run:
        begin(run, writes)
        run.record({"loss": [torch.tensor(1.0), torch.tensor(float("nan"))]})  # not looked at before there is a reason
        with pytest.raises(TrainingDiverged, match="loss is nan"):
            run.save()
    assert writes.threads == []


def test_quitting_by_two_signals_finishes_what_is_being_written(make_run, writes):
    with pytest.raises(KeyboardInterrupt), make_run(Ring()) as run:
        path = begin(run, writes).save(wait=False)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert load_checkpoint(path).step == 16


def test_the_best_leaves_out_what_it_is_told_to(make_run, writes, scores):
    scores += [1.0]
    ring = Ring()
    with make_run() as run:
        begin(run, writes)
        run.keep("ring", ring, in_best=False)
        result = run.finish()
    best, last = load_checkpoint(run.dir / "checkpoints" / "best"), load_checkpoint(result.checkpoint_path)
    assert best.state.keys() == last.state.keys() - {"ring"}
    assert ring.holds == ring.released == 1
    assert not (best.path / "ring.safetensors").exists()


def test_a_best_under_way_is_not_replaced_by_a_worse_one(make_run, writes, scores):
    scores += [2.0, 1.0]
    with make_run(Ring()) as run:
        begin(run, writes)
        run.evaluate()
        assert not (run.dir / "checkpoints" / "best").exists()
        go_on(run)
        run.evaluate()
    assert load_checkpoint(run.dir / "checkpoints" / "best").step == 16
    assert len(writes.threads) == 1


def test_a_resumed_run_says_what_its_checkpoint_does_not_hold(make_run, writes, scores, capsys):
    scores += [1.0]
    with make_run() as run:
        begin(run, writes)
        run.keep("ring", Ring(), in_best=False)
        whole = run.finish().checkpoint_path
    best = run.dir / "checkpoints" / "best"
    note = f"{best} holds no ring: it is filled anew, so the run is valid but not the same"
    for path, notes in ((best, 1), (whole, 0)):
        ring = Ring()
        ring.data = ring.data * 0
        with make_run(resume=load_checkpoint(path), progress="plain") as resumed:
            resumed.keep("ring", ring)
        assert capsys.readouterr().out.count(note) == notes
        assert ring.data.any() == (not notes)
        new = EarlyStopping(target=1.0)
        with make_run(ring, resume=load_checkpoint(path), progress="plain", callbacks=[new]):
            pass  # kept before the run begins
        out = capsys.readouterr().out
        assert (out.count(note), out.count("is filled anew")) == (notes, notes)
        assert out.count("holds no state of the callback EarlyStopping: it begins anew") == 1


def test_what_was_restored_is_not_kept_a_second_time(make_run, writes):
    with make_run(Ring()) as run:
        checkpoint = load_checkpoint(begin(run, writes).save())
    with make_run(Ring(), resume=checkpoint):
        assert checkpoint.state == {}


@pytest.mark.parametrize("damage", ["remove", "flip"])
def test_a_policy_needs_only_its_own_files(damage, make_run, writes):
    with make_run(Ring(), {"env_kwargs": {"wrappers": {"normalize_observation": True}}}) as run:
        path = begin(run, writes).save()
    before = evaluate_checkpoint(path)
    file = path / "ring.safetensors"
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert evaluate_checkpoint(path) == evaluate_checkpoint(run.dir) == before
    assert load_policy(run.dir).act(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(CheckpointError, match=r"ring\.safetensors"):
        load_checkpoint(path)


def replay_step(number, num_envs=2):
    values = np.full((num_envs, 3), number, np.float32)
    ended = np.full(num_envs, number % 7 == 6)
    return {
        "obs": values,
        "next_obs": values + 1,
        "first": np.full(num_envs, number % 7 == 0),
        "action": np.full(num_envs, number),
        "reward": np.full(num_envs, number, np.float32),
        "terminated": ended,
        "truncated": np.zeros(num_envs, bool),
    }


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_replay_is_saved_as_it_was_while_it_turns(make_run, writes, prioritized):
    def make():
        return Replay(64, 2, fields_of(replay_step(0)), prioritized=prioritized)

    replay = make()
    for number in range(100):
        replay.add(replay_step(number))
    with make_run(replay) as run:
        begin(run, writes)
        expected = copied_state(replay.state_dict())
        path = run.save(wait=False)
        opener = threading.Thread(target=run.checkpoints.saver.gate.set)
        for number in range(100, 300):
            if number == 102:
                opener.start()  # more than the ring has room for while it is held
            replay.add(replay_step(number))
        opener.join()
        run.checkpoints.saver.wait()
    state = load_checkpoint(path).state["ring"]
    assert_equal_state(state, expected)
    restored, draws = make(), []
    restored.load_state_dict(state)
    again = make()
    again.load_state_dict(expected)
    for one in (restored, again):
        draws.append(one.sample(64, np.random.default_rng(0), gamma=0.9))
    assert_equal_state(draws[0], draws[1])
    assert draws[0]["reward"].max() < 100
