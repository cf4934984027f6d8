"""TRPO on CartPole-v1, from Python: train, watch the trust region through a callback, evaluate."""

from __future__ import annotations

import argparse

from rl_training import TrainConfig, evaluate_checkpoint, train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--total-timesteps", type=int, default=100_000)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--output-dir", default="runs")
args = parser.parse_args()


def report(run) -> None:
    """Called after every update; `run.stop(reason)` would end training here."""
    if run.step % 10_240 == 0:
        kl, limit = run.metrics.get("kl", float("nan")), run.learner.max_kl
        print(
            f"step {run.step:,}: return of the last episodes {run.metrics.get('train_return_mean', float('nan')):.1f}, "
            f"KL {kl:.4f} of {limit:g}"
        )


config = TrainConfig(
    algo="trpo",
    env_id="CartPole-v1",
    total_timesteps=args.total_timesteps,
    output_dir=args.output_dir,
    num_envs=2,
    env_kwargs={"wrappers": {"normalize_reward": False}},
    algo_kwargs={"num_steps": 512, "cg_iterations": 25, "critic_epochs": 20, "critic_minibatches": 8},
)
result = train(config, callbacks=[report], progress="silent")
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
print(f"return {metrics['eval_return_mean']:.1f} ± {metrics['eval_return_std']:.1f} over {args.eval_episodes} episodes")
print(f"the run is in {result.run_dir}")
