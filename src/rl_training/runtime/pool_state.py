"""The state of an actor pool in a checkpoint."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rl_training.data.state_check import StateMismatch
from rl_training.envs.runner import RECENT
from rl_training.types import State

if TYPE_CHECKING:
    from rl_training.runtime.actor_pool import ActorPool


class PoolState:
    """The environments of all actors, and the recent episodes. Rollouts that wait for the learner are not saved."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool

    def state_dict(self) -> State:
        episodes = list(self.pool.episodes)
        return {
            "num_envs": self.pool.config.num_envs,
            "workers": self.pool.states(),
            "recent_returns": [episode_return for episode_return, _ in episodes],
            "recent_lengths": [length for _, length in episodes],
        }

    def state_pattern(self) -> State:
        return {"num_envs": int, "workers": list, "recent_returns": [float], "recent_lengths": [int]}

    def load_state_dict(self, state: State) -> None:
        workers, expected = len(state["workers"]), self.pool.execution.actors
        if workers != expected:
            raise StateMismatch(f"runner.workers are {workers}, but execution.actors is {expected}")
        self.pool.load_states(state["workers"])
        episodes = zip(state["recent_returns"], state["recent_lengths"], strict=True)
        self.pool.episodes = deque(episodes, RECENT)
