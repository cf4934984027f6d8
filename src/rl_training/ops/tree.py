"""The compiled part of the search: B trees of one size in flat arrays, and the rules by which they grow.

All compiled code is in this file (except the vector instructions of tile.py), because numba's cache checks no other
file for changes. Each simulation adds one node to each tree: a node has the number of its simulation, the root is 0.
There is no terminal node: after the end of an episode the model predicts reward 0 and value 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from rl_training.ops.tile import LANES, ROWS, VECTORS, many_rows, one_row
from rl_training.types import Array


def uncounted() -> dict[str, Any]:
    """The option that switches reference counts off, if this numba has it: it is not public."""
    known = hasattr(getattr(numba.core.options, "DefaultOptions", None), "_nrt")
    return {"_nrt": False} if known else {}


ROOT = 0
UNSEEN = 0  # the child of an unvisited edge: no edge leads to the root
LEAST = np.float32(-1e30)
# Sums may be reordered, so that they become vector instructions. Infinities are still exact.
LOOSE = {"reassoc", "contract", "nsz"}
CHUNK = 32  # trees per pass of a fused search
# numpy's division: Python's may raise an exception at each division, and code takes two to four times as long.
compiled = njit(cache=True, nogil=True, error_model="numpy")
# References are not counted: each view of an array and each branch would change a count, in two thirds more time.
# Therefore only `compiled` functions allocate arrays.
PLAIN: dict[str, Any] = {"error_model": "numpy", **uncounted()}
# Inlined, because passing all arrays of a tree to a function costs more than its work.
inlined = njit(forceinline=True, **PLAIN)


class Tree(NamedTuple):
    """B trees of up to M nodes with A edges each."""

    child: Array  # [B, M, A] int32 node at the end of an edge
    visits: Array  # [B, M, A] int32 of an edge
    q: Array  # [B, M, A] reward + discount * value of the child; 0 for unvisited edges
    logits: Array  # [B, M, A]
    prior: Array  # [B, M, A] softmax of the logits
    parent: Array  # [B, M] int32
    action: Array  # [B, M] int32 edge from the parent
    reward: Array  # [B, M] of that edge
    discount: Array  # [B, M] of that edge; negative where players alternate
    value: Array  # [B, M] mean of the network's value and the returns of all simulations through the node
    network_value: Array  # [B, M]
    node_visits: Array  # [B, M] int32, the node's own evaluation included
    mean_q: Array  # [B, M] Q of unvisited edges, in EfficientZero's rule
    low: Array  # [B] smallest Q in the tree
    high: Array  # [B] largest Q in the tree
    legal: Array  # [B, A] bool, of the root
    considered: Array  # [B] int32 number of root edges that Sequential Halving considers
    puct_factor: Array  # [M + 1] sqrt(N) (c1 + log((N + c2 + 1) / c2)) for N visits
    gumbel: Array  # [B, A] noise of the root
    leaf: Array  # [2, B] int64 (parent, action) of the next node of each tree
    depth: Array  # [B] int32 of the deepest node
    transformed: Array  # [B, A] transformed Q of the root, after the search


class SearchConstants(NamedTuple):
    """Each rule reads some of these. All are floats, so that a search is compiled once."""

    pb_c_init: float = 1.25
    pb_c_base: float = 19652.0
    c_visit: float = 50.0
    c_scale: float = 1.0
    max_considered: float = 16.0  # edges of the root that Sequential Halving considers
    low: float = math.inf  # known bounds of Q, such as -1 and 1 in board games; none by default
    high: float = -math.inf
    floor: float = 0.01  # smallest range of Q for rescaling


def make_tree(batch: int, nodes: int, actions: int) -> Tree:
    def edges(dtype: Any) -> Array:
        return np.zeros((batch, nodes, actions), dtype)

    def per_node(dtype: Any) -> Array:
        return np.zeros((batch, nodes), dtype)

    f, i = np.float32, np.int32
    return Tree(
        edges(i), edges(i), edges(f), edges(f), edges(f),
        per_node(i), per_node(i), per_node(f), per_node(f), per_node(f), per_node(f), per_node(i), per_node(f),
        np.zeros(batch, f), np.zeros(batch, f), np.ones((batch, actions), bool), np.zeros(batch, i),
        np.zeros(nodes + 1, f), np.zeros((batch, actions), f),
        np.zeros((2, batch), np.int64), np.zeros(batch, i), np.zeros((batch, actions), f),
    )  # fmt: skip


@intrinsic
def _as_float(context: Any, bits: Any) -> Any:
    """The float32 with the bits of an int32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), build


