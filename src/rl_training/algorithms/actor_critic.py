"""What the on-policy algorithms share: a policy and value function that act, GAE, one optimizer, the state to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Tunable, scalar, setting
from rl_training.algorithms.optim import Adam, FlatParameters, MeanMetrics, Optimizer
from rl_training.data.batch import flatten, to_device
from rl_training.data.fields import NUMBER
from rl_training.data.rollout import Rollout
from rl_training.models.acting import make_forward
from rl_training.models.actor_critic import ActorCritic
from rl_training.ops.distributions import Distribution
from rl_training.ops.returns import gae
from rl_training.types import Batch, Decision, Field, Observation, Spaces, State

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ActorCriticHyperparameters:
    num_steps: int = setting(128, "rollout length: env steps collected in each environment before an update", low=1)
    hidden_sizes: tuple[int, ...] = setting((64, 64), "hidden layer sizes; unused for a single image")
    activation: Literal["tanh", "relu", "elu", "silu"] = setting("tanh", "activation function of the hidden layers")
    log_std_init: float = setting(0.0, "initial log standard deviation of continuous actions")
    deterministic_eval: bool = setting(
        True, "evaluate the most likely action; False: sample (usual for Atari)", atari=False
    )
    learning_rate: float = scalar(3e-4, "learning rate of the optimizer")
    gamma: float = scalar(0.99, "discount factor", high=1.0)
    gae_lambda: float = scalar(0.95, "GAE lambda; 0: one-step TD advantage, 1: Monte Carlo advantage", high=1.0)
    ent_coef: float = scalar(0.0, "entropy bonus coefficient", atari=0.01)
    vf_coef: float = scalar(0.5, "value loss coefficient; the value loss is the mean squared error")
    max_grad_norm: float | None = scalar(0.5, "gradient clipping norm; None: no clipping")


class ActorCriticAlgorithm(Tunable):
    hp: Any
    gradient_steps: int = 0

    def __init__(
        self,
        model: ActorCritic,
        hp: ActorCriticHyperparameters,
        *,
        rng: np.random.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self.hp, self.rng, self.device = hp, rng, torch.device(device)
        self.model = model.to(self.device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = self.make_optimizer(FlatParameters(self.model.parameters()))
        self.forward = make_forward(model.encoder, model.policy, model.critic)

    @classmethod
    def build(
        cls, spaces: Spaces, hp: ActorCriticHyperparameters, *, rng: np.random.Generator, device: torch.device
    ) -> Self:
        """The algorithm with a fresh model for these spaces."""
        model = ActorCritic(spaces, hp.hidden_sizes, hp.activation, log_std_init=hp.log_std_init)
        return cls(model, hp, rng=rng, device=device)

    def make_optimizer(self, parameters: FlatParameters) -> Optimizer:
        return Adam(parameters)

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        output, value = self.forward(obs)
        policy = self.model.acting_policy(output)
        explore = explore or not self.hp.deterministic_eval
        action = policy.sample(policy.noise(rng)) if explore else policy.mode
        logprob = policy.log_prob(action)
        if isinstance(action, Tensor):
            action, logprob = action.numpy(), logprob.numpy()
        return Decision(action, memory, {"logprob": logprob, "value": value[:, 0]})

    def extra_fields(self) -> dict[str, Field]:
        return {"logprob": NUMBER, "value": NUMBER}

    def learning_batch(self, rollout: Rollout, metrics: MeanMetrics) -> Batch:
        """The rollout as a flat batch on the device, with `advantage` and the value's `target`."""
        data = to_device(rollout.batch, self.device)
        advantage = self.advantages(rollout, data)
        target = advantage + data["value"]
        metrics.add(explained_variance=explained_variance(data["value"], target))
        return flatten({**self.learned_from(data), "advantage": advantage, "target": target})

    def learned_from(self, batch: Batch) -> Batch:
        """The entries that the loss reads."""
        return {key: batch[key] for key in ("obs", "action", "logprob", "value")}

    def advantages(self, rollout: Rollout, data: Batch) -> Tensor:
        """[T, N] advantages of the actions taken; `data` is the rollout on the device."""
        _, _, after = rollout.ends()
        end_value = self.values(after["obs"]) if after else data["value"].new_empty(0)
        return gae(
            data["reward"],
            data["value"],
            rollout.next_value(data["value"], end_value),
            data["terminated"],
            data["truncated"],
            gamma=self.hp.gamma,
            gae_lambda=self.hp.gae_lambda,
        )

    @torch.no_grad()
    def values(self, obs: Any) -> Tensor:
        """[M] values of observations [M, ...]."""
        return self.model.value(to_device(obs, self.device))

    def state_dict(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.bit_generator.state,
            "gradient_steps": self.gradient_steps,
        }

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = state["rng"]
        self.gradient_steps = state["gradient_steps"]


def mean_entropy(policy: Distribution, ent_coef: float) -> Tensor:
    with torch.set_grad_enabled(ent_coef != 0):  # without weight it is only reported
        return cast(Tensor, policy.entropy().mean())


def total_loss(policy_loss: Tensor, value_loss: Tensor, entropy: Tensor, hp: ActorCriticHyperparameters) -> Tensor:
    loss = policy_loss + hp.vf_coef * value_loss
    return loss - hp.ent_coef * entropy if hp.ent_coef else loss


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """1 - Var[target - value] / Var[target]: 1 is perfect, 0 as good as a constant."""
    variance = target.var(correction=0)
    return torch.where(variance > 0, 1.0 - (target - value).var(correction=0) / variance, 0.0)
