"""What each fast path of rl_training.acting gains over the plain path, in CPU seconds of one run, by turns.

python benchmarks/fast_paths.py [--turns 7]      # a path that gains less than 1.3 has no place in the package
python benchmarks/fast_paths.py --device cuda    # captured graphs
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.acting.paths import plain_paths
from rl_training.runtime.controls import Controls
from rl_training.runtime.registry import ALGORITHMS
from rl_training.types import Spaces

VECTOR = Spaces(gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2))
IMAGES = Spaces(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6), frame_stack=4)
Work = Callable[[], Any]


def learner_of(algo: str, spaces: Spaces, device: str, **kwargs: Any) -> Any:
    recipe = ALGORITHMS[algo].recipe
    hp = Controls(recipe.hyperparameters, kwargs, 1000).at(0)
    torch.manual_seed(0)
    actor = recipe.actor([spaces] if recipe.multi_task else spaces, hp, device=torch.device(device))
    return recipe.learner(actor, hp, rng=np.random.default_rng(0))


def acting(algo: str, spaces: Spaces, num_envs: int, device: str, **kwargs: Any) -> Work:
    """Choose actions in `num_envs` environments."""
    learner, rng = learner_of(algo, spaces, device, **kwargs), np.random.default_rng(0)
    actor = ALGORITHMS[algo].recipe.actor_of(learner.actor, 0)
    obs = np.stack([spaces.observation.sample() for _ in range(num_envs)])
    return lambda: actor.act(obs, {}, explore=True, rng=rng)


def q_update(device: str) -> Work:
    learner, rng = learner_of("dqn", VECTOR, device, batch_size=64), np.random.default_rng(0)
    batch = {
        "obs": torch.from_numpy(rng.standard_normal((64, 4), np.float32)),
        "next_obs": torch.from_numpy(rng.standard_normal((64, 4), np.float32)),
        "action": torch.from_numpy(rng.integers(0, 2, 64)),
        "reward": torch.ones(64),
        "discount": torch.full((64,), 0.99),
    }
    return lambda: learner.update(batch)


def unrolled_update(algo: str, device: str) -> Work:
    """A gradient step on a batch of images."""
    learner = learner_of(algo, IMAGES, device, batch_size=128)
    count, steps = 128, learner.hp.unroll_steps
    shape = IMAGES.observation.shape
    batch: dict[str, Any] = {
        "obs": torch.zeros(count, *shape, dtype=torch.uint8),
        "next_obs": torch.zeros(count * steps, *shape, dtype=torch.uint8),
        "action": torch.zeros(count, steps, dtype=torch.int64),
        "reward": torch.zeros(count, steps),
        "value": torch.zeros(count, steps + 1),
        "policy": torch.full((count, steps + 1, 6), 1 / 6),
        "policy_mask": torch.ones(count, steps + 1),
        "value_mask": torch.ones(count, steps + 1),
        "reward_mask": torch.ones(count, steps),
        "weight": torch.ones(count),
    }
    batch = {key: value.to(device) for key, value in batch.items()}

    def work() -> None:
        learner.update(batch)
        torch.cuda.synchronize()

    return work


def dreamer_update(device: str, *, length: int, rows: int, **kwargs: Any) -> Work:
    """A gradient step on `rows` sequences of `length` vectors."""
    learner = learner_of("dreamer", VECTOR, device, batch_length=length, batch_size=rows, **kwargs)
    size, shape = learner.model.size, (length, rows)
    flags = {name: torch.zeros(shape, dtype=torch.bool) for name in ("terminated", "first", "last")}
    batch: dict[str, Any] = flags | {
        "obs": torch.randn(*shape, 4),
        "action": torch.nn.functional.one_hot(torch.randint(2, shape), 2).float(),
        "reward": torch.randn(shape),
        "deter": torch.zeros(rows, size.deter),
        "stoch": torch.zeros(rows, learner.model.dynamics.groups, size.classes),
    }
    batch = {key: value.to(device) for key, value in batch.items()}

    def work() -> None:
        learner.update(batch, learner.noise(batch))
        if device == "cuda":
            torch.cuda.synchronize()

    return work


def rows(device: str) -> dict[str, Callable[[], Work]]:
    if device == "cuda":
        return {
            "search in captured graphs (muzero, towers, 64 roots)": lambda: acting("muzero", IMAGES, 64, device),
            "gradient as a captured graph (efficientzero, towers)": lambda: unrolled_update("efficientzero", device),
            "gradient step as a captured graph (dreamer 12m, 16 x 64)": lambda: dreamer_update(
                device, length=64, rows=16, size="12m"
            ),
            "gradient step as a captured graph (dreamer 50m, 16 x 64)": lambda: dreamer_update(
                device, length=64, rows=16, size="50m"
            ),
        }
    lone = {"hidden_sizes": [128], "activation": "silu"}  # an activation that the compiled search does not have
    return {
        "acting in numpy (ppo, 8 environments)": lambda: acting("ppo", VECTOR, 8, device),
        "acting in numpy (recurrent_ppo, LSTM 64, 8 environments)": lambda: acting(
            "recurrent_ppo", VECTOR, 8, device, recurrent_size=64
        ),
        "acting in numpy (recurrent_ppo, LSTM 256, 8 environments)": lambda: acting(
            "recurrent_ppo", VECTOR, 8, device, recurrent_size=256
        ),
        "acting in numpy (recurrent_ppo, GRU 64, 8 environments)": lambda: acting(
            "recurrent_ppo", VECTOR, 8, device, recurrent_size=64, cell="gru"
        ),
        "gradient in numpy (dqn, 64 x 64, batch 64)": lambda: q_update(device),
        "network inside the search (muzero, 8 roots)": lambda: acting("muzero", VECTOR, 8, device),
        "network inside the search (efficientzero, 8 roots)": lambda: acting("efficientzero", VECTOR, 8, device),
        "logits decoded in one loop (muzero, 8 roots)": lambda: acting("muzero", VECTOR, 8, device, **lone),
        "transformer in numpy (scalezero, 8 roots)": lambda: acting("scalezero", VECTOR, 8, device),
        "compiled loops between products (dreamer 1m, float32, 8 x 16)": lambda: dreamer_update(
            device, length=16, rows=8, size="1m", precision="float32"
        ),
        "compiled loops between products (dreamer 1m, bfloat16, 8 x 16)": lambda: dreamer_update(
            device, length=16, rows=8, size="1m", precision="bfloat16"
        ),
    }


def seconds(work: Work, *, wall: bool, least: float = 0.3) -> float:
    """Seconds a call; repeated until `least` seconds have passed."""
    clock = time.perf_counter if wall else time.process_time
    calls, began = 0, clock()
    while clock() - began < least:
        work()
        calls += 1
    return (clock() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| path | fast, ms | plain, ms | gain: median (least to most) |")
    print("|---|---|---|---|")
    for name, build in rows(args.device).items():
        made = []
        for context in (nullcontext(), plain_paths()):
            with context:
                made.append(build())
        for work in made:
            for _ in range(6):  # compiles, captures
                work()
        wall = args.device == "cuda"
        turns = [[seconds(work, wall=wall) for work in made] for _ in range(args.turns)]
        fast, plain = (1000 * median(times) for times in zip(*turns, strict=True))
        gains = sorted(slow / quick for quick, slow in turns)
        print(f"| {name} | {fast:.3g} | {plain:.3g} | {median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f}) |")


if __name__ == "__main__":
    main()
