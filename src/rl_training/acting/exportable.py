"""Policies as functions of tensors alone, for files that other programs run: deterministic, with their memory as an
input and an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import gymnasium as gym
import torch
from torch import Tensor, nn

from rl_training.models.actor_critic import ActorCritic
from rl_training.models.muzero import PlanningModel
from rl_training.models.q_network import QNetwork
from rl_training.models.recurrent import RecurrentActorCritic, RecurrentCore
from rl_training.models.sac import SquashedGaussianPolicy
from rl_training.models.scalezero import TaskModel
from rl_training.types import Array, Fields, Memory, Observation, TensorTree

MASK = "action_mask"  # entry of a Dict observation: the legal actions
MAX_ACTION = 0.999  # of a planner's continuous actions: in float32, atanh of a larger action is inaccurate


class Choice(NamedTuple):
    """The decision of a network for B observations."""

    action: Tensor  # [B, ...] in model space
    scores: Tensor  # [B, ...] that it was chosen by: logits, Q-values, or means before they are squashed
    memory: dict[str, Tensor]  # for the next decision


class Exportable(NamedTuple):
    """What an actor gives to be exported.

    An algorithm is exported if its actor has a method `exportable() -> Exportable`.
    """

    network: nn.Module  # (observations as the actor gets them, memory) -> Choice
    memory: Fields  # the entries of the memory that the decision depends on; zeros where an episode begins
    actor: Any  # its `act` decides as the network does: the actor without randomness, or without its search
    scores: Callable[[Observation, Memory], Array]  # [B, ...] as in Choice, by the actor's own way through its network
    leaves_out: str = ""  # what the actor does beyond this


class ExportedActorCritic(nn.Module):
    def __init__(self, model: ActorCritic) -> None:
        super().__init__()
        self.model = model

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        output = self.model.policy_output(self.model.encoder(obs))
        return Choice(mode(self.model, output), output, {})


class ExportedRecurrent(nn.Module):
    """Without the critic's memory."""

    def __init__(self, model: RecurrentActorCritic) -> None:
        super().__init__()
        self.model, self.core = model, cast(RecurrentCore, model.cores["policy"])

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        latent, after = self.core.step(self.model.encoder(obs), memory["policy"])
        output = self.model.heads.policy_output(latent)
        return Choice(mode(self.model.heads, output), output, {"policy": after})


def mode(model: ActorCritic, output: Tensor) -> Tensor:
    action: Tensor = model.action_head.make(output, model.log_std).mode
    return action


class ExportedQNetwork(nn.Module):
    def __init__(self, model: QNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        q = self.model(obs)
        return Choice(q.argmax(-1), q, {})


class ExportedSquashedGaussian(nn.Module):
    def __init__(self, model: SquashedGaussianPolicy, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.shape = model, shape

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        policy = self.model(obs)
        return Choice(policy.mode.reshape(-1, *self.shape), policy.mean, {})


class ExportedPrior(nn.Module):
    """The policy that a planner's search begins with."""

    def __init__(self, model: PlanningModel, action: gym.Space) -> None:
        super().__init__()
        self.model = model
        self.shape = action.shape if isinstance(action, gym.spaces.Box) else None

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        policy, _ = self.model.predict(self.model.represent(obs))
        if self.shape is None:
            return Choice(best_legal(policy, obs), policy, {})
        mean = policy.chunk(2, 1)[0]
        return Choice(mean.tanh().clamp(-MAX_ACTION, MAX_ACTION).reshape(-1, *self.shape), mean, {})


def best_legal(logits: Tensor, obs: TensorTree) -> Tensor:
    """[B] The legal actions with the largest of logits [B, A]."""
    if isinstance(obs, dict) and MASK in obs:
        logits = logits.masked_fill(obs[MASK] == 0, -torch.inf)
    return logits.argmax(-1)


class ExportedTask(nn.Module):
    """The prior of ScaleZero in one task. Its memory is the history: see data/history.py."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        history = None
        if memory:
            parts = {key.removeprefix("obs."): x for key, x in memory.items() if key.startswith("obs.")}
            history = {"obs": parts or memory["obs"], "action": memory["action"], "length": memory["length"]}
        policy, _ = self.model.predict(self.model.recall(obs, history))
        action = best_legal(policy, obs)
        if not memory:
            return Choice(action, policy, {})
        newest = {f"obs.{key}": x for key, x in obs.items()} if isinstance(obs, dict) else {"obs": obs}
        newest["action"] = action
        after = {key: torch.cat([memory[key][:, 1:], x.unsqueeze(1)], 1) for key, x in newest.items()}
        steps = memory["action"].shape[1]
        return Choice(action, policy, {**after, "length": (memory["length"] + 1).clamp(max=steps)})
