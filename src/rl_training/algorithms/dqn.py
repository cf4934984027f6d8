"""Deep Q-learning (Mnih et al., 2015), optionally with double Q-learning (arXiv:1509.06461), dueling networks
(1511.06581), prioritized replay (1511.05952) and n-step returns."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.actor import EpsilonGreedyActor
from rl_training.acting.paths import make_q_gradient
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, backward, clipped_step
from rl_training.algorithms.replay_based import CAPACITY, ReplayHyperparameters, TargetNetworkLearner, annealing
from rl_training.data.replay import Replay
from rl_training.models.parameters import FlatParameters
from rl_training.types import Batch


def exploration(exploration_fraction: float = 0.2, final_epsilon: float = 0.05) -> dict[str, Any]:
    """Linear decay of epsilon over the first part of training."""
    if exploration_fraction == 0:
        return {"kind": "constant", "start": final_epsilon}
    duration = f"{100 * exploration_fraction:g}%"
    return {"kind": "linear", "start": 1.0, "end": final_epsilon, "duration": duration}


@dataclass(frozen=True)
class DQNHyperparameters(ReplayHyperparameters):
    hidden_sizes: tuple[int, ...] = setting((64, 64), "hidden layer sizes; unused for a single image", low=1)
    buffer_capacity: int = setting(100_000, CAPACITY, low=1)
    batch_size: int = setting(128, "batch size: transitions per gradient step", low=1, atari=32)
    learning_starts: int = setting(1_000, "env steps with uniformly random actions before learning starts", low=0)
    double: bool = setting(True, "double DQN: the online network selects, the target network evaluates", atari=False)
    dueling: bool = setting(False, "dueling network: separate value and advantage streams")
    prioritized: bool = setting(False, "prioritized experience replay (PER): sample transitions by their last TD error")
    exploration_fraction: float = setting(
        0.2, "fraction of training in which epsilon decays", low=0.0, high=1.0, atari=0.1
    )
    final_epsilon: float = setting(0.05, "final value of epsilon", low=0.0, high=1.0)
    eval_epsilon: float = setting(
        0.0, "probability of a random action in evaluation; greedy Atari agents may get stuck", low=0.0, high=1.0
    )
    learning_rate: float = scalar(1e-3, "learning rate of the optimizer", atari=1e-4)
    tau: float = scalar(1.0, "soft update (Polyak) coefficient of the target network; 1: copy the weights", high=1.0)
    utd_ratio: float = scalar(
        0.5, "update-to-data ratio: gradient steps per env step, counted over all environments", atari=0.25
    )
    train_frequency: int = scalar(4, "env steps between updates of utd_ratio * train_frequency gradient steps", low=1)
    target_update_interval: int = scalar(250, "env steps between target network updates", low=1, atari=10_000)
    epsilon: float = scalar(1.0, "probability of a random action (epsilon-greedy)", high=1.0, schedule=exploration)
    priority_exponent: float = scalar(0.6, "PER alpha; 0: uniform sampling", high=1.0, needs=("prioritized", True))
    n_step: int = scalar(3, "n-step returns: rewards summed before bootstrapping", low=1, atari=1)
    beta: float = scalar(
        0.4, "PER beta (importance sampling); 1: unbiased", high=1.0, schedule=annealing, needs=("prioritized", True)
    )
    max_grad_norm: float | None = scalar(10.0, "gradient clipping norm; None: no clipping")


class DQN(TargetNetworkLearner):
    Hyperparameters = DQNHyperparameters
    hp: DQNHyperparameters
    actor: EpsilonGreedyActor

    def __init__(self, actor: EpsilonGreedyActor, hp: DQNHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.prioritized = hp.prioritized
        self.model, self.target_model = actor.model, deepcopy(actor.model)
        self.optimizers = {"model": Adam(actor.parameters, eps=1e-8)}
        self.target = FlatParameters(self.target_model.parameters())
        self.target_model.requires_grad_(False)
        self.numpy_gradient = make_q_gradient(self.model, self.target_model, batch_size=hp.batch_size)

    def move_target(self) -> None:
        self.target.vector.lerp_(self.optimizers["model"].parameters.vector, self.hp.tau)

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        hp = self.hp
        priorities = {"beta": hp.beta, "exponent": hp.priority_exponent} if hp.prioritized else {}
        batch = self.sample(replay, n_step=hp.n_step, **priorities)
        report, error = self.update(batch)
        if self.hp.prioritized:
            self.set_priorities(replay, batch["index"].numpy(), error)
        return report

    def update(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step. Returns (metrics, errors Q - target [B])."""
        if self.numpy_gradient is None:
            loss, q, error = self.gradient(batch)
        else:
            loss, q, error = self.numpy_gradient(batch, double=self.hp.double)
        norm = clipped_step(self.optimizers["model"], lr=self.hp.learning_rate, max_grad_norm=self.hp.max_grad_norm)
        return {"loss": loss, "q_value": q.mean(), "grad_norm": norm}, error

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Write the gradient of the loss. Returns (loss, Q [B], Q - target [B])."""
        target = self.targets(batch)
        q = self.model(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = huber(q, target, batch.get("weight"))
        backward(self.optimizers["model"], loss)
        return loss.detach(), q.detach(), q.detach() - target

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """[B] reward + discount * max_a Q'(next_obs, a); double: Q' of the best action by Q."""
        next_q = self.target_model(batch["next_obs"])
        if self.hp.double:
            best = self.model(batch["next_obs"]).argmax(1, keepdim=True)
            value = next_q.gather(1, best).squeeze(1)
        else:
            value = next_q.amax(1)
        return cast(Tensor, batch["reward"] + batch["discount"] * value)


def huber(q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """The mean Huber loss, weighted by `weight` [B]."""
    if weight is None:
        return F.smooth_l1_loss(q, target)
    return (weight * F.smooth_l1_loss(q, target, reduction="none")).mean()
