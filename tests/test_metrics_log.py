"""The metrics log: every record once in each sink, also after a resume; and what a run was made with."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from rl_training import resume_training, train
from rl_training.runtime import event_files, metadata, metrics
from rl_training.runtime.metadata import git_state, update_metadata, write_json_atomic, write_metadata
from rl_training.runtime.metrics import MetricsLog, RunningMeans, TrainingDiverged, check_finite, tensorboard_tag


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(run_dir))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_record_reaches_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.time, "time", lambda: 1_700_000_000.1234)
    with MetricsLog(tmp_path, schedule_names={"lr"}) as log:
        log.write({"global_step": 10, "lr": 0.5, "policy_loss": np.float32(0.25), "eval_return_mean": 3, "off": None})
        evaluation = {"global_step": 20, "lr": 0.25, "policy_loss": math.nan, "train_return_mean": -math.inf}
        log.write(evaluation, kind="eval", wall_seconds=12.34567)
    head = {"time": 1_700_000_000.123}
    assert lines(tmp_path) == [
        {
            "kind": "train",
            **head,
            "global_step": 10,
            "lr": 0.5,
            "policy_loss": 0.25,
            "eval_return_mean": 3,
            "off": None,
        },
        {"kind": "eval", **head, "wall_seconds": 12.346}
        | {"global_step": 20, "lr": 0.25, "policy_loss": None, "train_return_mean": None},
    ]
    assert events(tmp_path) == {
        "schedule/lr": [(10, 0.5), (20, 0.25)],
        "loss/policy_loss": [(10, 0.25)],
        "eval/eval_return_mean": [(10, 3.0)],
    }


def test_lines_tell_the_time_and_the_seconds_of_the_whole_run(tiny_config: Any) -> None:
    config = tiny_config("a2c", {"log_interval": 64, "eval_interval": 128})
    before = time.time()
    half = train(config, callbacks=[lambda run: run.stop("half") if run.step >= 128 else None], progress="silent")
    whole = resume_training(half.run_dir, progress="silent")
    first, second = lines(half.run_dir), lines(whole.run_dir)
    assert [line["kind"] for line in first] == ["train", "train", "eval"]
    assert [line["kind"] for line in second] == ["train", "train", "eval"]
    for line in first + second:
        assert ("eval_return_mean" in line) == (line["kind"] == "eval")
        assert ("train_return_mean" in line) == (line["kind"] == "train")
    for clock in ("time", "wall_seconds"):
        assert [line[clock] for line in first + second] == sorted(line[clock] for line in first + second), clock
    assert before <= first[0]["time"] <= second[-1]["time"] <= time.time()
    assert second[0]["wall_seconds"] - first[-1]["wall_seconds"] < second[0]["time"] - first[-1]["time"]


def test_lines_are_flushed_in_time_and_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path)
    log.write({"global_step": 1})
    assert lines(tmp_path) == []
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", -1.0)
    log.write({"global_step": 2})
    assert len(lines(tmp_path)) == 2
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 60.0)
    log.write({"global_step": 3})
    log.close()
    log.close()
    assert len(lines(tmp_path)) == 3


def test_a_new_run_does_not_write_into_an_old_log(tmp_path: Path) -> None:
    MetricsLog(tmp_path).close()
    with pytest.raises(FileExistsError, match="earlier run"):
        MetricsLog(tmp_path)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("clip_coef", "schedule/clip_coef"),
        ("gamma", "hyperparameter/gamma"),
        ("eval_return_mean", "eval/eval_return_mean"),
        ("train_return_mean", "train/train_return_mean"),
        ("value_loss", "loss/value_loss"),
        ("loss", "loss/loss"),
        ("value_loss/CartPole-v1", "loss/value_loss/CartPole-v1"),
        ("policy_loss/ALE/Pong-v5", "loss/policy_loss/ALE/Pong-v5"),
        ("approx_kl", "train/approx_kl"),
        ("stage/ALE/Loss_loss", "train/stage/ALE/Loss_loss"),
        ("steps_per_second", "time/steps_per_second"),
        ("time_collect", "time/time_collect"),
    ],
)
def test_tags(name: str, tag: str) -> None:
    assert tensorboard_tag(name, {"clip_coef"}, {"clip_coef", "gamma"}) == tag


def test_tensorboard_calls_a_run_by_its_folder(tiny_config: Any, tmp_path: Path) -> None:
    names = [train(tiny_config("a2c", {"seed": seed}), progress="silent").run_dir.name for seed in (1, 2)]
    shown = EventMultiplexer()
    shown.AddRunsFromDirectory(str(tmp_path / "runs"))
    assert sorted(shown.Runs()) == sorted(names)


def plugin_values(run_dir: Path, plugin: str) -> dict[str, Any]:
    """Tensors and contents that a run wrote for one of TensorBoard's tabs, by tag."""
    found = EventAccumulator(str(run_dir))
    found.Reload()
    contents = found.PluginTagToContent(plugin)
    return {tag: (content, found.Tensors(tag)[0].tensor_proto) for tag, content in contents.items()}


