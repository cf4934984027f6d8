"""TRPO on CartPole-v1 beside sb3-contrib: identical hyperparameters, interleaved, one thread.

make bench
python benchmarks/trpo_cartpole.py --steps 100000 --repeats 5
"""

from __future__ import annotations

from versus import main, ours, theirs

SHARED = {"learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "cg_damping": 0.1}
OURS = {
    "num_steps": 512,
    "max_kl": 0.01,
    "cg_iterations": 25,
    "max_line_search_steps": 10,
    "backtrack_coef": 0.8,
    "critic_epochs": 20,
    "critic_minibatches": 8,
    "hidden_sizes": (64, 64),
}
THEIRS = {
    "n_steps": 512,
    "target_kl": 0.01,
    "cg_max_steps": 25,
    "line_search_max_iter": 10,
    "line_search_shrinking_factor": 0.8,
    "n_critic_updates": 20,
    "batch_size": 128,
    "policy_kwargs": {"net_arch": [64, 64]},
}

if __name__ == "__main__":
    main(
        __doc__,
        ours(
            {
                "algo": "trpo",
                "env_id": "CartPole-v1",
                "num_envs": 2,
                "env_kwargs": {"wrappers": {"normalize_reward": False}},
                "algo_kwargs": SHARED | OURS,
            }
        ),
        theirs("TRPO", "CartPole-v1", 2, SHARED | THEIRS, package="sb3_contrib"),
        steps=100_000,
        repeats=3,
        peer="sb3-contrib",
    )
