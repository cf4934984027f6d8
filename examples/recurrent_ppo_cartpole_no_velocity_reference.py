"""Recurrent PPO on CartPole without velocities, from Python: train, evaluate, play an episode with memory."""

from __future__ import annotations

import argparse

import gymnasium as gym

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=100_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

config = TrainConfig(
    algo="recurrent_ppo",
    env_id="CartPoleNoVelocity-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=8,
    env_kwargs={"wrappers": {"normalize_observation": True, "normalize_reward": True}},
    algo_kwargs={
        "cell": "lstm",
        "recurrent_size": 64,
        "num_steps": 128,
        "num_minibatches": 4,
        "update_epochs": 10,
        "gamma": 0.98,
        "gae_lambda": 0.95,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0},
        "clip_coef": {"kind": "linear", "start": 0.2, "end": 0.0},
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")

policy, env = load_policy(result.run_dir), gym.make("CartPoleNoVelocity-v1")
obs, _ = env.reset(seed=0)
policy.reset()  # where an episode begins, there is nothing to remember
steps, over = 0, False
while not over:
    obs, _, terminated, truncated, _ = env.step(policy.act(obs))
    steps, over = steps + 1, terminated or truncated
print(f"one more episode lasted {steps} steps; the run is in {result.run_dir}")
