"""The config of a run: the keys of the YAML file."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from rl_training.errors import ConfigError, problems_of

C = TypeVar("C", bound=type)
MOST_STEPS = 10**15  # env steps of a run or an interval: 30 years at a million steps a second
MOST_ENVS = 2**16
MOST_TASKS = 128
LONGEST_ENV_ID = 200


def _number(value: Any) -> Any:
    """Refuse true and "0.3", which pydantic would convert to numbers."""
    if isinstance(value, bool | str | bytes):
        raise ValueError("should be a number")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError("should be a number below 1e308")
    return value


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_number)]  # pydantic also accepts 1e6, a float without a fraction
# Bounds stand before the validator: only there do they reach the JSON Schema.
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS), BeforeValidator(_number)]
Interval = Annotated[int, Field(ge=0, le=MOST_STEPS), BeforeValidator(_number)]


def _unless_none(value: Any, check: Callable[[Any], Any]) -> Any:
    return None if value is None else check(value)


# Declared as int, because a run replaces None by the default of its algorithm before it reads the number.
NumEnvs = Annotated[int, Field(ge=1, le=MOST_ENVS), BeforeValidator(_number), WrapValidator(_unless_none)]


def _env_ids(value: Any) -> Any:
    """Check for one id or a list of ids here, because pydantic would report both branches of the union."""
    ids = [value] if isinstance(value, str) else value
    if not isinstance(ids, list) or not ids or not all(isinstance(name, str) for name in ids):
        raise ValueError("should be the id of an environment, or a list of ids")
    if any(len(name) > LONGEST_ENV_ID for name in ids):
        raise ValueError(f"should be at most {LONGEST_ENV_ID} characters long")
    twice = next((name for name, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is given twice: each environment is one task")
    return value


IdList = Annotated[list[str], Field(min_length=1, max_length=MOST_TASKS, json_schema_extra={"uniqueItems": True})]
EnvIds = Annotated[str | IdList, BeforeValidator(_env_ids)]


class Options(BaseModel):
    """A mapping in the YAML file that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AtariOptions(Options):
    """Atari preprocessing (Machado et al., 2018; the constants of Mnih et al., 2015)."""

    noop_max: Int = Field(30, ge=0, le=10_000, description="maximum number of random no-op actions after a reset")
    frame_skip: Int = Field(4, ge=1, le=1_000, description="frames per action; the last two are max-pooled")
    screen_size: Int = Field(84, ge=16, le=1_024, description="height and width of the image in pixels")
    grayscale: StrictBool = Field(True, description="grayscale images (1 channel) instead of RGB (3 channels)")
    episodic_life: StrictBool = Field(True, description="training only: a lost life ends the episode, not the game")
    fire_reset: StrictBool = Field(True, description="press FIRE after a reset in games that wait for it")
    clip_reward: StrictBool = Field(True, description="training only: replace rewards by their sign")
    sticky: Float = Field(0.0, ge=0, le=1, description="sticky actions: probability of repeating the last action")


class PixelOptions(Options):
    """Images of the environment as observations."""

    size: Int = Field(64, ge=16, le=1_024, description="height and width in pixels; images are squeezed to a square")
    grayscale: StrictBool = Field(False, description="grayscale images (1 channel) instead of RGB (3 channels)")
    keep_state: StrictBool = Field(
        False,
        description="observe a Dict: `pixels`, and the environment's observation as `state` or under its own keys",
    )


class Wrappers(Options):
    """Preprocessing between the environment and the algorithm, innermost first."""

    time_limit: Int | None = Field(
        None, ge=1, le=MOST_STEPS, description="truncate episodes after this many steps; replaces the registered limit"
    )
    action_repeat: Int | None = Field(
        None, ge=1, le=1_000, description="environment steps per action, which together count as one step"
    )
    atari: StrictBool | AtariOptions = Field(False, description="Atari preprocessing; true: with its defaults")
    pixels: StrictBool | PixelOptions = Field(
        False, description="observe images of what the environment draws; true: with its defaults"
    )
    frame_stack: Int | None = Field(
        None, ge=1, le=1_024, description="stack this many observations on a new first axis"
    )
    normalize_observation: StrictBool | None = Field(
        None,
        description="normalize by running mean and variance, clip to ±10; "
        "default: for a2c and recurrent_ppo, not on Atari",
    )
    normalize_reward: StrictBool | None = Field(
        None,
        description="divide by the return's deviation; "
        "default: ppo, a2c, trpo, ppg, recurrent_ppo, impala, appo; not on Atari",
    )


