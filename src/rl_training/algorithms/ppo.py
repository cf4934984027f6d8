"""Proximal policy optimization with the clipped objective (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCriticHyperparameters, ActorCriticLearner, mean_entropy, total_loss
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import MeanMetrics, Optimizer, gradient_step
from rl_training.data.batch import minibatches
from rl_training.data.rollout import Rollout
from rl_training.ops.distributions import Distribution
from rl_training.types import Batch, Metrics

LEARNED = ("obs", "action", "logprob", "value", "advantage", "target")  # the entries of a minibatch


@dataclass(frozen=True)
class PPOHyperparameters(ActorCriticHyperparameters):
    num_steps: int = setting(
        256, "rollout length: env steps collected in each environment before an update", low=1, atari=128
    )
    learning_rate: float = scalar(3e-4, "learning rate of the optimizer", atari=2.5e-4)
    clip_coef: float = scalar(0.2, "PPO clip range: probability ratios are clipped to 1 ± this", atari=0.1)
    clip_vf_coef: float | None = scalar(None, "value clip range: old value ± this; None: no clipping")
    target_kl: float | None = scalar(None, "KL limit: stop an update above approximate KL 1.5 * this; None: no limit")
    update_epochs: int = scalar(10, "epochs (passes over the rollout) per update", low=1, atari=4)
    num_minibatches: int = scalar(32, "minibatches (gradient steps) per epoch", low=1, atari=4)
    normalize_advantage: bool = setting(True, "normalize advantages to mean 0 and deviation 1 in each minibatch")


class PPO(ActorCriticLearner):
    Hyperparameters = PPOHyperparameters
    hp: PPOHyperparameters

    def update(self, rollout: Rollout) -> Metrics:
        metrics = MeanMetrics()
        self.optimize(self.learning_batch(rollout, metrics), metrics)
        return metrics.mean()

    def optimize(self, batch: Batch, metrics: MeanMetrics) -> None:
        """Several epochs of minibatch ascent on the clipped objective, over one rollout."""
        hp, log_ratios = self.hp, []
        for optimizer, minibatch in self.steps(batch):
            loss, log_ratio = self.loss(minibatch, metrics)
            log_ratios.append(log_ratio)
            # Before the step, so that a policy beyond the limit does not move further.
            if hp.target_kl is not None and approx_kl(log_ratio).item() > 1.5 * hp.target_kl:
                break
            norm = gradient_step(optimizer, loss, lr=hp.learning_rate, max_grad_norm=hp.max_grad_norm)
            metrics.add(grad_norm=norm)
            self.gradient_steps += 1
        self.actor.version += 1
        log_ratio = torch.cat(log_ratios)
        metrics.add(approx_kl=approx_kl(log_ratio), clip_fraction=clip_fraction(log_ratio, hp.clip_coef))

    def steps(self, batch: Batch) -> Iterator[tuple[Optimizer, Batch]]:
        """The gradient steps of an update: what is optimized, on which minibatch."""
        for _ in range(int(self.hp.update_epochs)):
            for minibatch in self.epoch(batch):
                yield self.optimizers["model"], minibatch

    def epoch(self, batch: Batch) -> Iterator[Batch]:
        """The minibatches of one pass over the rollout, shuffled."""
        return minibatches({key: batch[key] for key in LEARNED}, int(self.hp.num_minibatches), self.rng)

    def loss(self, batch: Batch, metrics: MeanMetrics) -> tuple[Tensor, Tensor]:
        """(loss of a minibatch, log of the probability ratios [B] to the policy that acted)."""
        hp = self.hp
        policy, value = self.predict(batch)
        log_ratio = policy.log_prob(batch["action"]) - batch["logprob"]
        advantage = self.minibatch_advantage(batch["advantage"])

        policy_loss = clipped_surrogate(log_ratio.exp(), advantage, hp.clip_coef)
        value_loss = F.mse_loss(clip_value(value, batch["value"], hp.clip_vf_coef), batch["target"])
        entropy = mean_entropy(policy, hp.ent_coef)
        metrics.add(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        return total_loss(policy_loss, value_loss, entropy, hp), log_ratio.detach()

    def minibatch_advantage(self, advantage: Tensor) -> Tensor:
        """[B] The advantages of a minibatch as they enter the loss."""
        return normalize(advantage) if self.hp.normalize_advantage else advantage

    def predict(self, batch: Batch) -> tuple[Distribution, Tensor]:
        """(policies, values [B]) in the states of a minibatch."""
        return cast(tuple[Distribution, Tensor], self.model(batch["obs"]))


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """-E[min(r A, clip(r, 1 - clip, 1 + clip) A)], eq. 7 of the paper.

    The second term is the smaller one only where it is A + clip |A|. Elsewhere this constant is not the smaller one.
    """
    return -torch.minimum(ratio * advantage, advantage + clip * advantage.abs()).mean()


def clip_value(value: Tensor, old_value: Tensor, clip: float | None) -> Tensor:
    """The new value, clipped to the old one +- clip.

    As in Stable-Baselines3, the loss is that of the clipped value. OpenAI Baselines take the larger of both losses.
    """
    return value if clip is None else old_value + (value - old_value).clamp(-clip, clip)


def normalize(x: Tensor) -> Tensor:
    if len(x) == 1:
        return x
    std, mean = torch.std_mean(x)
    return (x - mean) / (std + 1e-8)


def approx_kl(log_ratio: Tensor) -> Tensor:
    """KL(old || new) from samples of the old policy: E[(r - 1) - log r], which is never negative."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def clip_fraction(log_ratio: Tensor, clip: float) -> Tensor:
    return ((log_ratio.exp() - 1).abs() > clip).float().mean()
