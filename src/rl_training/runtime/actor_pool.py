"""A source whose actors are in other processes or on other machines, and play while the learner learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_training.acting.actor import Actor
from rl_training.config import Execution, TrainConfig
from rl_training.data.merged_statistics import MergedStatistics
from rl_training.data.normalize import Normalizer
from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import JoinedRollout
from rl_training.envs.factory import spec_of
from rl_training.envs.runner import RECENT, FinishedEpisode
from rl_training.envs.tasks import make_normalizer
from rl_training.runtime.crew import Crew
from rl_training.runtime.fleet import Arrival, Fleet
from rl_training.runtime.pool_metrics import PoolMetrics, means_of
from rl_training.runtime.pool_state import PoolState
from rl_training.runtime.randomness import seed_of
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.rollout_worker import Order, Report, WorkerFacts, WorkerPlan
from rl_training.runtime.sources import last_return
from rl_training.types import Fields, Metrics, State


class ActorPool:
    """A queue of rollouts between the workers of a crew and the learner.

    An update learns from as many rollouts as there are actors, the oldest first, so a batch has `num_envs` columns
    however the environments are shared out. In lock-step (queue: 0) all actors play one rollout with the newest weights
    when the learner asks for it, and wait while it learns.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, execution: Execution, fleet: Fleet) -> None:
        self.config, self.recipe, self.execution, self.fleet = config, recipe, execution, fleet
        self.task, self.env_steps = config.tasks[0], 0
        self.names, self.share = [self.task.env_id], config.num_envs // execution.actors
        self.lock_step = execution.queue == 0
        beside = "actors play while the learner learns, and rollouts that waited for it are not saved"
        self.not_exact = "" if self.lock_step else beside
        self.queue: deque[Arrival] = deque()
        self.episodes: deque[FinishedEpisode] = deque(maxlen=RECENT)
        self.dropped_steps = 0  # env steps that were dropped since the last `collect`
        self.lost: list[int] = []  # environments that a checkpoint could not give back
        self.hp: Any = None
        self.published = -1  # the version of the weights that actors get
        self.collecting = False
        self.workers: list[WorkerFacts] = []  # in the order in which they were opened first
        self.normalizer: Normalizer | None = None
        self.statistics: MergedStatistics | None = None
        self.crew = Crew(fleet, execution, self.plan_of, self.opened, self.next_order, self.arrived)
        self.metrics = PoolMetrics(execution)
        try:
            self.crew.open()
        except BaseException:
            self.crew.close()
            raise
        self.notes, self.spaces = self.crew.notes, [self.workers[0].spaces]
        self.normalizers: list[Normalizer | None] = [self.normalizer]

    # Of the run

    def attach(self, actors: Sequence[Actor], fields: Sequence[Fields]) -> None:
        """The given actor is the learner's: actors elsewhere play with copies of its weights."""
        (self.newest,), (step_fields,) = actors, fields
        self.hp = self.crew.attachment = self.newest.hp
        part = self.crew.ask("attach", [self.hp] * self.execution.actors)[0]
        self.fleet.allocate(part, self.execution.queue_size + 2 * self.execution.actors)
        self.rollout = JoinedRollout(self.hp.num_steps, self.config.num_envs, step_fields)

    def use(self, hp: Any) -> None:
        with self.crew.changed:
            self.hp = self.newest.hp = hp

    def collect(self, on_step: Callable[[int], None]) -> Rollout:
        taken: list[Arrival] = []
        if self.published < 0:
            self.metrics.begin()  # what it took to start is not counted
        with self.crew.changed, self.metrics.waiting():
            self.metrics.looked(len(self.queue))
            self.publish()
            self.collecting = True
            while len(taken) < self.execution.actors:
                self.crew.proceed()
                self.crew.wait(self.ready)
                taken += self.take(self.execution.actors - len(taken))
                on_step(steps_of(taken) + self.dropped_steps)
            self.collecting = False
            self.crew.proceed()
            if self.lock_step:  # nothing depends on which actor was the first to finish
                taken.sort(key=lambda arrival: arrival.report.worker)
                for arrival in taken:
                    self.count(arrival.report)
        self.rollout.join([self.fleet.part(arrival) for arrival in taken])
        with self.crew.changed:
            self.learn_from(taken)
        return self.rollout

    def ready(self) -> bool:
        return len(self.queue) >= (self.execution.actors if self.lock_step else 1)

    def publish(self) -> None:
        if self.published != self.newest.version:
            self.fleet.publish(self.newest.weights())
            self.published = self.newest.version

    def take(self, most: int) -> list[Arrival]:
        """Up to so many rollouts of the queue, without those of too old weights, which are dropped."""
        taken: list[Arrival] = []
        while self.queue and len(taken) < most:
            arrival = self.queue.popleft()
            if self.newest.version - arrival.report.version > self.execution.max_policy_lag:
                self.drop(arrival)
            else:
                taken.append(arrival)
        return taken

    def drop(self, arrival: Arrival) -> None:
        self.dropped_steps += arrival.report.env_steps
        self.metrics.dropped += 1
        self.fleet.release(arrival)

    def learn_from(self, taken: Sequence[Arrival]) -> None:
        """Count rollouts whose steps were copied, and free their places."""
        for arrival in taken:
            self.fleet.release(arrival)
        learned = steps_of(taken)
        self.env_steps, self.dropped_steps = learned + self.dropped_steps, 0
        self.metrics.learned_steps += learned
        if self.statistics and self.normalizer:
            self.statistics.copy_to(self.normalizer)

    def recent(self) -> dict[str, Metrics]:
        with self.crew.changed:
            return {self.names[0]: self.metrics.read(self.episodes, self.crew.restarts)}

    def latest(self) -> dict[str, Metrics]:
        known = list(self.episodes)
        return {self.names[0]: means_of(known) | last_return([episode.episode_return for episode in known])}

    def try_acting(self) -> None:
        self.crew.ask("try", [None] * self.execution.actors)

    def states(self) -> list[State | None]:
        """The state of each worker after the rollout that it is playing; None where the pool has failed."""
        if self.crew.failure is not None:
            return [None] * self.execution.actors
        return self.crew.ask("state", [None] * self.execution.actors)

    def load_states(self, states: Sequence[State | None]) -> None:
        """Workers whose state is None begin new episodes."""
        if self.statistics and self.normalizer:
            self.statistics.load(self.normalizer)
        statistics = self.statistics.states() if self.statistics else None
        lost = self.crew.ask("load", [(state, statistics) for state in states])
        self.lost = [worker * self.share + env for worker, envs in enumerate(lost) for env in envs]

    def parts(self) -> dict[str, Any]:
        normalizer = {"normalizer": self.normalizer} if self.normalizer else {}
        return {**normalizer, "runner": PoolState(self)}

    def facts(self) -> dict[str, Any]:
        return {"backend": self.workers[0].backend, "environments_not_restored": self.lost}

    def not_restored(self) -> Mapping[str, tuple[list[int], int]]:
        return {self.names[0]: (self.lost, self.config.num_envs)} if self.lost else {}

    def spaces_json(self) -> dict[str, Any]:
        return self.workers[0].spaces_json

    def close(self) -> None:
        self.crew.close()

    # Of the crew

    def plan_of(self, worker: int, started: int) -> WorkerPlan:
        """The first start of the first worker has the seed of environments in this process."""
        seed = seed_of(self.config.seed, "environments", 0, worker, started)
        device, spec = self.execution.actor_device, spec_of(self.task.env_id)
        return WorkerPlan(worker, self.recipe, self.task, self.share, seed, device, spec)

    def opened(self, worker: WorkerFacts) -> None:
        self.workers.append(worker)
        if len(self.workers) == 1:
            self.normalizer = make_normalizer(self.task.env_kwargs, worker.env_observation, self.config.num_envs)
            self.statistics = MergedStatistics(self.normalizer) if self.normalizer else None
        if self.statistics and worker.observed:
            self.statistics.add(worker.observed)

    def next_order(self, worker: int) -> Order | None:
        if self.published < 0 or not self.may_play(worker):
            return None
        if self.statistics is None:
            return Order(self.hp, None, 0)
        return Order(self.hp, self.statistics.states(), self.statistics.version)

    def may_play(self, worker: int) -> bool:
        if self.lock_step:
            return self.collecting and all(arrival.report.worker != worker for arrival in self.queue)
        # An actor that would find no place in the queue waits, unless the oldest rollout makes room.
        room = self.execution.queue_size + self.execution.actors
        return self.execution.when_full == "drop" or len(self.queue) + self.crew.num_playing < room

    def arrived(self, arrival: Arrival) -> None:
        if not self.lock_step:
            self.count(arrival.report)
        if self.execution.when_full == "drop" and len(self.queue) >= self.execution.queue_size:
            self.drop(self.queue.popleft())
        self.queue.append(arrival)

    def count(self, report: Report) -> None:
        self.episodes.extend(report.episodes)
        self.metrics.arrived(report)
        if self.statistics and report.observed:
            self.statistics.add(report.observed)


def steps_of(arrivals: Sequence[Arrival]) -> int:
    return sum(arrival.report.env_steps for arrival in arrivals)
