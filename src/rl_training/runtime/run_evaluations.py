"""The evaluations of a run, and the best of them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rl_training.runtime.evaluation import describe_evaluation, evaluate
from rl_training.runtime.run_log import current

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun


class RunEvaluations:
    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.count, self.step = 0, -1  # the number of evaluations, the env step of the last
        self.best = -math.inf  # mean return, also of the runs that this one was resumed from
        self.best_here = -math.inf  # of this run alone, whose folder holds its own `best`
        self.due = False  # the last one was interrupted: a resumed run begins with it
        self.seconds = 0.0  # spent in this process, which steps_per_second leaves out

    def evaluate(self) -> None:
        """See TrainingRun.evaluate."""
        run, started = self.run, time.perf_counter()
        with run.progress.phases.during("evaluating"):
            result = evaluate(run.players, run.config, stopped=lambda: bool(run.interrupts.received))
        self.due = result is None
        if result is None:
            return
        self.seconds += time.perf_counter() - started
        self.count, self.step = self.count + 1, run.step
        metrics = current(run)
        run.metrics |= result | metrics
        steps = {name: metrics[name] for name in ("global_step", "gradient_steps")}
        run.log.write(steps | result, kind="eval", wall_seconds=run.wall_seconds)
        run.progress.update(run.step, run.metrics, line=False)
        run.progress.message(f"evaluation at step {run.step:,}: {describe_evaluation(result)}")
        if result["eval_return_mean"] > self.best_here:
            self.best_here = result["eval_return_mean"]
            self.best = max(self.best, self.best_here)
            run.checkpoints.save_best()
