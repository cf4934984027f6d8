"""What mctx finds in random worlds: `python mctx_reference.py answers.npz`.

A program of its own. JAX starts threads, and a process with threads should not fork environments, as other tests do.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import numpy as np

from rl_training.ops.search import Evaluation, Search
from rl_training.types import Array

BATCH, STATES = 16, 4096
SIZES = [(2, 50), (3, 7), (6, 16), (18, 2), (18, 50)]  # actions, simulations
WAYS = [(False, 1.0, 0.997), (True, 1.0, -1.0), (True, 0.0, 1.0)]  # masked, scale of the noise, discount
CASES = [
    (policy, *size, *way)
    for policy, sizes in {"gumbel": SIZES, "raw": [(6, 20)], "puct": SIZES}.items()
    for size in sizes
    for way in WAYS
]


class Table:
    """A model of numbered states that leads anywhere, the same numbers for both searches."""

    def __init__(self, num_actions: int, discount: float) -> None:
        rng = np.random.default_rng([num_actions, round(abs(discount) * 1000)])
        self.discount = discount
        self.next = rng.integers(0, STATES, (STATES, num_actions))
        self.logits = rng.normal(0, 1.5, (STATES, num_actions)).astype(np.float32)
        self.value, self.reward = rng.normal(0, 0.5, (2, STATES)).astype(np.float32)
        self.start = rng.integers(0, STATES, BATCH)
        legal = rng.random((BATCH, num_actions)) < rng.uniform(0.2, 0.9, (BATCH, 1))
        legal[np.arange(BATCH), rng.integers(0, num_actions, BATCH)] = True
        self.legal = legal

    def evaluate(self, state: Array, *, root: bool = False) -> Evaluation:
        reward = np.zeros(BATCH, np.float32) if root else self.reward[state]
        return Evaluation(self.logits[state], self.value[state], reward, np.full(BATCH, self.discount, np.float32))

    def search(self, rules: Any, num_simulations: int, **options: Any) -> Any:
        """Ours."""
        states, rows = np.zeros((num_simulations + 1, BATCH), np.int64), np.arange(BATCH)
        states[0] = self.start

        def evaluate(node: int, parent: Array, action: Array) -> Evaluation:
            states[node] = self.next[states[parent, rows], action]
            return self.evaluate(states[node])

        root = self.evaluate(self.start, root=True)
        return Search(self.next.shape[1])(rules, evaluate, root, num_simulations=num_simulations, **options)


@functools.cache
def compiled(policy: str, num_simulations: int) -> Any:
    import jax
    import mctx

    unscaled = functools.partial(
        mctx.qtransform_completed_by_mix_value, value_scale=1.0, maxvisit_init=20.0, rescale_values=False
    )
    search = {
        "gumbel": functools.partial(mctx.gumbel_muzero_policy, max_num_considered_actions=5),
        "raw": functools.partial(mctx.gumbel_muzero_policy, qtransform=unscaled),
        "puct": functools.partial(mctx.muzero_policy, dirichlet_fraction=0.0, pb_c_init=1.5, pb_c_base=300.0),
    }[policy]

    def recurrent(params: Any, key: Any, action: Any, state: Any) -> Any:
        following, logits, value, reward, discount = params
        state = following[state, action]
        output = mctx.RecurrentFnOutput(
            reward=reward[state], discount=discount, prior_logits=logits[state], value=value[state]
        )
        return output, state

    def run(params: Any, start: Any, invalid: Any, **traced: Any) -> Any:
        root = mctx.RootFnOutput(prior_logits=params[1][start], value=params[2][start], embedding=start)
        key = jax.random.PRNGKey(3)
        return search(params, key, root, recurrent, num_simulations, invalid_actions=invalid, **traced)

    return jax.jit(run)


def answers(
    policy: str, num_actions: int, num_simulations: int, masked: bool, scale: float, discount: float
) -> dict[str, Array]:
    table = Table(num_actions, discount)
    invalid = ~table.legal if masked else np.zeros_like(table.legal)
    params = (table.next, table.logits, table.value, table.reward, np.full(BATCH, discount, np.float32))
    traced = {} if policy == "puct" else {"gumbel_scale": scale}
    output = compiled(policy, num_simulations)(params, table.start, invalid, **traced)
    summary, tree = output.search_tree.summary(), output.search_tree
    found = {"visits": summary.visit_counts, "q": summary.qvalues, "value": summary.value}
    if policy != "puct":
        noise = tree.extra_data.root_gumbel
        found |= {"gumbel": noise, "action": output.action, "policy": output.action_weights}
    return {name: np.asarray(array) for name, array in found.items()}


if __name__ == "__main__":
    # Compiling takes most of the time: hardly optimised, in one thread.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
    every = {f"{number}/{name}": x for number, case in enumerate(CASES) for name, x in answers(*case).items()}
    np.savez(sys.argv[1], **every)