@pytest.mark.parametrize("public", [False, True], ids=["own", "public"])
def test_tensorboard_has_the_config_as_text_and_as_hyperparameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public: bool
) -> None:
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    if public:
        monkeypatch.setattr(metrics, "open_events", event_files.TorchEventFile)
    schedule = {"kind": "linear", "start": 0.1, "end": 0.0}
    kwargs = {"lr": 0.5, "ent_coef": schedule, "sizes": [64, 64], "on": True, "off": None, "act": "tanh"}
    MetricsLog(tmp_path / "one", config={"algo": "a2c", "seed": 3, "algo_kwargs": kwargs}).close()
    ((_, tensor),) = plugin_values(tmp_path / "one", "text").values()
    title, _, text = tensor.string_val[0].decode().partition("\n\n```yaml\n")
    assert title == "# one"
    assert yaml.safe_load(text.removesuffix("```")) == {"algo": "a2c", "seed": 3, "algo_kwargs": kwargs}
    ((content, _),) = plugin_values(tmp_path / "one", "hparams").values()
    start = parse_session_start_info_plugin_data(content)
    assert start.group_name == "one"
    shown = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    assert {key: value for key, value in shown.items() if key != "algo_kwargs.ent_coef"} == {
        "algo": "a2c",
        "seed": 3.0,
        "algo_kwargs.lr": 0.5,
        "algo_kwargs.sizes": "[64, 64]",
        "algo_kwargs.on": True,
        "algo_kwargs.act": "tanh",
    }
    assert json.loads(shown["algo_kwargs.ent_coef"]) == schedule


def test_only_what_varies_is_under_schedule(tiny_config: Any) -> None:
    schedule = {"kind": "linear", "start": 0.01, "end": 0.0}
    tags = events(train(tiny_config("a2c", ent_coef=schedule), progress="silent").run_dir)
    assert [tag for tag in tags if tag.startswith("schedule/")] == ["schedule/ent_coef"]
    assert tags["hyperparameter/gamma"][0][1] == pytest.approx(0.99)
    learned = events(train(tiny_config("sac", alpha="auto"), progress="silent").run_dir)
    assert "train/alpha" in learned
    assert not {"schedule/alpha", "hyperparameter/alpha"} & learned.keys(), "a learned number is neither"


def test_wandb_is_named_when_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r'pip install "rl-training\[wandb\]"'):
        MetricsLog(tmp_path, wandb={})
    assert not (tmp_path / "metrics.jsonl").exists()
    MetricsLog(tmp_path).close()


def test_wandb_gets_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLog(tmp_path, wandb={"project": "p"}) as log:
        log.write({"global_step": 4, "loss": 1.0})
    assert calls == [{"dir": str(tmp_path), "name": tmp_path.name, "project": "p"}, (4, {"loss/loss": 1.0}), "finish"]


def test_running_means_are_over_the_updates_that_reported(tmp_path: Path) -> None:
    means = RunningMeans()
    means.add({"loss": 1.0, "aux": 8.0})
    means.add({"loss": 3.0})
    copy = RunningMeans()
    copy.load_state_dict(json.loads(json.dumps(means.state_dict())))
    assert means.mean() == copy.mean() == {"loss": 2.0, "aux": 8.0}
    assert means.mean() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_divergence_names_loss_and_step(value: float) -> None:
    check_finite({"a": 1.0, "b": -3}, 5)
    with pytest.raises(TrainingDiverged, match="diverged at step 12,000: value_loss is") as caught:
        check_finite({"policy_loss": 1.0, "value_loss": value}, 12_000)
    assert (caught.value.step, caught.value.name) == (12_000, "value_loss")
    assert str(TrainingDiverged(1, "loss", value, remedy="go back to step_0")).endswith("; go back to step_0")


def test_metadata_tells_how_the_run_was_made(tmp_path: Path) -> None:
    write_metadata(tmp_path, command=["rl-training", "train", "my config.yaml"], seed=3, extra={"device": "cpu"})
    update_metadata(tmp_path, status="finished")
    data = json.loads((tmp_path / "metadata.json").read_text())
    assert data["command"] == "rl-training train 'my config.yaml'"
    assert data["seed"] == 3
    assert data["device"] == "cpu"
    assert data["status"] == "finished"
    assert data["started"] <= data["updated"]
    assert {"python", "rl_training", "torch", "gymnasium", "numpy"} <= data["versions"].keys()


def test_metadata_survives_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"seed": 3, "ver')
    update_metadata(tmp_path, status="finished")
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "finished"


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    file = tmp_path / "file"
    file.write_text("1")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    clean = git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    file.write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = write_json_atomic(tmp_path / "a.json", {"x": 1})
    with open(path) as reader:
        write_json_atomic(path, {"x": 2})
        assert json.load(reader) == {"x": 1}, "an open file keeps its content"
    assert json.loads(path.read_text()) == {"x": 2}


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json_atomic(tmp_path / "new" / "a.json", {"x": 1})

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(metadata.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_json_atomic(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1}
    assert len(list(path.parent.iterdir())) == 1
