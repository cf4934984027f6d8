"""The fast ways through DreamerV3 give the results of the plain one: losses, gradients, latents, imagined states."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from build import build
from rl_training import ALGORITHMS
from rl_training.acting.dreamer_path import CompiledPath, DreamerPath
from rl_training.acting.paths import plain_paths
from rl_training.models.dreamer_layers import normed_silu
from rl_training.models.rssm import Latent
from rl_training.ops import dreamer_cells
from rl_training.ops.two_hot import symexp_bins, two_hot_loss, two_hot_mean
from rl_training.types import Spaces

T, B, H = 7, 3, 4
ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
}
SMALL = {
    "deter": 32,
    "hidden": 12,
    "classes": 5,
    "units": 20,
    "depth": 2,
    "imagination_length": H,
    "precision": "float32",
}
TYPES = [torch.float32, torch.bfloat16]


def make(action="discrete", *, plain=False, device="cpu", **numbers):
    """A learner whose parameters are all random: no output is zero."""
    spaces = Spaces(gym.spaces.Box(-np.inf, np.inf, (5,), np.float32), ACTIONS[action])
    hp = ALGORITHMS["dreamer"].recipe.hyperparameters(size="1m", warmup_updates=0, **{**SMALL, **numbers})
    torch.manual_seed(0)
    if plain:
        with plain_paths():
            learner = build("dreamer", spaces, hp, device=device)
    else:
        learner = build("dreamer", spaces, hp, device=device)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape).to(device))
    return learner


def some_batch(learner, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def some(share):
        return torch.rand(T, B, generator=generator) < share

    last = some(0.2)
    first = torch.cat([some(0.5)[:1], last[:-1]])
    categories = torch.randint(learner.model.size.classes, (B, 32), generator=generator)
    return {
        "obs": 3 * normal(T, B, 5), "action": 2 * normal(T, B, learner.model.policy.action_size),
        "reward": 9 * normal(T, B), "terminated": last & some(0.5), "first": first, "last": last,
        "deter": normal(B, 32).tanh(), "stoch": F.one_hot(categories, learner.model.size.classes).float(),
    }  # fmt: skip


@pytest.mark.parametrize("action", ACTIONS)
def test_the_compiled_gradient_is_the_plain_one(action):
    fast, plain = make(action), make(action, plain=True)
    assert type(fast.path) is CompiledPath
    assert type(plain.path) is DreamerPath
    batch = some_batch(plain)
    noise = plain.noise(batch)
    (report, latent), (expected, plain_latent) = (each.gradient(batch, noise) for each in (fast, plain))
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(report[name], value, rtol=2e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(latent.deter, plain_latent.deter, rtol=1e-4, atol=1e-5)
    assert torch.equal(latent.stoch, plain_latent.stoch)
    for (name, ours), theirs in zip(fast.model.named_parameters(), plain.model.parameters(), strict=True):
        if theirs.requires_grad:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


def test_updates_stay_together():
    learners = make(), make(plain=True)
    for seed in range(4):
        batch = some_batch(learners[0], seed)
        noise = learners[0].noise(batch)
        reports = [learner.update(batch, noise)[0] for learner in learners]
        for name, value in reports[1].items():
            torch.testing.assert_close(reports[0][name], value, rtol=1e-2, atol=1e-3, msg=name)


def test_products_of_bfloat16_give_almost_the_same_gradient():
    half, plain = make(precision="bfloat16"), make(plain=True)
    assert half.path.dtype == torch.bfloat16
    batch = some_batch(plain)
    noise = plain.noise(batch)
    report, expected = (each.gradient(batch, noise)[0] for each in (half, plain))
    for name in ("reconstruction_loss", "dynamics_loss", "reward_loss", "value_loss"):
        torch.testing.assert_close(report[name], expected[name], rtol=0.05, atol=0.05, msg=name)
    ours, theirs = (each.optimizers["model"].gradient for each in (half, plain))
    assert F.cosine_similarity(ours, theirs, 0) > 0.97


@pytest.mark.parametrize("action", ACTIONS)
def test_compiled_imagination_is_the_plain_one(action):
    learner = make(action)
    batch = some_batch(learner)
    noise = learner.noise(batch)
    start = Latent(torch.rand(T * B, 32), F.one_hot(torch.randint(5, (T * B, 32)), 5).float())
    features, actions = learner.path.imagine(start, noise.prior, noise.action)
    expected, plain_actions = DreamerPath(learner.model).imagine(start, noise.prior, noise.action)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actions, plain_actions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 64), (4, 33)], ids=str)
def test_compiled_norm_with_silu(dtype, shape):
    x, gain = torch.randn(shape).mul(3).to(dtype).requires_grad_(), (torch.rand(shape[-1]) + 0.5).requires_grad_()
    like = x.detach().float().requires_grad_()
    out, expected = dreamer_cells.normed_silu(x, gain), normed_silu(like, gain.detach().requires_grad_())
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out.float(), expected, **tolerance)
    direction = torch.randn(shape)
    plain_gain = gain.detach().clone().requires_grad_()
    (normed_silu(like, plain_gain) * direction).sum().backward()
    (out.float() * direction).sum().backward()
    loose = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(x.grad.float(), like.grad, **loose)
    torch.testing.assert_close(gain.grad, plain_gain.grad, **loose)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_compiled_numbers(dtype):
    bins = symexp_bins()
    logits = torch.randn(6, 5, 255).mul(4).to(dtype).requires_grad_()
    like = logits.detach().float().requires_grad_()
    mean, expected = dreamer_cells.two_hot_mean(logits, bins), two_hot_mean(like, bins).detach()
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=100)  # of numbers up to 5e8
    assert (dreamer_cells.two_hot_mean(torch.zeros(4, 255, dtype=dtype), bins) == 0).all()
    values = torch.cat([torch.randn(6, 4) * 30, torch.full((6, 1), 1e12)], -1)
    loss, expected = dreamer_cells.two_hot_loss(logits, values, bins), two_hot_loss(like, values, bins)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    weights = torch.rand(6, 5)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    rtol = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits.grad.float(), like.grad, rtol=rtol, atol=rtol)


def test_not_a_number_is_not_hidden():
    """A gradient that went wrong is seen in the metrics."""
    learner = make()
    with torch.no_grad():
        learner.model.dynamics.prior_logits.weight[0, 0] = float("nan")
    batch = some_batch(learner)
    report, _ = learner.gradient(batch, learner.noise(batch))
    assert report["loss"].isnan()
