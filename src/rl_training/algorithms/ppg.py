"""Phasic policy gradient (Cobbe et al., arXiv:2009.04416): PPO, interrupted by phases that train the policy's network
on values.

Where this leaves the paper: a minibatch of the auxiliary phase is made of single steps, not of whole rollouts, which
only recurrent networks need. With `detach`, values train the shared trunk through the auxiliary head, as in the
published code; the paper has no such head there. Gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_training.acting.actor import PhasicActor
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, Jointly, MeanMetrics, Optimizer, gradient_step
from rl_training.algorithms.ppo import PPO, PPOHyperparameters, normalize
from rl_training.data.batch import row_minibatches, rows_of, to_device
from rl_training.data.fields import field_of
from rl_training.data.history import num_rows
from rl_training.data.phase import Phase
from rl_training.data.rollout import Rollout
from rl_training.models.actor_critic import ActorCritic, parameter_groups
from rl_training.models.parameters import FlatParameters
from rl_training.models.phasic import PhasicActorCritic
from rl_training.ops.distributions import Distribution, mean_kl
from rl_training.types import Batch, Metrics, State


@dataclass(frozen=True)
class PPGHyperparameters(PPOHyperparameters):
    """The policy phase is that of `ppo` by default; with Atari frames it has the constants of the paper for Procgen."""

    architecture: Literal["dual", "detach"] = setting(
        "dual",
        "dual: a network each for policy and value; detach: one, whose trunk gets no gradient of the value function",
    )
    num_steps: int = setting(256, "rollout length: env steps collected in each environment before an update", low=1)
    learning_rate: float = scalar(3e-4, "learning rate; default for the auxiliary phase", atari=5e-4)
    clip_coef: float = scalar(0.2, "PPO clip range: probability ratios are clipped to 1 ± this")
    num_minibatches: int = scalar(32, "minibatches (gradient steps) per epoch of the policy phase", low=1, atari=8)
    update_epochs: int = scalar(10, "epochs of the policy (passes over the rollout) per update", low=1, atari=1)
    value_epochs: int = scalar(10, "epochs of the value function per update", low=1, atari=1)
    normalize_over: Literal["rollout", "minibatch"] = setting(
        "rollout",
        "scope of advantage normalization: whole rollout or each minibatch",
        needs=("normalize_advantage", True),
    )
    policy_phase_updates: int = setting(
        8, "updates (rollouts) of a policy phase; an auxiliary phase follows", low=1, atari=32
    )
    aux_epochs: int = scalar(6, "epochs of an auxiliary phase; 0: no auxiliary phase", low=0)
    aux_num_minibatches: int = scalar(16, "minibatches per auxiliary epoch, for each rollout of the phase", low=1)
    aux_learning_rate: float | None = scalar(None, "learning rate of the auxiliary phase; None: learning_rate")
    beta_clone: float = scalar(1.0, "weight of KL(old policy || policy) in the auxiliary loss")


class PPG(PPO):
    Hyperparameters = PPGHyperparameters
    hp: PPGHyperparameters
    model: PhasicActorCritic

    def __init__(self, actor: PhasicActor, hp: PPGHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.phase = Phase(hp.policy_phase_updates, field_of(actor.spaces.observation))

    def make_optimizers(self, parameters: FlatParameters) -> dict[str, Optimizer]:
        """In the policy phase policy and value share no parameter that both train."""
        groups = parameter_groups(self.model)
        policy, value = (Adam(parameters.group(groups[name])) for name in ("policy", "value"))
        self.both = Jointly(parameters.group([*groups["policy"], *groups["value"]]), [policy, value])
        return {"policy": policy, "value": value, "auxiliary": Adam(parameters)}

    def update(self, rollout: Rollout) -> Metrics:
        """An update of the policy phase, and if it is the phase's last one the auxiliary phase."""
        hp, metrics = self.hp, MeanMetrics()
        batch = self.learning_batch(rollout, metrics)
        self.phase.add({"obs": rollout.batch["obs"], "target": batch["target"]})
        if hp.normalize_advantage and hp.normalize_over == "rollout":
            batch["advantage"] = normalize(batch["advantage"].flatten()).view_as(batch["advantage"])
        self.optimize(batch, metrics)
        if self.phase.full:
            if hp.aux_epochs:
                self.auxiliary_phase(metrics)
            self.phase.clear()
        return metrics.mean()

    def minibatch_advantage(self, advantage: Tensor) -> Tensor:
        return advantage if self.hp.normalize_over == "rollout" else super().minibatch_advantage(advantage)

    def steps(self, batch: Batch) -> Iterator[tuple[Optimizer, Batch]]:
        """Policy and value are trained together until the one with fewer epochs has had them."""
        epochs = {"policy": int(self.hp.update_epochs), "value": int(self.hp.value_epochs)}
        longer = max(epochs, key=lambda name: epochs[name])
        for epoch in range(epochs[longer]):
            optimizer = self.both if epoch < min(epochs.values()) else self.optimizers[longer]
            for minibatch in self.epoch(batch):
                yield optimizer, minibatch

    def auxiliary_phase(self, metrics: MeanMetrics) -> None:
        """Train all networks on the value targets of the phase, and hold the policy to what it is now."""
        hp, samples = self.hp, self.phase.samples()
        count = int(hp.aux_num_minibatches) * self.phase.num_rollouts
        lr = hp.learning_rate if hp.aux_learning_rate is None else hp.aux_learning_rate
        old = FixedPolicy(self.model, samples["obs"], count)
        for _ in range(int(hp.aux_epochs)):
            for minibatch in row_minibatches({**samples, "output": old.output}, count, self.rng):
                minibatch = to_device(minibatch, self.device)
                loss = self.auxiliary_loss(minibatch, old.of(minibatch["output"]), metrics)
                optimizer = self.optimizers["auxiliary"]
                norm = gradient_step(optimizer, loss, lr=lr, max_grad_norm=hp.max_grad_norm)
                metrics.add(aux_grad_norm=norm)
                self.gradient_steps += 1
        metrics.add(aux_kl=old.kl(self.model, samples["obs"], count))

    def auxiliary_loss(self, batch: Batch, old: Distribution, metrics: MeanMetrics) -> Tensor:
        """1/2 (V_aux - target)^2 + beta_clone KL(old || policy) + 1/2 (V - target)^2, with the stored targets."""
        policy, value, auxiliary_value = self.model.with_auxiliary(batch["obs"])
        aux_value_loss = 0.5 * (auxiliary_value - batch["target"]).square().mean()
        clone_loss = mean_kl(old, policy)
        value_loss = 0.5 * (value - batch["target"]).square().mean()
        metrics.add(aux_value_loss=aux_value_loss, aux_clone_loss=clone_loss, aux_true_value_loss=value_loss)
        loss: Tensor = aux_value_loss + self.hp.beta_clone * clone_loss + value_loss
        return loss

    def state_dict(self) -> State:
        return super().state_dict() | {"phase": self.phase.state_dict()}

    def state_pattern(self) -> State:
        return self.state_dict() | {"phase": self.phase.state_pattern()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.phase.load_state_dict(state["phase"])


class FixedPolicy:
    """The policy of a model as it is now, on given observations [M, ...]."""

    def __init__(self, model: ActorCritic, obs: Any, count: int) -> None:
        """count: the parts in which the observations pass through the network, which need not hold all at once."""
        self.make = model.action_head.make
        self.log_std = None if model.log_std is None else model.log_std.detach().clone()
        self.output = policy_outputs(model, obs, count)  # [M, size] in host memory

    def of(self, output: Tensor) -> Distribution:
        """The policy on the observations of these rows [B, size] of `output`."""
        return self.make(output, self.log_std)

    @torch.no_grad()
    def kl(self, model: ActorCritic, obs: Any, count: int) -> Tensor:
        """The mean of KL(this policy || policy of the model)."""
        device = model.value_head.weight.device
        new = self.make(policy_outputs(model, obs, count).to(device), model.log_std)
        return mean_kl(self.of(self.output.to(device)), new)


@torch.no_grad()
def policy_outputs(model: ActorCritic, obs: Any, count: int) -> Tensor:
    """[M, size] in host memory, of observations [M, ...] that pass through the network in `count` parts."""
    device = model.value_head.weight.device
    rows = torch.arange(num_rows(obs)).tensor_split(min(count, num_rows(obs)))
    parts = [rows_of(obs, slice(part[0], part[-1] + 1)) for part in rows]
    return torch.cat([model.policy_output(model.encoder(to_device(part, device))).cpu() for part in parts])