@njit(inline="always", fastmath=LOOSE, **PLAIN)
def _exp(x):
    """e^x in float32 to 2e-7, without a branch: unlike with math.exp, loops become vector instructions."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _as_float(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))  # type: ignore[call-arg]


@njit(inline="always", fastmath=LOOSE, **PLAIN)
def _sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + _exp(-x))


@njit(inline="always", fastmath=LOOSE, **PLAIN)
def _tanh(x):
    return np.float32(1.0) - np.float32(2.0) / (_exp(np.float32(2.0) * x) + np.float32(1.0))


@njit(fastmath=LOOSE, forceinline=True, **PLAIN)
def softmax(x, out):
    """out = softmax of x, both [A]."""
    top = x[0]
    for a in range(1, len(x)):
        top = max(top, x[a])
    total = np.float32(0.0)
    for a in range(len(x)):
        out[a] = _exp(x[a] - top)
        total += out[a]
    scale = np.float32(1.0) / total
    for a in range(len(x)):
        out[a] *= scale


@inlined
def expand(tree, b, node, logits, value, reward, discount):
    """Write a new node with the network's predictions over the entries of an earlier search."""
    for a in range(len(logits)):
        tree.child[b, node, a] = UNSEEN
        tree.visits[b, node, a] = 0
        tree.q[b, node, a] = 0.0
        tree.logits[b, node, a] = logits[a] if node != ROOT or tree.legal[b, a] else LEAST
    softmax(tree.logits[b, node], tree.prior[b, node])
    tree.value[b, node] = tree.network_value[b, node] = value
    tree.node_visits[b, node] = 1
    tree.reward[b, node], tree.discount[b, node] = reward, discount
    if node != ROOT:
        parent, action = tree.leaf[0, b], tree.leaf[1, b]
        tree.parent[b, node], tree.action[b, node] = parent, action
        tree.child[b, parent, action] = node


@inlined
def back_up(tree, b, node):
    """Add the return that ends in a new node's value to the means of all nodes above it."""
    gain, low, high = tree.network_value[b, node], tree.low[b], tree.high[b]
    while node != ROOT:
        parent, action = tree.parent[b, node], tree.action[b, node]
        reward, discount = tree.reward[b, node], tree.discount[b, node]
        q = reward + discount * tree.value[b, node]
        tree.q[b, parent, action] = q
        tree.visits[b, parent, action] += 1
        low, high = min(low, q), max(high, q)
        gain = reward + discount * gain
        tree.node_visits[b, parent] += 1
        tree.value[b, parent] += (gain - tree.value[b, parent]) / np.float32(tree.node_visits[b, parent])
        node = parent
    tree.low[b], tree.high[b] = low, high


# Q-transforms: Q as the rules read it. (tree, b, node, constants, out [A])


@inlined
def by_tree(tree, b, node, constants, out):
    """MuZero: Q scaled by the range of the tree; 0 for unvisited edges."""
    low, spread = tree.low[b], tree.high[b] - tree.low[b]
    if not spread > 0:  # a single Q has no range
        low, spread = np.float32(0.0), np.float32(1.0)
    scale = np.float32(1.0) / spread
    for a in range(len(out)):
        out[a] = (tree.q[b, node, a] - low) * scale if tree.visits[b, node, a] > 0 else np.float32(0.0)


