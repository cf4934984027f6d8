"""Simulations per second of the search: with the network compiled in, with any PyTorch model, and mctx beside them.

python benchmarks/search_speed.py                 # on the CPU; mctx takes part where it is installed (pip install mctx)
python benchmarks/search_speed.py --device cuda   # residual towers on a GPU, the network in a captured graph

The model is a perceptron with a latent of 64, 128 hidden units and 21 atoms, the same weights for all; on a GPU a tower
of 64 planes of 6 x 6. Programs take turns; speed is in thousand simulations per CPU second (GPU: per second).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 --xla_force_host_platform_device_count=1",
)

import gymnasium as gym
import numpy as np
import torch

from rl_training.algorithms.gumbel_muzero import GumbelMuZero, GumbelMuZeroHyperparameters
from rl_training.algorithms.muzero import MuZero, MuZeroHyperparameters
from rl_training.types import Spaces

# LightZero's C++ tree with this perceptron on another machine, and mctx's two policies beside it there: thousand
# simulations per CPU second. What LightZero would do here is scaled by mctx, which runs on both.
LIGHTZERO = {
    2: {1: (2.9, 34.8, 46.9), 8: (17.7, 117, 182), 64: (83.2, 228, 319), 256: (134, 426, 630)},
    6: {1: (2.7, 22.8, 29.6), 8: (17.8, 43.0, 123), 64: (75.6, 243, 445), 256: (101, 374, 581)},
    18: {1: (2.3, 18.3, 27.9), 8: (16.3, 14.9, 118), 64: (63.0, 145, 294), 256: (68.8, 166, 283)},
}
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


def our_search(algorithm, batch: int, device: str, *, fused: bool = True) -> Callable[[], object]:
    """A search of `batch` roots whose states are known, as the others do it."""
    from rl_training.ops import search as ops

    rng, space = np.random.default_rng(1), algorithm.spaces.observation
    obs = (
        rng.integers(0, 255, (batch, *space.shape)).astype(np.uint8)
        if space.dtype == np.uint8
        else rng.standard_normal((batch, *space.shape)).astype(np.float32)
    )
    planner = algorithm.planner
    root = planner.look(obs, num_simulations=SIMULATIONS, rng=rng)
    gumbel = rng.gumbel(size=root.logits.shape).astype(np.float32)
    is_gumbel = isinstance(algorithm, GumbelMuZero)
    rules, knobs = (ops.GUMBEL, ops.Knobs(c_scale=0.1)) if is_gumbel else (ops.MUZERO, ops.Knobs())
    fusable = planner.fusable

    def run() -> object:
        planner.fusable = fusable and fused
        return planner.search(
            rules, root, discount=0.997, num_simulations=SIMULATIONS, knobs=knobs, rng=rng, gumbel=gumbel
        )

    return run


def mctx_search(algorithm, batch: int, *, gumbel: bool) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp
    import mctx

    from rl_training.models.fused import perceptrons

    actions, size = algorithm.planner.num_actions, 64
    net = jax.tree_util.tree_map(jnp.asarray, perceptrons(algorithm.model)._replace(tanh=0, board=0))

    def decode(logits):
        atoms = jnp.arange(logits.shape[-1]) - logits.shape[-1] // 2
        y = (jax.nn.softmax(logits) * atoms).sum(-1)
        root = (jnp.sqrt(1 + 0.004 * (jnp.abs(y) + 1.001)) - 1) / 0.002
        return jnp.sign(y) * (root**2 - 1)

    def predict(state):
        out = jax.nn.relu(state @ net.prediction[0] + net.prediction_bias[0]) @ net.heads + net.heads_bias
        return out[:, :actions], decode(out[:, actions:])

    def step(params, key, action, state):
        out = jax.nn.relu(state @ net.dynamics[0] + net.of_action[action]) @ net.outcome + net.outcome_bias
        state, low, high = out[:, :size], out[:, :size].min(1, keepdims=True), out[:, :size].max(1, keepdims=True)
        state = (state - low) / (high - low + 1e-5)
        logits, value = predict(state)
        discount = jnp.full(len(state), 0.997)
        return mctx.RecurrentFnOutput(decode(out[:, size:]), discount, logits, value), state

    states = jnp.asarray(np.random.default_rng(1).random((batch, size), np.float32))
    policy = mctx.gumbel_muzero_policy if gumbel else mctx.muzero_policy

    @jax.jit
    def search(key, states):
        logits, value = predict(states)
        root = mctx.RootFnOutput(logits, value, states)
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
    try:
        import mctx  # noqa: F401

        with_mctx = True
    except ImportError:
        with_mctx = False
        print("mctx is not installed: its columns are left out")
    torch.set_num_threads(1)
    for actions in args.actions:
        puct = make(MuZero, MuZeroHyperparameters, actions, "cpu")
        gumbel = make(GumbelMuZero, GumbelMuZeroHyperparameters, actions, "cpu")
        for batch in args.batch:
            programs = {
                "fused puct": our_search(puct, batch, "cpu"),
                "fused gumbel": our_search(gumbel, batch, "cpu"),
                "torch puct": our_search(puct, batch, "cpu", fused=False),
            }
            if with_mctx:
                programs["mctx puct"] = mctx_search(puct, batch, gumbel=False)
                programs["mctx gumbel"] = mctx_search(puct, batch, gumbel=True)
            speed = compare(programs, batch, time.process_time, args.repeats, args.least)
            cells = [f"{name} {median(x):,.0f} ({min(x):,.0f} to {max(x):,.0f})" for name, x in speed.items()]
            print(f"A={actions} B={batch}: {'; '.join(cells)}", flush=True)
            if with_mctx:
                print(f"    {ratios(actions, batch, {name: median(x) for name, x in speed.items()})}", flush=True)


def ratios(actions: int, batch: int, speed: dict[str, float]) -> str:
    """Beside mctx as measured, and beside LightZero as mctx's two speeds, here and there, say it would be."""
    words = [
        f"puct / mctx {speed['fused puct'] / speed['mctx puct']:.2f}",
        f"gumbel / mctx {speed['fused gumbel'] / speed['mctx gumbel']:.2f}",
    ]
    known = LIGHTZERO.get(actions, {}).get(batch)
    if known:
        theirs, mctx_puct, mctx_gumbel = known
        scale = ((speed["mctx puct"] / mctx_puct) * (speed["mctx gumbel"] / mctx_gumbel)) ** 0.5
        for name in ("fused puct", "fused gumbel", "torch puct"):
            words.append(f"{name} / LightZero {speed[name] / (theirs * scale):.1f}")
    return ", ".join(words)


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
    parser.add_argument("--actions", type=int, nargs="+", default=[2, 6, 18])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.3, help="seconds of each measurement")
    args = parser.parse_args()
    (on_cpu if args.device == "cpu" else on_gpu)(args)


if __name__ == "__main__":
    main()
