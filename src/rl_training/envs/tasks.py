"""The tasks of a run: one environment for most algorithms, several for those that learn many at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym

from rl_training.config import TrainConfig
from rl_training.data.normalize import Normalizer
from rl_training.envs.factory import make_envs, split_env_kwargs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.space_json import space_from_json, space_to_json
from rl_training.types import BoxActions, Spaces, State

T = TypeVar("T")


class Tasks:
    """Each task's name and the runner of its environments; nothing is shared between them."""

    def __init__(self, names: Sequence[str], runners: Sequence[EnvRunner]) -> None:
        self.names, self.runners = list(names), list(runners)

    def items(self) -> list[tuple[str, EnvRunner]]:
        return list(zip(self.names, self.runners, strict=True))

    @property
    def spaces(self) -> list[Spaces]:
        return [runner.spaces for runner in self.runners]

    @property
    def normalizers(self) -> list[Normalizer | None]:
        return [runner.normalizer for runner in self.runners]

    def each(self, look: Callable[[EnvRunner], T]) -> T | dict[str, T]:
        """What is found in the only runner, or in each of several, by name."""
        found = {name: look(runner) for name, runner in self.items()}
        return found if len(found) > 1 else found[self.names[0]]

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds of them, the normalisers first: a runner is loaded after its own."""
        runners = {str(i): runner for i, runner in enumerate(self.runners)}
        normalizers = {i: runner.normalizer for i, runner in runners.items() if runner.normalizer is not None}
        parts: dict[str, dict[str, Any]] = {"normalizer": normalizers, "runner": runners}
        if len(self.runners) == 1:
            return {name: part["0"] for name, part in parts.items() if part}
        return {name: Together(part) for name, part in parts.items() if part}

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others from closing
            for runner in self.runners:
                closing.callback(runner.close)


class Together:
    """Parts of one kind, by the number of their task, saved as one."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def state_dict(self) -> State:
        return {number: part.state_dict() for number, part in self.parts.items()}

    def state_pattern(self) -> State:
        return {
            number: part.state_pattern() if hasattr(part, "state_pattern") else object
            for number, part in self.parts.items()
        }

    def load_state_dict(self, state: State) -> None:
        for number, part in self.parts.items():
            part.load_state_dict(state[number])


def make_tasks(config: TrainConfig, *, seeds: Sequence[int], box_actions: BoxActions, raw_steps: bool) -> Tasks:
    """The environments to train in; `seeds` has one for each task."""
    runners: list[EnvRunner] = []
    with contextlib.ExitStack() as closing:
        for task, seed in zip(config.tasks, seeds, strict=True):
            envs = make_envs(
                task.env_id, num_envs=config.num_envs, seed=seed, env_kwargs=task.env_kwargs, training=True
            )
            closing.callback(envs.close)
            runner = EnvRunner(
                envs,
                seed=seed,
                box_actions=box_actions,
                normalizer=make_normalizer(task.env_kwargs, envs.single_observation_space, config.num_envs),
                clip_reward=clips_reward(task.env_kwargs),
                raw_steps=raw_steps,
            )
            runners.append(runner)
        closing.pop_all()
    return Tasks([task.env_id for task in config.tasks], runners)


def make_normalizer(env_kwargs: Mapping[str, Any], space: gym.Space, num_envs: int) -> Normalizer | None:
    """The normaliser that the wrappers ask for; None where they ask for none."""
    wrappers = split_env_kwargs(env_kwargs)[0].wrappers
    observation, reward = bool(wrappers.normalize_observation), bool(wrappers.normalize_reward)
    return Normalizer(space, num_envs, observation=observation, reward=reward) if observation or reward else None


def clips_reward(env_kwargs: Mapping[str, Any]) -> bool:
    atari = split_env_kwargs(env_kwargs)[0].wrappers.atari
    return atari if isinstance(atari, bool) else atari.clip_reward


def spaces_to_json(runner: EnvRunner) -> dict[str, Any]:
    """All that a policy needs to know of its environment."""
    seen, envs = runner.spaces, runner.envs
    return {
        "observation": space_to_json(seen.observation),
        "action": space_to_json(seen.action),
        "env_observation": space_to_json(envs.layout.source),
        "env_action": space_to_json(envs.single_action_space),
        "frame_stack": seen.frame_stack,
        "num_players": seen.num_players,
    }


class SavedSpaces(NamedTuple):
    model: Spaces
    env_observation: gym.Space
    env_action: gym.Space


def spaces_from_json(data: Mapping[str, Any]) -> SavedSpaces:
    model = Spaces(
        space_from_json(data["observation"]),
        space_from_json(data["action"]),
        data.get("frame_stack", 1),  # checkpoints of old have no numbers
        data.get("num_players", 1),
    )
    return SavedSpaces(model, space_from_json(data["env_observation"]), space_from_json(data["env_action"]))
