"""Distributions against torch.distributions, sampling against probabilities, numpy against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions

from rl_training.ops.distributions import Bernoulli, Categorical, DiagGaussian, MultiCategorical

SIZES = (2, 5, 3)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def gaussian(x: Tensor, log_std: Tensor) -> tuple[Any, Any]:
    return DiagGaussian(x, log_std), distributions.Independent(distributions.Normal(x, log_std.exp()), log_std.ndim)


def pairs(seed: int) -> dict[str, tuple[Any, Any]]:
    """(ours, torch's) with the same parameters, batch [7]."""
    torch.manual_seed(seed)
    logits, bits, image = torch.randn(7, 4) * 3, torch.randn(7, 6) * 2, torch.randn(7, 2, 3)
    return {
        "categorical": (Categorical(logits), distributions.Categorical(logits=logits)),
        "bernoulli": (Bernoulli(bits), distributions.Independent(distributions.Bernoulli(logits=bits), 1)),
        "bernoulli 2d": (Bernoulli(image, 2), distributions.Independent(distributions.Bernoulli(logits=image), 2)),
        "gaussian": gaussian(torch.randn(7, 3), torch.randn(3)),
        "gaussian 2d": gaussian(torch.randn(7, 2, 3), torch.randn(2, 3)),
    }


@pytest.mark.parametrize("name", pairs(0))
def test_log_prob_entropy_and_kl_are_those_of_torch(name: str) -> None:
    (p, p_torch), (q, q_torch) = pairs(0)[name], pairs(1)[name]
    action = p_torch.sample()
    torch.testing.assert_close(p.log_prob(action.to(p.mode.dtype)), p_torch.log_prob(action), **TOLERANCE)
    torch.testing.assert_close(p.entropy(), p_torch.entropy(), **TOLERANCE)
    torch.testing.assert_close(p.kl(q), distributions.kl_divergence(p_torch, q_torch), **TOLERANCE)
    assert p.kl(p).abs().max() < 1e-6


def test_multi_categorical_is_a_product_of_categoricals() -> None:
    torch.manual_seed(0)
    logits, others = torch.randn(7, sum(SIZES)), torch.randn(7, sum(SIZES))
    p, q = MultiCategorical(logits, SIZES), MultiCategorical(others, SIZES)
    parts = [distributions.Categorical(logits=x) for x in logits.split(list(SIZES), -1)]
    other_parts = [distributions.Categorical(logits=x) for x in others.split(list(SIZES), -1)]
    action = torch.stack([part.sample() for part in parts], -1)
    log_prob = sum(part.log_prob(a) for part, a in zip(parts, action.unbind(-1), strict=True))
    kl = sum(distributions.kl_divergence(a, b) for a, b in zip(parts, other_parts, strict=True))
    torch.testing.assert_close(p.log_prob(action), log_prob, **TOLERANCE)
    torch.testing.assert_close(p.entropy(), sum(part.entropy() for part in parts), **TOLERANCE)
    torch.testing.assert_close(p.kl(q), kl, **TOLERANCE)
    assert p.mode.tolist() == torch.stack([part.probs.argmax(-1) for part in parts], -1).tolist()


def test_samples_have_the_right_frequencies() -> None:
    rng, count = np.random.default_rng(0), 40_000
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    categorical, bits = Categorical(logits.expand(count, 4)), Bernoulli(logits.expand(count, 4))
    several = MultiCategorical(logits.expand(count, 4), (1, 3))
    frequency = categorical.sample(categorical.noise(rng)).bincount(minlength=4) / count
    torch.testing.assert_close(frequency, logits.softmax(0), atol=0.012, rtol=0)
    torch.testing.assert_close(bits.sample(bits.noise(rng)).float().mean(0), logits.sigmoid(), atol=0.012, rtol=0)
    frequency = several.sample(several.noise(rng))[:, 1].bincount(minlength=3) / count
    torch.testing.assert_close(frequency, logits[1:].softmax(0), atol=0.012, rtol=0)

    mean, log_std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -1.0])
    gaussian = DiagGaussian(mean.expand(count, 2), log_std)
    sample = gaussian.sample(gaussian.noise(rng))
    torch.testing.assert_close(sample.mean(0), mean, atol=0.04, rtol=0)
    torch.testing.assert_close(sample.std(0), log_std.exp(), atol=0.03, rtol=0)


def test_modes_are_the_most_likely_actions() -> None:
    logits = torch.tensor([[0.1, 3.0, -1.0], [2.0, -3.0, 1.0]])
    assert Categorical(logits).mode.tolist() == [1, 0]
    assert Bernoulli(logits).mode.tolist() == [[1, 1, 0], [1, 0, 1]]
    assert Bernoulli(logits).mode.dtype == torch.int8
    assert DiagGaussian(logits, torch.zeros(3)).mode is logits


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_numpy_gives_what_torch_gives(scale: float) -> None:
    rng = np.random.default_rng(0)
    logits = scale * rng.standard_normal((64, 5), dtype=np.float32)
    log_std = rng.standard_normal(5, dtype=np.float32)
    both: list[tuple[Any, Any]] = [
        (Categorical(logits), Categorical(torch.from_numpy(logits))),
        (DiagGaussian(logits, log_std), DiagGaussian(torch.from_numpy(logits), torch.from_numpy(log_std))),
    ]
    for in_numpy, in_torch in both:
        noise = in_numpy.noise(rng)
        action, expected = in_numpy.sample(noise), in_torch.sample(noise)
        np.testing.assert_allclose(action, expected, rtol=1e-6)
        assert action.dtype == expected.numpy().dtype
        log_prob = in_numpy.log_prob(action)
        np.testing.assert_allclose(log_prob, in_torch.log_prob(expected), atol=1e-6, rtol=1e-6)
        assert log_prob.dtype == np.float32
        np.testing.assert_array_equal(in_numpy.mode, in_torch.mode)


def test_gradients_flow_through_every_log_prob_and_entropy() -> None:
    rng = np.random.default_rng(0)
    for make in (Categorical, Bernoulli, lambda x: MultiCategorical(x, SIZES), lambda x: DiagGaussian(x, x[0])):
        x = torch.randn(4, sum(SIZES), requires_grad=True)
        policy = make(x)
        (policy.log_prob(policy.sample(policy.noise(rng)).detach()).sum() + policy.entropy().sum()).backward()
        assert x.grad is not None
        assert x.grad.abs().sum() > 0
