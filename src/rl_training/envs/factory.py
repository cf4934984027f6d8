"""From an environment id and `env_kwargs` to N environments on the backend that fits them."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

import rl_training.envs.board_games
import rl_training.envs.classic  # noqa: F401  both register their ids
from rl_training.config import AtariOptions, EnvOptions, PixelOptions, Wrappers
from rl_training.envs import atari
from rl_training.envs.backends import EnvPoolEnvs, VectorEnvs
from rl_training.envs.episodes import ActionRepeat, Envs, Episodes, SyncEnvs, episode_seed, seed_process
from rl_training.envs.pixels import Pixels
from rl_training.envs.rendering import MODE, check_draws, without_screen
from rl_training.envs.workers import Workers
from rl_training.errors import InputError, MissingPackage
from rl_training.types import Array

# Measured on CartPole, median microseconds for one step of 8, 16, 32, 64 environments: sync 159, 197, 562, 1120;
# its NumPy vector form 120, 96, 129, 124. With fewer than 16 the gain is small, and only sync gives every environment a
# stream of its own and wastes no step on resets.
VECTOR_PAYS_FROM = 16
ALE_KWARGS = {
    "full_action_space",
    "max_num_frames_per_episode",
    "continuous",
    "continuous_action_threshold",
    "num_threads",
    "thread_affinity_offset",
}
ATARI_KWARGS = {"frameskip": "frame_skip", "repeat_action_probability": "sticky"}


def split_env_kwargs(env_kwargs: Mapping[str, Any]) -> tuple[EnvOptions, dict[str, Any]]:
    """Our own keys of `env_kwargs`, and those that go to `gymnasium.make`."""
    theirs = {key: value for key, value in env_kwargs.items() if key not in EnvOptions.model_fields}
    return EnvOptions.of(env_kwargs), theirs


def is_atari(env_id: str) -> bool:
    """Whether the id is one of the Arcade Learning Environment's."""
    return env_id.startswith("ALE/") or bool(re.search(r"NoFrameskip-v\d+$", env_id))


def _register(env_id: str) -> str:
    """Import what registers the id; gives the id without its module."""
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module)
    if is_atari(name):
        try:
            import ale_py
        except ImportError as error:
            raise MissingPackage(f'{env_id} needs ale-py: pip install "rl-training[atari]"') from error
        if name not in gym.registry:
            gym.register_envs(ale_py)
    return name


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        remedy = "install it, or add its folder to PYTHONPATH" if _is_missing(module, error) else "correct it"
        raise InputError(f"module {module!r} cannot be imported: {type(error).__name__}: {error}; {remedy}") from error


