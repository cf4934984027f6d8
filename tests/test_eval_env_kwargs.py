"""Evaluation in environments of its own kind: eval_env_kwargs stands in for keys of env_kwargs."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rl_training import evaluate_checkpoint, resume_training, train
from rl_training.config import tasks_of
from rl_training.envs.runner import FinishedEpisode
from rl_training.errors import InputError
from rl_training.runtime import evaluation
from test_contract import same, weights


class Sized(gym.Env):
    """`length` steps of reward 1, and spaces that the keywords decide."""

    def __init__(self, length: int = 4, size: int = 2, bound: float = 1.0, actions: int = 2) -> None:
        self.observation_space = gym.spaces.Box(-bound, bound, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(actions)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), 1.0, self.t == self.length, False, {}

    def _obs(self):
        return self.np_random.uniform(-1, 1, self.observation_space.shape).astype(np.float32)


if "Sized-v0" not in gym.registry:
    gym.register("Sized-v0", Sized)


class Careless(Sized):
    """Draws from the process-wide generator."""

    def _obs(self):
        return np.random.uniform(-1, 1, self.observation_space.shape).astype(np.float32)


if "Careless-v0" not in gym.registry:
    gym.register("Careless-v0", Careless)


def sized(tiny_config, eval_env_kwargs, **env_kwargs):
    config = {"env_id": "Sized-v0", "env_kwargs": env_kwargs, "eval_env_kwargs": eval_env_kwargs}
    return tiny_config("a2c", config)


def test_evaluation_replaces_keys_and_keeps_the_others(tiny_config):
    result = train(sized(tiny_config, {"length": 9}, size=3), progress="silent")
    assert result.metrics["train_length_mean"] == 4
    assert result.metrics["eval_return_mean"] == result.metrics["eval_return_min"] == 9
    assert evaluate_checkpoint(result.run_dir)["eval_return_mean"] == 9
    resumed = resume_training(result.run_dir, total_timesteps=320, progress="silent")
    assert (resumed.metrics["train_length_mean"], resumed.metrics["eval_return_mean"]) == (4, 9)


@pytest.mark.parametrize("env_id", ["Sized-v0", "Careless-v0"])
def test_it_never_changes_training(env_id, tiny_config):
    results = []
    for kwargs in ({}, {"length": 7}):
        np.random.seed(1)
        results.append(train(tiny_config("a2c", {"env_id": env_id, "eval_env_kwargs": kwargs}), progress="silent"))
    plain, other = results
    assert same(weights(plain.checkpoint_path), weights(other.checkpoint_path))


def test_wrappers_are_replaced_whole(tiny_config, monkeypatch):
    given, original = [], evaluation.make_envs
    monkeypatch.setattr(evaluation, "make_envs", lambda *a, **k: given.append(k["env_kwargs"]) or original(*a, **k))
    env_kwargs = {"wrappers": {"time_limit": 3, "normalize_observation": True}, "length": 8}
    result = train(sized(tiny_config, {"wrappers": {"time_limit": 5}}, **env_kwargs), progress="silent")
    assert given[-1] == {"wrappers": {"time_limit": 5}, "length": 8}
    assert (result.metrics["train_length_mean"], result.metrics["eval_return_mean"]) == (3, 5)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("kwargs", "what"), [({"size": 3}, "observations"), ({"actions": 3}, "actions")])
def test_other_spaces_are_refused_before_anything_is_made(kwargs, what, normalized, tiny_config):
    config = sized(tiny_config, kwargs, wrappers={"normalize_observation": normalized})
    with pytest.raises(InputError, match=rf"Sized-v0 has {what} .*trained for .*eval_env_kwargs"):
        train(config, progress="silent")
    assert not config.output_dir.exists()


def test_other_bounds_are_no_other_space(tiny_config):
    assert train(sized(tiny_config, {"bound": 2.0}), progress="silent").metrics["eval_return_mean"] == 4


def test_an_environment_that_has_changed_since_is_said_so(tiny_config, monkeypatch):
    result = train(sized(tiny_config, {}), progress="silent")
    monkeypatch.setitem(gym.registry["Sized-v0"].kwargs, "size", 5)
    with pytest.raises(InputError, match="it has changed"):
        evaluate_checkpoint(result.run_dir)


@pytest.mark.parametrize("name", ["normalize_observation", "normalize_reward"])
def test_normalising_follows_training(name, tiny_config):
    with pytest.raises(InputError, match=f"eval_env_kwargs.wrappers.{name}: evaluation normalises as training does"):
        train(sized(tiny_config, {"wrappers": {name: True}}, wrappers={name: False}), progress="silent")
    said_again = sized(tiny_config, {"wrappers": {name: True, "time_limit": 2}}, wrappers={name: True})
    assert train(said_again, progress="silent").metrics["eval_return_mean"] == 2


def test_the_worst_episode_is_reported(tiny_config, monkeypatch):
    episodes = [FinishedEpisode(0, episode_return, 9) for episode_return in (3.0, -5.0, 1.0)]
    monkeypatch.setattr(evaluation, "play", lambda *_, **__: episodes)
    assert train(tiny_config("a2c"), progress="silent").metrics["eval_return_min"] == -5.0


def test_what_is_for_all_tasks_and_what_for_one():
    (one,) = tasks_of("A", {"x": 1, "A": 2}, {"x": 3})
    assert one == ("A", {"x": 1, "A": 2}, {"x": 3, "A": 2}, ())
    first, second = tasks_of(["A", "B"], {"x": 1, "y": 2, "A": {"x": 4}}, {"y": 5, "B": {"x": 6}})
    assert first == ("A", {"x": 4, "y": 2}, {"x": 4, "y": 5}, ())
    assert second == ("B", {"x": 1, "y": 2}, {"x": 6, "y": 5}, ())
