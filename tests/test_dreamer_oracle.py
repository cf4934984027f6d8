"""DreamerV3 against tests/dreamer_reference.py: losses and gradients of whole batches, optimizer steps, windows, ratios."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

import dreamer_reference as reference
from build import build, make_replay
from dreamer_reference import Batch, Constants, Draws, LaProp, ReturnScale, Sizes, World
from rl_training.algorithms.dreamer import DreamerHyperparameters, sequences
from rl_training.algorithms.dreamer_losses import imagine, observe
from rl_training.models.dreamer import SIZES, DreamerModel
from rl_training.models.rssm import Latent
from rl_training.ops.imagined_returns import PercentileScale
from rl_training.types import Spaces

SMALL = Sizes(deter=32, hidden=8, classes=4, units=8, depth=2)
MODULES = {
    "encoder": "enc",
    "dynamics": "dyn",
    "decoder": "dec",
    "reward": "rew",
    "continuation": "con",
    "policy": "pol",
    "value": "val",
    "slow_value": "slow",
}
TERMS = {
    "dynamics": "dyn",
    "representation": "rep",
    "reconstruction": "rec",
    "reward": "rew",
    "continuation": "con",
    "policy": "policy",
    "value": "value",
    "replay_value": "repval",
}
LEAVES = {"weight": "kernel", "bias": "bias", "gain": "scale"}


def gym_spaces(world: World) -> Spaces:
    def observation(kind: str, size: Any) -> Any:
        if kind == "vector":
            return Box(-np.inf, np.inf, (size,), np.float32)
        return Box(0, 255, size, np.uint8) if kind == "image" else MultiDiscrete(size)

    kind, size = world.action
    action = Box(-1, 1, (size,), np.float32) if kind == "continuous" else MultiDiscrete(size)
    if kind == "discrete" and len(size) == 1:
        action = Discrete(size[0])
    return Spaces(Dict({key: observation(*part) for key, part in world.observation.items()}), action)


def hyperparameters(sizes: Sizes = SMALL, **changes: Any) -> DreamerHyperparameters:
    return DreamerHyperparameters(**{**vars(sizes), "batch_size": 3, "batch_length": 4, **changes})


# Weights of the package by the names of the reference.


def placed(name: str, array: Any, world: World, sizes: Sizes) -> dict[str, Any]:
    """A weight or a gradient of the package, with the names and the axes of the reference."""
    module, *path, leaf = name.split(".")
    short, leaf = MODULES[module], LEAVES[leaf]
    if short in ("enc", "dec") and path[0] == "cnn":
        return placed_image(short, path[1:], leaf, array, world, sizes)
    if leaf == "kernel" and array.ndim == 2:
        array = array.T
    if path[0] in ("trunk", "mlp"):
        return {f"{short}/mlp{int(path[1]) // 2}/{leaf}": array}
    if short == "dec":
        return {f"dec/vec/{world.keys('vector', 'symbols')[int(path[1])]}/{leaf}": array}
    if short == "dyn":
        return {f"dyn/{dynamics_name(path)}/{leaf}": rows_of_tokens(name, array, world, sizes)}
    if short != "pol":
        return {f"{short}/out/{leaf}": array}
    kind, size = world.action
    if kind == "continuous":
        return {f"pol/{'mean' if path[0] == 'output' else 'stddev'}/{leaf}": array}
    parts = np.split(array, np.cumsum(size)[:-1], -1)
    return {f"pol/logits{i}/{leaf}": part for i, part in enumerate(parts)}


def dynamics_name(path: list[str]) -> str:
    names = {"of_deter": "in0", "of_stoch": "in1", "of_action": "in2", "hidden": "hid", "hidden_norm": "hid"}
    names |= {"gates": "gru", "prior_logits": "priorlogit", "posterior_logits": "obslogit"}
    layers = {"prior_trunk": "prior", "posterior_trunk": "obs"}
    return f"{layers[path[0]]}{int(path[1]) // 2}" if path[0] in layers else names[path[0]]


def rows_of_tokens(name: str, array: Any, world: World, sizes: Sizes) -> Any:
    """Tokens of images: the package has [channel, row, column], the reference [row, column, channel]."""
    if name != "dynamics.posterior_trunk.0.weight" or not world.keys("image"):
        return array
    height, width, _ = world.image
    channels = reference.MULTIPLES[-1] * sizes.depth
    tokens = height // 16 * (width // 16) * channels
    head, tail = array[:-tokens], array[-tokens:].reshape(channels, height // 16, width // 16, -1)
    return np.concatenate([head, tail.transpose(1, 2, 0, 3).reshape(tokens, -1)])


def placed_image(short: str, path: list[str], leaf: str, array: Any, world: World, sizes: Sizes) -> dict[str, Any]:
    height, width, _ = world.image
    rows, columns, channels = height // 16, width // 16, reference.MULTIPLES[-1] * sizes.depth
    if array.ndim == 4:
        array = array.transpose(2, 3, 1, 0)
    if short == "enc":
        return {f"enc/cnn{int(path[0]) // 3}/{leaf}": array}
    if path[0] == "layers":
        return {f"dec/{('conv3', 'conv2', 'conv1', 'imgout')[int(path[1]) // 3]}/{leaf}": array}
    if path[0] == "norm":
        return {"dec/sp/scale": array}
    if path[0] == "of_deter":
        blocks = reference.BLOCKS
        last = array.reshape(blocks, -1, channels // blocks, rows, columns)  # a bias has one input, so to speak
        last = last.transpose(0, 1, 3, 4, 2).reshape(blocks, last.shape[1], -1)
        return {f"dec/sp0/{leaf}": last if leaf == "kernel" else last.reshape(-1)}
    if path[1] != "2":
        return {f"dec/sp1/{leaf}": array.T}
    pixels = array.reshape(channels, rows, columns, -1).transpose(3, 1, 2, 0)
    return {
        f"dec/sp2/{leaf}": pixels.reshape(-1, rows * columns * channels) if leaf == "kernel" else pixels.reshape(-1)
    }


def weights_of(model: DreamerModel, world: World, sizes: Sizes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found |= placed(name, parameter.detach().double().numpy(), world, sizes)
    return {name: torch.tensor(x, requires_grad=not name.startswith("slow")) for name, x in found.items()}


def gradients_of(model: DreamerModel, world: World, sizes: Sizes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found |= placed(name, parameter.grad.double().numpy(), world, sizes)
    return found


@torch.no_grad()
def randomise(model: DreamerModel, seed: int, spread: float = 1.0) -> None:
    """No zeros and no ones, so that each weight matters. Reward and value are a bump around 0."""
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        fan_in = math.prod(parameter.shape[1:])
        scale = 0.1 if parameter.ndim == 1 else spread / math.sqrt(fan_in)
        array = rng.normal(0, scale, parameter.shape) + name.endswith("gain")
        if name in ("reward.output.bias", "value.output.bias", "slow_value.output.bias"):
            array -= 0.5 * ((np.arange(reference.BINS) - reference.BINS // 2) / 6) ** 2
        parameter.copy_(torch.from_numpy(array))


# Batches.


def random_batch(world: World, sizes: Sizes, rows: int, steps: int, seed: int) -> Batch:
    """The first sequence holds an end, the second a truncation, the third begins with a beginning and ends with an end."""
    rng = np.random.default_rng(seed)

    def observation(kind: str, size: Any) -> Any:
        if kind == "vector":
            return rng.normal(0, 3, (rows, steps, size)).astype(np.float32)
        if kind == "image":
            return rng.integers(0, 256, (rows, steps, *size)).astype(np.uint8)
        return np.stack([rng.integers(0, count, (rows, steps)) for count in size], -1)

    kind, size = world.action
    if kind == "continuous":
        action = rng.normal(0, 1.2, (rows, steps, size)).astype(np.float32)
    else:
        action = np.stack([rng.integers(0, count, (rows, steps)) for count in size], -1)
    first, last, terminal = np.zeros((3, rows, steps), bool)
    last[0, 1] = terminal[0, 1] = first[0, 2] = True
    last[1, 2] = first[1, 3] = True
    first[2, 0] = last[2, -1] = terminal[2, -1] = True
    return Batch(
        {key: observation(*part) for key, part in world.observation.items()},
        action,
        rng.normal(0, 2, (rows, steps)).astype(np.float32),
        first,
        last,
        terminal,
        rng.normal(0, 0.5, (rows, sizes.deter)).astype(np.float32),
        np.eye(sizes.classes, dtype=np.float32)[rng.integers(0, sizes.classes, (rows, reference.GROUPS))],
    )


def package_batch(learner: Any, batch: Batch) -> dict[str, Any]:
    def time_first(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(np.swapaxes(array, 0, 1)))

    action = time_first(batch.action)
    if learner.model.policy.single:
        action = action.squeeze(-1)
    return {
        "obs": {key: time_first(value) for key, value in batch.observation.items()},
        "action": learner.model.policy.vector(action),
        "reward": time_first(batch.reward),
        "terminated": time_first(batch.terminal),
        "first": time_first(batch.first),
        "last": time_first(batch.last),
        "deter": torch.from_numpy(batch.deter),
        "stoch": torch.from_numpy(batch.stoch),
    }


@torch.no_grad()
def draws_of(model: DreamerModel, batch: dict[str, Any], noise: Any) -> Draws:
    """What the package draws with this noise. The reference lists roots row by row, the package step by step."""
    latent, _ = observe(model, batch, noise.posterior)
    steps, rows = batch["reward"].shape
    dream = imagine(model, Latent(*(x.flatten(0, 1) for x in latent)), noise)

    def by_root(x: torch.Tensor) -> Any:
        """[H, T * B, ...] -> [B * T, H, ...]"""
        x = x.unflatten(1, (steps, rows)).transpose(1, 2).flatten(1, 2)
        return x.transpose(0, 1).numpy()

    return Draws(
        latent.stoch.argmax(-1).transpose(0, 1).numpy(),
        by_root(dream.latent.stoch.argmax(-1)[1:]),
        by_root(dream.action),
    )


def constants_of(hp: DreamerHyperparameters) -> Constants:
    return Constants(
        imagined_steps=int(hp.imagination_length),
        horizon=hp.horizon,
        trace=hp.gae_lambda,
        free_nats=hp.free_nats,
        entropy=hp.ent_coef,
        slow_regulariser=hp.slow_value_coef,
        scales={short: getattr(hp, f"{name}_coef") for name, short in TERMS.items()},
    )


class Case:
    """One batch, with a learner of the package and what the reference says about it."""

    def __init__(self, world: World, hp: DreamerHyperparameters, constants: Constants, *, sizes: Sizes = SMALL) -> None:
        self.world, self.sizes = world, sizes
        self.learner = build("dreamer", gym_spaces(world), hp)
        randomise(self.learner.model, 1)
        self.learner.return_scale.bounds.copy_(torch.tensor([-3.0, 5.0]))
        self.batch = random_batch(world, sizes, 3, 4, 2)
        self.inputs = package_batch(self.learner, self.batch)
        self.noise = self.learner.noise(self.inputs)
        draws = draws_of(self.learner.model, self.inputs, self.noise)
        self.weights = weights_of(self.learner.model, world, sizes)
        self.expected = reference.losses(
            self.weights, world, sizes, self.batch, draws, ReturnScale(-3.0, 5.0), constants
        )
        self.expected.total.backward()
        self.report, self.latent = self.learner.gradient(self.inputs, self.noise)
        self.gradients = gradients_of(self.learner.model, world, sizes)


OTHER = {
    "imagination_length": 3,
    "horizon": 20.0,
    "gae_lambda": 0.8,
    "free_nats": 3.0,
    "ent_coef": 0.07,
    "slow_value_coef": 0.6,
    "dynamics_coef": 0.9,
    "representation_coef": 0.4,
    "reconstruction_coef": 1.1,
    "reward_coef": 1.2,
    "continuation_coef": 1.3,
    "policy_coef": 1.4,
    "value_coef": 1.5,
    "replay_value_coef": 1.6,
}
VECTORS = World({"speed": ("vector", 3), "angle": ("vector", 2)}, ("continuous", 2))
SYMBOLS = World({"angle": ("vector", 3), "card": ("symbols", (3, 2))}, ("discrete", (3, 2)))
PICTURES = World(
    {"view": ("image", (48, 64, 3)), "map": ("image", (48, 64, 1)), "angle": ("vector", 2)}, ("discrete", (3,))
)


@functools.cache
def case(name: str) -> Case:
    if name == "vectors":  # the defaults are those of the paper
        return Case(VECTORS, hyperparameters(), Constants())
    hp = hyperparameters(**OTHER)
    return Case(SYMBOLS if name == "symbols" else PICTURES, hp, constants_of(hp))


CASES = ["vectors", "symbols", "pictures"]


@pytest.mark.parametrize("name", CASES)
def test_losses_of_a_batch(name: str) -> None:
    found = case(name)
    expected = {short: 0.0 for short in TERMS.values()}
    for term, value in found.expected.losses.items():
        expected[term.split("/")[0]] += value.item()
    reported = {short: found.report[f"{name}_loss"].item() for name, short in TERMS.items()}
    assert reported == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert found.report["loss"].item() == pytest.approx(found.expected.total.item(), rel=1e-5)
    assert found.report["return_scale"].item() == pytest.approx(found.expected.scale, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_batch(name: str) -> None:
    found = case(name)
    wrong = {}
    for weight, expected in found.weights.items():
        if expected.grad is None:
            assert weight.startswith("slow"), weight
            continue
        largest = expected.grad.abs().max().item()
        assert largest > 0, weight
        error = np.abs(found.gradients[weight] - expected.grad.numpy()).max() / largest
        if error > 2e-4:
            wrong[weight] = error
    assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_latents_of_a_batch(name: str) -> None:
    found = case(name)
    np.testing.assert_allclose(found.latent.deter.transpose(0, 1), found.expected.deter, atol=2e-6)
    np.testing.assert_allclose(found.latent.stoch.transpose(0, 1), found.expected.stoch, atol=1e-6)
