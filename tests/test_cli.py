"""The command line as a user meets it: what it prints, how it exits."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from conftest import REPOSITORY
from rl_training import load_config, load_policy
from rl_training.cli import app
from rl_training.errors import InputError
from rl_training.runtime import checkpoints, workflows
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.preview import axis, plot, save_png
from test_training_controls import controls

CARTPOLE = REPOSITORY / "configs" / "ppo" / "cartpole.yaml"
SMALL = ["--total-timesteps", "512", "--num-envs", "2", "--set", "eval_episodes=2", "--set", "eval_interval=0"]


def cli(*words, code=0, cwd=None, all_output=False):
    """Call the command in this process (a new one spends seconds on importing torch)."""
    with pytest.MonkeyPatch.context() as patch:
        if cwd:
            patch.chdir(cwd)
        patch.setattr(sys, "argv", ["rl-training", *map(str, words)])
        patch.setattr(sys, "path", list(sys.path))
        done = CliRunner().invoke(app, sys.argv[1:])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output if all_output else done.stdout if code == 0 else done.stderr


def test_a_closed_output_ends_no_command(tmp_path):
    code = "import sys; sys.stdout = sys.stderr = None; from rl_training.cli import main; sys.exit(main(['--version']))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """One small training run, made from the command line, that all tests of this module read."""
    out = tmp_path_factory.mktemp("cli")
    text = cli("train", "--config", CARTPOLE, *SMALL, "--output-dir", out, "--run-suffix", "one", "--seed", 5)
    folder = out / "ppo__CartPole-v1__seed5__one"
    assert str(folder) in text
    return folder, text


def test_train_ends_with_the_evaluation_and_the_next_commands(run_dir):
    folder, text = run_dir
    for words in ("evaluation", f"eval {folder}", f"resume {folder}", "tensorboard --logdir"):
        assert words in text
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["seed"], saved["num_envs"], saved["total_timesteps"]) == (5, 2, 512)
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["status"] == "finished"
    assert metadata["versions"]["torch"]
    assert "--seed 5" in metadata["command"]


def test_the_printed_next_commands_run(run_dir, tmp_path):
    folder, text = run_dir
    printed = {
        line.split()[0]: line.split("rl-training ", 1)[1] for line in text.splitlines() if "rl-training " in line
    }
    assert "eval_return_mean" in cli(*printed["evaluate"].split())
    resumed = cli(*printed["resume"].split(), "--output-dir", tmp_path)
    assert "Trained 1,024 steps" in resumed
    assert f"resumed from {folder / 'checkpoints' / 'step_512'}" in resumed
    assert "WARNING" not in resumed
    (again,) = tmp_path.iterdir()
    before, after = (load_policy(path).actor.model.state_dict() for path in (folder, again))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_the_printed_resume_stretches_only_what_is_scheduled(tmp_path):
    fixed = ["--set", "algo_kwargs.learning_rate=0.001", "--set", "algo_kwargs.clip_coef=0.2"]
    text = cli("train", CARTPOLE, *SMALL, *fixed, "--output-dir", tmp_path)
    assert "--total-timesteps 1024" in text
    assert "--extend" not in text


def test_a_resume_that_learns_nothing_says_so_before_it_starts(run_dir, tmp_path):
    folder, _ = run_dir
    words = ["resume", "--checkpoint", folder, "--total-timesteps", 1024, "--output-dir", tmp_path]
    lines = cli(*words, "--progress", "plain").splitlines()
    warning = next(i for i, line in enumerate(lines) if "learning_rate is 0 from step 513 to step 1,024" in line)
    assert "--extend stretch" in lines[warning]
    assert warning < next(i for i, line in enumerate(lines) if "1,024/1,024" in line)
    assert "learning_rate is 0" not in cli(*words, "--progress", "plain", "--extend", "stretch")


def test_a_checkpoint_that_cannot_be_written_is_one_line_and_exit_1(tmp_path, monkeypatch):
    write, writes = checkpoints._write_file, []

    def full(file, blocks):
        writes.append(file)
        if len(writes) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, blocks)

    monkeypatch.setattr(checkpoints, "_write_file", full)
    words = ["train", CARTPOLE, *SMALL, "--set", "checkpoint_interval=64", "--output-dir", tmp_path]
    errors = cli(*words, "--set", "algo_kwargs.num_steps=32", "--run-suffix", "full", code=1)
    folder = tmp_path / "ppo__CartPole-v1__seed0__full"
    saved = folder / "checkpoints"
    assert errors.strip() == (
        f"error: training failed at step 128: {saved / 'step_128'} cannot be written: No space left on device; "
        f"the last good checkpoint is {saved / 'step_64'}"
    )
    assert json.loads((folder / "metadata.json").read_text())["status"].startswith("failed: TrainingFailed")
    assert load_checkpoint(folder / "checkpoints" / "step_64").step == 64


def test_eval_of_a_checkpoint(run_dir):
    folder, _ = run_dir
    text = cli("eval", "--checkpoint", folder / "checkpoints" / "step_512", "--num-episodes", 3)
    assert "eval_episodes      3" in text


@pytest.mark.parametrize(("words", "code"), [(["train", "nowhere.yaml"], 2), (["--help"], 0)])
def test_a_real_process_exits_the_same_way(words, code, tmp_path):
    command = [sys.executable, "-m", "rl_training", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_train_takes_the_file_alone_and_overrides(tmp_path):
    cli(
        "train",
        CARTPOLE,
        *SMALL,
        "--set",
        "algo_kwargs.clip_coef=0.1",
        "--set",
        "tags=[x]",
        "--device",
        "cpu",
        cwd=tmp_path,
    )
    (folder,) = (tmp_path / "runs").iterdir()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["algo_kwargs"]["clip_coef"] == 0.1
    assert saved["tags"] == ["x"]


def test_module_environments_only_with_allow_import(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    words = ["train", CARTPOLE, *SMALL, "--set", "env_id=mine:Mine-v0", "--run-suffix", "m"]
    assert "--allow-import" in cli(*words, code=2, cwd=tmp_path)
    assert not (tmp_path / "runs").exists()
    cli(*words, "--allow-import", cwd=tmp_path)
    run = "runs/ppo__mine-Mine-v0__seed0__m"
    assert "--allow-import" in cli("eval", "--checkpoint", run, code=2, cwd=tmp_path)
    cli("eval", "--checkpoint", run, "--allow-import", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["train"], "give one config"),
        (["train", CARTPOLE, "--config", CARTPOLE], "give one config"),
        (["train", CARTPOLE, "--set", "algo_kwargs.clip_ceof=1"], "did you mean 'clip_coef'"),
        (["train", CARTPOLE, "--set", "env_kwargs.gravty=1"], "gravty"),
        (["train", CARTPOLE, "--num-envs", "0"], "num_envs"),
        (["eval", "--checkpoint", "nowhere"], "nowhere"),
        (["resume", "--checkpoint", "nowhere"], "nowhere"),
        (["algorithms", "pppo"], "did you mean 'ppo'"),
        (["trian"], "No such command"),
    ],
)
def test_bad_input_exits_with_2_and_no_traceback(words, expected, tmp_path):
    assert expected in cli(*words, code=2, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_resume_of_a_finished_run_says_what_is_missing(run_dir):
    assert "total_timesteps" in cli("resume", "--checkpoint", run_dir[0], code=2)


def test_config_verbs(tmp_path):
    assert "ok" in cli("config", "check", CARTPOLE)
    shown = yaml.safe_load(cli("config", "show", CARTPOLE, "--set", "seed=3"))
    assert shown["seed"] == 3
    assert shown["algo_kwargs"]["vf_coef"] == 0.5
    (tmp_path / "shown.yaml").write_text(yaml.safe_dump(shown))
    assert "ok" in cli("config", "check", tmp_path / "shown.yaml")
    assert json.loads(cli("config", "schema"))["$defs"]["ppo"]["properties"]["clip_range_schedule"]


def test_schedule_shows_a_table_a_plot_and_a_picture(tmp_path):
    text = cli("schedule", CARTPOLE, "--png", tmp_path / "s.png")
    row = next(line for line in text.splitlines() if line.startswith("clip_coef")).split()
    assert [float(x) for x in row[1:]] == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0, 0.0, 0.2], abs=1e-5)
    assert any(0x2800 < ord(c) < 0x2900 for c in text)
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    fixed = cli("schedule", CARTPOLE, "--set", "algo_kwargs.clip_coef=0.1", "--set", "algo_kwargs.learning_rate=1e-3")
    assert "nothing is scheduled" in fixed


def test_algorithms_doctor_and_version():
    listed = cli("algorithms")
    assert "clip_coef" in listed
    assert "a2c" in listed
    assert "MultiBinary" in listed
    assert "rmsprop" not in cli("algorithms", "ppo")
    doctor = cli("doctor")
    assert all(word in doctor for word in ("torch", "threads", "backends", "devices"))
    assert cli("--version").startswith("rl-training ")


def test_sac_from_the_command_line(tmp_path):
    """Train, evaluate, resume: all from the checkpoint alone."""
    words = ["--set", "algo_kwargs.hidden_sizes=[16, 16]", "--set", "algo_kwargs.alpha_schedule={kind: linear}"]
    words += ["--set", "algo_kwargs.alpha=0.2", "--output-dir", tmp_path, "--run-suffix", "one"]
    config = REPOSITORY / "configs" / "sac" / "pendulum.yaml"
    text = cli("train", "--config", config, *SMALL, *words)
    run = tmp_path / "sac__Pendulum-v1__seed0__one"
    assert str(run) in text
    assert "eval_episodes      3" in cli("eval", "--checkpoint", run, "--num-episodes", 3)
    resumed = cli("resume", "--checkpoint", run, "--total-timesteps", 600, "--output-dir", tmp_path / "resumed")
    assert "at step 512" in resumed
    (again,) = (tmp_path / "resumed").iterdir()
    lines = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert (last["global_step"], last["alpha"]) == (600, 0.0)


def test_resume_passes_its_options_on(tmp_path, monkeypatch):
    assert "steps/s" not in cli("train", CARTPOLE, *SMALL, "--output-dir", tmp_path / "a", "--progress", "silent")
    (folder,) = (tmp_path / "a").iterdir()
    words = ["resume", "--checkpoint", folder, "--total-timesteps", 1024, "--extend", "stretch", "--progress", "silent"]
    text = cli(*words, "--output-dir", tmp_path / "b")
    assert "resumed from" not in text  # silent
    (resumed,) = (tmp_path / "b").iterdir()
    assert load_config(resumed / "config.yaml").horizon == 1024
    given = {}
    played = SimpleNamespace(metrics={})
    monkeypatch.setattr(workflows, "play_checkpoint", lambda path, **options: given.update(options) or played)
    cli("eval", "--checkpoint", folder, "--device", "cpu")
    assert given["device"] == "cpu"


def test_overrides_are_checked_too():
    assert "did you mean 'seed'" in cli("config", "check", CARTPOLE, "--set", "sede=1", code=2)


@pytest.mark.parametrize(("name", "code"), [("TrainingDiverged", 1), ("KeyboardInterrupt", 130)])
def test_what_ends_training_has_its_exit_code(name, code, tmp_path, monkeypatch):
    from rl_training.runtime.metrics import TrainingDiverged

    error = TrainingDiverged(5, "policy_loss", math.nan) if name == "TrainingDiverged" else KeyboardInterrupt()
    monkeypatch.setattr(workflows, "train", lambda *_, **__: (_ for _ in ()).throw(error))
    assert "Traceback" not in cli("train", CARTPOLE, "--output-dir", tmp_path, code=code)


@pytest.mark.parametrize("words", [["--output-dir", "file/runs"], ["--output-dir", "o", "--run-suffix", "x" * 300]])
def test_a_folder_that_cannot_be_made_is_bad_input(words, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be made" in cli("train", CARTPOLE, *SMALL, *words, code=2, cwd=tmp_path)


def test_the_plot_is_the_right_way_up():
    rising = plot([0.0, 1.0], width=2, height=1)
    falling = plot([1.0, 0.0], width=2, height=1)
    assert ord(rising[0][-1]) & 0x08
    assert ord(falling[0][-1]) & 0x80
    assert not ord(falling[0][-1]) & 0x08


def test_the_plot_has_axes():
    lines = plot([0.0, 1.0, 2.0], width=20, height=5)
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["2", "1", "0"]
    assert len({line.index(mark) for line in lines for mark in "┤│" if mark in line}) == 1, "one upright line"
    below, marks = axis(1_000, width=40).splitlines()
    assert below.index("└") == lines[0].index("┤")
    assert marks.split() == ["0", "250", "500", "750", "1,000", "env", "steps"]
    ticks = [place for place, mark in enumerate(below) if mark == "┬"]
    for text, tick in (("250", ticks[1]), ("500", ticks[2]), ("750", ticks[3])):
        assert abs(marks.index(text) + len(text) / 2 - tick) <= 1, "each number is below its tick"
    flat = plot([3.0, 3.0], width=4, height=3)
    assert [line.strip()[0] for line in flat] == ["3", "│", "│"]
    for horizon in (1, 100_000, 10**15):
        assert all(f"{round(part * horizon / 4):,}" in axis(horizon) for part in range(5))


def test_no_picture_of_nothing(tmp_path):
    with pytest.raises(InputError, match="nothing is scheduled"):
        save_png(controls(), tmp_path / "s.png")


def test_resume_imports_nothing_unasked(tmp_path):
    (tmp_path / "mine2.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine2-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)"
    )
    words = ["train", CARTPOLE, *SMALL, "--set", "env_id=mine2:Mine2-v0", "--run-suffix", "m", "--allow-import"]
    cli(*words, cwd=tmp_path)
    run = "runs/ppo__mine2-Mine2-v0__seed0__m"
    assert "--allow-import" in cli("resume", "--checkpoint", run, "--total-timesteps", 1024, code=2, cwd=tmp_path)


def test_paths_on_the_command_line_are_taken_as_they_are(tmp_path):
    cli("train", CARTPOLE, *SMALL, "--output-dir", "2024", cwd=tmp_path)
    cli("train", CARTPOLE, *SMALL, "--output-dir", "o #1", cwd=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2024", "o #1"]
