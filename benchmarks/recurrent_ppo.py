"""Recurrent PPO on CartPole without velocities beside sb3-contrib: identical hyperparameters, interleaved, one thread.

python benchmarks/recurrent_ppo.py --steps 40000 --repeats 3     # with an LSTM of 64, then one of 256

A minibatch has 128 steps: here one environment of the rollout, there a stretch of the flattened rollout.
"""

from __future__ import annotations

from versus import main, ours, theirs

ENV = "rl_training.envs.classic:CartPoleNoVelocity-v1"
SHARED = {
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
OURS = {"num_steps": 128, "num_minibatches": 8, "update_epochs": 10, "clip_coef": 0.2, "hidden_sizes": (64, 64)}
THEIRS = {"n_steps": 128, "batch_size": 128, "n_epochs": 10, "clip_range": 0.2}

if __name__ == "__main__":
    for size in (64, 256):
        print(f"\nLSTM {size}", flush=True)
        config = {
            "algo": "recurrent_ppo",
            "env_id": ENV,
            "num_envs": 8,
            "env_kwargs": {"wrappers": {"normalize_observation": False, "normalize_reward": False}},
            "algo_kwargs": SHARED | OURS | {"recurrent_size": size},
        }
        policy_kwargs = {"net_arch": [64, 64], "lstm_hidden_size": size}
        main(
            __doc__,
            ours(config),
            theirs(
                "RecurrentPPO",
                ENV,
                8,
                SHARED | THEIRS | {"policy_kwargs": policy_kwargs},
                package="sb3_contrib",
                policy="MlpLstmPolicy",
            ),
            steps=40_000,
            repeats=3,
            peer="sb3-contrib",
        )
