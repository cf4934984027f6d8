"""Generative adversarial imitation learning (Ho & Ermon, arXiv:1606.03476).

A discriminator learns to tell the steps of an expert from those of the policy, the generator. Its judgement is the only
reward of the generator, which is another on-policy algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.actor_critic import ActorCriticLearner
from rl_training.algorithms.base import Learner, inherited, scalar, setting
from rl_training.algorithms.optim import Adam, MeanMetrics, Optimizer, gradient_step
from rl_training.algorithms.ppo import PPO, PPOHyperparameters
from rl_training.algorithms.trpo import TRPO, TRPOHyperparameters
from rl_training.data.batch import flatten, rows_of, to_device, tree_map
from rl_training.data.demonstrations import Demonstrations
from rl_training.data.normalize import EPSILON, Normalizer, RunningMeanStd
from rl_training.data.rollout import Rollout
from rl_training.envs.demonstrations import in_model_spaces
from rl_training.errors import ConfigError, InputError
from rl_training.models.discriminator import Discriminator, Points, gradient_penalty, interpolate
from rl_training.models.parameters import FlatParameters
from rl_training.ops.distributions import Bernoulli
from rl_training.types import Batch, Metrics, State

FOR_PPO, FOR_TRPO = ("generator", "ppo"), ("generator", "trpo")
ROWS = 4096  # that the discriminator rates at a time: images take much memory
LIMIT = 10.0  # of the normalised reward


@dataclass(frozen=True)
class GAILHyperparameters(PPOHyperparameters):
    demonstrations: str | None = setting(
        None, "the expert's episodes: a file of `rl-training demos`, minari:NAME or a Minari folder"
    )
    generator: Literal["ppo", "trpo"] = setting("ppo", "algorithm that trains the policy")
    reward: Literal["softplus", "logit", "log_d"] = setting(
        "softplus", "learned reward: softplus -log(1 - D), always >= 0; logit: any sign; log_d log D, always <= 0"
    )
    center_reward: bool = setting(
        True, "subtract the reward's running mean; False: its sign rewards long episodes, or short ones"
    )
    disc_hidden_sizes: tuple[int, ...] = setting((64, 64), "hidden layer sizes of the discriminator", low=1)
    disc_learning_rate: float = scalar(1e-3, "learning rate of the discriminator")
    disc_updates: int = scalar(32, "gradient steps of the discriminator per rollout", low=1)
    disc_batch_size: int = scalar(256, "discriminator batch size: steps of the expert, and as many others", low=1)
    gradient_penalty: float = scalar(0.0, "gradient penalty coefficient of the discriminator; 0: none")
    disc_ent_coef: float = scalar(0.01, "entropy bonus coefficient of the discriminator")
    vf_coef: float = inherited(PPOHyperparameters, "vf_coef", needs=FOR_PPO)
    max_grad_norm: float | None = inherited(PPOHyperparameters, "max_grad_norm", needs=FOR_PPO)
    clip_coef: float = inherited(PPOHyperparameters, "clip_coef", needs=FOR_PPO)
    clip_vf_coef: float | None = inherited(PPOHyperparameters, "clip_vf_coef", needs=FOR_PPO)
    target_kl: float | None = inherited(PPOHyperparameters, "target_kl", needs=FOR_PPO)
    update_epochs: int = inherited(PPOHyperparameters, "update_epochs", needs=FOR_PPO)
    num_minibatches: int = inherited(PPOHyperparameters, "num_minibatches", needs=FOR_PPO)
    normalize_advantage: bool = inherited(PPOHyperparameters, "normalize_advantage", needs=FOR_PPO)
    max_kl: float = inherited(TRPOHyperparameters, "max_kl", needs=FOR_TRPO)
    cg_iterations: int = inherited(TRPOHyperparameters, "cg_iterations", needs=FOR_TRPO)
    cg_damping: float = inherited(TRPOHyperparameters, "cg_damping", needs=FOR_TRPO)
    fisher_subsample: float = inherited(TRPOHyperparameters, "fisher_subsample", needs=FOR_TRPO)
    max_line_search_steps: int = inherited(TRPOHyperparameters, "max_line_search_steps", needs=FOR_TRPO)
    backtrack_coef: float = inherited(TRPOHyperparameters, "backtrack_coef", needs=FOR_TRPO)
    critic_epochs: int = inherited(TRPOHyperparameters, "critic_epochs", needs=FOR_TRPO)
    critic_minibatches: int = inherited(TRPOHyperparameters, "critic_minibatches", needs=FOR_TRPO)


GENERATORS: dict[str, type[ActorCriticLearner]] = {"ppo": PPO, "trpo": TRPO}


class GAIL(Learner):
    """The generator shares the actor. Demonstrations are needed to learn, not to act.

    Where the policy sees normalised observations, `normalizer` must be the one that normalises them.
    """

    Hyperparameters = GAILHyperparameters
    hp: GAILHyperparameters
    normalizer: Normalizer | None = None

    def __init__(
        self,
        actor: ActorCriticActor,
        hp: GAILHyperparameters,
        *,
        rng: np.random.Generator,
        demonstrations: Demonstrations,
    ) -> None:
        super().__init__(actor, hp, rng=rng)
        try:
            self.expert_obs, self.expert_action = in_model_spaces(demonstrations, actor.spaces)
        except InputError as error:
            raise ConfigError.of(str(error), "algo_kwargs", "demonstrations") from error
        self.checksum = demonstrations.checksum
        self.generator = GENERATORS[hp.generator](actor, hp, rng=rng)
        self.discriminator = Discriminator(actor.spaces, hp.disc_hidden_sizes, hp.activation).to(self.device)
        disc_optimizer = Adam(FlatParameters(self.discriminator.parameters()))
        self.optimizers: dict[str, Optimizer] = {**self.generator.optimizers, "discriminator": disc_optimizer}
        self.inputs = RunningMeanStd((self.discriminator.vector_size,))
        self.rewards = RunningMeanStd()

    def update(self, rollout: Rollout) -> Metrics:
        """Rate the rollout, let the generator learn from these rewards, then teach the discriminator.

        The paper rates with the discriminator that has learned from the same rollout. Its judgement of steps that it
        was just fitted to is worse than that of new ones, so this one rates before it learns.
        """
        metrics = MeanMetrics()
        batch = {key: rollout.batch[key] for key in ("obs", "action")}
        steps = flatten(to_device(batch, self.device))
        self.observe(steps)
        reward = self.rate(steps)
        metrics.add(learned_reward=reward.mean())
        rollout.batch["reward"].copy_(self.normalized(reward).view_as(rollout.batch["reward"]))
        self.generator.hp = self.hp
        report = self.generator.update(rollout)
        self.gradient_steps = self.generator.gradient_steps
        for _ in range(int(self.hp.disc_updates)):
            self.discriminate(steps, metrics)
        return report | metrics.mean()

    def observe(self, steps: Batch) -> None:
        """Update the statistics of the discriminator's input with the rollout and as many steps of the expert."""
        expert = self.draw_expert(len(steps["action"]))
        for rows in (expert, steps):
            self.inputs.update(self.discriminator.vector(rows["obs"], rows["action"]).cpu().numpy())
        self.discriminator.use_statistics(self.inputs.mean, np.sqrt(self.inputs.var + EPSILON))

    @torch.no_grad()
    def rate(self, steps: Batch) -> Tensor:
        """[B] The learned reward of steps [B, ...]."""
        parts = [rows_of(steps, slice(i, i + ROWS)) for i in range(0, len(steps["action"]), ROWS)]
        return torch.cat([learned_reward(self.discriminator(self.points(part)), self.hp.reward) for part in parts])

    def normalized(self, reward: Tensor) -> Tensor:
        """Rewards divided by their running deviation, on the CPU. The statistics are updated first."""
        values = reward.cpu().numpy()
        self.rewards.update(values)
        shift = self.rewards.mean if self.hp.center_reward else 0.0
        scaled = (values - shift) / np.sqrt(self.rewards.var + EPSILON)
        return torch.from_numpy(scaled.clip(-LIMIT, LIMIT).astype(np.float32))

    def discriminate(self, steps: Batch, metrics: MeanMetrics) -> None:
        """One gradient step of the discriminator, on as many steps of the expert as of the generator."""
        size = int(self.hp.disc_batch_size)
        rows = torch.from_numpy(self.rng.integers(len(steps["action"]), size=size)).to(self.device)
        generated = self.points(rows_of(steps, rows))
        expert = self.points(self.draw_expert(size))
        weight = torch.from_numpy(self.rng.random(size, dtype=np.float32)).to(self.device)
        loss = self.loss(expert, generated, weight, metrics)
        rate = self.hp.disc_learning_rate
        gradient_step(self.optimizers["discriminator"], loss, lr=rate, max_grad_norm=None)

    def loss(self, expert: Points, generated: Points, weight: Tensor, metrics: MeanMetrics) -> Tensor:
        """Cross-entropy with label 1 for the expert, less an entropy bonus, plus a penalty at points between the two.

        weight [B]: the share of the expert's point in each of these.
        """
        hp = self.hp
        logit = self.discriminator(tuple(torch.cat(pair) for pair in zip(expert, generated, strict=True)))
        real, fake = logit.chunk(2)
        cross_entropy = 0.5 * (F.softplus(-real).mean() + F.softplus(fake).mean())
        entropy = Bernoulli(logit.unsqueeze(-1)).entropy().mean()
        loss = cross_entropy - hp.disc_ent_coef * entropy
        if hp.gradient_penalty:
            penalty = gradient_penalty(self.discriminator, interpolate(expert, generated, weight))
            loss = loss + hp.gradient_penalty * penalty
            metrics.add(disc_gradient_penalty=penalty)
        metrics.add(
            disc_loss=cross_entropy,
            disc_entropy=entropy,
            disc_accuracy_expert=(real > 0).float().mean(),
            disc_accuracy_generator=(fake <= 0).float().mean(),
        )
        return loss

    def points(self, steps: Batch) -> Points:
        return self.discriminator.points(steps["obs"], steps["action"])

    def draw_expert(self, size: int) -> Batch:
        """Steps of the expert [B, ...] on the device, observations normalised as the generator's are."""
        rows = self.rng.integers(len(self.expert_action), size=size)
        obs = rows_of(self.expert_obs, rows)
        if self.normalizer is not None:
            obs = self.normalizer.observation(obs)
        tensors: Batch = tree_map(torch.from_numpy, {"obs": obs, "action": self.expert_action[rows]})
        moved: Batch = to_device(tensors, self.device)
        return moved

    def state_dict(self) -> State:
        """The generator has its own optimizers and the random generator, which both share."""
        return {
            "generator": self.generator.state_dict(),
            "discriminator": self.discriminator.state_dict(),
            "disc_optimizer": self.optimizers["discriminator"].state_dict(),
            "inputs": self.inputs.state_dict(),
            "rewards": self.rewards.state_dict(),
            "demonstrations": self.checksum,
        }

    def load_state_dict(self, state: State) -> None:
        if state["demonstrations"] != self.checksum:
            raise InputError(
                f"algo_kwargs.demonstrations: {self.hp.demonstrations} has changed since this was saved: put the old "
                "file back, or train anew"
            )
        self.generator.load_state_dict(state["generator"])
        self.gradient_steps = self.generator.gradient_steps
        self.discriminator.load_state_dict(state["discriminator"])
        self.optimizers["discriminator"].load_state_dict(state["disc_optimizer"])
        self.inputs.load_state_dict(state["inputs"])
        self.rewards.load_state_dict(state["rewards"])


def learned_reward(logit: Tensor, form: str) -> Tensor:
    """-log(1 - D), log D - log(1 - D) or log D of D = sigmoid(logit), the probability that it was the expert.

    Where episodes can end early, the first makes every further step a gain and the last makes it a loss, whoever took
    it: a policy then survives, or ends the episode, without looking like the expert. The second has no such bias.
    """
    return {"softplus": F.softplus(logit), "logit": logit, "log_d": -F.softplus(-logit)}[form]
