"""Simulations per second of the search: with the network compiled in, with any PyTorch model, and mctx beside them.

python benchmarks/search_speed.py                 # on the CPU; mctx takes part where it is installed (pip install mctx)
python benchmarks/search_speed.py --lightzero D   # and LightZero's C++ tree, of a checkout D: see lightzero.py
python benchmarks/search_speed.py --device cuda   # residual towers on a GPU, the network in a captured graph

The model is a perceptron with a latent of 64, 128 hidden units and 21 atoms, the same weights for all, EfficientZero's
with an LSTM of 64 besides; on a GPU a tower of 64 planes of 6 x 6. Programs take turns; speed is in thousand
simulations per CPU second (GPU: per second).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 --xla_force_host_platform_device_count=1",
)

import gymnasium as gym
import numpy as np
import torch

from lightzero import lightzero_search
from rl_training import ALGORITHMS
from rl_training.types import Spaces

SIMULATIONS = 50
RULES = {"muzero": "MUZERO", "gumbel_muzero": "GUMBEL", "efficientzero": "EFFICIENTZERO"}


def make(algo: str, actions: int, device: str, **sizes: object):
    """An actor: to search, nothing else is needed."""
    if device == "cpu":
        observation = gym.spaces.Box(-1, 1, (64,), np.float32)
    else:
        observation = gym.spaces.Box(0, 255, (4, 96, 96), np.uint8)
    spaces = Spaces(observation, gym.spaces.Discrete(actions))
    torch.manual_seed(0)
    recipe = ALGORITHMS[algo].recipe
    hp = recipe.hyperparameters(value_limit=10, reward_limit=10, **sizes)
    actor = recipe.actor(spaces, hp, device=torch.device(device))
    with torch.no_grad():
        for parameter in actor.model.parameters():  # heads begin at zero: give the search something to see
            parameter.add_(0.1 * torch.randn_like(parameter))
    actor.refresh()
    return actor


def observations(actor, batch: int) -> np.ndarray:
    rng, space = np.random.default_rng(1), actor.spaces.observation
    if space.dtype == np.uint8:
        return rng.integers(0, 255, (batch, *space.shape)).astype(np.uint8)
    return rng.standard_normal((batch, *space.shape)).astype(np.float32)


def our_search(actor, algo: str, batch: int, device: str, *, fused: bool = True) -> Callable[[], object]:
    """A search of `batch` roots whose states are known; LightZero's draws its noise besides, which takes little."""
    from rl_training.ops import search as ops
    from rl_training.ops.tree import SearchConstants

    rng, planner = np.random.default_rng(1), actor.planner
    root = planner.evaluate_root(observations(actor, batch), num_simulations=SIMULATIONS, rng=rng)
    gumbel = rng.gumbel(size=root.logits.shape).astype(np.float32)
    rules = getattr(ops, RULES[algo])
    constants = SearchConstants(c_scale=0.1) if algo == "gumbel_muzero" else SearchConstants()

    def run() -> object:
        planner.fusable = device == "cpu" and fused
        return planner.search(
            rules, root, gamma=0.997, num_simulations=SIMULATIONS, constants=constants, rng=rng, gumbel=gumbel
        )

    return run


def mctx_search(actor, batch: int, *, gumbel: bool) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp
    import mctx

    actions, size, model = actor.planner.num_actions, 64, actor.model
    linear = {
        name: (jnp.asarray(part.weight.detach().numpy().T), jnp.asarray(part.bias.detach().numpy()))
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear)
    }

    def joined(*names):
        return tuple(jnp.concatenate([linear[name][i] for name in names], 1 - i) for i in range(2))

    (prediction, prediction_bias), (dynamics, dynamics_bias) = linear["prediction_trunk.0"], linear["dynamics_trunk.0"]
    (heads, heads_bias), (outcome, outcome_bias) = joined("policy", "value"), joined("next_state", "reward")
    of_action, of_state = dynamics[size:] + dynamics_bias, dynamics[:size]

    def decode(logits):
        atoms = jnp.arange(logits.shape[-1]) - logits.shape[-1] // 2
        y = (jax.nn.softmax(logits) * atoms).sum(-1)
        root = (jnp.sqrt(1 + 0.004 * (jnp.abs(y) + 1.001)) - 1) / 0.002
        return jnp.sign(y) * (root**2 - 1)

    def predict(state):
        out = jax.nn.relu(state @ prediction + prediction_bias) @ heads + heads_bias
        return out[:, :actions], decode(out[:, actions:])

    def step(params, key, action, state):
        out = jax.nn.relu(state @ of_state + of_action[action]) @ outcome + outcome_bias
        state, low, high = out[:, :size], out[:, :size].min(1, keepdims=True), out[:, :size].max(1, keepdims=True)
        state = (state - low) / (high - low + 1e-5)
        logits, value = predict(state)
        discount = jnp.full(len(state), 0.997)
        return mctx.RecurrentFnOutput(
            reward=decode(out[:, size:]), discount=discount, prior_logits=logits, value=value
        ), state

    with torch.no_grad():
        states = jnp.asarray(model.represent(torch.from_numpy(observations(actor, batch))).numpy())
    policy = mctx.gumbel_muzero_policy if gumbel else mctx.muzero_policy

    @jax.jit
    def search(key, states):
        logits, value = predict(states)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=states)
        return policy(None, key, root, step, num_simulations=SIMULATIONS).action_weights

    key = jax.random.PRNGKey(0)
    return lambda: search(key, states).block_until_ready()


