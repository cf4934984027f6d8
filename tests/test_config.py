"""YAML files: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from conftest import REPOSITORY
from rl_training import ConfigError, TrainConfig, load_config, train
from rl_training.errors import read_document
from rl_training.runtime.schema import json_schema, reference

GOOD = """\
algo: ppo
env_id: CartPole-v1
total_timesteps: 1_000_000
algo_kwargs:
  learning_rate: 3e-4
  clip_coef: {kind: linear, start: 2e-1, end: 0}
"""
CONFIGS = sorted((REPOSITORY / "configs").glob("*/*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def problems(path, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)
    return str(caught.value).splitlines()


def test_numbers_as_people_write_them(write):
    config = load_config(write(GOOD))
    assert config.total_timesteps == 1_000_000
    assert config.algo_kwargs["learning_rate"] == 3e-4
    assert config.algo_kwargs["clip_coef"]["start"] == 0.2
    assert load_config(write(GOOD.replace("1_000_000", "1e6"))).total_timesteps == 1_000_000


def test_defaults_and_types():
    config = TrainConfig("ppo", "CartPole-v1", 1000, output_dir="somewhere")
    assert config.output_dir == Path("somewhere")
    assert (config.seed, config.device, config.num_threads, config.tags) == (0, "auto", "auto", [])


@pytest.mark.parametrize(
    ("line", "number", "expected"),
    [
        ("nmu_envs: 4", 7, "nmu_envs: unknown key; did you mean 'num_envs'?"),
        ("num_envs: four", 7, "num_envs: should be a number, got 'four'"),
        ("num_envs: true", 7, "num_envs: should be a number, got True"),
        ("num_envs: 2.5", 7, "num_envs:"),
        ("num_envs: 0", 7, "num_envs: should be greater than or equal to 1, got 0"),
        ("device: gpu", 7, "device: should be auto, cpu, cuda, cuda:<index> or mps, got 'gpu'"),
        ("env_kwargs: {backend: sinc}", 7, "env_kwargs.backend:"),
        ("env_kwargs: {wrappers: {frame_stak: 4}}", 7, "unknown key; did you mean 'frame_stack'?"),
        ("env_kwargs: {wrappers: {atari: {nop_max: 3}}}", 7, "unknown key; did you mean 'noop_max'?"),
        ("callbacks: {early_stopping: {targt: 3}}", 7, "unknown key; did you mean 'target'?"),
        ("callbacks: {early_stoping: {target: 3}}", 7, "unknown key; did you mean 'early_stopping'?"),
        ("callbacks: {early_stopping: {}}", 7, "needs target or patience"),
    ],
)
def test_errors_name_file_line_key_value_and_remedy(write, line, number, expected):
    path = write(GOOD + line + "\n")
    found = problems(path)
    assert all(problem.startswith(f"{path}, line {number}: ") for problem in found), found
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("algo: ppo", "algo: pppo", "line 1: algo: unknown algorithm 'pppo'; did you mean 'ppo'?"),
        ("CartPole-v1", "CartPol-v1", "line 2: env_id: no environment 'CartPol-v1'"),
        ("CartPole-v1", "CartPol-v1", "did you mean 'CartPole-v1'"),
        ("total_timesteps: 1_000_000\n", "", "total_timesteps: is missing"),
        ("learning_rate", "learning_rat", "line 5: algo_kwargs.learning_rat: unknown hyperparameter; did you mean"),
        ("linear", "liner", "line 6: algo_kwargs.clip_coef: unknown schedule kind 'liner'; did you mean 'linear'?"),
        ("end: 0", "end: -1", "line 6: algo_kwargs.clip_coef: should be >= 0"),
        ("algo_kwargs:", "algo_kwargs: 3\nrest:", "algo_kwargs: should be"),
    ],
)
def test_errors_in_the_rest_of_the_file(write, old, new, expected):
    assert any(expected in problem for problem in problems(write(GOOD.replace(old, new))))


def test_everything_wrong_is_reported_at_once(write):
    text = GOOD.replace("CartPole-v1", "Nope-v0").replace("3e-4", "-1").replace("end: 0", "edn: 0") + "sede: 3\n"
    assert len(problems(write(text))) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algo: [ppo", "line 1"),
        ("- a\n- b", "a config is a mapping"),
        ("algo: ppo\nalgo: a2c\n", "line 2: key 'algo' is given twice, first in line 1"),
        ("algo: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("", "algo: is missing"),
    ],
)
def test_what_is_no_config_is_said_so(write, text, expected):
    assert expected in "\n".join(problems(write(text)))


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    (tmp_path / "cartpole.yaml").write_text(GOOD)
    assert "did you mean 'cartpole.yaml'?" in problems(tmp_path / "cartpol.yaml")[0]


def test_overrides_reach_any_key(write):
    overrides = ["algo_kwargs.clip_coef=0.1", "seed=7", "env_kwargs.wrappers.time_limit=9", "tags=[a, b]"]
    config = load_config(write(GOOD), overrides=overrides)
    assert config.algo_kwargs["clip_coef"] == 0.1
    assert config.seed == 7
    assert config.env_kwargs == {"wrappers": {"time_limit": 9}}
    assert config.tags == ["a", "b"]
    assert "takes key=value" in problems(write(GOOD), overrides=["seed"])[0]
    assert "did you mean 'clip_coef'" in problems(write(GOOD), overrides=["algo_kwargs.clip_ceof=1"])[0]


def test_an_env_id_with_a_module_can_be_refused(write, tmp_path, monkeypatch):
    path = write(GOOD.replace("CartPole-v1", "my_envs:Mine-v0"))
    assert "--allow-import" in problems(path, allow_import=False)[0]
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_config(path).env_id == "my_envs:Mine-v0"


def test_a_config_made_in_python_is_checked_too(tmp_path):
    config = TrainConfig("ppo", "CartPole-v1", 100, output_dir=tmp_path, algo_kwargs={"clip_ceof": 1})
    with pytest.raises(ConfigError, match="did you mean 'clip_coef'"):
        train(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_configs_are_valid_here_and_in_an_editor(path):
    config = load_config(path)
    assert path.parent.name == config.algo
    jsonschema.validate(read_document(path.read_text(), path.name).data, json_schema())


@pytest.mark.parametrize(
    "bad",
    [
        {"nope": 1},
        {"algo": "pppo"},
        {"num_envs": 0},
        {"algo_kwargs": {"clip_ceof": 1}},
        {"algo_kwargs": {"gamma": 2}},
        {"algo_kwargs": {"gamma": {"kind": "liner"}}},
        {"algo_kwargs": {"gamma": {"kind": "linear", "strat": 1}}},
        {"env_kwargs": {"wrappers": {"frame_stak": 3}}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(bad):
    data = read_document(GOOD, "good").data | bad
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, json_schema())


def test_the_schema_takes_every_way_to_write_a_schedule():
    ways = {
        "clip_range": 0.2,
        "clip_range_schedule": "cosine",
        "clip_range_warmup_steps": "5%",
        "ent_coef": [{"kind": "linear", "start": 0.1, "duration": "10%"}, {"type": "constant", "value": 0.1}],
        "learning_rate_schedule": {"kind": "piecewise", "points": [[0, 1.0], ["50%", 0.5]]},
        "gamma": {"kind": "step", "start": 0.9, "milestones": ["50%"], "warmup": {"steps": 10, "from": 0.5}},
        "target_kl": None,
    }
    jsonschema.validate(read_document(GOOD, "good").data | {"algo_kwargs": ways}, json_schema())
    json.dumps(json_schema())


def test_the_reference_is_up_to_date():
    assert (REPOSITORY / "docs" / "config.md").read_text() == reference(), "run: make docs"


def test_the_saved_config_is_complete_and_trains_the_same(tiny_config, tmp_path):
    result = train(tiny_config("ppo", clip_range_schedule="linear"), progress="silent")
    saved = load_config(result.run_dir / "config.yaml")
    data = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    assert data["algo_kwargs"]["clip_coef"] == {"kind": "linear", "start": 0.2, "end": 0.0}
    assert data["algo_kwargs"]["gamma"] == 0.99
    again = train(saved, progress="silent")
    assert again.metrics["policy_loss"] == result.metrics["policy_loss"]


def test_more_lines_are_named(write):
    points = "  ent_coef:\n    kind: piecewise\n    points:\n      - [0, 0.1]\n      - [nope, 0.2]\n"
    assert any("line 11: algo_kwargs.ent_coef.points.1" in p for p in problems(write(GOOD + points)))
    assert "num_steps: should be a number, got True" in problems(write(GOOD + "  num_steps: true\n"))[0]
    assert "'cuda:99' is not available" in problems(write(GOOD + "device: cuda:99\n"))[0]


def test_an_override_leaves_its_neighbours_and_stands_on_no_line(write):
    config = load_config(write(GOOD), overrides=["algo_kwargs.gamma=0.9"])
    assert config.algo_kwargs.keys() == {"gamma", "learning_rate", "clip_coef"}
    (problem,) = problems(write(GOOD), overrides=["algo_kwargs.learning_rate=-1"])
    assert "line 5" not in problem


@pytest.mark.parametrize(
    "line",
    ["Seed: 3", "int: 3", "env_kwargs: {wrappers: {Time_limit: 3}}", "callbacks: {Early_stopping: {target: 1}}"],
)
def test_a_key_that_looks_like_a_type_is_an_unknown_key(write, line):
    assert "unknown key" in problems(write(GOOD + line + "\n"))[0]


@pytest.mark.parametrize("override", ["tags=[a", "seed=%", "seed=*x"])
def test_an_override_that_is_no_yaml_is_named(write, override):
    assert problems(write(GOOD), overrides=[override])[0].startswith(f"--set {override}")


def test_an_error_in_an_override_names_the_override(write):
    for override in ("algo_kwargs.gamma=2", "algo_kwargs={learning_rate: -1}"):
        assert problems(write(GOOD), overrides=[override])[0].startswith(f"--set {override}: ")


@pytest.mark.parametrize(
    "text",
    ["a: \0", "? [a]\n: 1", "seed: 2020-13-45", "seed: !!int abc", "a: &x [*x]", "algo_kwargs: " + "[" * 2000],
)
def test_strange_yaml_is_refused_without_a_crash(write, text):
    assert problems(write(text))


def test_merge_keys_and_aliases_are_read(write):
    text = GOOD + "env_kwargs: &e {wrappers: {time_limit: 9}}\ncallbacks: {<<: {time_limit: {minutes: 1}}}\n"
    assert load_config(write(text)).callbacks == {"time_limit": {"minutes": 1}}


@pytest.mark.parametrize("lines", ["", "eval_interval: 2_000_000\n"])
def test_early_stopping_without_evaluations_is_refused(write, lines):
    text = GOOD + lines + "callbacks: {early_stopping: {target: 1}}\n"
    assert any("set eval_interval" in problem for problem in problems(write(text)))


@pytest.mark.parametrize(
    "line",
    [
        "total_timesteps: .inf",
        "num_threads: 100000",
        "device: meta",
        "env_kwargs: {wrappers: {normalize_observation: 'yes'}}",
        "callbacks: {early_stopping: {target: .nan}}",
        "algo_kwargs: {clip_coef: {kind: linear, duration: [1]}}",
        "algo_kwargs: {clip_coef: {kind: [linear]}}",
        "algo_kwargs: {clip_coef: {kind: step, factor: 1e10, every: 1}}",
    ],
)
def test_values_that_make_no_sense_are_refused(write, line):
    key = line.split(":")[0]
    kept = [old for old in GOOD.split("algo_kwargs")[0].splitlines() if not old.startswith(key)]
    assert key in problems(write("\n".join([*kept, line])))[0]
