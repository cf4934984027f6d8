"""The base of on-policy algorithms: hyperparameters, the batch with advantages, terms of the loss."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.base import Learner, scalar, setting
from rl_training.algorithms.optim import Adam, MeanMetrics, Optimizer
from rl_training.data.batch import to_device
from rl_training.data.fields import COUNT, NUMBER, step_fields
from rl_training.data.rollout import Rollout
from rl_training.models.parameters import FlatParameters
from rl_training.ops.distributions import Distribution
from rl_training.ops.returns import gae
from rl_training.types import Batch, Fields, Metrics, Spaces


@dataclass(frozen=True)
class OnPolicyHyperparameters:
    num_steps: int = setting(128, "rollout length: env steps collected in each environment before an update", low=1)
    hidden_sizes: tuple[int, ...] = setting((64, 64), "hidden layer sizes; unused for a single image")
    activation: Literal["tanh", "relu", "elu", "silu"] = setting("tanh", "activation function of the hidden layers")
    log_std_init: float = setting(0.0, "initial log standard deviation of continuous actions")
    deterministic_eval: bool = setting(
        True, "evaluate the most likely action; False: sample (usual for Atari)", atari=False
    )
    learning_rate: float = scalar(3e-4, "learning rate of the optimizer")
    gamma: float = scalar(0.99, "discount factor", high=1.0)
    gae_lambda: float = scalar(0.95, "GAE lambda; 0: one-step TD advantage, 1: Monte Carlo advantage", high=1.0)
    ent_coef: float = scalar(0.0, "entropy bonus coefficient", atari=0.01)


@dataclass(frozen=True)
class ActorCriticHyperparameters(OnPolicyHyperparameters):
    """Of algorithms that have one loss for policy and value function."""

    vf_coef: float = scalar(0.5, "value loss coefficient; the value loss is the mean squared error")
    max_grad_norm: float | None = scalar(0.5, "gradient clipping norm; None: no clipping")


def actor_critic_fields(spaces: Spaces, hp: OnPolicyHyperparameters) -> Fields:
    """A step also holds the log-probability of its action and the value of its state, at the time of acting."""
    return step_fields(spaces, {"logprob": NUMBER, "value": NUMBER})


def versioned_fields(spaces: Spaces, hp: OnPolicyHyperparameters) -> Fields:
    """A step also holds the version of the weights that chose its action: see `VersionedActor`."""
    return actor_critic_fields(spaces, hp) | {"version": COUNT}


class ActorCriticLearner(Learner):
    actor: ActorCriticActor

    def __init__(self, actor: ActorCriticActor, hp: OnPolicyHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.model = actor.model
        self.optimizers = self.make_optimizers(actor.parameters)

    def make_optimizers(self, parameters: FlatParameters) -> dict[str, Optimizer]:
        return {"model": Adam(parameters)}

    @abstractmethod
    def update(self, rollout: Rollout) -> Metrics:
        """Learn from one rollout [T, N, ...]."""

    def learning_batch(self, rollout: Rollout, metrics: MeanMetrics) -> Batch:
        """The rollout [T, N, ...] on the device, with `advantage` and value `target`."""
        data = to_device(rollout.batch, self.device)
        advantage = self.advantages(rollout, data)
        target = advantage + data["value"]
        metrics.add(explained_variance=explained_variance(data["value"], target))
        return {**data, "advantage": advantage, "target": target}

    def advantages(self, rollout: Rollout, data: Batch) -> Tensor:
        """[T, N] The advantages of the actions. `data` is the rollout on the device."""
        _, _, after = rollout.ends()
        end_value = self.end_values(after) if after else data["value"].new_empty(0)
        return gae(
            data["reward"],
            data["value"],
            rollout.next_value(data["value"], end_value),
            data["terminated"],
            data["truncated"],
            gamma=self.hp.gamma,
            gae_lambda=self.hp.gae_lambda,
        )

    @torch.no_grad()
    def end_values(self, after: Batch) -> Tensor:
        """[M] The values of what followed the ends of a rollout: see `Rollout.ends`."""
        return self.model.value(to_device(after["obs"], self.device))


def policy_lag(version: int, acted: Tensor) -> dict[str, Tensor]:
    """How many updates the policies that acted are behind `version`; acted [T, N]: their versions."""
    lag = (version - acted).float()
    return {"policy_lag_mean": lag.mean(), "policy_lag_max": lag.max()}


def mean_entropy(policy: Distribution, ent_coef: float) -> Tensor:
    with torch.set_grad_enabled(ent_coef != 0):  # with a coefficient of 0 it is only a metric
        return cast(Tensor, policy.entropy().mean())


def total_loss(policy_loss: Tensor, value_loss: Tensor, entropy: Tensor, hp: ActorCriticHyperparameters) -> Tensor:
    loss = policy_loss + hp.vf_coef * value_loss
    return loss - hp.ent_coef * entropy if hp.ent_coef else loss


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """1 - Var[target - value] / Var[target]: 1 is perfect, 0 as good as a constant."""
    variance = target.var(correction=0)
    return torch.where(variance > 0, 1.0 - (target - value).var(correction=0) / variance, 0.0)
