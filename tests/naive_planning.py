"""What planning learns from, one sequence at a time: episodes kept as lists, targets in Python's own floats."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from torch import nn

from build import build, make_replay
from naive_replay import Ends, stream, vector
from rl_training import ALGORITHMS
from rl_training.acting.planning import Planner
from rl_training.data.replay import Replay
from rl_training.types import Array, Spaces, Step

NUM_ACTIONS = 3
PLAIN = Spaces(Box(-np.inf, np.inf, (2,), np.float32), Discrete(NUM_ACTIONS))
DUEL = Spaces(PLAIN.observation, PLAIN.action, num_players=2)
TORQUE = Spaces(PLAIN.observation, Box(-1, 1, (2,), np.float32))
BOARD = Spaces(
    Dict({"observation": Box(0, 1, (2, 2, 3), np.float32), "action_mask": MultiBinary(6)}), Discrete(6), num_players=2
)
SMALL: dict[str, Any] = {
    "latent_size": 6,
    "hidden_sizes": (9,),
    "value_limit": 4,
    "reward_limit": 3,
    "num_sampled_actions": 5,
    "batch_size": 16,
    "buffer_capacity": 100,
    "num_simulations": 5,
    "unroll_steps": 3,
    "gamma": 0.9,
    "reanalyse_ratio": 0.0,
}


def make(algo: str, spaces: Spaces = PLAIN, *, seed: int = 0, **changes: Any) -> Any:
    """A learner whose networks, the target's too, have opinions of their own."""
    torch.manual_seed(seed)
    hp = ALGORITHMS[algo].recipe.hyperparameters(**{**SMALL, **changes})
    learner = build(algo, spaces, hp, rng=np.random.default_rng(seed))
    for model in (learner.model, learner.target_model):
        stir(model)
    learner.actor.refresh()
    learner.target_planner.refresh()
    return learner


def new_replay(learner: Any, num_envs: int = 2) -> Replay:
    algo = next(name for name, entry in ALGORITHMS.items() if entry.recipe.learner is type(learner))
    return make_replay(algo, learner, learner.spaces, num_envs)


def restore(learner: Any, other: Any) -> None:
    """Give a learner and its actor the state of another one, as a checkpoint would."""
    learner.actor.load_state_dict(copy.deepcopy(other.actor.state_dict()))
    learner.load_state_dict(copy.deepcopy(other.state_dict()))


def stir(model: nn.Module, scale: float = 1.0) -> None:
    """Give weights and biases random parts, such that what a network says depends on what it sees."""
    with torch.no_grad():
        for parameter in model.parameters():
            size = 2 / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.2
            parameter.add_(scale * size * torch.randn_like(parameter))


def plan_anew(learner: Any, model: nn.Module, obs: Any) -> Array:
    """[B, A] the policy that a search of a model gives where nothing is explored."""
    planner = Planner(model, learner.spaces, num_candidates=learner.hp.num_sampled_actions)  # type: ignore[arg-type]
    numbers = {"temperature": 0.0, "num_simulations": learner.hp.num_simulations}
    rng = np.random.default_rng(0)
    policy: Array = learner.actor.plan_with(planner, obs, learner.hp, rng=rng, **numbers).policy
    return policy


def board(rng: np.random.Generator, number: int) -> dict[str, Array]:
    """A position of which some moves are legal; `number` is in none of it."""
    mask = rng.random(6) < 0.5
    mask[rng.integers(6)] = True
    return {"observation": rng.random((2, 2, 3), dtype=np.float32), "action_mask": mask.astype(np.int8)}


