"""The losses of DreamerV3 as functions of the model, a batch and noise (Hafner et al., Nature 2025).

A batch holds B sequences of T rows, time first. A row is an observation with what led to it:

obs [T, B, ...]      the observation
action [T, B, A]     the action before it, as a vector; that of the row before an episode's first has no effect
reward [T, B]        the reward that came with it
terminated [T, B]    whether the episode terminated with it; after a truncation the episode could have gone on
first, last [T, B]   whether it is the first or the last observation of an episode
deter [B, D], stoch [B, S, C]  the latent before the first row

All losses are [T, B] or shorter, unscaled, and averaged by the learner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.dreamer_path import DreamerPath
from rl_training.models.dreamer import DreamerModel
from rl_training.models.rssm import Latent
from rl_training.ops.imagined_returns import lambda_returns
from rl_training.types import Batch, Number

Losses = dict[str, Tensor]


class Noise(NamedTuple):
    """All random numbers of a gradient step: for H steps of imagination from each of the M = T B posteriors."""

    posterior: Tensor  # [T, B, S] uniform
    prior: Tensor  # [H, M, S] uniform
    action: Tensor  # [H, M, A] what the policy's distribution takes


class Dream(NamedTuple):
    """Imagined trajectories of H steps from M states. Nothing in it has a gradient."""

    features: Tensor  # [H + 1, M, F] of the states
    action: Tensor  # [H, M, ...] those taken in all but the last state
    reward: Tensor  # [H + 1, M] predicted, on arriving in the state
    discount: Tensor  # [H + 1, M] predicted: the probability that the episode goes on, times gamma


def observe(path: DreamerPath, batch: Batch, noise: Tensor) -> tuple[Latent, Tensor]:
    """(latents [T, B, ...], logits of their posteriors) of a batch."""
    carry = Latent(batch["deter"], batch["stoch"])
    tokens = path.model.encoder(batch["obs"])
    return path.observe(tokens, batch["action"], batch["first"], carry, noise)


def world_model_losses(
    model: DreamerModel, batch: Batch, latent: Latent, posterior: Tensor, *, free_nats: Number, gamma: Number
) -> Losses:
    """The losses of dynamics, decoder, reward and continuation, each [T, B]."""
    prior = model.dynamics.prior(latent.deter)
    dynamics, representation = model.dynamics.kl_losses(posterior, prior, free_nats)
    reconstruction = model.decoder.losses(model.decoder(latent), batch["obs"])
    # The discount is a part of what is predicted: imagination needs no other.
    goes_on = gamma * (~batch["terminated"]).float()
    continuation = F.binary_cross_entropy_with_logits(model.continuation(latent), goes_on, reduction="none")
    return {
        "dynamics": dynamics,
        "representation": representation,
        "reconstruction": torch.stack(list(reconstruction.values())).sum(0),
        "reward": model.loss(model.reward(latent), batch["reward"]),
        "continuation": continuation,
    }


@torch.no_grad()
def imagine(path: DreamerPath, start: Latent, noise: Noise) -> Dream:
    """Follow the policy in the model, from latents [M, ...], for as many steps as there is noise."""
    features, actions = path.imagine(start, noise.prior, noise.action)
    model = path.model
    reward, discount = model.mean(model.reward(features)), model.continuation(features).sigmoid()
    return Dream(features, actions, reward, discount)


@torch.no_grad()
def critic_values(model: DreamerModel, dream: Dream, logits: Tensor) -> Tensor:
    """[H + 1, M] The online critic's values. logits [H, M, BINS]: its outputs for all but the last states."""
    return torch.cat([model.mean(logits), model.mean(model.value(dream.features[-1:]))])


def behaviour_losses(
    model: DreamerModel,
    dream: Dream,
    logits: Tensor,
    value: Tensor,
    returns: Tensor,
    scale: Tensor,
    *,
    ent_coef: Number,
    slow_coef: Number,
) -> tuple[Losses, dict[str, Tensor]]:
    """(the losses of policy and value, [H, M]; metrics). REINFORCE, for actions of any kind.

    logits [H, M, BINS]: the critic's; value [H, M]: their means; returns [H, M]; scale []: divides the advantages.
    """
    policy = model.policy(dream.features[:-1])
    # How much a state counts: the probability that it is reached. That of the first is not 1 if its episode is over.
    weight = dream.discount.cumprod(0)[:-1]
    advantage = (returns - value) / scale
    entropy = policy.entropy()
    policy_loss = -weight * (policy.log_prob(dream.action) * advantage + ent_coef * entropy)
    value_loss = weight * critic_loss(model, logits, dream.features[:-1], returns, slow_coef=slow_coef)
    metrics = {"entropy": entropy.mean(), "return": returns.mean(), "advantage": advantage.mean()}
    return {"policy": policy_loss, "value": value_loss}, metrics


def critic_loss(model: DreamerModel, logits: Tensor, features: Tensor, target: Tensor, *, slow_coef: Number) -> Tensor:
    """[...] Cross-entropy of logits [..., BINS] with targets [...], and with the values of the slow critic."""
    with torch.no_grad():
        slow = model.mean(model.slow_value(features))
    return model.loss(logits, target, slow, slow_coef)


def replay_value_loss(
    model: DreamerModel,
    batch: Batch,
    latent: Latent,
    bootstrap: Tensor,
    *,
    gamma: Number,
    lam: Number,
    slow_coef: Number,
) -> Tensor:
    """[T - 1, B] The critic's loss on what really happened; it also trains the world model.

    bootstrap [T, B]: the imagined returns of the states, from which the lambda-returns of real rewards bootstrap. The
    last observation of an episode has no return, because the next row is of another episode.
    """
    features = latent.features()[:-1]
    discount = gamma * (~batch["terminated"]).float()
    returns = lambda_returns(batch["reward"], discount, bootstrap, lam, batch["last"])
    loss = critic_loss(model, model.value(features), features, returns, slow_coef=slow_coef)
    known: Tensor = ~batch["last"][:-1]
    return known.float() * loss


def draw_noise(
    model: DreamerModel, batch: Batch, steps: int, generator: torch.Generator, device: torch.device
) -> Noise:
    """The noise of a gradient step with `steps` steps of imagination."""
    length, count = batch["reward"].shape
    groups = model.dynamics.groups
    options: dict[str, Any] = {"generator": generator, "device": device}
    posterior = torch.rand(length, count, groups, **options)
    prior = torch.rand(steps, length * count, groups, **options)
    action = model.policy.draw_noise(steps, length * count, like=prior, generator=generator)
    return Noise(posterior, prior, action)
