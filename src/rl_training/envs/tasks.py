"""The tasks of a run: one environment for most algorithms, several for those that learn many at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym

from rl_training.data.normalize import Normalizer
from rl_training.envs.factory import split_env_kwargs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.space_json import space_from_json, space_to_json
from rl_training.types import Spaces, State

T = TypeVar("T")


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
