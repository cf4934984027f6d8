"""SAC on Pendulum-v1, from Python: train, evaluate, use the policy. Swings up within 20,000 steps, a few minutes."""

from __future__ import annotations

import argparse

import gymnasium as gym

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=20_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

config = TrainConfig(
    algo="sac",
    env_id="Pendulum-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=1,
    algo_kwargs={
        "learning_rate": 1e-3,
        "alpha": "auto",
        "target_entropy": "auto",
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")

policy, env = load_policy(result.run_dir), gym.make("Pendulum-v1")
obs, _ = env.reset(seed=0)
print(f"first torque {policy.act(obs)[0]:.3f}; the run is in {result.run_dir}")
