"""EfficientZero on CartPole-v1, from Python, with 16 simulations per step. Train, evaluate, plan with the result."""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=20_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

config = TrainConfig(
    algo="efficientzero",
    env_id="CartPole-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=16,
    algo_kwargs={
        "num_simulations": 16,
        "temperature": {"kind": "linear", "start": 0.5, "end": 0.05},
        "learning_rate": {"kind": "linear", "start": 2e-3, "end": 1e-5},
        "utd_ratio": 0.75,
        "n_step": 10,
        "target_update_interval": 100,
        "reanalyse_ratio": 0.1,
        "priority_exponent": 0.0,
        "hidden_gradient_scale": 1.0,
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")

actor, env = load_policy(result.run_dir).actor, gym.make("CartPole-v1")
obs, _ = env.reset(seed=0)
plan = actor.plan(obs[None], temperature=0.0, num_simulations=100, rng=np.random.default_rng(0))
print(f"100 simulations: visits {plan.visits[0]}, value {plan.value[0]:.1f}; the run is in {result.run_dir}")
