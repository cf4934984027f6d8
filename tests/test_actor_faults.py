"""Actors that die, fail and hang: each is replaced, or the run ends with its traceback and a good checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actor_runs import messages, mischief, nothing_left, process
from rl_training import evaluate_checkpoint, resume_training, train
from rl_training.envs.faults import EnvironmentFault
from rl_training.envs.workers import RemoteError
from rl_training.runtime import crew
from rl_training.runtime.checkpoints import open_checkpoint
from rl_training.runtime.fleet import ActorFault

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def test_an_actor_that_is_killed_is_replaced_and_training_completes(tiny_config, tmp_path, monkeypatch):
    told = messages(monkeypatch)
    config = tiny_config("impala", {**process(actors=2), **mischief("killed", tmp_path)})
    result = train(config, progress="silent")
    assert result.metrics["actor_restarts"] == 1
    assert result.metrics["global_step"] == 256
    assert result.metrics["gradient_steps"] == 256 / (8 * 2)
    assert [line for line in told if "started anew" in line] == [told[0]]
    assert "its process ended with signal SIGKILL; it was started anew, in new episodes" in told[0]
    assert evaluate_checkpoint(result.run_dir)["eval_episodes"] == 2


def test_one_that_keeps_failing_ends_the_run_with_its_traceback_and_a_checkpoint(tiny_config, tmp_path, monkeypatch):
    """At step 20 of each process: in its third rollout of eight steps."""
    config = tiny_config("impala", {**process(), **mischief("raises", tmp_path, times=3)})
    with pytest.raises(ActorFault) as caught:
        train(config, progress="silent")
    error = caught.value
    assert "actor 0: environment 'MischiefForTests-v0', number 0" in str(error)
    assert "step() raised RuntimeError: the gripper broke; it died 3 times within 100 rollouts" in str(error)
    assert 'raise RuntimeError("the gripper broke")' in error.trace
    assert isinstance(error.__cause__, RemoteError)
    (run_dir,) = (tmp_path / "runs").iterdir()
    checkpoint = open_checkpoint(run_dir).path
    step = int(checkpoint.name.removeprefix("step_"))
    assert step in (80, 96)  # three processes played two whole rollouts each; the last may still wait in the queue
    assert f"at step {step} of training, the last good checkpoint is {checkpoint}" in str(error)
    assert "failed: ActorFault" in (run_dir / "metadata.json").read_text()
    assert evaluate_checkpoint(checkpoint)["eval_episodes"] == 2
    told = messages(monkeypatch)
    resumed = resume_training(run_dir, output_dir=tmp_path / "resumed", progress="silent")  # now nothing fails
    assert resumed.metrics["global_step"] == 256
    assert resumed.metrics["actor_restarts"] == 0
    assert any("all environments of MischiefForTests-v0 cannot give back their state" in line for line in told)


@pytest.mark.parametrize(
    ("fault", "message", "trace"),
    [
        ("crashes", "its process ended with signal SIGSEGV", "in make_trouble"),
        ("exits", "SystemExit: 3", "raise SystemExit(3)"),
        ("cannot be made", "actor 0: RuntimeError: no licence", "in __init__"),
    ],
)
def test_it_fails_with_what_ended_the_actor(fault, message, trace, tiny_config, tmp_path):
    """The constructor is not tried twice."""
    times = process() if fault == "cannot be made" else process(on_actor_death="fail")
    config = tiny_config("impala", {**times, **mischief(fault, tmp_path, times=100)})
    with pytest.raises(EnvironmentFault) as caught:
        train(config, progress="silent")
    assert str(caught.value).startswith("actor 0: ")
    assert message in str(caught.value)
    assert trace in caught.value.trace
    if fault == "cannot be made":
        assert len(list(tmp_path.glob("cannot*"))) == 1
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fault", ["hangs", "keeps the interpreter", "stops"])
def test_one_that_hangs_is_noticed_and_shows_where(fault, tiny_config, tmp_path):
    limits = process(actor_timeout=1.0, on_actor_death="fail")
    config = tiny_config("impala", {**limits, **mischief(fault, tmp_path)})
    with pytest.raises(ActorFault, match=r"within 1 s \(playing\); .* raise execution.actor_timeout") as caught:
        train(config, progress="silent")
    assert ("in make_trouble" in caught.value.trace) == (fault != "stops")  # a stopped process cannot say


def test_one_that_hangs_is_replaced(tiny_config, tmp_path, monkeypatch):
    told = messages(monkeypatch)
    config = tiny_config("appo", {**process(actor_timeout=1.0), **mischief("hangs", tmp_path)})
    result = train(config, progress="silent")
    assert result.metrics["actor_restarts"] == 1
    assert result.metrics["global_step"] == 256
    assert "no answer within 1 s" in told[0]
    assert "in make_trouble" in told[0]


def test_start_takes_the_time_that_it_takes(tiny_config, tmp_path, monkeypatch):
    """Only rollouts have the limit `actor_timeout`."""
    result = train(tiny_config("impala", {**process(actor_timeout=0.2), **mischief("", tmp_path)}), progress="silent")
    assert result.metrics["actor_restarts"] == 0
    monkeypatch.setattr(crew, "START_TIMEOUT", 0.1)
    config = tiny_config("impala", {**process(actor_timeout=0.1), **mischief("", tmp_path)})
    with pytest.raises(ActorFault, match=r"no answer within 0.1 s \(opening\)"):
        train(config, progress="silent")
