"""EfficientZero's model (Ye et al., arXiv:2111.00210): MuZero's with value prefixes and a consistency loss."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.muzero import MuZeroModel, scale_gradient, zero_linear
from rl_training.models.residual import dense_head, flat_features
from rl_training.types import Spaces, TensorTree

PREFIX, STEPS = slice(-2, -1), slice(-1, None)  # columns of a state row


class EfficientZeroModel(MuZeroModel):
    """A state is [latent | LSTM's hidden | its cell | value prefix | steps]; reward logits are of the value prefix.

    The LSTM reads the dynamics' features and tells the sum of rewards since it began. It begins at what `represent`
    gives and anew after every `lstm_horizon` transitions, in searches as in training: the row counts the steps.
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
        """Sizes that are None are 64, 128 and 64 for perceptrons, and the paper's 512, 1024 and 512 for towers."""
        super().__init__(spaces, **muzero)
        usual = (512, 1024, 512) if self.is_tower else (64, 128, 64)
        given = (lstm_size, projection_size, prediction_size)
        self.lstm_size, projection, prediction = (u if g is None else g for g, u in zip(given, usual, strict=True))
        self.lstm_horizon = lstm_horizon
        atoms = self.reward_support.size
        self.reward_features: nn.Module
        if self.is_tower:
            self.reward_features, size = flat_features(self.latent_shape)
            head = dense_head(self.lstm_size, lambda units: zero_linear(units, atoms))
            self.reward = nn.Sequential(nn.BatchNorm1d(self.lstm_size), nn.ReLU(), head)
        else:
            assert isinstance(self.next_state, nn.Linear)
            self.reward_features, size = nn.Identity(), self.next_state.in_features
            # The hidden state of a new LSTM is about 0.05, and actions change it by 0.01: a linear head on it predicts
            # the same for all actions through a thousand gradient steps. The paper, like the towers above, normalises
            # it over the batch. A LayerNorm learns as fast, and is the same in searches as in training.
            self.reward = nn.Sequential(nn.LayerNorm(self.lstm_size), zero_linear(self.lstm_size, atoms))
        self.lstm = nn.LSTMCell(size, self.lstm_size)
        self.state_size = self.latent_size + 2 * self.lstm_size + 2
        self.projector = projector(self.latent_size, projection)
        self.predictor = predictor(projection, prediction)

    def represent(self, obs: TensorTree) -> Tensor:
        latent = super().represent(obs)
        return F.pad(latent, (0, self.state_size - self.latent_size))

    def predict(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().predict(state[:, : self.latent_size])

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        memory = state[:, self.latent_size :] * self.goes_on(state)
        hidden, cell, _, steps = torch.split(memory, [self.lstm_size, self.lstm_size, 1, 1], 1)
        features = self.imagined(state[:, : self.latent_size], action)
        hidden, cell = self.lstm(self.reward_features(features), (hidden, cell))
        logits = self.reward(hidden)
        # For searches, so without a gradient: what is learned of a prefix is learned from the logits.
        prefix = self.reward_support.to_scalar(logits.detach()).unsqueeze(1)
        return torch.cat([self.next_latent(features), hidden, cell, prefix, steps + 1], 1), logits

    def unroll(self, state: Tensor, actions: Tensor, *, gradient_scale: float) -> tuple[list[Tensor], Tensor]:
        """K + 1 latents. What tells rewards does not lead to the next latent: it is done for all steps at once, because
        a GPU takes as long for a small operation as for a larger one. The LSTM's gradient passes whole."""
        latents, features = [state[:, : self.latent_size]], []
        for action in actions.unbind(1):
            features.append(self.imagined(scale_gradient(latents[-1], gradient_scale), action))
            latents.append(self.next_latent(features[-1]))
        steps, memory, hidden = self.reward_features(torch.cat(features)).chunk(len(features)), None, []
        for number, step in enumerate(steps):
            memory = self.lstm(step, memory if number % self.lstm_horizon else None)
            hidden.append(memory[0])
        logits = self.reward(torch.cat(hidden))
        return latents, logits.view(len(steps), -1, logits.shape[1]).transpose(0, 1)

    def scalars(self, state: Tensor, next_state: Tensor, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A reward is the difference of the prefixes; the prefix itself where the LSTM began anew."""
        difference = next_state[:, PREFIX] - state[:, PREFIX] * self.goes_on(state)
        return difference.squeeze(1), self.value_support.to_scalar(value)

    def goes_on(self, state: Tensor) -> Tensor:
        """[B, 1] whether the LSTM keeps its memory in the next transition."""
        return state[:, STEPS] < self.lstm_horizon

    def project(self, latent: Tensor, with_predictor: bool) -> Tensor:
        """Latents [B, latent_size] to where their consistency is measured [B, projection_size]."""
        projection = self.projector(latent)
        return cast(Tensor, self.predictor(projection) if with_predictor else projection)

    def consistency_loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        """The negative cosine [B] between states [B, S] that the dynamics predicted and those that came (SimSiam, Chen
        and He, arXiv:2011.10566): the predictor runs on the former alone, no gradient enters the latter."""
        with torch.no_grad():
            goal = self.project(target[:, : self.latent_size], with_predictor=False)
        guess = self.project(predicted[:, : self.latent_size], with_predictor=True)
        return -F.cosine_similarity(guess, goal, dim=1)


def projector(fan_in: int, size: int) -> nn.Sequential:
    widths = [fan_in, size, size, size]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def predictor(size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, size))
