"""An episode beside what a world model predicts of it, and the errors of the prediction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rl_training.data.batch import arrays_of
from rl_training.types import Array, Trajectory


class OpenLoop(NamedTuple):
    """T observations of an episode, and what a world model predicts of them in S samples.

    Both are in the units of the environment, categories counted from 0. The model sees the first `context`
    observations and predicts each of them from the latent that it chose on seeing it. The others it imagines: all it
    knows of them are the actions.
    """

    env_id: str
    step: int  # env steps of training
    context: int
    true: Trajectory  # [T, ...]
    predicted: Trajectory  # [S, T, ...]


def describe(dream: OpenLoop) -> str:
    """The length of the prediction and its errors, beside those of predicting what was seen last."""
    length = len(dream.true.reward)
    lines = [f"{dream.env_id}, observations: {dream.context} seen, {length - dream.context} imagined"]
    names = {key or "observation": key for key in arrays_of(dream.true.obs)}
    width = max(len(name) for name in (*names, "reward"))
    for name, key in names.items():
        lines.append(f"{name:<{width}}  {error_of(dream, key)}")
    true, predicted = dream.true.reward[dream.context :], dream.predicted.reward[:, dream.context :]
    lines.append(f"{'reward':<{width}}  root mean square error {root_mean_square(predicted - true):.3g}")
    return "\n".join(lines)


def error_of(dream: OpenLoop, key: str) -> str:
    """Of the imagined observations of a key."""
    true, predicted = arrays_of(dream.true.obs)[key], arrays_of(dream.predicted.obs)[key]
    last, true, predicted = true[dream.context - 1], true[dream.context :], predicted[:, dream.context :]
    if true.dtype.kind == "i":
        wrong, still = np.mean(predicted != true), np.mean(last != true)
        return f"wrong categories {wrong:.0%} (what was seen last: {still:.0%})"
    wrong, still = (root_mean_square(guess.astype(np.float32) - true) for guess in (predicted, last))
    return f"root mean square error {wrong:.3g} (what was seen last: {still:.3g})"


def root_mean_square(error: Array) -> float:
    return float(np.sqrt(np.mean(np.square(error))))
