"""Gumbel MuZero (Danihelka et al., "Policy improvement by planning with Gumbel", ICLR 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.planner import Plan, Planner
from rl_training.algorithms.planning import PlanningAlgorithm, PlanningHyperparameters
from rl_training.types import Observation


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


class GumbelMuZero(PlanningAlgorithm):
    Hyperparameters = GumbelMuZeroHyperparameters
    hp: GumbelMuZeroHyperparameters

    def plan(
        self,
        obs: Observation,
        *,
        temperature: float,
        num_simulations: int,
        rng: np.random.Generator,
        planner: Planner | None = None,
    ) -> Plan:
        """Sequential Halving on g temperature + logits + sigma(q): argmax (g T + x) = argmax (g + x / T), so that the
        action is a sample of softmax((logits + sigma(q)) / T). The policy target has no noise in it."""
        from rl_training.ops import search as ops

        hp, planner, (low, high) = self.hp, planner or self.planner, self.known_bounds
        rules = {"tree": ops.GUMBEL_TREE, "node": ops.GUMBEL, "none": ops.GUMBEL_RAW}[hp.q_rescale]
        knobs = ops.Knobs(
            c_visit=hp.c_visit, c_scale=hp.c_scale, max_considered=hp.max_considered_actions, low=low, high=high
        )
        root = planner.look(obs, num_simulations=num_simulations, rng=rng)
        gumbel = (temperature * rng.gumbel(size=root.logits.shape)).astype(np.float32)
        result = planner.search(
            rules,
            root,
            discount=self.discount,
            num_simulations=num_simulations,
            knobs=knobs,
            rng=rng,
            gumbel=gumbel,
        )
        edge, policy = ops.gumbel_outcome(result, root.logits, root.legal, gumbel, knobs)
        return planner.plan(root, result, edge, policy)
