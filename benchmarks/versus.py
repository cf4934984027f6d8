"""Training beside Stable-Baselines3 or sb3-contrib: fresh processes that take turns, their seconds, a table and ratios.

A benchmark is two programs. Each gets the number of steps and the seed as arguments, and prints a JSON object with
`cpu`, `wall`, `steps` and `eval` as its last line. What comes before the clock starts, such as imports, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median

OURS = """
import json, sys, tempfile, time
import torch
from rl_training import TrainConfig, evaluate_checkpoint, train
import rl_training.runtime.workflows
torch.set_num_threads(1)
steps, seed = int(sys.argv[1]), int(sys.argv[2])
clock = (0.0, 0.0, 0)
def note(run):
    global clock
    clock = time.process_time(), time.perf_counter(), run.step
with tempfile.TemporaryDirectory() as folder:
    config = TrainConfig(total_timesteps=steps, output_dir=folder, seed=seed, eval_episodes=1, checkpoint_interval=0,
                         **CONFIG)
    cpu, wall = time.process_time(), time.perf_counter()
    result = train(config, callbacks=[note], progress="silent")
    metrics = evaluate_checkpoint(result.run_dir, num_episodes=EPISODES)
print(json.dumps({"cpu": clock[0] - cpu, "wall": clock[1] - wall, "steps": clock[2],
                  "eval": metrics["eval_return_mean"]}))
"""
THEIRS = """
import json, sys, time
import torch
from PACKAGE import ALGORITHM as Algorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
torch.set_num_threads(1)
steps, seed = int(sys.argv[1]), int(sys.argv[2])
cpu, wall = time.process_time(), time.perf_counter()
model = Algorithm("MlpPolicy", make_vec_env(ENV, NUM_ENVS, seed=seed), seed=seed, device="cpu", **KWARGS)
model.learn(steps)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
mean, _ = evaluate_policy(model, make_vec_env(ENV, 8, seed=seed + 1000), EPISODES)
print(json.dumps({"cpu": cpu, "wall": wall, "steps": model.num_timesteps, "eval": float(mean)}))
"""


def ours(config: dict, *, episodes: int = 30) -> str:
    return f"CONFIG, EPISODES = {config!r}, {episodes}\n{OURS}"


def theirs(
    algorithm: str,
    env: str,
    num_envs: int,
    kwargs: dict,
    *,
    episodes: int = 30,
    package: str = "stable_baselines3",
) -> str:
    words = f"ENV, NUM_ENVS, KWARGS, EPISODES = {env!r}, {num_envs}, {kwargs!r}, {episodes}\n"
    return words + THEIRS.replace("PACKAGE", package).replace("ALGORITHM", algorithm)


def measure(code: str, steps: int, seed: int) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code, str(steps), str(seed)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(programs: dict[str, str], steps: int, repeats: int) -> None:
    """Run the programs in turns, one seed after the other; print each run, a table, and the ratios of the first two."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for seed in range(repeats):
        for name, code in programs.items():
            row = measure(code, steps, seed)
            rows[name].append(row)
            speed = f"{row['steps'] / row['cpu']:,.0f} steps/CPU s, {row['steps'] / row['wall']:,.0f} steps/s"
            print(f"{name:<18} seed {seed}: {speed}, eval {row['eval']:.0f}", flush=True)
    print("\n| | steps per CPU second: median (min to max) | steps per second | eval per seed |\n|---|---|---|---|")
    for name, results in rows.items():
        cells = []
        for clock in ("cpu", "wall"):
            speeds = [row["steps"] / row[clock] for row in results]
            cells.append(f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})")
        evals = ", ".join(f"{row['eval']:.0f}" for row in results)
        print(f"| {name} | {' | '.join(cells)} | {evals} |")
    for clock, label in (("cpu", "per CPU second"), ("wall", "per second")):
        pairs = zip(*rows.values(), strict=True)
        ratios = [(a["steps"] / a[clock]) / (b["steps"] / b[clock]) for a, b in pairs]
        print(f"ratio {label}: median {median(ratios):.2f} (pairs {min(ratios):.2f} to {max(ratios):.2f})")


def main(
    description: str | None, ours: str, theirs: str, *, steps: int, repeats: int, peer: str = "stable-baselines3"
) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--repeats", type=int, default=repeats)
    args = parser.parse_args()
    compare({"rl_training": ours, peer: theirs}, args.steps, args.repeats)
