"""Supports: the transform in closed form and in float32, two-hot targets, and what the losses pull towards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_training.ops.support import Scalar, Support, make_support
from rl_training.ops.tree import decode

SUPPORT = Support(120)  # h(10,000) is 109
SMALL = torch.logspace(-12, 0, 200)
GRID = torch.cat([torch.linspace(-1e4, 1e4, 4001), SMALL, -SMALL])
numbers = st.floats(-1e4, 1e4, width=32)


def h(x: np.ndarray) -> np.ndarray:
    """As the paper writes it."""
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 0.001 * x


def h_inverse(y: np.ndarray) -> np.ndarray:
    root = (np.sqrt(1 + 4 * 0.001 * (np.abs(y) + 1 + 0.001)) - 1) / (2 * 0.001)
    return np.sign(y) * (root**2 - 1)


def test_transform_and_inverse_are_the_papers() -> None:
    x = np.linspace(-500, 500, 2001)  # far enough from 0 for the papers' form in float64
    np.testing.assert_allclose(Support.transform(torch.from_numpy(x)), h(x), atol=1e-12)
    np.testing.assert_allclose(Support.inverse(torch.from_numpy(x)), h_inverse(x), rtol=1e-9, atol=1e-9)


def test_float32_is_as_good_as_float64_also_near_zero() -> None:
    for function in (Support.transform, Support.inverse):
        torch.testing.assert_close(function(GRID), function(GRID.double()).float(), rtol=1e-6, atol=0.0)
    assert Support.inverse(Support.transform(torch.tensor(0.0))) == 0
    y = np.float32(1e-5)
    naive = np.float32(h_inverse(np.array([y], np.float32))[0])
    exact = Support.inverse(torch.tensor(1e-5, dtype=torch.float64)).item()
    assert abs(naive - exact) > 0.01 * exact  # what the papers' form would give in float32


@given(numbers)
def test_round_trip(x: float) -> None:
    there = Support.transform(torch.tensor(x, dtype=torch.float32))
    assert Support.inverse(there).item() == pytest.approx(x, rel=1e-6, abs=1e-30)


def test_the_transform_is_odd_and_grows() -> None:
    x = GRID.sort().values
    torch.testing.assert_close(Support.transform(-x), -Support.transform(x), rtol=0, atol=0)
    assert (Support.transform(x).diff() >= 0).all()


@given(st.lists(numbers, min_size=1, max_size=20))
def test_two_hot_has_the_mean_h(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    probs, atoms = SUPPORT.to_probs(x), torch.arange(-120.0, 121.0)
    assert probs.shape == (len(values), SUPPORT.size) == (len(values), 241)
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(values)))
    torch.testing.assert_close(probs @ atoms, Support.transform(x), rtol=1e-5, atol=1e-5)
    for row in probs:
        weighted = row.nonzero().squeeze(-1)
        assert len(weighted) <= 2
        assert weighted[-1] - weighted[0] <= 1
    torch.testing.assert_close(SUPPORT.to_scalar(probs.log()), x, rtol=1e-4, atol=1e-4)


def test_two_hot_by_hand() -> None:
    x = Support.inverse(torch.tensor([[0.0, 1.0], [-1.25, 1.5]]))
    expected = torch.tensor([[[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]], [[0.25, 0.75, 0, 0, 0], [0, 0, 0, 0.5, 0.5]]])
    torch.testing.assert_close(Support(2).to_probs(x), expected)


def test_numbers_beyond_the_support_become_its_end() -> None:
    assert Support(2).to_probs(torch.tensor([1e6, -1e6])).tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]


def test_logits_that_say_nothing_mean_zero() -> None:
    assert SUPPORT.to_scalar(torch.zeros(4, 3, SUPPORT.size)).abs().max() < 1e-5
    assert Scalar().to_scalar(torch.zeros(4, 3, 1)).tolist() == torch.zeros(4, 3).tolist()


def gradient_of_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    support = make_support(logits.shape[-1] // 2)
    logits.requires_grad_()
    loss = support.loss(logits, target)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient


def test_the_gradient_of_the_cross_entropy_is_softmax_less_target() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 2, 21, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64) * 30
    loss, gradient = gradient_of_loss(logits, target)
    probs = Support(10).to_probs(target)
    torch.testing.assert_close(gradient, logits.detach().softmax(-1) - probs)
    assert loss.shape == target.shape
    expected = F.cross_entropy(logits.detach().flatten(0, 1), probs.flatten(0, 1), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected)


def test_learning_finds_the_target() -> None:
    """The loss is least where to_scalar gives the target back."""
    target = torch.tensor([-37.0, 0.0, 0.3, 150.0])
    logits = torch.zeros(4, 41, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        Support(20).loss(logits, target).sum().backward()
        optimizer.step()
    torch.testing.assert_close(Support(20).to_scalar(logits.detach()), target, rtol=0.02, atol=0.02)


def test_a_scalar_is_between_minus_one_and_one_and_learned_by_squared_error() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 2, 1, dtype=torch.float64) * 3, torch.rand(5, 2, dtype=torch.float64) * 2 - 1
    value = logits[..., 0].tanh()
    assert torch.equal(Scalar().to_scalar(logits), value)
    loss, gradient = gradient_of_loss(logits, target)
    torch.testing.assert_close(loss, (value - target) ** 2)
    torch.testing.assert_close(gradient[..., 0], 2 * (value - target) * (1 - value**2))


def test_make_support() -> None:
    assert (make_support(300).size, make_support(0).size) == (601, 1)
    with pytest.raises(ValueError, match=r"limit is -1.*or 0 for numbers in \[-1, 1\]"):
        make_support(-1)


def test_compiled_decoding_is_the_papers() -> None:
    """Logits that mean numbers near 0 and up to the ends, beside a policy; of one logit, its tanh."""
    limit, policy, rng = 30, 3, np.random.default_rng(0)
    atoms = np.arange(-limit, limit + 1)
    centre, width = rng.uniform(-limit, limit, (2, 200, 1)), rng.uniform(0.3, 5.0, (2, 200, 1))
    logits = -np.square((atoms - centre) / width)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    value, reward = h_inverse((p * atoms).sum(-1) / p.sum(-1))
    assert np.abs(value).max() > 500
    word, scratch = np.empty((200, policy + 2), np.float32), np.empty(200, np.float32)
    columns = np.concatenate([rng.normal(size=(200, policy)), *logits], 1).astype(np.float32)
    decode(columns, len(atoms), word, scratch)
    np.testing.assert_array_equal(word[:, :policy], columns[:, :policy])
    np.testing.assert_allclose(word[:, policy], value, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(word[:, policy + 1], reward, rtol=2e-5, atol=1e-5)
    numbers = rng.normal(size=(200, policy + 2)).astype(np.float32)
    decode(numbers, 1, word, scratch)
    np.testing.assert_allclose(word[:, policy:], np.tanh(numbers[:, policy:]), rtol=1e-5)
