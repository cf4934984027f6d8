"""V-trace against the sum over products of the paper, written as loops, and against GAE where it is the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.ops.returns import gae
from rl_training.ops.vtrace import importance_weight, vtrace

T, N = 13, 5
GAMMA = 0.875  # exact in float32, which a number times a tensor of bools has


def experience(*, seed: int = 0, ends: bool = True) -> dict[str, Any]:
    """Random steps. Within an episode the next value is the value of the next step."""
    rng = np.random.default_rng(seed)
    terminated, truncated = (rng.random((T, N)) < (0.15 if ends else 0) for _ in range(2))
    value, reward, after = (rng.normal(size=(T, N)) for _ in range(3))
    next_value = np.concatenate([value[1:], after[-1:]])
    next_value[truncated] = after[truncated]
    next_value[terminated] = 7.0  # of no state: it must not be used
    steps = {"reward": reward, "value": value, "next_value": next_value, "terminated": terminated}
    tensors = {key: torch.from_numpy(x) for key, x in (steps | {"truncated": truncated}).items()}
    return {"log_ratio": torch.from_numpy(rng.normal(size=(T, N))), **tensors}


def by_definition(
    data: dict[str, Tensor], *, gamma: float, gae_lambda: float, rho_bar: float, c_bar: float
) -> tuple[np.ndarray, np.ndarray]:
    """v_s = V(x_s) + sum_t gamma^(t-s) (prod_{i=s}^{t-1} c_i) delta_t; the sum ends with the episode."""
    x = {key: tensor.numpy() for key, tensor in data.items()}
    ratio = np.exp(x["log_ratio"])
    target, advantage = np.zeros((T, N)), np.zeros((T, N))

    def bootstrap(t: int, n: int) -> float:
        return 0.0 if x["terminated"][t, n] else gamma * x["next_value"][t, n]

    for n in range(N):
        for s in range(T):
            total = x["value"][s, n]
            for t in range(s, T):
                product = math.prod(gae_lambda * min(c_bar, ratio[i, n]) for i in range(s, t))
                delta = min(rho_bar, ratio[t, n]) * (x["reward"][t, n] + bootstrap(t, n) - x["value"][t, n])
                total += gamma ** (t - s) * product * delta
                if x["terminated"][t, n] or x["truncated"][t, n]:
                    break
            target[s, n] = total
        for s in range(T):
            goes_on = s + 1 < T and not x["terminated"][s, n] and not x["truncated"][s, n]
            after = bootstrap(s, n)
            if goes_on:
                after = gamma * (gae_lambda * target[s + 1, n] + (1 - gae_lambda) * x["value"][s + 1, n])
            advantage[s, n] = x["reward"][s, n] + after - x["value"][s, n]
    return target, advantage


@pytest.mark.parametrize("gae_lambda", [1.0, 0.75])
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.2), (0.6, 0.3), (math.inf, math.inf)])
@pytest.mark.parametrize("seed", [0, 1])
def test_is_the_sum_over_products_of_the_paper(gae_lambda: float, rho_bar: float, c_bar: float, seed: int) -> None:
    data, options = (
        experience(seed=seed),
        {"gamma": GAMMA, "gae_lambda": gae_lambda, "rho_bar": rho_bar, "c_bar": c_bar},
    )
    assert data["terminated"].any()
    assert data["truncated"][:-1].any()
    expected = by_definition(data, **options)
    for ours, theirs in zip(vtrace(**data, **options), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-10, rtol=1e-10)
    single = {key: x.float() if x.is_floating_point() else x for key, x in data.items()}
    for ours, theirs in zip(vtrace(**single, **options), expected, strict=True):
        assert ours.dtype == torch.float32
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.75, 0.0])
def test_of_the_own_policy_it_is_gae(gae_lambda: float) -> None:
    data = experience() | {"log_ratio": torch.zeros(T, N, dtype=torch.float64)}
    target, advantage = vtrace(**data, gamma=GAMMA, gae_lambda=gae_lambda)
    del data["log_ratio"]
    expected = gae(**data, gamma=GAMMA, gae_lambda=gae_lambda)
    torch.testing.assert_close(advantage, expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(target, expected + data["value"], atol=1e-8, rtol=0)


def test_one_step_without_clipping_mixes_return_and_value_by_the_ratio() -> None:
    one = {key: x[:1] for key, x in experience(ends=False).items()}
    target, advantage = vtrace(**one, gamma=GAMMA, rho_bar=math.inf, c_bar=math.inf)
    rho, full_return = one["log_ratio"].exp(), one["reward"] + GAMMA * one["next_value"]
    torch.testing.assert_close(target, rho * full_return + (1 - rho) * one["value"], atol=1e-12, rtol=0)
    torch.testing.assert_close(advantage, full_return - one["value"], atol=1e-12, rtol=0)


def test_weights_are_clipped_and_nothing_has_a_gradient() -> None:
    data = experience()
    for key in ("log_ratio", "value", "next_value"):
        data[key].requires_grad_()
    assert not any(x.requires_grad for x in vtrace(**data, gamma=GAMMA))
    weight = importance_weight(data["log_ratio"], 0.8)
    assert not weight.requires_grad
    np.testing.assert_allclose(weight.numpy(), np.minimum(0.8, np.exp(data["log_ratio"].detach().numpy())))
