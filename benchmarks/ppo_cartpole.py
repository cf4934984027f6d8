"""PPO on CartPole-v1 beside Stable-Baselines3: identical hyperparameters, interleaved, one thread.

Each measurement is a fresh process; importing is not counted, building and training are.

    make bench
    python benchmarks/ppo_cartpole.py --steps 200000 --repeats 5
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
torch.set_num_threads(1)
steps, seed = int(sys.argv[1]), int(sys.argv[2])
clock = []
note = lambda run: clock.append((time.process_time(), time.perf_counter(), run.step))
with tempfile.TemporaryDirectory() as folder:
    kwargs = dict(num_steps=128, num_minibatches=4, update_epochs=4, hidden_sizes=(64, 64), learning_rate=2.5e-4,
                  gamma=0.99, gae_lambda=0.95, clip_coef=0.2, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5)
    config = TrainConfig("ppo", "CartPole-v1", steps, folder, seed=seed, num_envs=8, eval_episodes=1,
                         checkpoint_interval=0, algo_kwargs=kwargs)
    import rl_training.runtime.workflows
    cpu, wall = time.process_time(), time.perf_counter()
    result = train(config, callbacks=[note], progress="silent")
    metrics = evaluate_checkpoint(result.run_dir, num_episodes=30)
print(json.dumps({"cpu": clock[-1][0] - cpu, "wall": clock[-1][1] - wall, "steps": clock[-1][2],
                  "eval": metrics["eval_return_mean"]}))
"""
SB3 = """
import json, sys, time
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
torch.set_num_threads(1)
steps, seed = int(sys.argv[1]), int(sys.argv[2])
cpu, wall = time.process_time(), time.perf_counter()
env = make_vec_env("CartPole-v1", 8, seed=seed)
model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, gamma=0.99,
            gae_lambda=0.95, clip_range=0.2, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, seed=seed, device="cpu",
            policy_kwargs=dict(net_arch=[64, 64]))
model.learn(steps)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 8, seed=seed + 1000), 30)
print(json.dumps({"cpu": cpu, "wall": wall, "steps": model.num_timesteps, "eval": float(mean)}))
"""


def measure(code: str, steps: int, seed: int) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code, str(steps), str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"rl_training": [], "stable-baselines3": []}
    for seed in range(args.repeats):
        for name, code in (("rl_training", OURS), ("stable-baselines3", SB3)):
            row = measure(code, args.steps, seed)
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


if __name__ == "__main__":
    main()
