"""EfficientZero (Ye et al., arXiv:2111.00210): MuZero with a consistency loss, value prefixes, and shorter n-step
targets for older experience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.muzero import MuZeroHyperparameters, cooling
from rl_training.algorithms.planning import PlanningLearner, step_weights, unrolled_losses
from rl_training.algorithms.replay_based import annealing
from rl_training.data.replay import Replay
from rl_training.models.efficientzero import EfficientZeroModel
from rl_training.ops.augment import augmented
from rl_training.types import Array, Batch


@dataclass(frozen=True)
class EfficientZeroHyperparameters(MuZeroHyperparameters):
    lstm_horizon: int = setting(5, "steps after which the LSTM of the value prefix is reset", low=1)
    lstm_size: int | None = setting(None, "hidden size of the value prefix LSTM; None: 64, for towers 512", low=1)
    projection_size: int | None = setting(None, "size of the consistency projection; None: 128, for towers 1024", low=1)
    augment: bool = setting(True, "augment images by random shifts and brightness; no effect on vectors")
    n_step: int = scalar(5, "n-step value targets: rewards summed before bootstrapping, for new experience", low=1)
    learning_rate: float = scalar(1e-3, "learning rate of the optimizer")
    temperature: float = scalar(1.0, "actions are sampled in proportion to visits^(1 / temperature)", schedule=cooling)
    hidden_gradient_scale: float = scalar(
        0.5, "factor on the gradient of the latent state at each unrolled step (MuZero: 0.5)", high=1.0
    )
    # The paper: 120,000 gradient steps in 100,000 env steps.
    utd_ratio: float = scalar(1.0, "update-to-data ratio: gradient steps per env step, counted over all environments")
    n_step_decay: int = scalar(30_000, "off-policy correction: env steps of age that shrink n_step by 1", low=1)
    reanalyse_ratio: float = scalar(
        0.99, "reanalyse: share of sequences whose policy targets are searched again with the target network", high=1.0
    )
    priority_exponent: float = scalar(0.6, "PER alpha; 0: uniform sampling", high=1.0)
    beta: float = scalar(0.4, "PER beta (importance sampling); 1: unbiased", high=1.0, schedule=annealing)
    consistency_coef: float = scalar(2.0, "consistency loss coefficient (predicted latent states against encoded ones)")


class EfficientZero(PlanningLearner):
    Hyperparameters = EfficientZeroHyperparameters
    hp: EfficientZeroHyperparameters
    model: EfficientZeroModel

    def steps_to_bootstrap(self, replay: Replay, index: Array) -> Array:
        """[B] Off-policy correction: older sequences have a smaller n."""
        return cast(Array, np.clip(self.hp.n_step - replay.age(index) // self.hp.n_step_decay, 1, None))

    def targets(self, replay: Replay, index: Array) -> dict[str, Any]:
        """Also the next observations [B * K, ...], for the consistency loss."""
        batch = super().targets(replay, index)
        place = replay.sequences(index, self.hp.unroll_steps + 1)["place"]
        # Unknown observations are masked in the loss, but not in batch statistics: they are replaced by the first one.
        followed = np.where(batch["policy_mask"][:, 1:] > 0, place[:, 1:], place[:, :1])
        return batch | {"next_obs": replay.observations(followed.reshape(-1))}

    def augment(self, batch: Batch) -> Batch:
        if not self.hp.augment:
            return batch
        space = self.spaces.observation
        return batch | {key: augmented(batch[key], space, self.rng) for key in ("obs", "next_obs")}

    def coefficients(self) -> dict[str, float]:
        return super().coefficients() | {"consistency": self.hp.consistency_coef}

    def losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        hp, model = self.hp, self.model
        weight = step_weights(hp.unroll_steps, hp.unroll_coef, self.device)
        prefix = value_prefixes(batch["reward"], hp.lstm_horizon)
        losses, error, states = unrolled_losses(model, batch, weight, prefix, gradient_scale=hp.hidden_gradient_scale)
        consistency = consistency_losses(model, states[1:], batch["next_obs"])
        losses["consistency"] = (weight[1:] * batch["policy_mask"][:, 1:] * consistency).sum(1)
        return losses, error


def value_prefixes(reward: Tensor, horizon: int) -> Tensor:
    """[B, K] Sums of rewards [B, K] since the last reset of the LSTM."""
    return torch.cat([part.cumsum(1) for part in torch.split(reward, horizon, 1)], 1)


def consistency_losses(model: EfficientZeroModel, predicted: list[Tensor], next_obs: Any) -> Tensor:
    """[B, K] The consistency losses of K predicted states [B, S] and the encoded next observations [B * K, ...]."""
    states = torch.stack(predicted, 1)
    with torch.no_grad():
        encoded = model.represent(next_obs)
    return model.consistency_loss(states.flatten(0, 1), encoded).view(states.shape[:2])