def _is_missing(module: str, error: BaseException) -> bool:
    """Whether it is the module itself that was not found, or a package it is in, not one that it imports."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name is not None and f"{module}.".startswith(f"{name}.")


def check_env_id(env_id: str) -> None:
    """Raise an InputError where `gymnasium.make` could not make the id; makes nothing."""
    if registered(env_id):
        return
    module, _, name = env_id.rpartition(":")
    names = nearest_env_ids(env_id)
    hint = f"; did you mean {' or '.join(map(repr, names))}?" if names else ""
    if module:
        raise InputError(f"module {module!r} was imported, but it does not register {name!r}{hint}")
    hint = hint or "; give one that a module registers as module:id"
    raise InputError(f"no environment {env_id!r} is registered with Gymnasium{hint}")


def registered(env_id: str) -> bool:
    """Whether `gymnasium.make` knows the id; makes nothing."""
    name = _register(env_id)
    return name in gym.registry or any(re.fullmatch(re.escape(name) + r"-v\d+", known) for known in gym.registry)


def spec_of(env_id: str) -> EnvSpec | None:
    """How the environment is registered in this process, for others: see `adopt`."""
    return gym.registry.get(env_id.rpartition(":")[2])


def adopt(env_id: str, spec: EnvSpec | None) -> None:
    """Register an environment as another process has it, whose main script, imported by nobody else, may have done so.

    What a package registers comes first: it would warn of an id that is there already.
    """
    registered(env_id)
    if spec is not None:
        gym.registry[spec.id] = spec


def nearest_env_ids(env_id: str) -> list[str]:
    """Registered ids that may have been meant, newest version first."""
    name = env_id.rpartition(":")[2]
    stem = re.sub(r"-v\d+$", "", name)
    versions = [known for known in gym.registry if re.fullmatch(re.escape(stem) + r"-v\d+", known, re.IGNORECASE)]
    return sorted(versions, reverse=True) or difflib.get_close_matches(name, gym.registry, n=3)


def make_envs(
    env_id: str,
    *,
    num_envs: int,
    seed: int,
    env_kwargs: Mapping[str, Any],
    training: bool,
    log_info: Sequence[str] = (),
) -> Envs:
    """N environments. Evaluation (not training) plays whole games: no episodic life. log_info: see TrainConfig."""
    options, kwargs = split_env_kwargs(env_kwargs)
    plan = EnvPlan(env_id, num_envs, seed, options.wrappers, kwargs, training, options.env_timeout, tuple(log_info))
    if plan.pixels:
        without_screen()
    if options.backend != "envpool":
        check_env_id(env_id)
    if plan.atari:
        _check_atari(plan)
    backend = choose_backend(plan) if options.backend == "auto" else options.backend
    try:
        if plan.pixels and backend != "envpool":
            _check_pixels(plan)
        envs = BACKENDS[backend](plan)
        envs.env_id, envs.frame_stack = env_id, plan.wrappers.frame_stack or 1
        return envs
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise _missing_package(env_id, error) from error
    except TypeError as error:
        raise _bad_keyword(plan, error) from error


@dataclass(frozen=True)
class EnvPlan:
    """What is to be made."""

    env_id: str
    num_envs: int
    seed: int
    wrappers: Wrappers
    kwargs: dict[str, Any]  # for gymnasium.make
    training: bool
    env_timeout: float = EnvOptions().env_timeout
    log_info: tuple[str, ...] = ()

    @property
    def atari(self) -> AtariOptions | None:
        atari = self.wrappers.atari
        return AtariOptions.model_validate({}) if atari is True else atari or None

    @property
    def pixels(self) -> PixelOptions | None:
        pixels = self.wrappers.pixels
        return PixelOptions.model_validate({}) if pixels is True else pixels or None

    @property
    def wrapped(self) -> bool:
        """Whether single environments are wrapped, so that they cannot be made as one vectorised environment."""
        wrappers = self.wrappers
        return bool(wrappers.frame_stack or wrappers.action_repeat or self.pixels or self.atari)

    @property
    def episodic_life(self) -> bool:
        return self.training and self.atari is not None and self.atari.episodic_life


def _check_atari(plan: EnvPlan) -> None:
    if "game" not in _spec(plan.env_id).kwargs:
        raise InputError(f"wrappers.atari is for Atari games ('ALE/Pong-v5'), not for {plan.env_id!r}: remove it")
    if plan.wrappers.action_repeat:
        raise InputError("wrappers.action_repeat: wrappers.atari.frame_skip repeats the actions of a game, give that")
    for key, ours in ATARI_KWARGS.items():
        if key in plan.kwargs:
            raise InputError(f"env_kwargs.{key} of {plan.env_id} is set by wrappers.atari.{ours}: give that instead")


def _check_pixels(plan: EnvPlan) -> None:
    if plan.atari:
        raise InputError("wrappers.pixels: wrappers.atari gives images already, remove one of them")
    if plan.kwargs.get("render_mode") not in (None, MODE):
        raise InputError(
            f"render_mode of {plan.env_id}: wrappers.pixels needs {MODE!r}, got {plan.kwargs['render_mode']!r}: "
            "leave it out"
        )
    check_draws(plan.env_id, _spec(plan.env_id))


def choose_backend(plan: EnvPlan) -> str:
    """The fastest backend that gives the same environment."""
    if is_atari(plan.env_id):
        return "ale" if plan.atari and not _not_in_ale(plan) else "sync"
    if plan.num_envs >= VECTOR_PAYS_FROM and not plan.wrapped and _numpy_vector(_spec(plan.env_id)):
        return "vector"
    return "sync"


def _spec(env_id: str) -> EnvSpec:
    name = _register(env_id)
    return gym.registry[name] if name in gym.registry else gym.registry[nearest_env_ids(name)[0]]


def _numpy_vector(spec: EnvSpec) -> bool:
    """Whether the environment comes vectorised in NumPy. Those in jax are slower than a loop on small batches."""
    entry = spec.vector_entry_point
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", "")
    return entry is not None and "jax" not in name.lower() and not spec.additional_wrappers


def _not_in_ale(plan: EnvPlan) -> str:
    """What ale_py's vector environment cannot express; "" if nothing."""
    if plan.wrappers.time_limit:
        return "wrappers.time_limit"
    return ", ".join(f"env_kwargs.{key}" for key in plan.kwargs if key not in ALE_KWARGS)


