"""The state of an actor pool in a checkpoint."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rl_training.data.state_check import StateMismatch
from rl_training.envs.runner import RECENT, FinishedEpisode
from rl_training.envs.runner_state import numbers
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
            "recent_returns": [episode.episode_return for episode in episodes],
            "recent_lengths": [episode.length for episode in episodes],
            "recent_infos": [dict(episode.info) for episode in episodes],
        }

    def state_pattern(self) -> State:
        recent = {"recent_returns": [float], "recent_lengths": [int], "recent_infos": [dict]}
        return {"num_envs": int, "workers": list, **recent}

    def load_state_dict(self, state: State) -> None:
        workers, expected = len(state["workers"]), self.pool.execution.actors
        if workers != expected:
            raise StateMismatch(f"runner.workers are {workers}, but execution.actors is {expected}")
        self.pool.load_states(state["workers"])
        recent = zip(state["recent_returns"], state["recent_lengths"], numbers(state["recent_infos"]), strict=True)
        self.pool.episodes = deque((FinishedEpisode(-1, *each) for each in recent), RECENT)
