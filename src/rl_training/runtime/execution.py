"""Where the actors of a run play."""

from __future__ import annotations

from rl_training.config import Execution, TrainConfig
from rl_training.errors import ConfigError, Problem, shown
from rl_training.runtime.actor_pool import ActorPool
from rl_training.runtime.fleet import Fleet
from rl_training.runtime.process_fleet import ProcessFleet
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.setup import device_problem
from rl_training.runtime.sources import Source, open_local


def open_source(config: TrainConfig, recipe: Recipe) -> Source:
    """The training environments of every task, and where they are played."""
    if config.execution and not recipe.asynchronous:
        raise ConfigError.of(f"{recipe.name} acts with the newest weights alone: leave it out", "execution")
    execution = Execution.of(config.execution)
    if execution.backend == "serial":
        return open_local(config, recipe, simulate_lag=execution.simulate_lag)
    if problems := problems_elsewhere(execution, config.num_envs):
        raise ConfigError(problems)
    return ActorPool(config, recipe, execution, open_fleet(execution))


def problems_elsewhere(execution: Execution, num_envs: int) -> list[Problem]:
    """Why actors cannot play elsewhere as the config says."""
    found: list[Problem] = []
    if execution.backend != "serial" and num_envs % execution.actors:
        numbers = f"{num_envs} environments cannot be shared out among {execution.actors} actors"
        found.append(Problem(("execution", "actors"), f"{numbers}: make num_envs a multiple of the actors"))
    if (message := actor_device_problem(execution)) is not None:
        found.append(Problem(("execution", "actor_device"), message))
    return found


def actor_device_problem(execution: Execution) -> str | None:
    name = execution.actor_device
    if execution.backend != "ray":
        return device_problem(name, auto=False)
    # Whether there are GPUs is seen when Ray is there: its machines may have some where this one has none.
    return None if name in ("cpu", "cuda") else f"should be cpu or cuda with backend: ray, got {shown(name)}"


def open_fleet(execution: Execution) -> Fleet:
    if execution.backend == "ray":
        from rl_training.runtime.ray_fleet import RayFleet  # ray is an optional package

        return RayFleet(execution)
    return ProcessFleet(execution.actors)
