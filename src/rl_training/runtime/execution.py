"""Where the actors of a run play."""

from __future__ import annotations

from rl_training.config import Execution, TrainConfig
from rl_training.errors import ConfigError
from rl_training.runtime.actor_pool import ActorPool
from rl_training.runtime.fleet import Fleet
from rl_training.runtime.process_fleet import ProcessFleet
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.sources import Source, open_local


def open_source(config: TrainConfig, recipe: Recipe) -> Source:
    """The training environments of every task, and where they are played."""
    if config.execution and not recipe.asynchronous:
        raise ConfigError.of(f"{recipe.name} acts with the newest weights alone: leave it out", "execution")
    execution = Execution.of(config.execution)
    if execution.backend == "serial":
        return open_local(config, recipe, simulate_lag=execution.simulate_lag)
    if config.num_envs % execution.actors:
        numbers = f"{config.num_envs} environments cannot be shared out among {execution.actors} actors"
        raise ConfigError.of(f"{numbers}: make num_envs a multiple of the actors", "execution", "actors")
    return ActorPool(config, recipe, execution, open_fleet(execution))


def open_fleet(execution: Execution) -> Fleet:
    if execution.backend == "ray":
        from rl_training.runtime.ray_fleet import RayFleet  # ray is an optional package

        return RayFleet(execution)
    return ProcessFleet(execution.actors)
