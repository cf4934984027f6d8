"""TRPO's update: linear algebra against dense matrices, whole updates against sb3-contrib, and the trust region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, distributions, nn
from torch.func import functional_call, hessian, jacrev

from build import build
from probes import copy_training, random_rollout
from rl_training.algorithms.base import setting
from rl_training.algorithms.optim import MeanMetrics
from rl_training.algorithms.ppo import normalize
from rl_training.algorithms.trpo import (
    TRPO,
    TRPOHyperparameters,
    conjugate_gradient,
    fixed_policy,
    flat_gradient,
    hessian_product,
)
from rl_training.data.batch import flatten
from rl_training.data.rollout import Rollout
from rl_training.models.actor_critic import ActorCritic, parameter_groups
from rl_training.models.parameters import FlatParameters
from rl_training.ops.distributions import Categorical
from rl_training.types import Batch, Spaces
from test_ppo_update import CONTINUOUS, DISCRETE, Nowhere, copy_weights, fill_their_buffer, perturb, their_parameters

IMAGE = Spaces(Box(0, 255, (4, 40, 40), np.uint8), Discrete(4))
ALL_SPACES = {
    "discrete": DISCRETE,
    "continuous": CONTINUOUS,
    "image": IMAGE,
    "several choices": Spaces(
        Dict({"camera": Box(0, 255, (36, 36, 3), np.uint8), "gear": Discrete(3)}), MultiDiscrete([2, 3])
    ),
    "bits": Spaces(Discrete(5), MultiBinary(3)),
    "matrix action": Spaces(MultiDiscrete([2, 3]), Box(-1, 1, (2, 2), np.float32)),
}
every_space = pytest.mark.parametrize("spaces", ALL_SPACES.values(), ids=ALL_SPACES)
discrete_and_continuous = pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])


def make_trpo(spaces: Spaces = DISCRETE, *, seed: int = 0, **changes: Any) -> TRPO:
    torch.manual_seed(seed)
    hp = TRPOHyperparameters(**{"num_steps": 16, "critic_epochs": 2, "critic_minibatches": 2, **changes})
    learner: TRPO = build("trpo", spaces, hp, rng=np.random.default_rng(seed))
    return learner


def policy_bits(learner: TRPO) -> Tensor:
    return learner.policy_parameters.vector.clone()


def critic_bits(learner: TRPO) -> Tensor:
    return learner.optimizers["critic"].parameters.vector.clone()


def batch_of(learner: TRPO, rollout: Rollout) -> Batch:
    batch = flatten(learner.learning_batch(rollout, MeanMetrics()))
    return {**batch, "advantage": normalize(batch["advantage"])}


def torchs(policy: Any) -> Any:
    """torch's own distribution with the same parameters."""
    if isinstance(policy, Categorical):
        return distributions.Categorical(logits=policy.log_probs, validate_args=False)
    normal = distributions.Normal(policy.mean, policy.log_std.exp().expand_as(policy.mean), validate_args=False)
    return distributions.Independent(normal, policy.log_std.ndim, validate_args=False)


def mean_kl(p: Any, q: Any) -> Tensor:
    return distributions.kl_divergence(p, q).mean()


