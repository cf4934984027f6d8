"""Several environments in one run, with an algorithm made for these tests: what is asked for, kept, logged and given
back."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import gymnasium as gym
import numpy as np
import pytest
import yaml

from fake_multi_task import FAKE, FAKE_RECIPE
from rl_training import (
    ALGORITHMS,
    ConfigError,
    TrainConfig,
    evaluate_checkpoint,
    load_config,
    load_policy,
    predict_checkpoint,
    resume_training,
    train,
)
from rl_training.envs.runner import EnvRunner, FinishedEpisode
from rl_training.errors import InputError
from rl_training.runtime import evaluation, sources
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.metrics import over_tasks
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.run_folder import make_run_dir
from rl_training.runtime.schema import json_schema, reference
from rl_training.types import Spaces
from smoke import check_run
from test_checkpoint_workflows import stop_at
from test_cli import cli
from test_contract import assert_equal_state, assert_same_future

PAIR = ["CartPole-v1", "Acrobot-v1"]
SHORT = {"CartPole-v1": {"wrappers": {"time_limit": 6}}, "Acrobot-v1": {"wrappers": {"time_limit": 9}}}
NORMALISED = {
    "CartPole-v1": {"wrappers": {"time_limit": 7, "normalize_observation": True, "normalize_reward": True}},
    "Acrobot-v1": {"wrappers": {"time_limit": 9}},
}


@pytest.fixture
def none_for_several(monkeypatch):
    for name in [name for name, entry in ALGORITHMS.items() if entry.recipe.multi_task]:
        monkeypatch.delitem(ALGORITHMS, name)


@pytest.fixture
def make(tmp_path, monkeypatch, none_for_several):
    """`make(total_timesteps=64, target=1.0)`: a config for two tasks; what TrainConfig lacks is the algorithm's."""
    monkeypatch.setitem(ALGORITHMS, "fake", FAKE)

    def make(**changes):
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        values = {"env_id": PAIR, "total_timesteps": 240, "num_envs": 2, "eval_episodes": 2, "env_kwargs": SHORT}
        values |= {"output_dir": tmp_path / "runs", "device": "cpu"}
        kwargs = {key: value for key, value in changes.items() if key not in known}
        values |= {key: value for key, value in changes.items() if key in known}
        return TrainConfig("fake", algo_kwargs=kwargs, **values)

    return make


def quiet(config, **options):
    return train(config, progress="silent", **options)


def look(into):
    """A callback that keeps the run to look at."""
    return lambda run: into.__setitem__("run", run)


def test_a_run_in_two_environments(make):
    seen = {}
    result = quiet(make(), callbacks=[look(seen)])
    check_run(result, make())
    actor, source = seen["run"].actor, seen["run"].source
    assert result.metrics["global_step"] == 240
    assert [task.acted for task in actor.actors] == [60, 60]  # 2 environments of each task, 2 tasks
    assert result.metrics["gradient_steps"] == 60
    assert [spaces.observation.shape for spaces in actor.spaces] == [(4,), (6,)]
    assert [seen["run"].parts[f"replay_{i}"].added for i in range(2)] == [120, 120]
    assert source.names == PAIR
    first, second = source.runners
    assert first.rng.bit_generator.state != second.rng.bit_generator.state
    assert first.envs.envs[0].get_wrapper_attr("seed") != second.envs.envs[0].get_wrapper_attr("seed")


def test_every_task_has_its_numbers_and_the_plain_names_are_means(make):
    metrics = quiet(make()).metrics
    assert [metrics[f"train_length_mean/{name}"] for name in PAIR] == [6, 9]
    assert [metrics[f"eval_return_mean/{name}"] for name in PAIR] == [6, -9]
    assert (metrics["train_length_mean"], metrics["eval_return_mean"]) == (7.5, -1.5)
    assert [metrics[f"eval_return_{what}/{PAIR[1]}"] for what in ("std", "min")] == [0, -9]
    assert (metrics["eval_return_std"], metrics["eval_return_min"], metrics["eval_episodes"]) == (0, -1.5, 2)


def test_a_mean_is_of_the_tasks_that_have_the_number():
    both = over_tasks({"a": {"x": 1.0}, "b": {"x": 3.0, "eval_win_rate": 0.5}})
    assert both == {"x": 2.0, "eval_win_rate": 0.5, "x/a": 1.0, "x/b": 3.0, "eval_win_rate/b": 0.5}


def test_a_mean_over_tasks_waits_for_all_of_them(make):
    seen = []
    note = lambda run: seen.append(dict(run.metrics))  # noqa: E731
    quiet(make(log_interval=4), callbacks=[note])
    between = next(metrics for metrics in seen if metrics["global_step"] == 28)  # 7 steps of each environment
    assert between["train_length_mean/CartPole-v1"] == 6
    assert math.isnan(between["train_length_mean/Acrobot-v1"])
    assert math.isnan(between["train_length_mean"])


