"""Many jobs: in parallel, with failures and interruptions, and not twice."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from conftest import REPOSITORY
from fake_jobs import FakePlace, evaluation, failed, finished
from rl_training import TrainConfig, bench, load_config, train
from rl_training.errors import InputError
from rl_training.reports.runs import load_run
from rl_training.runtime.loading import build_config
from rl_training.runtime.metadata import METADATA
from rl_training.runtime.setup import pick_threads
from rl_training.studies import bench as bench_module
from rl_training.studies import job_process, jobs
from rl_training.studies.bench import Grid, named_configs, parse_seeds
from rl_training.studies.job_host import JobHost
from rl_training.studies.jobs import Job, Jobs, JobsInterrupted, LocalPlace, Outcome, read_job, write_job
from rl_training.studies.jobs_view import make_view
from test_cli import cli
from test_contract import assert_same_future

SMALL = {
    "algo": "a2c",
    "env_id": "CartPole-v1",
    "total_timesteps": 2_000,
    "num_envs": 2,
    "eval_interval": 500,
    "eval_episodes": 2,
    "device": "cpu",
    "num_threads": 1,
    "algo_kwargs": {"num_steps": 8},
}
ENDLESS = SMALL | {"total_timesteps": 10_000_000, "eval_interval": 0, "checkpoint_interval": 200, "log_interval": 100}


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.001)


def write_config(path, config):
    path.write_text(yaml.safe_dump(config))
    return path


def silent():
    return make_view("silent", "", None)


def small_grid(folder, seeds=(0, 1), **keys):
    return Grid({"a2c-small": TrainConfig(**SMALL | keys)}, list(seeds), folder)


# --- the loop, without processes


def test_as_many_jobs_run_at_a_time_as_there_are_places(tmp_path):
    most = 0

    def play(order, host):
        nonlocal most
        most = max(most, sum(not each.over for each in place.hosts if hasattr(each, "over")) + 1)
        host.over = False
        yield from [{}, {}, {}]
        host.over = True
        yield finished(order["config"]["seed"])

    place = FakePlace(3, play)
    plan = small_grid(tmp_path, seeds=range(7))
    Jobs(plan, place, silent()).run()
    assert most == 3
    assert [host.order["config"]["seed"] for host in place.hosts] == list(range(7))
    scores = [plan.outcomes[job.name].metrics["eval_return_mean"] for job in plan.jobs]
    assert scores == list(range(7))


def test_a_failed_job_is_recorded_and_the_others_go_on(tmp_path):
    place = FakePlace(1, lambda order, host: iter([failed("boom") if order["config"]["seed"] == 1 else finished(3.0)]))
    plan = small_grid(tmp_path, seeds=range(3))
    Jobs(plan, place, silent()).run()
    assert [plan.outcomes[job.name].status for job in plan.jobs] == ["finished", "failed", "finished"]
    saved = json.loads((tmp_path / "a2c-small" / "seed1" / "job.json").read_text())
    assert (saved["status"], saved["error"]) == ("failed", "boom")
    again = small_grid(tmp_path, seeds=range(3))
    again.keep_finished()
    assert [job.name for job in again.waiting] == ["a2c-small seed 1"]  # what failed is tried again


def test_a_signal_stops_all_jobs_and_starts_no_other(tmp_path):
    def play(order, host):
        if order["config"]["seed"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            yield {}

    place = FakePlace(2, play)
    plan = small_grid(tmp_path, seeds=range(4))
    with pytest.raises(JobsInterrupted):
        Jobs(plan, place, silent()).run()
    assert [host.heard for host in place.hosts] == [["stop"], ["stop"]]
    assert {outcome.status for outcome in plan.outcomes.values()} == {"interrupted"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_kills_them(tmp_path):
    class Deaf(FakePlace):
        def start(self, order, slot):
            host = super().start(order, slot)
            host.poll = lambda: os.kill(os.getpid(), signal.SIGINT) or []
            return host

    place = Deaf(2, lambda order, host: iter(()))
    with pytest.raises(KeyboardInterrupt):
        Jobs(small_grid(tmp_path), place, silent()).run()
    assert all(host.killed for host in place.hosts)


def test_an_answer_goes_to_the_job_that_asked(tmp_path):
    class Pruning(Grid):
        def evaluated(self, job, step, metrics):
            return metrics["eval_return_mean"] > 0

    def play(order, host):
        yield evaluation(10, 20, 1.0)
        yield evaluation(15, 20, -1.0)
        yield finished(0.0, "pruned")

    place = FakePlace(1, play)
    plan = Pruning({"x": TrainConfig(**SMALL)}, [0], tmp_path)
    Jobs(plan, place, silent()).run()
    assert place.hosts[0].heard == ["continue", "prune"]
    assert plan.outcomes["x seed 0"].reason == "pruned"


# --- the grid


def test_finished_runs_are_kept_and_other_configs_refused(tmp_path):
    plan = small_grid(tmp_path)
    write_job(plan.jobs[0], Outcome("finished", metrics={"eval_return_mean": 7.0}))
    write_job(plan.jobs[1], Outcome("interrupted"))
    again = small_grid(tmp_path, seeds=range(3))
    again.keep_finished()
    assert again.outcomes["a2c-small seed 0"].metrics == {"eval_return_mean": 7.0}
    assert [job.name for job in again.waiting] == ["a2c-small seed 1", "a2c-small seed 2"]
    with pytest.raises(InputError, match=r"another config \(they differ in total_timesteps\): choose another folder"):
        small_grid(tmp_path, total_timesteps=3_000).keep_finished()


def test_a_damaged_record_names_its_file(tmp_path):
    plan = small_grid(tmp_path)
    plan.jobs[0].folder.mkdir(parents=True)
    (plan.jobs[0].folder / "job.json").write_text("{")
    with pytest.raises(InputError, match=r"job\.json cannot be read .*: remove"):
        plan.keep_finished()


def test_the_place_of_a_run_is_kept_where_the_folder_moves(tmp_path):
    job = Job("x", tmp_path / "a" / "x", {})
    (job.folder / "run").mkdir(parents=True)
    write_job(job, Outcome("finished", run_dir=job.folder / "run"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_job(tmp_path / "b" / "x")[1].run_dir == tmp_path / "b" / "x" / "run"


def test_names_tell_configs_apart(tmp_path):
    (tmp_path / "other").mkdir()
    first = write_config(tmp_path / "cartpole.yaml", SMALL)
    second = write_config(tmp_path / "other" / "cartpole.yaml", SMALL | {"num_envs": 4})
    named = named_configs([first, second, SMALL, TrainConfig(**SMALL | {"algo": "ppo", "algo_kwargs": {}})], (), True)
    assert list(named) == ["a2c-cartpole", "a2c-cartpole-2", "a2c-CartPole-v1", "ppo-CartPole-v1"]
    assert named["a2c-cartpole-2"].num_envs == 4
    assert list(named_configs(first, ["algo=ppo", "algo_kwargs={}"], True)) == ["ppo-cartpole"]
    with pytest.raises(InputError, match="overrides are for configs that are files"):
        named_configs(SMALL, ["num_envs=3"], True)


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("3", [3]), ("0, 3,7", [0, 3, 7]), ("0-1,10", [0, 1, 10])]
)
def test_seeds_as_ranges_and_lists(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-0", "1--2", "-1", "0-99999999", "1.5"])
def test_other_texts_are_no_seeds(text):
    with pytest.raises(InputError, match=r"^seeds should be like 0-4 or 0,3,7, got"):
        parse_seeds(text)


@pytest.mark.parametrize(("seeds", "message"), [([], "at least one"), ([1, 1], "different"), ([-1], "from 0 on")])
def test_seeds_of_the_python_interface(seeds, message, tmp_path):
    with pytest.raises(InputError, match=message):
        bench(SMALL, seeds=seeds, out=tmp_path)


def test_a_config_for_another_process_is_plain_data(tmp_path):
    with pytest.raises(InputError, match="is plain data"):
        bench(SMALL | {"env_kwargs": {"x": object()}}, out=tmp_path)


def test_two_commands_do_not_share_a_folder(tmp_path):
    with jobs.locked(tmp_path, "bench"), pytest.raises(InputError, match="another bench is running in"):
        bench(SMALL, out=tmp_path)


# --- sharing the machine


def test_jobs_share_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(jobs, "usable_cores", lambda: 8)
    assert [LocalPlace(size).threads for size in (1, 3, 8, 20)] == [8, 2, 1, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    started = []
    monkeypatch.setattr(jobs, "JobHost", lambda order, environment, directory: started.append(environment))
    place = LocalPlace(3)
    for slot, device in enumerate(["auto", "cuda", "auto", "cuda:1", "cpu"]):
        place.start({"config": {"device": device}}, slot)
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in started] == ["5", "7", "5", None, None]
    assert {each["OMP_NUM_THREADS"] for each in started} == {"2"}


def test_a_large_network_takes_the_threads_of_its_job(monkeypatch):
    monkeypatch.setattr("rl_training.runtime.setup.usable_cores", lambda: 8)
    cpu = torch.device("cpu")
    for text, threads in (("3", 3), ("16", 8), ("", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert pick_threads("auto", 2_000_000, cpu) == threads
    assert pick_threads("auto", 1_000, cpu) == 1


# --- what a job's process does, in this process


class Parent:
    """The connection of a job to its parent."""

    def __init__(self, config, folder, answers=(), asks=False):
        self.order = {"config": config, "folder": str(folder), "asks": asks, "allow_import": True}
        self.messages, self.answers = [], job_process.queue.SimpleQueue()
        for answer in answers:
            self.answers.put(answer)

    def send(self, kind, **content):
        json.dumps(content, allow_nan=False)
        self.messages.append((kind, content))


def interrupted_at(step):
    """Ctrl-C as soon as the run is that far."""

    class Interrupting(job_process.Reporter):
        def __call__(self, run):
            super().__call__(run)
            if run.step >= step and not run.interrupts.received:
                os.kill(os.getpid(), signal.SIGTERM)

    return Interrupting


def test_an_interrupted_job_continues_and_ends_as_one_that_was_not(tmp_path, monkeypatch):
    config = {key: value for key, value in SMALL.items() if key != "output_dir"}
    whole = job_process.run_job(Parent(config, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(job_process, "Reporter", interrupted_at(600))
        with pytest.raises(KeyboardInterrupt):
            job_process.run_job(Parent(config, tmp_path / "parts"))
    resumed = job_process.run_job(Parent(config, tmp_path / "parts"))
    assert resumed["status"] == whole["status"] == "finished"
    assert resumed["metrics"]["eval_return_mean"] == whole["metrics"]["eval_return_mean"]
    ends = [job_process.newest_checkpoint(tmp_path / name) for name in ("whole", "parts")]
    assert_same_future(*ends)
    run = load_run(resumed["run_dir"])
    assert len(run.folders) == 2
    assert list(run.curve("eval_return_mean").steps) == list(load_run(whole["run_dir"]).curve("eval_return_mean").steps)


def test_a_job_whose_last_evaluation_was_interrupted_makes_up_for_it(tmp_path):
    config = SMALL | {"eval_interval": 0}
    whole = job_process.run_job(Parent(config, tmp_path))
    run_dir = job_process.newest_checkpoint(tmp_path).parent.parent
    log = run_dir / "metrics.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if '"eval"' not in line))
    assert load_run(run_dir).score("eval_return_mean") is None
    again = job_process.run_job(Parent(config, tmp_path))
    assert again["metrics"]["eval_return_mean"] == whole["metrics"]["eval_return_mean"]
    assert load_run(run_dir).score("eval_return_mean") == whole["metrics"]["eval_return_mean"]
    seconds = load_run(run_dir).curve("eval_return_mean").seconds
    assert list(seconds) > list(load_run(run_dir).curve("train_return_mean").seconds[-1:])
    assert len(list(tmp_path.glob("*/config.yaml"))) == 1


def test_a_job_that_asks_waits_for_each_answer_and_can_be_pruned(tmp_path):
    parent = Parent(SMALL, tmp_path, ["continue", "prune"], asks=True)
    end = job_process.run_job(parent)
    asked = [content for kind, content in parent.messages if kind == "evaluation"]
    assert [content["step"] // 500 for content in asked] == [1, 2]
    assert end["reason"] == "pruned"
    assert end["metrics"]["global_step"] == asked[-1]["step"] < 2_000
    assert json.loads((tmp_path / end["run_dir"] / METADATA).read_text())["status"] == "stopped: pruned"


def test_best_alone_is_nothing_to_resume_from(tmp_path):
    (tmp_path / "run" / "checkpoints" / "best").mkdir(parents=True)
    assert job_process.newest_checkpoint(tmp_path) is None
    for step in ("step_900", "step_1000", ".step_2000"):
        (tmp_path / "run" / "checkpoints" / step).mkdir()
    assert job_process.newest_checkpoint(tmp_path).name == "step_1000"


# --- real processes


def until(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)
    return found


def end_of(host):
    messages = []
    until(lambda: messages.extend(host.poll()) or any(message["kind"] == "end" for message in messages))
    return messages


def order_of(config, folder):
    return {"config": config, "folder": str(folder), "asks": False, "allow_import": True}


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_is_killed_is_a_job_that_failed_with_its_last_output(tmp_path):
    host = JobHost(order_of(ENDLESS, tmp_path), environment={"OMP_NUM_THREADS": "1"}, directory=str(tmp_path))
    until(lambda: any(message["kind"] == "progress" for message in host.poll()))
    os.kill(host.process.pid, signal.SIGKILL)
    error = end_of(host)[-1]["error"]
    assert error.startswith("its process ended with signal SIGKILL\n")
    assert "a2c on CartPole-v1" in error
    run_dir = jobs.newest_run(tmp_path)
    jobs.mark_failed(run_dir, error)
    assert load_run(run_dir).status == "failed: its process ended with signal SIGKILL"
    host.kill()
    assert host.poll() == []


def test_bench_is_interrupted_and_the_same_command_finishes_what_was_left(tmp_path):
    """Ctrl-C in the command itself: it ends with exit code 130, its jobs have saved a checkpoint and are gone."""
    config = write_config(tmp_path / "small.yaml", SMALL | {"total_timesteps": 15_000, "eval_interval": 2_000})
    out = tmp_path / "out"
    command = [sys.executable, "-m", "rl_training", "bench", str(config), "--seeds", "0-1", "--jobs", "2"]
    command += ["--out", str(out), "--progress", "plain"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    lines = iter(process.stdout.readline, "")
    started = next(line for line in lines if "evaluated" in line)
    children = pids_below(process.pid)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "stopping 2 jobs under way at a checkpoint; press Ctrl-C again to kill them" in rest, started
    assert "interrupted: 0 of 2 runs have finished; the same command continues with the others" in errors
    assert len(children) == 2
    assert not any(map(is_alive, children))
    assert [read_job(out / "a2c-small" / f"seed{seed}")[1].status for seed in (0, 1)] == ["interrupted"] * 2
    text = cli(*command[3:])
    assert "2 finished of 2" in text
    folders = [sorted((out / "a2c-small" / f"seed{seed}").glob("*/config.yaml")) for seed in (0, 1)]
    assert [len(each) for each in folders] == [2, 2]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert "started" not in cli(*command[3:])
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}


def pids_below(pid):
    """The children of a process."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    numbers = [path.parent.name for path in Path("/proc").glob("[0-9]*/stat")]
    return [int(number) for number, stat in zip(numbers, stats, strict=False) if stat[1] == str(pid)]