def single_env(plan: EnvPlan, index: int, *, owns_process: bool = False) -> gym.Env:
    """Environment number `index`, wrapped. owns_process: see Episodes."""
    kwargs, limit, repeat = dict(plan.kwargs), plan.wrappers.time_limit, plan.wrappers.action_repeat
    if plan.atari:
        kwargs |= {"frameskip": 1, "repeat_action_probability": plan.atari.sticky}
    elif limit:
        kwargs["max_episode_steps"] = limit * (repeat or 1)  # the limit is in steps of the agent
    if plan.pixels:
        kwargs["render_mode"] = MODE
    env = gym.make(plan.env_id, disable_env_checker=True, **kwargs)
    env = ActionRepeat(env, repeat) if repeat else env
    env = Pixels(env, plan.pixels) if plan.pixels else env
    if plan.atari:
        env = atari.preprocess(env, plan.atari)
        env = gym.wrappers.TimeLimit(env, limit) if limit else env
    if plan.wrappers.frame_stack:
        # Zeros before the first observation, as in ale_py's vector environment.
        env = gym.wrappers.FrameStackObservation(env, plan.wrappers.frame_stack, padding_type="zero")
    env = Episodes(env, seed=plan.seed, index=index, owns_process=owns_process, log_info=plan.log_info)
    return atari.EpisodicLife(env) if plan.episodic_life else env


def _sync(plan: EnvPlan) -> Envs:
    return SyncEnvs([functools.partial(single_env, plan, index) for index in range(plan.num_envs)])


def _async(plan: EnvPlan) -> Envs:
    make = [functools.partial(_in_process, os.getpid(), plan, index) for index in range(plan.num_envs)]
    workers = Workers(make, env_id=plan.env_id, timeout=plan.env_timeout)
    return VectorEnvs(workers, restore="episodes", log_info=plan.log_info)


def _in_process(parent: int, plan: EnvPlan, index: int) -> gym.Env:
    own = os.getpid() != parent  # AsyncVectorEnv also makes one in the parent, to see its spaces
    if own:
        seed_process(episode_seed(plan.seed, index, 0))  # for what an environment draws while it is made
    return single_env(plan, index, owns_process=own)


def _vector(plan: EnvPlan) -> Envs:
    spec = _spec(plan.env_id)
    if spec.vector_entry_point is None or plan.wrapped:
        reason = "has no vectorised form" if spec.vector_entry_point is None else "takes no wrappers in vectorised form"
        raise InputError(f"backend 'vector': {plan.env_id} {reason}; use 'auto', 'sync' or 'async'")
    kwargs = dict(plan.kwargs)
    if plan.wrappers.time_limit:
        kwargs["max_episode_steps"] = plan.wrappers.time_limit
    env = gym.make_vec(plan.env_id, plan.num_envs, vectorization_mode="vector_entry_point", **kwargs)
    seeds = lambda start: episode_seed(plan.seed, 0, start)  # noqa: E731
    return VectorEnvs(env, seeds=seeds, restore="attributes", log_info=plan.log_info)


