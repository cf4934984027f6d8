"""Soft actor-critic with a learned temperature (Haarnoja et al., arXiv:1812.05905)."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.acting.actor import SquashedGaussianActor
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, descend
from rl_training.algorithms.replay_based import ReplayHyperparameters, ReplayLearner
from rl_training.data.batch import to_device
from rl_training.data.replay import Replay
from rl_training.models.parameters import FlatParameters, num_parameters
from rl_training.models.sac import TwinCritic
from rl_training.types import Batch, State


@dataclass(frozen=True)
class SACHyperparameters(ReplayHyperparameters):
    deterministic_eval: bool = setting(True, "evaluate with the mean action; False: sample from the policy")
    learning_rate: float = scalar(3e-4, "learning rate of the actor; default for critics and alpha")
    critic_learning_rate: float | None = scalar(None, "learning rate of the critics; None: learning_rate")
    alpha: float | None = scalar(None, "entropy coefficient (temperature); auto: learned", auto=True)
    initial_alpha: float = setting(1.0, "initial value of a learned alpha", low=1e-8, needs=("alpha", None))
    alpha_learning_rate: float | None = scalar(
        None, "learning rate of alpha; None: learning_rate", needs=("alpha", None)
    )
    target_entropy: float | None = scalar(
        None,
        "target entropy of a learned alpha, in nats, for actions in [-1, 1]; auto: -(number of action dimensions)",
        low=-math.inf,
        auto=True,
        needs=("alpha", None),
    )


class SAC(ReplayLearner[Replay]):
    Hyperparameters = SACHyperparameters
    hp: SACHyperparameters
    actor: SquashedGaussianActor

    def __init__(self, actor: SquashedGaussianActor, hp: SACHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.policy, self.action_size = actor.model, math.prod(actor.spaces.action.shape or ())
        self.critic = TwinCritic(actor.spaces, hp.hidden_sizes, hp.activation).to(self.device)
        self.target_critic = deepcopy(self.critic)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(hp.initial_alpha), device=self.device))
        self.target = FlatParameters(self.target_critic.parameters())
        self.target_critic.requires_grad_(False)
        self.num_parameters += num_parameters(self.critic) + 1
        self.optimizers = {
            "policy": Adam(actor.parameters, eps=1e-8),
            "critic": Adam(FlatParameters(self.critic.parameters()), eps=1e-8),
            "alpha": Adam(FlatParameters([self.log_alpha]), eps=1e-8),
        }

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        return self.update(self.sample(replay))

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Take one step on alpha, critics and actor, in this order. Both losses use alpha before its step."""
        hp = self.hp
        shape = (2, len(batch["reward"]), self.action_size)
        noise = to_device(torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32)), self.device)
        action, log_prob = self.policy(batch["obs"]).sample_with_log_prob(noise[0])
        alpha, report = self.alpha_step(log_prob.detach().mean())

        target = self.targets(batch, alpha, noise[1])
        q = self.critic(batch["obs"], batch["action"].flatten(1))
        critic_loss = F.mse_loss(q, target.expand_as(q))  # half the sum of both critics' losses
        critic_lr = hp.learning_rate if hp.critic_learning_rate is None else hp.critic_learning_rate
        descend(self.optimizers["critic"], critic_loss, lr=critic_lr)

        value = torch.minimum(*self.critic(batch["obs"], action))
        actor_loss = (alpha * log_prob - value).mean()
        descend(self.optimizers["policy"], actor_loss, lr=hp.learning_rate)

        self.target.vector.lerp_(self.optimizers["critic"].parameters.vector, hp.tau)
        losses = {"actor_loss": actor_loss, "critic_loss": critic_loss, "q_value": q.mean()}
        return report | {name: value.detach() for name, value in losses.items()}

    def alpha_step(self, log_prob: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Returns (alpha before the step, metrics). `log_prob` is the mean over the batch.

        The loss is -log(alpha) (log_prob + target_entropy). The paper's eq. 18 has alpha instead of log(alpha).
        """
        hp, entropy = self.hp, -log_prob
        if hp.alpha is not None:
            return hp.alpha, {"entropy": entropy}
        alpha = self.log_alpha.detach().exp()
        target_entropy = -float(self.action_size) if hp.target_entropy is None else hp.target_entropy
        loss = self.log_alpha * (entropy - target_entropy)
        lr = hp.learning_rate if hp.alpha_learning_rate is None else hp.alpha_learning_rate
        descend(self.optimizers["alpha"], loss, lr=lr)
        report = {"entropy": entropy, "alpha": alpha, "alpha_loss": loss.detach()}
        return alpha, report | {"target_entropy": torch.full_like(entropy, target_entropy)}

    @torch.no_grad()
    def targets(self, batch: Batch, alpha: Tensor | float, noise: Tensor) -> Tensor:
        """[B] reward + discount * (min Q'(s', a') - alpha log pi(a'|s')), with a' from the current actor (eq. 3, 5)."""
        action, log_prob = self.policy(batch["next_obs"]).sample_with_log_prob(noise)
        value: Tensor = torch.minimum(*self.target_critic(batch["next_obs"], action)) - alpha * log_prob
        return torch.addcmul(batch["reward"], batch["discount"], value)

    def state_dict(self) -> State:
        return super().state_dict() | {
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "log_alpha": self.log_alpha.detach(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.critic.load_state_dict(state["critic"])
        self.target_critic.load_state_dict(state["target_critic"])
        self.log_alpha.data.copy_(state["log_alpha"])
