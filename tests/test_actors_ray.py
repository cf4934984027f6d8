"""Actors on Ray: they play as those of this process, are replaced, and nothing is left of a Ray that a run started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actor_runs import abandoned_files, all_ended, family, mischief, process
from rl_training import evaluate_checkpoint, train
from rl_training.errors import InputError
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.fleet import ActorFault
from test_contract import assert_equal_state
from test_env_workers import alive, wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
start_ray = pytest.importorskip("rl_training.runtime.ray_session").start_ray
TESTS = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray that was there before the run."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init("local", num_cpus=2, num_gpus=0, runtime_env={"env_vars": variables}, **options)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_killed_is_replaced_and_weights_are_stored_once(tiny_config, tmp_path, monkeypatch):
    stored, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: (stored.append(value.version), put(value))[1])
    config = tiny_config("impala", {**process(backend="ray", actors=2), **mischief("killed", tmp_path)})
    result = train(config, progress="silent")
    assert result.metrics["actor_restarts"] == 1
    assert result.metrics["global_step"] == 256
    assert stored == list(range(256 // (8 * 2)))  # each version once, for both actors
    assert ray.is_initialized()
    assert evaluate_checkpoint(result.run_dir)["eval_episodes"] == 2


@pytest.mark.usefixtures("cluster")
def test_one_actor_in_lock_step_trains_as_this_process_does(tiny_config):
    env = {"env_kwargs": {"wrappers": {"normalize_observation": True, "normalize_reward": True}}}
    executions = ({"log_interval": 1}, process(backend="ray", queue=0))
    sizes = {"recurrent": True, "recurrent_size": 8}
    results = [train(tiny_config("impala", {**env, **more}, **sizes), progress="silent") for more in executions]
    serial, elsewhere = (load_checkpoint(result.checkpoint_path).state for result in results)
    for part in ("actor", "learner"):
        assert_equal_state(serial[part], elsewhere[part])
    assert_equal_state(serial["normalizer"]["reward"], elsewhere["normalizer"]["reward"])


@pytest.mark.usefixtures("cluster")
def test_one_that_fails_brings_its_traceback(tiny_config, tmp_path):
    config = process(backend="ray", on_actor_death="fail")
    with pytest.raises(ActorFault, match=r"number 0, .* raised RuntimeError: the gripper broke; at step 32") as caught:
        train(tiny_config("impala", {**config, **mischief("raises", tmp_path)}), progress="silent")
    assert 'raise RuntimeError("the gripper broke")' in caught.value.trace
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert evaluate_checkpoint(run_dir / "checkpoints" / "step_32")["eval_episodes"] == 2


@pytest.mark.usefixtures("cluster")
def test_one_that_is_stopped_is_noticed_and_replaced(tiny_config, tmp_path):
    config = {**process(backend="ray", actor_timeout=3.0), **mischief("stops", tmp_path)}
    result = train(tiny_config("appo", config), progress="silent")
    assert result.metrics["actor_restarts"] == 1
    assert result.metrics["global_step"] == 256


@pytest.mark.usefixtures("cluster")
def test_more_actors_than_cores_are_refused(tiny_config):
    config = tiny_config("impala", {"num_envs": 3, **process(backend="ray", actors=3)})
    with pytest.raises(InputError, match=r"execution.actors: 3 actors take a core each, and Ray has 2: lower it"):
        train(config, progress="silent")
    assert ray.is_initialized()


@pytest.mark.usefixtures("cluster")
def test_a_gpu_that_ray_does_not_have_is_refused(tiny_config):
    config = tiny_config("impala", process(backend="ray", actor_device="cuda"))
    with pytest.raises(InputError, match=r"execution.actor_device: cuda, but Ray has no GPU"):
        train(config, progress="silent")


SCRIPT = """
import signal, sys
sys.path.insert(0, {tests!r})
import ray
import envs_for_actors
from rl_training import TrainConfig, train
from rl_training.runtime.outcome import TrainingInterrupted

def run(steps, callback):
    config = TrainConfig(
        algo="impala", env_id="MischiefForTests-v0", total_timesteps=steps, num_envs=2, output_dir={runs!r},
        device="cpu", execution={{"backend": "ray", "actors": 1}}, algo_kwargs={{"num_steps": 8}}, eval_episodes=1,
    )
    train(config, callbacks=[callback], progress="silent")

run(64, lambda run: None)
print("done", ray.is_initialized(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
for number in range(2):
    sys.stdin.readline()
    try:
        run(10_000_000, lambda run: print("running", flush=True))
    except TrainingInterrupted:
        print("saved", ray.is_initialized(), flush=True)
"""


def test_a_ray_that_the_run_started_ends_with_it(tmp_path: Path) -> None:
    """With a run that completes, with one that is ended by Ctrl-C, and with a learner that is killed."""
    files, errors, known = abandoned_files(), tmp_path / "stderr", set[int]()
    with errors.open("w") as file:
        learner = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(tests=TESTS, runs=str(tmp_path / "runs"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert learner.stdout is not None
    assert learner.stdin is not None

    def start() -> None:
        """The next run, until it has done an update."""
        learner.stdin.write("\n")
        learner.stdin.flush()
        assert learner.stdout.readline() == "running\n", errors.read_text()
        known.update(family(learner.pid))
        assert len(known) > 2

    try:
        assert learner.stdout.readline() == "done False True\n", errors.read_text()
        assert wait_until(lambda: not family(learner.pid), 20)
        start()
        os.killpg(learner.pid, signal.SIGINT)
        while (line := learner.stdout.readline()) == "running\n":
            pass
        assert line == "saved False\n", errors.read_text()
        assert all_ended(known), "a process survives"
        start()
        learner.kill()
        learner.wait(60)
        assert all_ended(known), "a process survives"
        assert wait_until(lambda: abandoned_files() <= files, 20)
        assert "Traceback" not in errors.read_text()
    finally:
        for pid in {learner.pid, *known}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        learner.wait()
        for pipe in (learner.stdin, learner.stdout):
            pipe.close()


def test_an_address_without_a_cluster_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address in ("localhost:1", "auto"):
        with pytest.raises(InputError, match=f"execution.address: Ray: no cluster at '{address}': "):
            start_ray(address, cores=1, key="execution.address")
