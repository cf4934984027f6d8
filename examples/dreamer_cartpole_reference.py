"""DreamerV3 on CartPole-v1, from Python. Train a world model and a policy, evaluate, and play with the policy."""

from __future__ import annotations

import argparse

import gymnasium as gym

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=15_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

config = TrainConfig(
    algo="dreamer",
    env_id="CartPole-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=4,
    algo_kwargs={
        "size": "1m",
        "deter": 128,  # narrower than that size, for a CPU
        "units": 64,
        "batch_size": 8,
        "batch_length": 16,
        "train_ratio": 64,
        "learning_starts": 500,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 1e-4},
        "warmup_updates": 100,
        "buffer_capacity": 20_000,
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")

policy, env = load_policy(result.run_dir), gym.make("CartPole-v1")
obs, _ = env.reset(seed=0)
policy.reset()  # where an episode begins: the policy carries the state of its world model from step to step
total = 0.0
for _ in range(500):
    obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
    total += float(reward)
    if terminated or truncated:
        break
print(f"one episode: {total:.0f}; the run is in {result.run_dir}")
