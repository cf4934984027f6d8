"""Benchmarks that call the package's insides still run. What they measure is not looked at."""

from __future__ import annotations

import sys

import pytest

from conftest import REPOSITORY


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")


@pytest.mark.usefixtures("benchmarks")
def test_the_speed_of_the_search(capsys, monkeypatch):
    import search_speed

    monkeypatch.setattr(search_speed, "find_spec", lambda name: None)  # without mctx, which compiles for seconds
    words = ["--actions", "2", "--batch", "1", "--repeats", "1", "--least", "0.001"]
    monkeypatch.setattr(sys, "argv", ["search_speed.py", *words])
    search_speed.main()
    assert "fused efficientzero / torch efficientzero" in capsys.readouterr().out


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("name", ["fused", "torch"])
def test_the_search_that_is_measured_is_the_one_that_is_named(name, monkeypatch):
    import search_speed

    actor, asked = search_speed.make("muzero", 2, "cpu"), []
    recurrent = actor.planner.inference.recurrent
    monkeypatch.setattr(actor.planner.inference, "recurrent", lambda *args: asked.append(1) or recurrent(*args))
    search_speed.our_search(actor, "muzero", 1, "cpu", fused=name == "fused")()
    assert len(asked) == (0 if name == "fused" else search_speed.SIMULATIONS)


@pytest.mark.usefixtures("benchmarks")
def test_the_gradient_step_of_dreamer(capsys, monkeypatch):
    import dreamer

    monkeypatch.setattr(dreamer, "BATCH", {"batch_size": 2, "batch_length": 4, "imagination_length": 2})
    words = ["--precision", "bfloat16", "--observations", "images", "--repeats", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["dreamer.py", *words])
    dreamer.main()
    ways = [row.split(" | ")[1:3] for row in capsys.readouterr().out.splitlines() if row.startswith("| 1m")]
    plain = "eager torch: DreamerPath"
    assert ways == [["rl_training: CompiledPath", "bfloat16"], [plain, "bfloat16"], [plain, "float32"]]


@pytest.mark.usefixtures("benchmarks")
def test_the_speed_of_actors():
    import actors
    from versus import measure

    programs = actors.programs("CartPole-v1", 4, 2)
    assert list(programs) == ["impala, serial", "impala, 2 processes", "appo, serial", "appo, 2 processes", "ppo"]
    row = measure(programs["impala, serial"], 2_048, 0)
    assert row["wall"] > 0
    assert row["policy_lag_mean"] == 0
