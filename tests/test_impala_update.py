"""IMPALA's update against the paper's sums in float64 loops, and against A2C where they are the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from build import build
from probes import copy_training, random_rollout
from rl_training.algorithms.a2c import A2CHyperparameters
from rl_training.algorithms.impala import IMPALA, IMPALAHyperparameters
from rl_training.algorithms.optim import MeanMetrics
from rl_training.data.rollout import Rollout
from rl_training.types import Spaces
from test_ppo_update import CONTINUOUS, DISCRETE, perturb, vector

T, N = 6, 4
EXACT = {"gamma": 0.875, "learning_rate": 0.0, "max_grad_norm": None}


def make_impala(spaces: Spaces = DISCRETE, *, seed: int = 0, **changes: Any) -> IMPALA:
    torch.manual_seed(seed)
    learner: IMPALA = build("impala", spaces, IMPALAHyperparameters(**changes), rng=np.random.default_rng(seed))
    return learner


def old_rollout(learner: IMPALA, spaces: Spaces = DISCRETE, *, seed: int = 0) -> Rollout:
    """Acted by the learner's weights, which then change."""
    rollout = random_rollout(learner, spaces, num_steps=T, num_envs=N, seed=seed)
    torch.manual_seed(seed)
    perturb(learner.model, 0.1)
    return rollout


def gradient(learner: Any) -> Tensor:
    found: Tensor = learner.optimizers["model"].parameters.gradient.clone()
    return found


def paper_gradient(learner: IMPALA, rollout: Rollout, *, rho_bar: float, c_bar: float, pg_rho_bar: float) -> Tensor:
    """The gradient of the paper's three sums, divided by the number of steps, one step at a time."""
    hp, data = learner.hp, rollout.batch
    flat = data["obs"].flatten(0, 1)
    policy, value = learner.model(flat)
    log_prob = policy.log_prob(data["action"].flatten(0, 1)).view(T, N)
    entropy, value = policy.entropy().view(T, N), value.view(T, N)
    times, envs, after = rollout.ends()
    bootstraps = {(t, n): v for t, n, v in zip(times, envs, learner.end_values(after).tolist(), strict=True)}
    loss = torch.zeros(())
    for n in range(N):
        target = [0.0] * (T + 1)
        weight = [0.0] * T
        for s in reversed(range(T)):
            ratio = math.exp(log_prob[s, n].item() - data["logprob"][s, n].item())
            ends = bool(data["terminated"][s, n] or data["truncated"][s, n] or s == T - 1)
            if data["terminated"][s, n]:
                next_value = next_target = 0.0
            elif ends:
                next_value = next_target = bootstraps[s, n]
            else:
                next_value, next_target = value[s + 1, n].item(), target[s + 1]
            v, reward = value[s, n].item(), data["reward"][s, n].item()
            target[s] = v + min(rho_bar, ratio) * (reward + hp.gamma * next_value - v)
            target[s] += hp.gamma * min(c_bar, ratio) * (next_target - next_value)
            weight[s] = min(pg_rho_bar, ratio) * (reward + hp.gamma * next_target - v)
        for s in range(T):
            loss = loss - log_prob[s, n] * weight[s] + hp.vf_coef * (target[s] - value[s, n]) ** 2
            loss = loss - hp.ent_coef * entropy[s, n]
    flat_parameters = learner.optimizers["model"].parameters
    return flat_parameters.pack(torch.autograd.grad(loss / (T * N), flat_parameters.parameters))


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("bars", [(1.0, 1.0, 1.0), (2.0, 0.8, 0.6)])
def test_the_gradient_is_that_of_the_paper(spaces: Spaces, bars: tuple[float, float, float]) -> None:
    clips = dict(zip(("rho_bar", "c_bar", "pg_rho_bar"), bars, strict=True))
    learner = make_impala(spaces, ent_coef=0.1, **EXACT, **clips)
    rollout = old_rollout(learner, spaces)
    assert rollout.batch["terminated"].any()
    assert rollout.batch["truncated"][:-1].any()
    expected = paper_gradient(learner, rollout, **clips)
    metrics = learner.update(rollout)
    torch.testing.assert_close(gradient(learner), expected, atol=1e-5, rtol=1e-4)
    assert abs(metrics["ratio_mean"] - 1) > 1e-3


