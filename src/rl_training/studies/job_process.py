"""The main function of a process that trains one job: see JobHost.

Its first message is the order: `config` (a mapping), `folder`, `asks` (whether it waits for an answer after each
evaluation), `allow_import`. Later ones are the texts `stop`, `continue` and `prune`.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from rl_training.errors import InputError
from rl_training.reports.runs import load_run
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.checkpoints import STEP_NAME, open_checkpoint
from rl_training.runtime.loading import build_config
from rl_training.runtime.metadata import update_metadata
from rl_training.runtime.metrics import TrainingDiverged
from rl_training.runtime.outcome import TrainingFailed, TrainingInterrupted
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training, train
from rl_training.types import Metrics

REPORT_SECONDS = 0.5  # from one report of the progress to the next
GRACE = 30.0  # seconds that a job has to save a checkpoint after its parent has ended
PRUNED = "pruned"
SHOWN = ("global_step", "steps_per_second", "train_return_mean", "eval_return_mean")


class Line:
    """The connection to the parent. A thread listens: `stop`, and the end of the parent, are a SIGTERM to the run."""

    def __init__(self, descriptor: int) -> None:
        self.connection: Any = multiprocessing.connection.Connection(descriptor)
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.order: dict[str, Any] = json.loads(self.connection.recv_bytes())
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        stopped = False  # a second signal would end the run without a checkpoint
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = json.loads(self.connection.recv_bytes())
                if message != "stop":
                    self.answers.put(message)
                elif not stopped:
                    stopped = True
                    os.kill(os.getpid(), signal.SIGTERM)
        if not stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    def send(self, kind: str, **content: Any) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            self.connection.send_bytes(json.dumps({"kind": kind, **content}).encode())


class Reporter:
    """A callback that tells the parent how far the run is, and waits for its decision after an evaluation."""

    def __init__(self, line: Line) -> None:
        self.line, self.reported, self.evaluations = line, 0.0, 0
        self.run: Any = None

    def __call__(self, run: Any) -> None:
        if self.run is None:
            self.run, self.evaluations = run, run.evaluations - run.just_evaluated
        if run.evaluations > self.evaluations:
            self.evaluations = run.evaluations
            self._ask(run)
        elif time.monotonic() - self.reported > REPORT_SECONDS:
            self._report(run, "progress")

    def _report(self, run: Any, kind: str) -> None:
        self.reported = time.monotonic()
        shown = {name: run.metrics[name] for name in SHOWN if math.isfinite(run.metrics.get(name, math.nan))}
        self.line.send(kind, step=run.step, total=run.config.total_timesteps, metrics=shown)

    def _ask(self, run: Any) -> None:
        if not self.line.order["asks"]:
            self._report(run, "progress")
            return
        self.line.send("evaluation", step=run.step, total=run.config.total_timesteps, metrics=finite(run.metrics))
        while not run.interrupts.received:
            with contextlib.suppress(queue.Empty):
                if self.line.answers.get(timeout=0.2) == "prune":
                    run.stop(PRUNED)
                return


def finite(metrics: Metrics) -> Metrics:
    """Those metrics that JSON can hold."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def newest_checkpoint(folder: Path) -> Path | None:
    """Of all runs of a job, the checkpoint at the largest step; `best` lacks what training needs."""
    found = [path for path in folder.glob("*/checkpoints/step_*") if STEP_NAME.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def run_job(line: Line) -> dict[str, Any]:
    """Train, or continue what an interruption left; the content of the last message."""
    order, reporter = line.order, Reporter(line)
    folder, allow_import = Path(order["folder"]), order["allow_import"]
    options: dict[str, Any] = {"callbacks": [reporter], "progress": "plain"}
    config = build_config({**order["config"], "output_dir": folder}, allow_import=allow_import)
    newest = newest_checkpoint(folder)
    if newest is not None:
        checkpoint = open_checkpoint(newest.parent.parent)
        if checkpoint.step >= config.total_timesteps:  # only the last evaluation was interrupted
            return evaluate_last(checkpoint, newest.parent.parent, allow_import=allow_import)
        result = resume_training(checkpoint.path, output_dir=folder, allow_import=allow_import, **options)
    else:
        result = train(config, **options)
    run = reporter.run
    if run is not None and run.interrupts.received and not run.just_evaluated:
        return {"status": "interrupted", "run_dir": str(result.run_dir)}
    reason = run.stop_reason if run is not None else None
    content = {"run_dir": str(result.run_dir), "metrics": finite(result.metrics), "reason": reason}
    return {"status": "finished", **content}


def evaluate_last(checkpoint: Checkpoint, run_dir: Path, *, allow_import: bool) -> dict[str, Any]:
    """Make up for the last evaluation of a run, in its log too."""
    began = time.perf_counter()
    result = evaluate_checkpoint(checkpoint.path, allow_import=allow_import)
    seconds = (load_run(run_dir).wall_seconds or 0.0) + time.perf_counter() - began
    head = {"kind": "eval", "time": round(time.time(), 3), "wall_seconds": round(seconds, 3)}
    line = {**head, "global_step": checkpoint.step, **finite(result)}
    with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    update_metadata(run_dir, status="finished", global_step=checkpoint.step)
    metrics = finite(checkpoint.info["metrics"] | result)
    return {"status": "finished", "run_dir": str(run_dir), "metrics": metrics}


def main(descriptor: str) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run has its own while it trains
    line = Line(int(descriptor))
    try:
        end = run_job(line)
    except TrainingInterrupted as interrupted:
        end = {"status": "interrupted", "run_dir": str(interrupted.result.run_dir)}
    except KeyboardInterrupt:
        end = {"status": "interrupted"}
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, InputError | TrainingDiverged | TrainingFailed)
        end = {"status": "failed", "error": str(error) if known else f"{type(error).__name__}: {error}"}
    line.send("end", **end)
    return int(end["status"] == "failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
