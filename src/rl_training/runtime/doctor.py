"""What is installed, and what this machine has."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from rl_training.runtime.metadata import package_versions

EXTRAS = {"atari": "ale_py", "mujoco": "mujoco", "box2d": "Box2D", "plot": "matplotlib", "wandb": "wandb"}


def report() -> dict[str, str]:
    """Versions, devices, threads, backends and the extras that are not installed, each in one line."""
    gpus = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    omp = os.environ.get("OMP_NUM_THREADS", "not set")
    optional = [name for name, module in (("ale", "ale_py"), ("envpool", "envpool")) if find_spec(module)]
    missing = [f"rl-training[{extra}]" for extra, module in EXTRAS.items() if find_spec(module) is None]
    return {
        **package_versions(),
        "devices": ", ".join(["cpu", *gpus]),
        "threads": f"torch {torch.get_num_threads()}, cores {os.cpu_count()}, OMP_NUM_THREADS {omp}",
        "backends": ", ".join(["sync", "async", "vector", *optional]),
        **({"not installed": ", ".join(missing)} if missing else {}),
    }
