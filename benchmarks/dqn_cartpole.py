"""DQN on CartPole-v1 beside Stable-Baselines3: identical hyperparameters, interleaved, one thread.

From step 1,000 on, every fourth env step is followed by a gradient step.

make bench
python benchmarks/dqn_cartpole.py --steps 50000 --repeats 5
"""

from __future__ import annotations

from versus import main, ours, theirs

SHARED = {
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "batch_size": 64,
    "learning_starts": 1_000,
    "target_update_interval": 500,
    "exploration_fraction": 0.2,
    "max_grad_norm": 10,
}
OURS = {
    "buffer_capacity": 100_000,
    "train_frequency": 4,
    "utd_ratio": 0.25,
    "hidden_sizes": (64, 64),
    "final_epsilon": 0.05,
    "double": False,
    "n_step": 1,
}
THEIRS = {
    "buffer_size": 100_000,
    "train_freq": 4,
    "gradient_steps": 1,
    "policy_kwargs": {"net_arch": [64, 64]},
    "exploration_final_eps": 0.05,
}

if __name__ == "__main__":
    main(
        __doc__,
        ours({"algo": "dqn", "env_id": "CartPole-v1", "num_envs": 1, "algo_kwargs": SHARED | OURS}),
        theirs("DQN", "CartPole-v1", 1, SHARED | THEIRS),
        steps=50_000,
        repeats=5,
    )
