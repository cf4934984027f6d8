"""Columns of a replay that are kept on a device are those that the replay would have: here the device is the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from build import make_replay
from rl_training.algorithms.dreamer import LATENT, Dreamer
from rl_training.data.replay import Replay
from test_dreamer_update import DISCRETE, make, stream

NUM_ENVS = 2


def on_device(learner: Dreamer) -> Replay:
    replay = make_replay("dreamer", learner, DISCRETE, NUM_ENVS)
    replay.keep_on_device(LATENT, torch.device("cpu"))
    return replay


def columns_of(replay: Replay) -> dict[str, Any]:
    """What a checkpoint has of steps. Rows without one may keep what the ring had there: nothing reads it."""
    state = replay.state_dict()
    steps = np.concatenate(state["valid"])
    return {name: np.concatenate(state["columns"][name])[steps] for name in LATENT}


def test_learning_from_columns_on_a_device() -> None:
    """What is learned, written back and saved is the same, while the ring comes round and after a resume."""
    options = {"buffer_capacity": 40, "train_ratio": 4.0, "learning_starts": 0, "warmup_updates": 0}
    learners = make(**options), make(**options)
    replays = [make_replay("dreamer", learners[0], DISCRETE, NUM_ENVS), on_device(learners[1])]
    for number, step in zip(range(60), stream(NUM_ENVS), strict=False):
        for replay in replays:
            replay.add(step)
        if number == 35:  # as if resumed
            states = [replay.state_dict() for replay in replays]
            replays = [make_replay("dreamer", learners[0], DISCRETE, NUM_ENVS), on_device(learners[1])]
            for replay, state in zip(replays, states, strict=True):
                replay.load_state_dict(state)
        reports = [learner.learn(replay) for learner, replay in zip(learners, replays, strict=True)]
        assert reports[0].keys() == reports[1].keys()
        assert all(x == y for name in reports[0] for x, y in zip(reports[0][name], reports[1][name], strict=True))
        if number % 7 == 0:
            saved = [columns_of(replay) for replay in replays]
            for name in LATENT:
                np.testing.assert_array_equal(saved[0][name], saved[1][name])
    assert learners[0].gradient_steps == learners[1].gradient_steps > 20


class Elsewhere(torch.Tensor):
    """A tensor that numpy cannot read, as one on a GPU."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.as_subclass(torch.Tensor)


def test_latents_of_a_device_without_space_for_the_columns_go_to_the_arrays() -> None:
    learner = make(buffer_capacity=40)
    replay = make_replay("dreamer", learner, DISCRETE, NUM_ENVS)
    for _, step in zip(range(10), stream(NUM_ENVS), strict=False):
        replay.add(step)
    place = np.array([[2, 3]])
    deter = torch.rand(1, 2, *replay.columns["deter"].shape[1:]).half()
    replay.put(place, deter=deter.as_subclass(Elsewhere))
    np.testing.assert_array_equal(replay.columns["deter"][place], deter.numpy())
