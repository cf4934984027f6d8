"""Runs, groups and the table of a report, from folders whose numbers are known."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_training import resume_training, train
from rl_training.errors import InputError
from rl_training.reports import group_runs, load_run, load_runs, table, text_table
from rl_training.runtime.atomic_files import lock
from run_folders import write_run


def test_a_curve_is_of_the_log_lines_or_of_the_evaluations(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", scores=(10.0, 20.0), more={"value_loss": math.nan}))
    assert [list(axis) for axis in run.curve("eval_return_mean")] == [[100, 200], [10, 20], [10, 20]]
    assert [list(axis) for axis in run.curve("train_return_mean")] == [
        [50, 100, 150, 200],
        [5, 10, 15, 20],
        [9, 9, 19, 19],
    ]
    assert len(run.curve("value_loss").steps) == 0, "what is not a number is not drawn"
    assert run.score("eval_return_mean") == 20.0
    assert run.score("nothing") is None
    assert (run.step, run.wall_seconds, run.seed, run.status) == (200, 20.0, 0, "finished")
    assert "eval_return_mean" not in run.metrics("train")
    assert run.metrics("eval") == ["eval_return_mean", "eval_return_std"]


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with open(folder / "metrics.jsonl", "a") as log:
        log.write('{"kind": "train", "global_st')
    assert load_run(folder).step == 200


def three_times(folder: Path) -> list[Path]:
    """A run that was killed and resumed twice: each origin has lines after the checkpoint, which did not count."""
    first = write_run(folder / "first", scores=(1.0, 2.0, 99.0), status="failed: x")
    second = write_run(
        folder / "second", scores=(3.0, 98.0), start=200, resumed=(first, 200), status="stopped: received SIGINT"
    )
    return [first, second, write_run(folder / "third", scores=(4.0,), start=300, resumed=(second, 300))]


@pytest.mark.parametrize("given", [[2], [0, 1, 2], [1, 2]])
def test_a_resumed_run_is_one_curve_across_its_folders(tmp_path: Path, given: list[int]) -> None:
    folders = three_times(tmp_path / "runs")
    (run,) = load_runs([folders[i] for i in given])
    assert [folder.name for folder in run.folders] == ["first", "second", "third"]
    assert list(run.curve("eval_return_mean").values) == [1, 2, 3, 4]
    assert list(run.curve("eval_return_mean").steps) == [100, 200, 300, 400]
    assert list(run.curve("train_return_mean").steps) == [50, 100, 150, 200, 250, 300, 350, 400]
    assert run.status == "finished"


def test_folders_that_were_moved_together_find_each_other(tmp_path: Path) -> None:
    three_times(tmp_path / "runs")
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    (run,) = load_runs([tmp_path / "elsewhere"])
    assert list(run.curve("eval_return_mean").values) == [1, 2, 3, 4]


def test_two_runs_resumed_from_one_share_its_beginning(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", scores=(1.0, 2.0))
    for name, score in (("left", 3.0), ("right", 4.0)):
        write_run(tmp_path / name, scores=(score,), start=200, resumed=(first, 200))
    runs = load_runs([tmp_path])
    assert sorted(list(run.curve("eval_return_mean").values) for run in runs) == [[1, 2, 3], [1, 2, 4]]


def test_a_run_whose_origin_is_gone_begins_where_it_was_resumed(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", start=200, resumed=(tmp_path / "gone", 200)))
    assert list(run.curve("eval_return_mean").steps) == [300, 400]


def test_a_run_that_was_really_resumed(tiny_config) -> None:
    config = tiny_config("a2c", {"log_interval": 32, "eval_interval": 64})
    first = train(config, callbacks=[lambda run: run.stop("half") if run.step >= 128 else None], progress="silent")
    last = resume_training(first.run_dir, progress="silent")
    (run,) = load_runs([config.output_dir])
    assert run.folders == [first.run_dir.resolve(), last.run_dir.resolve()]
    curve = run.curve("eval_return_mean")
    assert list(curve.steps) == [64, 128, 192, 256]
    assert list(run.curve("gamma").steps) == list(range(32, 257, 32))
    assert list(curve.seconds) == sorted(curve.seconds)
    assert run.score("eval_return_mean") == last.metrics["eval_return_mean"]
    (row,) = table(group_runs([run]))
    assert row.statuses == {"finished": 1}
    assert row.steps == 256
    assert "torch" in row.versions
    assert row.hardware


def test_groups_by_config_hold_seeds_and_name_what_differs(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed, output_dir=f"runs{seed}", log_interval=seed + 1)
        write_run(tmp_path / f"b{seed}", seed=seed, kwargs={"clip_coef": 0.1})
    write_run(tmp_path / "c", algo="sac", kwargs={"tau": 0.5})
    groups = group_runs(load_runs([tmp_path]))
    assert [(group.name, [run.seed for run in group.runs]) for group in groups] == [
        ("ppo on CartPole-v1, clip_coef 0.2", [0, 1]),
        ("ppo on CartPole-v1, clip_coef 0.1", [0, 1]),
        ("sac on CartPole-v1", [0]),
    ]
    assert groups[0].differences == {"algo": "ppo", "algo_kwargs.clip_coef": "0.2"}
    assert groups[2].differences == {"algo": "sac"}


def test_schedules_that_differ_are_told_by_their_ends(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", kwargs={"ent_coef": {"kind": "cosine", "start": 0.5, "end": 0.125}})
    names = [group.name.partition(", ")[2] for group in group_runs(load_runs([tmp_path]))]
    assert names == ["ent_coef linear 0.02 to 0", "ent_coef cosine 0.5 to 0.125"]


def test_a_long_name_has_the_keys_that_tell_groups_apart(tmp_path: Path) -> None:
    for i, rate in enumerate((0.1, 0.2, 0.3)):
        many = {f"key_with_a_long_name_{n}": i // 2 for n in range(4)}
        write_run(tmp_path / f"{i}", kwargs={**many, "learning_rate": rate})
    groups = group_runs(load_runs([tmp_path]))
    assert [group.name for group in groups] == [
        f"ppo on CartPole-v1, learning_rate {rate}, key_with_a_long_name_0 {i // 2}, and 3 more"
        for i, rate in enumerate((0.1, 0.2, 0.3))
    ]
    assert len(groups[0].differences) == 5


def test_a_run_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    """Both say that they run; the lock of the folder tells them apart, on the machine where they ran."""
    folder = write_run(tmp_path / "a", status="running")
    here = {"status": "running", "hostname": platform.node()}
    (folder / "metadata.json").write_text(json.dumps(here))
    assert load_run(folder).status.startswith("failed: its process ended without a word")
    descriptor = lock(folder)
    assert descriptor is not None
    assert load_run(folder).status == "running"
    os.close(descriptor)
    (folder / "metadata.json").write_text(json.dumps(here | {"hostname": "elsewhere"}))
    assert load_run(folder).status == "running"


def test_a_run_under_way_holds_the_lock_of_its_folder(tiny_config) -> None:
    seen = []
    result = train(tiny_config("a2c"), callbacks=[lambda run: seen.append(load_run(run.dir).status)], progress="silent")
    assert set(seen) == {"running"}
    descriptor = lock(result.run_dir)
    assert descriptor is not None
    os.close(descriptor)


def test_groups_by_run_and_by_keys(tmp_path: Path) -> None:
    for env in ("CartPole-v1", "Acrobot-v1"):
        for clip in (0.1, 0.2):
            write_run(tmp_path / f"{env}{clip}", env_id=env, kwargs={"clip_coef": clip})
    runs = load_runs([tmp_path])
    assert len(group_runs(runs, "run")) == 4
    by_clip = group_runs(runs, "clip_coef")
    assert [group.name for group in by_clip] == [f"ppo on 2 environments, clip_coef {clip}" for clip in (0.1, 0.2)]
    assert by_clip[0].strata == ["Acrobot-v1", "CartPole-v1"]
    assert len(group_runs(runs, "env_id,algo_kwargs.clip_coef")) == 4
    with pytest.raises(InputError, match=r"--group-by clipcoef: .* has no such key"):
        group_runs(runs, "clipcoef")


def test_the_table_has_scores_with_their_interval_and_what_went_wrong(tmp_path: Path) -> None:
    last = [10.0, 20.0, 30.0, 40.0, -500.0]
    for seed, score in enumerate(last):
        write_run(tmp_path / f"s{seed}", seed=seed, scores=(0.0, score))
    write_run(tmp_path / "failed", seed=5, scores=(), status="failed: TrainingDiverged: loss is nan")
    (row,) = table(group_runs(load_runs([tmp_path])))
    assert row.iqm == 20.0
    assert row.mean == pytest.approx(-80.0)
    assert row.low is not None
    assert row.high is not None
    assert -500 <= row.low < 20 < row.high <= 40
    assert (row.worst, row.worst_seed) == (-500.0, 4)
    assert (row.statuses, row.without_score) == ({"finished": 5, "failed": 1}, 1)
    assert (row.steps_per_second, row.wall_seconds, row.steps) == (52.0, 20.0, 200)
    assert row.hardware == "Abacus 9, 2 cores"
    assert row.versions == "torch 2.13.0, numpy 2.4.6"
    assert row.commit == "012345678"
    assert json.loads(json.dumps(row.as_dict()))["seeds"] == [0, 1, 2, 3, 4, 5]
    heading, line = text_table([row]).splitlines()
    assert heading.split()[:2] == ["group", "IQM"]
    assert "6: 1 failed, 1 without a score" in line
    assert "-500 (4)" in line


def test_tasks_are_strata_of_the_interval(tmp_path: Path) -> None:
    """Two tasks whose seeds agree: however they are drawn, half of the scores are of each task."""
    for env, score in (("CartPole-v1", 100.0), ("Acrobot-v1", -100.0)):
        for seed in range(4):
            write_run(tmp_path / f"{env}{seed}", seed=seed, env_id=env, scores=(score,))
    (row,) = table(group_runs(load_runs([tmp_path]), "algo"))
    assert (row.iqm, row.low, row.high) == (0.0, 0.0, 0.0)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing does not exist"):
        load_runs([tmp_path / "nothing"])
    with pytest.raises(InputError, match="there is no run in"):
        load_runs([tmp_path])
    with pytest.raises(InputError, match="is no run folder"):
        load_run(tmp_path)
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"config\.yaml cannot be read"):
        load_run(folder)


def test_numbers_of_a_curve_are_arrays(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key not in ("kind", "time", "wall_seconds")} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    run = load_run(folder)
    assert list(run.curve("eval_return_mean").values) == [10, 20], "lines of before they had a kind"
    assert np.isnan(run.curve("eval_return_mean").seconds).all()
    assert run.wall_seconds is None