@inlined
def by_tree_or_mean(tree, b, node, constants, out):
    """EfficientZero: Q scaled by the range of the tree, at least the floor. An unvisited edge has the mean Q of its
    visited siblings and, below the root, the mean_q of the parent."""
    total, seen = np.float32(0.0), 0
    for a in range(len(out)):
        if tree.visits[b, node, a] > 0:
            total += tree.q[b, node, a]
            seen += 1
    if node == ROOT:
        mean = total / np.float32(max(seen, 1))
    else:
        mean = (tree.mean_q[b, tree.parent[b, node]] + total) / np.float32(1 + seen)
    tree.mean_q[b, node] = mean
    low, scale = tree_scale(tree, b, mean, constants)
    for a in range(len(out)):
        out[a] = ((tree.q[b, node, a] if tree.visits[b, node, a] > 0 else mean) - low) * scale


@inlined
def tree_scale(tree, b, otherwise, constants):
    """(the lowest Q of the tree, or `otherwise` if there is none; 1 / its range, which is at least the floor)."""
    low = tree.low[b] if tree.high[b] >= tree.low[b] else otherwise
    return low, np.float32(1.0) / max(tree.high[b] - low, np.float32(constants.floor))


@inlined
def by_siblings(tree, b, node, constants, out):
    """mctx's MuZero: Q scaled by the range of the node's value and its visited edges; 0 for unvisited edges."""
    low = high = tree.value[b, node]
    for a in range(len(out)):
        if tree.visits[b, node, a] > 0:
            low, high = min(low, tree.q[b, node, a]), max(high, tree.q[b, node, a])
    scale = np.float32(1.0) / max(high - low, np.float32(1e-8))
    for a in range(len(out)):
        out[a] = ((tree.q[b, node, a] if tree.visits[b, node, a] > 0 else low) - low) * scale


@inlined
def completed(tree, b, node, constants, out):
    """Gumbel MuZero, equation 10 and appendix D: Q, completed with v_mix for unvisited edges."""
    raw, weighted, mass = tree.network_value[b, node], np.float32(0.0), np.float32(0.0)
    for a in range(len(out)):
        if tree.visits[b, node, a] > 0:
            weighted += tree.prior[b, node, a] * tree.q[b, node, a]
            mass += tree.prior[b, node, a]
    total = np.float32(tree.node_visits[b, node] - 1)  # visits of all edges
    mean = weighted / mass if mass > 0 else raw
    v_mix = (raw + total * mean) / (np.float32(1.0) + total)
    for a in range(len(out)):
        out[a] = tree.q[b, node, a] if tree.visits[b, node, a] > 0 else v_mix


@inlined
def completed_by_node(tree, b, node, constants, out):
    """Completed Q, scaled to [0, 1] over the edges of the node."""
    completed(tree, b, node, constants, out)
    low = high = out[0]
    for a in range(1, len(out)):
        low, high = min(low, out[a]), max(high, out[a])
    scale = np.float32(1.0) / max(high - low, np.float32(1e-8))
    for a in range(len(out)):
        out[a] = (out[a] - low) * scale


@inlined
def completed_by_tree(tree, b, node, constants, out):
    """Completed Q, scaled by the range of the tree. v_mix may be outside that range, and is clipped."""
    completed(tree, b, node, constants, out)
    low, scale = tree_scale(tree, b, out[0], constants)
    for a in range(len(out)):
        out[a] = min(max((out[a] - low) * scale, np.float32(0.0)), np.float32(1.0))


# Rules: which edge to follow. (tree, b, node, wanted, constants, q [A], scratch [A]) -> edge
# wanted: at the root, the number of visits of the edges from which Sequential Halving chooses.


@inlined
def puct(tree, b, node, wanted, constants, q, scratch):
    """MuZero, equation 2. N includes the node's own evaluation, so that the first edge is that of the highest prior."""
    factor = tree.puct_factor[tree.node_visits[b, node]]
    best, top = 0, np.float32(-np.inf)
    for a in range(len(q)):
        score = q[a] + tree.prior[b, node, a] * factor / np.float32(1 + tree.visits[b, node, a])
        if score > top and (node != ROOT or tree.legal[b, a]):
            best, top = a, score
    return best


@inlined
def sigma(tree, b, node, constants):
    """The factor on transformed Q relative to logits: Gumbel MuZero, equation 8."""
    most = 0
    for a in range(tree.visits.shape[2]):
        most = max(most, tree.visits[b, node, a])
    return np.float32((constants.c_visit + most) * constants.c_scale)


