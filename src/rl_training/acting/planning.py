"""Searches with a learned model on the fastest path for it, and the actors that plan by them.

MuZero (arXiv:1911.08265), Gumbel MuZero (Danihelka et al., ICLR 2022) and EfficientZero (arXiv:2111.00210) differ in
the model and in the planning function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch

from rl_training.acting.actor import NetworkActor
from rl_training.acting.exportable import MASK, MAX_ACTION, Exportable, ExportedPrior
from rl_training.acting.fused import fused_network
from rl_training.acting.inference import GraphInference
from rl_training.acting.paths import make_inference, runs_inside_search
from rl_training.data.fields import NUMBER, step_fields
from rl_training.errors import InputError
from rl_training.models.efficientzero import EfficientZeroModel
from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.types import Array, Decision, Field, Fields, History, Memory, Observation, Spaces

if TYPE_CHECKING:
    from rl_training.ops.search import Evaluation, Rules, SearchResult
    from rl_training.ops.tree import Perceptrons, PrefixLSTM, SearchConstants


class Root(NamedTuple):
    """The model's predictions for B observations."""

    logits: Array  # [B, A]
    value: Array  # [B]
    legal: Array | None  # [B, A] bool
    candidates: Array | None  # [B, A, D] the sampled actions of the edges, if actions are continuous


class Plan(NamedTuple):
    """The result of a search from B observations."""

    action: Array  # [B] or [B, D]
    policy: Array  # [B, A] policy target, independent of the temperature
    value: Array  # [B] of the root
    visits: Array  # [B, A]
    candidates: Array | None  # [B, A, D]


class Planner:
    """Searches with one model. With continuous actions, the edges of a node are `num_candidates` samples of its policy,
    all with the same prior (Hubert et al., arXiv:2104.06303, with the policy as the proposal)."""

    def __init__(self, model: PlanningModel, spaces: Spaces, *, num_candidates: int = 0) -> None:
        from rl_training.ops.search import Search  # here, because importing numba is slow

        self.model = model
        self.inference = make_inference(model)
        self.fusable = runs_inside_search(model)
        self.two_players = spaces.num_players == 2
        self.action_shape = spaces.action.shape if isinstance(spaces.action, gym.spaces.Box) else None
        self.num_actions = model.policy_size if self.action_shape is None else num_candidates
        self._search = Search(self.num_actions)
        self._network: tuple[Perceptrons, PrefixLSTM | None] | None = None

    def refresh(self) -> None:
        """Called after the weights of the model have changed."""
        self._network = None
        self.inference.refresh()

    def evaluate_root(
        self, obs: Observation, *, num_simulations: int, rng: np.random.Generator, history: History | None = None
    ) -> Root:
        """The roots of searches. history: the steps before the observations, for models with a context."""
        prediction = self.inference.initial(obs, num_simulations, history)
        legal = obs[MASK].astype(bool) if isinstance(obs, dict) and MASK in obs else None
        if self.action_shape is None:
            return Root(prediction[:, :-2], prediction[:, -2], legal, None)
        candidates = self._sample_candidates(prediction, rng)
        return Root(np.zeros((len(prediction), self.num_actions), np.float32), prediction[:, -2], None, candidates)

    def values(self, obs: Observation) -> Array:
        """[B] The network's values of observations [B, ...]."""
        return self.inference.initial(obs, 0)[:, -2]

    def _sample_candidates(self, prediction: Array, rng: np.random.Generator) -> Array:
        """[B, A, D] Samples of the policies, tanh of Gaussians, in the first columns of prediction [B, 2 D + 2]."""
        mean, log_std = np.split(prediction[:, None, :-2], 2, -1)
        noise = rng.standard_normal((len(prediction), self.num_actions, mean.shape[-1]), np.float32)
        return cast(Array, np.clip(np.tanh(mean + np.exp(log_std) * noise), -MAX_ACTION, MAX_ACTION))

    def search(
        self,
        rules: Rules,
        root: Root,
        *,
        gamma: float,
        num_simulations: int,
        constants: SearchConstants,
        rng: np.random.Generator,
        gumbel: Array | None = None,
    ) -> SearchResult:
        """Search from the roots of the last `evaluate_root`, whose logits may be mixed with noise.

        A small perceptron runs inside the compiled search. Other models are called for one node of all trees at a time,
        on a CUDA device as captured graphs.
        """
        from rl_training.ops.search import CompiledNetwork, Evaluation

        discount = np.full(len(root.value), signed_discount(gamma, self.two_players), np.float32)
        evaluation = Evaluation(root.logits, root.value, np.zeros_like(root.value), discount)
        if self.two_players:  # outcomes of board games
            constants = constants._replace(low=-1.0, high=1.0)
        evaluate: Any
        if self.fusable:
            self._network = self._network or fused_network(cast(MuZeroModel, self.model))
            evaluate = CompiledNetwork(self._network, self.inference.roots.numpy())
        elif root.candidates is None:
            evaluate = self._discrete(discount)
        else:
            evaluate = self._sampled(root, discount, num_simulations, rng)
        known: dict[str, Any] = {"legal": root.legal, "gumbel": gumbel, "constants": constants}
        return self._search(rules, evaluate, evaluation, num_simulations=num_simulations, **known)

    def _discrete(self, discount: Array) -> Any:
        from rl_training.ops.search import Packed, PartialEvaluate

        inference = self.inference
        if isinstance(inference, GraphInference):
            return PartialEvaluate(
                inference.bounds, inference.ask, lambda part: Packed(inference.answer(part), discount)
            )

        def evaluate(node: int, parent: Array, action: Array) -> Packed:
            return Packed(inference.recurrent(node, parent, action), discount)

        return evaluate

    def _sampled(self, root: Root, discount: Array, num_simulations: int, rng: np.random.Generator) -> Any:
        from rl_training.ops.search import Evaluation

        assert root.candidates is not None
        batch, equal = len(root.value), np.zeros_like(root.logits)  # all draws of a node have the same prior
        candidates = np.empty((num_simulations + 1, *root.candidates.shape), np.float32)
        candidates[0], trees = root.candidates, np.arange(batch)

        def evaluate(node: int, parent: Array, edge: Array) -> Evaluation:
            prediction = self.inference.recurrent(node, parent, candidates[parent, trees, edge])
            candidates[node] = self._sample_candidates(prediction, rng)
            return Evaluation(equal, prediction[:, -2], prediction[:, -1], discount)

        return evaluate

    def plan(self, root: Root, result: SearchResult, edge: Array, policy: Array) -> Plan:
        """edge [B]: the chosen edges of the roots."""
        action = edge
        if root.candidates is not None:
            assert self.action_shape is not None
            action = root.candidates[np.arange(len(edge)), edge].reshape(-1, *self.action_shape)
        return Plan(action, policy, result.value, result.visits, root.candidates)


