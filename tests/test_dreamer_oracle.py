"""DreamerV3 against dreamer_reference.py: losses and gradients of batches, optimizer steps, windows, acting."""

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
from rl_training.algorithms import dreamer
from rl_training.algorithms.dreamer import DreamerHyperparameters
from rl_training.algorithms.dreamer_losses import imagine, observe
from rl_training.data.windows import NewWindows
from rl_training.models.dreamer import DreamerModel
from rl_training.models.rssm import Latent, inverse_cdf
from rl_training.ops.imagined_returns import PercentileScale, lambda_returns
from rl_training.ops.two_hot import symexp_bins, two_hot_loss, two_hot_mean
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
BUMP = 0.5 * ((np.arange(reference.BINS) - reference.BINS // 2) / 6) ** 2  # less of it in logits: numbers around 0
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
    given = {"batch_size": 3, "batch_length": 4, "precision": "float32"}
    return DreamerHyperparameters(**{**vars(sizes), **given, **changes})


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
            array -= BUMP
        parameter.copy_(torch.from_numpy(array))


# Batches.


def random_batch(world: World, sizes: Sizes, rows: int, steps: int, seed: int) -> Batch:
    """The first sequence holds an end, the second a truncation; the third is one episode."""
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
def draws_of(path: Any, batch: dict[str, Any], noise: Any) -> Draws:
    """What the package draws with this noise. The reference lists roots row by row, the package step by step."""
    latent, _ = observe(path, batch, noise.posterior)
    steps, rows = batch["reward"].shape
    dream = imagine(path, Latent(*(x.flatten(0, 1) for x in latent)), noise)
    stoch = dream.features[1:, :, latent.deter.shape[-1] :]

    def by_root(x: torch.Tensor) -> Any:
        """[H, T * B, ...] -> [B * T, H, ...]"""
        x = x.unflatten(1, (steps, rows)).transpose(1, 2).flatten(1, 2)
        return x.transpose(0, 1).numpy()

    return Draws(
        latent.stoch.argmax(-1).transpose(0, 1).numpy(),
        by_root(stoch.unflatten(-1, latent.stoch.shape[-2:]).argmax(-1)),
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
        draws = draws_of(self.learner.path, self.inputs, self.noise)
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
    expected = dict.fromkeys(TERMS.values(), 0.0)
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


# A learner on a replay.


class Recorded:
    """What a learner does in a run: batches, noise, and gradients as they reach the optimizer."""

    def __init__(self, learner: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.learner, self.places, self.batches, self.gradients, self.weights = learner, [], [], [], []
        update, step, draw = learner.update, learner.optimizers["model"].step, dreamer.draw_new_first

        def recorded_draw(*args: Any) -> Any:
            self.places.append(draw(*args))
            return self.places[-1]

        def recorded_update(batch: Any, noise: Any) -> Any:
            scale = ReturnScale(*learner.return_scale.bounds.tolist())
            draws = draws_of(learner.path, batch, noise)
            weights = weights_of(learner.model, world, SMALL)
            report, latent = update(batch, noise)
            self.batches.append((batch, draws, scale, weights, report, latent))
            return report, latent

        def recorded_step(rate: Any) -> None:
            self.weights.append(weights_of(learner.model, world, SMALL))
            self.gradients.append(gradients_of(learner.model, world, SMALL))
            step(rate)

        monkeypatch.setattr(dreamer, "draw_new_first", recorded_draw)
        monkeypatch.setattr(learner, "update", recorded_update)
        monkeypatch.setattr(learner.optimizers["model"], "step", recorded_step)


def rows_of_stream(env: int, count: int) -> list[dict[str, Any]]:
    """Observations of one environment, one row each: what led to it, what was done in it, whether an episode ends."""
    rng, rows, left = np.random.default_rng(env), [], 0
    for _ in range(count):
        begins = left == 0
        if begins:
            left, ends = int(rng.integers(3, 8)), bool(rng.integers(2))
        left -= 1
        row = {"angle": rng.normal(0, 2, 2), "speed": rng.normal(0, 2, 3), "first": begins, "last": left == 0}
        row |= {"reward": 0.0 if begins else rng.normal(), "terminal": left == 0 and ends}
        row |= {"action": np.zeros(2) if left == 0 else rng.normal(0, 1, 2)}
        row |= {"deter": rng.uniform(-1, 1, SMALL.deter), "stoch": rng.integers(0, SMALL.classes, reference.GROUPS)}
        rows.append({name: np.asarray(x) for name, x in row.items()})
    return rows


def fill(replay: Any, streams: list[list[dict[str, Any]]], seen: list[int], steps: int) -> None:
    """Add steps of all streams. A step goes from a row to the next; an episode's last row has none."""
    for _ in range(steps):
        for env, stream in enumerate(streams):
            seen[env] += bool(stream[seen[env]]["last"])
        here = [stream[seen[env]] for env, stream in enumerate(streams)]
        there = [stream[seen[env] + 1] for env, stream in enumerate(streams)]
        stack = functools.partial(stacked, here)
        step = {"obs": {key: stack(key) for key in ("angle", "speed")}, "first": stack("first", bool)}
        step["next_obs"] = {key: stacked(there, key) for key in ("angle", "speed")}
        step |= {"action": stack("action"), "reward": stacked(there, "reward")}
        step["terminated"] = stacked(there, "terminal", bool)
        step["truncated"] = stacked(there, "last", bool) & ~step["terminated"]
        replay.add(step | {"deter": stack("deter", np.float16), "stoch": stack("stoch", np.uint8)})
        seen[:] = [row + 1 for row in seen]


def stacked(rows: list[dict[str, Any]], name: str, dtype: Any = np.float32) -> Any:
    return np.stack([row[name] for row in rows]).astype(dtype)


def reference_batch(batch: dict[str, Any]) -> Batch:
    def rows_first(x: torch.Tensor) -> Any:
        return x.transpose(0, 1).numpy()

    obs = {key: rows_first(x) for key, x in batch["obs"].items()}
    flags = [rows_first(batch[name]) for name in ("action", "reward", "first", "last", "terminated")]
    return Batch(obs, *flags, batch["deter"].numpy(), batch["stoch"].numpy())


def learner_with_replay(**changes: Any) -> tuple[Any, Any, list[Any], list[int]]:
    """Two environments; 20 steps of each are known, of which 1 gradient step is due for 12 env steps."""
    changes = {"learning_starts": 0, "imagination_length": 2, "train_ratio": 1.0, "buffer_capacity": 200} | changes
    spaces = gym_spaces(VECTORS)
    torch.manual_seed(0)
    learner = build("dreamer", spaces, hyperparameters(**changes))
    with torch.no_grad():  # of almost equal bins up to 5e8 the mean in float32 is off by some tenths
        for head in (learner.model.reward, learner.model.value, learner.model.slow_value):
            head.output.bias.sub_(torch.from_numpy(BUMP / 14))  # more: squares of gradients would underflow
    replay, streams, seen = (
        make_replay("dreamer", learner, spaces, 2),
        [rows_of_stream(env, 90) for env in (0, 1)],
        [0, 0],
    )
    fill(replay, streams, seen, 20)
    learner.env_steps_used = replay.added
    return learner, replay, streams, seen


def test_learning_from_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five gradient steps, each from what the last one left: batch, losses, optimizer, slow critic, stored latents."""
    rates = {"learning_rate": 3e-3, "warmup_updates": 3}
    learner, replay, streams, seen = learner_with_replay(**rates)
    assert learner.model.value.output.weight.count_nonzero() == 0  # where clipping has a smallest norm
    record = Recorded(learner, VECTORS, monkeypatch)
    kept = {name: replay.columns[name].copy() for name in ("deter", "stoch")}
    fill(replay, streams, seen, 30)
    for env, stream in enumerate(streams):
        known = stream[: seen[env]]  # of an episode's last row the replay knows no latent
        place = env * replay.ring.length + np.arange(len(known))
        kept["deter"][place] = [row["deter"] * ~row["last"] for row in known]
        kept["stoch"][place] = [row["stoch"] * ~row["last"] for row in known]
    learner.learn(replay)
    assert len(record.batches) == len(record.places) == len(record.gradients) == 5
    optimizer = LaProp(rate=3e-3, warm_up=3)
    for number, (batch, draws, scale, weights, report, latent) in enumerate(record.batches):
        place = record.places[number]
        assert place.shape == (3, 5)
        given = reference_batch(batch)
        assert_rows(given, place, streams, replay.ring.length)
        np.testing.assert_allclose(given.deter, kept["deter"][place[:, 0]], atol=1e-3)
        np.testing.assert_array_equal(given.stoch.argmax(-1), kept["stoch"][place[:, 0]])
        for b in range(3):
            for t in range(4):
                kept["deter"][place[b, t + 1]] = latent.deter[t, b].numpy()
                kept["stoch"][place[b, t + 1]] = latent.stoch[t, b].argmax(-1).numpy()

        expected = reference.losses(weights, VECTORS, SMALL, given, draws, scale, Constants(imagined_steps=2))
        np.testing.assert_allclose(latent.deter.transpose(0, 1), expected.deter, atol=3e-6)
        assert report["loss"].item() == pytest.approx(expected.total.item(), rel=1e-5)
        later = record.batches[number + 1 :]
        bounds = [later[0][2].low, later[0][2].high] if later else learner.return_scale.bounds.tolist()
        assert bounds == pytest.approx([scale.low, scale.high], rel=1e-4, abs=1e-7)

        learned = {name: x.detach().numpy() for name, x in weights.items() if not name.startswith("slow")}
        moved = optimizer.step(learned, record.gradients[number])
        after = later[0][3] if later else weights_of(learner.model, VECTORS, SMALL)
        for name, x in moved.items():
            np.testing.assert_allclose(after[name].detach(), x, rtol=1e-5, atol=2e-7, err_msg=name)
            if number == 0:
                np.testing.assert_array_equal(after[name].detach(), learned[name])
            if name.startswith("val/"):
                slow = "slow" + name[3:]
                followed = reference.follow(weights[slow].numpy(), x)
                np.testing.assert_allclose(after[slow], followed, rtol=1e-5, atol=1e-7, err_msg=slow)
    np.testing.assert_array_equal(replay.columns["stoch"], kept["stoch"])
    np.testing.assert_allclose(replay.columns["deter"], kept["deter"], atol=1e-3)


def assert_rows(given: Batch, place: Any, streams: list[Any], length: int) -> None:
    """The batch is the rows after the first of each window, each with what led to it."""
    for b in range(len(place)):
        env, start = divmod(int(place[b, 0]), length)
        for t in range(4):
            before, row = streams[env][start + t], streams[env][start + t + 1]
            for key in ("angle", "speed"):
                np.testing.assert_allclose(given.observation[key][b, t], row[key], rtol=1e-6)
            found = given.first[b, t], given.last[b, t], given.terminal[b, t]
            assert found == (row["first"], row["last"], row["terminal"])
            assert given.reward[b, t] == pytest.approx(float(row["reward"]))
            np.testing.assert_allclose(given.action[b, t], before["action"], rtol=1e-6)


def test_every_row_is_learned_from_once_before_any_is_drawn_at_random() -> None:
    _, replay, streams, seen = learner_with_replay()
    new, taken = NewWindows(2, 5), []
    for _ in range(6):
        fill(replay, streams, seen, 7)
        taken += list(new.take(replay.ring, 2))
    taken += list(new.take(replay.ring, 100))
    rows = np.stack(taken)
    for env in (0, 1):
        own = rows[rows[:, 0] // replay.ring.length == env] % replay.ring.length
        np.testing.assert_array_equal(own.ravel(), np.arange(own.size))  # in order, without gaps
        assert replay.ring.complete_rows()[1][env] - own.size < 5  # to the end


@pytest.mark.parametrize("ratio", [0.3, 0.000123, 7.7, 12.0, 37.5, 100.0])
@pytest.mark.parametrize("envs", [1, 3, 16])
def test_train_ratio_is_exact(ratio: float, envs: int) -> None:
    """After any number of steps, the steps replayed are those due, but for less than one gradient step."""
    learner = build("dreamer", gym_spaces(VECTORS), hyperparameters(train_ratio=ratio, learning_starts=64))
    taken, exact = 0, Fraction(round(ratio * 10**6), 10**6)
    for number in range(1, 400):
        added = number * envs
        taken += learner.steps_due(added)
        if number == 200:  # as if resumed
            state = learner.state_dict()
            learner = build("dreamer", gym_spaces(VECTORS), hyperparameters(train_ratio=ratio, learning_starts=64))
            learner.load_state_dict(state)
        begun = (63 // envs) * envs  # what came before learning is not made up for
        assert taken == max(added - begun, 0) * exact // 12


def test_acting_is_observing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latents of an actor, its memory zeroed where episodes begin, are those of its observations as a batch."""
    learner = build("dreamer", gym_spaces(VECTORS), hyperparameters())
    actor = learner.actor
    randomise(learner.model, 3)
    batch = random_batch(VECTORS, SMALL, 3, 6, 4)
    rng, memory, drawn, deters = np.random.default_rng(0), {}, [], []
    actions = np.zeros((3, 6, 2), np.float32)
    for t in range(6):
        obs = {key: x[:, t] for key, x in batch.observation.items()}
        memory = {name: part * ~batch.first[:, t].reshape(-1, *[1] * (part.ndim - 1)) for name, part in memory.items()}
        decision = actor.act(obs, memory, explore=True, rng=rng)
        memory = decision.memory
        drawn.append(decision.extras["stoch"])
        deters.append(decision.extras["deter"])
        actions[:, t] = decision.action
    assert np.abs(actions).max() > 1  # stored as drawn; the environment clips
    first = batch.first.copy()
    first[:, 0] = True
    before = np.concatenate([np.zeros((3, 1, 2)), actions[:, :-1]], 1)
    given = Batch(batch.observation, before, batch.reward, first, batch.last, batch.terminal, batch.deter, batch.stoch)
    weights = weights_of(learner.model, VECTORS, SMALL)
    expected, _, posteriors = reference.observe(weights, VECTORS, given, np.swapaxes(drawn, 0, 1))
    for b in range(3):
        for t in range(6):
            np.testing.assert_allclose(deters[t][b], expected[b][t].detach(), atol=1e-3)
    assert np.stack([p.detach() for row in posteriors for p in row]).min() > 0.0024


# Single functions.


def test_draws_follow_their_probabilities() -> None:
    probabilities = torch.tensor([0.0, 0.2, 0.5, 0.0, 0.3])
    uniform = (torch.arange(1000) + 0.5) / 1000
    drawn = inverse_cdf(probabilities.expand(1000, 5), uniform)
    assert drawn.bincount(minlength=5).tolist() == [0, 200, 500, 0, 300]


def test_two_hot_numbers() -> None:
    places = reference.bins()
    bins = symexp_bins(reference.BINS)
    np.testing.assert_allclose(bins, places, rtol=1e-6)
    numbers = [0.0, 0.1, -0.1, 1.0, -7.3, 1e3, -1e6, 4e8, 6e8, -6e8, *places[::40]]
    logits = torch.randn(len(numbers), reference.BINS, generator=torch.Generator().manual_seed(0))
    loss = two_hot_loss(logits, torch.tensor(numbers), bins)
    expected = [reference.two_hot_loss(row.double(), x).item() for row, x in zip(logits, numbers, strict=True)]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    narrow = logits - 0.02 * (torch.arange(reference.BINS) - 127.0) ** 2
    means = [reference.readout(row.double()).item() for row in narrow]
    np.testing.assert_allclose(two_hot_mean(narrow, bins), means, rtol=1e-4, atol=1e-5)
    assert two_hot_mean(torch.full((2, reference.BINS), 3.0), bins).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("count", [1, 2, 3, 50, 960])
def test_return_scale(count: int) -> None:
    scale, expected, rng = PercentileScale(), ReturnScale(), np.random.default_rng(count)
    for number in range(30):
        returns = rng.normal(number, 100, count).astype(np.float32)
        found = scale.update(torch.from_numpy(returns).reshape(1, -1)).item()
        assert found == pytest.approx(expected.update(returns.tolist()), rel=1e-4)
        if number == 10:
            state, scale = scale.state_dict(), PercentileScale()
            scale.load_state_dict(state)
    assert count < 3 or expected.high - expected.low > 10


def test_imagined_and_replayed_returns() -> None:
    rng, steps, rows = np.random.default_rng(0), 7, 5
    reward, bootstrap = rng.normal(0, 1, (2, steps, rows))
    discount, last = rng.uniform(0, 1, (steps, rows)), rng.random((steps, rows)) < 0.3
    for ends in (None, last):
        tensors = [torch.from_numpy(x) for x in (reward, discount, bootstrap)]
        found = lambda_returns(*tensors, 0.9, None if ends is None else torch.from_numpy(ends))
        for b in range(rows):
            trace = [0.9] * steps if ends is None else list(0.9 * (1 - ends[:, b]))
            expected = reference.mixture_return(reward[:, b], discount[:, b], bootstrap[:, b], trace)
            np.testing.assert_allclose(found[:, b], expected, rtol=1e-9)


# Constants.

WALKER = World({"height": ("vector", 1), "orientations": ("vector", 14), "velocity": ("vector", 9)}, ("continuous", 6))
TOTALS = {
    "1m": 640_867,
    "12m": 9_738_019,
    "25m": 21_782_947,
    "50m": 38_612_003,
    "100m": 86_622_499,
    "200m": 153_769_507,
    "400m": 345_473_059,
}


@pytest.mark.parametrize("size", TOTALS)
def test_parameter_counts(size: str) -> None:
    """Of the published code, for walker_walk from vectors."""
    with torch.device("meta"):
        model = DreamerModel(gym_spaces(WALKER), size)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        module = MODULES[name.split(".")[0]]
        if module != "slow":
            counts[module] = counts.get(module, 0) + parameter.numel()
    assert counts | {"total": sum(counts.values())} == reference.counts(WALKER, reference.PRESETS[f"size{size}"])
    assert sum(counts.values()) == TOTALS[size]
    if size == "1m":
        published = {"enc": 10_112, "dyn": 364_416, "dec": 51_096, "rew": 57_663, "con": 41_153}
        assert counts == published | {"pol": 50_316, "val": 66_111}


def test_initial_weights() -> None:
    """Normal with the deviation 1.1368 / sqrt(inputs), cut off at two of them; the last layers of some heads: less."""
    torch.manual_seed(0)
    world = World(WALKER.observation | {"view": ("image", (64, 64, 3))}, WALKER.action)
    sizes = reference.PRESETS["size1m"]
    weights = weights_of(DreamerModel(gym_spaces(world), "1m"), world, sizes)
    assert {name: tuple(x.shape) for name, x in weights.items() if not name.startswith("slow")} == reference.shapes(
        world, sizes
    )
    factors = {"rew/out": 0.0, "val/out": 0.0, "slow/out": 0.0, "pol/mean": 0.01, "pol/stddev": 0.01}
    for name, array in weights.items():
        layer, leaf = name.rsplit("/", 1)
        if leaf != "kernel":
            assert (array == float(leaf == "scale")).all(), name
            continue
        deviation = 1.1368 * factors.get(layer, 1.0) / math.sqrt(reference.fan_in(array.shape))
        assert array.abs().max() <= 2 * deviation * (1 + 1e-4), name
        noise = 4 / math.sqrt(2 * array.numel())
        assert array.std().item() == pytest.approx(0.8796 * deviation, rel=noise), name
        assert abs(array.mean().item()) <= 5 * deviation / math.sqrt(array.numel()), name


def test_defaults_are_those_of_the_paper() -> None:
    hp, optimizer = DreamerHyperparameters(), LaProp()
    assert constants_of(hp) == Constants()
    assert (hp.learning_rate, hp.warmup_updates, hp.agc) == (optimizer.rate, optimizer.warm_up, optimizer.clip)
    assert (hp.batch_size, hp.batch_length, hp.tau, hp.return_rate, hp.return_limit) == (16, 64, 0.02, 0.01, 1.0)
    assert (hp.learning_starts, hp.train_ratio) == (1024, 512.0)
