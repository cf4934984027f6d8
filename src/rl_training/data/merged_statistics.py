"""The statistics of one normaliser from the observations and rewards of several actors."""

from __future__ import annotations

from typing import NamedTuple

from rl_training.data.normalize import Normalizer, RunningMeanStd
from rl_training.types import State


class Observed(NamedTuple):
    """What an actor's normaliser saw since it was given statistics."""

    base: int  # the version of those statistics
    everything: list[State]  # they and what came since
    since: list[State]  # only what came since


def set_statistics(normalizer: Normalizer, states: list[State]) -> None:
    """Give an actor's normaliser these statistics, and record from here on what it sees."""
    for statistics, state in zip(normalizer.statistics(), states, strict=True):
        statistics.load_state_dict(state)
        statistics.recent = RunningMeanStd(statistics.mean.shape)


def observed(normalizer: Normalizer, base: int) -> Observed:
    """What the normaliser saw since `set_statistics`."""
    parts = normalizer.statistics()
    recent = [part.recent.state_dict() for part in parts if part.recent is not None]
    return Observed(base, [part.state_dict() for part in parts], recent)


class MergedStatistics:
    """The statistics of all actors together; the version grows with each that is added."""

    def __init__(self, normalizer: Normalizer) -> None:
        self.version = 0
        self.parts = [RunningMeanStd(part.mean.shape) for part in normalizer.statistics()]
        self.load(normalizer)

    def load(self, normalizer: Normalizer) -> None:
        """Take the statistics of the normaliser."""
        self.version += 1
        for part, statistics in zip(self.parts, normalizer.statistics(), strict=True):
            part.load_state_dict(statistics.state_dict())

    def copy_to(self, normalizer: Normalizer) -> None:
        for part, statistics in zip(self.parts, normalizer.statistics(), strict=True):
            statistics.load_state_dict(part.state_dict())

    def states(self) -> list[State]:
        return [part.state_dict() for part in self.parts]

    def add(self, new: Observed) -> None:
        """If nobody else was added since the actor got its statistics, its own are the sum, without rounding."""
        alone = new.base == self.version
        self.version += 1
        for part, everything, since in zip(self.parts, new.everything, new.since, strict=True):
            if alone:
                part.load_state_dict(everything)
            elif since["count"]:
                part.merge(since["mean"], since["squares"], since["count"])
