"""PPO on CartPole-v1 beside Stable-Baselines3: identical hyperparameters, interleaved, one thread.

make bench
python benchmarks/ppo_cartpole.py --steps 200000 --repeats 5
"""

from __future__ import annotations

from versus import main, ours, theirs

SHARED = {
    "learning_rate": 2.5e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
OURS = {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.2, "hidden_sizes": (64, 64)}
THEIRS = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "clip_range": 0.2, "policy_kwargs": {"net_arch": [64, 64]}}

if __name__ == "__main__":
    main(
        __doc__,
        ours(
            {
                "algo": "ppo",
                "env_id": "CartPole-v1",
                "num_envs": 8,
                "env_kwargs": {"wrappers": {"normalize_reward": False}},
                "algo_kwargs": SHARED | OURS,
            }
        ),
        theirs("PPO", "CartPole-v1", 8, SHARED | THEIRS),
        steps=200_000,
        repeats=5,
    )
