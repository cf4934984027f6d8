"""SAC on Pendulum-v1 beside Stable-Baselines3: identical hyperparameters, interleaved, one thread.

From step 100 on, each env step is followed by a gradient step.

make bench
python benchmarks/sac_pendulum.py --steps 5000 --repeats 3
"""

from __future__ import annotations

from versus import main, ours, theirs

SHARED = {"learning_rate": 1e-3, "gamma": 0.99, "tau": 0.005, "batch_size": 256, "learning_starts": 100}
OURS = {"buffer_capacity": 1_000_000, "utd_ratio": 1.0, "train_frequency": 1, "hidden_sizes": (256, 256)}
THEIRS = {"buffer_size": 1_000_000, "gradient_steps": 1, "train_freq": 1, "policy_kwargs": {"net_arch": [256, 256]}}

if __name__ == "__main__":
    main(
        __doc__,
        ours({"algo": "sac", "env_id": "Pendulum-v1", "num_envs": 1, "algo_kwargs": SHARED | OURS}),
        theirs("SAC", "Pendulum-v1", 1, SHARED | THEIRS),
        steps=5_000,
        repeats=3,
    )