class InDoubles:
    """A small policy in float64 whose dense matrices are affordable."""

    def __init__(self, action: Any) -> None:
        torch.manual_seed(0)
        self.model = ActorCritic(Spaces(Box(-1, 1, (3,), np.float32), action), (4,), log_std_init=-0.3).double()
        self.model.encoder = nn.Identity()  # type: ignore[assignment]  # ours makes float32
        perturb(self.model, 0.3)
        self.obs = torch.randn(9, 3, dtype=torch.float64)
        self.parameters = FlatParameters(self.model.parameters()).group(parameter_groups(self.model)["policy"])
        own = set(map(id, self.parameters.parameters))
        self.shapes = {name: p.shape for name, p in self.model.named_parameters() if id(p) in own}
        self.real = self.parameters.pack([torch.ones_like(p) for p in self.parameters.parameters]).bool()
        self.theta = self.parameters.vector[self.real].clone()  # without the padding

    def torchs(self, theta: Tensor) -> Any:
        """torch's distribution of the policies [B] with these parameters."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        weights = {name: x.view(shape) for (name, shape), x in zip(self.shapes.items(), parts, strict=True)}
        return torchs(functional_call(self.model, weights, (self.obs,))[0])

    def dense_hessian(self) -> Tensor:
        old = self.torchs(self.theta)
        return hessian(lambda theta: mean_kl(old, self.torchs(theta)))(self.theta)

    def product(self) -> Any:
        """Ours, on vectors without the padding."""
        old: Any = fixed_policy(self.model, self.obs)
        padded = hessian_product(old.kl(self.model.policy(self.obs)).mean(), self.parameters)

        def product(v: Tensor) -> Tensor:
            vector = torch.zeros_like(self.parameters.vector)
            vector[self.real] = v
            result = padded(vector)
            assert not result[~self.real].any()
            return result[self.real]

        return product


in_doubles = pytest.mark.parametrize("action", [Discrete(3), Box(-1, 1, (1,), np.float32)], ids=["discrete", "box"])


@in_doubles
def test_the_product_is_that_of_the_hessian_of_the_kl(action: Any) -> None:
    small = InDoubles(action)
    expected, product = small.dense_hessian(), small.product()
    ours = torch.stack([product(v) for v in torch.eye(len(small.theta), dtype=torch.float64)])
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-10)


@in_doubles
def test_the_product_is_that_of_the_expected_outer_product_of_scores(action: Any) -> None:
    """E over actions: exactly for choices, by Gauss-Hermite quadrature for a Gaussian (a polynomial of degree 4)."""
    small = InDoubles(action)
    old = small.torchs(small.theta)
    if isinstance(action, Discrete):
        actions = [torch.full((9,), a) for a in range(int(action.n))]
        weights = [old.log_prob(a).exp() for a in actions]
    else:
        nodes, mass = np.polynomial.hermite_e.hermegauss(5)
        actions = [old.base_dist.loc + old.base_dist.scale * x for x in nodes]
        weights = [torch.full((9,), m / np.sqrt(2 * np.pi), dtype=torch.float64) for m in mass]
    fisher = torch.zeros(len(small.theta), len(small.theta), dtype=torch.float64)
    for a, weight in zip(actions, weights, strict=True):
        score = jacrev(lambda theta, a=a: small.torchs(theta).log_prob(a))(small.theta)  # [B, parameters]
        fisher += torch.einsum("b,bi,bj->ij", weight, score, score) / 9
    product = small.product()
    ours = torch.stack([product(v) for v in torch.eye(len(small.theta), dtype=torch.float64)])
    torch.testing.assert_close(ours, fisher, atol=1e-12, rtol=1e-10)


@in_doubles
@pytest.mark.parametrize("damping", [0.1, 0.01])
def test_conjugate_gradient_solves_what_torch_solves(action: Any, damping: float) -> None:
    small = InDoubles(action)
    dense = small.dense_hessian() + damping * torch.eye(len(small.theta), dtype=torch.float64)
    b, product = torch.randn(len(small.theta), dtype=torch.float64), small.product()
    x = conjugate_gradient(lambda v: product(v) + damping * v, b, 30, tolerance=1e-16)
    expected = torch.linalg.solve(dense, b)
    assert (x - expected).norm() < 1e-4 * expected.norm()
    coarse = conjugate_gradient(lambda v: product(v) + damping * v, b, 2)
    assert (coarse - expected).norm() > 1e-3 * expected.norm()


def test_each_iteration_of_conjugate_gradient_takes_one_product_and_it_ends_when_it_is_done() -> None:
    torch.manual_seed(0)
    root, b, calls = torch.randn(12, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64), []
    matrix = root @ root.T + torch.eye(12)

    def product(v: Tensor) -> Tensor:
        calls.append(v)
        return matrix @ v

    conjugate_gradient(product, b, 5)
    assert len(calls) == 5
    x = conjugate_gradient(product, b, 100, tolerance=1e-20)
    assert len(calls) < 5 + 20
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b), atol=1e-8, rtol=1e-8)
    scaled = conjugate_gradient(product, 1e-9 * b, 100, tolerance=1e-20)  # nothing absolute ends it early
    torch.testing.assert_close(scaled, 1e-9 * x, atol=0, rtol=1e-6)


def test_conjugate_gradient_without_a_positive_curvature_is_finite() -> None:
    b = torch.tensor([1.0, 2.0, -1.0])
    assert not conjugate_gradient(lambda v: v, torch.zeros(3), 10).any()
    assert not conjugate_gradient(torch.zeros_like, b, 10).any()
    assert not conjugate_gradient(lambda v: -v, b, 10).any()
    indefinite = conjugate_gradient(lambda v: v * torch.tensor([1.0, 0.5, -2.0]), b, 10)
    assert indefinite.isfinite().all()


def test_damping_and_a_sample_of_the_rollout_are_in_the_fisher_product() -> None:
    trpo = make_trpo(CONTINUOUS, cg_damping=0.25, fisher_subsample=0.3)
    perturb(trpo.model, 0.2)
    batch = batch_of(trpo, random_rollout(trpo, CONTINUOUS, num_steps=16, num_envs=4))
    state = trpo.rng.bit_generator.state
    v = torch.randn_like(trpo.policy_parameters.vector)
    ours = trpo.fisher_product(batch)(v)
    trpo.rng.bit_generator.state = state
    rows = trpo.rng.choice(64, 20, replace=False)  # ceil(0.3 * 64)
    assert len(set(rows)) == 20

    def expected(obs: Tensor) -> Tensor:
        return torchs_hessian_product(trpo, obs)(v) + 0.25 * v

    torch.testing.assert_close(ours, expected(batch["obs"][rows]), atol=1e-5, rtol=1e-4)
    assert (ours - expected(batch["obs"])).norm() > 1e-2 * ours.norm()


def torchs_hessian_product(trpo: TRPO, obs: Tensor) -> Any:
    with torch.no_grad():
        old = torchs(trpo.model.policy(obs))
    return hessian_product(mean_kl(old, torchs(trpo.model.policy(obs))), trpo.policy_parameters)


@discrete_and_continuous
@pytest.mark.parametrize(("max_kl", "cg_damping"), [(0.01, 0.1), (2.0, 1e-3)], ids=["whole step", "backtracks"])
def test_an_update_is_that_of_sb3_contrib(
    spaces: Spaces, max_kl: float, cg_damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sb3_contrib import TRPO as TheirTRPO
    from sb3_contrib.trpo import trpo as their_module
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    num_envs, num_steps, size = 4, 16, 64
    dims = 2 if spaces is CONTINUOUS else 1  # their KL of Gaussians is a mean over action dimensions, not the sum
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)  # they start conjugate gradient from noise
    kl = their_module.kl_divergence
    monkeypatch.setattr(their_module, "kl_divergence", lambda new, old: kl(old, new))  # theirs is KL(new || old)
    ours = make_trpo(
        spaces, max_kl=max_kl, cg_damping=cg_damping, cg_iterations=9, critic_epochs=5, critic_minibatches=1
    )
    rollout = random_rollout(ours, spaces, num_steps=num_steps, num_envs=num_envs)
    theirs = TheirTRPO(
        "MlpPolicy",
        DummyVecEnv([lambda: Nowhere(spaces)] * num_envs),
        n_steps=num_steps,
        batch_size=size,  # one minibatch: its order decides nothing
        n_critic_updates=5,
        target_kl=max_kl / dims,
        cg_damping=cg_damping / dims,
        cg_max_steps=9,
        device="cpu",
    )
    theirs.set_logger(Logger(None, []))
    copy_weights(ours.model, theirs.policy)
    fill_their_buffer(theirs.rollout_buffer, rollout, ours.end_values(rollout.ends()[2]).numpy())
    policy, critic = policy_bits(ours), critic_bits(ours)
    metrics = ours.update(rollout)
    theirs.train()

    assert metrics["accepted"] == 1
    assert (metrics["line_search_steps"] > 1) == (max_kl > 0.1)
    assert (policy_bits(ours) - policy).abs().max() > 0.01
    assert (critic_bits(ours) - critic).abs().max() > 0.003
    assert metrics["value_loss"] == pytest.approx(theirs.logger.name_to_value["train/value_loss"], rel=1e-4)
    copy = make_trpo(spaces)
    for parameter, expected in zip(copy.model.parameters(), their_parameters(theirs.policy), strict=True):
        parameter.data.copy_(expected)
    torch.testing.assert_close(critic_bits(ours), critic_bits(copy), atol=1e-5, rtol=0)
    # One step size fewer would be a quarter more; rounding in conjugate gradient grows with the step.
    moved = (policy_bits(copy) - policy).norm()
    assert (policy_bits(ours) - policy_bits(copy)).norm() < (1e-3 if max_kl > 0.1 else 1e-4) * moved
    if max_kl < 0.1:
        torch.testing.assert_close(policy_bits(ours), policy_bits(copy), atol=1e-4, rtol=0)


@discrete_and_continuous
@pytest.mark.parametrize(("max_kl", "tolerance"), [(0.01, 0.15), (1e-4, 0.02)])
def test_the_realised_kl_is_half_the_curvature_along_the_step(spaces: Spaces, max_kl: float, tolerance: float) -> None:
    trpo = make_trpo(spaces, max_kl=max_kl, cg_damping=1e-3, backtrack_coef=0.95)
    batch = batch_of(trpo, random_rollout(trpo, spaces, num_steps=64, num_envs=4))
    before, metrics = policy_bits(trpo), MeanMetrics()
    assert trpo.improve_policy(batch, metrics)
    step, seen = policy_bits(trpo) - before, metrics.mean()
    trpo.policy_parameters.vector.copy_(before)
    half = 0.5 * step.dot(torchs_hessian_product(trpo, batch["obs"])(step)).item()
    assert seen["kl"] == pytest.approx(half, rel=tolerance)
    assert 0.7 * max_kl < seen["kl"] <= max_kl
    assert seen["surrogate_improvement"] == pytest.approx(seen["expected_improvement"], rel=2 * tolerance)


@every_space
def test_no_accepted_step_leaves_the_trust_region(spaces: Spaces) -> None:
    trpo, unmoved = (make_trpo(spaces, max_kl=0.05, cg_damping=1e-3, ent_coef=0.01) for _ in range(2))
    for seed in range(3):
        rollout = random_rollout(trpo, spaces, num_steps=8, num_envs=4, seed=seed)
        obs = flatten(rollout.batch)["obs"]
        unmoved.actor.load_state_dict(trpo.actor.state_dict())
        metrics = trpo.update(rollout)
        old: Any = unmoved.model.policy(obs)
        kl = old.kl(trpo.model.policy(obs)).mean().item()
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert kl <= 0.05 + 1e-6
        assert metrics["accepted"] == 1
        assert metrics["surrogate_improvement"] > 0
        assert not torch.equal(policy_bits(unmoved), policy_bits(trpo))


def searched(trpo: TRPO, batch: Batch, step: Tensor) -> dict[str, float]:
    metrics = MeanMetrics()
    with torch.no_grad():
        surrogate = trpo.surrogate(trpo.model.policy(batch["obs"]), batch)
    trpo.line_search(step, torch.ones_like(step), surrogate, batch, metrics)
    return metrics.mean()


@every_space
def test_a_line_search_that_fails_restores_the_policy_to_the_bit(spaces: Spaces) -> None:
    trpo = make_trpo(spaces, max_line_search_steps=3, backtrack_coef=0.5, max_kl=1.0)
    batch = batch_of(trpo, random_rollout(trpo, spaces, num_steps=8, num_envs=4))
    before = policy_bits(trpo)
    gradient = flat_gradient(trpo.surrogate(trpo.model.policy(batch["obs"]), batch), trpo.policy_parameters)
    uphill = 1e-3 * gradient / gradient.norm()
    failed = {"accepted": 0, "kl": 0, "line_search_steps": 3, "surrogate_improvement": 0, "expected_improvement": 0}
    assert searched(trpo, batch, -uphill) == failed  # near enough, but worse
    assert torch.equal(policy_bits(trpo), before)
    trpo.max_kl = 1e-7
    assert searched(trpo, batch, 100 * uphill) == failed  # better, but too far
    assert torch.equal(policy_bits(trpo), before)
    assert searched(trpo, batch, torch.full_like(uphill, torch.nan)) == failed
    assert torch.equal(policy_bits(trpo), before)
    trpo.max_kl = 1.0
    assert searched(trpo, batch, uphill)["line_search_steps"] == 1
    torch.testing.assert_close(policy_bits(trpo), before + uphill)


def test_a_shorter_step_is_a_power_of_the_coefficient_of_the_whole_one() -> None:
    trpo = make_trpo(backtrack_coef=0.6, max_kl=0.02)
    batch = batch_of(trpo, random_rollout(trpo, DISCRETE, num_steps=16, num_envs=4))
    gradient = flat_gradient(trpo.surrogate(trpo.model.policy(batch["obs"]), batch), trpo.policy_parameters)
    step, before = 3 * gradient / gradient.norm(), policy_bits(trpo)
    seen = searched(trpo, batch, step)
    assert seen["accepted"] == 1
    assert 2 <= seen["line_search_steps"] <= 10
    scale = 0.6 ** (seen["line_search_steps"] - 1)
    torch.testing.assert_close(policy_bits(trpo), before + scale * step)
    assert seen["expected_improvement"] == pytest.approx(scale * step.sum().item(), rel=1e-3)


def test_an_update_without_a_step_still_fits_the_critic() -> None:
    trpo = make_trpo(max_kl=0.0)
    policy, critic = policy_bits(trpo), critic_bits(trpo)
    metrics = trpo.update(random_rollout(trpo, DISCRETE, num_steps=16, num_envs=4))
    assert metrics["accepted"] == metrics["kl"] == 0
    assert torch.equal(policy_bits(trpo), policy)
    assert not torch.equal(critic_bits(trpo), critic)
    assert trpo.gradient_steps == 4


@every_space
def test_the_critic_never_moves_the_policy_nor_the_policy_the_critic(spaces: Spaces) -> None:
    trpo = make_trpo(spaces, learning_rate=1e-2)
    data = flatten(trpo.learning_batch(random_rollout(trpo, spaces, num_steps=8, num_envs=4), MeanMetrics()))
    obs = data["obs"]
    policy, critic, values = policy_bits(trpo), critic_bits(trpo), trpo.end_values({"obs": obs})
    assert len(policy) + len(critic) == len(trpo.actor.parameters.vector)
    trpo.fit_critic(data, MeanMetrics())
    assert torch.equal(policy_bits(trpo), policy)
    assert not torch.equal(critic_bits(trpo), critic)
    error = [(x - data["target"]).square().mean() for x in (trpo.end_values({"obs": obs}), values)]
    assert error[0] < error[1]
    critic = critic_bits(trpo)
    batch = {**data, "advantage": normalize(data["advantage"])}
    assert trpo.improve_policy(batch, MeanMetrics())
    assert torch.equal(critic_bits(trpo), critic)
    assert not torch.equal(policy_bits(trpo), policy)


def test_the_encoder_of_images_learns_with_the_policy() -> None:
    trpo = make_trpo(IMAGE)
    before = {name: x.clone() for name, x in trpo.model.named_parameters()}
    trpo.update(random_rollout(trpo, IMAGE, num_steps=8, num_envs=4))
    assert any(name.startswith("encoder") for name in before)
    assert all(not torch.equal(before[name], x) for name, x in trpo.model.named_parameters())


def test_one_action_leaves_nothing_to_improve() -> None:
    spaces = Spaces(DISCRETE.observation, Discrete(1))
    trpo = make_trpo(spaces, ent_coef=0.1)
    before = policy_bits(trpo)
    metrics = trpo.update(random_rollout(trpo, spaces, num_steps=16, num_envs=2))
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["accepted"] == 0
    assert torch.equal(policy_bits(trpo), before)


@discrete_and_continuous
def test_advantages_of_zero_move_nothing(spaces: Spaces) -> None:
    trpo = make_trpo(spaces, cg_damping=0.0)
    batch = batch_of(trpo, random_rollout(trpo, spaces, num_steps=16, num_envs=2))
    metrics, before = MeanMetrics(), policy_bits(trpo)
    assert not trpo.improve_policy({**batch, "advantage": torch.zeros(32)}, metrics)
    assert all(np.isfinite(value) for value in metrics.mean().values())
    assert torch.equal(policy_bits(trpo), before)


@discrete_and_continuous
def test_the_entropy_bonus_is_part_of_the_surrogate(spaces: Spaces) -> None:
    trpo = make_trpo(spaces, ent_coef=0.5)
    batch = batch_of(trpo, random_rollout(trpo, spaces, num_steps=16, num_envs=2))
    perturb(trpo.model, 0.3)
    policy = trpo.model.policy(batch["obs"])
    theirs = torchs(policy)
    ratio = (theirs.log_prob(batch["action"]) - batch["logprob"]).exp()
    assert (ratio - 1).abs().max() > 0.05
    expected = (ratio * batch["advantage"]).mean() + 0.5 * theirs.entropy().mean()
    torch.testing.assert_close(trpo.surrogate(policy, batch), expected, atol=1e-6, rtol=1e-5)
    before = theirs.entropy().mean()
    assert trpo.improve_policy({**batch, "advantage": torch.zeros(32)}, MeanMetrics())
    assert trpo.model.policy(batch["obs"]).entropy().mean() > before


def test_an_update_reports() -> None:
    trpo = make_trpo(critic_epochs=3, critic_minibatches=5)
    metrics = trpo.update(random_rollout(trpo, DISCRETE, num_steps=7, num_envs=3))
    assert trpo.gradient_steps == 3 * 5 + 1
    assert set(metrics) == {
        "kl", "accepted", "line_search_steps", "surrogate_improvement", "expected_improvement",
        "explained_variance", "value_loss", "entropy",
    }  # fmt: skip


@dataclass(frozen=True)
class More(TRPOHyperparameters):
    something_else: int = setting(3, "of an algorithm that has this one as a part", low=1)


def test_it_may_be_a_part_of_an_algorithm_with_more_hyperparameters() -> None:
    whole, part = make_trpo(), make_trpo()
    rollout = random_rollout(whole, DISCRETE, num_steps=16, num_envs=2)
    component = TRPO(part.actor, More(num_steps=16, critic_epochs=2, critic_minibatches=2), rng=part.rng)
    assert component.update(rollout) == whole.update(rollout)
    assert torch.equal(whole.actor.parameters.vector, part.actor.parameters.vector)


def test_the_state_is_complete() -> None:
    trpo, copy = (make_trpo(seed=seed, fisher_subsample=0.5) for seed in range(2))
    first, second = (random_rollout(trpo, DISCRETE, num_steps=16, num_envs=4, seed=i) for i in range(2))
    trpo.update(first)
    copy_training(trpo, copy)
    assert trpo.update(second) == copy.update(second)
    assert torch.equal(trpo.actor.parameters.vector, copy.actor.parameters.vector)
    assert trpo.gradient_steps == copy.gradient_steps
    assert trpo.rng.bit_generator.state == copy.rng.bit_generator.state
