"""APPO's update: PPO's without lag, PPO's loss on V-trace advantages with it, and the target network."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from build import build
from probes import copy_training, random_rollout
from rl_training.algorithms.appo import APPO, APPOHyperparameters
from rl_training.algorithms.optim import MeanMetrics
from rl_training.algorithms.ppo import PPOHyperparameters
from rl_training.data.batch import flatten
from rl_training.data.rollout import Rollout
from rl_training.types import Spaces
from test_ppo_update import CONTINUOUS, DISCRETE, perturb, vector

T, N = 8, 4
ONE_STEP = {"update_epochs": 1, "num_minibatches": 1}
PASSES = {"update_epochs": 3, "num_minibatches": 2, "learning_rate": 0.01}
spaces_of = pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])


def make(algo: str = "appo", spaces: Spaces = DISCRETE, *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    hp = (APPOHyperparameters if algo == "appo" else PPOHyperparameters)(**{"num_steps": T, **changes})
    return build(algo, spaces, hp, rng=np.random.default_rng(seed))


def a_rollout(learner: APPO, spaces: Spaces = DISCRETE, *, seed: int = 0) -> Rollout:
    return random_rollout(learner, spaces, num_steps=T, num_envs=N, seed=seed)


def target_vector(learner: APPO) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in learner.target_model.parameters()])


def model_vector(learner: APPO) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


@spaces_of
def test_without_lag_updates_are_ppos(spaces: Spaces) -> None:
    """Several updates of several passes: at the end of each the target network becomes the new policy."""
    options = {**PASSES, "gae_lambda": 0.75, "ent_coef": 0.01, "clip_vf_coef": 0.2, "clip_coef": 0.05}
    appo, ppo = make("appo", spaces, **options), make("ppo", spaces, **options)
    ppo.model.load_state_dict(appo.model.state_dict())
    for i in range(3):
        rollout = a_rollout(appo, spaces, seed=i)
        metrics, expected = appo.update(rollout), ppo.update(rollout)
        assert metrics["clip_fraction"] == pytest.approx(expected["clip_fraction"], abs=0.02)
        assert metrics["clip_fraction"] > 0  # the clip acts
        torch.testing.assert_close(vector(appo), vector(ppo), atol=1e-4, rtol=1e-4)


@spaces_of
def test_without_lag_all_ratios_of_the_first_pass_are_one(spaces: Spaces) -> None:
    learner = make("appo", spaces, **ONE_STEP)
    metrics = learner.update(a_rollout(learner, spaces))
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    fresh = make("appo", spaces)
    _, log_ratio = fresh.loss(flatten(fresh.learning_batch(a_rollout(fresh, spaces), MeanMetrics())), MeanMetrics())
    torch.testing.assert_close(log_ratio, torch.zeros_like(log_ratio), atol=1e-6, rtol=0)


@spaces_of
def test_each_of_the_three_policies_stands_where_it_should(spaces: Spaces) -> None:
    """mu acted, the target network weights the trace and gives the values, the current policy is clipped against mu."""
    learner = make("appo", spaces, gamma=0.875, gae_lambda=0.75, rho_bar=1.25, c_bar=0.8, normalize_advantage=False)
    rollout = a_rollout(learner, spaces)
    torch.manual_seed(1)
    perturb(learner.target_model, 0.1)
    perturb(learner.model, 0.1)
    batch = learner.learning_batch(rollout, MeanMetrics())
    target, advantage, value = by_definition(learner, rollout)
    np.testing.assert_allclose(batch["target"].numpy(), target, atol=1e-4)
    np.testing.assert_allclose(batch["advantage"].numpy(), advantage, atol=1e-4)
    np.testing.assert_allclose(batch["value"].numpy(), value, atol=1e-5)

    loss, log_ratio = learner.loss(flatten(batch), MeanMetrics())
    with torch.no_grad():
        policy, current = learner.model(rollout.batch["obs"].flatten(0, 1))
        pi = policy.log_prob(rollout.batch["action"].flatten(0, 1)).numpy().astype(float)
    ratio = np.exp(pi - rollout.batch["logprob"].flatten().numpy())
    expected, clipped = 0.0, 0
    for r, a, v, vs in zip(ratio, advantage.flatten(), current.tolist(), target.flatten(), strict=True):
        expected -= min(r * a, min(max(r, 0.8), 1.2) * a)
        expected += learner.hp.vf_coef * (v - vs) ** 2
        clipped += abs(r - 1) > 0.2
    assert 0.05 < clipped / (T * N) < 0.95
    assert loss.item() == pytest.approx(expected / (T * N), abs=1e-4)
    np.testing.assert_allclose(log_ratio.numpy(), np.log(ratio), atol=1e-5)


def by_definition(learner: APPO, rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(targets, advantages, values) by the backward recursion, in float64."""
    hp, data = learner.hp, rollout.batch
    times, envs, after = rollout.ends()
    with torch.no_grad():
        policy, value = learner.target_model(data["obs"].flatten(0, 1))
        log_prob = policy.log_prob(data["action"].flatten(0, 1)).view(T, N).numpy().astype(float)
        last = learner.target_model.value(after["obs"]).tolist()
    value, bootstraps = (
        value.view(T, N).numpy().astype(float),
        dict(zip(zip(times, envs, strict=True), last, strict=True)),
    )
    target, advantage = np.zeros((T, N)), np.zeros((T, N))
    for n in range(N):
        for s in reversed(range(T)):
            ratio = math.exp(log_prob[s, n] - data["logprob"][s, n].item())
            reward, excess = data["reward"][s, n].item(), 0.0
            if data["terminated"][s, n]:
                next_value = 0.0
            elif data["truncated"][s, n] or s == T - 1:
                next_value = bootstraps[s, n]
            else:
                next_value, excess = value[s + 1, n], hp.gae_lambda * (target[s + 1, n] - value[s + 1, n])
            delta = reward + hp.gamma * next_value - value[s, n]
            trace = hp.gamma * min(hp.c_bar, ratio) * excess
            target[s, n] = value[s, n] + min(hp.rho_bar, ratio) * delta + trace
            advantage[s, n] = delta + hp.gamma * excess
    return target, advantage, value


