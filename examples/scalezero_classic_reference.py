"""ScaleZero on three classic tasks, from Python: one world model for all; a task that is solved rests from then on."""

from __future__ import annotations

import argparse

import gymnasium as gym

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=60_000)
parser.add_argument("--eval-episodes", type=int, default=10)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

tasks = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"]
config = TrainConfig(
    algo="scalezero",
    env_id=tasks,
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=8,
    eval_interval=min(10_000, args.total_timesteps),
    eval_episodes=args.eval_episodes,
    env_kwargs={
        "wrappers": {"normalize_observation": True},
        # By chance, MountainCar's goal is never reached with an action a step, but with actions that last for a few.
        "MountainCar-v0": {"wrappers": {"normalize_observation": True, "action_repeat": 4, "time_limit": 125}},
    },
    algo_kwargs={
        "num_simulations": 16,
        "temperature": {"kind": "linear", "start": 0.25, "end": 0.1},
        "gamma": 0.99,
        "n_step": 10,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 1e-4},
        "utd_ratio": 0.15,
        "num_adapters": 2,
        "base_stage_steps": 8_000,
        "stage_steps": 500,
        "target_returns": {"CartPole-v1": 475.0, "Acrobot-v1": -85.0, "MountainCar-v0": -110.0},
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
for name in tasks:
    mean, std = (metrics[f"eval_return_{what}/{name}"] for what in ("mean", "std"))
    print(f"{name}: return {mean:.1f} ± {std:.1f} over {args.eval_episodes} episodes")

policy, env = load_policy(result.run_dir, task="Acrobot-v1"), gym.make("Acrobot-v1")
obs, _ = env.reset(seed=0)
print(f"first action in Acrobot-v1 {policy.act(obs)}; the run is in {result.run_dir}")
