"""PPG on CartPole-v1, from Python: train, evaluate, use the policy. Reaches 500 in under a minute."""

from __future__ import annotations

import argparse

import gymnasium as gym

from rl_training import TrainConfig, evaluate_checkpoint, load_policy, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=200_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

config = TrainConfig(
    algo="ppg",
    env_id="CartPole-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=8,
    algo_kwargs={
        "num_steps": 32,
        "num_minibatches": 1,
        "update_epochs": 10,
        "value_epochs": 10,
        "gamma": 0.98,
        "policy_phase_updates": 16,
        "aux_epochs": 6,
        "aux_num_minibatches": 1,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0},
        "clip_coef": {"kind": "linear", "start": 0.2, "end": 0.0},
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")

policy, env = load_policy(result.run_dir), gym.make("CartPole-v1")
obs, _ = env.reset(seed=0)
print(f"first action {policy.act(obs)}; the run is in {result.run_dir}")