def steps(
    count: int, num_envs: int = 2, *, spaces: Spaces = PLAIN, ends: Ends | None = None, seed: int = 0
) -> Iterable[Step]:
    """Steps as a search would have made them; their actions are numbers that are theirs alone, from 1,000 on."""
    continuous, rng = isinstance(spaces.action, Box), np.random.default_rng(seed + 1)
    edges = SMALL["num_sampled_actions"] if continuous else int(spaces.action.n)
    make_obs = board if isinstance(spaces.observation, Dict) else vector
    for step in islice(stream(num_envs, seed=seed, make=make_obs, ends=ends, continuous=continuous), count):
        del step["logprob"]  # what a search does not give
        step["action"] = step["action"] + 1000
        step["policy"] = rng.dirichlet(np.ones(edges), num_envs).astype(np.float32)
        step["root_value"] = rng.standard_normal(num_envs, dtype=np.float32)
        if continuous:
            step["candidates"] = rng.uniform(-0.9, 0.9, (num_envs, edges, 2)).astype(np.float32)
        yield step


@dataclass
class Episode:
    env: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    terminated: bool = False
    closed: bool = False


class Diary:
    """The episodes of every environment, in lists, as a replay beside it should know them."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.episodes = replay, [[] for _ in range(replay.num_envs)]  # type: list[list[Episode]]
        self.where: dict[int, tuple[Episode, int]] = {}

    def play(self, played: Iterable[Step]) -> Diary:
        for step in played:
            self.add(step)
            self.replay.add(step)
        return self

    def add(self, step: Step) -> None:
        for i, episodes in enumerate(self.episodes):
            if not step.get("live", np.ones(len(self.episodes), bool))[i]:
                continue
            if step["first"][i] or not episodes:
                episodes.append(Episode(i))
            episode = episodes[-1]
            mine = {
                key: {k: x[i].copy() for k, x in value.items()} if isinstance(value, dict) else value[i].copy()
                for key, value in step.items()
            }
            self.where[name_of(mine["action"])] = (episode, len(episode.steps))
            episode.steps.append(mine)
            episode.terminated = bool(mine["terminated"])
            episode.closed = episode.terminated or bool(mine["truncated"])

    def at(self, index: Array) -> list[tuple[Episode, int]]:
        """The episodes, and the steps in them, that stand at places [B]."""
        return [self.where[name_of(action)] for action in self.replay.columns["action"][index]]

    def age(self, episode: Episode, t: int) -> int:
        """Rows since step t: one for each step, and one more for the end of each episode; times the environments."""
        later = self.episodes[episode.env]
        later = later[next(i for i, e in enumerate(later) if e is episode) + 1 :]
        rows = len(episode.steps) - t + sum(len(e.steps) for e in later)
        ends = sum(e.closed or e is not self.episodes[episode.env][-1] for e in (episode, *later))
        return (rows + ends) * len(self.episodes)


def name_of(action: Array) -> int:
    return int(np.reshape(action, -1)[0])


def naive_targets(
    episode: Episode,
    t: int,
    *,
    unroll: int,
    n: int,
    gamma: float,
    players: int,
    value: Callable[[dict], float],
    value_after: Callable[[dict], float],
) -> list[dict[str, Any]]:
    """What the steps t .. t + unroll of an episode teach; `step` is None beyond what is known of it.

    value: of the state that a step was taken in; value_after: of the observation that it led to.
    """
    known, sign = episode.steps, 1 if players == 1 else -1

    def worth(i: int, rewards: int) -> float:
        """Of the state before step i: so many rewards, and the value of the state after them."""
        if i == len(known):
            return 0.0 if episode.terminated else value_after(known[-1])
        if rewards == 0:
            return value(known[i])
        return float(known[i]["reward"]) + sign * gamma * worth(i + 1, rewards - 1)

    taught = []
    for i in range(t, t + unroll + 1):
        if i < len(known):
            taught.append({"step": known[i], "value": worth(i, n), "reward": float(known[i]["reward"])})
        else:
            over = episode.terminated  # absorbed: nothing is earned there, nothing is worth anything
            taught.append({"step": None, "value": 0.0 if over else None, "reward": 0.0 if over else None})
    return taught
