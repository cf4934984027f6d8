"""The reference scripts run as they stand."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import pytest

import rl_training
from conftest import REPOSITORY
from rl_training import load_config
from rl_training.runtime.controls import Controls
from rl_training.runtime.registry import ALGORITHMS
from rl_training.runtime.run_folder import resolved_kwargs

SCRIPTS = sorted((REPOSITORY / "examples").glob("*_reference.py"))


class Seen(Exception):
    pass


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_reference_script_has_the_numbers_of_its_config(script, monkeypatch):
    """What was tuned and measured is the config: a script that lags behind would learn worse."""
    seen = []

    def see(config, **_):
        if not script.stem.startswith(f"{config.algo}_"):  # an expert to imitate
            return SimpleNamespace(run_dir=None, checkpoint_path=None)
        seen.append(config)
        raise Seen

    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(rl_training, "train", see)
    monkeypatch.setattr(rl_training, "record_demonstrations", lambda *_, **__: None)
    with pytest.raises(Seen):
        runpy.run_path(str(script), run_name="__main__")
    (ours,) = seen
    name = script.stem.removeprefix(f"{ours.algo}_").removesuffix("_reference")
    config = load_config(REPOSITORY / "configs" / ours.algo / f"{name}.yaml")
    assert numbers(ours) == numbers(config)


def numbers(config):
    controls = Controls(ALGORITHMS[config.algo].recipe.hyperparameters, config.algo_kwargs, config.horizon)
    return config.tasks, config.num_envs, config.total_timesteps, resolved_kwargs(controls)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_reference_script(script, tmp_path, monkeypatch, capsys):
    words = ["--total-timesteps", "512", "--eval-episodes", "2", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    assert "over 2 episodes" in capsys.readouterr().out
    assert list(tmp_path.iterdir())
