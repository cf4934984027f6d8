"""Advantage actor-critic: one gradient step per rollout (Mnih et al., arXiv:1602.01783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from rl_training.algorithms.actor_critic import ActorCriticHyperparameters, ActorCriticLearner, mean_entropy, total_loss
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, MeanMetrics, Optimizer, RMSprop, gradient_step
from rl_training.data.batch import flatten
from rl_training.data.rollout import Rollout
from rl_training.models.parameters import FlatParameters
from rl_training.types import Metrics


@dataclass(frozen=True)
class A2CHyperparameters(ActorCriticHyperparameters):
    num_steps: int = setting(5, "rollout length: env steps collected in each environment before an update", low=1)
    learning_rate: float = scalar(2e-3, "learning rate of the optimizer", atari=7e-4)
    vf_coef: float = scalar(0.5, "value loss coefficient; the value loss is the mean squared error", atari=0.25)
    gae_lambda: float = scalar(
        0.95, "GAE lambda; 0: one-step TD advantage, 1: Monte Carlo advantage", high=1.0, atari=1.0
    )
    optimizer: Literal["rmsprop", "rmsprop_tf", "adam"] = setting(
        "rmsprop", "rmsprop_tf: TensorFlow's variant", atari="rmsprop_tf"
    )
    rmsprop_alpha: float = setting(0.99, "RMSprop alpha: decay rate of the mean square", low=0.0, high=1.0)
    rmsprop_eps: float = setting(1e-5, "RMSprop epsilon, for numerical stability", low=0.0)


class A2C(ActorCriticLearner):
    Hyperparameters = A2CHyperparameters
    hp: A2CHyperparameters

    def make_optimizers(self, parameters: FlatParameters) -> dict[str, Optimizer]:
        hp = self.hp
        if hp.optimizer == "adam":
            return {"model": Adam(parameters)}
        tf_style = hp.optimizer == "rmsprop_tf"
        return {"model": RMSprop(parameters, alpha=hp.rmsprop_alpha, eps=hp.rmsprop_eps, tf_style=tf_style)}

    def update(self, rollout: Rollout) -> Metrics:
        hp, metrics = self.hp, MeanMetrics()
        batch = flatten(self.learning_batch(rollout, metrics))
        policy, value = self.model(batch["obs"])
        policy_loss = -(policy.log_prob(batch["action"]) * batch["advantage"]).mean()
        value_loss = F.mse_loss(value, batch["target"])
        entropy = mean_entropy(policy, hp.ent_coef)
        loss = total_loss(policy_loss, value_loss, entropy, hp)
        norm = gradient_step(self.optimizers["model"], loss, lr=hp.learning_rate, max_grad_norm=hp.max_grad_norm)
        metrics.add(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, grad_norm=norm)
        self.gradient_steps += 1
        self.actor.version += 1
        return metrics.mean()
