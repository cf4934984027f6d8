"""Gumbel MuZero (Danihelka et al., "Policy improvement by planning with Gumbel", ICLR 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.planning import PlanningHyperparameters, PlanningLearner


@dataclass(frozen=True)
class GumbelMuZeroHyperparameters(PlanningHyperparameters):
    q_rescale: Literal["tree", "node", "none"] = setting(
        "tree", "normalize Q to [0, 1] by the range of the whole tree, of the node's children, or not at all"
    )
    num_simulations: int = scalar(16, "MCTS simulations per search", low=1)
    temperature: float = scalar(
        1.0, "scale of the root's Gumbel noise; 1: sample the improved policy, 0: its best action"
    )
    max_considered_actions: int = scalar(16, "root actions considered by Sequential Halving", low=1)
    c_visit: float = scalar(50.0, "c_visit of sigma(q) = (c_visit + max_visits) * c_scale * q")
    c_scale: float = scalar(0.1, "c_scale of sigma(q) = (c_visit + max_visits) * c_scale * q")


class GumbelMuZero(PlanningLearner):
    Hyperparameters = GumbelMuZeroHyperparameters
    hp: GumbelMuZeroHyperparameters