@inlined
def halving(tree, b, node, wanted, constants, q, scratch):
    """Sequential Halving with Gumbel: of the edges with `wanted` visits, that of the best g + logits + sigma(q)."""
    scale = sigma(tree, b, ROOT, constants)
    best, top = -1, np.float32(-np.inf)
    for a in range(len(q)):
        score = tree.gumbel[b, a] + tree.logits[b, ROOT, a] + scale * q[a]
        if tree.visits[b, ROOT, a] == wanted and tree.legal[b, a] and score > top:
            best, top = a, score
    return best


@inlined
def improved(tree, b, node, wanted, constants, q, scratch):
    """The edge that brings visits closest to the improved policy: Gumbel MuZero, equation 14."""
    scale = sigma(tree, b, node, constants)
    for a in range(len(q)):
        q[a] = tree.logits[b, node, a] + scale * q[a]
    softmax(q, scratch)
    share = np.float32(1.0) / np.float32(tree.node_visits[b, node])  # 1 + the visits of all edges
    best, top = 0, np.float32(-np.inf)
    for a in range(len(q)):
        score = scratch[a] - np.float32(tree.visits[b, node, a]) * share
        if score > top:
            best, top = a, score
    return best


# The network of a fused search: a small perceptron, with the arrays of Perceptrons.