def signed_discount(gamma: float, two_players: bool) -> float:
    """The factor on the value of the next state: negative where players alternate."""
    return float(-gamma if two_players else gamma)


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

    def exportable(self) -> Exportable:
        prior = PriorActor(self.planner)
        network = ExportedPrior(self.model, self.spaces.action)
        return Exportable(network, {}, prior, lambda obs, _: prior.scores(obs), searches(self.hp))


class PriorActor:
    """Acts by the policy that a planner's searches begin with: the best action without a search."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        shape, scores = self.planner.action_shape, self.scores(obs)
        if shape is None:
            return Decision(best_legal_of(scores, obs), memory, {})
        action = np.clip(np.tanh(scores), -MAX_ACTION, MAX_ACTION)
        return Decision(action.reshape(-1, *shape), memory, {})

    def scores(self, obs: Observation, history: History | None = None) -> Array:
        """[B, A] logits, or [B, D] the means of continuous actions before tanh."""
        policy = self.planner.inference.initial(obs, 0, history)[:, :-2]
        return policy if self.planner.action_shape is None else np.split(policy, 2, 1)[0]


def best_legal_of(logits: Array, obs: Observation) -> Array:
    """[B] The legal actions with the largest of logits [B, A]."""
    legal = obs[MASK].astype(bool) if isinstance(obs, dict) and MASK in obs else np.ones_like(logits, bool)
    return cast(Array, np.where(legal, logits, -np.inf).argmax(-1))


def searches(hp: Any) -> str:
    simulations = search_arguments(hp, explore=False)["num_simulations"]
    return f"the search of {simulations} simulations: this is the policy prior of the network, which plays worse"


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
