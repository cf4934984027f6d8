"""Random numbers: one named stream per use, all derived from the seed of the run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from rl_training.envs.episodes import seed_process
from rl_training.types import State

STREAMS = ("model", "learner", "environments", "evaluation", "process", "demonstrations", "imagination")


def seed_of(seed: int, stream: str, *numbers: int) -> int:
    """A 32-bit seed for one stream. No two uses share a stream, so none depends on the draws of another.

    numbers: of the task, then of the actor, then how often it was started before; zeros at the end change nothing.
    """
    key = [STREAMS.index(stream), *numbers]
    while len(key) > 1 and not key[-1]:
        key.pop()
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return int(sequence.generate_state(1)[0])


def generator(seed: int, stream: str) -> np.random.Generator:
    return np.random.default_rng(seed_of(seed, stream))


def global_state() -> State:
    """The state of the process-wide generators: see seed_process."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys, *rest],
        "torch": torch.get_rng_state(),
    }


def set_global_state(state: State) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])


@contextlib.contextmanager
def own_global_state(seed: int) -> Iterator[None]:
    """Seed the process-wide generators inside, and restore their state after."""
    state = global_state()
    seed_process(seed)
    try:
        yield
    finally:
        set_global_state(state)
