"""The fast ways through DreamerV3 give the results of the plain one: losses, gradients, latents, imagined states."""

from __future__ import annotations

import math
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from build import build
from rl_training import ALGORITHMS
from rl_training.acting.dreamer_compiled import CompiledPath
from rl_training.acting.dreamer_path import DreamerPath, StepsPath
from rl_training.acting.paths import plain_paths
from rl_training.models.dreamer_layers import normed_silu
from rl_training.models.rssm import Latent
from rl_training.ops import dreamer_cells
from rl_training.ops.dreamer_steps import PLAIN
from rl_training.ops.two_hot import symexp_bins, two_hot_loss, two_hot_mean
from rl_training.types import Spaces

T, B, H = 7, 3, 4
SHAPES = [(7, 3, 4), (2, 1, 1), (9, 2, 1), (3, 5, 6)]  # T, B, H
ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
}
SMALL = {"deter": 32, "hidden": 12, "classes": 5, "units": 20, "depth": 2, "precision": "float32"}
TYPES = [torch.float32, torch.bfloat16]
VECTORS = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)


def make(action="discrete", path="plain", *, obs=VECTORS, steps=H, device="cpu", **numbers):
    """A learner whose parameters are all random, so that no output is zero. Values and rewards lie around 0."""
    hp = {"size": "1m", "warmup_updates": 0, "imagination_length": steps, **SMALL, **numbers}
    torch.manual_seed(0)
    with nullcontext() if path == "compiled" else plain_paths():
        made = ALGORITHMS["dreamer"].recipe.hyperparameters(**hp)
        learner = build("dreamer", Spaces(obs, ACTIONS[action]), made, device=device)
    model = learner.model
    if path == "written out":
        learner.path = StepsPath(model, learner.path.dtype, PLAIN)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape).to(device))
        for head in (model.reward, model.value, model.slow_value):  # the outermost bins are 5e8
            head.output.bias.sub_(0.5 * ((torch.arange(255, device=device) - 127) / 6) ** 2)
    return learner


def some_batch(learner, seed=0, *, length=T, rows=B, obs=VECTORS):
    generator, size = torch.Generator().manual_seed(seed), learner.model.size

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def some(share):
        return torch.rand(length, rows, generator=generator) < share

    last = some(0.2)
    first = torch.cat([some(0.5)[:1], last[:-1]])
    categories = torch.randint(size.classes, (rows, 32), generator=generator)
    return {
        "obs": observations(obs, seed, length, rows),
        "action": 2 * normal(length, rows, learner.model.policy.action_size),
        "reward": 9 * normal(length, rows), "terminated": last & some(0.5), "first": first, "last": last,
        "deter": normal(rows, size.deter).tanh(), "stoch": F.one_hot(categories, size.classes).float(),
    }  # fmt: skip


def observations(space, seed, *lead):
    """[*lead, ...] observations of a space, random."""
    if isinstance(space, gym.spaces.Dict):
        return {key: observations(part, seed, *lead) for key, part in space.spaces.items()}
    space.seed(seed)
    drawn = torch.from_numpy(np.stack([space.sample() for _ in range(math.prod(lead))]))
    return drawn.unflatten(0, lead)


