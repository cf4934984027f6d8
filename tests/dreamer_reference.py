"""DreamerV3, one state at a time: float64, plain loops over batch and time, nothing of the package.

Written from the paper (Hafner et al., Nature 2025) and its published constants. Weights are a dict of arrays, kernels
are [inputs, outputs]. What a run would draw (latents, actions) is given, so that a batch has one value of each loss.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
Weights = dict[str, Tensor]
BLOCKS, GROUPS, BINS, KERNEL, MULTIPLES = 8, 32, 255, 5, (2, 3, 4, 4)
HIDDEN_LAYERS = {"enc": 3, "dec": 3, "rew": 1, "con": 1, "pol": 3, "val": 3}


@dataclass(frozen=True)
class Sizes:
    """Widths of one preset."""

    deter: int = 512
    hidden: int = 64
    classes: int = 4
    units: int = 64
    depth: int = 4


CLASSES = {"1m": 4, "12m": 16, "25m": 24, "50m": 32, "100m": 48, "200m": 64, "400m": 96}
PRESETS = {f"size{name}": Sizes(128 * k, 16 * k, k, 16 * k, k) for name, k in CLASSES.items()}


@dataclass(frozen=True)
class World:
    """What is observed and done: ("vector", n), ("symbols", (k, ...)) or ("image", (height, width, channels))."""

    observation: dict[str, tuple[str, Any]]
    action: tuple[str, Any]  # ("continuous", n) or ("discrete", (k, ...))

    def keys(self, *kinds: str) -> list[str]:
        return sorted(key for key, (kind, _) in self.observation.items() if kind in kinds)

    def width(self, key: str) -> int:
        """Numbers that a key of vectors or symbols puts into the encoder."""
        kind, size = self.observation[key]
        return size if kind == "vector" else sum(size)

    @property
    def actions(self) -> int:
        kind, size = self.action
        return size if kind == "continuous" else sum(size)

    @property
    def image(self) -> tuple[int, int, int]:
        """Height, width, and the channels of all images together."""
        sizes = [self.observation[key][1] for key in self.keys("image")]
        return sizes[0][0], sizes[0][1], sum(size[2] for size in sizes)


@dataclass(frozen=True)
class Constants:
    imagined_steps: int = 15
    horizon: float = 333.0
    trace: float = 0.95
    unimix: float = 0.01
    free_nats: float = 1.0
    entropy: float = 3e-4
    slow_regulariser: float = 1.0
    scales: dict[str, float] = field(
        default_factory=lambda: {
            "rec": 1.0,
            "rew": 1.0,
            "con": 1.0,
            "dyn": 1.0,
            "rep": 0.1,
            "policy": 1.0,
            "value": 1.0,
            "repval": 0.3,
        }
    )


# The weights.


def shapes(world: World, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Of every weight: kernels [in, out], of blocks [block, in, out], of images [row, column, in, out]."""
    found: dict[str, tuple[int, ...]] = {}
    deter, hidden, units, stoch = sizes.deter, sizes.hidden, sizes.units, GROUPS * sizes.classes
    feature = deter + stoch

    def linear(name: str, inputs: int, outputs: int, norm: bool = True) -> None:
        found[f"{name}/kernel"], found[f"{name}/bias"] = (inputs, outputs), (outputs,)
        if norm:
            found[f"{name}/scale"] = (outputs,)

    def blocks(name: str, inputs: int, outputs: int, norm: bool = True) -> None:
        linear(name, inputs, outputs, norm)
        found[f"{name}/kernel"] = (BLOCKS, inputs // BLOCKS, outputs // BLOCKS)

    def conv(name: str, inputs: int, outputs: int, norm: bool = True) -> None:
        linear(name, inputs, outputs, norm)
        found[f"{name}/kernel"] = (KERNEL, KERNEL, inputs, outputs)

    def mlp(name: str, inputs: int, layers: int) -> None:
        for i in range(layers):
            linear(f"{name}/mlp{i}", inputs if i == 0 else units, units)

    tokens, vectors, images = 0, world.keys("vector", "symbols"), world.keys("image")
    if vectors:
        mlp("enc", sum(map(world.width, vectors)), HIDDEN_LAYERS["enc"])
        mlp("dec", feature, HIDDEN_LAYERS["dec"])
        for key in vectors:
            linear(f"dec/vec/{key}", units, world.width(key), norm=False)
        tokens += units
    if images:
        height, width, channels = world.image
        depths = [channels] + [multiple * sizes.depth for multiple in MULTIPLES]
        for i in range(4):
            conv(f"enc/cnn{i}", depths[i], depths[i + 1])
            conv(f"dec/conv{i}" if i else "dec/imgout", depths[i + 1], depths[i], norm=i > 0)
        smallest = height // 16 * (width // 16) * depths[4]
        tokens += smallest
        blocks("dec/sp0", deter, smallest, norm=False)
        linear("dec/sp1", stoch, 2 * units)
        linear("dec/sp2", 2 * units, smallest, norm=False)
        found["dec/sp/scale"] = (depths[4],)
    for i, inputs in enumerate((deter, stoch, world.actions)):
        linear(f"dyn/in{i}", inputs, hidden)
    blocks("dyn/hid", deter + BLOCKS * 3 * hidden, deter)
    blocks("dyn/gru", deter, 3 * deter, norm=False)
    linear("dyn/obs0", deter + tokens, hidden)
    linear("dyn/obslogit", hidden, stoch, norm=False)
    linear("dyn/prior0", deter, hidden)
    linear("dyn/prior1", hidden, hidden)
    linear("dyn/priorlogit", hidden, stoch, norm=False)
    for name, outputs in (("rew", BINS), ("con", 1), ("val", BINS)):
        mlp(name, feature, HIDDEN_LAYERS[name])
        linear(f"{name}/out", units, outputs, norm=False)
    mlp("pol", feature, HIDDEN_LAYERS["pol"])
    kind, size = world.action
    heads = {"mean": size, "stddev": size} if kind == "continuous" else {f"logits{i}": k for i, k in enumerate(size)}
    for name, outputs in heads.items():
        linear(f"pol/{name}", units, outputs, norm=False)
    return found


def counts(world: World, sizes: Sizes) -> dict[str, int]:
    """Parameters of each module, and of all that learn together."""
    found: dict[str, int] = {}
    for name, shape in shapes(world, sizes).items():
        module = name.split("/")[0]
        found[module] = found.get(module, 0) + math.prod(shape)
    return found | {"total": sum(found.values())}


def fan_in(shape: Sequence[int]) -> int:
    """All dimensions but the last: of a block kernel, the whole input's width."""
    return math.prod(shape[:-1])


def random_weights(world: World, sizes: Sizes, seed: int, spread: float = 1.0) -> Weights:
    """No zeros and no ones anywhere, so that no term of a loss is hidden. The slow critic is `slow/...`.

    Reward and value are a bump around 0, for the outermost bins are 5e8.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(world, sizes).items():
        if name.endswith("kernel"):
            array = rng.normal(0, spread / math.sqrt(fan_in(shape)), shape)
        else:
            array = rng.normal(0, 0.1, shape) + name.endswith("scale")
        if name in ("rew/out/bias", "val/out/bias"):
            array -= 0.5 * ((np.arange(BINS) - BINS // 2) / 6) ** 2
        weights[name] = torch.tensor(array, requires_grad=True)
    for name in [name for name in weights if name.startswith("val/")]:
        weights["slow" + name[3:]] = weights[name].detach() + torch.tensor(rng.normal(0, 0.05, weights[name].shape))
    return weights


# Scalars and bins.


def symlog(x: float) -> float:
    return math.copysign(math.log(1 + abs(x)), x)


def symexp(x: float) -> float:
    return math.copysign(math.exp(abs(x)) - 1, x)


def bins() -> list[float]:
    """-symexp(20) ... 0 ... symexp(20), the upper half a mirror of the lower."""
    middle = BINS // 2
    lower = [symexp(-20 + 20 * i / middle) for i in range(middle)]
    return [*lower, 0.0, *(-x for x in reversed(lower))]


def two_hot(x: float) -> list[float]:
    """Weights of the two bins around x, nearer is heavier. Beyond the last bin: all of it there."""
    places, weights = bins(), [0.0] * BINS
    if x <= places[0] or x >= places[-1]:
        weights[0 if x < 0 else -1] = 1.0
        return weights
    above = bisect_right(places, x)
    below = above - 1
    share = (x - places[below]) / (places[above] - places[below])
    weights[below], weights[above] = 1 - share, share
    return weights


def readout(logits: Tensor) -> Tensor:
    """Mean of the bins. Bins of opposite sign are added first, which makes equal logits exactly 0."""
    p, places, middle = torch.softmax(logits, 0), bins(), BINS // 2
    total = p[middle] * places[middle]
    for i in range(middle):
        total = total + (p[i] * places[i] + p[-1 - i] * places[-1 - i])
    return total


def two_hot_loss(logits: Tensor, target: float) -> Tensor:
    log_p = torch.log_softmax(logits, 0)
    return -sum(weight * log_p[i] for i, weight in enumerate(two_hot(target)) if weight)  # type: ignore[return-value]


# Layers.


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def block_linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """Block i of the output sees block i of the input and nothing else."""
    kernel, size = w[f"{name}/kernel"], len(x) // BLOCKS
    return torch.cat([x[i * size : (i + 1) * size] @ kernel[i] for i in range(BLOCKS)]) + w[f"{name}/bias"]


def convolve(w: Weights, name: str, x: Tensor) -> Tensor:
    """Of an image [height, width, channels], zeros around it, the same size."""
    height, width, _ = x.shape
    edge = KERNEL // 2
    padded = torch.zeros(height + 2 * edge, width + 2 * edge, x.shape[2], dtype=x.dtype)
    padded[edge : edge + height, edge : edge + width] = x
    kernel, total = w[f"{name}/kernel"], w[f"{name}/bias"].expand(height, width, -1)
    for row in range(KERNEL):
        for column in range(KERNEL):
            total = total + padded[row : row + height, column : column + width] @ kernel[row, column]
    return total


def norm_silu(w: Weights, name: str, x: Tensor) -> Tensor:
    """Root mean square of the last axis to 1, times a learned scale; then x sigmoid(x)."""
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-4).sqrt() * w[f"{name}/scale"]
    return x / (1 + torch.exp(-x))


def dense(w: Weights, name: str, x: Tensor) -> Tensor:
    return norm_silu(w, name, linear(w, name, x))


def mlp(w: Weights, name: str, x: Tensor, layers: int) -> Tensor:
    for i in range(layers):
        x = dense(w, f"{name}/mlp{i}", x)
    return x


# Encoder and decoder.


def one_hots(symbols: Any, classes: Sequence[int]) -> list[float]:
    """Several numbers, the one-hot of each behind the other."""
    row: list[float] = []
    for symbol, count in zip(np.ravel(symbols), classes, strict=True):
        row += [float(i == symbol) for i in range(count)]
    return row


def joined_image(world: World, observation: dict[str, Any]) -> Tensor:
    """All images of one step along their channels, from 0 to 1."""
    parts = [np.asarray(observation[key], np.float64) / 255 for key in world.keys("image")]
    return torch.tensor(np.concatenate(parts, -1))


def encode(w: Weights, world: World, observation: dict[str, Any]) -> Tensor:
    """Tokens of one step."""
    tokens, row = [], []
    for key in world.keys("vector", "symbols"):
        kind, size = world.observation[key]
        value = observation[key]
        row += [symlog(float(x)) for x in np.ravel(value)] if kind == "vector" else one_hots(value, size)
    if row:
        tokens.append(mlp(w, "enc", torch.tensor(row, dtype=torch.float64), HIDDEN_LAYERS["enc"]))
    if world.keys("image"):
        x = joined_image(world, observation) - 0.5
        for i in range(4):
            x = convolve(w, f"enc/cnn{i}", x)
            corners = [x[row::2, column::2] for row in (0, 1) for column in (0, 1)]
            x = norm_silu(w, f"enc/cnn{i}", torch.stack(corners).max(0).values)
        tokens.append(x.reshape(-1))
    return torch.cat(tokens)


def decoded_image(w: Weights, world: World, sizes: Sizes, deter: Tensor, stoch: Tensor) -> Tensor:
    height, width, _ = world.image
    rows, columns, channels = height // 16, width // 16, MULTIPLES[-1] * sizes.depth
    groups = block_linear(w, "dec/sp0", deter).reshape(BLOCKS, rows, columns, channels // BLOCKS)
    from_deter = torch.cat(list(groups), -1)  # the channels of the first block come first
    from_stoch = linear(w, "dec/sp2", dense(w, "dec/sp1", stoch.reshape(-1))).reshape(rows, columns, channels)
    x = norm_silu(w, "dec/sp", from_deter + from_stoch)
    for name in ("conv3", "conv2", "conv1", "imgout"):
        x = x.repeat_interleave(2, 0).repeat_interleave(2, 1)
        x = convolve(w, f"dec/{name}", x)
        x = torch.sigmoid(x) if name == "imgout" else norm_silu(w, f"dec/{name}", x)
    return x


def reconstruction_losses(
    w: Weights, world: World, sizes: Sizes, deter: Tensor, stoch: Tensor, observation: dict[str, Any]
) -> dict[str, Tensor]:
    """Of one step, by key: squared errors of symlog and of pixels summed, cross-entropy of symbols summed."""
    losses: dict[str, Tensor] = {}
    vectors, images = world.keys("vector", "symbols"), world.keys("image")
    hidden = mlp(w, "dec", feature(deter, stoch), HIDDEN_LAYERS["dec"]) if vectors else torch.zeros(0)
    for key in vectors:
        kind, size = world.observation[key]
        out, value = linear(w, f"dec/vec/{key}", hidden), np.ravel(observation[key])
        if kind == "vector":
            losses[key] = sum((out[i] - symlog(float(x))) ** 2 for i, x in enumerate(value))  # type: ignore[assignment]
        else:
            parts = zip(torch.split(out, list(size)), value, strict=True)
            losses[key] = -sum(torch.log_softmax(part, 0)[int(x)] for part, x in parts)  # type: ignore[assignment]
    if images:
        picture, channel = decoded_image(w, world, sizes, deter, stoch), 0
        for key in images:
            target = torch.tensor(np.asarray(observation[key], np.float64) / 255)
            losses[key] = (picture[..., channel : channel + target.shape[-1]] - target).pow(2).sum()
            channel += target.shape[-1]
    return losses


# RSSM.


def feature(deter: Tensor, stoch: Tensor) -> Tensor:
    return torch.cat([deter, stoch.reshape(-1)])


def mixed(logits: Tensor, unimix: float) -> Tensor:
    """Probabilities [groups, classes], a share of them uniform."""
    return (1 - unimix) * torch.softmax(logits, -1) + unimix / logits.shape[-1]


def straight_through(probabilities: Tensor, index: Any) -> Tensor:
    """One-hot of the class drawn; its gradient is that of the probabilities."""
    hot = torch.zeros_like(probabilities)
    for group, chosen in enumerate(np.asarray(index)):
        hot[group, int(chosen)] = 1
    return hot + probabilities - probabilities.detach()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) summed over classes and groups."""
    return sum((p[g] * (p[g].log() - q[g].log())).sum() for g in range(len(p)))  # type: ignore[return-value]


def recur(w: Weights, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
    """The next deterministic state: a GRU of 8 cells that share their inputs, not their states."""
    action = torch.stack([a / max(1.0, abs(float(a))) for a in action])
    shared = torch.cat([dense(w, f"dyn/in{i}", x) for i, x in enumerate((deter, stoch.reshape(-1), action))])
    size = len(deter) // BLOCKS
    inputs = torch.cat([torch.cat([deter[i * size : (i + 1) * size], shared]) for i in range(BLOCKS)])
    gates = block_linear(w, "dyn/gru", norm_silu(w, "dyn/hid", block_linear(w, "dyn/hid", inputs)))
    cells = []
    for i in range(BLOCKS):
        reset, candidate, update = torch.split(gates[3 * size * i : 3 * size * (i + 1)], size)
        update = torch.sigmoid(update - 1)
        cells.append(
            update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * deter[i * size : (i + 1) * size]
        )
    return torch.cat(cells)


def prior(w: Weights, deter: Tensor, unimix: float) -> Tensor:
    logits = linear(w, "dyn/priorlogit", dense(w, "dyn/prior1", dense(w, "dyn/prior0", deter)))
    return mixed(logits.reshape(GROUPS, -1), unimix)


def posterior(w: Weights, deter: Tensor, tokens: Tensor, unimix: float) -> Tensor:
    logits = linear(w, "dyn/obslogit", dense(w, "dyn/obs0", torch.cat([deter, tokens])))
    return mixed(logits.reshape(GROUPS, -1), unimix)


# Heads.


def head(w: Weights, name: str, x: Tensor) -> Tensor:
    """Logits of reward, continuation or value. The slow critic is as deep as the critic."""
    return linear(w, f"{name}/out", mlp(w, name, x, HIDDEN_LAYERS.get(name, HIDDEN_LAYERS["val"])))


def policy(w: Weights, world: World, x: Tensor, action: Any) -> tuple[Tensor, Tensor]:
    """Log-probability of an action, and the entropy: sums over its parts."""
    hidden = mlp(w, "pol", x, HIDDEN_LAYERS["pol"])
    kind, size = world.action
    log_p, entropy = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if kind == "continuous":
        mean = torch.tanh(linear(w, "pol/mean", hidden))
        deviation = 0.1 + 0.9 * torch.sigmoid(linear(w, "pol/stddev", hidden) + 2)
        for m, s, a in zip(mean, deviation, action, strict=True):
            log_p = log_p - 0.5 * ((float(a) - m) / s) ** 2 - s.log() - 0.5 * math.log(2 * math.pi)
            entropy = entropy + 0.5 + 0.5 * math.log(2 * math.pi) + s.log()
        return log_p, entropy
    for i in range(len(size)):
        log_q = torch.log_softmax(linear(w, f"pol/logits{i}", hidden), 0)
        log_p, entropy = log_p + log_q[int(np.ravel(action)[i])], entropy - (log_q.exp() * log_q).sum()
    return log_p, entropy


def action_row(world: World, action: Any) -> Tensor:
    """What the world model sees of an action."""
    kind, size = world.action
    row = [float(a) for a in np.ravel(action)] if kind == "continuous" else one_hots(action, size)
    return torch.tensor(row, dtype=torch.float64)


# Returns.


def mixture_return(
    rewards: Sequence[float], discounts: Sequence[float], values: Sequence[float], traces: Sequence[float]
) -> list[float]:
    """Of each step but the last: n-step returns, each weighted with the chance that the trace ends there.

    rewards[t], discounts[t], values[t], traces[t] belong to arriving at t; index 0 is of no use.
    """
    steps, found = len(rewards), []
    for start in range(steps - 1):
        total, alive = 0.0, 1.0
        for end in range(start + 1, steps):
            n_step, discount = 0.0, 1.0
            for t in range(start + 1, end + 1):
                n_step += discount * rewards[t]
                discount *= discounts[t]
            n_step += discount * values[end]
            stops = 1.0 if end == steps - 1 else 1 - traces[end]
            total += alive * stops * n_step
            alive *= traces[end]
        found.append(total)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """On the straight line between the two nearest ranks."""
    ordered = sorted(values)
    rank = share / 100 * (len(ordered) - 1)
    low = min(int(rank), len(ordered) - 2) if len(ordered) > 1 else 0
    return ordered[low] + (rank - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


@dataclass
class ReturnScale:
    """Averages of the 5th and the 95th percentile that start at 0 and are not corrected for it."""

    low: float = 0.0
    high: float = 0.0

    def update(self, returns: Sequence[float]) -> float:
        self.low += 0.01 * (percentile(returns, 5) - self.low)
        self.high += 0.01 * (percentile(returns, 95) - self.high)
        return max(1.0, self.high - self.low)


# Losses.


@dataclass(frozen=True)
class Batch:
    """[B, T, ...]. `action[t]` is the one before observation t, `reward[t]` came with observation t."""

    observation: dict[str, Any]
    action: Any  # as the environment takes them: numbers [B, T, n], or indices [B, T, parts]
    reward: Any
    first: Any
    last: Any
    terminal: Any
    deter: Any  # [B, D] of the step before, as the replay kept it
    stoch: Any  # [B, groups, classes]


@dataclass(frozen=True)
class Draws:
    """What chance decided. A root is a step of the batch: row b * T + t."""

    posterior: Any  # class of each group [B, T, groups]
    prior: Any  # [B * T, imagined steps, groups]
    action: Any  # [B * T, imagined steps + 1, ...]; the last is only there to be counted


@dataclass
class Result:
    losses: dict[str, Tensor]  # means over batch and time, by name; those of observations by key
    total: Tensor
    deter: Any  # [B, T, D]
    stoch: Any  # [B, T, groups, classes]
    imagined: dict[str, Any]  # reward, discount, value, slow, weight [roots, steps + 1]; returns [roots, steps]
    replayed: Any  # targets of the replay's critic loss [B, T - 1]
    scale: float


def observe(
    w: Weights, world: World, batch: Batch, drawn: Any, unimix: float = 0.01
) -> tuple[list[list[Tensor]], list[list[Tensor]], list[list[Tensor]]]:
    """Deterministic states, latents and posteriors [B][T]."""
    rows, steps = np.shape(batch.reward)
    deters: list[list[Tensor]] = [[] for _ in range(rows)]
    stochs: list[list[Tensor]] = [[] for _ in range(rows)]
    posteriors: list[list[Tensor]] = [[] for _ in range(rows)]
    for b in range(rows):
        deter = torch.tensor(np.asarray(batch.deter[b], np.float64))
        stoch = torch.tensor(np.asarray(batch.stoch[b], np.float64))
        for t in range(steps):
            action = action_row(world, batch.action[b][t])
            if batch.first[b][t]:
                deter, stoch, action = torch.zeros_like(deter), torch.zeros_like(stoch), torch.zeros_like(action)
            deter = recur(w, deter, stoch, action)
            tokens = encode(w, world, {key: value[b][t] for key, value in batch.observation.items()})
            probabilities = posterior(w, deter, tokens, unimix)
            stoch = straight_through(probabilities, drawn[b][t])
            deters[b].append(deter)
            stochs[b].append(stoch)
            posteriors[b].append(probabilities)
    return deters, stochs, posteriors


def imagine(
    w: Weights, world: World, deter: Tensor, stoch: Tensor, actions: Any, drawn: Any, unimix: float = 0.01
) -> list[Tensor]:
    """Features of a root and of what follows it under given actions; nothing of it has a gradient."""
    with torch.no_grad():
        features = [feature(deter, stoch)]
        for action, index in zip(actions, drawn, strict=True):
            deter = recur(w, deter, stoch, action_row(world, action))
            stoch = straight_through(prior(w, deter, unimix), index)
            features.append(feature(deter, stoch))
    return features


def losses(
    w: Weights, world: World, sizes: Sizes, batch: Batch, draws: Draws, scale: ReturnScale, constants: Constants
) -> Result:
    """Every loss of one batch; `scale` is updated before it is used."""
    rows, steps = np.shape(batch.reward)
    gamma = 1 - 1 / constants.horizon
    terms: dict[str, list[Tensor]] = {}

    def add(name: str, value: Tensor) -> None:
        terms.setdefault(name, []).append(value)

    deters, stochs, posteriors = observe(w, world, batch, draws.posterior, constants.unimix)
    for b in range(rows):
        for t in range(steps):
            deter, stoch, post = deters[b][t], stochs[b][t], posteriors[b][t]
            before, x = prior(w, deter, constants.unimix), feature(deter, stoch)
            add("dyn", divergence(post.detach(), before).clamp_min(constants.free_nats))
            add("rep", divergence(post, before.detach()).clamp_min(constants.free_nats))
            seen = {key: value[b][t] for key, value in batch.observation.items()}
            for key, value in reconstruction_losses(w, world, sizes, deter, stoch, seen).items():
                add(f"rec/{key}", value)
            add("rew", two_hot_loss(head(w, "rew", x), float(batch.reward[b][t])))
            logit = head(w, "con", x)[0]
            goes_on = (1 - float(batch.terminal[b][t])) * gamma
            bce = goes_on * torch.log(torch.sigmoid(logit)) + (1 - goes_on) * torch.log(torch.sigmoid(-logit))
            add("con", -bce)

    # Imagination: from every step of the batch, first all returns, for the scale is one number for all of them.
    lines, names = [], ("reward", "discount", "value", "slow", "weight")
    table: dict[str, list[list[float]]] = {name: [] for name in (*names, "returns")}
    for root in range(rows * steps):
        b, t = divmod(root, steps)
        chosen = draws.action[root][: constants.imagined_steps]
        with torch.no_grad():
            line = imagine(w, world, deters[b][t], stochs[b][t], chosen, draws.prior[root], constants.unimix)
            reward = [float(readout(head(w, "rew", x))) for x in line]
            discount = [float(torch.sigmoid(head(w, "con", x)[0])) for x in line]
            value = [float(readout(head(w, "val", x))) for x in line]
            slow = [float(readout(head(w, "slow", x))) for x in line]
        weight = [math.prod(discount[: i + 1]) for i in range(len(line))]  # the root's own continuation counts
        lines.append(line)
        for name, row in zip(names, (reward, discount, value, slow, weight), strict=True):
            table[name].append(row)
        table["returns"].append(mixture_return(reward, discount, value, [constants.trace] * len(line)))
    span = scale.update([r for row in table["returns"] for r in row])
    for root, line in enumerate(lines):
        actor, critic = [], []
        for i in range(constants.imagined_steps):
            target, weight_here = table["returns"][root][i], table["weight"][root][i]
            advantage = (target - table["value"][root][i]) / span
            log_p, entropy = policy(w, world, line[i], draws.action[root][i])
            actor.append(-weight_here * (log_p * advantage + constants.entropy * entropy))
            logits = head(w, "val", line[i])
            slow_loss = two_hot_loss(logits, table["slow"][root][i])
            critic.append(weight_here * (two_hot_loss(logits, target) + constants.slow_regulariser * slow_loss))
        add("policy", torch.stack(actor).mean())
        add("value", torch.stack(critic).mean())

    # The critic on what really happened. Each step bootstraps from the return imagined there; ends cut the trace.
    replayed = []
    for b in range(rows):
        boot = [table["returns"][b * steps + t][0] for t in range(steps)]
        discount = [gamma * (1 - float(end)) for end in batch.terminal[b]]
        trace = [constants.trace * (1 - float(end)) for end in batch.last[b]]
        targets = mixture_return([float(r) for r in batch.reward[b]], discount, boot, trace)
        replayed.append(targets)
        for t in range(steps - 1):
            x = feature(deters[b][t], stochs[b][t])
            logits = head(w, "val", x)
            with torch.no_grad():
                slow_value = float(readout(head(w, "slow", x)))
            slow_loss = two_hot_loss(logits, slow_value)
            loss = two_hot_loss(logits, targets[t]) + constants.slow_regulariser * slow_loss
            add("repval", loss * (0.0 if batch.last[b][t] else 1.0))

    means = {name: torch.stack(values).mean() for name, values in terms.items()}
    total = sum(means[name] * constants.scales[name.split("/")[0]] for name in means)
    arrays = [np.array([[x.detach().numpy() for x in row] for row in states]) for states in (deters, stochs)]
    imagined = {name: np.array(rows) for name, rows in table.items()}
    return Result(means, total, arrays[0], arrays[1], imagined, np.array(replayed), span)  # type: ignore[arg-type]


# Optimizer.


@dataclass
class LaProp:
    """Adaptive clipping, then division by the root mean square, then momentum; each average corrected for its start."""

    rate: float = 4e-5
    warm_up: int = 1000
    clip: float = 0.3
    smallest: float = 1e-3
    epsilon: float = 1e-20
    momentum: float = 0.9
    decay: float = 0.999
    updates: int = 0
    squares: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)

    def step(self, weights: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
        """The new weights."""
        rate = self.rate * min(1.0, self.updates / self.warm_up) if self.warm_up else self.rate
        self.updates += 1
        found = {}
        for name, weight in weights.items():
            gradient = np.asarray(gradients[name], np.float64)
            longest = self.clip * max(self.smallest, math.sqrt(float(np.sum(np.square(weight)))))
            length = math.sqrt(float(np.sum(np.square(gradient))))
            if length > longest:
                gradient = gradient * (longest / length)
            square = self.decay * self.squares.get(name, 0.0) + (1 - self.decay) * gradient**2
            scaled = gradient / (np.sqrt(square / (1 - self.decay**self.updates)) + self.epsilon)
            mean = self.momentum * self.means.get(name, 0.0) + (1 - self.momentum) * scaled
            self.squares[name], self.means[name] = square, mean
            found[name] = weight - rate * mean / (1 - self.momentum**self.updates)
        return found


def follow(slow: Any, fast: Any, share: float = 0.02) -> Any:
    """The slow critic after an update."""
    return (1 - share) * slow + share * fast
