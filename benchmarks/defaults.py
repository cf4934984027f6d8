"""Every algorithm with its default hyperparameters on small tasks, beside Stable-Baselines3 with its defaults.

The peer of trpo is sb3-contrib's. Algorithms without a budget in STEPS are left out; gail, because it needs an expert.

python benchmarks/defaults.py                      # what has not been run yet
python benchmarks/defaults.py --only ppo dqn       # some algorithms
python benchmarks/defaults.py --again --only ppo   # anew, after a default has changed
python benchmarks/defaults.py --peers              # Stable-Baselines3 alone

Both sides train for the same number of env steps with the seeds 0, 1 and 2, and are evaluated over 30 deterministic
episodes. Runs are kept in docs/defaults.json; the table is written into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "defaults.json"
PAGE = ROOT / "docs" / "results.md"
HEADING = "## Defaults beside Stable-Baselines3"
SEEDS = 3
EPISODES = 30
SB3 = {name: f"stable_baselines3.{name.upper()}" for name in ("a2c", "dqn", "ppo", "sac")} | {
    "trpo": "sb3_contrib.TRPO"
}
ON_POLICY, PLANNERS = ("ppo", "a2c", "trpo", "ppg"), ("muzero", "gumbel_muzero", "efficientzero", "scalezero")
STEPS: dict[str, dict[tuple[str, ...], int]] = {  # env steps of each task, by algorithm
    "CartPole-v1": {(*ON_POLICY, "dqn"): 50_000, PLANNERS: 10_000},
    "Acrobot-v1": {(*ON_POLICY, "dqn"): 100_000, PLANNERS: 10_000},
    "MountainCar-v0": {(*ON_POLICY, "dqn"): 100_000},
    "LunarLander-v3": {(*ON_POLICY, "dqn"): 100_000},
    "Pendulum-v1": {ON_POLICY: 100_000, ("sac",): 5_000, PLANNERS[:2]: 10_000, ("efficientzero",): 3_000},
    "MountainCarContinuous-v0": {ON_POLICY: 50_000, ("sac",): 5_000},
    "InvertedPendulum-v5": {ON_POLICY: 50_000, ("sac",): 20_000},
    "Hopper-v5": {ON_POLICY: 100_000, ("sac",): 20_000},
}
OURS = """
import json, sys, time
from rl_training import TrainConfig, evaluate_checkpoint, train
algo, env_id, steps, seed, episodes, folder = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]
config = TrainConfig(algo, env_id, steps, output_dir=folder, seed=seed, eval_episodes=1, checkpoint_interval=0)
wall, cpu = time.perf_counter(), time.process_time()
result = train(config, progress="silent")
spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=episodes)
print(json.dumps({"eval": metrics["eval_return_mean"], "train": result.metrics["train_return_mean"], **spent}))
"""
THEIRS = """
import importlib, json, sys, time
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
algo, env_id, steps, seed, episodes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
torch.set_num_threads(1)
wall, cpu = time.perf_counter(), time.process_time()
package, name = algo.split(".")
algorithm = getattr(importlib.import_module(package), name)
model = algorithm("MlpPolicy", make_vec_env(env_id, 1, seed=seed), seed=seed, device="cpu")
model.learn(steps)
spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
train = sum(e["r"] for e in model.ep_info_buffer) / max(1, len(model.ep_info_buffer))
mean, _ = evaluate_policy(model, make_vec_env(env_id, 1, seed=seed + 1000), episodes)
print(json.dumps({"eval": float(mean), "train": train, **spent}))
"""


class Run(NamedTuple):
    algo: str
    env_id: str
    steps: int
    seed: int
    peer: bool

    @property
    def key(self) -> str:
        return f"{'sb3-' if self.peer else ''}{self.algo}/{self.env_id}/{self.steps}/{self.seed}"


def rows() -> Iterator[tuple[str, str, int]]:
    """(algorithm, task, env steps), algorithm by algorithm."""
    for algo in (*ON_POLICY, "dqn", "sac", *PLANNERS):
        for env_id, budgets in STEPS.items():
            for algos, steps in budgets.items():
                if algo in algos:
                    yield algo, env_id, steps


def measure(run: Run) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        code, name = (THEIRS, SB3[run.algo]) if run.peer else (OURS, run.algo)
        words = [sys.executable, "-c", code, name, run.env_id, *map(str, (run.steps, run.seed, EPISODES)), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{run.key} failed:\n{done.stderr}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{run.key}: {row['eval']:.1f}, {row['cpu']:.0f} CPU s", flush=True)
    return row


def table(runs: dict[str, dict[str, float]]) -> str:
    total = sum(row["cpu"] for row in runs.values()) / 3600
    lines = [
        HEADING,
        "",
        f"`python benchmarks/defaults.py`: no hyperparameter is given on either side. Mean return of {EPISODES} "
        f"deterministic episodes after training, for seeds 0 to {SEEDS - 1}; {total:.1f} CPU hours in all, one core a "
        "run.",
        "",
        "| algorithm | task | env steps | rl_training | mean | CPU s | Stable-Baselines3 | mean | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for algo, env_id, steps in rows():
        ours, theirs = (_found(runs, algo, env_id, steps, peer=peer) for peer in (False, True))
        if ours or theirs:
            lines.append(f"| {algo} | {env_id} | {steps:,} | {_cells(ours)} | {_cells(theirs)} |")
    return "\n".join(lines) + "\n"


def _found(runs: dict, algo: str, env_id: str, steps: int, *, peer: bool) -> list[dict[str, float]]:
    keys = [Run(algo, env_id, steps, seed, peer).key for seed in range(SEEDS)]
    return [runs[key] for key in keys if key in runs]


def _cells(found: list[dict[str, float]]) -> str:
    if not found:
        return " | | "
    evals = [row["eval"] for row in found]
    return f"{', '.join(f'{x:.0f}' for x in evals)} | {fmean(evals):.1f} | {fmean(row['cpu'] for row in found):.0f}"


def kept_runs() -> dict[str, dict[str, float]]:
    runs: dict[str, dict[str, float]] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return runs


def keep(key: str, row: dict[str, float]) -> None:
    """Keep a run, and put the table where it stood; words below it stay. Another process may have kept others."""
    runs = kept_runs() | {key: row}
    RUNS.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n")
    before, found, after = PAGE.read_text().partition(HEADING)
    kept = after.split("|\n\n", 1)[1] if found and "|\n\n" in after else ""
    PAGE.write_text(before.rstrip("\n") + "\n\n" + table(runs) + (f"\n{kept}" if kept else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="algorithms, all by default")
    parser.add_argument("--tasks", nargs="*", default=[], help="environments, all by default")
    parser.add_argument("--peers", action="store_true", help="Stable-Baselines3 alone")
    parser.add_argument("--again", action="store_true", help="run anew what was run before")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    args = parser.parse_args()
    sides = (True,) if args.peers else (False, True)
    work = [
        Run(algo, env_id, steps, seed, peer)
        for algo, env_id, steps in rows()
        for seed in range(SEEDS)
        for peer in sides
        if (algo in args.only or not args.only) and (env_id in args.tasks or not args.tasks)
        if not peer or algo in SB3
    ]
    before = kept_runs()
    with ThreadPoolExecutor(args.jobs) as pool:
        todo = [run for run in work if run.key not in before or (args.again and (not run.peer or args.peers))]
        waiting = {pool.submit(measure, run): run for run in todo}
        for future in as_completed(waiting):
            keep(waiting[future].key, future.result())
    print(table(kept_runs()))


if __name__ == "__main__":
    main()
