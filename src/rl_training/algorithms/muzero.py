"""MuZero (Schrittwieser et al., arXiv:1911.08265), with Reanalyse (2104.06294) and sampled actions (2104.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_training.algorithms.base import scalar
from rl_training.algorithms.planner import Plan, Planner
from rl_training.algorithms.planning import PlanningAlgorithm, PlanningHyperparameters
from rl_training.types import History, Observation


def cooling() -> dict[str, Any]:
    """The paper's for Atari: 1 for the first half of training, then 0.5, and 0.25 in the last quarter."""
    return {"kind": "step", "start": 1.0, "factor": 0.5, "milestones": ["50%", "75%"]}


@dataclass(frozen=True)
class MuZeroHyperparameters(PlanningHyperparameters):
    temperature: float = scalar(1.0, "actions are sampled in proportion to visits^(1 / temperature)", schedule=cooling)
    root_exploration_fraction: float = scalar(0.25, "share of Dirichlet noise in the root's prior", high=1.0)
    dirichlet_alpha: float = scalar(0.3, "concentration of the root's Dirichlet noise", low=1e-3)
    pb_c_init: float = scalar(1.25, "PUCT constant c1: weight of the prior relative to Q")
    pb_c_base: float = scalar(19652.0, "PUCT constant c2 of log((visits + c2 + 1) / c2) + c1", low=1.0)


class MuZero(PlanningAlgorithm):
    Hyperparameters = MuZeroHyperparameters
    hp: MuZeroHyperparameters

    def exploration(self) -> dict[str, float]:
        return {"root_exploration_fraction": self.hp.root_exploration_fraction}

    def plan(
        self,
        obs: Observation,
        *,
        temperature: float,
        num_simulations: int,
        rng: np.random.Generator,
        planner: Planner | None = None,
        root_exploration_fraction: float = 0.0,
        history: History | None = None,
    ) -> Plan:
        """Visits by PUCT, from a root whose prior has noise; the action from visits^(1 / temperature).

        history: the steps before the observations, for a model that remembers.
        """
        from rl_training.ops import search as ops

        hp, planner, (low, high) = self.hp, planner or self.planner, self.known_bounds
        root = planner.look(obs, num_simulations=num_simulations, rng=rng, history=history)
        logits = ops.with_dirichlet(
            root.logits, root.legal, fraction=root_exploration_fraction, alpha=hp.dirichlet_alpha, rng=rng
        )
        result = planner.search(
            self.rules(),
            root._replace(logits=logits),
            discount=self.discount,
            num_simulations=num_simulations,
            knobs=ops.Knobs(pb_c_init=hp.pb_c_init, pb_c_base=hp.pb_c_base, low=low, high=high),
            rng=rng,
        )
        edge = ops.act_by_visits(result.visits, temperature, rng)
        return planner.plan(root, result, edge, ops.visit_policy(result.visits))

    def rules(self) -> Any:
        from rl_training.ops.search import MUZERO

        return MUZERO