def test_the_target_network_follows_every_so_many_updates_by_tau() -> None:
    learner = make("appo", target_update_period=3, tau=0.25, **PASSES)
    expected = target_vector(learner)
    assert torch.equal(expected, model_vector(learner))
    for i in range(1, 7):
        learner.update(a_rollout(learner, seed=i))
        if i % 3 == 0:
            expected = expected + 0.25 * (model_vector(learner) - expected)
        torch.testing.assert_close(target_vector(learner), expected, atol=1e-6, rtol=0)
        assert not torch.allclose(expected, model_vector(learner), atol=1e-4)


def test_gradients_never_reach_the_target_network() -> None:
    learner = make("appo", target_update_period=100, **PASSES)
    before = target_vector(learner)
    learner.update(a_rollout(learner))
    assert torch.equal(before, target_vector(learner))
    assert not any(parameter.requires_grad for parameter in learner.target_model.parameters())


def test_the_lag_is_a_difference_of_versions() -> None:
    learner = make("appo")
    rollout = a_rollout(learner)
    rollout.arrays["version"][:4] = 2
    learner.actor.version = 6
    metrics = learner.update(rollout)
    assert metrics["policy_lag_mean"] == pytest.approx(5.0)
    assert metrics["policy_lag_max"] == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1e-3),
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("ent_coef", 0.1),
        ("vf_coef", 0.1),
        ("max_grad_norm", 0.01),
        ("clip_coef", 0.01),
        ("clip_vf_coef", 0.01),
        ("target_kl", 1e-5),
        ("update_epochs", 2),
        ("num_minibatches", 3),
        ("rho_bar", 0.5),
        ("c_bar", 0.5),
    ],
)
def test_every_scalar_has_an_attribute_and_an_effect(name: str, value: float) -> None:
    as_usual, changed = make("appo", **PASSES), make("appo", **PASSES)
    rollout = a_rollout(as_usual)
    setattr(changed, name, value)
    for learner in (as_usual, changed):
        learner.update(rollout)
    assert not torch.equal(vector(as_usual), vector(changed))


def test_the_state_is_complete() -> None:
    learner, copy = (make("appo", seed=seed, target_update_period=2, tau=0.5, **PASSES) for seed in range(2))
    rollouts = [a_rollout(learner, seed=i) for i in range(4)]
    learner.update(rollouts[0])
    copy_training(learner, copy)
    for rollout in rollouts[1:]:
        learner.update(rollout)
        copy.update(rollout)
    assert torch.equal(vector(learner), vector(copy))
    assert torch.equal(target_vector(learner), target_vector(copy))


@spaces_of
def test_without_correction_actions_count_as_the_target_networks(spaces: Spaces) -> None:
    """Targets, advantages and the ratios of the loss are those of a rollout that the target network acted in."""
    learner = make("appo", spaces, correction=False, **ONE_STEP)
    rollout = a_rollout(learner, spaces)
    perturb(learner.target_model, 0.1)
    corrected = make("appo", spaces, **ONE_STEP)
    copy_training(learner, corrected)
    with torch.no_grad():
        policy = learner.target_model(rollout.batch["obs"].flatten(0, 1))[0]
        log_prob = policy.log_prob(rollout.batch["action"].flatten(0, 1)).view(T, N)
    assert not torch.allclose(log_prob, rollout.batch["logprob"], atol=0.05)
    found = learner.learning_batch(rollout, MeanMetrics())
    rollout.arrays["logprob"][:] = log_prob.numpy()
    expected = corrected.learning_batch(rollout, MeanMetrics())
    for key in ("target", "advantage", "value", "logprob"):
        torch.testing.assert_close(found[key], expected[key], atol=1e-6, rtol=1e-5)
