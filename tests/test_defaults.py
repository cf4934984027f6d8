"""What a config that says nothing gets: hyperparameters by kind of task, and rewards normalised where that helps."""

from __future__ import annotations

import re

import pytest
import yaml

from rl_training import ALGORITHMS, TrainConfig, load_policy, train
from rl_training.config import Wrappers
from rl_training.runtime.controls import Controls
from rl_training.runtime.setup import with_env_defaults
from test_cli import cli

ATARI = {"wrappers": {"atari": True, "frame_stack": 4}}
PUBLISHED = {  # Schulman et al., 2017; Mnih et al., 2016; the constants that Stable-Baselines3 has for Atari
    "ppo": {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.1, "ent_coef": 0.01},
    "a2c": {"num_steps": 5, "ent_coef": 0.01, "vf_coef": 0.25, "optimizer": "rmsprop_tf"},
    "dqn": {"batch_size": 32, "learning_rate": 1e-4, "target_update_interval": 10_000, "n_step": 1, "double": False},
}


def in_force(config):
    return Controls.of(config, ALGORITHMS[config.algo].recipe.hyperparameters).at(0)


@pytest.mark.parametrize("algo", PUBLISHED)
def test_atari_has_the_published_constants_and_other_tasks_have_their_own(algo):
    hp = in_force(TrainConfig(algo, "ALE/Pong-v5", 1_000_000, env_kwargs=ATARI))
    assert {name: getattr(hp, name) for name in PUBLISHED[algo]} == PUBLISHED[algo]
    other = in_force(TrainConfig(algo, "CartPole-v1", 1_000_000))
    assert {name: getattr(other, name) for name in PUBLISHED[algo]} != PUBLISHED[algo]


def test_what_a_config_gives_stands_above_the_constants_of_atari():
    config = TrainConfig("ppo", "ALE/Pong-v5", 1_000_000, env_kwargs=ATARI, algo_kwargs={"clip_coef": 0.3})
    assert in_force(config).clip_coef == 0.3


def test_the_exploration_of_atari_takes_its_own_share_of_training():
    kwargs = {"env_kwargs": ATARI}
    at = [
        Controls.of(config, ALGORITHMS["dqn"].recipe.hyperparameters).at(100_000).epsilon
        for config in (TrainConfig("dqn", "x", 1_000_000, **kwargs), TrainConfig("dqn", "x", 1_000_000))
    ]
    assert at == pytest.approx([0.05, 0.525], abs=1e-4)  # over the first tenth, over the first fifth


@pytest.mark.parametrize(
    ("algo", "wrappers", "expected"),
    [
        ("ppo", {}, {"normalize_reward": True}),
        ("a2c", {"time_limit": 9}, {"normalize_observation": True, "normalize_reward": True}),
        ("a2c", {"normalize_observation": False}, {"normalize_reward": True}),
        ("ppo", {"normalize_reward": False}, {}),
        ("ppo", {"atari": True, "frame_stack": 4}, {}),
        ("trpo", {}, {"normalize_reward": True}),
        ("dqn", {}, {}),
    ],
)
def test_what_an_algorithm_prefers_is_normalised_where_nothing_else_is_said(algo, wrappers, expected):
    config = TrainConfig(algo, "CartPole-v1", 100, env_kwargs={"wrappers": wrappers, "length": 3})
    full = with_env_defaults(config, ALGORITHMS[algo].recipe).env_kwargs
    assert full["wrappers"] == wrappers | expected
    assert full["length"] == 3


def test_a_run_says_that_its_rewards_are_normalised_and_a_policy_needs_to_know_nothing_of_it(tiny_config):
    result = train(tiny_config("ppo"), progress="silent")
    saved = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    assert saved["env_kwargs"] == {"wrappers": {"normalize_reward": True}}
    assert result.metrics["train_return_mean"] > 5  # the environment's own reward
    assert load_policy(result.run_dir).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_config_show_spells_it_out(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("algo: ppo\nenv_id: CartPole-v1\ntotal_timesteps: 100\n")
    assert yaml.safe_load(cli("config", "show", path))["env_kwargs"] == {"wrappers": {"normalize_reward": True}}


@pytest.mark.parametrize("name", ["normalize_observation", "normalize_reward"])
def test_the_help_names_the_algorithms_that_normalise(name):
    text = Wrappers.model_fields[name].description
    assert {algo for algo in ALGORITHMS if re.search(rf"\b{algo}\b", text)} == {
        algo for algo, entry in ALGORITHMS.items() if name in entry.recipe.normalizes
    }
