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

from rl_training.models.dreamer import DreamerModel
from rl_training.models.rssm import Latent
from rl_training.ops.imagined_returns import lambda_returns
from rl_training.ops.two_hot import two_hot_loss
from rl_training.types import Batch

Losses = dict[str, Tensor]


class Noise(NamedTuple):
    """All random numbers of a gradient step: for H steps of imagination from each of the M = T B posteriors."""

    posterior: Tensor  # [T, B, S] uniform
    prior: Tensor  # [H, M, S] uniform
    action: Tensor  # [H, M, A] what the policy's distribution takes


class Dream(NamedTuple):
    """Imagined trajectories of H steps from M states. Nothing in it has a gradient."""

    latent: Latent  # [H + 1, M, ...]
    action: Tensor  # [H, M, ...] those taken in all but the last state
    reward: Tensor  # [H + 1, M] predicted, on arriving in the state
    discount: Tensor  # [H + 1, M] predicted: the probability that the episode goes on, times gamma


def observe(model: DreamerModel, batch: Batch, noise: Tensor) -> tuple[Latent, Tensor]:
    """(latents [T, B, ...], logits of their posteriors) of a batch."""
    carry = Latent(batch["deter"], batch["stoch"])
    tokens = model.encoder(batch["obs"])
    return model.dynamics.observe(tokens, batch["action"], batch["first"], carry, noise)


def world_model_losses(
    model: DreamerModel, batch: Batch, latent: Latent, posterior: Tensor, *, free_nats: float, gamma: float
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
        "reward": two_hot_loss(model.reward(latent), batch["reward"], model.bins),
        "continuation": continuation,
    }


@torch.no_grad()
def imagine(model: DreamerModel, start: Latent, noise: Noise) -> Dream:
    """Follow the policy in the model, from latents [M, ...], for as many steps as there is noise."""
    latent, latents, actions = start, [start], []
    for prior_noise, action_noise in zip(noise.prior, noise.action, strict=True):
        action = model.policy(latent).sample(action_noise)
        latent = model.dynamics.imagine(latent, model.policy.vector(action), prior_noise)
        latents.append(latent)
        actions.append(action)
    states = Latent(*map(torch.stack, zip(*latents, strict=True)))
    reward, discount = model.mean(model.reward(states)), model.continuation(states).sigmoid()
    return Dream(states, torch.stack(actions), reward, discount)


def imagined_returns(model: DreamerModel, dream: Dream, value: Tensor, *, lam: float) -> Tensor:
    """[H, M] The lambda-returns of all but the last states. value [H + 1, M, BINS]: logits of the online critic."""
    return lambda_returns(dream.reward, dream.discount, model.mean(value.detach()), lam)


def behaviour_losses(
    model: DreamerModel,
    dream: Dream,
    value: Tensor,
    returns: Tensor,
    scale: Tensor,
    *,
    ent_coef: float,
    slow_coef: float,
) -> tuple[Losses, dict[str, Tensor]]:
    """(the losses of policy and value, [H, M]; metrics). REINFORCE, for actions of any kind.

    value [H + 1, M, BINS]: logits of the critic; returns [H, M]; scale []: what advantages are divided by.
    """
    policy = model.policy(Latent(*(x[:-1] for x in dream.latent)))
    # How much a state counts: the probability that it is reached. That of the first is not 1 if its episode is over.
    weight = dream.discount.cumprod(0)[:-1]
    advantage = (returns - model.mean(value.detach())[:-1]) / scale
    entropy = policy.entropy()
    policy_loss = -weight * (policy.log_prob(dream.action) * advantage + ent_coef * entropy)
    value_loss = weight * critic_loss(model, value[:-1], dream.latent.features()[:-1], returns, slow_coef=slow_coef)
    metrics = {"entropy": entropy.mean(), "return": returns.mean(), "advantage": advantage.mean()}
    return {"policy": policy_loss, "value": value_loss}, metrics


def critic_loss(model: DreamerModel, value: Tensor, features: Tensor, target: Tensor, *, slow_coef: float) -> Tensor:
    """[...] Cross-entropy of logits [..., BINS] with targets [...], and with the values of the slow critic."""
    with torch.no_grad():
        slow = model.mean(model.slow_value(features))
    return two_hot_loss(value, target, model.bins) + slow_coef * two_hot_loss(value, slow, model.bins)


def replay_value_loss(
    model: DreamerModel, batch: Batch, latent: Latent, bootstrap: Tensor, *, gamma: float, lam: float, slow_coef: float
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
