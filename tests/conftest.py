"""Shared by all tests: one torch thread, one small run, and one compiler at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from demonstrations_for_tests import random_demonstrations
from rl_training import ALGORITHMS, TrainConfig
from rl_training.runtime import run_evaluations
from rl_training.runtime.hyperparameters import hyperparameters_of

REPOSITORY = Path(__file__).parents[1]
PLANNING: dict[str, Any] = {
    "latent_size": 8,
    "hidden_sizes": [16],
    "channels": 4,
    "value_limit": 10,
    "reward_limit": 10,
    "num_sampled_actions": 4,
    "num_simulations": 3,
    "unroll_steps": 2,
    "n_step": 3,
    "batch_size": 8,
    "buffer_capacity": 300,
    "learning_starts": 32,
    "target_update_interval": 64,
    "reanalyse_ratio": 0.5,
    "priority_exponent": 0.6,
    "utd_ratio": 0.0625,
}
TINY: dict[str, dict[str, Any]] = {  # sizes that make an algorithm's run take a moment
    "a2c": {"num_steps": 8},
    "appo": {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2},
    "dqn": {
        "hidden_sizes": [16],
        "batch_size": 8,
        "buffer_capacity": 300,  # fewer than the steps of the longer runs: the ring comes round
        "learning_starts": 32,
        "target_update_interval": 64,
        "learning_rate": 1e-3,
        "n_step": 2,
        "prioritized": True,
    },
    "dreamer": {
        "size": "1m",
        "deter": 16,
        "hidden": 8,
        "classes": 2,
        "units": 8,
        "depth": 2,
        "batch_size": 2,
        "batch_length": 6,
        "buffer_capacity": 300,
        "learning_starts": 32,
        "learning_rate": 1e-3,
        "warmup_updates": 4,
        "imagination_length": 3,
        "train_ratio": 1.5,
        "free_nats": 0.01,  # so small networks have a smaller divergence than 1
        "return_limit": 1e-6,  # so that of these small returns, too, the spread counts
    },
    "efficientzero": PLANNING | {"lstm_horizon": 2, "n_step_decay": 100, "lstm_size": 8, "projection_size": 8},
    "gumbel_muzero": PLANNING,
    "impala": {"num_steps": 8},
    "muzero": PLANNING,
    "ppg": {
        "num_steps": 16,
        "num_minibatches": 2,
        "update_epochs": 2,
        "value_epochs": 2,
        "policy_phase_updates": 3,  # half of a run ends within a phase
        "aux_epochs": 2,
        "aux_num_minibatches": 2,
    },
    "ppo": {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2},
    "recurrent_ppo": {
        "num_steps": 16,
        "num_minibatches": 2,
        "update_epochs": 2,
        "hidden_sizes": [16],
        "recurrent_size": 8,
        "learning_rate": 3e-3,  # small steps of so small a network would not reach a clip
    },
    "sac": {
        "hidden_sizes": [16, 16],
        "batch_size": 8,
        "buffer_capacity": 300,
        "learning_starts": 32,
        "utd_ratio": 0.5,
    },
    "scalezero": {
        "hidden_sizes": [8],
        "width": 8,
        "layers": 1,
        "heads": 2,
        "num_experts": 2,
        "expert_size": 8,
        "adapter_rank": 2,
        "value_limit": 10,
        "reward_limit": 10,
        "num_simulations": 5,
        "unroll_steps": 2,
        "n_step": 3,
        "batch_size": 8,
        "buffer_capacity": 300,
        "learning_starts": 32,
        "reanalyse_ratio": 0.5,
        "priority_exponent": 0.6,
        "utd_ratio": 0.0625,
    },
    "trpo": {
        "num_steps": 16,
        "max_kl": 0.2,  # so large that the line search takes shorter steps
        "cg_damping": 0.01,
        "cg_iterations": 5,
        "critic_epochs": 2,
        "critic_minibatches": 2,
    },
}
DISCRIMINATOR = {"disc_hidden_sizes": [16], "disc_updates": 2, "disc_batch_size": 16}
TINY["gail"] = TINY["ppo"] | DISCRIMINATOR
ENVS = {  # one for each algorithm, of those that it can act in
    algo: "CartPole-v1" if "Discrete" in entry.recipe.actions else "Pendulum-v1" for algo, entry in ALGORITHMS.items()
}


def learning_rates(algo: str, value: Any) -> dict[str, Any]:
    """The same value for every learning rate that does not follow another by default."""
    fields = hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters).values()
    return {f.name: value for f in fields if f.name.endswith("learning_rate") and f.default is not None}


def pytest_configure() -> None:
    # A shell's background job, and all that it starts, ignores the first; under nohup it ignores the second.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        compile_in_turn()


def compile_in_turn() -> None:
    """Let one worker at a time compile a kernel that is kept on disk: the others then find it there.

    Without, all of them would compile the same kernels at the same time, after a change for minutes.
    """
    from numba.core.caching import NullCache
    from numba.core.dispatcher import Dispatcher

    original = Dispatcher.compile
    checkout = zlib.crc32(str(REPOSITORY).encode())
    locks = Path(tempfile.gettempdir()) / f"rl_training-{os.getuid()}-{checkout:08x}"

    def compile(self: Any, signature: Any) -> Any:
        if isinstance(self._cache, NullCache):
            return original(self, signature)
        with FileLock(f"{locks}-{self.py_func.__qualname__}.lock"):
            return original(self, signature)

    Dispatcher.compile = compile


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_config(tmp_path: Path) -> Any:
    """`tiny_config("ppo", clip_coef=0.3)`: a config of a few hundred steps; keys of TrainConfig go into `config`."""

    def make(algo: str, config: dict[str, Any] | None = None, **algo_kwargs: Any) -> TrainConfig:
        sizes = TINY[algo]
        if algo == "gail":
            env_id, env_kwargs = (config or {}).get("env_id", ENVS[algo]), (config or {}).get("env_kwargs", {})
            sizes = TINY[algo_kwargs.get("generator", "ppo")] | DISCRIMINATOR
            sizes = sizes | {"demonstrations": random_demonstrations(env_id, env_kwargs)}
        defaults = {
            "algo": algo,
            "env_id": ENVS[algo],
            "total_timesteps": 256,
            "num_envs": 2,
            "eval_episodes": 2,
            "output_dir": tmp_path / "runs",
            "device": "cpu",
            "num_threads": 1,  # for larger networks a run would take all cores
        }
        return TrainConfig(**{**defaults, **(config or {})}, algo_kwargs={**sizes, **algo_kwargs})

    return make


@pytest.fixture(scope="session")
def other_process() -> Iterator[Executor]:
    """A process that shares nothing with this one: `other_process.submit(function, *args).result()`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Evaluations of a run give these returns, one after the other."""
    values: list[float] = []

    def evaluate(*_: Any, **__: Any) -> dict[str, float]:
        value = values.pop(0)
        return {"eval_return_mean": value, "eval_return_std": 0.0, "eval_return_min": value, "eval_episodes": 1}

    monkeypatch.setattr(run_evaluations, "evaluate", evaluate)
    return values
