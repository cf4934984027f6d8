"""The progress display: lines where output is a file, a live display on a terminal, and a summary to copy from."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_training import train
from rl_training.envs.runner import EnvRunner
from rl_training.runtime import progress, run
from rl_training.runtime.phases import Phases
from rl_training.runtime.progress import LiveProgress, PlainProgress, Progress, duration, make_progress, number, summary

METRICS = {
    "train_return_mean": 21.5,
    "eval_return_mean": 498.25,
    "policy_loss": -0.0123,
    "value_loss": 12.5,
    "approx_kl": 77.7,
    "lr": 2.5e-4,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines(clock: list[float]) -> None:
    stream = io.StringIO()
    with make_progress(schedule_names=["lr"], stream=stream) as shown:
        assert type(shown) is PlainProgress
        shown.start(100_000, "ppo on CartPole-v1")
        clock[0] += 10.0
        shown.update(5_000)
        shown.update(20_000, METRICS)
        clock[0] += 10.0
        shown.update(40_000, {**METRICS, "policy_loss": -1.5, "eval_return_mean": math.nan, "lr": 1e-5})
        shown.message("note [1]")
    title, first, second, note = stream.getvalue().splitlines()
    assert (title, note) == ("ppo on CartPole-v1", "note [1]")
    assert " ".join(first.split()) == (
        "20,000/100,000 20% 2,000 steps/s 0:00:40 left return train 21.5 eval 498.2 "
        "policy_loss -0.0123 value_loss 12.5 schedule lr 2.50e-04"
    )
    assert len(first) == len(second), "columns stay in place"
    assert first.index("value_loss") == second.index("value_loss")


ACTORS = {
    "policy_lag_mean": 1.5,
    "policy_lag_max": 3.0,
    "queue_fill": 0.25,
    "actor_steps_per_second": 1234.0,
    "learner_steps_per_second": 1200.0,
    "actor_waiting": 0.02,
    "learner_waiting": 0.61,
    "rollouts_dropped": 7,
    "actor_restarts": 2,
}


@pytest.mark.parametrize(
    ("waiting", "line"),
    [
        ((0.02, 0.61), "bottleneck: actors (actors wait 2%, learner 61%)"),
        ((0.9, 0.17), "bottleneck: learner (actors wait 90%, learner 17%)"),
        ((0.04, 0.03), "bottleneck: neither (actors wait 4%, learner 3%)"),
        ((0.06, 0.0), "bottleneck: learner (actors wait 6%, learner 0%)"),
    ],
)
def test_the_line_that_says_which_side_is_the_bottleneck(waiting: tuple[float, float], line: str) -> None:
    metrics = ACTORS | dict(zip(("actor_waiting", "learner_waiting"), waiting, strict=True))
    plain, live = io.StringIO(), io.StringIO()
    for stream, kind in ((plain, PlainProgress), (live, LiveProgress)):
        with kind(stream=stream) as shown:
            shown.start(100, "impala on CartPole-v1")
            shown.update(10, METRICS | metrics)
    assert plain.getvalue().splitlines()[1].endswith(line)
    assert line in live.getvalue()


def test_actors_elsewhere_in_the_live_display() -> None:
    stream = io.StringIO()
    with LiveProgress(stream=stream) as shown:
        shown.start(100, "impala on CartPole-v1")
        shown.update(10, ACTORS)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    rows = {"lag": "1.5", "largest lag": "3", "queue fill": "0.25", "dropped": "7", "restarts": "2"}
    rows |= {"actor steps/s": "1,234.0", "learner steps/s": "1,200.0"}
    for name, value in rows.items():
        assert re.search(rf"{name} +{value}\b", text), name
    assert "more" not in text, "every row has its place"


def test_actors_in_this_process_are_shown_only_where_they_lag() -> None:
    shown = Progress()
    shown.update(10, METRICS | {"policy_lag_mean": 0.0, "policy_lag_max": 0.0})
    assert "actors" not in shown.groups()
    shown.update(20, {"policy_lag_mean": 2.5, "policy_lag_max": 3.0})
    assert shown.groups()["actors"] == {"lag": 2.5, "largest lag": 3.0}
    stream = io.StringIO()
    with PlainProgress(stream=stream) as lines:
        lines.start(100, "impala on CartPole-v1")
        lines.update(20, shown.metrics)
    assert "bottleneck" not in stream.getvalue(), "nobody waits where they take turns"


def test_speed_and_time_left_of_a_resumed_run(clock: list[float]) -> None:
    shown = Progress()
    shown.start(1_000, "", 500)
    assert shown.speed() == 0.0
    assert shown.time_left(0.0) is None
    clock[0] += 10.0
    shown.update(600)
    assert shown.speed() == 10.0
    assert shown.time_left(10.0) == 40.0


def test_speed_is_that_of_late(clock: list[float]) -> None:
    shown = Progress()
    shown.start(10_000, "")
    for second in range(100):
        clock[0] += 1.0
        shown.update(shown.step + (10 if second < 50 else 100))
        shown.speed()
    assert shown.speed() == 100.0


def test_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make_progress("silent") as shown:
        shown.start(10, "title")
        shown.update(5, METRICS)
        shown.message("hello")
    assert capsys.readouterr().out == ""


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="auto, live, plain, silent, got 'loud'"):
        make_progress("loud")


def test_updates_do_not_draw(clock: list[float]) -> None:
    shown = LiveProgress(stream=io.StringIO())
    draws: list[float] = []
    shown._live.refresh = lambda: draws.append(clock[0])  # type: ignore[method-assign]
    for step in range(1000):
        clock[0] += 0.01
        shown.update(step, METRICS)
    assert draws == [], "a step waits for no drawing: the display has a thread"


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.time() + 60
    while not condition() and time.time() < deadline:
        time.sleep(0.005)
    return condition()


def test_the_live_display_moves_while_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.01)
    stream = io.StringIO()
    shown = LiveProgress(stream=stream)
    before = threading.active_count()
    with shown:
        shown.start(1_000, "ppo on CartPole-v1")
        for step, phase in ((0, "compiling"), (37, "collecting"), (74, "learning"), (74, "evaluating"), (74, "saving")):
            shown.step = step
            shown.phases.enter(phase)
            assert eventually(lambda: f"{phase} 0:00:00" in stream.getvalue()), phase  # noqa: B023 - called here
            assert eventually(lambda: f"{step}/1,000" in stream.getvalue()), step  # noqa: B023
    assert threading.active_count() == before, "the thread ends with the display"


def test_the_display_ends_with_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    for shown in (LiveProgress(stream=io.StringIO()), PlainProgress(stream=io.StringIO())):
        with pytest.raises(KeyboardInterrupt), shown:
            shown.start(10, "title")
            raise KeyboardInterrupt
        assert threading.active_count() == before


def test_plain_output_gives_a_sign_of_life(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = PlainProgress(stream=stream)
    shown.start(3_000, "sac on Pendulum-v1")
    shown.phases.enter("compiling")
    for _ in range(29):
        clock[0] += 1.0
        shown.tick()
    assert stream.getvalue() == "sac on Pendulum-v1\n"
    clock[0] += 1.0
    shown.tick()
    shown.phases.enter("collecting")
    clock[0] += 4.0
    shown.phases.enter("learning")
    for step in range(1, 27):
        clock[0] += 1.0
        shown.step = 10 * step
        shown.tick()
    shown.update(270, METRICS)
    clock[0] += 29.0
    shown.tick()
    shown.stop()
    _, first, second, logged = stream.getvalue().splitlines()
    assert first.split() == ["0/3,000", "0%", "0", "steps/s", "-", "left", "compiling", "0:00:30"]
    assert second.split() == ["260/3,000", "8%", "9", "steps/s", "0:05:16", "left", "learning", "0:00:26"]
    assert "steps/s" in logged
    assert "value_loss" in logged


def test_activity_is_the_share_of_each_phase_where_they_alternate(clock: list[float]) -> None:
    shown = Progress()
    shown.start(100, "")
    shown.phases.enter("compiling")
    clock[0] += 40.0
    assert shown.activity() == "compiling 0:00:40"
    for _ in range(100):
        for phase, seconds in (("collecting", 0.02), ("learning", 0.08), ("saving", 0.0002)):
            shown.phases.enter(phase)
            clock[0] += seconds
        shown.speed()  # what a drawing asks for
    assert shown.activity() == "learning 80%, collecting 20%", "of the last seconds: what compiled before is over"
    with shown.phases.during("evaluating"):
        clock[0] += 7.0
        assert shown.activity() == "evaluating 0:00:07"
    assert shown.phases.current[0] == "saving"


def test_time_spent_compiling_is_counted_apart(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    def inner(x):
        return x + 1

    def outer(x):
        return compiled_inner(x) * 2

    compiled_inner = numba.njit(inner)
    compiled = numba.njit(outer)
    with Progress() as shown:
        shown.start(100, "")
        shown.phases.enter("collecting")
        clock[0] += 1.0
        with monkeypatch.context() as patch:
            ticks = itertools.count(clock[0])
            patch.setattr(progress.time, "monotonic", lambda: next(ticks))  # each look at the clock takes a second
            assert compiled(1) == 4
        assert shown.phases.current[0] == "collecting"
        seconds = shown.phases.seconds()
        assert seconds["compiling"] > 0
        assert compiled(2) == 6
        assert shown.phases.seconds() == seconds, "what is compiled is not compiled again"
    numba.njit(lambda x: x - 1)(1)
    assert shown.phases.seconds() == seconds, "nobody listens after the end"


def test_a_loss_does_not_bear_the_name_of_a_hyperparameter() -> None:
    stream = io.StringIO()
    with PlainProgress(stream=stream) as shown:
        shown.start(100, "sac on Pendulum-v1")
        shown.update(10, {"alpha": 0.1, "alpha_loss": -0.9})
    assert re.search(r"\balpha_loss +-0.9\b", stream.getvalue())
    assert not re.search(r"\balpha +-0.9", stream.getvalue())


def test_losses_of_single_tasks_are_left_to_the_log() -> None:
    shown = Progress()
    shown.update(10, {"value_loss": 1.0, "value_loss/CartPole-v1": 0.5, "train_return_mean/CartPole-v1": 9.0})
    assert shown.groups()["loss"] == {"value_loss": 1.0}
    assert shown.groups()["task"] == {"CartPole-v1": 9.0}


@pytest.mark.parametrize("algo", ["a2c", "dqn", "scalezero"])  # one of each loop
def test_every_loop_tells_its_step_and_its_phase(algo, tiny_config, monkeypatch) -> None:
    """With a log interval longer than the run, so that nothing but the loop itself can tell."""
    shown = Progress()
    told: dict[str, list[int]] = {}
    enter = Phases.enter

    def note(phases: Phases, phase: str) -> str:
        told.setdefault(phase, []).append(shown.step)
        return enter(phases, phase)

    monkeypatch.setattr(Phases, "enter", note)
    monkeypatch.setattr(run, "make_progress", lambda *_, **__: shown)
    steps: list[tuple[int, int]] = []
    config = tiny_config(algo, {"log_interval": 10**6, "eval_interval": 128, "checkpoint_interval": 128})
    result = train(config, callbacks=[lambda run: steps.append((shown.step, run.step))])
    assert [shown_step for shown_step, _ in steps] == [step for _, step in steps]
    assert len(steps) > 4
    assert shown.metrics["eval_return_mean"] == result.metrics["eval_return_mean"], "the last evaluation is shown too"
    for phase in ("collecting", "learning", "evaluating", "saving"):
        assert told[phase], phase
    assert {step for step, _ in steps} <= set(told["learning"]), "what was collected is shown before it is learned from"


def test_the_display_follows_a_rollout_step_by_step(tiny_config, monkeypatch) -> None:
    shown, seen = Progress(), set()
    monkeypatch.setattr(run, "make_progress", lambda *_, **__: shown)
    step = EnvRunner.step
    monkeypatch.setattr(EnvRunner, "step", lambda *args, **kwargs: (seen.add(shown.step), step(*args, **kwargs))[1])
    config = tiny_config("a2c", {"num_envs": 2, "total_timesteps": 64}, num_steps=8)
    train(config)
    assert seen >= set(range(0, 64, 2)), "of two environments"


@pytest.mark.parametrize("kind", [LiveProgress, PlainProgress])
def test_a_message_from_a_signal_handler_never_waits_for_good(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawing thread may wait for a print that the handler interrupted, and so would never end."""
    monkeypatch.setattr(progress, "MESSAGE_SECONDS", 0.01)
    stream = io.StringIO()
    drawing, go_on = threading.Event(), threading.Event()

    def draw() -> None:
        with progress._drawing:
            drawing.set()
            go_on.wait()

    with kind(stream=stream) as shown:
        shown.start(10, "title")
        thread = threading.Thread(target=draw)
        thread.start()
        drawing.wait()
        shown.message("stopping at the next checkpoint")
        assert "stopping" not in stream.getvalue()
        go_on.set()
        thread.join()
        shown.message("saved")
    text = stream.getvalue()
    assert 0 < text.index("stopping at the next checkpoint") < text.index("saved")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_in_the_middle_of_a_drawing_can_draw() -> None:
    drawing, go_on = threading.Event(), threading.Event()

    def draw() -> None:
        with progress._drawing:
            drawing.set()
            go_on.wait()

    thread = threading.Thread(target=draw)
    thread.start()
    drawing.wait()
    threading.Timer(0.05, go_on.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if go_on.is_set() and progress._drawing.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


DEMO = """
from rl_training.runtime.progress import make_progress
metrics = {"train_return_mean": 21.5, "policy_loss": -0.0123, "lr": 2.5e-4, "clip_coef": None}
metrics |= {f"part{i}_loss": float(i) for i in range(12)}
with make_progress(schedule_names=["lr", "clip_coef"]) as shown:
    shown.start(1_000_000, "ppo on [CartPole-v1] " + "x" * 200)
    shown.update(250_000, metrics)
    shown.message("note [bold]")
    print("printed")
print("after")
"""


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_live_display_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    import pty

    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40", "NO_COLOR": "1"}
    with open(tmp_path / "errors", "w") as errors:
        done = subprocess.Popen([sys.executable, "-c", DEMO], stdout=child, stderr=errors, env=environment)
        os.close(child)
        output = b""
        while True:
            try:
                block = os.read(parent, 4096)
            except OSError:  # how Linux says that the other side is closed
                break
            if not block:
                break
            output += block
        assert done.wait() == 0, (tmp_path / "errors").read_text()
    os.close(parent)
    text = output.decode()
    for expected in ("250,000/1,000,000 25%", "steps/s", "train", "21.5", "policy", "2.50e-04", "off", "and 5 more"):
        assert expected in text
    for expected in ("ppo on [CartPole-v1] x", "note [bold]", "printed\r\n", "after\r\n"):
        assert expected in text
    visible = text.replace("\r", "").split("\n")
    assert all(len(line) <= 80 for line in visible if "\x1b" not in line)
    assert "\x1b[?25h" in text, "the cursor is given back"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_progress(stream=Terminal()), LiveProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(stream=Terminal()), PlainProgress)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.2, "0.2"),
        (12.3456, "12.35"),
        (-1234.56, "-1,234.6"),
        (123_456.0, "123,456"),
        (2.5e-4, "2.50e-04"),
        (1e7, "1.00e+07"),
        (math.nan, "-"),
        (math.inf, "inf"),
        (None, "off"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text
    assert len(number(value)) <= 9


def test_duration() -> None:
    assert [duration(s) for s in (0, 61.9, 3600 * 30 + 5, None, math.inf)] == [
        "0:00:00",
        "0:01:01",
        "30:00:05",
        "-",
        "-",
    ]


def test_summary_lines_are_aligned_and_never_folded() -> None:
    stream = io.StringIO()
    long = "runs/" + "x" * 100
    summary(
        "Finished",
        {"run folder": long, "evaluation": None},
        {"tensorboard": "tensorboard --logdir runs"},
        stream=stream,
    )
    assert stream.getvalue().splitlines() == [
        "",
        "Finished",
        f"  run folder   {long}",
        "",
        "Next:",
        "  tensorboard  tensorboard --logdir runs",
    ]
