"""A trained policy: from observations to actions, without an environment or a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rl_training.acting.actor import Actor
from rl_training.data.normalize import Normalizer
from rl_training.data.recurrent import reset_rows
from rl_training.envs.spaces import ObservationLayout
from rl_training.types import Array, Memory, Observation


class Policy:
    """`policy.act(obs)` returns the environment's action for its observation, for one or for N environments."""

    def __init__(
        self,
        actor: Actor,
        layout: ObservationLayout,
        to_env: Callable[[Array], Array],
        normalizer: Normalizer | None,
        seed: int,
    ) -> None:
        self.actor, self.layout, self.to_env = actor, layout, to_env
        self.normalizer = normalizer
        self.rng = np.random.default_rng(seed)
        self.memory: Memory = {}

    def reset(self, rows: Array | None = None) -> None:
        """Clear the memory of a recurrent policy, at the beginning of an episode. rows: of these environments only, as
        a mask [N] or their numbers."""
        self.memory = {} if rows is None else reset_rows(self.memory, rows)

    def act(self, obs: Any, *, deterministic: bool = True) -> Any:
        """The action for one observation, or actions [N, ...] for observations [N, ...]."""
        batch, single = self._batch(obs)
        decision = self.actor.act(batch, self.memory, explore=not deterministic, rng=self.rng)
        self.memory = decision.memory
        action = self.to_env(decision.action)
        return action[0] if single else action

    __call__ = act

    def _batch(self, obs: Any) -> tuple[Observation, bool]:
        single = self.layout.is_one(obs)
        if single:
            batch = self.layout.empty(1)
            self.layout.write(batch, 0, obs)
        else:
            batch = self.layout.batch(obs)
        if self.normalizer is not None:
            batch = self.normalizer.observation(batch)
        return batch, single
