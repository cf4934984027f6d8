"""From observations to searched decisions: a model, a search, and the fastest way through both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium as gym
import numpy as np

from rl_training.models.fused import fused_network, is_fusable
from rl_training.models.inference import GraphInference, make_inference
from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.types import Array, History, Observation, Spaces

if TYPE_CHECKING:
    from rl_training.ops.search import Evaluation, Knobs, Rules, SearchResult
    from rl_training.ops.tree import Perceptrons, PrefixLSTM

MASK = "action_mask"  # the entry of a Dict observation that says which actions are legal
EDGE = 0.999  # of (-1, 1): what a tanh in float32 can still be brought back from


class Root(NamedTuple):
    """What the model says of B observations before any search."""

    logits: Array  # [B, A]
    value: Array  # [B]
    legal: Array | None  # [B, A] bool
    candidates: Array | None  # [B, A, D] the sampled actions that edges stand for, where actions are continuous


class Plan(NamedTuple):
    """What a search recommends for B observations."""

    action: Array  # [B] or [B, D]
    policy: Array  # [B, A] the target of the policy, whatever the temperature
    value: Array  # [B] of the root
    visits: Array  # [B, A]
    candidates: Array | None  # [B, A, D]


class Planner:
    """Searches with one model. Continuous actions are sampled: each node has `num_candidates` draws from its policy as
    edges, all with the same prior (Hubert et al., arXiv:2104.06303, with the policy as the proposal)."""

    def __init__(self, model: PlanningModel, spaces: Spaces, *, num_candidates: int) -> None:
        from rl_training.ops.search import Search  # numba takes longer to import than all the rest

        self.model = model
        self.inference = make_inference(model)
        self.fusable = is_fusable(model)
        self.action_shape = spaces.action.shape if isinstance(spaces.action, gym.spaces.Box) else None
        self.num_actions = model.policy_size if self.action_shape is None else num_candidates
        self._search = Search(self.num_actions)
        self._network: tuple[Perceptrons, PrefixLSTM | None] | None = None

    def refresh(self) -> None:
        """To be called when the model's weights have changed."""
        self._network = None

    def look(
        self, obs: Observation, *, num_simulations: int, rng: np.random.Generator, history: History | None = None
    ) -> Root:
        word = self.inference.initial(obs, num_simulations, history)
        legal = obs[MASK].astype(bool) if isinstance(obs, dict) and MASK in obs else None
        if self.action_shape is None:
            return Root(word[:, :-2], word[:, -2], legal, None)
        candidates = self._draw(word, rng)
        return Root(np.zeros((len(word), self.num_actions), np.float32), word[:, -2], None, candidates)

    def _draw(self, word: Array, rng: np.random.Generator) -> Array:
        """[B, A, D] actions of the policies that stand first in word [B, 2 D + 2]: tanh of Gaussians."""
        mean, log_std = np.split(word[:, None, :-2], 2, -1)
        noise = rng.standard_normal((len(word), self.num_actions, mean.shape[-1]), np.float32)
        action: Array = np.clip(np.tanh(mean + np.exp(log_std) * noise), -EDGE, EDGE)
        return action

    def search(
        self,
        rules: Rules,
        root: Root,
        *,
        discount: float,
        num_simulations: int,
        knobs: Knobs,
        rng: np.random.Generator,
        gumbel: Array | None = None,
    ) -> SearchResult:
        """Go on from what `look` has just given, with these rules; its logits may have been mixed with noise."""
        from rl_training.ops.search import Evaluation

        said = Evaluation(root.logits, root.value, np.zeros_like(root.value), discount)
        limits: dict[str, Any] = {"num_simulations": num_simulations, "legal": root.legal, "gumbel": gumbel}
        if self.fusable:
            states = self.inference.roots.numpy()
            network, lstm = self._weights()
            return self._search.fused(rules, network, states, said, lstm=lstm, discount=discount, knobs=knobs, **limits)
        discounts = np.full(len(root.value), discount, np.float32)
        evaluate = self._discrete(discounts) if root.candidates is None else self._sampled(root, discounts, limits, rng)
        return self._search(rules, evaluate, said, knobs=knobs, **limits)

    def _weights(self) -> tuple[Perceptrons, PrefixLSTM | None]:
        if self._network is None:
            self._network = fused_network(cast(MuZeroModel, self.model))
        return self._network

    def _discrete(self, discount: Array) -> Any:
        from rl_training.ops.search import Packed, Turns

        inference = self.inference
        if isinstance(inference, GraphInference):
            return Turns(inference.edges, inference.ask, lambda part: Packed(inference.answer(part), discount))

        def evaluate(node: int, parent: Array, action: Array) -> Packed:
            return Packed(inference.recurrent(node, parent, action), discount)

        return evaluate

    def _sampled(self, root: Root, discount: Array, limits: dict[str, Any], rng: np.random.Generator) -> Any:
        from rl_training.ops.search import Evaluation

        assert root.candidates is not None
        batch, alike = len(root.value), np.zeros_like(root.logits)  # a node's draws are all alike
        candidates = np.empty((limits["num_simulations"] + 1, *root.candidates.shape), np.float32)
        candidates[0], trees = root.candidates, np.arange(batch)

        def evaluate(node: int, parent: Array, edge: Array) -> Evaluation:
            word = self.inference.recurrent(node, parent, candidates[parent, trees, edge])
            candidates[node] = self._draw(word, rng)
            return Evaluation(alike, word[:, -2], word[:, -1], discount)

        return evaluate

    def plan(self, root: Root, result: SearchResult, edge: Array, policy: Array) -> Plan:
        action = edge
        if root.candidates is not None:
            assert self.action_shape is not None
            action = root.candidates[np.arange(len(edge)), edge].reshape(-1, *self.action_shape)
        return Plan(action, policy, result.value, result.visits, root.candidates)