def assert_same_gradient(learner, plain, batch, noise, *, share):
    """The gradient of each parameter to a share of its largest number; what is reported; the latents."""
    (report, latent), (expected, plain_latent) = (each.gradient(batch, noise) for each in (learner, plain))
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(report[name], value, rtol=share, atol=share, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(latent.stoch, plain_latent.stoch)
    torch.testing.assert_close(latent.deter, plain_latent.deter, rtol=share, atol=share)
    for (name, ours), theirs in zip(learner.model.named_parameters(), plain.model.parameters(), strict=True):
        if theirs.requires_grad:
            largest = theirs.grad.abs().max().item()
            assert (ours.grad - theirs.grad).abs().max().item() <= share * largest, name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("path", ["compiled", "written out"])
def test_a_fast_gradient_is_the_plain_one(path, action, shape):
    """Sequences in which episodes begin anywhere, of which some begin with the first row."""
    length, rows, steps = shape
    fast, plain = make(action, path, steps=steps), make(action, steps=steps)
    assert type(plain.path) is DreamerPath
    assert type(fast.path) is (CompiledPath if path == "compiled" else StepsPath)
    for seed in range(3):
        batch = some_batch(plain, seed, length=length, rows=rows)
        if seed == 2:  # nothing flows from a step to the next
            batch["first"][:] = True
        assert_same_gradient(fast, plain, batch, plain.noise(batch), share=3e-5)


@pytest.mark.parametrize("path", ["compiled", "written out"])
def test_updates_stay_together(path):
    learners = make(path=path), make()
    for seed in range(4):
        batch = some_batch(learners[0], seed)
        noise = learners[0].noise(batch)
        reports = [learner.update(batch, noise)[0] for learner in learners]
        for name, value in reports[1].items():
            torch.testing.assert_close(reports[0][name], value, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("path", ["plain", "compiled", "written out"])
def test_products_of_bfloat16_give_almost_the_same_gradient(path):
    half, plain = make(path=path, precision="bfloat16"), make()
    assert half.path.dtype == torch.bfloat16
    batch = some_batch(plain)
    noise = plain.noise(batch)
    report, expected = (each.gradient(batch, noise)[0] for each in (half, plain))
    for name in ("reconstruction_loss", "dynamics_loss", "reward_loss", "value_loss"):
        torch.testing.assert_close(report[name], expected[name], rtol=0.05, atol=0.05, msg=name)
    ours, theirs = (each.optimizers["model"].gradient for each in (half, plain))
    assert F.cosine_similarity(ours, theirs, 0) > 0.97


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("path", ["compiled", "written out"])
def test_fast_imagination_is_the_plain_one(path, action, shape):
    length, rows, steps = shape
    learner = make(action, path, steps=steps)
    batch = some_batch(learner, length=length, rows=rows)
    noise, count = learner.noise(batch), length * rows
    start = Latent(torch.rand(count, 32), F.one_hot(torch.randint(5, (count, 32)), 5).float())
    features, actions = learner.path.imagine(start, noise.prior, noise.action)
    expected, plain_actions = DreamerPath(learner.model).imagine(start, noise.prior, noise.action)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actions, plain_actions, rtol=1e-5, atol=1e-5)


# --- single steps: what compiled loops and plain functions give is what autograd says ---------------------------------

IMPLEMENTATIONS = {"compiled": dreamer_cells.STEPS, "plain": PLAIN}
LAYOUTS = [((4, 10), (10,)), ((1, 1), (1,)), ((3, 33), (33,)), ((8, 4, 3), (8, 1, 3)), ((8, 1, 5), (8, 1, 5))]


def close(found, expected, dtype):
    tolerance = {"rtol": 2e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(found.double(), expected, **tolerance)


def rows_of(x):
    """[N, n], or [G, N, k] as [N, G k]"""
    return x if x.dim() == 2 else x.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shapes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norms_with_silu_by_the_equation(name, shapes, dtype):
    steps, (shape, gain_shape) = IMPLEMENTATIONS[name], shapes
    x, d_out, gain = torch.randn(shape).mul(3).to(dtype), torch.randn(shape).to(dtype), torch.rand(gain_shape) + 0.5
    wide, wide_gain = x.double().requires_grad_(), gain.double().requires_grad_()
    root = (rows_of(wide).square().mean(-1) + 1e-4).sqrt()
    expected = F.silu(wide / (root.unsqueeze(-1) if x.dim() == 2 else root.view(1, -1, 1)) * wide_gain)
    close(steps.norm_silu(x, gain), expected.detach(), dtype)
    expected.backward(d_out.double())
    close(steps.norm_silu_backward(x, gain, d_out), wide.grad, dtype)
    close(steps.norm_silu_gain(x, gain, d_out), wide_gain.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gates_by_the_equation(name, rows, dtype):
    steps, gates = IMPLEMENTATIONS[name], torch.randn(8, rows, 9).mul(2).to(dtype)
    deter, d_out = torch.randn(rows, 24).tanh(), torch.randn(rows, 24)
    wide, old = gates.double().requires_grad_(), deter.double().requires_grad_()
    reset, candidate, update = (rows_of(part) for part in wide.chunk(3, -1))
    update = torch.sigmoid(update - 1)
    expected = update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * old
    close(steps.gru(gates, deter), expected.detach(), torch.float32)
    expected.backward(d_out.double())
    d_gates, d_deter = steps.gru_backward(gates, deter, d_out)
    close(d_gates, wide.grad, dtype)
    close(d_deter, old.grad, torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("classes", [2, 5, 16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_mixed_samples_by_the_equation(name, classes, dtype):
    steps, rows = IMPLEMENTATIONS[name], 6
    logits, noise = torch.randn(rows, 32 * classes).mul(3).to(dtype), torch.rand(rows, 32)
    wide = logits.double().requires_grad_()
    expected = 0.99 * wide.view(rows, 32, classes).softmax(-1) + 0.01 / classes
    probs, sample = steps.mixed_sample(logits, noise)
    close(probs, expected.detach().flatten(1), torch.float32)
    chosen = (expected.detach().cumsum(-1) <= noise.unsqueeze(-1)).sum(-1)
    assert torch.equal(sample.view(rows, 32, classes).argmax(-1), chosen)
    assert (sample.view(rows, 32, classes).sum(-1) == 1).all()
    d_log_probs, d_sample = torch.randn(rows, 32 * classes), torch.randn(rows, 32 * classes)
    (expected.flatten(1).log() * d_log_probs + expected.flatten(1) * d_sample).sum().backward()  # straight-through
    close(steps.mixed_backward(probs, noise, d_log_probs, d_sample), wide.grad, torch.float32)


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
    others = values.flip(0) / 3
    loss, expected = (
        f(x, values, bins, others, 0.7) for f, x in ((dreamer_cells.two_hot_loss, logits), (two_hot_loss, like))
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    weights = torch.rand(6, 5)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    rtol = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits.grad.float(), like.grad, rtol=rtol, atol=rtol)


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has no such setting")
@pytest.mark.parametrize("matrix_units", [False, True])
def test_float32_is_float32_on_processors_with_matrix_units_too(matrix_units, monkeypatch):
    """oneDNN may only be told that products may be of bfloat16 where it makes no use of that."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: matrix_units, raising=False)
    usual = torch.backends.mkldnn.matmul.fp32_precision
    with make(path="compiled").path.settings():
        assert (torch.backends.mkldnn.matmul.fp32_precision != usual) != matrix_units
    assert torch.backends.mkldnn.matmul.fp32_precision == usual


def test_not_a_number_is_not_hidden():
    """A gradient that went wrong is seen in the metrics."""
    learner = make(path="compiled")
    with torch.no_grad():
        learner.model.dynamics.prior_logits.weight[0, 0] = float("nan")
    batch = some_batch(learner)
    report, _ = learner.gradient(batch, learner.noise(batch))
    assert report["loss"].isnan()
