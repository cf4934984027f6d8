"""EfficientZero (Ye et al., arXiv:2111.00210): MuZero with a consistency loss, value prefixes, and targets that follow
old experience less far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.muzero import MuZero, MuZeroHyperparameters
from rl_training.algorithms.planning import model_options
from rl_training.algorithms.replay_based import annealing
from rl_training.data.replay import Replay
from rl_training.models.efficientzero import EfficientZeroModel
from rl_training.models.muzero import PlanningModel
from rl_training.ops.augment import augmented
from rl_training.types import Array, Batch, Spaces


@dataclass(frozen=True)
class EfficientZeroHyperparameters(MuZeroHyperparameters):
    lstm_horizon: int = setting(5, "steps after which the LSTM of the value prefix is reset", low=1)
    lstm_size: int | None = setting(None, "hidden size of the value prefix LSTM; None: 64, for towers 512", low=1)
    projection_size: int | None = setting(None, "size of the consistency projection; None: 128, for towers 1024", low=1)
    augment: bool = setting(True, "augment images by random shifts and brightness; no effect on vectors")
    n_step: int = scalar(5, "n-step value targets: rewards summed before bootstrapping, for new experience", low=1)
    # The paper takes 120,000 gradient steps in 100,000 env steps.
    utd_ratio: float = scalar(1.0, "update-to-data ratio: gradient steps per env step, counted over all environments")
    n_step_decay: int = scalar(30_000, "off-policy correction: env steps of age that shrink n_step by 1", low=1)
    reanalyse_ratio: float = scalar(
        0.99, "reanalyse: share of sequences whose policy targets are searched again with the target network", high=1.0
    )
    priority_exponent: float = scalar(0.6, "PER alpha; 0: uniform sampling", high=1.0)
    beta: float = scalar(0.4, "PER beta (importance sampling); 1: unbiased", high=1.0, schedule=annealing)
    consistency_coef: float = scalar(2.0, "consistency loss coefficient (predicted latent states against encoded ones)")


class EfficientZero(MuZero):
    Hyperparameters = EfficientZeroHyperparameters
    hp: EfficientZeroHyperparameters
    model: EfficientZeroModel

    @classmethod
    def make_model(cls, spaces: Spaces, hp: Any) -> PlanningModel:
        sizes = {"lstm_size": hp.lstm_size, "projection_size": hp.projection_size}
        return EfficientZeroModel(spaces, lstm_horizon=hp.lstm_horizon, **sizes, **model_options(hp))

    def rules(self) -> Any:
        from rl_training.ops.search import EFFICIENTZERO

        return EFFICIENTZERO

    def steps_to_bootstrap(self, replay: Replay, index: Array) -> Array:
        """[B] The older a sequence, the less its actions are the policy's: it then bootstraps after fewer of them."""
        n: Array = np.clip(self.hp.n_step - replay.age(index) // self.hp.n_step_decay, 1, None)
        return n

    def targets(self, replay: Replay, index: Array) -> dict[str, Any]:
        """With the observations [B * K, ...] that followed, for the consistency loss."""
        batch = super().targets(replay, index)
        place = replay.sequences(index, self.hp.unroll_steps + 1)["place"]
        # The mask leaves out what is not known, but batch statistics would not: there the first observation stands in.
        followed = np.where(batch["policy_mask"][:, 1:] > 0, place[:, 1:], place[:, :1])
        return batch | {"next_obs": replay.observations(followed.reshape(-1))}

    def as_learned_from(self, batch: Batch) -> Batch:
        if not self.hp.augment:
            return batch
        space = self.spaces.observation
        return batch | {key: augmented(batch[key], space, self.rng) for key in ("obs", "next_obs")}

    def coefficients(self) -> dict[str, float]:
        return super().coefficients() | {"consistency": self.hp.consistency_coef}

    def more_losses(self, batch: Batch, states: list[Tensor]) -> dict[str, Tensor]:
        """How far the imagined states are from those of the observations that came."""
        imagined = torch.stack(states[1:], 1)
        with torch.no_grad():
            came = self.model.represent(batch["next_obs"])
        distance = self.model.consistency_loss(imagined.flatten(0, 1), came).view(imagined.shape[:2])
        weight = self.step_weights(len(states))[1:]
        return {"consistency": (weight * batch["policy_mask"][:, 1:] * distance).sum(1)}

    def reward_target(self, batch: Batch) -> Tensor:
        """[B, K] Value prefixes: sums of the rewards since the LSTM last began."""
        parts = torch.split(batch["reward"], self.hp.lstm_horizon, 1)
        return torch.cat([part.cumsum(1) for part in parts], 1)
