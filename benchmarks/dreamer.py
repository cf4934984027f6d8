"""DreamerV3's gradient step, as the package takes it and step by step in torch: the same code without its fast path.

python benchmarks/dreamer.py                        # size 1m on a CPU: CPU seconds of a gradient step
python benchmarks/dreamer.py --precision float32    # without products of bfloat16
python benchmarks/dreamer.py --device cuda          # sizes 12m and 50m on a GPU: gradient steps/s, and its work
python benchmarks/dreamer.py --device cuda --observations images

A gradient step is whole: it draws 16 sequences of 64 steps from a replay, imagines 15 steps from each of them, learns,
and writes the latents back. All ways take turns in one process, on a CPU in one thread. With `auto` the products are
of bfloat16 where the processor has instructions for it. Both ways are measured with these products and with float32.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from rl_training.acting.paths import plain_paths
from rl_training.algorithms.dreamer import LATENT, Dreamer
from rl_training.data.replay import Replay
from rl_training.runtime.dreamer_trainer import DREAMER_RECIPE
from rl_training.types import Spaces

OBSERVATIONS = {
    "vectors": gym.spaces.Box(-np.inf, np.inf, (24,), np.float32),
    "images": gym.spaces.Box(0, 255, (64, 64, 3), np.uint8),
}
ACTIONS = gym.spaces.Box(-1, 1, (6,), np.float32)
NUM_ENVS, STEPS, EPISODE = 4, 500, 100  # of the replay
BATCH = {"batch_size": 16, "batch_length": 64, "imagination_length": 15}
PLAIN = "eager torch"
BARS = {"cpu": 2.5, "cuda": 5.0}


class Way(NamedTuple):
    """A learner with a replay to learn from."""

    name: str
    learner: Dreamer
    replay: Replay

    def products(self) -> str:
        return str(self.learner.path.dtype).removeprefix("torch.")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.learner.one_step(self.replay)
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize()


def make(size: str, observations: str, precision: str, device: str, *, plain: bool) -> Way:
    spaces = Spaces(OBSERVATIONS[observations], ACTIONS)
    hp = DREAMER_RECIPE.hyperparameters(size=size, precision=precision, **BATCH)
    torch.manual_seed(0)
    with plain_paths() if plain else nullcontext():
        actor = DREAMER_RECIPE.actor(spaces, hp, device=torch.device(device))
        learner: Any = DREAMER_RECIPE.learner(actor, hp, rng=np.random.default_rng(0))
    replay = filled_replay(spaces, hp, learner.device)
    learner.new_windows = learner.make_windows(replay)
    return Way(PLAIN if plain else "rl_training", learner, replay)


def filled_replay(spaces: Spaces, hp: Any, device: torch.device) -> Replay:
    """Random steps, in episodes that are truncated."""
    fields, rng = DREAMER_RECIPE.fields(spaces, hp), np.random.default_rng(0)
    replay = Replay(
        NUM_ENVS * (STEPS + STEPS // EPISODE), NUM_ENVS, fields, device=device if device.type == "cuda" else None
    )
    spaces.observation.seed(0)
    for t in range(STEPS):
        obs = np.stack([spaces.observation.sample() for _ in range(NUM_ENVS)])
        last = np.full(NUM_ENVS, t % EPISODE == EPISODE - 1)
        step = {
            "obs": obs,
            "first": np.full(NUM_ENVS, t % EPISODE == 0),
            "action": rng.uniform(-1, 1, (NUM_ENVS, *ACTIONS.shape)).astype(np.float32),
            "reward": rng.standard_normal(NUM_ENVS).astype(np.float32),
            "terminated": np.zeros(NUM_ENVS, bool),
            "truncated": last,
            "next_obs": obs,
            "deter": rng.uniform(-1, 1, (NUM_ENVS, *fields["deter"].shape)).astype(np.float16),
            "stoch": rng.integers(0, 4, (NUM_ENVS, *fields["stoch"].shape)).astype(np.uint8),
        }
        replay.add(step)
    if device.type == "cuda":
        replay.keep_on_device(LATENT, device)
    return replay


def seconds(way: Way, count: int, *, wall: bool) -> float:
    """Of a gradient step."""
    clock = time.perf_counter if wall else time.process_time
    began = clock()
    way.steps(count)
    return (clock() - began) / count


def kernel_seconds(way: Way, count: int) -> float:
    """Seconds that the GPU works in a gradient step: the sum of all its kernels and copies, which follow each other."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        way.steps(count)
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / count


def spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def measure(ways: list[Way], repeats: int, count: int, *, wall: bool) -> list[list[float]]:
    """The seconds of each way, in turns."""
    for way in ways:
        way.steps(6 if wall else 2)  # compiles, captures, and lets libraries select kernels
    turns = [[seconds(way, count, wall=wall) for way in ways] for _ in range(repeats)]
    return [list(times) for times in zip(*turns, strict=True)]


def ways_of(size: str, args: argparse.Namespace) -> list[Way]:
    """The package's way with each precision and the plain one with the same products, then the plain one in float32."""
    make_way = partial(make, size, args.observations, device=args.device)
    ways: dict[tuple[str, str], Way] = {}
    for precision in (*args.precision, "float32"):
        for plain in (False, True):
            if plain or precision in args.precision:
                way = make_way(precision, plain=plain)
                ways.setdefault((way.name, way.products()), way)
    return list(ways.values())


def report(size: str, args: argparse.Namespace) -> None:
    """A row for each way. Its gains are those over the plain way with the same products, and in float32."""
    gpu = args.device == "cuda"
    ways = ways_of(size, args)
    times = {
        (way.name, way.products()): own
        for way, own in zip(ways, measure(ways, args.repeats, args.steps, wall=gpu), strict=True)
    }
    for way in ways:
        own, path = times[way.name, way.products()], type(way.learner.path).__name__
        speed = spread([1 / each for each in own], ".1f") if gpu else spread(own, ".3f")
        works = f" {kernel_seconds(way, args.steps) / median(own):.0%} |" if gpu else ""
        gains = [gain(own, times[PLAIN, products], args.device) for products in (way.products(), "float32")]
        gains = gains if way.name != PLAIN else ["", ""]
        print(f"| {size} | {way.name}: {path} | {way.products()} | {speed} |{works} {' | '.join(gains)} |", flush=True)


def gain(ours: list[float], theirs: list[float], device: str) -> str:
    gains = [slow / quick for quick, slow in zip(ours, theirs, strict=True)]
    return f"{spread(gains, '.2f')}: {'passed' if median(gains) >= BARS[device] else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", nargs="+", default=["auto", "float32"], choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--observations", default="vectors", choices=list(OBSERVATIONS))
    parser.add_argument("--sizes", nargs="+", help="default: 1m, on a GPU 12m and 50m")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, help="gradient steps in a turn; default: 2, on a GPU 20")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.steps = args.steps or (20 if gpu else 2)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = gpu
    where = torch.cuda.get_device_name() if gpu else "one thread"
    print(f"{where}, {args.observations}, 16 x 64, horizon 15, {args.repeats} turns of {args.steps} gradient steps")
    print(f"median (least to most); bar: {BARS[args.device]}")
    speed = "gradient steps/s | the GPU works" if gpu else "CPU s of a gradient step"
    print(f"| size | way | products | {speed} | gain over eager | gain over eager in float32 |")
    print(f"|---|---|---|---|---|---|{'---|' if gpu else ''}")
    for size in args.sizes or (["12m", "50m"] if gpu else ["1m"]):
        report(size, args)


if __name__ == "__main__":
    main()
