"""Search spaces: what is drawn, what is refused, and the spaces that are made from a config."""

from __future__ import annotations

import math
from typing import Any

import pytest

from conftest import ENVS
from rl_training import ALGORITHMS
from rl_training.errors import ConfigError
from rl_training.runtime.loading import build_config
from rl_training.runtime.search_space import Space
from rl_training.studies.default_space import MOST, default_space
from test_cli import cli

PPO = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 1_000}
RATE = "algo_kwargs.learning_rate"


class Draws:
    """A trial that takes the given parameters and else the lowest value or first choice. It notes what it was asked."""

    def __init__(self, **params: Any) -> None:
        self.params = {name.replace("__", "."): value for name, value in params.items()}
        self.asked: dict[str, tuple[Any, ...]] = {}

    def suggest_float(self, name: str, low: float, high: float, *, step: Any = None, log: bool = False) -> float:
        self.asked[name] = ("float", low, high, step, log)
        return self.params.get(name, low)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        self.asked[name] = ("int", low, high, step, log)
        return self.params.get(name, low)

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self.asked[name] = ("choice", *choices)
        return self.params.get(name, choices[0])


def drawn(spec: dict[str, Any], trial: Draws | None = None, algo: str = "ppo", **data: Any) -> dict[str, Any]:
    return Space(spec, algo).apply({**PPO, "algo": algo, **data}, trial or Draws())


def test_each_form_asks_for_its_distribution() -> None:
    trial = Draws()
    spec = {
        "algo_kwargs.learning_rate": {"log": [1e-5, 1e-2]},
        "algo_kwargs.gamma": {"uniform": [0.9, 1.0], "step": 0.05},
        "algo_kwargs.update_epochs": {"int": [2, 10], "step": 2},
        "algo_kwargs.num_steps": {"int_log": [16, 256]},
        "algo_kwargs.hidden_sizes": {"choice": [[32], [64, 64]]},
        "num_envs": {"choice": [4, 8]},
        "env_kwargs.wrappers.time_limit": {"int": [100, 200]},
    }
    config = drawn(spec, trial)
    assert trial.asked == {
        "algo_kwargs.learning_rate": ("float", 1e-5, 1e-2, None, True),
        "algo_kwargs.gamma": ("float", 0.9, 1.0, 0.05, False),
        "algo_kwargs.update_epochs": ("int", 2, 10, 2, False),
        "algo_kwargs.num_steps": ("int", 16, 256, 1, True),
        "algo_kwargs.hidden_sizes": ("choice", "[32]", "[64, 64]"),
        "num_envs": ("choice", 4, 8),
        "env_kwargs.wrappers.time_limit": ("int", 100, 200, 1, False),
    }
    assert config["algo_kwargs"]["hidden_sizes"] == [32]
    assert (config["num_envs"], config["env_kwargs"]) == (4, {"wrappers": {"time_limit": 100}})
    build_config({**PPO, "tune": spec})


