"""IMPALA on CartPole-v1, from Python: train, watch it through a callback, evaluate."""

from __future__ import annotations

import argparse

from rl_training import TrainConfig, evaluate_checkpoint, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=500_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()


def report(run) -> None:
    """Called after every update; `run.stop(reason)` would end training here."""
    if run.step % 50_000 < 16 * 5:
        print(
            f"step {run.step:,}: return of the last episodes {run.metrics.get('train_return_mean', float('nan')):.1f}"
        )


config = TrainConfig(
    algo="impala",
    env_id="CartPole-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=16,
    env_kwargs={"wrappers": {"normalize_reward": False}},
    algo_kwargs={
        "num_steps": 5,
        "gamma": 0.98,
        "optimizer": "adam",
        "learning_rate": {"kind": "linear", "start": 7e-4, "end": 0.0},
        "ent_coef": {"kind": "linear", "start": 0.01, "end": 0.0},
    },
)
result = train(config, callbacks=[report], progress="silent")
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")
print(f"the run is in {result.run_dir}")
