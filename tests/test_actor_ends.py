"""However a run with actors in processes ends, no process and no memory is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actor_runs import abandoned_files, all_ended, family
from rl_training.runtime.checkpoints import load_checkpoint
from test_env_workers import alive, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import envs_for_actors
from rl_training import TrainConfig, train
from rl_training.runtime.outcome import TrainingInterrupted

config = TrainConfig(
    algo="impala", env_id="MischiefForTests-v0", total_timesteps=10_000_000, num_envs=4, output_dir={runs!r},
    device="cpu", eval_env_kwargs={{"fault": ""}}, execution={{"backend": "process", "actors": 2}},
    env_kwargs={{"fault": {fault!r}, "folder": {runs!r}, "backend": {backend!r}, "at": 300}},
    algo_kwargs={{"num_steps": 8}}, eval_episodes=1,
)
try:
    train(config, callbacks=[lambda run: print("running", flush=True)], progress="silent")
except TrainingInterrupted:
    print("saved", flush=True)
"""


class Learner:
    """A learner in another process, and all that it started."""

    def __init__(self, folder: Path, fault: str, backend: str = "sync") -> None:
        self.files, self.runs, self.errors = abandoned_files(), folder / "runs", folder / "stderr"
        self.runs.mkdir(parents=True)
        script = SCRIPT.format(tests=str(Path(__file__).parent), runs=str(self.runs), fault=fault, backend=backend)
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "running\n", self.errors.read_text()
        self.family = family(self.process.pid)

    def check_the_end(self) -> str:
        """Nothing is left, and nobody has complained; gives what else was printed."""
        self.process.wait(60)
        assert all_ended(self.family), "a process survives"
        assert self.process.stdout is not None
        output = self.process.stdout.read()
        assert wait_until(lambda: abandoned_files() <= self.files, 20)
        assert self.errors.read_text() == ""
        return output


@pytest.fixture
def learners() -> Iterator[list[Learner]]:
    started: list[Any] = []
    yield started
    for learner in started:
        for pid in {learner.process.pid, *learner.family}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        learner.process.wait()
        learner.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_lets_the_run_save(number, learners, tmp_path):
    """Each environment has a simulator, a process that does not end by itself."""
    learners.append(learner := Learner(tmp_path, "simulator"))
    assert len(learner.family) == 2 + 4
    os.killpg(learner.process.pid, number)
    assert learner.check_the_end().endswith("saved\n")
    (run_dir,) = (path for path in learner.runs.iterdir() if path.is_dir())
    (checkpoint,) = (run_dir / "checkpoints").glob("step_*")
    assert len(load_checkpoint(checkpoint).state["runner"]["workers"]) == 2


def test_a_learner_that_is_killed_takes_all_along(learners, tmp_path):
    """Also an actor in a step that never gives the interpreter back, and simulators in processes of environments."""
    learners.append(learner := Learner(tmp_path, "simulator", backend="async"))
    learners.append(second := Learner(tmp_path / "second", "keeps the interpreter"))
    assert wait_until(lambda: any(second.runs.glob("keeps*")))
    time.sleep(0.2)  # from the mark to the step
    assert len(learner.family) >= 2 + 4 + 4
    for each in (learner, second):
        each.process.kill()
    for each in (learner, second):
        each.check_the_end()
