"""The progress display: lines where output is a file, a live display on a terminal, and a summary to copy from."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_training.runtime import progress
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
        "loss policy -0.0123 value 12.5 schedule lr 2.50e-04"
    )
    assert len(first) == len(second), "columns stay in place"
    assert first.index("loss") == second.index("loss")


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


def test_live_is_drawn_at_most_once_a_second(clock: list[float]) -> None:
    shown = LiveProgress(stream=io.StringIO())
    draws: list[float] = []
    shown._live.refresh = lambda: draws.append(clock[0])  # type: ignore[method-assign]
    for step in range(1000):
        clock[0] += 0.01
        shown.update(step, METRICS)
    assert 9 <= len(draws) <= 11


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
