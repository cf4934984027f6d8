"""The base of algorithms that plan with a learned model: gradient steps on unrolled sequences, with a target network
(MuZero, Schrittwieser et al., arXiv:1911.08265; the losses: appendix G; Reanalyse, arXiv:2104.06294)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.paths import make_gradient
from rl_training.acting.planning import Plan, PlanningActor, search_arguments
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, backward, clipped_step, soft_update
from rl_training.algorithms.planning_targets import sequence_targets
from rl_training.algorithms.replay_based import CAPACITY, ReplayHyperparameters, TargetNetworkLearner
from rl_training.data.batch import to_tensors, tree_map
from rl_training.data.replay import Replay
from rl_training.models.muzero import PlanningModel
from rl_training.types import Array, Batch, State


def decaying() -> dict[str, Any]:
    """A constant rate of 2e-3 is too high for the end of training."""
    return {"kind": "linear", "start": 2e-3, "end": 1e-4}


@dataclass(frozen=True)
class SearchHyperparameters(ReplayHyperparameters):
    """Hyperparameters of all algorithms that plan."""

    hidden_sizes: tuple[int, ...] = setting((128,), "hidden layer sizes of each network; unused by towers", low=1)
    value_limit: int = setting(30, "value support is -limit .. limit after h(x); 0: a scalar in [-1, 1]", low=0)
    reward_limit: int = setting(30, "reward support is -limit .. limit after h(x); 0: a scalar in [-1, 1]", low=0)
    buffer_capacity: int = setting(100_000, CAPACITY, low=1)
    batch_size: int = setting(128, "batch size: sequences per gradient step", low=1)
    learning_starts: int = setting(1_000, "env steps collected, with search, before learning starts", low=0)
    bootstrap: Literal["target", "search"] = setting(
        "target", "value that targets bootstrap from: the target network's, or the one the search found at that step"
    )
    unroll_steps: int = setting(5, "steps the model is unrolled for in training", low=1)
    eval_num_simulations: int | None = setting(None, "simulations in evaluation; None: num_simulations", low=1)
    eval_temperature: float = setting(0.0, "temperature in evaluation; 0: always the best action", low=0.0)
    learning_rate: float = scalar(1e-3, "learning rate of the optimizer")
    weight_decay: float = scalar(1e-4, "decoupled weight decay (AdamW)")
    max_grad_norm: float | None = scalar(5.0, "gradient clipping norm; None: no clipping")
    gamma: float = scalar(0.997, "discount factor", high=1.0)
    num_simulations: int = scalar(50, "MCTS simulations per search", low=1)
    n_step: int = scalar(10, "n-step value targets: rewards summed before bootstrapping", low=1)
    reanalyse_ratio: float = scalar(
        0.0, "reanalyse: share of sequences whose policy targets are searched again with the target network", high=1.0
    )
    priority_exponent: float = scalar(1.0, "PER alpha; 0: uniform sampling", high=1.0)
    beta: float = scalar(1.0, "PER beta (importance sampling); 1: unbiased", high=1.0)
    policy_coef: float = scalar(1.0, "policy loss coefficient")
    value_coef: float = scalar(1.0, "value loss coefficient")
    reward_coef: float = scalar(1.0, "reward loss coefficient")


@dataclass(frozen=True)
class PlanningHyperparameters(SearchHyperparameters):
    """Hyperparameters of algorithms that unroll a recurrent model."""

    learning_rate: float = scalar(2e-3, "learning rate of the optimizer", schedule=decaying, atari=1e-3)
    priority_exponent: float = scalar(0.0, "PER alpha; 0: uniform sampling", high=1.0, atari=1.0)
    latent_size: int = setting(64, "size of the latent state; unused by towers", low=1)
    network: Literal["auto", "mlp", "conv"] = setting("auto", "auto: conv (residual towers) for images, else mlp")
    channels: int = setting(64, "channels of the residual towers", low=2)
    blocks: int = setting(1, "residual blocks of each tower", low=1)
    stem: Literal["residual", "strided"] = setting(
        "residual", "downsampling of images: residual blocks (as in EfficientZero) or strided convolutions (faster)"
    )
    num_sampled_actions: int = setting(20, "continuous actions: actions sampled at each node of the search", low=2)
    tau: float = scalar(1.0, "soft update (Polyak) coefficient of the target network; 1: copy the weights", high=1.0)
    utd_ratio: float = scalar(
        1.0, "update-to-data ratio: gradient steps per env step, counted over all environments", atari=0.25
    )
    target_update_interval: int = scalar(400, "env steps between target network updates", low=1)
    unroll_coef: float = scalar(5.0, "loss coefficient of all unrolled steps together; the first step's is 1")
    hidden_gradient_scale: float = scalar(
        1.0, "factor on the gradient of the latent state at each unrolled step (MuZero: 0.5)", high=1.0, atari=0.5
    )


class PlanningLearner(TargetNetworkLearner):
    """Trains a model unrolled along stored actions. The targets come from searches and a target network."""

    actor: PlanningActor
    prioritized = True

    def __init__(self, actor: PlanningActor, hp: Any, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.model, self.spaces = actor.model, actor.spaces
        self.target_model = deepcopy(self.model).requires_grad_(False)
        self.target_planner = actor.planner_of(self.target_model)
        self.optimizers = {"model": Adam(actor.parameters, eps=1e-8)}
        self.fast_gradient = make_gradient(self.gradient, self.device, self.constants_of_gradient)

    def move_target(self) -> None:
        soft_update(self.target_model, self.model, self.hp.tau)
        self.target_planner.refresh()

    def take_steps(self, replay: Replay, count: int) -> Iterator[dict[str, Tensor]]:
        """On a GPU the targets of all steps are computed together: many observations take hardly longer than few."""
        at_once = max(count, 1) if self.device.type == "cuda" else 1
        for _ in range(0, count, at_once):
            yield from self.steps_at_once(replay, at_once)

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        return self.steps_at_once(replay, 1)[0]

    def steps_at_once(self, replay: Replay, count: int) -> list[dict[str, Tensor]]:
        """Take gradient steps on batches that are sampled, with their targets, together."""
        hp, reports, errors = self.hp, [], []
        drawn = [
            replay.draw(hp.batch_size, self.rng, beta=hp.beta, exponent=hp.priority_exponent) for _ in range(count)
        ]
        index = np.concatenate([places for places, _ in drawn])
        weight = np.concatenate([weights for _, weights in drawn if weights is not None])
        batches = self.augment(to_tensors(self.targets(replay, index) | {"weight": weight}, self.device))
        for number in range(count):
            report, error = self.update(chunk(batches, number, count))
            reports.append(report)
            errors.append(error)
        self.set_priorities(replay, index, torch.cat(errors))
        self.actor.refresh()
        return reports

    def augment(self, batch: Batch) -> Batch:
        """The batch with augmented observations. The targets are those of the original observations."""
        return batch

    def targets(self, replay: Replay, index: Array) -> dict[str, Any]:
        """The batch of sequences that begin at places [B]: see `sequence_targets`."""
        targets, _ = sequence_targets(
            replay,
            index,
            self.hp,
            n=self.steps_to_bootstrap(replay, index),
            spaces=self.spaces,
            values_at=lambda place: self.target_planner.values(replay.observations(place)),
            plan_at=lambda place: self.reanalyse(replay, place),
            rng=self.rng,
        )
        return targets | {"obs": replay.observations(index)}

    def steps_to_bootstrap(self, replay: Replay, index: Array) -> int | Array:
        """n of the n-step targets: one number, or [B]."""
        return int(self.hp.n_step)

    def reanalyse(self, replay: Replay, place: Array) -> Plan:
        """Search from the observations at places [M] with the target network and, as in EfficientZero's code, noise."""
        arguments = search_arguments(self.hp, explore=True)
        return self.actor.plan_with(self.target_planner, replay.observations(place), self.hp, rng=self.rng, **arguments)

    def update(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step. Returns (metrics, V - target [B] of the first steps)."""
        hp, optimizer = self.hp, self.optimizers["model"]
        report = self.fast_gradient(batch)
        # Decoupled (AdamW): Adam would divide a decay in the gradient by the size of the gradients, and hold weights
        # with small gradients, such as those of the actions, at zero.
        optimizer.parameters.vector.mul_(1 - hp.learning_rate * hp.weight_decay)
        norm = clipped_step(optimizer, lr=hp.learning_rate, max_grad_norm=hp.max_grad_norm)
        error = report.pop("error")
        return report | {"grad_norm": norm, "value": batch["value"][:, 0].mean()}, error

    def constants_of_gradient(self) -> tuple[float, ...]:
        """All scalars that `gradient` reads."""
        return (self.hp.unroll_coef, self.hp.hidden_gradient_scale, *self.coefficients().values())

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """Write the gradient of the loss. Returns metrics, and V - target [B] as `error`."""
        self.model.train()
        losses, error = self.losses(batch)
        self.model.eval()
        total = sum(self.coefficients()[name] * value for name, value in losses.items())
        loss = (batch["weight"] * total).mean()
        backward(self.optimizers["model"], loss)
        each = {f"{name}_loss": value.detach().mean() for name, value in losses.items()}
        return {"loss": loss.detach(), **each, "error": error}

    def coefficients(self) -> dict[str, float]:
        return {"policy": self.hp.policy_coef, "value": self.hp.value_coef, "reward": self.hp.reward_coef}

    def losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """(losses [B] by name, V - target [B] of the first steps)."""
        weight = step_weights(self.hp.unroll_steps, self.hp.unroll_coef, self.device)
        losses, error, _ = unrolled_losses(
            self.model, batch, weight, batch["reward"], gradient_scale=self.hp.hidden_gradient_scale
        )
        return losses, error

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.target_planner.refresh()


def chunk(batches: Batch, number: int, count: int) -> Batch:
    """Batch `number` of `count` equal, consecutive batches."""
    return {key: tree_map(lambda x: x.chunk(count)[number], value) for key, value in batches.items()}


def unrolled_losses(
    model: PlanningModel, batch: Batch, weight: Tensor, reward_target: Tensor, *, gradient_scale: float
) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """(losses of policy, value and reward, each [B]; V - target [B] of the first steps; K + 1 states [B, S]).

    weight [K + 1] of the steps; reward_target [B, K].
    """
    states, rewards = model.unroll(model.represent(batch["obs"]), batch["action"], gradient_scale=gradient_scale)
    outputs = model.predict(torch.cat(states))
    policy, value = (x.view(len(states), -1, x.shape[1]).transpose(0, 1) for x in outputs)  # [B, K + 1, ...]
    value_loss = model.value_support.loss(value, batch["value"])
    reward_loss = model.reward_support.loss(rewards, reward_target)
    losses = {
        "policy": (weight * batch["policy_mask"] * policy_loss(policy, batch)).sum(1),
        "value": (weight * batch["value_mask"] * value_loss).sum(1),
        "reward": (weight[1:] * batch["reward_mask"] * reward_loss).sum(1),
    }
    error = model.value_support.to_scalar(value[:, 0].detach()) - batch["value"][:, 0]
    return losses, error, states


def step_weights(unroll_steps: int, unroll_coef: float, device: torch.device) -> Tensor:
    """[K + 1] 1 for the first step, unroll_coef / K for each of the K unrolled ones."""
    weight = torch.full((unroll_steps + 1,), unroll_coef / unroll_steps, device=device)
    weight[:1].fill_(1.0)  # weight[0] = 1 would copy from the host, which a CUDA graph cannot
    return weight


def policy_loss(policy: Tensor, batch: Batch) -> Tensor:
    """[B, K + 1] The cross-entropy of policies [B, K + 1, P] and those of the searches."""
    target: Tensor = batch["policy"]
    if "candidates" in batch:
        return -(target * squashed_log_prob(policy, batch["candidates"])).sum(-1)
    return -(target * F.log_softmax(policy, -1)).sum(-1)


def squashed_log_prob(policy: Tensor, action: Tensor) -> Tensor:
    """[..., A] Log-density of actions [..., A, D] = tanh(u), u ~ Normal(mean, std), in policies [..., 2 D]."""
    mean, log_std = policy.unsqueeze(-2).chunk(2, -1)
    u = torch.atanh(action)
    density = -0.5 * ((u - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
    return (density - torch.log1p(-action.square())).sum(-1)
