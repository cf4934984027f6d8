"""DreamerV3's numbers as distributions, its returns and its optimizer, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.algorithms.laprop import LaProp
from rl_training.algorithms.optim import backward
from rl_training.data.state_check import StateMismatch
from rl_training.models.parameters import FlatParameters
from rl_training.ops.imagined_returns import PercentileScale, lambda_returns
from rl_training.ops.two_hot import symexp, symexp_bins, symlog, two_hot, two_hot_loss, two_hot_mean

BINS = symexp_bins()


def numbers(*shape, seed=0, scale=1.0):
    return scale * torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def test_symlog_and_symexp_are_inverse_odd_and_increasing():
    x = torch.cat([numbers(500, scale=s) for s in (1e-3, 1, 100, 1e6)]).double()
    torch.testing.assert_close(symexp(symlog(x)), x, rtol=1e-6, atol=0)
    assert torch.equal(symlog(-x), -symlog(x))
    assert torch.equal(symexp(-symlog(x)), -symexp(symlog(x)))
    ordered = symlog(x.sort().values)
    assert (ordered[1:] >= ordered[:-1]).all()
    np.testing.assert_allclose(symlog(torch.tensor([math.e - 1, -9.0])).numpy(), [1, -math.log(10)], rtol=1e-6)


def test_bins_are_those_of_symexp_and_exactly_antisymmetric():
    expected = [math.copysign(math.expm1(abs(x)), x) for x in np.linspace(-20, 20, 255)]
    np.testing.assert_allclose(BINS.numpy(), expected, rtol=1e-6, atol=0)
    assert torch.equal(BINS, -BINS.flip(0))
    assert BINS[127] == 0
    even = symexp_bins(4)
    assert len(even) == 4
    assert torch.equal(even, -even.flip(0))
    np.testing.assert_allclose(even[2], math.expm1(20 / 3), rtol=1e-6)


def naive_two_hot(value):
    """[255] by a search through all pairs of neighbours."""
    bins, probs = BINS.double().tolist(), [0.0] * 255
    value = min(max(value, bins[0]), bins[-1])
    for i in range(254):
        if bins[i] <= value <= bins[i + 1]:
            above = (value - bins[i]) / (bins[i + 1] - bins[i])
            probs[i], probs[i + 1] = 1 - above, above
            return probs
    raise AssertionError


VALUES = [0.0, 1e-3, -0.02, 1.0, 21.5, -499.0, 1e5, -3e8, 4.8e8, 1e9, -math.inf, math.inf]


def test_two_hot_is_two_probabilities_with_the_value_as_mean():
    values = torch.tensor(VALUES)
    probs = two_hot(values, BINS)
    np.testing.assert_allclose(probs.numpy(), [naive_two_hot(v) for v in VALUES], atol=1e-5)
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(values)))
    assert ((probs > 0).sum(-1) <= 2).all()
    mean = probs.double() @ BINS.double()
    torch.testing.assert_close(mean, values.double().clamp(BINS[0], BINS[-1]), rtol=1e-6, atol=1e-6)
    assert torch.equal(two_hot(BINS, BINS), torch.eye(255))  # exact on the bins


def test_readout_inverts_the_encoding():
    values = torch.tensor(VALUES[:8])
    torch.testing.assert_close(two_hot_mean(two_hot(values, BINS).log(), BINS), values, rtol=1e-4, atol=1e-4)


def test_readout_of_zero_logits_is_exactly_zero():
    logits = torch.zeros(3, 255)
    assert (two_hot_mean(logits, BINS) == 0).all()
    assert ((logits.softmax(-1) * BINS).sum(-1) != 0).all()  # what a plain sum gives
    symmetric = numbers(5, 127)
    assert (two_hot_mean(torch.cat([symmetric, numbers(5, 1), symmetric.flip(-1)], -1), BINS) == 0).all()
    logits = numbers(50, 255)
    expected = logits.double().softmax(-1) @ BINS.double()
    torch.testing.assert_close(two_hot_mean(logits, BINS).double(), expected, rtol=1e-5, atol=10)


def test_two_hot_loss_is_the_cross_entropy_and_only_logits_have_a_gradient():
    logits, values = numbers(12, 255).requires_grad_(), torch.tensor(VALUES, requires_grad=True)
    loss = two_hot_loss(logits, values, BINS)
    expected = torch.distributions.Categorical(logits=logits.detach()).logits
    expected = [-np.dot(naive_two_hot(v), row) for v, row in zip(VALUES, expected.numpy(), strict=True)]
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-5)
    loss.sum().backward()
    assert values.grad is None
    np.testing.assert_allclose(
        logits.grad.numpy(), logits.detach().softmax(-1).numpy() - [naive_two_hot(v) for v in VALUES], atol=1e-5
    )


def mixture(reward, discount, value, last, lam, start):
    """The lambda-return of a state as the weighted mean of all its n-step returns, each with its own sum."""
    end = len(reward) - 1
    n_step = []
    for n in range(1, end - start + 1):
        total, weight = 0.0, 1.0
        for k in range(start + 1, start + n + 1):
            total += weight * reward[k]
            weight *= discount[k]
        n_step.append(total + weight * value[start + n])
    total, weight = 0.0, 1.0
    for n, value_of_n in enumerate(n_step, 1):
        stops = n == len(n_step) or last[start + n]
        total += weight * (1.0 if stops else 1 - lam) * value_of_n
        if stops:
            break
        weight *= lam
    return total


@pytest.mark.parametrize("lam", [0.0, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("with_ends", [False, True])
def test_lambda_returns_are_the_mixture_of_all_n_step_returns(lam, with_ends):
    rng = np.random.default_rng(3)
    reward, value = rng.normal(size=(2, 16, 4))
    discount = rng.uniform(0, 1, (16, 4))
    last = rng.random((16, 4)) < (0.2 if with_ends else 0)
    tensors = [torch.from_numpy(x) for x in (reward, discount, value)]
    ends = torch.from_numpy(last) if with_ends else None
    returns = lambda_returns(*tensors, lam, ends)
    columns = zip(reward.T, discount.T, value.T, last.T, strict=True)
    expected = np.array([[mixture(*column, lam, t) for t in range(15)] for column in columns]).T
    np.testing.assert_allclose(returns.numpy(), expected, atol=1e-12)


def test_a_terminated_step_has_no_future_and_a_truncated_one_its_bootstrap():
    reward, value = torch.tensor([0.0, 1, 2, 4]), torch.tensor([9.0, 10, 20, 40])
    terminated, last = torch.tensor([0.0, 1, 0, 0]), torch.tensor([False, True, True, False])
    returns = lambda_returns(reward, 0.5 * (1 - terminated), value, 0.8, last)
    assert returns.tolist() == [1, 2 + 0.5 * 20, 4 + 0.5 * 40]


def test_percentile_scale_is_a_moving_average_without_correction():
    scale, low, high = PercentileScale(), 0.0, 0.0
    for seed in range(20):
        returns = numbers(15, 77, seed=seed, scale=200.0) + 30
        low = 0.99 * low + 0.01 * np.percentile(returns.numpy(), 5)
        high = 0.99 * high + 0.01 * np.percentile(returns.numpy(), 95)
        np.testing.assert_allclose(scale.update(returns), max(1.0, high - low), rtol=1e-5)
    other = PercentileScale()
    other.load_state_dict(scale.state_dict())
    assert other.update(returns) == scale.update(returns)


def test_percentile_scale_is_at_least_one():
    scale = PercentileScale()
    assert scale.update(numbers(1000)) == 1.0  # 0.01 of the range


class Tensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(numbers(3, 5, seed=1))
        self.zero = nn.Parameter(torch.zeros(7))
        self.last = nn.Parameter(numbers(4, 4, 2, seed=2, scale=0.01))


def reference_step(weights, gradients, state, step, lr):
    """One step of each tensor in float64."""
    for name, g in gradients.items():
        g, w = g.astype(np.float64), weights[name]
        most = 0.3 * max(np.sqrt((w**2).sum()), 1e-3)
        g = g / max(1.0, np.sqrt((g**2).sum()) / most)
        square, momentum = state.get(name, (0.0, 0.0))
        square = 0.999 * square + 0.001 * g**2
        momentum = 0.9 * momentum + 0.1 * g / (np.sqrt(square / (1 - 0.999**step)) + 1e-20)
        weights[name] = w - lr * momentum / (1 - 0.9**step)
        state[name] = square, momentum


def test_laprop_with_clipping_is_the_equations():
    model, state = Tensors(), {}
    optimizer = LaProp(FlatParameters(model.parameters()))
    weights = {name: p.detach().numpy().astype(np.float64) for name, p in model.named_parameters()}
    for step in range(1, 40):
        lr = 0.01 * min(1.0, (step - 1) / 10)
        scale = 10.0 ** (step % 7 - 4)
        gradients = {n: numbers(*p.shape, seed=step, scale=scale) for n, p in model.named_parameters()}
        if step == 5:
            gradients["first"].zero_()
        backward(optimizer, sum((p * gradients[n]).sum() for n, p in model.named_parameters()))
        optimizer.step(torch.tensor(lr) if step % 2 else lr)
        reference_step(weights, {n: g.numpy() for n, g in gradients.items()}, state, step, lr)
        for name, p in model.named_parameters():
            np.testing.assert_allclose(p.detach().numpy(), weights[name], rtol=1e-5, atol=1e-6)
        if step == 1:
            assert torch.equal(model.zero, torch.zeros(7))  # the warm-up begins at 0
    assert model.zero.abs().min() > 0


def test_laprop_resumes_from_its_state():
    models = [Tensors(), Tensors()]
    optimizers = [LaProp(FlatParameters(model.parameters())) for model in models]

    def step(i, seed):
        optimizers[i].gradient.copy_(numbers(len(optimizers[i].gradient), seed=seed))
        optimizers[i].step(0.1)

    for seed in range(3):
        step(0, seed)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for i in range(2):
        step(i, 9)
    assert torch.equal(models[0].first, models[1].first)
    with pytest.raises(StateMismatch, match="momentum"):
        optimizers[1].load_state_dict({**optimizers[0].state_dict(), "momentum": torch.zeros(3)})


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_gradients_of_zero_stay_zero(clip):
    model = Tensors()
    optimizer = LaProp(FlatParameters(model.parameters()), clip=clip)
    before = model.first.detach().clone()
    _ = optimizer.gradient.zero_()
    optimizer.step(1.0)
    assert torch.equal(model.first, before)