def test_jobs_end_when_their_parent_is_killed(tmp_path):
    """They save a checkpoint: a job is told by the end of its connection."""
    code = (
        "import sys, json, time\n"
        "from rl_training.studies.job_host import JobHost\n"
        "host = JobHost(json.loads(sys.argv[1]), environment={'OMP_NUM_THREADS': '1'}, directory=sys.argv[2])\n"
        "while not any(message['kind'] == 'progress' for message in host.poll()): time.sleep(0.02)\n"
        "print(host.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    order = json.dumps(order_of(ENDLESS | {"checkpoint_interval": 0}, tmp_path / "job"))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, order, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_alive(child))
    assert job_process.newest_checkpoint(tmp_path / "job") is not None


def test_bench_from_python_with_a_run_that_fails(tmp_path):
    """One of two configs diverges; its error is in the result, and the command's exit code is 1."""
    good = write_config(tmp_path / "good.yaml", SMALL)
    bad = write_config(tmp_path / "bad.yaml", SMALL | {"algo_kwargs": {"num_steps": 8, "learning_rate": 1e30}})
    result = bench([good, bad], seeds=[3], jobs=2, out=tmp_path / "out", progress="silent")
    assert [(run.config, run.seed, run.outcome.status) for run in result.runs] == [
        ("a2c-good", 3, "finished"),
        ("a2c-bad", 3, "failed"),
    ]
    assert [run.config for run in result.failed] == ["a2c-bad"]
    assert "training diverged" in result.failed[0].outcome.error
    (metrics,) = result.metrics("a2c-good")
    alone = train(load_config(good, overrides=["seed=3"], output_dir=tmp_path / "alone"), progress="silent")
    assert metrics["eval_return_mean"] == alone.metrics["eval_return_mean"]
    errors = cli("bench", good, bad, "--seeds", 3, "--out", tmp_path / "out", code=1)
    assert "failed: a2c-bad seed 3: training diverged" in errors


def test_bench_on_ray(tmp_path):
    """Ray is started, the job's process runs below its actor, and Ray is stopped again."""
    ray = pytest.importorskip("ray")
    result = bench(SMALL, seeds=[0, 1], jobs=2, out=tmp_path / "ray", ray="", progress="silent")
    here = [train(TrainConfig(**SMALL, seed=seed, output_dir=tmp_path), progress="silent") for seed in (0, 1)]
    assert [run.outcome.status for run in result.runs] == ["finished", "finished"]
    scores = [run.outcome.metrics["eval_return_mean"] for run in result.runs]
    assert scores == [each.metrics["eval_return_mean"] for each in here]
    assert not ray.is_initialized()


def test_a_machine_of_the_cluster_that_does_not_see_the_folder_says_so(tmp_path):
    pytest.importorskip("ray")
    from rl_training.studies.ray_jobs import RemoteHost

    with pytest.raises(InputError, match=r"does not see the folder .*: jobs on a cluster need an --out"):
        RemoteHost(order_of(SMALL, "job"), environment={}, directory=str(tmp_path))


# --- the display


def view_of(mode):
    stream = io.StringIO()
    view = make_view(mode, "bench", 3, stream)
    plan = [Job(f"job {i}", REPOSITORY / f"no-such-folder-{i}", {"total_timesteps": 100}) for i in range(3)]
    for job in plan[:2]:
        view.started(job)
    view.progress(plan[0], 25, 100, {"steps_per_second": 5.0, "eval_return_mean": 3.5})
    view.tick()
    view.ended(plan[1], Outcome("failed", error="out of memory\nmore", seconds=61.0))
    return view, stream, plan


def test_the_plain_display_tells_of_starts_evaluations_and_ends():
    view, stream, _ = view_of("plain")
    assert stream.getvalue().splitlines() == [
        "bench",
        "job 0: started",
        "job 1: started",
        "job 0: 25%, evaluated 3.5",
        "job 1: failed: out of memory in 0:01:01 (1 running, 1 failed of 3)",
    ]
    view.printed -= 100
    view.tick()
    assert stream.getvalue().splitlines()[-1] == "1 running, 1 failed of 3: job 0 25%"


def test_the_live_display_is_a_table_of_the_jobs():
    view, stream, _ = view_of("live")
    view.close()
    text = stream.getvalue()
    for words in ("job 0", "training", "25%", "3.5", "0:00:15", "failed: out of memory", "0:01:01"):
        assert words in text


def test_other_displays_are_refused():
    with pytest.raises(InputError, match="progress must be one of auto, live, plain, silent, got 'x'"):
        make_view("x", "", None)


# --- the command line


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["a.yaml"], None),
        (["a.yaml", "--ray"], ""),
        (["--ray", "a.yaml"], ""),
        (["a.yaml", "--ray", "--seeds", "1"], ""),
        (["a.yaml", "--ray", "auto"], "auto"),
        (["a.yaml", "--ray=10.0.0.1:6379"], "10.0.0.1:6379"),
    ],
)
def test_ray_takes_an_address_or_none(words, address, monkeypatch):
    given = {}
    fake = lambda configs, **options: given.update(options, configs=configs) or Done  # noqa: E731
    monkeypatch.setattr(bench_module, "bench", fake)
    cli("bench", *words)
    assert given["ray"] == address
    assert [path.name for path in given["configs"]] == ["a.yaml"]


class Done:
    rows = failed = ()


def test_train_takes_a_config_with_a_search_space_and_says_so(tmp_path):
    config = write_config(tmp_path / "x.yaml", SMALL | {"tune": {"algo_kwargs.gamma": {"uniform": [0.9, 1]}}})
    text = cli("train", config, "--output-dir", tmp_path / "runs", "--total-timesteps", 100)
    assert "the key tune is for rl-training tune: this run uses the values outside it" in text
    assert build_config({**SMALL, "tune": {}}).tune == {}


def test_no_thread_is_left(tmp_path):
    before = set(threading.enumerate())  # libraries that earlier tests used may have some
    Jobs(small_grid(tmp_path), FakePlace(1, lambda order, host: iter([finished(1.0)])), silent()).run()
    assert set(threading.enumerate()) <= before
