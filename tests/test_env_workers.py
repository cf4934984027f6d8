"""Processes that hold environments end with their run: silently, whatever ends it, and all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")

TESTS = Path(__file__).parent
SCRIPT = """
import sys, os
sys.path.insert(0, {tests!r})
import envs_for_tests
from rl_training import TrainConfig, train
from rl_training.runtime.outcome import TrainingInterrupted

config = TrainConfig(
    algo="ppo", env_id="RandomWalkForTests-v0", total_timesteps=10_000_000, num_envs=3, output_dir={runs!r},
    device="cpu", env_kwargs={{"backend": "async"}}, algo_kwargs={{"num_steps": 8}}, eval_episodes=1,
)
try:
    train(config, callbacks=[lambda run: print("running", flush=True)], progress="silent")
except TrainingInterrupted:
    print("saved", flush=True)
"""


def descendants(pid: int) -> set[int]:
    """The processes that a process has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.add(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Run:
    """A run in a process group of its own, with its workers under way."""

    def __init__(self, folder: Path) -> None:
        script = SCRIPT.format(tests=str(TESTS), runs=str(folder / "runs"))
        self.errors = folder / "stderr"
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
        assert self.process.stdout.readline() == "running\n"
        self.workers = descendants(self.process.pid)
        assert len(self.workers) >= 3

    def check_the_end(self) -> str:
        """No process is left, and none has complained; gives what else was printed."""
        assert self.process.stdout is not None
        output = self.process.stdout.read()
        self.process.wait(60)
        assert wait_until(lambda: not any(map(alive, self.workers))), "a worker survives"
        assert "Traceback" not in self.errors.read_text()
        assert "Error" not in self.errors.read_text()
        return output


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for pid in {run.process.pid, *filter(alive, run.workers)}:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    assert run.process.stdout is not None
    run.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_still_lets_the_run_save(run: Run, number: int) -> None:
    os.killpg(run.process.pid, number)
    assert run.check_the_end().endswith("saved\n")


def test_a_hang_up_ends_all_silently(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGHUP)
    run.check_the_end()


def test_a_parent_that_is_killed_takes_its_workers_along(run: Run) -> None:
    run.process.kill()
    run.check_the_end()


def test_workers_that_nobody_closes_do_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import envs_for_tests
from rl_training.envs.factory import make_envs
kwargs = {{"backend": "async"}}
envs = make_envs("CounterForTests-v0", num_envs=2, seed=0, env_kwargs=kwargs, training=True)
envs.reset()
sys.modules["kept"] = envs  # not collected before the end
print("done", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, "Traceback" in done.stderr) == ("done\n", False)
