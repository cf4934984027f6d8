"""IMPALA: an actor-critic that corrects for actions of older policies by V-trace (Espeholt et al., arXiv:1802.01561).

Where this leaves the paper: losses are means over steps, not sums, so the published clipping norm, of 40 for sums over
20 steps of 32 environments, is 40 / 640 here, and the value loss has no factor 1/2, so vf_coef is half the published
one. RMSprop's epsilon is small in the same way. The learning rate needs no change: RMSprop divides by the gradient's
size. A truncated episode is bootstrapped; the published code takes it for a terminated one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.actor import NetworkActor, VersionedActor
from rl_training.acting.recurrent import VersionedRecurrentActor
from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.algorithms.actor_critic import explained_variance, mean_entropy, policy_lag, total_loss
from rl_training.algorithms.base import inherited, scalar, setting
from rl_training.algorithms.optim import MeanMetrics, gradient_step
from rl_training.algorithms.recurrent_ppo import (
    RecurrentPPOHyperparameters,
    remembered_values,
    sequences,
    start_memory,
)
from rl_training.data.batch import env_minibatches, flatten, to_device
from rl_training.data.rollout import Rollout
from rl_training.models.recurrent import RecurrentActorCritic
from rl_training.ops.distributions import Distribution
from rl_training.ops.vtrace import importance_weight, vtrace
from rl_training.types import Batch, Metrics, Spaces, TensorTree

LEARNED = ("obs", "action", "logprob", "reward", "terminated", "truncated")  # the stored entries of a minibatch


@dataclass(frozen=True)
class IMPALAHyperparameters(A2CHyperparameters):
    num_steps: int = setting(20, "rollout length: env steps collected in each environment before an update", low=1)
    learning_rate: float = scalar(6e-4, "learning rate of the optimizer")
    gae_lambda: float = scalar(
        1.0, "lambda of V-trace (on-policy: GAE lambda); 0: one step, 1: n steps, as in the paper", high=1.0
    )
    ent_coef: float = scalar(0.01, "entropy bonus coefficient")
    vf_coef: float = scalar(0.25, "value loss coefficient; the value loss is the mean squared error")
    max_grad_norm: float | None = scalar(0.0625, "gradient clipping norm of the mean loss; None: no clipping")
    optimizer: Literal["rmsprop", "rmsprop_tf", "adam"] = setting("rmsprop", "rmsprop_tf: TensorFlow's variant")
    num_minibatches: int = scalar(1, "minibatches (gradient steps) per update: groups of whole environments", low=1)
    correction: bool = setting(True, "V-trace; False: take all actions for those of the current policy (ratio 1)")
    rho_bar: float = scalar(1.0, "V-trace clip of the ratio in a TD error", needs=("correction", True))
    c_bar: float = scalar(
        1.0, "V-trace clip of the ratio that a trace is multiplied by; at most rho_bar", needs=("correction", True)
    )
    pg_rho_bar: float = scalar(1.0, "V-trace clip of the ratio in the policy gradient", needs=("correction", True))
    recurrent: bool = setting(False, "a recurrent cell between the encoder and the heads, as in the paper's LSTM")
    cell: Literal["lstm", "gru"] = inherited(RecurrentPPOHyperparameters, "cell", needs=("recurrent", True))
    recurrent_size: int = inherited(RecurrentPPOHyperparameters, "recurrent_size", needs=("recurrent", True))
    critic_memory: Literal["separate", "shared", "none"] = setting(
        "shared",
        "separate: a recurrent cell for the critic; shared: the policy's, trained by both; none: no memory",
        needs=("recurrent", True),
    )


class IMPALA(A2C):
    Hyperparameters = IMPALAHyperparameters
    hp: IMPALAHyperparameters

    def update(self, rollout: Rollout) -> Metrics:
        """One gradient step on all environments, or one for each group of them."""
        hp, metrics = self.hp, MeanMetrics()
        data = to_device(rollout.batch, self.device)
        metrics.add(**policy_lag(self.actor.version, data["version"]))
        batch = self.learned(rollout, data) | self.bootstraps(rollout)
        for minibatch in env_minibatches(batch, int(hp.num_minibatches), self.rng):
            loss = self.loss(minibatch, metrics)
            norm = gradient_step(self.optimizers["model"], loss, lr=hp.learning_rate, max_grad_norm=hp.max_grad_norm)
            metrics.add(grad_norm=norm)
            self.gradient_steps += 1
        self.actor.version += 1
        return metrics.mean()

    def learned(self, rollout: Rollout, data: Batch) -> Batch:
        """What minibatches consist of beside bootstraps. `data` is the rollout on the device."""
        return {key: data[key] for key in LEARNED}

    def bootstraps(self, rollout: Rollout) -> Batch:
        """[T, N] Where a bootstrap is not the value of the next row, and its value before the update."""
        _, _, after = rollout.ends()
        none = torch.zeros(rollout.num_steps, rollout.num_envs, device=self.device)
        end_value = self.end_values(after) if after else none.new_empty(0)
        return {
            "end_value": rollout.next_value(none, end_value),
            "at_end": rollout.next_value(none, torch.ones_like(end_value)) > 0,
        }

    def loss(self, batch: Batch, metrics: MeanMetrics) -> Tensor:
        """Of a minibatch [T, M]: policies and values are those of the current weights."""
        hp, flat = self.hp, flatten({key: batch[key] for key in ("obs", "action")})
        policy, flat_value = self.predict(flat["obs"], batch)
        shape = batch["reward"].shape
        log_prob, value = policy.log_prob(flat["action"]).view(shape), flat_value.view(shape)
        log_ratio = log_prob.detach() - batch["logprob"]
        target, advantage = self.corrected(batch, value.detach(), log_ratio)

        policy_loss = -(log_prob * advantage).mean()
        value_loss = F.mse_loss(value, target)
        entropy = mean_entropy(policy, hp.ent_coef)
        metrics.add(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        metrics.add(ratio_mean=log_ratio.exp().mean(), explained_variance=explained_variance(value.detach(), target))
        return total_loss(policy_loss, value_loss, entropy, hp)

    def predict(self, obs: TensorTree, batch: Batch) -> tuple[Distribution, Tensor]:
        """(policies, values [T * M]) of the observations [T * M, ...] of a minibatch."""
        return cast(tuple[Distribution, Tensor], self.model(obs))

    def corrected(self, batch: Batch, value: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """(targets of the values, weights of the log-probabilities in the policy gradient), [T, M]."""
        hp = self.hp
        if not hp.correction:
            log_ratio = torch.zeros_like(log_ratio)
        bars = {"rho_bar": hp.rho_bar, "c_bar": hp.c_bar} if hp.correction else {}
        target, advantage = vtrace(
            log_ratio,
            batch["reward"],
            value,
            following(value, batch["end_value"], batch["at_end"]),
            batch["terminated"],
            batch["truncated"],
            gamma=hp.gamma,
            gae_lambda=hp.gae_lambda,
            **bars,
        )
        return target, advantage * importance_weight(log_ratio, hp.pg_rho_bar) if hp.correction else advantage


class RecurrentIMPALA(IMPALA):
    """With memory: sequences begin with the memory that acting stored, as a constant."""

    model: RecurrentActorCritic  # type: ignore[assignment]

    def learned(self, rollout: Rollout, data: Batch) -> Batch:
        memory = start_memory(rollout, self.device)
        return super().learned(rollout, data) | {"first": data["first"], "memory": memory}

    def predict(self, obs: TensorTree, batch: Batch) -> tuple[Distribution, Tensor]:
        return cast(tuple[Distribution, Tensor], self.model(obs, **sequences(batch)))

    @torch.no_grad()
    def end_values(self, after: Batch) -> Tensor:
        return remembered_values(self.model, to_device(after, self.device))


def impala_actor(spaces: Spaces, hp: IMPALAHyperparameters, *, device: torch.device | str = "cpu") -> NetworkActor:
    return (VersionedRecurrentActor if hp.recurrent else VersionedActor)(spaces, hp, device=device)


def impala_learner(actor: Any, hp: IMPALAHyperparameters, *, rng: np.random.Generator) -> IMPALA:
    return (RecurrentIMPALA if hp.recurrent else IMPALA)(actor, hp, rng=rng)


def following(value: Tensor, end_value: Tensor, at_end: Tensor) -> Tensor:
    """[T, N] The value of the next observation: that of the next row, or `end_value` at the ends."""
    shifted = torch.cat([value[1:], end_value[-1:]])
    return torch.where(at_end, end_value, shifted)
