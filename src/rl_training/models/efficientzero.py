"""EfficientZero's model (Ye et al., arXiv:2111.00210): MuZero's with value prefixes and a consistency loss."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.muzero import MuZeroModel, scale_gradient
from rl_training.models.networks import zero_linear
from rl_training.models.residual import dense_head, flat_features
from rl_training.types import Spaces, TensorTree

PREFIX, STEPS = slice(-2, -1), slice(-1, None)  # columns of a state row


class EfficientZeroModel(MuZeroModel):
    """A state is [latent | LSTM hidden | LSTM cell | value prefix | steps]. Reward logits are of the value prefix.

    The LSTM reads the dynamics' features and predicts the value prefix: the sum of rewards since its last reset. It is
    reset by `represent` and after every `lstm_horizon` transitions, in searches as in training: `steps` counts them.
    """

    def __init__(
        self,
        spaces: Spaces,
        *,
        lstm_size: int | None = None,
        lstm_horizon: int = 5,
        projection_size: int | None = None,
        prediction_size: int | None = None,
        **muzero: Any,
    ) -> None:
        """Sizes of None: 64, 128 and 64 for perceptrons; the paper's 512, 1024 and 512 for towers."""
        super().__init__(spaces, **muzero)
        usual = (512, 1024, 512) if self.is_tower else (64, 128, 64)
        given = (lstm_size, projection_size, prediction_size)
        self.lstm_size, projection, prediction = (u if g is None else g for g, u in zip(given, usual, strict=True))
        self.lstm_horizon = lstm_horizon
        atoms = self.reward_support.size
        self.reward_features: nn.Module
        if self.is_tower:
            self.reward_features, size = flat_features(self.latent_shape)
            self.reward = nn.Sequential(nn.BatchNorm1d(self.lstm_size), nn.ReLU(), dense_head(self.lstm_size, atoms))
        else:
            assert isinstance(self.next_state, nn.Linear)
            self.reward_features, size = nn.Identity(), self.next_state.in_features
            # The hidden state of an untrained LSTM is about 0.05, and actions change it by 0.01: a linear head on it
            # predicts the same for all actions for a thousand gradient steps. The paper normalises it over the batch,
            # as the towers above do. A LayerNorm learns as fast, and is the same in searches as in training.
            self.reward = nn.Sequential(nn.LayerNorm(self.lstm_size), zero_linear(self.lstm_size, atoms))
        self.lstm = nn.LSTMCell(size, self.lstm_size)
        self.state_size = self.latent_size + 2 * self.lstm_size + 2
        self.projector = projector(self.latent_size, projection)
        hidden = [nn.Linear(projection, prediction), nn.BatchNorm1d(prediction), nn.ReLU()]
        self.predictor = nn.Sequential(*hidden, nn.Linear(prediction, projection))

    def represent(self, obs: TensorTree) -> Tensor:
        latent = super().represent(obs)
        return F.pad(latent, (0, self.state_size - self.latent_size))

    def predict(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().predict(state[:, : self.latent_size])

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        memory = state[:, self.latent_size :] * self.keeps_memory(state)
        hidden, cell, _, steps = torch.split(memory, [self.lstm_size, self.lstm_size, 1, 1], 1)
        features = self.dynamics_features(state[:, : self.latent_size], action)
        hidden, cell = self.lstm(self.reward_features(features), (hidden, cell))
        logits = self.reward(hidden)
        # Without a gradient: only searches read the prefix, the loss is on the logits.
        prefix = self.reward_support.to_scalar(logits.detach()).unsqueeze(1)
        return torch.cat([self.next_latent(features), hidden, cell, prefix, steps + 1], 1), logits

    def unroll(self, state: Tensor, actions: Tensor, *, gradient_scale: float) -> tuple[list[Tensor], Tensor]:
        """The states are K + 1 latents. They do not depend on rewards, so the reward layers run on all steps at once:
        on a GPU a small operation takes as long as a larger one. The gradient of the LSTM is not scaled."""
        latents, features = [state[:, : self.latent_size]], []
        for action in actions.unbind(1):
            features.append(self.dynamics_features(scale_gradient(latents[-1], gradient_scale), action))
            latents.append(self.next_latent(features[-1]))
        steps, memory, hidden = self.reward_features(torch.cat(features)).chunk(len(features)), None, []
        for number, step in enumerate(steps):
            memory = self.lstm(step, memory if number % self.lstm_horizon else None)
            hidden.append(memory[0])
        logits = self.reward(torch.cat(hidden))
        return latents, logits.view(len(steps), -1, logits.shape[1]).transpose(0, 1)

    def scalars(self, state: Tensor, next_state: Tensor, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A reward is the difference of two prefixes; the prefix itself after a reset of the LSTM."""
        difference = next_state[:, PREFIX] - state[:, PREFIX] * self.keeps_memory(state)
        return difference.squeeze(1), self.value_support.to_scalar(value)

    def keeps_memory(self, state: Tensor) -> Tensor:
        """[B, 1] Whether the LSTM is not reset before the next transition."""
        return state[:, STEPS] < self.lstm_horizon

    def project(self, latent: Tensor, with_predictor: bool) -> Tensor:
        """Latents [B, latent_size] to projections [B, projection_size], on which consistency is measured."""
        projection = self.projector(latent)
        return cast(Tensor, self.predictor(projection) if with_predictor else projection)

    def consistency_loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        """[B] The negative cosine similarity of predicted states [B, S] and encoded ones [B, S] (SimSiam, Chen and He,
        arXiv:2011.10566): only the former pass the predictor, no gradient enters the latter."""
        with torch.no_grad():
            goal = self.project(target[:, : self.latent_size], with_predictor=False)
        guess = self.project(predicted[:, : self.latent_size], with_predictor=True)
        return -F.cosine_similarity(guess, goal, dim=1)


def projector(fan_in: int, size: int) -> nn.Sequential:
    widths = [fan_in, size, size, size]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])
