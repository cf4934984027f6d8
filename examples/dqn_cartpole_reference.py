"""DQN on CartPole-v1, from Python: double, n-step, a scheduled epsilon. Train, evaluate, use the policy."""

from __future__ import annotations

import argparse

import gymnasium as gym

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=80_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

config = TrainConfig(
    algo="dqn",
    env_id="CartPole-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=1,
    algo_kwargs={
        "hidden_sizes": [128, 128],
        "buffer_capacity": 80_000,
        "batch_size": 64,
        "double": True,
        "n_step": 3,
        "train_frequency": 4,
        "utd_ratio": 0.5,
        "target_update_interval": 500,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0},
        "epsilon": {"kind": "linear", "start": 1.0, "end": 0.02, "duration": "20%"},
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")

policy, env = load_policy(result.run_dir), gym.make("CartPole-v1")
obs, _ = env.reset(seed=0)
print(f"first action {policy.act(obs)}; the run is in {result.run_dir}")
