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
from rl_training.algorithms.efficientzero import EfficientZero, EfficientZeroHyperparameters
from rl_training.algorithms.gumbel_muzero import GumbelMuZero, GumbelMuZeroHyperparameters
from rl_training.algorithms.muzero import MuZero, MuZeroHyperparameters
from rl_training.types import Spaces

SIMULATIONS = 50


def make(algorithm: type, hyperparameters: type, actions: int, device: str, **sizes: object):
    if device == "cpu":
        observation = gym.spaces.Box(-1, 1, (64,), np.float32)
    else:
        observation = gym.spaces.Box(0, 255, (4, 96, 96), np.uint8)
    spaces = Spaces(observation, gym.spaces.Discrete(actions))
    torch.manual_seed(0)
    hp = hyperparameters(value_limit=10, reward_limit=10, **sizes)
    made = algorithm.build(spaces, hp, rng=np.random.default_rng(0), device=torch.device(device))
    with torch.no_grad():
        for parameter in made.model.parameters():  # heads begin at zero: give the search something to see
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.planner.refresh()
    return made


def observations(algorithm, batch: int) -> np.ndarray:
    rng, space = np.random.default_rng(1), algorithm.spaces.observation
    if space.dtype == np.uint8:
        return rng.integers(0, 255, (batch, *space.shape)).astype(np.uint8)
    return rng.standard_normal((batch, *space.shape)).astype(np.float32)


def our_search(algorithm, batch: int, device: str, *, fused: bool = True) -> Callable[[], object]:
    """A search of `batch` roots whose states are known; LightZero's draws its noise besides, which takes little."""
    from rl_training.ops import search as ops

    rng, planner = np.random.default_rng(1), algorithm.planner
    root = planner.look(observations(algorithm, batch), num_simulations=SIMULATIONS, rng=rng)
    gumbel = rng.gumbel(size=root.logits.shape).astype(np.float32)
    is_gumbel = isinstance(algorithm, GumbelMuZero)
    rules, knobs = (ops.GUMBEL, ops.Knobs(c_scale=0.1)) if is_gumbel else (algorithm.rules(), ops.Knobs())

    def run() -> object:
        planner.fusable = device == "cpu" and fused
        return planner.search(
            rules, root, discount=0.997, num_simulations=SIMULATIONS, knobs=knobs, rng=rng, gumbel=gumbel
        )

    return run


def mctx_search(algorithm, batch: int, *, gumbel: bool) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp
    import mctx

    actions, size, model = algorithm.planner.num_actions, 64, algorithm.model
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
        states = jnp.asarray(model.represent(torch.from_numpy(observations(algorithm, batch))).numpy())
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
        puct = make(MuZero, MuZeroHyperparameters, actions, "cpu")
        gumbel = make(GumbelMuZero, GumbelMuZeroHyperparameters, actions, "cpu")
        prefix = make(EfficientZero, EfficientZeroHyperparameters, actions, "cpu")
        for batch in args.batch:
            programs = {
                "fused puct": our_search(puct, batch, "cpu"),
                "fused gumbel": our_search(gumbel, batch, "cpu"),
                "fused efficientzero": our_search(prefix, batch, "cpu"),
                "torch puct": our_search(puct, batch, "cpu", fused=False),
                "torch efficientzero": our_search(prefix, batch, "cpu", fused=False),
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
        made = make(MuZero, MuZeroHyperparameters, actions, args.device, channels=64)
        for batch in args.batch:
            programs = {"puct": our_search(made, batch, args.device)}
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
