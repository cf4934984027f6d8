"""The state of a runner in a checkpoint."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from rl_training.data.batch import copied, put_rows
from rl_training.data.recurrent import check_memory, on_cpu, reset_rows
from rl_training.envs.runner import RECENT, EnvRunner
from rl_training.types import State


class RunnerState:
    """Environments, their observations and memory, the generator, and the statistics of episodes. The normaliser is
    saved by itself."""

    def __init__(self, runner: EnvRunner) -> None:
        self.runner = runner

    def state_dict(self) -> State:
        runner, statistics = self.runner, self.runner.statistics
        return {
            "envs": runner.envs.state(),
            "obs": copied(runner.obs),
            "first": runner.first.copy(),
            "memory": on_cpu(runner.memory),
            "rng": runner.rng.bit_generator.state,
            "returns": statistics.returns.copy(),
            "lengths": statistics.lengths.copy(),
            "recent_returns": list(statistics.recent_returns),
            "recent_lengths": list(statistics.recent_lengths),
            "recent_infos": [dict(info) for info in statistics.recent_infos],
        }

    def state_pattern(self) -> State:
        plain = {"envs": object, "memory": object, "recent_returns": [float], "recent_lengths": [int]}
        plain["recent_infos"] = [dict]
        return {**self.state_dict(), **plain}  # the environments and `check_memory` check their own entries

    def load_state_dict(self, state: State) -> None:
        """Load a state, after that of the normaliser. Environments in `not_restored` begin a new episode."""
        runner, statistics = self.runner, self.runner.statistics
        lost = runner.not_restored = runner.envs.load_state(state["envs"])
        runner.obs, runner.raw_obs = copied(state["obs"]), copied(runner.envs.obs)
        runner.first = np.array(state["first"], bool)
        runner.memory = reset_rows(on_cpu(check_memory(state["memory"], runner.num_envs)), lost)
        runner.rng.bit_generator.state = state["rng"]
        statistics.returns = np.array(state["returns"], np.float64)
        statistics.lengths = np.array(state["lengths"], np.int64)
        statistics.recent_returns = deque(state["recent_returns"], RECENT)
        statistics.recent_lengths = deque(state["recent_lengths"], RECENT)
        statistics.recent_infos = deque(numbers(state["recent_infos"]), RECENT)
        statistics.finished = []
        if lost:
            fresh = runner.normalizer.observation(runner.envs.obs) if runner.normalizer else runner.envs.obs
            put_rows(runner.obs, np.array(lost), fresh)
            runner.first[lost] = True
            statistics.forget(lost)
            if runner.normalizer and runner.training:
                runner.normalizer.forget(lost)


def numbers(infos: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Infos from a file, of which only that they are mappings is known."""
    return [{str(key): float(value) for key, value in info.items()} for info in infos]
