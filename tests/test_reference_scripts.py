"""The reference scripts run as they stand."""

from __future__ import annotations

import runpy
import sys

import pytest

from conftest import REPOSITORY

SCRIPTS = sorted((REPOSITORY / "examples").glob("*_reference.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_reference_script(script, tmp_path, monkeypatch, capsys):
    words = ["--total-timesteps", "512", "--eval-episodes", "2", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    assert "over 2 episodes" in capsys.readouterr().out
    assert list(tmp_path.iterdir())
