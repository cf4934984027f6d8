"""Trust region policy optimization (Schulman et al., arXiv:1502.05477)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.actor_critic import ActorCriticLearner, OnPolicyHyperparameters, mean_entropy
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, MeanMetrics, Optimizer, descend
from rl_training.algorithms.ppo import normalize
from rl_training.data.batch import flatten, row_minibatches, tree_map
from rl_training.data.rollout import Rollout
from rl_training.models.actor_critic import ActorCritic, parameter_groups
from rl_training.models.parameters import FlatParameters
from rl_training.ops.distributions import Distribution, mean_kl
from rl_training.types import Batch, Metrics, TensorTree


@dataclass(frozen=True)
class TRPOHyperparameters(OnPolicyHyperparameters):
    num_steps: int = setting(
        256, "rollout length: env steps collected in each environment before an update", low=1, atari=128
    )
    learning_rate: float = scalar(1e-3, "learning rate of the critic's optimizer; the policy has none")
    ent_coef: float = scalar(0.0, "entropy bonus coefficient in the surrogate objective", atari=0.01)
    max_kl: float = scalar(0.01, "trust region: limit of the mean KL(old || new) of an update")
    cg_iterations: int = scalar(15, "conjugate gradient iterations, each with one Fisher-vector product", low=1)
    cg_damping: float = scalar(0.1, "this times the identity is added to the Fisher matrix")
    fisher_subsample: float = scalar(
        1.0, "share of the rollout that the Fisher matrix is taken from", low=0.01, high=1.0, atari=0.2
    )
    max_line_search_steps: int = scalar(10, "most step sizes that the line search tries", low=1)
    backtrack_coef: float = scalar(0.8, "factor from one step size of the line search to the next", high=1.0)
    critic_epochs: int = scalar(10, "epochs (passes over the rollout) of the critic per update", low=1)
    critic_minibatches: int = scalar(16, "minibatches (gradient steps) of the critic per epoch", low=1)


class TRPO(ActorCriticLearner):
    """A natural gradient step of the policy within a trust region, then several epochs of the critic.

    The critic never moves the policy: where both read an image encoder, it belongs to the policy, and the critic reads
    its features as they are (detached).
    """

    Hyperparameters = TRPOHyperparameters
    hp: TRPOHyperparameters

    def __init__(self, actor: ActorCriticActor, hp: TRPOHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.policy_parameters = actor.parameters.group(parameter_groups(self.model)["policy"])

    def make_optimizers(self, parameters: FlatParameters) -> dict[str, Optimizer]:
        return {"critic": Adam(parameters.group(parameter_groups(self.model)["value"]))}

    def update(self, rollout: Rollout) -> Metrics:
        metrics = MeanMetrics()
        batch = flatten(self.learning_batch(rollout, metrics))
        batch["advantage"] = normalize(batch["advantage"])
        accepted = self.improve_policy(batch, metrics)
        self.fit_critic(batch, metrics)
        self.gradient_steps += int(accepted)
        self.actor.version += 1
        return metrics.mean()

    def improve_policy(self, batch: Batch, metrics: MeanMetrics) -> bool:
        """One step to a better policy within the trust region. Returns whether there was one."""
        policy = self.model.policy(batch["obs"])
        surrogate = self.surrogate(policy, batch)
        gradient = flat_gradient(surrogate, self.policy_parameters)
        with torch.no_grad():
            metrics.add(entropy=policy.entropy().mean())
        step = self.natural_step(gradient, self.fisher_product(batch))
        return self.line_search(step, gradient, surrogate.detach(), batch, metrics)

    def surrogate(self, policy: Distribution, batch: Batch) -> Tensor:
        """E[r A] + ent_coef E[entropy], with the ratios r to the policy that acted (eq. 14, with an entropy bonus)."""
        ratio = (policy.log_prob(batch["action"]) - batch["logprob"]).exp()
        objective: Tensor = (ratio * batch["advantage"]).mean()
        ent_coef = self.hp.ent_coef
        return objective + ent_coef * mean_entropy(policy, ent_coef) if ent_coef else objective

    def fisher_product(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        """v -> (F + cg_damping I) v with the Fisher matrix F of the policy, in the batch or in a sample of it."""
        obs, size = batch["obs"], len(batch["action"])
        if self.hp.fisher_subsample < 1:
            count = math.ceil(self.hp.fisher_subsample * size)
            rows = torch.from_numpy(self.rng.choice(size, count, replace=False)).to(self.device)
            obs = tree_map(lambda x: x.index_select(0, rows), obs)
        product = hessian_product(
            mean_kl(fixed_policy(self.model, obs), self.model.policy(obs)), self.policy_parameters
        )
        return lambda v: product(v).add_(v, alpha=self.hp.cg_damping)

    def natural_step(self, gradient: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """s = sqrt(2 max_kl / x'Ax) x with A x = gradient: the longest step along x that has s'As / 2 = max_kl.

        Zeros where the gradient is zero, or rounding leaves no positive curvature.
        """
        direction = conjugate_gradient(product, gradient, self.hp.cg_iterations)
        curvature = direction.dot(product(direction)).item()
        return direction * (math.sqrt(2 * self.hp.max_kl / curvature) if curvature > 0 else 0.0)

    @torch.no_grad()
    def line_search(
        self, step: Tensor, gradient: Tensor, surrogate: Tensor, batch: Batch, metrics: MeanMetrics
    ) -> bool:
        """Take the largest part backtrack_coef^i of the step that improves the surrogate within the trust region.

        If none of them does, the parameters are restored.
        """
        hp, vector, obs = self.hp, self.policy_parameters.vector, batch["obs"]
        start, old = vector.clone(), fixed_policy(self.model, obs)
        for i in range(hp.max_line_search_steps):
            scale = hp.backtrack_coef**i
            torch.add(start, step, alpha=scale, out=vector)
            new = self.model.policy(obs)
            kl = mean_kl(old, new)
            improvement = self.surrogate(new, batch) - surrogate
            if accepted := bool(kl <= hp.max_kl) and bool(improvement > 0):
                break
        results = {"kl": kl, "surrogate_improvement": improvement, "expected_improvement": scale * gradient.dot(step)}
        if not accepted:
            vector.copy_(start)
            results = {name: torch.zeros_like(kl) for name in results}
        metrics.add(accepted=kl.new_tensor(accepted), line_search_steps=kl.new_tensor(i + 1), **results)
        return accepted

    def fit_critic(self, batch: Batch, metrics: MeanMetrics) -> None:
        """Epochs of minibatch regression on the value targets [B]."""
        with torch.no_grad():  # once for all epochs: an encoder of images does not change
            features = self.model.encoder(batch["obs"])
        data = {"features": features, "target": batch["target"]}
        for _ in range(self.hp.critic_epochs):
            for minibatch in row_minibatches(data, self.hp.critic_minibatches, self.rng):
                loss = F.mse_loss(self.model.value_of(minibatch["features"]), minibatch["target"])
                descend(self.optimizers["critic"], loss, lr=self.hp.learning_rate)
                metrics.add(value_loss=loss)
                self.gradient_steps += 1


@torch.no_grad()
def fixed_policy(model: ActorCritic, obs: TensorTree) -> Distribution:
    """The policies of observations [B, ...] as they are now: nothing of them follows the parameters."""
    output = model.policy_output(model.encoder(obs))
    return model.action_head.make(output, None if model.log_std is None else model.log_std.clone())


def flat_gradient(value: Tensor, parameters: FlatParameters) -> Tensor:
    return parameters.pack(grad(value, parameters.parameters))


def hessian_product(value: Tensor, parameters: FlatParameters) -> Callable[[Tensor], Tensor]:
    """v -> H v with the Hessian H of `value`, by differentiating its gradient once more."""
    weights = parameters.parameters
    gradient = grad(value, weights, create_graph=True)

    def product(v: Tensor) -> Tensor:
        return parameters.pack(grad(gradient, weights, parameters.views(v), retain_graph=True))

    return product


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, *, tolerance: float = 1e-10
) -> Tensor:
    """x with A x = b, for a positive definite A that is given as v -> A v (Hestenes & Stiefel, 1952).

    It ends early where the squared residual is below `tolerance` times that of x = 0, or where rounding makes the
    curvature along a direction non-positive.
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = first = residual.dot(residual).item()
    for _ in range(iterations):
        if square <= tolerance * first:
            break
        image = product(direction)
        curvature = direction.dot(image).item()
        if not curvature > 0:
            break
        x.add_(direction, alpha=square / curvature)
        residual.sub_(image, alpha=square / curvature)
        square, previous = residual.dot(residual).item(), square
        direction = residual + direction * (square / previous)
    return x
