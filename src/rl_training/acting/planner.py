"""Searches with a model, on the fastest path for that model: see `Planner.search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium as gym
import numpy as np

from rl_training.acting.fused import fused_network
from rl_training.acting.inference import GraphInference
from rl_training.acting.paths import make_inference, runs_inside_search
from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.types import Array, History, Observation, Spaces

if TYPE_CHECKING:
    from rl_training.ops.search import Evaluation, Rules, SearchResult
    from rl_training.ops.tree import Perceptrons, PrefixLSTM, SearchConstants

MASK = "action_mask"  # entry of a Dict observation: the legal actions
MAX_ACTION = 0.999  # in float32, atanh of a larger action is inaccurate


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
        from rl_training.ops.search import Evaluation

        discount = np.full(len(root.value), signed_discount(gamma, self.two_players), np.float32)
        evaluation = Evaluation(root.logits, root.value, np.zeros_like(root.value), discount)
        if self.two_players:  # outcomes of board games
            constants = constants._replace(low=-1.0, high=1.0)
        options: dict[str, Any] = {"num_simulations": num_simulations, "legal": root.legal, "gumbel": gumbel}
        if self.fusable:
            self._network = self._network or fused_network(cast(MuZeroModel, self.model))
            states = self.inference.roots.numpy()
            return self._search.fused(rules, self._network, states, evaluation, constants=constants, **options)
        discrete = root.candidates is None
        evaluate = self._discrete(discount) if discrete else self._sampled(root, discount, num_simulations, rng)
        return self._search(rules, evaluate, evaluation, constants=constants, **options)

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
