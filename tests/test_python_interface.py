"""From Python: a config in any form, one type of error, the command line as a function; and runs found by `latest`."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import asdict

import pytest
import yaml

import rl_training
from conftest import REPOSITORY
from rl_training import ConfigError, TrainConfig, latest_run, load_config, train
from rl_training.cli import main
from rl_training.errors import InputError
from test_cli import CARTPOLE, SMALL, cli


def test_train_takes_a_config_a_mapping_and_a_path(tiny_config, tmp_path):
    config = tiny_config("ppo", {"total_timesteps": 64})
    data = asdict(config) | {"output_dir": str(config.output_dir)}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    losses = {
        train(given, progress="silent").metrics["policy_loss"]
        for given in (config, data, {**data, "algo_kwargs": dict(config.algo_kwargs)}, path, str(path))
    }
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "a config is a TrainConfig, a mapping of its keys or the path of a YAML file, got int"),
        (None, "got NoneType"),
        ("nowhere.yaml", "nowhere.yaml: there is no such file"),
        ({"algo": "ppo"}, "env_id: is missing"),
        ({"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": -1}, "total_timesteps: should be greater"),
        ({"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 9, 3: 4}, "3: keys should be text"),
    ],
)
def test_what_is_no_config_is_an_input_error(given, message):
    with pytest.raises(InputError, match=re.escape(message)):
        train(given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_timesteps": -1},
        {"total_timesteps": True},
        {"num_envs": "four"},
        {"num_envs": 2.5},
        {"num_envs": {"kind": "linear"}},
        {"num_envs_schedule": "linear"},
        {"nmu_envs": 4},
        {"env_id": 3},
        {"tags": "x"},
        {"wandb": 1},
        {"total_timesteps": -1, "seed": -1, "sede": 3},
    ],
    ids=str,
)
def test_a_config_made_in_python_raises_what_its_yaml_file_would(wrong, tmp_path):
    data = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 1000} | wrong
    with pytest.raises(ConfigError) as in_python:
        TrainConfig(**data)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(ConfigError) as in_yaml:
        load_config(path)
    assert in_python.value.problems == in_yaml.value.problems
    assert str(in_python.value) == re.sub(rf"{re.escape(str(path))}, line \d+: ", "", str(in_yaml.value))


def test_so_does_one_that_is_changed():
    config = TrainConfig("ppo", "CartPole-v1", 1000)
    with pytest.raises(ConfigError, match="total_timesteps"):
        dataclasses.replace(config, total_timesteps=0)
    assert dataclasses.replace(config, seed=3).seed == 3
    assert config == TrainConfig("ppo", "CartPole-v1", 1000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4


@pytest.mark.parametrize("key", ["num_envs", "total_timesteps", "seed", "eval_interval"])
def test_a_key_of_the_top_level_that_is_given_a_schedule_says_that_it_takes_none(key, tmp_path):
    data = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 1000}
    for wrong in ({key: {"kind": "linear", "start": 8, "end": 1}}, {f"{key}_schedule": "linear"}):
        with pytest.raises(
            ConfigError, match=f"^{next(iter(wrong))}: .*fixed for the whole run and cannot be scheduled"
        ):
            TrainConfig(**(data | wrong))


def test_the_command_line_is_a_function(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rl-training {rl_training.__version__}\n"
    assert main(["config", "check", CARTPOLE]) == 0
    assert main(["train", "nowhere.yaml"]) == 2
    assert main(["nonsense"]) == 2


def test_the_version_is_that_of_the_distribution():
    assert re.fullmatch(r"\d+\.\d+\.\d+", rl_training.__version__)
    assert 'version = { attr = "rl_training.__version__" }' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs_of_python")
    cli("train", CARTPOLE, *SMALL[2:], "--total-timesteps", "2e2", "--output-dir", out, "--run-suffix", "one")
    (folder,) = out.iterdir()
    return folder


@pytest.mark.parametrize("steps", ["1e3", "1_000", "1000", "1000.0"])
def test_steps_on_the_command_line_are_written_as_in_yaml(steps, monkeypatch):
    given = []
    monkeypatch.setattr("rl_training.runtime.workflows.train", lambda config, **_: given.append(config) or exit(0))
    cli("train", CARTPOLE, "--total-timesteps", steps)
    assert given[0].total_timesteps == 1000
    assert isinstance(given[0].total_timesteps, int)


@pytest.mark.parametrize("steps", ["1.5", "many", "nan", "inf", "1e400"])
def test_steps_that_are_no_whole_number_are_refused(steps):
    assert "whole number" in cli("train", CARTPOLE, "--total-timesteps", steps, code=2)


def test_eval_and_resume_take_the_run_as_it_is(run_dir, tmp_path):
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["total_timesteps"] == 200
    by_option = cli("eval", "--checkpoint", run_dir, "--num-episodes", 2)
    assert cli("eval", run_dir, "--num-episodes", 2) == by_option
    assert cli("eval", "latest", "--output-dir", run_dir.parent, "--num-episodes", 2) == by_option
    assert "resumed from" in cli("resume", run_dir, "--total-timesteps", "6e2", "--output-dir", tmp_path)
    for verb in ("eval", "resume"):
        assert "give one run" in cli(verb, code=2)
        assert "give one run" in cli(verb, run_dir, "--checkpoint", run_dir, code=2)


def test_latest_is_looked_for_in_runs(run_dir, tmp_path):
    assert "there is no run with a checkpoint in runs" in cli("eval", "latest", code=2, cwd=tmp_path)
    (tmp_path / "runs").symlink_to(run_dir.parent)
    assert "eval_return_mean" in cli("eval", "latest", "--num-episodes", 1, cwd=tmp_path)
    (tmp_path / "latest").mkdir()  # a folder is meant by its name
    assert "latest holds no checkpoint" in cli("eval", "latest", code=2, cwd=tmp_path)


def make_run(folder, name, started, checkpoint="step_10"):
    run = folder / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    (run / "metadata.json").write_text(json.dumps({"started": started}))
    if checkpoint:
        (run / "checkpoints" / checkpoint).mkdir()
    return run


def test_the_latest_run_is_the_one_started_last_that_has_a_checkpoint(tmp_path):
    with pytest.raises(InputError, match="there is no run"):
        latest_run(tmp_path / "nowhere")
    newest = make_run(tmp_path, "a", "2026-05-02T10:00:00+00:00")
    make_run(tmp_path, "z", "2026-05-01T10:00:00+00:00")
    make_run(tmp_path, "begun", "2026-05-03T10:00:00+00:00", checkpoint=None)
    make_run(tmp_path, "writing", "2026-05-03T10:00:00+00:00", checkpoint=".step_10.tmp")
    (tmp_path / "notes.txt").write_text("")
    assert latest_run(tmp_path) == newest
    (make_run(tmp_path, "damaged", "") / "metadata.json").write_text("{")
    assert latest_run(str(tmp_path)) == newest
    best = make_run(tmp_path, "best", "2026-05-04T10:00:00+00:00", checkpoint="best")
    assert latest_run(tmp_path) == best
