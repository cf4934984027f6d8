"""What a run meets outside of itself: a full disk, a folder that is gone, a terminal that closes."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import yaml

from rl_training import TrainingFailed, TrainingInterrupted, resume_training, train
from rl_training.errors import InputError
from rl_training.runtime import checkpoints, log_file, metadata, metrics
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.metadata import update_metadata, write_metadata
from rl_training.runtime.progress import make_progress
from test_checkpoint_workflows import wait_for

FULL = OSError(errno.ENOSPC, "No space left on device")


def status(run_dir):
    return json.loads((run_dir / "metadata.json").read_text())["status"]


def fails_after(monkeypatch, module, name, calls, error=FULL):
    """The function raises from that call on."""
    original, made = getattr(module, name), []

    def failing(*args, **options):
        made.append(args)
        if len(made) > calls:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])  # written at once, and while training goes on
def test_a_full_disk_ends_the_run_with_the_path_the_cause_and_the_last_good_checkpoint(algo, tiny_config, monkeypatch):
    fails_after(monkeypatch, checkpoints, "_write_content", 1)
    config = tiny_config(algo, {"checkpoint_interval": 64})
    with pytest.raises(TrainingFailed) as caught:
        train(config, progress="silent")
    (run_dir,) = config.output_dir.iterdir()
    good = run_dir / "checkpoints" / "step_64"
    message = str(caught.value)
    assert f"{run_dir / 'checkpoints' / 'step_128'} cannot be written: No space left on device" in message
    assert message.endswith(f"the last good checkpoint is {good}")
    assert (caught.value.run_dir, caught.value.checkpoint_path) == (run_dir, good)
    assert caught.value.__cause__ is FULL
    assert status(run_dir) == f"failed: TrainingFailed: {message}"
    assert load_checkpoint(good).step == 64
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_64"]


def test_without_a_checkpoint_of_its_own_a_resumed_run_names_its_origin(tiny_config, monkeypatch):
    first = train(tiny_config("ppo"), progress="silent")
    fails_after(monkeypatch, checkpoints, "_write_content", 0)
    with pytest.raises(TrainingFailed, match=f"the last good checkpoint is {first.checkpoint_path}"):
        resume_training(first.run_dir, total_timesteps=320, progress="silent")


def test_a_read_only_folder_is_named(tiny_config, monkeypatch):
    """Root may write anywhere, so the system's answer is played."""
    fails_after(monkeypatch, checkpoints, "make_temporary", 1, PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(TrainingFailed, match=r"step_128 cannot be written: Permission denied; .* is .*step_64"):
        train(tiny_config("ppo", {"checkpoint_interval": 64}), progress="silent")


def test_old_checkpoints_that_cannot_be_removed_are_named_and_the_new_one_is_good(tiny_config, monkeypatch):
    fails_after(monkeypatch, checkpoints, "_discard", 0, PermissionError(errno.EACCES, "Permission denied"))
    config = tiny_config("ppo", {"checkpoint_interval": 64, "keep_checkpoints": 1})
    with pytest.raises(TrainingFailed, match=r"old checkpoints in .* cannot be removed: .*Permission denied") as caught:
        train(config, progress="silent")
    assert load_checkpoint(caught.value.checkpoint_path).step == 128


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_deleted_folder_costs_no_checkpoint(algo, tiny_config):
    config = tiny_config(algo, {"checkpoint_interval": 64})

    def remove(run):
        if run.step == 128:
            run.checkpoints.saver.wait()
            shutil.rmtree(run.dir)

    result = train(config, callbacks=[remove], progress="silent")
    assert load_checkpoint(result.checkpoint_path).step == 256
    assert status(result.run_dir) == "finished"


def test_a_folder_that_is_deleted_during_a_write_leaves_no_last_checkpoint(tiny_config, monkeypatch):
    write = checkpoints._write_content
    config = tiny_config("ppo", {"checkpoint_interval": 64})

    def deleted(directory, *content):
        if any(config.output_dir.glob("*/checkpoints/step_64")):
            shutil.rmtree(directory.parent.parent)
        write(directory, *content)

    monkeypatch.setattr(checkpoints, "_write_content", deleted)
    with pytest.raises(TrainingFailed, match=r"step_128 cannot be written: No such file.*; no checkpoint was saved"):
        train(config, progress="silent")
    (run_dir,) = config.output_dir.iterdir()
    assert status(run_dir).startswith("failed: TrainingFailed")


class Full(io.RawIOBase):
    """A file on a disk that is full for a while, and takes a few bytes at a time."""

    full = True

    def __init__(self):
        self.content = b""

    def write(self, data):
        if self.full:
            raise FULL
        self.content += bytes(data[:100])
        return min(len(data), 100)


def test_log_lines_that_cannot_be_written_cost_no_checkpoint(tiny_config, monkeypatch):
    files = []

    def logs_are_full(path, mode, **options):
        files.append(Full())
        return files[-1]

    monkeypatch.setattr(log_file, "open", logs_are_full, raising=False)
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", -1.0)
    config = tiny_config("ppo", {"log_interval": 32})
    with pytest.warns(UserWarning, match="cannot be written .No space left on device.; training continues") as caught:
        result = train(config, progress="silent")
    assert len([w for w in caught if "cannot be written" in str(w.message)]) == len(files) == 2  # once for each file
    assert load_checkpoint(result.checkpoint_path).step == 256
    assert status(result.run_dir) == "finished"


def test_log_lines_wait_for_space(tmp_path, monkeypatch):
    files = []
    monkeypatch.setattr(log_file, "open", lambda *_, **__: files.append(Full()) or files[-1], raising=False)
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", -1.0)
    with pytest.warns(UserWarning, match="tfevents"):
        log = metrics.MetricsLog(tmp_path)
    files[1].full = False
    with pytest.warns(UserWarning, match=r"metrics\.jsonl cannot be written"):
        log.write({"global_step": 0, "loss": 0.5})
    for step in range(1, 20):
        files[0].full = step < 10
        log.write({"global_step": step, "loss": 0.5})
    log.close()
    assert [json.loads(line)["global_step"] for line in files[0].content.splitlines()] == list(range(20))


def test_the_status_is_written_on_a_disk_that_takes_no_new_file(tmp_path, monkeypatch):
    write_metadata(tmp_path, command="train", seed=3)

    def full(path, text):
        raise FULL

    monkeypatch.setattr(metadata, "write_text_atomic", full)
    update_metadata(tmp_path, status="failed: TrainingFailed: no space left on the device of the run")
    saved = json.loads((tmp_path / "metadata.json").read_text())
    assert (saved["status"][:6], saved["seed"]) == ("failed", 3)
    update_metadata(tmp_path, status="ok")  # shorter than what stood there
    assert status(tmp_path) == "ok"


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(tiny_config, monkeypatch):
    from rl_training.runtime import run_folder

    def full(path, text):
        raise FULL

    monkeypatch.setattr(run_folder, "write_text_atomic", full)
    config = tiny_config("ppo")
    with pytest.raises(InputError, match=r"run folder .* cannot be written: No space left on device"):
        train(config, progress="silent")
    assert list(config.output_dir.iterdir()) == []


@pytest.fixture
def hang_up_allowed():
    """Whoever runs the tests may have told them to ignore SIGHUP, as nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hang_up_saves_even_when_it_comes_twice(tiny_config, hang_up_allowed):
    """The shell and the system may both send it."""

    def hang_up(run):
        if run.step >= 128:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(KeyboardInterrupt) as caught:
        train(tiny_config("ppo"), callbacks=[hang_up], progress="silent")
    assert isinstance(caught.value, TrainingInterrupted)
    result = caught.value.result
    assert load_checkpoint(result.checkpoint_path).step == 128
    assert status(result.run_dir) == "stopped: received SIGHUP"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_hang_up_that_is_ignored_stays_ignored(tiny_config, hang_up_allowed):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up = lambda run: os.kill(os.getpid(), signal.SIGHUP)  # noqa: E731
    assert train(tiny_config("ppo"), callbacks=[hang_up], progress="silent").metrics["global_step"] == 256


TERMINAL = """
import fcntl, runpy, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal whose end is sent to us
sys.argv[:] = sys.argv[1:]
runpy.run_module("rl_training", run_name="__main__")
"""


@pytest.mark.parametrize("progress", ["plain", "live"])
def test_a_terminal_that_closes_costs_no_checkpoint(progress, tiny_config, tmp_path):
    config = tiny_config("ppo", {"total_timesteps": 10**6, "log_interval": 32})
    data = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 10**6, "num_envs": 2, "checkpoint_interval": 256}
    data |= {"log_interval": 32, "output_dir": str(config.output_dir), "algo_kwargs": config.algo_kwargs}
    path = tmp_path / "terminal.yaml"
    path.write_text(yaml.safe_dump(data))
    terminal, inside = os.openpty()
    command = [sys.executable, "-c", TERMINAL, "rl_training", "train", str(path), "--run-suffix", "tty"]
    process = subprocess.Popen(
        [*command, "--progress", progress], stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    reader = threading.Thread(target=drain, args=(terminal,), daemon=True)
    reader.start()
    run_dir = config.output_dir / "ppo__CartPole-v1__seed0__tty"
    wait_for(lambda: any(run_dir.glob("checkpoints/step_*")), process)
    before = max(int(p.name.removeprefix("step_")) for p in run_dir.glob("checkpoints/step_*"))
    os.close(terminal)
    assert process.wait(timeout=60) == 130
    assert status(run_dir) == "stopped: received SIGHUP"
    newest = max(int(p.name.removeprefix("step_")) for p in run_dir.glob("checkpoints/step_*"))
    assert load_checkpoint(run_dir / "checkpoints" / f"step_{newest}").step == newest >= before


def drain(terminal):
    """Read what a process prints, or it waits for us."""
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        return


class Gone(io.StringIO):
    """A terminal that is gone after some writes."""

    def __init__(self, writes):
        super().__init__()
        self.left = writes

    def isatty(self):
        return True

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.parametrize("writes", [0, 3])
def test_nobody_needs_to_watch(mode, writes):
    progress = make_progress(mode, schedule_names=["lr"], stream=Gone(writes))
    progress.start(100, "title")
    for step in range(0, 100, 10):
        progress.update(step, {"global_step": step, "loss": 0.5, "lr": 0.1})
        progress.message("a message")
    progress.stop()


def test_a_character_that_a_terminal_cannot_show_is_replaced():
    shown = io.BytesIO()
    stream = io.TextIOWrapper(shown, encoding="ascii")
    make_progress("plain", stream=stream).message("1 ± 2")
    assert shown.getvalue() == b"1 ? 2\n"
