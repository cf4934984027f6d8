"""GAIL with good demonstrations and with bad ones: only the expert's may lead to the expert's return.

expert   20 episodes of the policy that configs/ppo/cartpole.yaml trains
random   as many steps of a random policy
zeros    all observations and actions 0

python benchmarks/gail_controls.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from rl_training import evaluate_checkpoint, load_config, record_demonstrations, train
from rl_training.data.demonstrations import Demonstrations, file_content

CONFIGS = Path(__file__).parents[1] / "configs"
SHARE = 0.9  # of the expert's return: the bar


def variants(folder: Path) -> dict[str, Demonstrations]:
    expert_run = train(load_config(CONFIGS / "ppo" / "cartpole.yaml", output_dir=folder), progress="silent")
    expert = record_demonstrations(expert_run.checkpoint_path, folder / "expert.npz", num_episodes=20)
    untrained = load_config(
        CONFIGS / "ppo" / "cartpole.yaml",
        overrides=["algo_kwargs.learning_rate=0.0"],
        output_dir=folder,
        env_id=expert_env(),
        total_timesteps=256,
    )
    random_run = train(untrained, progress="silent")
    random = record_demonstrations(random_run.checkpoint_path, folder / "random.npz", num_episodes=20, stochastic=True)
    return {
        "expert": expert,
        "random": random,
        "zeros": dataclasses.replace(expert, obs=np.zeros_like(expert.obs), action=np.zeros_like(expert.action)),
    }


def expert_env() -> str:
    """A random policy plays where there is no early end, so that its states after a fall are shown too."""
    return str(load_config(CONFIGS / "gail" / "cartpole.yaml").env_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--total-timesteps", type=int, default=200_000)
    parser.add_argument("--eval-episodes", type=int, default=100)
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = variants(folder)
        bar = SHARE * given["expert"].returns.mean()
        print(f"the expert's return is {given['expert'].returns.mean():.1f}, the bar {bar:.1f}")
        for variant, demonstrations in given.items():
            path = folder / f"{variant}_given.npz"
            np.savez_compressed(path, **file_content(demonstrations))
            for seed in args.seeds:
                config = load_config(
                    CONFIGS / "gail" / "cartpole.yaml",
                    overrides=[f"algo_kwargs.demonstrations={path}", "eval_interval=0"],
                    seed=seed,
                    total_timesteps=args.total_timesteps,
                    output_dir=folder,
                )
                result = train(config, progress="silent")
                metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=args.eval_episodes)
                reached = metrics["eval_return_mean"]
                print(f"{variant:<8} seed {seed}  return {reached:6.1f}", flush=True)
                if (reached >= bar) != (variant == "expert"):
                    failed.append(f"{variant} seed {seed}")
    if failed:
        raise SystemExit(f"not as it should be: {', '.join(failed)}")


if __name__ == "__main__":
    main()
