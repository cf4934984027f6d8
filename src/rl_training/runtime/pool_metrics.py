"""What an actor pool counts: rollouts and their age, and which side waits for the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from statistics import fmean

from rl_training.config import Execution
from rl_training.envs.runner import FinishedEpisode
from rl_training.runtime.rollout_worker import Report
from rl_training.runtime.sources import episode_means
from rl_training.types import Metrics

SHORTEST = 0.5  # seconds for which a speed is measured at least


class PoolMetrics:
    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.dropped = 0
        self._rates: Metrics = {}
        self._came: dict[int, float] = {}  # by worker: when its last rollout came
        self.begin()

    def begin(self) -> None:
        self._since = time.perf_counter()
        self.learned_steps = self._played_steps = 0
        self._playing = self._between = 0.0  # seconds of actors: playing rollouts, and from one rollout to the next
        self._waited = 0.0  # seconds of the learner
        self._fills: list[float] = []  # share of the queue in use, whenever the learner came to it

    def arrived(self, report: Report) -> None:
        """Of each actor the time from its last rollout to this one is counted, whatever the window of `read` is."""
        now = time.perf_counter()
        self._played_steps += report.env_steps
        if report.worker in self._came:
            self._between += now - self._came[report.worker]
            self._playing += report.seconds
        self._came[report.worker] = now

    def looked(self, length: int) -> None:
        self._fills.append(min(1.0, length / max(1, self.execution.queue_size)))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as time in which the learner waits."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def read(self, episodes: Collection[FinishedEpisode], restarts: int) -> Metrics:
        """The counts so far, and the speeds since the last call after which something was learned from.

        So the last line of a run has those of its training, not of its last checkpoint and evaluation.
        """
        seconds = time.perf_counter() - self._since
        if (seconds >= SHORTEST and self.learned_steps) or not self._rates:
            self._rates = self._measured(max(seconds, 1e-9))
            self.begin()
        return {
            **means_of(episodes),
            **self._rates,
            "rollouts_dropped": self.dropped,
            "actor_restarts": restarts,
        }

    def _measured(self, seconds: float) -> Metrics:
        return {
            "actor_steps_per_second": self._played_steps / seconds,
            "learner_steps_per_second": self.learned_steps / seconds,
            "actor_waiting": self._share_of_waiting(),
            "learner_waiting": min(1.0, self._waited / seconds),
            "queue_fill": fmean(self._fills) if self._fills else 0.0,
        }

    def _share_of_waiting(self) -> float:
        """Of the actors. Where none has sent a second rollout since the last call, it is as before."""
        if not self._between:
            return self._rates.get("actor_waiting", 0.0)
        return min(1.0, max(0.0, 1.0 - self._playing / self._between))


def means_of(episodes: Collection[FinishedEpisode]) -> Metrics:
    known = list(episodes)
    return episode_means(
        [episode.episode_return for episode in known],
        [episode.length for episode in known],
        [episode.info for episode in known],
    )