@njit(**PLAIN)
def linear(x, weight, out, rows):
    """out [rows, :] += x @ weight; weight [blocks, in, LANES]. In this thread alone."""
    inputs, outputs = weight.shape[1], weight.shape[0] * LANES
    whole, many = inputs // 4 * 4, rows // ROWS * ROWS
    for j in range(0, outputs, 16 * VECTORS):
        block = weight[j // LANES]
        for i in range(0, many, ROWS):
            many_rows(x, block, out, i, j, inputs)
        for i in range(many, rows):
            one_row(x, block, out, i, j, whole)
            for k in range(whole, inputs):
                for lane in range(16 * VECTORS):
                    out[i, j + lane] += x[i, k] * block[k, j % LANES + lane]


class Perceptrons(NamedTuple):
    """The weights of a small models.muzero.MuZeroModel. Layers are [blocks, in, LANES].

    Outputs are padded to whole blocks with zero weights. The biases of the last layers have the true size.
    """

    of_action: Array  # [A, H] first layer of the dynamics: its bias plus the weights of each action
    dynamics: tuple[Array, ...]
    dynamics_bias: tuple[Array, ...]
    outcome: Array  # H to S + R outputs: next state, reward logits
    outcome_bias: Array
    prediction: tuple[Array, ...]
    prediction_bias: tuple[Array, ...]
    heads: Array  # H to A + V outputs: policy logits, value logits
    heads_bias: Array
    tanh: bool  # instead of ReLU
    board: bool  # value and reward are each tanh of one output, not distributions over a support


class PrefixLSTM(NamedTuple):
    """The weights from the dynamics' features to value prefixes, in a models.efficientzero.EfficientZeroModel.

    A state is then [latent | hidden | cell | prefix | steps], and `Perceptrons.outcome` has only the next latent.
    L is the size of the LSTM. Its 4 L gates are in torch's order: input, forget, candidate, output.
    """

    features: Array  # H to 4 L gates
    hidden: Array  # L to 4 L gates
    bias: Array  # [4 L]
    reward: Array  # L, the normalised hidden state, to R prefix logits
    reward_bias: Array  # [R]
    horizon: int  # steps after which the LSTM is reset


@njit(fastmath=LOOSE, **PLAIN)
def _activate(x, rows, width, tanh):
    for i in range(rows):
        for j in range(width):
            if tanh:
                x[i, j] = _tanh(x[i, j])
            else:
                x[i, j] = max(x[i, j], np.float32(0.0))


@njit(**PLAIN)
def _layers(x, rows, weights, biases, buffers, tanh):
    """Run the layers of a trunk. The first buffer holds the biases [rows, :] of the first layer. Returns the number of
    the buffer with the last hidden layer [rows, :]."""
    for layer in range(len(weights)):
        out = buffers[layer % 2]
        if layer > 0:
            _fill(out, biases[layer], rows)
        linear(x, weights[layer], out, rows)
        _activate(out, rows, weights[layer].shape[0] * LANES, tanh)
        x = out
    return (len(weights) - 1) % 2


@inlined
def _copy(x, out):
    """out = x, faster than an assignment of slices."""
    for j in range(len(x)):
        out[j] = x[j]


@njit(**PLAIN)
def _fill(out, bias, rows):
    for i in range(rows):
        _copy(bias, out[i])


@njit(fastmath=LOOSE | {"nnan"}, **PLAIN)
def _scale_state(x, out):
    """out = x [S] scaled to [0, 1]."""
    low = high = x[0]
    for j in range(len(out)):
        low, high = min(low, x[j]), max(high, x[j])
    scale = np.float32(1.0) / max(high - low, np.float32(1e-5))
    for j in range(len(out)):
        out[j] = (x[j] - low) * scale


@njit(fastmath=LOOSE, **PLAIN)
def _decode(logits, scratch, board):
    """The scalar of the logits of a support: h^-1 of the mean atom."""
    if board:
        return np.float32(math.tanh(logits[0]))
    atoms = len(logits)
    top = logits[0]
    for j in range(1, atoms):
        top = max(top, logits[j])
    total, moment = np.float32(0.0), np.float32(0.0)
    for j in range(atoms):
        scratch[j] = _exp(logits[j] - top)
    for j in range(atoms):
        total += scratch[j]
        moment += scratch[j] * np.float32(j - atoms // 2)
    return inverse(moment / total)


@njit(**PLAIN)
def inverse(y):
    """h^-1 of h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, in the form of ops.support without a difference."""
    u = 2.0 * y / (math.sqrt(1.002 * 1.002 + 0.004 * abs(y)) + 1.002)
    return np.float32(u * (abs(u) + 2.0))


@njit(cache=True, nogil=True, **PLAIN)
def decode(logits, atoms, prediction, scratch):
    """Write predictions [B, P + 2] for logits [B, P + atoms + ...]: policy, value with `atoms` atoms, reward."""
    policy = prediction.shape[1] - 2
    for i in range(len(prediction)):
        _copy(logits[i, :policy], prediction[i])
        value, reward = logits[i, policy : policy + atoms], logits[i, policy + atoms :]
        prediction[i, policy] = _decode(value, scratch, len(value) == 1)
        prediction[i, policy + 1] = _decode(reward, scratch, len(reward) == 1)


@njit(fastmath=LOOSE, **PLAIN)
def _lstm_cell(gates, hidden, cell):
    """The LSTM's next hidden state and cell, both [L] and written in place, from its gates [4 L]."""
    size = len(hidden)
    for j in range(size):
        kept = _sigmoid(gates[size + j]) * cell[j]
        cell[j] = kept + _sigmoid(gates[j]) * _tanh(gates[2 * size + j])
    for j in range(size):
        hidden[j] = _sigmoid(gates[3 * size + j]) * _tanh(cell[j])


@njit(fastmath=LOOSE, **PLAIN)
def _normalise(x):
    """x [L] with mean 0 and variance 1, in place, as torch's LayerNorm."""
    mean, square = np.float32(0.0), np.float32(0.0)
    for j in range(len(x)):
        mean += x[j]
    mean /= np.float32(len(x))
    for j in range(len(x)):
        square += (x[j] - mean) * (x[j] - mean)
    scale = np.float32(1.0) / np.sqrt(square / np.float32(len(x)) + np.float32(1e-5))
    for j in range(len(x)):
        x[j] = (x[j] - mean) * scale


@njit(**PLAIN)
def prefix_rewards(leaf, lstm, board, states, node, begin, end, features, memory, out, scratch, prediction):
    """Write the rewards of the edges to node number `node` of the trees [begin, end): differences of value prefixes.

    features [rows, H] of the dynamics. memory [2, rows, L] and out [rows, :] are buffers.
    """
    rows, size, reward = end - begin, memory.shape[2], prediction.shape[1] - 1
    hidden, cell, first = memory[0], memory[1], states.shape[2] - 2 * memory.shape[2] - 2
    for i in range(rows):
        before = states[leaf[0, begin + i], begin + i]
        keeps = np.float32(before[-1] < lstm.horizon)
        for j in range(size):
            hidden[i, j], cell[i, j] = keeps * before[first + j], keeps * before[first + size + j]
    _fill(out, lstm.bias, rows)
    linear(features, lstm.features, out, rows)
    linear(hidden, lstm.hidden, out, rows)
    for i in range(rows):
        after = states[node, begin + i]
        _lstm_cell(out[i], hidden[i], cell[i])
        _copy(hidden[i], after[first:])
        _copy(cell[i], after[first + size :])
        _normalise(hidden[i])
    _fill(out, lstm.reward_bias, rows)
    linear(hidden, lstm.reward, out, rows)
    for i in range(rows):
        before, after = states[leaf[0, begin + i], begin + i], states[node, begin + i]
        keeps = np.float32(before[-1] < lstm.horizon)
        after[-2] = _decode(out[i, : len(lstm.reward_bias)], scratch, board)
        after[-1] = keeps * before[-1] + np.float32(1.0)
        prediction[i, reward] = after[-2] - keeps * before[-2]


@inlined
def evaluate(tree, net, lstm, states, node, begin, end, state, memory, buffers, scratch, prediction):
    """Write the states of node number `node` of the trees [begin, end) and the network's predictions for them.

    `lstm` is None where rewards are outputs of the dynamics: numba does not compile the branches on it.
    """
    rows, size, actions = end - begin, state.shape[1], tree.legal.shape[1]
    out = buffers[2]
    for i in range(rows):
        b = begin + i
        _copy(states[tree.leaf[0, b], b, :size], state[i])
        _copy(net.of_action[tree.leaf[1, b]], buffers[0, i])
    hidden = buffers[_layers(state, rows, net.dynamics, net.dynamics_bias, buffers, net.tanh)]
    _fill(out, net.outcome_bias, rows)
    linear(hidden, net.outcome, out, rows)
    for i in range(rows):
        _scale_state(out[i], state[i])
        _copy(state[i], states[node, begin + i])
        if lstm is None:
            prediction[i, actions + 1] = _decode(out[i, size : len(net.outcome_bias)], scratch, net.board)
    if lstm is not None:
        prefix_rewards(tree.leaf, lstm, net.board, states, node, begin, end, hidden, memory, out, scratch, prediction)
    _fill(buffers[0], net.prediction_bias[0], rows)
    hidden = buffers[_layers(state, rows, net.prediction, net.prediction_bias, buffers, net.tanh)]
    _fill(out, net.heads_bias, rows)
    linear(hidden, net.heads, out, rows)
    for i in range(rows):
        _copy(out[i, :actions], prediction[i])
        prediction[i, actions] = _decode(out[i, actions : len(net.heads_bias)], scratch, net.board)


class Variant(NamedTuple):
    grow: Any
    fused: Any


def labelled(label: str) -> Any:
    """Give a function a unique name. Compiled closures are linked by name: numba would otherwise confuse those of two
    variants that it reads from its cache."""

    def rename(function: Any) -> Any:
        function.__name__ = function.__qualname__ = f"{function.__name__}_{label}"
        return function

    return rename


def compose(root: Any, interior: Any, q_transform: Any, label: str) -> Variant:
    """The search with these rules, as two compiled functions. The label must be unique: see `labelled`."""

    @inlined
    @labelled(label)
    def select(tree, b, wanted, constants, q, scratch):
        """Follow the rules down to an unvisited edge."""
        q_transform(tree, b, ROOT, constants, q)
        action = root(tree, b, ROOT, wanted, constants, q, scratch)
        node, depth = ROOT, 1
        following = tree.child[b, ROOT, action]
        while following != UNSEEN:
            node, depth = following, depth + 1
            q_transform(tree, b, node, constants, q)
            action = interior(tree, b, node, 0, constants, q, scratch)
            following = tree.child[b, node, action]
        tree.leaf[0, b], tree.leaf[1, b] = node, action
        tree.depth[b] = max(tree.depth[b], depth)

    @njit(nogil=True, **PLAIN)
    @labelled(label)
    def grow(tree, begin, end, node, prediction, discount, table, constants, buffer):
        """Add node number `node` to the trees [begin, end), with the network's predictions, and select the next leaf.

        prediction [end - begin, A + 2]: logits, value, reward. discount [B]. table [considered + 1, simulations].
        buffer [2, A].
        """
        actions, q, scratch = prediction.shape[1] - 2, buffer[0], buffer[1]
        for b in range(begin, end):
            row = prediction[b - begin]
            expand(tree, b, node, row[:actions], row[actions], row[actions + 1], discount[b])
            back_up(tree, b, node)
            if node < table.shape[1]:
                select(tree, b, table[tree.considered[b], node], constants, q, scratch)
            else:
                q_transform(tree, b, ROOT, constants, tree.transformed[b])

    @njit(nogil=True, error_model="numpy")
    @labelled(label)
    def fused(tree, net, lstm, states, root, discount, table, constants):
        """All simulations of B searches, with the network compiled in. states [M, B, S]: those of the roots are given.
        root [B, A + 2]: the network's predictions for the roots.

        A chunk of trees is searched to the end before the next, so that its nodes stay in cache.
        """
        batch, size, actions = states.shape[1], net.dynamics[0].shape[1], tree.legal.shape[1]
        rows, widest = min(batch, CHUNK), widest_layer(net, lstm)
        state, buffers = np.empty((rows, size), np.float32), np.empty((3, rows, widest), np.float32)
        prediction, scratch = np.empty((rows, actions + 2), np.float32), np.empty(widest, np.float32)
        buffer = np.empty((2, actions), np.float32)
        # Allocated last: first, it would shift the others across cache lines, and one root would take a fifth longer.
        memory = np.empty((2, rows, 0 if lstm is None else lstm.hidden.shape[1]), np.float32)
        for begin in range(0, batch, rows):
            end = min(begin + rows, batch)
            grow(tree, begin, end, ROOT, root[begin:end], discount, table, constants, buffer)
            for node in range(1, table.shape[1] + 1):
                evaluate(tree, net, lstm, states, node, begin, end, state, memory, buffers, scratch, prediction)
                grow(tree, begin, end, node, prediction, discount, table, constants, buffer)

    return Variant(grow, fused)


@njit(**PLAIN)
def widest_layer(net, lstm):
    widest = max(len(net.outcome), len(net.heads)) * LANES
    if lstm is not None:
        widest = max(widest, max(len(lstm.features), len(lstm.reward)) * LANES)
    for bias in net.dynamics_bias + net.prediction_bias:
        widest = max(widest, len(bias))
    return widest


# These variants are compiled once and cached on disk. Numba caches functions that call others by a global name, but not
# closures: hence a global function for each.
_muzero, _muzero_fused = compose(puct, puct, by_tree, "muzero")
_efficientzero, _efficientzero_fused = compose(puct, puct, by_tree_or_mean, "efficientzero")
_gumbel, _gumbel_fused = compose(halving, improved, completed_by_node, "gumbel")
_gumbel_tree, _gumbel_tree_fused = compose(halving, improved, completed_by_tree, "gumbel_tree")
_gumbel_raw, _gumbel_raw_fused = compose(halving, improved, completed, "gumbel_raw")
muzero = compiled(lambda *search: _muzero(*search))
muzero_fused = compiled(lambda *search: _muzero_fused(*search))
efficientzero = compiled(lambda *search: _efficientzero(*search))
efficientzero_fused = compiled(lambda *search: _efficientzero_fused(*search))
gumbel = compiled(lambda *search: _gumbel(*search))
gumbel_fused = compiled(lambda *search: _gumbel_fused(*search))
gumbel_tree = compiled(lambda *search: _gumbel_tree(*search))
gumbel_tree_fused = compiled(lambda *search: _gumbel_tree_fused(*search))
gumbel_raw = compiled(lambda *search: _gumbel_raw(*search))
gumbel_raw_fused = compiled(lambda *search: _gumbel_raw_fused(*search))
