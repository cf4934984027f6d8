"""Actors that plan with a learned model. MuZero (arXiv:1911.08265), Gumbel MuZero (Danihelka et al., ICLR 2022) and
EfficientZero (arXiv:2111.00210) differ in the model and in the planning function."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from rl_training.acting.actor import NetworkActor
from rl_training.acting.planner import Plan, Planner
from rl_training.config import InputError
from rl_training.data.fields import NUMBER, step_fields
from rl_training.models.efficientzero import EfficientZeroModel
from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.types import Array, Decision, Field, Fields, History, Memory, Observation, Spaces

PlanFunction: TypeAlias = Callable[..., Plan]  # (planner, obs, hp, *, temperature, num_simulations, rng, **noise)


def plan_by_visits(
    planner: Planner,
    obs: Observation,
    hp: Any,
    *,
    temperature: float,
    num_simulations: int,
    rng: np.random.Generator,
    root_exploration_fraction: float = 0.0,
    history: History | None = None,
    rules: str = "MUZERO",
) -> Plan:
    """MuZero: PUCT with Dirichlet noise in the root prior. Actions are sampled from visits^(1 / temperature).

    root_exploration_fraction: share of the noise in the prior. history: the steps before the observations, for models
    with a context.
    """
    from rl_training.ops import search as ops  # here, because importing numba is slow
    from rl_training.ops.tree import SearchConstants

    root = planner.evaluate_root(obs, num_simulations=num_simulations, rng=rng, history=history)
    logits = ops.with_dirichlet(
        root.logits, root.legal, fraction=root_exploration_fraction, alpha=hp.dirichlet_alpha, rng=rng
    )
    result = planner.search(
        getattr(ops, rules),
        root._replace(logits=logits),
        gamma=hp.gamma,
        num_simulations=num_simulations,
        constants=SearchConstants(pb_c_init=hp.pb_c_init, pb_c_base=hp.pb_c_base),
        rng=rng,
    )
    edge = ops.act_by_visits(result.visits, temperature, rng)
    return planner.plan(root, result, edge, ops.visit_policy(result.visits))


def plan_by_gumbel(
    planner: Planner, obs: Observation, hp: Any, *, temperature: float, num_simulations: int, rng: np.random.Generator
) -> Plan:
    """Gumbel MuZero: Sequential Halving on g temperature + logits + sigma(q).

    argmax (g T + x) = argmax (g + x / T), so the action is a sample of softmax((logits + sigma(q)) / T). The policy
    target is free of noise.
    """
    from rl_training.ops import search as ops
    from rl_training.ops.tree import SearchConstants

    rules = {"tree": ops.GUMBEL_TREE, "node": ops.GUMBEL, "none": ops.GUMBEL_RAW}[hp.q_rescale]
    constants = SearchConstants(c_visit=hp.c_visit, c_scale=hp.c_scale, max_considered=hp.max_considered_actions)
    root = planner.evaluate_root(obs, num_simulations=num_simulations, rng=rng)
    gumbel = (temperature * rng.gumbel(size=root.logits.shape)).astype(np.float32)
    result = planner.search(
        rules, root, gamma=hp.gamma, num_simulations=num_simulations, constants=constants, rng=rng, gumbel=gumbel
    )
    edge, policy = ops.gumbel_outcome(result, root.logits, root.legal, gumbel, constants)
    return planner.plan(root, result, edge, policy)


def search_arguments(hp: Any, *, explore: bool) -> dict[str, Any]:
    """The arguments of a planning function in training (acting, reanalysis), or in evaluation, without noise."""
    name = "root_exploration_fraction"  # not a hyperparameter of Gumbel MuZero
    noise = {name: getattr(hp, name) if explore else 0.0} if name in vars(hp) else {}
    if explore:
        return {"temperature": hp.temperature, "num_simulations": hp.num_simulations, **noise}
    simulations = hp.num_simulations if hp.eval_num_simulations is None else hp.eval_num_simulations
    return {"temperature": hp.eval_temperature, "num_simulations": simulations, **noise}


def plan_extras(plan: Plan) -> dict[str, Array]:
    """The entries that a search adds to a step."""
    extras = {"policy": plan.policy, "root_value": plan.value}
    return extras if plan.candidates is None else extras | {"candidates": plan.candidates}


def planning_fields(spaces: Spaces, hp: Any) -> Fields:
    """A step holds the policy and the value of its search, and for continuous actions the candidates."""
    if isinstance(spaces.action, gym.spaces.Box):
        actions, size = hp.num_sampled_actions, math.prod(spaces.action.shape)
        candidates = {"candidates": Field((actions, size), np.dtype(np.float32))}
    else:
        assert isinstance(spaces.action, gym.spaces.Discrete)
        actions, candidates = int(spaces.action.n), {}
    return step_fields(spaces, {"policy": Field((actions,), np.dtype(np.float32)), "root_value": NUMBER, **candidates})


class PlanningActor(NetworkActor):
    """Acts by a search with a learned model."""

    model: PlanningModel

    def __init__(
        self,
        spaces: Spaces,
        hp: Any,
        *,
        make_model: Callable[[Spaces, Any], PlanningModel],
        plan: PlanFunction,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(spaces.action, gym.spaces.Discrete | gym.spaces.Box):
            raise InputError(
                f"planning takes one discrete action or a Box, not {spaces.action}: use ppo, or make its combinations "
                "one Discrete space with a gymnasium.ActionWrapper"
            )
        super().__init__(make_model(spaces, hp).eval(), spaces, hp, device=device)
        self.planner = self.planner_of(self.model)
        self.plan_with = plan

    def planner_of(self, model: PlanningModel) -> Planner:
        """A planner for another model of the same spaces: learners plan with their target network."""
        return Planner(model, self.spaces, num_candidates=self.hp.num_sampled_actions)

    def plan(self, obs: Observation, **arguments: Any) -> Plan:
        """Search from observations [N, ...]. The arguments are those of the planning function."""
        return self.plan_with(self.planner, obs, self.hp, **arguments)

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        plan = self.plan(obs, rng=rng, **search_arguments(self.hp, explore=explore))
        return Decision(plan.action, memory, plan_extras(plan))

    def refresh(self) -> None:
        self.planner.refresh()


MODEL_SETTINGS = (
    "latent_size", "hidden_sizes", "activation", "value_limit", "reward_limit", "network", "channels", "blocks", "stem",
)  # fmt: skip
LSTM_SETTINGS = ("lstm_size", "lstm_horizon", "projection_size")


def muzero_model(spaces: Spaces, hp: Any) -> MuZeroModel:
    return MuZeroModel(spaces, **{name: getattr(hp, name) for name in MODEL_SETTINGS})


def efficientzero_model(spaces: Spaces, hp: Any) -> EfficientZeroModel:
    return EfficientZeroModel(spaces, **{name: getattr(hp, name) for name in MODEL_SETTINGS + LSTM_SETTINGS})


MuZeroActor = partial(PlanningActor, make_model=muzero_model, plan=plan_by_visits)
GumbelMuZeroActor = partial(PlanningActor, make_model=muzero_model, plan=plan_by_gumbel)
EfficientZeroActor = partial(
    PlanningActor, make_model=efficientzero_model, plan=partial(plan_by_visits, rules="EFFICIENTZERO")
)