@pytest.mark.parametrize("correction", [True, False])
def test_of_the_newest_policy_a_step_is_a2cs(correction: bool) -> None:
    learner = make_impala(correction=correction, ent_coef=0.02, gae_lambda=0.75, **EXACT)
    rollout = random_rollout(learner, DISCRETE, num_steps=T, num_envs=N)
    hp = A2CHyperparameters(ent_coef=0.02, gae_lambda=0.75, vf_coef=learner.hp.vf_coef, **EXACT)
    a2c = build("a2c", DISCRETE, hp)
    a2c.model.load_state_dict(learner.model.state_dict())
    for each in (learner, a2c):
        each.update(rollout)
    torch.testing.assert_close(gradient(learner), gradient(a2c), atol=1e-6, rtol=1e-5)


def test_without_correction_the_stored_log_probabilities_do_not_matter() -> None:
    gradients = {}
    for correction in (True, False):
        for shift in (0.0, 0.5):
            learner = make_impala(correction=correction, **EXACT)
            rollout = old_rollout(learner)
            rollout.arrays["logprob"] += shift
            learner.update(rollout)
            gradients[correction, shift] = gradient(learner)
    assert torch.equal(gradients[False, 0.0], gradients[False, 0.5])
    assert not torch.allclose(gradients[True, 0.0], gradients[True, 0.5])


def test_minibatches_are_whole_environments() -> None:
    """The mean of the gradients of two groups of environments, both at the same weights, is that of all."""
    whole, parts = make_impala(**EXACT), make_impala(num_minibatches=2, **EXACT)
    rollout = old_rollout(whole)
    parts.model.load_state_dict(whole.model.state_dict())
    whole.update(rollout)
    seen: list[Tensor] = []
    optimizer = parts.optimizers["model"]
    optimizer.step = lambda lr: seen.append(optimizer.gradient.clone())  # type: ignore[method-assign]
    parts.update(rollout)
    assert len(seen) == parts.gradient_steps == 2
    torch.testing.assert_close(sum(seen) / 2, gradient(whole), atol=1e-6, rtol=1e-5)


def test_the_lag_is_a_difference_of_versions() -> None:
    learner = make_impala()
    rollout = random_rollout(learner, DISCRETE, num_steps=T, num_envs=N)
    rollout.arrays["version"][:3] = 2
    learner.actor.version = 7
    metrics = learner.update(rollout)
    assert metrics["policy_lag_mean"] == pytest.approx(6.0)
    assert metrics["policy_lag_max"] == 7
    assert learner.actor.version == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1e-3),
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("ent_coef", 0.1),
        ("vf_coef", 0.1),
        ("max_grad_norm", 0.01),
        ("rho_bar", 0.5),
        ("c_bar", 0.5),
        ("pg_rho_bar", 0.5),
        ("num_minibatches", 2),
    ],
)
def test_every_scalar_has_an_attribute_and_an_effect(name: str, value: float) -> None:
    as_usual, changed = make_impala(optimizer="rmsprop_tf"), make_impala(optimizer="rmsprop_tf")
    rollout = random_rollout(as_usual, DISCRETE, num_steps=T, num_envs=N)
    setattr(changed, name, value)
    for learner in (as_usual, changed):
        learner.update(rollout)
    assert not torch.equal(vector(as_usual), vector(changed))


def test_the_state_is_complete() -> None:
    learner, copy = (make_impala(seed=seed, num_minibatches=2) for seed in range(2))
    first, second = (random_rollout(learner, DISCRETE, num_steps=T, num_envs=N, seed=i) for i in range(2))
    learner.update(first)
    copy_training(learner, copy)
    learner.update(second)
    copy.update(second)
    assert torch.equal(vector(learner), vector(copy))


def test_nothing_flows_back_through_targets_and_weights() -> None:
    """With a policy loss alone, the value network has no gradient."""
    learner = make_impala(vf_coef=0.0, ent_coef=0.0, **EXACT)
    rollout = old_rollout(learner)
    metrics = MeanMetrics()
    data = {**rollout.batch, **learner.bootstraps(rollout)}
    loss = learner.loss(data, metrics)
    grads = torch.autograd.grad(loss, list(learner.model.value_head.parameters()), allow_unused=True)
    assert all(grad is None or not grad.any() for grad in grads)