Backend = Literal["auto", "sync", "async", "vector", "ale", "envpool"]


class EnvOptions(Options):
    """The keys of `env_kwargs` for this package; all others go to `gymnasium.make`."""

    backend: Backend = Field("auto", description="how environments are stepped; auto: the fastest suitable backend")
    wrappers: Wrappers = Field(default_factory=Wrappers, description="preprocessing, see the table of wrappers")
    env_timeout: Float = Field(
        600.0, gt=0, description="backend async: seconds after which an environment that does not answer is an error"
    )

    @classmethod
    def of(cls, env_kwargs: Mapping[str, Any]) -> EnvOptions:
        return cls.model_validate({key: value for key, value in env_kwargs.items() if key in cls.model_fields})


class Execution(Options):
    """Where the actors play, and how far they may be behind the learner."""

    backend: Literal["serial", "process", "ray"] = Field(
        "serial", description="serial: in the learner's process, in turns; process, ray: actors beside the learner"
    )
    simulate_lag: Int = Field(
        0,
        ge=0,
        le=10_000,
        description="serial: act with the weights of so many updates ago, to measure what lag does",
    )
    actors: Int = Field(2, ge=1, le=4_096, description="processes that play; num_envs is shared out among them")
    queue: Int | None = Field(
        None,
        ge=0,
        le=65_536,
        description="rollouts that may wait for the learner, the oldest is next; default: 2 for each actor; "
        "0: in lock-step, actors wait while the learner learns",
    )
    when_full: Literal["wait", "drop"] = Field(
        "wait", description="full queue: actors wait, or the oldest rollout is dropped and counted"
    )
    max_policy_lag: Int = Field(
        20, ge=0, le=MOST_STEPS, description="rollouts of weights that are more updates old are dropped and counted"
    )
    on_actor_death: Literal["restart", "fail"] = Field(
        "restart", description="restart: unless it dies three times within 100 rollouts; fail: the run ends"
    )
    actor_timeout: Float = Field(
        300.0, gt=0, description="seconds for a rollout after which an actor counts as hanging, and is killed"
    )
    actor_device: str = Field(
        "cpu", description="device of the actors' networks, as for `device` but not auto; ray: cpu or cuda"
    )
    address: str | None = Field(
        None, description="ray: the cluster, or auto for the one of this machine; default: Ray is started here"
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Execution:
        for key in sorted(self.model_fields_set - {"backend"}):
            only = {"simulate_lag": ("serial",), "address": ("ray",)}.get(key, ("process", "ray"))
            if self.backend not in only:
                raise ValueError(f"{key} has no effect with backend: {self.backend}, only with {' or '.join(only)}")
        if self.queue == 0 and self.when_full == "drop":
            raise ValueError("when_full: drop has no effect with queue: 0, where actors wait for the learner")
        return self

    @property
    def queue_size(self) -> int:
        return 2 * self.actors if self.queue is None else self.queue

    @classmethod
    def of(cls, execution: Mapping[str, Any]) -> Execution:
        try:
            return cls.model_validate(dict(execution))
        except ValidationError as error:
            raise ConfigError(problems_of(error, ("execution",), cls.model_fields)) from None


def raises_config_errors(config: C) -> C:
    """Make the class raise a ConfigError, as for a YAML file with the same mistake, instead of pydantic's error."""
    validate = config.__init__  # type: ignore[misc]

    @functools.wraps(validate)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validate(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError(problems_of(error, (), config_fields())) from None

    config.__init__ = init  # type: ignore[misc]
    return config


@raises_config_errors
@dataclass(frozen=True, kw_only=False, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """The config of one training run; its fields are the keys of the YAML file."""

    algo: str = Field(description="name of the algorithm; `rl-training algorithms` lists them")
    env_id: EnvIds = Field(description="Gymnasium id or module:id; a list of ids if the algorithm trains several tasks")
    total_timesteps: Steps = Field(description="env steps to train for, counted over all environments and tasks")
    output_dir: Path = Field(default=Path("runs"), description="folder in which the run folder is created")
    seed: Int = Field(default=0, ge=0, description="random seed of environments, networks and sampling")
    num_envs: NumEnvs = Field(  # type: ignore[assignment]
        default=None,
        description="number of parallel environments, for each task; default: 8, or what the algorithm prefers",
    )
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, cuda:<index> or mps; auto: cuda, if available, for conv networks, else cpu",
    )
    eval_interval: Interval = Field(default=0, description="env steps between evaluations; 0: only at the end")
    eval_episodes: Int = Field(default=10, ge=1, le=1_000_000, description="episodes per evaluation, for each task")
    checkpoint_interval: Interval = Field(
        default=50_000, description="env steps between checkpoints; 0: only at the end"
    )
    keep_checkpoints: Int = Field(default=3, ge=0, description="newest checkpoints to keep besides the best; 0: all")
    log_interval: Steps = Field(default=2_000, description="env steps between log lines")
    log_info: list[str] = Field(
        default_factory=list,
        description="keys of `info` whose numbers at the end of an episode are logged, as means over episodes",
    )
    num_threads: Annotated[Int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="PyTorch CPU threads; auto: 1; large networks on a CPU: all cores, at most OMP_NUM_THREADS",
    )
    tags: list[str] = Field(default_factory=list, description="tags saved with the run and sent to Weights & Biases")
    algo_kwargs: dict[str, Any] = Field(default_factory=dict, description="hyperparameters of the algorithm")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="environment arguments; wrappers and backend")
    eval_env_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="replace keys of env_kwargs in evaluation"
    )
    execution: dict[str, Any] = Field(default_factory=dict, description="actors of impala and appo, see below")
    callbacks: dict[str, Any] = Field(default_factory=dict, description="early_stopping and time_limit, see below")
    wandb: StrictBool | dict[str, Any] = Field(
        default=False, description="log to Weights & Biases too; a mapping is passed to wandb.init"
    )
    tune: dict[str, Any] = Field(
        default_factory=dict, description="search space of the command tune, see docs/tuning.md; not used in training"
    )
    schedule_horizon: Int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="env steps that schedules run over; default: total_timesteps"
    )

    @property
    def uses_atari(self) -> bool:
        """Whether a task has Atari preprocessing, for which some hyperparameters have other defaults."""
        return any(EnvOptions.of(task.env_kwargs).wrappers.atari for task in self.tasks)

    @property
    def horizon(self) -> int:
        return self.schedule_horizon or self.total_timesteps

    @property
    def tasks(self) -> list[Task]:
        return tasks_of(self.env_id, self.env_kwargs, self.eval_env_kwargs, self.log_info)


class Task(NamedTuple):
    """One environment of a run, and its arguments."""

    env_id: str
    env_kwargs: dict[str, Any]
    eval_env_kwargs: dict[str, Any]  # all arguments in evaluation, those of env_kwargs included
    log_info: tuple[str, ...] = ()


def tasks_of(
    env_id: str | list[str],
    env_kwargs: Mapping[str, Any],
    eval_env_kwargs: Mapping[str, Any],
    log_info: Sequence[str] = (),
) -> list[Task]:
    """With a list of ids, a key of the kwargs that is one of them holds arguments for that task alone."""
    several = [] if isinstance(env_id, str) else env_id

    def own(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
        common = {key: value for key, value in kwargs.items() if key not in several}
        return common | (dict(kwargs.get(name, {})) if name in several else {})

    return [
        Task(name, own(env_kwargs, name), own(env_kwargs, name) | own(eval_env_kwargs, name), tuple(log_info))
        for name in several or [str(env_id)]
    ]


@functools.lru_cache
def config_fields() -> dict[str, FieldInfo]:
    """The fields of TrainConfig, with their descriptions and bounds."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    fields = dataclasses.fields(TrainConfig)
    return {f.name: FieldInfo.from_annotated_attribute(hints[f.name], f.default) for f in fields}
