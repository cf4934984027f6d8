"""Compiled loops of DreamerV3 on a CPU: what stands between two matrix products, in one pass over the numbers.

Arrays are float32, or bfloat16 as uint16. All compiled code of this kind is in this file, because numba's cache checks
no other for changes. `rl_training.ops.dreamer_cells` calls it, and has the same functions in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# Sums may be reordered, so that they become vector instructions.
LOOSE = {"reassoc", "contract", "nsz", "arcp"}
compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath=LOOSE)
inlined = njit(inline="always", error_model="numpy", fastmath=LOOSE)
F = np.float32


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """The float32 with the bits of a uint32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def as_bits(context: Any, number: Any) -> Any:
    """The bits of a float32 as a uint32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


def load(x):
    """An element as float32."""


@overload(load, inline="always")
def overload_load(x):
    if x == types.uint16:
        return lambda x: as_float(np.uint32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


def rounded(array, x):
    """float32 `x` as an element of `array`: for bfloat16 rounded to the nearest, of two to the even one."""


@overload(rounded, inline="always")
def overload_rounded(array, x):
    if array.dtype == types.uint16:

        def to_bfloat16(array, x):
            bits = as_bits(F(x))
            odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))

        return to_bfloat16
    return lambda array, x: F(x)


@inlined
def exp(x):
    """e^x to 1e-7; 0 below -87. The exponent is written into the bits: a library call is no vector instruction."""
    x = min(max(x, F(-87.0)), F(88.0))
    power = np.int32(x * F(1.4426950408889634) + F(256.5)) - np.int32(256)
    n = F(power)
    r = (x - n * F(0.693359375)) - n * F(-2.12194440e-4)
    p = F(1.0) + r * (F(1.0) + r * (F(0.5) + r * (F(1 / 6) + r * (F(1 / 24) + r * (F(1 / 120) + r * F(1 / 720))))))
    return p * as_float(np.uint32(np.uint32(power + np.int32(127)) << np.uint32(23)))


@inlined
def sigmoid(x):
    return F(1.0) / (F(1.0) + exp(-x))


@inlined
def tanh(x):
    return F(2.0) * sigmoid(F(2.0) * x) - F(1.0)


@compiled
def normed_silu(x, column, gain, eps, out, out_column):
    """Columns of x [M, X] from `column` on, as many as gain [n], to columns of out [M, O]."""
    n = len(gain)
    for i in range(len(x)):
        row, to = x[i, column : column + n], out[i, out_column : out_column + n]
        total = F(0.0)
        for j in range(n):
            a = load(row[j])
            total += a * a
        scale = F(1.0) / np.sqrt(total / F(n) + eps)
        for j in range(n):
            y = load(row[j]) * scale * gain[j]
            to[j] = rounded(to, y * sigmoid(y))


@compiled
def normed_silu_backward(x, gain, eps, d_out, d_x, d_gain):
    """d_x [M, n] from x [M, n] and d_out [M, n]. Adds to d_gain [n]."""
    n = len(gain)
    d_scaled = np.empty(n, np.float32)
    for i in range(len(x)):
        total = F(0.0)
        for j in range(n):
            a = load(x[i, j])
            total += a * a
        scale = F(1.0) / np.sqrt(total / F(n) + eps)
        along = F(0.0)
        for j in range(n):
            a = load(x[i, j]) * scale
            y = a * gain[j]
            s = sigmoid(y)
            d_y = load(d_out[i, j]) * s * (F(1.0) + y * (F(1.0) - s))
            d_gain[j] += d_y * a
            d_scaled[j] = d_y * gain[j]
            along += d_y * gain[j] * a
        along /= F(n)
        for j in range(n):
            d_x[i, j] = rounded(d_x, scale * (d_scaled[j] - load(x[i, j]) * scale * along))


@compiled
def inverse_of_block_rms(row, eps):
    """1 / sqrt(mean square + eps) of numbers [G, k]."""
    blocks, width = row.shape
    total = F(0.0)
    for g in range(blocks):
        for j in range(width):
            a = load(row[g, j])
            total += a * a
    return F(1.0) / np.sqrt(total / F(blocks * width) + eps)


@compiled
def block_normed_silu(x, gain, eps, out):
    """x [G, M, k] of M rows with G k numbers each; gain [G, k]; out [G, M, k]."""
    blocks, rows, width = x.shape
    for i in range(rows):
        scale = inverse_of_block_rms(x[:, i], eps)
        for g in range(blocks):
            for j in range(width):
                y = load(x[g, i, j]) * scale * gain[g, j]
                out[g, i, j] = rounded(out, y * sigmoid(y))


@compiled
def block_normed_silu_backward(x, gain, eps, d_out, d_x, d_gain):
    """As `normed_silu_backward`, for [G, M, k]. Adds to d_gain [G, k]."""
    blocks, rows, width = x.shape
    n = F(blocks * width)
    d_scaled = np.empty((blocks, width), np.float32)
    for i in range(rows):
        scale = inverse_of_block_rms(x[:, i], eps)
        along = F(0.0)
        for g in range(blocks):
            for j in range(width):
                a = load(x[g, i, j]) * scale
                y = a * gain[g, j]
                s = sigmoid(y)
                d_y = load(d_out[g, i, j]) * s * (F(1.0) + y * (F(1.0) - s))
                d_gain[g, j] += d_y * a
                d_scaled[g, j] = d_y * gain[g, j]
                along += d_y * gain[g, j] * a
        along /= n
        for g in range(blocks):
            for j in range(width):
                d_x[g, i, j] = rounded(d_x, scale * (d_scaled[g, j] - load(x[g, i, j]) * scale * along))


@compiled
def gru(gates, deter, out, features):
    """The next state of a block GRU: gates [G, M, 3 k], deter [M, G k] to out [M, G k], and the same into the first
    columns of features [M, F]."""
    blocks, rows, _ = gates.shape
    width = deter.shape[1] // blocks
    for i in range(rows):
        for g in range(blocks):
            for j in range(width):
                reset = sigmoid(load(gates[g, i, j]))
                candidate = tanh(reset * load(gates[g, i, width + j]))
                update = sigmoid(load(gates[g, i, 2 * width + j]) - F(1.0))
                old = deter[i, g * width + j]
                new = old + update * (candidate - old)
                out[i, g * width + j] = new
                features[i, g * width + j] = rounded(features, new)


@compiled
def gru_backward(gates, deter, d_out, d_gates, d_deter):
    """d_gates [G, M, 3 k] and d_deter [M, G k] (its direct part) from d_out [M, G k]."""
    blocks, rows, _ = gates.shape
    width = deter.shape[1] // blocks
    for i in range(rows):
        for g in range(blocks):
            for j in range(width):
                reset = sigmoid(load(gates[g, i, j]))
                second = load(gates[g, i, width + j])
                candidate = tanh(reset * second)
                update = sigmoid(load(gates[g, i, 2 * width + j]) - F(1.0))
                d = d_out[i, g * width + j]
                d_inside = d * update * (F(1.0) - candidate * candidate)
                d_update = d * (candidate - deter[i, g * width + j])
                d_gates[g, i, j] = rounded(d_gates, d_inside * second * reset * (F(1.0) - reset))
                d_gates[g, i, width + j] = rounded(d_gates, d_inside * reset)
                d_gates[g, i, 2 * width + j] = rounded(d_gates, d_update * update * (F(1.0) - update))
                d_deter[i, g * width + j] = d * (F(1.0) - update)


@compiled
def mixed_sample(logits, noise, unimix, probs, out, column):
    """From logits [M, S C] to probabilities [M, S C], a share `unimix` of them uniform, and to one-hot samples.

    The samples are chosen by uniform noise [M, S], and stand in the columns of out [M, O] from `column` on.
    """
    groups = noise.shape[1]
    width = logits.shape[1]
    classes = width // groups
    floor = unimix / F(classes)
    one, zero = rounded(out, F(1.0)), rounded(out, F(0.0))
    for i in range(len(logits)):
        row, p, to = logits[i], probs[i], out[i, column : column + width]
        for begin in range(0, width, classes):
            largest = load(row[begin])
            for c in range(begin + 1, begin + classes):
                a = load(row[c])
                largest = a if a > largest else largest
            p[begin : begin + classes] = largest
        for c in range(width):
            p[c] = exp(load(row[c]) - p[c])
            to[c] = zero
        for s in range(groups):
            begin = s * classes
            total = F(0.0)
            for c in range(begin, begin + classes):
                total += p[c]
            factor = (F(1.0) - unimix) / total
            below, chosen = F(0.0), begin
            for c in range(begin, begin + classes):
                p[c] = p[c] * factor + floor
                below += p[c]
                chosen += below <= noise[i, s]
            to[min(chosen, begin + classes - 1)] = one


@compiled
def mixed_backward(probs, unimix, classes, d_log_probs, d_sample, d_logits):
    """d_logits [M, S C] from the gradients of the logarithms of `probs` and of samples: straight-through."""
    floor = unimix / F(classes)
    for i in range(len(probs)):
        for begin in range(0, probs.shape[1], classes):
            mean = F(0.0)
            for c in range(begin, begin + classes):
                p = probs[i, c]
                mean += (p - floor) * (d_log_probs[i, c] / p + d_sample[i, c])
            mean /= F(1.0) - unimix
            for c in range(begin, begin + classes):
                p = probs[i, c]
                d = d_log_probs[i, c] / p + d_sample[i, c]
                d_logits[i, c] = rounded(d_logits, (p - floor) * (d - mean))


LANES = 16


@inlined
def largest_of(row, lanes):
    """The largest number of a row, with the largest of every LANES-th: one maximum alone is no vector instruction."""
    n = len(row)
    lanes[:] = load(row[0])
    for begin in range(0, n - n % LANES, LANES):
        part = row[begin : begin + LANES]
        for k in range(LANES):
            a = load(part[k])
            lanes[k] = a if a > lanes[k] else lanes[k]
    for j in range(n - n % LANES, n):
        a = load(row[j])
        lanes[0] = a if a > lanes[0] else lanes[0]
    largest = lanes[0]
    for k in range(LANES):
        largest = lanes[k] if lanes[k] > largest else largest
    return largest


@compiled
def two_hot_mean(logits, bins, out):
    """The means [M] of logits [M, K] over antisymmetric bins [K]: opposite probabilities are subtracted first."""
    count = len(bins)
    e, lanes = np.empty(count, np.float32), np.empty(LANES, np.float32)
    for i in range(len(logits)):
        largest = largest_of(logits[i], lanes)
        total = F(0.0)
        for j in range(count):
            e[j] = exp(load(logits[i, j]) - largest)
            total += e[j]
        mean = F(0.0)
        for j in range(count // 2):
            mean += (e[count - 1 - j] - e[j]) * bins[count - 1 - j]
        out[i] = mean / total


@compiled
def log_sum_exp(logits, out):
    """[M, K] -> [M]"""
    lanes = np.empty(LANES, np.float32)
    for i in range(len(logits)):
        largest = largest_of(logits[i], lanes)
        total = F(0.0)
        for j in range(logits.shape[1]):
            total += exp(load(logits[i, j]) - largest)
        out[i] = largest + np.log(total)


@compiled
def softmax_rows(logits, log_sums, scale, out):
    """scale[i] softmax(logits[i]), from the rows' log-sum-exp."""
    for i in range(len(logits)):
        for j in range(logits.shape[1]):
            out[i, j] = rounded(out, scale[i] * exp(load(logits[i, j]) - log_sums[i]))
