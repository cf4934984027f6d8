"""MuZero (Schrittwieser et al., arXiv:1911.08265), with Reanalyse (2104.06294) and sampled actions (2104.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_training.algorithms.base import scalar
from rl_training.algorithms.planning import PlanningHyperparameters, PlanningLearner


def cooling() -> dict[str, Any]:
    """The paper's schedule for Atari: 1 for the first half of training, then 0.5, and 0.25 in the last quarter."""
    return {"kind": "step", "start": 1.0, "factor": 0.5, "milestones": ["50%", "75%"]}


def sharpening() -> dict[str, Any]:
    """For small tasks: with 50 simulations the visits of a few actions differ little, and at a temperature of 1 actions
    are almost random."""
    return {"kind": "linear", "start": 0.5, "end": 0.1}


@dataclass(frozen=True)
class MuZeroHyperparameters(PlanningHyperparameters):
    temperature: float = scalar(
        0.5, "actions are sampled in proportion to visits^(1 / temperature)", schedule=sharpening, atari=cooling
    )
    root_exploration_fraction: float = scalar(0.25, "share of Dirichlet noise in the root's prior", high=1.0)
    dirichlet_alpha: float = scalar(0.3, "concentration of the root's Dirichlet noise", low=1e-3)
    pb_c_init: float = scalar(1.25, "PUCT constant c1: weight of the prior relative to Q")
    pb_c_base: float = scalar(19652.0, "PUCT constant c2 of log((visits + c2 + 1) / c2) + c1", low=1.0)


class MuZero(PlanningLearner):
    Hyperparameters = MuZeroHyperparameters
    hp: MuZeroHyperparameters
