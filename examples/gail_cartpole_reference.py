"""GAIL on CartPole with episodes of 500 steps, from Python: train an expert, record it, imitate it, evaluate."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_training import TrainConfig, evaluate_checkpoint, record_demonstrations, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=200_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()

demonstrations = Path(args.output_dir) / "cartpole_demonstrations.npz"
expert = train(
    TrainConfig(
        algo="ppo",
        env_id="CartPole-v1",
        total_timesteps=min(args.total_timesteps, 100_000),
        output_dir=args.output_dir,
        env_kwargs={"wrappers": {"normalize_reward": False}},
        algo_kwargs={
            "num_steps": 32,
            "num_minibatches": 1,
            "update_epochs": 20,
            "gamma": 0.98,
            "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0},
            "clip_coef": {"kind": "linear", "start": 0.2, "end": 0.0},
        },
    )
)
record_demonstrations(expert.checkpoint_path, demonstrations, num_episodes=20)

config = TrainConfig(
    algo="gail",
    env_id="CartPoleFixedHorizon-v0",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=8,
    algo_kwargs={
        "demonstrations": str(demonstrations),
        "num_steps": 500,
        "num_minibatches": 16,
        "update_epochs": 10,
        "gamma": 0.98,
        "gae_lambda": 0.95,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0},
        "disc_learning_rate": 3e-3,
        "disc_updates": 64,
        "gradient_penalty": 0.0,
        "disc_ent_coef": 0.01,
    },
)
result = train(config)
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")
