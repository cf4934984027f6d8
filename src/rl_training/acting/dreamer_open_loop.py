"""Open-loop prediction of DreamerV3's world model: it sees the beginning of an episode and imagines the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.data.batch import stacked
from rl_training.models.dreamer import DreamerModel
from rl_training.models.rssm import Latent
from rl_training.types import TensorTree, Trajectory


def predict_open_loop(
    model: DreamerModel, obs: TensorTree, actions: Tensor, noise: Tensor, *, gamma: float
) -> Trajectory:
    """Predictions [S, T, ...] of T observations, of which the model sees the first C: `obs` [C, ...].

    actions [T - 1, A]: as vectors, those after each observation but the last. noise [T, S, G]: uniform numbers that
    choose the samples of the latents.
    """
    length, samples = noise.shape[:2]
    tokens = model.encoder(obs).unsqueeze(1).expand(-1, samples, -1)  # [C, S, E]
    before = torch.cat([torch.zeros_like(actions[:1]), actions]).unsqueeze(1).expand(-1, samples, -1)  # [T, S, A]
    context, carry = len(tokens), model.dynamics.initial(samples)
    first = torch.zeros(context, samples, device=noise.device)  # the carry is already that of a beginning
    seen, _ = model.dynamics.observe(tokens, before[:context], first, carry, noise[:context])
    latents = [Latent(*parts) for parts in zip(*seen, strict=True)]
    for t in range(context, length):
        latents.append(model.dynamics.imagine(latents[-1], before[t], noise[t]))
    predictions = [predicted(model, latent, gamma, single=not isinstance(obs, dict)) for latent in latents]
    return Trajectory(*(stacked(parts, 1) for parts in zip(*predictions, strict=True)))


def predicted(model: DreamerModel, latent: Latent, gamma: float, *, single: bool) -> Trajectory:
    """What latents [S, ...] predict of their time: arrays [S, ...]."""
    obs = {key: part.cpu().numpy() for key, part in model.decoder.observations(model.decoder(latent)).items()}
    # The discount is a part of what the model predicts. With gamma 0 it knows of no end.
    goes_on = (model.continuation(latent).sigmoid() / (gamma or 1.0)).clamp(max=1)
    reward = model.mean(model.reward(latent))
    return Trajectory(next(iter(obs.values())) if single else obs, reward.cpu().numpy(), goes_on.cpu().numpy())