@pytest.mark.parametrize("target", [None, 7.0])
def test_resume_is_exact(make, target):
    """With normalisers in one task, a ring that has come round and, with a target, a task that is finished half way."""
    options = {
        "env_kwargs": NORMALISED,
        "eval_interval": 96,
        "target": target,
        "total_timesteps": 800,
        "learning_rate": {"kind": "linear", "start": 0.02, "end": 0.0},
    }
    whole, half = quiet(make(**options)), quiet(make(**options), callbacks=[stop_at(402)])
    assert 402 <= half.metrics["global_step"] < 800
    resumed = resume_training(half.run_dir, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics.keys() == whole.metrics.keys()
    for name in whole.metrics.keys() - {"steps_per_second"}:
        assert resumed.metrics[name] == pytest.approx(whole.metrics[name], nan_ok=True, abs=0), name
    state = load_checkpoint(whole.checkpoint_path).state
    replays = {"replay_0", "replay_1"}
    assert state.keys() == {"actor", "learner", "controls", "normalizer", "runner", "run"} | replays
    assert state["normalizer"].keys() == {"0"}
    assert state["learner"]["finished"] == ([] if target is None else [0])


def test_a_checkpoint_of_the_step_of_an_evaluation_holds_what_was_made_of_it(make):
    config = make(eval_interval=96, checkpoint_interval=96, keep_checkpoints=0, target=6.0)
    run_dir = quiet(config).run_dir
    assert load_checkpoint(run_dir / "checkpoints" / "step_96").state["learner"]["finished"] == [0]


def test_a_finished_task_is_left_alone(make):
    seen = {}
    metrics = quiet(make(eval_interval=96, target=6.0), callbacks=[look(seen)]).metrics
    learner = seen["run"].learner
    assert learner.scores[0] == {0: 6.0, 1: -9.0}
    assert [task.acted for task in learner.actor.actors] == [24, 24 + (240 - 96) // 2]
    assert metrics["eval_return_mean/CartPole-v1"] == 6  # evaluated all the same


def test_a_run_ends_when_every_task_is_finished(make):
    result = quiet(make(eval_interval=96, target=-20.0))
    assert result.metrics["global_step"] == 96
    assert "every task is finished" in json.loads((result.run_dir / "metadata.json").read_text())["status"]


def test_one_environment_is_a_task_like_any_other(make):
    seen = {}
    config = make(env_id="CartPole-v1", env_kwargs={"wrappers": {"time_limit": 6}}, eval_interval=96)
    result = quiet(config, callbacks=[look(seen)])
    assert len(seen["run"].actor.spaces) == 1
    assert seen["run"].learner.scores[0] == {0: 6.0}
    assert not [name for name in result.metrics if "/" in name]
    assert load_checkpoint(result.checkpoint_path).state.keys() == {
        "actor",
        "learner",
        "controls",
        "runner",
        "replay_0",
        "run",
    }
    assert load_policy(result.run_dir).act(np.zeros(4, np.float32)) in (0, 1)
    assert evaluate_checkpoint(result.run_dir, task="CartPole-v1")["eval_return_mean"] == 6


def test_evaluate_all_tasks_or_one(make):
    result = quiet(make(env_kwargs=NORMALISED, eval_env_kwargs={"Acrobot-v1": {"wrappers": {"time_limit": 5}}}))
    metrics = evaluate_checkpoint(result.run_dir)
    assert metrics == {name: value for name, value in result.metrics.items() if name.startswith("eval_")}
    assert metrics["eval_return_mean/Acrobot-v1"] == -5
    one = evaluate_checkpoint(result.run_dir, task="Acrobot-v1", num_episodes=3)
    assert one == {"eval_return_mean": -5, "eval_return_std": 0, "eval_return_min": -5, "eval_episodes": 3}


def test_a_policy_is_that_of_its_task(make):
    result = quiet(make(env_kwargs=NORMALISED))
    first, second = (load_policy(result.run_dir, task=name) for name in PAIR)
    assert first.normalizer is not None
    assert second.normalizer is None
    runner = load_checkpoint(result.checkpoint_path).state["runner"]
    assert first.normalizer.observation(np.zeros((1, 4), np.float32)).any()
    obs = runner["1"]["obs"]
    assert np.array_equal(second.act(obs), (obs @ second.actor.owner.model[1].numpy()).argmax(-1))
    assert np.array_equal(predict_checkpoint(result.run_dir, obs, task="Acrobot-v1"), second.act(obs))
    assert len({int(second.act(obs, deterministic=False)[0]) for _ in range(50)}) > 1


def test_every_task_normalises_by_its_own_statistics(make):
    seen = {}
    wrappers = {"normalize_observation": True, "normalize_reward": True, "time_limit": 9}
    result = quiet(make(env_kwargs={"wrappers": wrappers}), callbacks=[look(seen)])
    run = seen["run"]
    saved = load_checkpoint(result.checkpoint_path).state["normalizer"]
    for i, runner in enumerate(run.source.runners):
        assert run.parts[f"replay_{i}"].scaling is runner.normalizer
        policy = load_policy(result.run_dir, task=PAIR[i])
        assert_equal_state(policy.normalizer.state_dict()["observation"], saved[str(i)]["observation"])
        assert_equal_state(policy.normalizer.state_dict()["reward"], saved[str(i)]["reward"])


def test_which_task_must_be_said(make):
    run_dir = quiet(make()).run_dir
    with pytest.raises(InputError, match="for each of its tasks: give task, one of CartPole-v1, Acrobot-v1"):
        load_policy(run_dir)
    with pytest.raises(InputError, match="no task 'Acrobt-v1'; did you mean 'Acrobot-v1'"):
        predict_checkpoint(run_dir, np.zeros(6), task="Acrobt-v1")
    with pytest.raises(InputError, match="no task 'Pendulum-v1'"):
        evaluate_checkpoint(run_dir, task="Pendulum-v1")


def test_spaces_that_evaluation_would_change_name_their_task(make):
    kwargs = {"Acrobot-v1": {"wrappers": {"frame_stack": 2}}}
    with pytest.raises(InputError, match="Acrobot-v1 has observations"):
        quiet(make(eval_env_kwargs=kwargs))


def test_evaluating_leaves_training_alone(make):
    never, often = quiet(make()), quiet(make(eval_interval=16))
    one, other = (load_checkpoint(result.checkpoint_path).state["actor"]["model"] for result in (never, often))
    assert all((one[key] == other[key]).all() for key in one)


EPISODES = [FinishedEpisode(0, 1.0, 9)]


def test_an_interrupt_during_an_evaluation_is_heeded_between_tasks(make):
    asked = []
    config = make()
    spaces = Spaces(gym.spaces.Discrete(2), gym.spaces.Discrete(2))
    players = [evaluation.Player(None, spaces, None, "clip")] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            evaluation, "play", lambda *given, **_: asked.append(given[2]) or (EPISODES if len(asked) < 2 else None)
        )
        assert evaluation.evaluate(players, config) is None
    assert asked == [0, 1]


class Forgetful(gym.Env):
    """Draws from no generator that a seed could set."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.frombuffer(os.urandom(2), np.uint8).astype(np.float32) / 255, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


def test_the_task_whose_environments_cannot_be_restored_is_named(make, capsys):
    if "ForgetfulTask-v0" not in gym.registry:
        gym.register("ForgetfulTask-v0", entry_point=Forgetful, max_episode_steps=50)
    result = quiet(make(env_id=["CartPole-v1", "ForgetfulTask-v0"], env_kwargs={}))
    resumed = resume_training(result.run_dir, total_timesteps=320, progress="plain")
    assert "all environments of ForgetfulTask-v0 cannot give back their state" in capsys.readouterr().out
    metadata = json.loads((resumed.run_dir / "metadata.json").read_text())
    assert metadata["environments_not_restored"] == {"CartPole-v1": [], "ForgetfulTask-v0": [0, 1]}
    assert metadata["backend"] == {"CartPole-v1": "SyncEnvs", "ForgetfulTask-v0": "SyncEnvs"}


def test_all_environments_are_closed(make, monkeypatch):
    closed, close = [], EnvRunner.close
    seen = {}

    def note(runner):
        closed.append(runner)
        close(runner)
        raise OSError("one that fails")

    monkeypatch.setattr(EnvRunner, "close", note)
    with pytest.raises(OSError, match="one that fails"):
        quiet(make(), callbacks=[look(seen), lambda run: closed.clear()])
    assert {id(runner) for runner in closed} >= {id(runner) for runner in seen["run"].source.runners}


def test_the_first_is_closed_where_the_second_cannot_be_made(make, monkeypatch):
    made, original = [], sources.make_envs

    def make_envs(*args, **options):
        made.append(original(*args, **options))
        made[-1].close = lambda: made.append("closed")
        return made[-1]

    monkeypatch.setattr(sources, "make_envs", make_envs)
    with pytest.raises(InputError, match="nope"):
        quiet(make(env_kwargs={"Acrobot-v1": {"nope": 1}}))
    assert made[1:] == ["closed"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("env_id: []", "env_id: should be the id of an environment, or a list of ids, got []"),
        ("env_id: 3", "env_id: should be the id of an environment, or a list of ids, got 3"),
        ("env_id: [CartPole-v1, 3]", "env_id: should be the id of an environment, or a list of ids"),
        ("env_id: [CartPole-v1, CartPole-v1]", "env_id: 'CartPole-v1' is given twice"),
        ("env_id: [CartPole-v1, CartPol-v1]", "env_id.1: no environment 'CartPol-v1' is registered"),
        ("env_id: [CartPole-v1, 'm:X-v0']", "env_id.1: 'm:X-v0' imports the module 'm'"),
        ("env_kwargs: {CartPole-v1: 3}", "env_kwargs.CartPole-v1: should be a mapping"),
        ("env_kwargs: {CartPole-v0: {}}", "CartPole-v0: is none of the environments in env_id; did you mean 'CartPole"),
        ("env_kwargs: {CartPole-v1: {backend: sinc}}", "env_kwargs.CartPole-v1.backend: should be"),
        ("env_kwargs: {wrappers: {frame_stak: 4}}", "env_kwargs.wrappers.frame_stak: unknown key"),
        ("eval_env_kwargs: {Acrobot-v1: {wrappers: {frame_stak: 4}}}", "Acrobot-v1.wrappers.frame_stak: unknown key"),
        ("algo: ppo", "env_id: ppo trains in one environment; env_id should be one id, or use fake"),
    ],
)
def test_what_is_wrong_with_a_list_is_said_with_its_line(changes, expected, make, tmp_path):
    data = {"algo": "fake", "env_id": PAIR, "total_timesteps": 10} | yaml.safe_load(changes)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load_config(path, allow_import=False)
    (problem,) = str(caught.value).splitlines()
    assert expected in problem
    assert "line " in problem


def test_without_an_algorithm_for_several_none_is_named(tiny_config, none_for_several):
    with pytest.raises(ConfigError, match=r"ppo trains in one environment; env_id should be one id$"):
        train(tiny_config("ppo", {"env_id": PAIR}))
    with pytest.raises(InputError, match="ppo trains in one environment, got 2"):
        train_ppo(tiny_config("ppo", {"env_id": PAIR}), progress="silent")


def test_the_folder_names_the_environments_while_there_is_room(make):
    assert make_run_dir(make(), "x", None).name == "fake__CartPole-v1+Acrobot-v1__seed0__x"
    many = make(env_id=[f"ALE/Game{i}-v5" for i in range(30)])
    name = make_run_dir(many, "x", None).name
    assert name.startswith("fake__ALE-Game0-v5+ALE-Game1-v5+")
    assert name.endswith("+24-more__seed0__x")
    assert len(name) < 120


def test_from_the_command_line(make, tmp_path):
    data = {"algo": "fake", "env_id": PAIR, "total_timesteps": 240, "num_envs": 2, "eval_episodes": 2}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data | {"env_kwargs": SHORT, "log_interval": 100}))
    text = cli("train", path, "--output-dir", tmp_path / "out", "--run-suffix", "x")
    run = tmp_path / "out" / "fake__CartPole-v1+Acrobot-v1__seed0__x"
    assert "fake on CartPole-v1, Acrobot-v1" in text
    assert "task CartPole-v1" in text
    assert "-1.5 ± 0.0 over 2 episodes of each task: CartPole-v1 6.0, Acrobot-v1 -9.0" in text
    shown = cli("eval", "--checkpoint", run)
    assert "eval_return_mean/CartPole-v1 6" in shown
    assert "eval_return_mean   -9" in cli("eval", "--checkpoint", run, "--task", "Acrobot-v1")
    assert "tasks: CartPole-v1, Acrobot-v1" in cli("eval", "--checkpoint", run, "--task", "x", code=2)
    assert "at step 240" in cli("resume", "--checkpoint", run, "--total-timesteps", 280, "--output-dir", tmp_path / "r")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["env_id"] == PAIR


def test_tensorboard_shows_the_tasks_side_by_side(make):
    from rl_training.runtime.metrics import tensorboard_tag

    assert tensorboard_tag("eval_return_mean/ALE/Pong-v5", ()) == "eval/eval_return_mean/ALE/Pong-v5"
    assert tensorboard_tag("train_return_mean/CartPole-v1", ()) == "train/train_return_mean/CartPole-v1"


def test_a_list_is_in_the_schema_and_the_reference(make):
    import jsonschema

    data = {"algo": "fake", "env_id": PAIR, "total_timesteps": 10, "eval_env_kwargs": {"backend": "sync"}}
    jsonschema.validate(data, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"eval_env_kwargs": {"wrappers": {"frame_stak": 3}}}, json_schema())
    assert f"{FAKE_RECIPE.summary}." in reference()
    assert "Takes a list of environments." in reference()