def clock(run: Callable[[], object], timer: Callable[[], float], least: float) -> float:
    """Seconds of one call, from as many as take `least` seconds."""
    calls, start = 0, timer()
    while timer() - start < least:
        run()
        calls += 1
    return (timer() - start) / calls


def compare(programs: dict[str, Callable[[], object]], batch: int, timer, repeats: int, least: float) -> dict:
    for run in programs.values():
        run()  # compile
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, run in programs.items():
            seconds[name].append(clock(run, timer, least))
    return {name: [batch * SIMULATIONS / s / 1e3 for s in each] for name, each in seconds.items()}


def on_cpu(args: argparse.Namespace) -> None:
    with_mctx = find_spec("mctx") is not None
    print("" if with_mctx else "mctx is not installed: its columns are left out\n", end="")
    torch.set_num_threads(1)
    for actions in args.actions:
        puct = make("muzero", actions, "cpu")
        gumbel = make("gumbel_muzero", actions, "cpu")
        prefix = make("efficientzero", actions, "cpu")
        for batch in args.batch:
            programs = {
                "fused puct": our_search(puct, "muzero", batch, "cpu"),
                "fused gumbel": our_search(gumbel, "gumbel_muzero", batch, "cpu"),
                "fused efficientzero": our_search(prefix, "efficientzero", batch, "cpu"),
                "torch puct": our_search(puct, "muzero", batch, "cpu", fused=False),
                "torch efficientzero": our_search(prefix, "efficientzero", batch, "cpu", fused=False),
            }
            if with_mctx:
                programs["mctx puct"] = mctx_search(puct, batch, gumbel=False)
                programs["mctx gumbel"] = mctx_search(puct, batch, gumbel=True)
            if args.lightzero:
                obs = observations(puct, batch)
                programs["lightzero"] = lightzero_search(args.lightzero, puct, obs, SIMULATIONS)
            speed = compare(programs, batch, time.process_time, args.repeats, args.least)
            cells = [f"{name} {median(x):,.3g} ({min(x):,.3g} to {max(x):,.3g})" for name, x in speed.items()]
            print(f"A={actions} B={batch}: {'; '.join(cells)}", flush=True)
            print(f"    {ratios(speed)}", flush=True)


def ratios(speed: dict[str, list[float]]) -> str:
    """Medians of what each repeat says: programs take turns, so that a busy machine slows both."""
    pairs = [("fused puct", "mctx puct"), ("fused gumbel", "mctx gumbel")]
    pairs += [("fused efficientzero", "torch efficientzero")]
    pairs += [(name, "lightzero") for name in ("fused puct", "fused gumbel", "torch puct")]
    each = [(a, b, [x / y for x, y in zip(speed[a], speed[b], strict=True)]) for a, b in pairs if b in speed]
    return ", ".join(f"{a} / {b} {median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for a, b, r in each)


def on_gpu(args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    for actions in args.actions:
        made = make("muzero", actions, args.device, channels=64)
        for batch in args.batch:
            programs = {"puct": our_search(made, "muzero", batch, args.device)}
            speed = compare(programs, batch, time.perf_counter, args.repeats, args.least)["puct"]
            print(f"A={actions} B={batch}: {median(speed):,.0f} ({min(speed):,.0f} to {max(speed):,.0f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lightzero", type=Path, help="a checkout of LightZero with its trees built in place")
    parser.add_argument("--actions", type=int, nargs="+", default=[2, 6, 18])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.3, help="seconds of each measurement")
    args = parser.parse_args()
    (on_cpu if args.device == "cpu" else on_gpu)(args)


if __name__ == "__main__":
    main()
