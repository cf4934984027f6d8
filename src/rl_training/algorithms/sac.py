"""Soft actor-critic with a learned temperature (Haarnoja et al., arXiv:1812.05905)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, FlatParameters, descend
from rl_training.algorithms.replay_based import ReplayAlgorithm, ReplayHyperparameters
from rl_training.config import InputError
from rl_training.data.batch import to_device
from rl_training.data.replay import Replay
from rl_training.models.acting import make_forward
from rl_training.models.sac import SACModel
from rl_training.types import Batch, Decision, Observation, Spaces, State

if TYPE_CHECKING:
    from typing_extensions import Self


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


class SAC(ReplayAlgorithm):
    Hyperparameters = SACHyperparameters
    hp: SACHyperparameters

    def __init__(
        self,
        model: SACModel,
        spaces: Spaces,
        hp: SACHyperparameters,
        *,
        rng: np.random.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(spaces, hp, rng=rng, device=device)
        assert spaces.action.shape is not None
        self.action_shape, self.action_size = spaces.action.shape, math.prod(spaces.action.shape)
        self.model = model.to(self.device)
        self.actor, self.critic, self.target_critic = model.actor, model.critic, model.target_critic
        self.log_alpha = model.log_alpha
        self.actor_optimizer = Adam(FlatParameters(self.actor.parameters()), eps=1e-8)
        self.critic_optimizer = Adam(FlatParameters(self.critic.parameters()), eps=1e-8)
        self.alpha_optimizer = Adam(FlatParameters([self.log_alpha]), eps=1e-8)
        self.target = FlatParameters(self.target_critic.parameters())
        self.target_critic.requires_grad_(False)
        self.num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.forward = make_forward(self.actor.encoder, self.actor.network)

    @classmethod
    def build(cls, spaces: Spaces, hp: SACHyperparameters, *, rng: np.random.Generator, device: torch.device) -> Self:
        """The algorithm with a fresh model for these spaces."""
        if not (isinstance(spaces.action, gym.spaces.Box) and spaces.action.shape):
            raise InputError(
                f"soft actor-critic acts in Box spaces of floats with at least one axis, not {spaces.action}: use dqn "
                "or ppo, or a gymnasium.ActionWrapper that offers such a Box"
            )
        model = SACModel(spaces, hp.hidden_sizes, hp.activation, initial_alpha=hp.initial_alpha)
        return cls(model, spaces, hp, rng=rng, device=device)

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        (output,) = self.forward(obs)
        policy = self.actor.policy(output)
        explore = explore or not self.hp.deterministic_eval
        action = policy.sample(policy.noise(rng)) if explore else policy.mode
        return Decision(action.reshape(len(action), *self.action_shape), memory, {})

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        return self.update(self.sample(replay))

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of alpha, the critics and the actor, in this order; both losses weigh entropy with the old alpha."""
        hp = self.hp
        shape = (2, len(batch["reward"]), self.action_size)
        noise = to_device(torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32)), self.device)
        action, log_prob = self.actor(batch["obs"]).sample_with_log_prob(noise[0])
        alpha, report = self.alpha_step(log_prob.detach().mean())

        target = self.targets(batch, alpha, noise[1])
        q = self.critic(batch["obs"], batch["action"].flatten(1))
        critic_loss = F.mse_loss(q, target.expand_as(q))  # half the sum of both critics' errors
        critic_lr = hp.learning_rate if hp.critic_learning_rate is None else hp.critic_learning_rate
        descend(self.critic_optimizer, critic_loss, lr=critic_lr)

        value = torch.minimum(*self.critic(batch["obs"], action))
        actor_loss = (alpha * log_prob - value).mean()
        descend(self.actor_optimizer, actor_loss, lr=hp.learning_rate)

        self.target.vector.lerp_(self.critic_optimizer.parameters.vector, hp.tau)
        losses = {"actor_loss": actor_loss, "critic_loss": critic_loss, "q_value": q.mean()}
        return report | {name: value.detach() for name, value in losses.items()}

    def alpha_step(self, log_prob: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """(alpha as it was before the step, reports); `log_prob` is the mean over the batch.

        The loss is -log(alpha) (log_prob + target_entropy): the paper's eq. 18 has alpha in place of its logarithm.
        """
        hp, entropy = self.hp, -log_prob
        if hp.alpha is not None:
            return hp.alpha, {"entropy": entropy}
        alpha = self.log_alpha.detach().exp()
        target_entropy = -float(self.action_size) if hp.target_entropy is None else hp.target_entropy
        loss = self.log_alpha * (entropy - target_entropy)
        lr = hp.learning_rate if hp.alpha_learning_rate is None else hp.alpha_learning_rate
        descend(self.alpha_optimizer, loss, lr=lr)
        report = {"entropy": entropy, "alpha": alpha, "alpha_loss": loss.detach()}
        return alpha, report | {"target_entropy": torch.full_like(entropy, target_entropy)}

    @torch.no_grad()
    def targets(self, batch: Batch, alpha: Tensor | float, noise: Tensor) -> Tensor:
        """[B] reward + discount * (min Q'(s', a') - alpha log pi(a'|s')), a' by the actor as it is now (eq. 3, 5)."""
        action, log_prob = self.actor(batch["next_obs"]).sample_with_log_prob(noise)
        value: Tensor = torch.minimum(*self.target_critic(batch["next_obs"], action)) - alpha * log_prob
        return torch.addcmul(batch["reward"], batch["discount"], value)

    def state_dict(self) -> State:
        return super().state_dict() | {
            "model": self.model.state_dict(),
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "alpha_optimizer": self.alpha_optimizer.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state["model"])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.alpha_optimizer.load_state_dict(state["alpha_optimizer"])