def _ale(plan: EnvPlan) -> Envs:
    """ale_py's threads. Rewards are clipped by the runner and lives counted by VectorEnvs: see LifeCounter."""
    options, stack = plan.atari, plan.wrappers.frame_stack
    cannot = _not_in_ale(plan) if options and is_atari(plan.env_id) else "an environment without wrappers.atari"
    if cannot or options is None:
        raise InputError(f"backend 'ale' cannot express {cannot} for {plan.env_id}; use 'auto' or 'sync'")
    from ale_py.vector_env import AtariVectorEnv

    spec = _spec(plan.env_id)
    kwargs = {key: value for key, value in spec.kwargs.items() if key in ALE_KWARGS} | plan.kwargs
    kwargs.setdefault("num_threads", min(plan.num_envs, usable_cores()))  # ale_py would count all of the machine's
    env = AtariVectorEnv(
        spec.kwargs["game"],
        plan.num_envs,
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=options.screen_size,
        img_width=options.screen_size,
        grayscale=options.grayscale,
        stack_num=stack or 1,
        frameskip=options.frame_skip,
        noop_max=options.noop_max,
        use_fire_reset=options.fire_reset,
        repeat_action_probability=options.sticky,
        reward_clipping=False,
        episodic_life=False,
        **kwargs,
    )

    def seeds(start: int) -> Array:
        return np.array([episode_seed(plan.seed, index, start) for index in range(plan.num_envs)])

    single, log_info = stack is None, plan.log_info
    return VectorEnvs(env, seeds=seeds, episodic_life=plan.episodic_life, single_frame=single, log_info=log_info)


def _envpool(plan: EnvPlan) -> Envs:
    try:
        import envpool
    except ImportError as error:
        raise MissingPackage(
            "backend 'envpool' needs its package: pip install envpool, or use backend 'auto'"
        ) from error
    options, stack = plan.atari, plan.wrappers.frame_stack
    for name in ("action_repeat", "pixels"):
        if getattr(plan.wrappers, name):
            raise InputError(f"backend 'envpool' cannot express wrappers.{name}; use 'auto'")
    if bool(options) != bool(stack) or (options and not options.grayscale):
        raise InputError("backend 'envpool' stacks frames only of Atari games, in grey, and stacks them always")
    kwargs = dict(plan.kwargs)
    if plan.wrappers.time_limit:
        kwargs["max_episode_steps"] = plan.wrappers.time_limit
    if options:
        kwargs |= {
            "img_height": options.screen_size,
            "img_width": options.screen_size,
            "stack_num": stack,
            "frame_skip": options.frame_skip,
            "noop_max": options.noop_max,
            "use_fire_reset": options.fire_reset,
            "repeat_action_probability": options.sticky,
            "reward_clip": False,
            "episodic_life": False,
        }
    name = re.sub(r"NoFrameskip-v\d+$", "-v5", plan.env_id.removeprefix("ALE/"))
    env = envpool.make_gymnasium(name, num_envs=plan.num_envs, seed=episode_seed(plan.seed, 0, 0), **kwargs)
    return EnvPoolEnvs(env, num_envs=plan.num_envs, episodic_life=plan.episodic_life, log_info=plan.log_info)


BACKENDS: dict[str, Callable[[EnvPlan], Envs]] = {
    "sync": _sync,
    "async": _async,
    "vector": _vector,
    "ale": _ale,
    "envpool": _envpool,
}


def _missing_package(env_id: str, error: Exception) -> MissingPackage:
    """An error that names the extra to install, where there is one."""
    known = env_id.rpartition(":")[2] in gym.registry
    where = f"{_spec(env_id).entry_point} {error}".lower() if known else str(error).lower()
    where = where.replace("ale_py", "atari").replace("dm_control", "dm-control").replace("shimmy", "dm-control")
    extra = next((name for name in ("dm-control", "mujoco", "box2d", "atari") if name in where), None)
    remedy = f'; pip install "rl-training[{extra}]"' if extra and "pip install envpool" not in where else ""
    return MissingPackage(f"environment {env_id!r} cannot be made: {error}{remedy}")


def _bad_keyword(plan: EnvPlan, error: TypeError) -> Exception:
    found = re.search(r"(?:unexpected keyword argument|multiple values for (?:keyword )?argument) '(\w+)'", str(error))
    if found and found[1] == "render_mode" and plan.pixels:
        return InputError(f"wrappers.pixels: the constructor of {plan.env_id!r} takes no 'render_mode': give it one")
    if not found or found[1] not in plan.kwargs:
        return error
    where = "env_kwargs" if plan.training else "env_kwargs or eval_env_kwargs"
    return InputError(
        f"environment {plan.env_id!r} takes no keyword {found[1]!r} (in {where}): remove it or correct its name; "
        f"our own keys there are {', '.join(EnvOptions.model_fields)}"
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
