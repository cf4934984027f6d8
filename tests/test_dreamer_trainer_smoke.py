"""DreamerV3 trains end to end: schedules, images, resuming, and the state that the policy carries."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_training import dream_checkpoint, load_policy, resume_training, train
from rl_training.errors import ConfigError, InputError
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.dreamer_trainer import train_dreamer
from smoke import check_run


class Signs(gym.Env):
    """Images that are bright or dark. The reward is for naming which. Episodes of 5 steps are truncated."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape=(16, 16, 3)):
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

    def look(self):
        self.bright = int(self.np_random.integers(2))
        return np.full(self.observation_space.shape, 200 * self.bright, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        reward = float(action == self.bright)
        self.steps += 1
        return self.look(), reward, False, self.steps == 5, {}


ACTIONS = {
    "discrete": gym.spaces.Discrete(2),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "box": gym.spaces.Box(-2, 1, (2,), np.float32),
}


class Senses(Signs):
    """The same with other observations and actions, of which the first number counts."""

    def __init__(self, observation, action):
        super().__init__()
        self.image, self.action_space = self.observation_space, ACTIONS[action]
        parts = {
            "view": self.image,
            "speed": gym.spaces.Box(-9, 9, (3,), np.float32),
            "card": gym.spaces.MultiDiscrete([3, 2]),
        }
        kinds = {"vector": parts["speed"], "image": self.image, "mixed": gym.spaces.Dict(parts)}
        self.observation_space = kinds[observation]

    def look(self):
        self.bright = int(self.np_random.integers(2))
        parts = {
            "view": np.full(self.image.shape, 200 * self.bright, np.uint8),
            "speed": np.append(self.np_random.normal(size=2), self.bright).astype(np.float32),
            "card": np.array([self.np_random.integers(3), self.bright]),
        }
        if isinstance(self.observation_space, gym.spaces.Dict):
            return parts
        return parts["view" if self.observation_space.dtype == np.uint8 else "speed"]

    def step(self, action):
        assert self.action_space.contains(action)
        obs, reward, terminated, truncated, info = super().step(int(np.ravel(action)[0] > 0))
        terminated = bool(self.np_random.random() < 0.1)
        return obs, reward, terminated, truncated and not terminated, info


gym.register("Signs-v0", entry_point=Signs)
gym.register("Senses-v0", entry_point=Senses)


def quiet(config, **options):
    return train(config, progress="silent", **options)


def test_dreamer_trains_with_scheduled_numbers(tiny_config):
    config = tiny_config(
        "dreamer",
        entropy_coef_schedule={"kind": "cosine", "start": 3e-3, "end": 3e-4},
        entropy_coef_warmup_steps=64,
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
        train_ratio_schedule={"kind": "linear", "start": 1.0, "end": 3.0},
        horizon={"kind": "linear", "start": 50, "end": 333},
        imagination_length_schedule={"kind": "linear", "start": 2, "end": 5},
        replay_value_coef=0.5,
    )
    result = train_dreamer(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "dreamer__CartPole-v1__seed0__smoke"
    ends = {"ent_coef": 3e-4, "learning_rate": 0.0, "train_ratio": 3.0, "horizon": 333.0, "imagination_length": 5}
    assert {name: result.metrics[name] for name in ends} == pytest.approx(ends)
    assert result.metrics["replay_value_coef"] == 0.5
    losses = (
        "dynamics",
        "representation",
        "reconstruction",
        "reward",
        "continuation",
        "policy",
        "value",
        "replay_value",
    )
    assert {f"{name}_loss" for name in losses} <= result.metrics.keys()


@pytest.mark.parametrize("shape", [(16, 16, 3), (16, 16), (2, 16, 16)], ids=str)
def test_dreamer_trains_on_images(tiny_config, shape):
    config = {"env_id": "Signs-v0", "env_kwargs": {"shape": shape}, "total_timesteps": 64}
    result = quiet(tiny_config("dreamer", config))
    assert result.metrics["gradient_steps"] > 0
    columns = load_checkpoint(result.checkpoint_path).state["replay"]["columns"]
    assert columns["deter"][0].shape[1:] == (16,)
    assert columns["stoch"][0].shape[1:] == (32,)


class Table(gym.Env):
    """Actions are matrices."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2, 3), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert action.shape == (2, 3)
        return action[0], float(action.sum()), False, False, {}


gym.register("Table-v0", entry_point=Table, max_episode_steps=10)


def test_dreamer_trains_with_actions_of_several_axes(tiny_config):
    result = quiet(tiny_config("dreamer", {"env_id": "Table-v0", "total_timesteps": 64}))
    assert result.metrics["gradient_steps"] > 0
    assert dream_checkpoint(result.run_dir, steps=3).predicted.obs.shape == (8, 8, 3)


def test_gradient_steps_follow_the_train_ratio(tiny_config):
    """From learning_starts on, train_ratio steps are replayed for each step: 12 of them in a gradient step."""
    metrics = quiet(tiny_config("dreamer", {"num_envs": 4, "total_timesteps": 400}, train_ratio=1.5)).metrics
    assert metrics["gradient_steps"] == int((400 - 32) * 1.5 / 12)


@pytest.mark.parametrize("steps", [200, 272])
def test_a_resumed_run_has_the_same_weights_to_the_byte(tiny_config, tmp_path, steps):
    """Interrupted in the middle of an episode, with a remainder of the train ratio and windows that wait."""
    kwargs = {"train_ratio": 1.37, "batch_length": 9}
    whole = quiet(tiny_config("dreamer", {"total_timesteps": 400}, **kwargs))
    part = quiet(tiny_config("dreamer", {"total_timesteps": steps, "schedule_horizon": 400}, **kwargs))
    assert load_checkpoint(part.checkpoint_path).state["learner"]["credit"] > 0
    resumed = resume_training(part.run_dir, total_timesteps=400, output_dir=tmp_path / "resumed", progress="silent")
    assert_same_end(whole, resumed)


COMBINATIONS = [
    ("vector", "box", "float32"),
    ("image", "multidiscrete", "bfloat16"),
    ("mixed", "box", "bfloat16"),
    ("mixed", "discrete", "float32"),
]


@pytest.mark.parametrize(("observation", "action", "precision"), COMBINATIONS)
def test_any_spaces_and_precisions_resume_to_the_byte(tiny_config, tmp_path, observation, action, precision):
    config = {"env_id": "Senses-v0", "env_kwargs": {"observation": observation, "action": action}}
    kwargs = {"train_ratio": 1.37, "precision": precision}
    whole = quiet(tiny_config("dreamer", config | {"total_timesteps": 160}, **kwargs))
    part = quiet(tiny_config("dreamer", config | {"total_timesteps": 90, "schedule_horizon": 160}, **kwargs))
    learner = load_checkpoint(part.checkpoint_path).state["learner"]
    assert learner["gradient_steps"] > 2
    assert learner["credit"] > 0
    assert learner["return_scale"]["bounds"].any()
    resumed = resume_training(part.run_dir, total_timesteps=160, output_dir=tmp_path / "resumed", progress="silent")
    assert_same_end(whole, resumed)
    assert np.isfinite(whole.metrics["loss"])


def assert_same_end(whole, resumed):
    ends = [load_checkpoint(result.checkpoint_path).state for result in (whole, resumed)]
    for part_of in ("actor", "learner", "replay", "runner"):
        one, other = ([*leaves(end[part_of])] for end in ends)
        assert len(one) == len(other) > 0
        assert one == other, part_of


def leaves(tree):
    """All numbers and texts, and the bytes of all arrays."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key])
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part)
    else:
        yield np.asarray(tree).tobytes() if isinstance(tree, torch.Tensor | np.ndarray) else tree


def test_dreamer_resumes_from_best_with_an_empty_replay(tiny_config, capsys):
    result = quiet(tiny_config("dreamer", {"eval_interval": 256}))
    resumed = resume_training(result.run_dir / "checkpoints" / "best", total_timesteps=512, progress="plain")
    assert "holds no replay" in capsys.readouterr().out
    steps = resumed.metrics["gradient_steps"] - result.metrics["gradient_steps"]
    assert steps == pytest.approx((256 - 32) * 1.5 / 12, abs=1.5)


def test_the_policy_carries_its_state_until_it_is_reset(tiny_config):
    policy = load_policy(quiet(tiny_config("dreamer")).run_dir)
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    assert policy.memory == {}
    policy.act(obs)
    first = {name: np.array(part) for name, part in policy.memory.items()}
    assert {name: part.shape for name, part in first.items()} == {
        "deter": (1, 16),
        "stoch": (1, 32, 2),
        "action": (1, 2),
    }
    policy.act(obs)
    assert not np.array_equal(policy.memory["deter"], first["deter"])
    policy.reset()
    policy.act(obs)
    np.testing.assert_array_equal(policy.memory["deter"], first["deter"])  # the same action of nothing, no old state


def test_what_cannot_be_learned_from_is_an_error(tiny_config):
    stacked = {"env_kwargs": {"wrappers": {"frame_stack": 2}}}
    with pytest.raises(InputError, match=r"remove frame_stack from env_kwargs\.wrappers"):
        quiet(tiny_config("dreamer", {"env_id": "Signs-v0", "env_kwargs": {"shape": (16, 16)} | stacked["env_kwargs"]}))
    with pytest.raises(InputError, match=r"a sequence takes 7 rows .* keeps 5 for each of 2 environments"):
        quiet(tiny_config("dreamer", buffer_capacity=10))
    with pytest.raises(InputError, match=r"deter.*multiple of 8"):
        quiet(tiny_config("dreamer", deter=20))
    with pytest.raises(ConfigError, match="size"):
        quiet(tiny_config("dreamer", size="2m"))