def test_the_config_itself_is_left_as_it_was() -> None:
    data = {**PPO, "algo_kwargs": {"gamma": 0.5, "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0}}}
    config = Space({"algo_kwargs.gamma": {"uniform": [0.9, 1.0]}}, "ppo").apply(data, Draws())
    assert (config["algo_kwargs"]["gamma"], data["algo_kwargs"]["gamma"]) == (0.9, 0.5)
    assert config["algo_kwargs"]["learning_rate"]["kind"] == "linear"


SCHEDULE = {"kind": ["constant", "linear", "cosine"], "start": {"log": [1e-4, 1e-2]}, "end": {"uniform": [0, 1e-4]}}


@pytest.mark.parametrize("kind", SCHEDULE["kind"])
def test_of_a_schedule_are_drawn_the_kind_and_the_entries_that_it_has(kind: str) -> None:
    trial = Draws(algo_kwargs__learning_rate__kind=kind, algo_kwargs__learning_rate__start=2e-3)
    config = drawn({RATE: SCHEDULE}, trial)
    end = {} if kind == "constant" else {"end": 0}
    assert config["algo_kwargs"]["learning_rate"] == {"kind": kind, "start": 2e-3, **end}
    assert (f"{RATE}.end" in trial.asked) == bool(end)
    build_config(config)


def test_a_fixed_kind_and_nested_entries() -> None:
    space = {"kind": "linear", "start": {"choice": [0.1, 0.2]}, "end": 0, "warmup": {"steps": {"choice": ["5%", 100]}}}
    trial = Draws()
    config = drawn({"algo_kwargs.ent_coef": space}, trial)
    assert config["algo_kwargs"]["ent_coef"] == {"kind": "linear", "start": 0.1, "end": 0, "warmup": {"steps": "5%"}}
    assert list(trial.asked) == ["algo_kwargs.ent_coef.start", "algo_kwargs.ent_coef.warmup.steps"]


def test_a_hyperparameter_is_drawn_only_where_it_has_an_effect() -> None:
    """target_entropy is of the learned temperature: where alpha is a number, nothing reads it."""
    spec = {"algo_kwargs.target_entropy": {"uniform": [-2, 0]}, "algo_kwargs.alpha": {"choice": ["auto", 0.2]}}
    for alpha in ("auto", 0.2):
        trial = Draws(algo_kwargs__alpha=alpha)
        config = drawn(spec, trial, "sac", env_id="Pendulum-v1")
        assert ("target_entropy" in config["algo_kwargs"]) == (alpha == "auto")
        assert ("algo_kwargs.target_entropy" in trial.asked) == (alpha == "auto")


def test_the_values_of_the_config_are_parameters_of_the_space() -> None:
    spec = {
        RATE: SCHEDULE,
        "algo_kwargs.ent_coef": SCHEDULE,
        "algo_kwargs.gamma": {"choice": [0.9, 0.99]},
        "algo_kwargs.num_steps": {"int_log": [8, 64]},
        "algo_kwargs.hidden_sizes": {"choice": [[32], [64, 64]]},
        "algo_kwargs.clip_coef": {"uniform": [0.3, 0.4]},
        "algo_kwargs.update_epochs": {"int": [2, 10], "step": 2},
    }
    kwargs = {"learning_rate": 3e-4, "ent_coef": {"kind": "linear", "start": 1e-3, "end": 0}, "num_steps": 32,
              "clip_range": 0.35, "update_epochs": 5}  # fmt: skip
    found = Space(spec, "ppo").params_of({**PPO, "algo_kwargs": kwargs})
    assert found == {
        "algo_kwargs.learning_rate.kind": "constant",
        "algo_kwargs.learning_rate.start": 3e-4,
        "algo_kwargs.ent_coef.kind": "linear",
        "algo_kwargs.ent_coef.start": 1e-3,
        "algo_kwargs.ent_coef.end": 0.0,
        "algo_kwargs.gamma": 0.99,  # the default
        "algo_kwargs.num_steps": 32,
        "algo_kwargs.hidden_sizes": "[64, 64]",
        "algo_kwargs.clip_coef": 0.35,  # under its other name; 5 epochs are between two steps
    }


WRONG = [
    ({"algo_kwargs.gamma": 0.9}, r"0.9 is no distribution: write it into the config itself"),
    ({"algo_kwargs.gamma": [0.9, 0.99]}, r"no distribution: write \{choice: "),
    ({"algo_kwargs.gamma": {"unifrom": [0, 1]}}, r"should be one distribution; did you mean 'uniform'\?"),
    ({"algo_kwargs.gamma": {"log": [0, 1]}}, r"log takes numbers above 0"),
    ({"algo_kwargs.gamma": {"uniform": [1, 0]}}, r"low < high"),
    ({"algo_kwargs.gamma": {"uniform": [0, math.inf]}}, r"two numbers \[low, high\]"),
    ({"algo_kwargs.gamma": {"uniform": [0.5, 0.9], "step": 0.5}}, r"step should be above 0 and at most high - low"),
    ({"algo_kwargs.gamma": {"log": [0.5, 0.9], "step": 0.1}}, r"log does not take 'step'"),
    ({"algo_kwargs.update_epochs": {"int": [1.5, 3]}}, r"int takes whole numbers"),
    ({"algo_kwargs.gamma": {"choice": [0.9]}}, r"at least two values"),
    ({"algo_kwargs.gamma": {"choice": [0.9, 0.9]}}, r"has 0.9 twice"),
    ({"learning_rate": {"log": [1e-4, 1e-3]}}, r"did you mean 'algo_kwargs.learning_rate'\?"),
    ({"seed": {"int": [0, 9]}}, r"is not tuned: each trial is the mean of its seeds, see --seeds"),
    ({"total_timesteps": {"int": [1, 9]}}, r"cannot be tuned, only keys of algo_kwargs"),
    ({"algo_kwargs": {"int": [1, 9]}}, r"should name one key"),
    ({"algo_kwargs.ent_coef": {"kind": "linaer", "start": 1}}, r"linaer"),
    ({"algo_kwargs.ent_coef": {"kind": "linear", "strat": 1}}, r"linear has no key 'strat'; did you mean 'start'\?"),
    ({"num_envs": {"kind": "linear", "start": 1}}, r"only a hyperparameter in algo_kwargs can be a schedule"),
    ({"algo_kwargs.gama": {"uniform": [0.9, 1]}}, r"did you mean 'gamma'\?"),
    ({"algo_kwargs.gamma": {"uniform": [0.9, 1.5]}}, r"algo_kwargs.gamma: .*1.5"),
    (
        {RATE: {"kind": ["constant", "linear"], "start": {"uniform": [0, 1]}, "end": {"uniform": [-1, 1]}}},
        r"should be >= 0, got -0.001",
    ),
]


@pytest.mark.parametrize(("spec", "message"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_what_is_wrong_with_a_space_is_said_before_anything_is_trained(spec: dict[str, Any], message: str) -> None:
    """The extreme values of each key and each choice make a config that is checked as any other."""
    config = {**PPO, "num_envs": 2, "algo_kwargs": {"num_steps": 16}}
    with pytest.raises(ConfigError, match=message) as caught:
        build_config({**config, "tune": spec})
    assert all(problem.path[0] == "tune" for problem in caught.value.problems)


def test_a_key_and_a_part_of_it_are_not_tuned_at_once() -> None:
    spec = {
        "env_kwargs.wrappers": {"choice": [{}, {"time_limit": 9}]},
        "env_kwargs.wrappers.time_limit": {"int": [1, 9]},
    }
    with pytest.raises(ConfigError, match=r"as a whole, and env_kwargs.wrappers.time_limit as a part"):
        build_config({**PPO, "tune": spec})


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_every_algorithm_has_a_space_around_its_own_values(algo: str) -> None:
    """It is valid at its ends and has what the config says: the search begins there."""
    data = {"algo": algo, "env_id": ENVS[algo], "total_timesteps": 10_000}
    spec = default_space(build_config(data))
    assert 3 <= len(spec) <= MOST
    assert any("learning_rate" in key or "max_kl" in key for key in spec)
    build_config({**data, "tune": spec})
    params = Space(spec, algo).params_of(data)
    missing = [key for key in spec if not any(name == key or name.startswith(f"{key}.") for name in params)]
    assert not [key for key in missing if key not in ("algo_kwargs.ent_coef", "algo_kwargs.gradient_penalty")], missing


def test_the_space_of_a_config_with_schedules_keeps_them() -> None:
    kwargs = {
        "lr": {"kind": "cosine", "start": 1e-3, "end": 1e-5},
        "clip_coef_schedule": {"kind": "linear", "start": 0.2, "end": 0},
    }
    spec = default_space(build_config({**PPO, "algo_kwargs": {"learning_rate": kwargs["lr"]}}))
    assert spec[RATE] == {"kind": "cosine", "start": {"log": [1e-4, 1e-2]}, "end": 1e-5}
    kwargs.pop("lr")
    assert "algo_kwargs.clip_coef" not in default_space(build_config({**PPO, "algo_kwargs": kwargs}))


def test_the_command_shows_the_space_as_yaml_to_edit(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("algo: ppo\nenv_id: CartPole-v1\ntotal_timesteps: 1000\n")
    text = cli("tune", path, "--show-space")
    path.write_text(path.read_text() + text)
    assert text.startswith("tune:\n  algo_kwargs.learning_rate:")
    assert cli("tune", path, "--show-space") == text
    assert "cannot be tuned" in cli("tune", path, "--show-space", "--set", "tune={gamma: {uniform: [0, 1]}}", code=2)
