"""APPO: PPO's clipped objective on steps of older policies, with V-trace and a target network.

Three policies take part: mu, which acted and may be some updates old; pi_target, a copy of the learner's network that
follows it every `target_update_period` updates; and pi, which is trained. Each ratio has mu in its denominator:

- V-trace (Espeholt et al., arXiv:1802.01561) weights by pi_target / mu and takes values of the target network. Targets
  and advantages are computed once for an update, and its passes do not change them.
- The objective clips pi / mu to 1 +- `clip_coef`, as PPO does: steps of an old policy move the new one only while it is
  near the policy that acted. The advantage carries no ratio of its own, so none enters twice.

If mu is the policy before the update and the target network equals it, as without lag and with the defaults, all ratios
of the first pass are 1, V-trace is GAE, and an update is PPO's. IMPACT (Luo et al., arXiv:1912.00167), from which the
target network is taken, clips around the target policy instead: pi / pi_target.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_training.acting.actor import VersionedActor
from rl_training.algorithms.actor_critic import explained_variance, policy_lag
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import MeanMetrics, soft_update
from rl_training.algorithms.ppo import PPO, PPOHyperparameters
from rl_training.data.batch import flatten, to_device
from rl_training.data.rollout import Rollout
from rl_training.ops.vtrace import vtrace
from rl_training.types import Batch, Metrics, State


@dataclass(frozen=True)
class APPOHyperparameters(PPOHyperparameters):
    gae_lambda: float = scalar(0.95, "V-trace lambda; without lag that of GAE", high=1.0)
    target_kl: float | None = scalar(
        None, "KL limit: stop an update above approximate KL(acting || current) 1.5 * this; None: no limit"
    )
    correction: bool = setting(
        True, "ratios to the policy that acted; False: take all actions for those of the target network's policy"
    )
    rho_bar: float = scalar(1.0, "V-trace clip of the ratio in a TD error", needs=("correction", True))
    c_bar: float = scalar(
        1.0, "V-trace clip of the ratio that a trace is multiplied by; at most rho_bar", needs=("correction", True)
    )
    target_update_period: int = scalar(1, "updates from one update of the target network to the next", low=1)
    tau: float = scalar(1.0, "soft update (Polyak) coefficient of the target network; 1: copy the weights", high=1.0)


class APPO(PPO):
    Hyperparameters = APPOHyperparameters
    hp: APPOHyperparameters

    def __init__(self, actor: VersionedActor, hp: APPOHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.target_model = deepcopy(self.model).requires_grad_(False)

    def update(self, rollout: Rollout) -> Metrics:
        metrics = super().update(rollout)
        if self.actor.version % int(self.hp.target_update_period) == 0:  # one version for each update
            soft_update(self.target_model, self.model, self.hp.tau)
        return metrics

    @torch.no_grad()
    def learning_batch(self, rollout: Rollout, metrics: MeanMetrics) -> Batch:
        """The rollout [T, N, ...] on the device, with `advantage`, value `target` and the target network's `value`."""
        data = to_device(rollout.batch, self.device)
        flat = flatten({key: data[key] for key in ("obs", "action")})
        policy, value = self.target_model(flat["obs"])
        value, log_prob = value.view_as(data["reward"]), policy.log_prob(flat["action"]).view_as(data["reward"])
        bars = {"rho_bar": self.hp.rho_bar, "c_bar": self.hp.c_bar} if self.hp.correction else {}
        if not self.hp.correction:
            data = {**data, "logprob": log_prob}
        _, _, after = rollout.ends()
        target, advantage = vtrace(
            log_prob - data["logprob"],
            data["reward"],
            value,
            rollout.next_value(value, self.end_values(after) if after else value.new_empty(0)),
            data["terminated"],
            data["truncated"],
            gamma=self.hp.gamma,
            gae_lambda=self.hp.gae_lambda,
            **bars,
        )
        metrics.add(explained_variance=explained_variance(value, target))
        metrics.add(**policy_lag(self.actor.version, data["version"]))
        return {**data, "value": value, "advantage": advantage, "target": target}

    def end_values(self, after: Batch) -> Tensor:
        value: Tensor = self.target_model.value(to_device(after["obs"], self.device))
        return value

    def state_dict(self) -> State:
        return super().state_dict() | {"target_model": self.target_model.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.target_model.load_state_dict(state["target_model"])
