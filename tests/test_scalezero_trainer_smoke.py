"""ScaleZero trains end to end in several tasks, in stages, with schedules; what it saves goes on exactly."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest

import envs_for_tests  # noqa: F401 - registers them
from rl_training import evaluate_checkpoint, load_policy, resume_training, train
from rl_training.acting.numpy_transformer import NumpyInference
from rl_training.acting.scalezero import TaskActor
from rl_training.algorithms import planning_targets
from rl_training.data.state_check import StateMismatch
from rl_training.errors import ConfigError, InputError
from rl_training.ops.search import Search
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.scalezero_trainer import train_scalezero
from smoke import check_run
from test_checkpoint_workflows import stop_at
from test_contract import assert_same_future

PAIR = ["CartPole-v1", "Acrobot-v1"]
SHORT = {"CartPole-v1": {"wrappers": {"time_limit": 12}}, "Acrobot-v1": {"wrappers": {"time_limit": 9}}}
TWO = {"env_id": PAIR, "env_kwargs": SHORT, "total_timesteps": 240}
STAGES = {"num_adapters": 2, "base_stage_steps": 3, "stage_steps": 9}


def test_scalezero_trains_two_tasks_with_schedules(tiny_config):
    config = tiny_config(
        "scalezero",
        TWO,
        temperature_schedule={"kind": "linear", "start": 1.0, "end": 0.2},
        num_simulations_schedule={"kind": "linear", "start": 2, "end": 5},
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
    )
    result = train_scalezero(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "scalezero__CartPole-v1+Acrobot-v1__seed0__smoke"
    metrics = result.metrics
    assert metrics["temperature"] == pytest.approx(0.2)
    assert metrics["num_simulations"] == 5
    assert metrics["learning_rate"] == 0.0
    assert (metrics["stage"], metrics["active_tasks"]) == (0, 2)
    losses = {"loss", "latent_loss", "policy_loss", "value_loss", "reward_loss", "grad_norm"}
    assert losses | {f"loss/{name}" for name in PAIR} <= metrics.keys()
    assert metrics["loss"] == pytest.approx(np.mean([metrics[f"loss/{name}"] for name in PAIR]), rel=1e-4)
    assert metrics["eval_return_mean/Acrobot-v1"] == -9
    assert evaluate_checkpoint(result.run_dir)["eval_return_mean"] == metrics["eval_return_mean"]
    for name in PAIR:
        env = gym.make(name)
        obs, _ = env.reset(seed=0)
        assert env.action_space.contains(load_policy(result.run_dir, task=name).act(obs))


def test_fixed_numbers_and_the_default_temperature(tiny_config):
    metrics = train(tiny_config("scalezero", TWO, num_simulations=3), progress="silent").metrics
    assert (metrics["num_simulations"], metrics["temperature"]) == (3, 0.25)  # the last quarter of training


def test_the_search_sees_the_numbers_of_its_step(tiny_config, monkeypatch):
    seen = []
    original = TaskActor.act

    def act(self, obs, memory, **options):
        decision = original(self, obs, memory, **options)
        if options["explore"]:
            seen.append((self.task, self.hp.num_simulations))
        return decision

    monkeypatch.setattr(TaskActor, "act", act)
    schedule = {"kind": "step", "start": 2, "factor": 2, "milestones": ["50%"]}
    train(tiny_config("scalezero", TWO, num_simulations_schedule=schedule), progress="silent")
    assert [task for task, _ in seen] == [0, 1] * 60
    assert [n for _, n in seen] == [2] * 60 + [4] * 60


@pytest.mark.parametrize("target_returns", [None, {"CartPole-v1": 1.0}])
def test_resume_is_exact_across_stages(tiny_config, target_returns):
    """Stopped in one stage, to end in the next; with a target return, one task rests since the first evaluation."""
    options = {**STAGES, "target_returns": target_returns, "adapter_dropout": 0.3}
    config = {**TWO, "total_timesteps": 400, "eval_interval": 80, "eval_episodes": 1}
    whole = train(tiny_config("scalezero", config, **options), progress="silent")
    half = train(tiny_config("scalezero", config, **options), callbacks=[stop_at(200)], progress="silent")
    stages = [load_checkpoint(result.checkpoint_path).state["learner"] for result in (half, whole)]
    assert [state["stage"] for state in stages] == [1, 2]
    assert [state["solved"] for state in stages] == [[0] if target_returns else []] * 2
    resumed = resume_training(half.run_dir, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics.keys() == whole.metrics.keys()
    for name in whole.metrics.keys() - {"steps_per_second"}:
        assert resumed.metrics[name] == pytest.approx(whole.metrics[name], nan_ok=True, abs=0), name
    assert evaluate_checkpoint(resumed.run_dir)["eval_return_mean"] == resumed.metrics["eval_return_mean"]


def test_a_solved_task_rests_and_a_run_ends_when_all_are_solved(tiny_config):
    """CartPole is solved at once, and with it more than an adapter's share; Acrobot at the second evaluation."""
    seen = {}
    config = {**TWO, "eval_interval": 80, "total_timesteps": 2000}
    options = {**STAGES, "stage_steps": 1000, "target_returns": {"CartPole-v1": 1.0, "Acrobot-v1": -8.5}}

    def shorten(run):
        seen.update(stage=run.learner.stage, added=[run.parts[f"replay_{i}"].added for i in range(2)])
        if run.step > 160:
            run.learner.target_returns[1] = -9.0

    result = train(tiny_config("scalezero", config, **options), callbacks=[shorten], progress="silent")
    metrics = result.metrics
    assert metrics["global_step"] == 240
    assert seen == {"stage": 1, "added": [40, 200]}
    assert metrics["active_tasks"] == 1
    assert metrics["eval_return_mean/CartPole-v1"] > 1  # evaluated all the same
    assert "every task is finished" in json.loads((result.run_dir / "metadata.json").read_text())["status"]


def test_goes_on_from_a_best_checkpoint_that_holds_no_replays(tiny_config):
    config = {**TWO, "eval_interval": 120}
    options = {**STAGES, "target_returns": {"CartPole-v1": 1.0}}
    best = train(tiny_config("scalezero", config, **options), progress="silent").run_dir / "checkpoints" / "best"
    resumed = resume_training(best, total_timesteps=480, progress="silent")
    assert resumed.metrics["global_step"] == 480
    assert resumed.metrics["active_tasks"] == 1


CUE = {
    "hidden_sizes": [16],
    "width": 32,
    "layers": 1,
    "heads": 4,
    "num_experts": 1,
    "expert_size": 16,
    "num_simulations": 4,
    "unroll_steps": 3,
    "batch_size": 32,
    "learning_starts": 200,
    "learning_rate": 6e-3,
    "utd_ratio": 0.3,
    "gamma": 0.9,
    "value_limit": 5,
    "reward_limit": 5,
    "buffer_capacity": 10_000,
    "reanalyse_ratio": 0.0,
    "priority_exponent": 0.0,
}


@pytest.mark.parametrize(("context", "remembers"), [(4, True), (3, False)])
def test_a_cue_shown_once_is_remembered_as_far_back_as_the_context(tiny_config, context, remembers):
    """Asked at the fourth step for what the first one showed: a context of four is enough, three is chance."""
    config = {"env_id": "CueForTests-v0", "env_kwargs": {"blank": 2}, "num_envs": 8, "total_timesteps": 2000}
    config = tiny_config("scalezero", config | {"eval_episodes": 40}, **CUE, context=context)
    mean = train(config, progress="silent").metrics["eval_return_mean"]
    assert mean > 0.9 if remembers else abs(mean) < 0.5


def test_memory_is_saved_in_the_middle_of_episodes(tiny_config):
    """What is remembered is part of a checkpoint, and of what a resumed run does next."""
    config = {"env_id": "CueForTests-v0", "env_kwargs": {"blank": 6}, "total_timesteps": 240}
    options = {"context": 3, "num_simulations": 3}
    whole = train(tiny_config("scalezero", config, **options), progress="silent")
    half = train(tiny_config("scalezero", config, **options), callbacks=[stop_at(120)], progress="silent")
    memory = load_checkpoint(half.checkpoint_path).state["runner"]["memory"]
    assert {name: np.shape(x) for name, x in memory.items()} == {"obs": (2, 2, 2), "action": (2, 2), "length": (2,)}
    assert memory["length"].max() > 0
    assert_same_future(whole.checkpoint_path, resume_training(half.run_dir, progress="silent").checkpoint_path)


def test_a_loaded_policy_remembers_until_it_is_reset(tiny_config):
    config = tiny_config("scalezero", {"env_id": "CueForTests-v0", "total_timesteps": 64})
    run_dir = train(config, progress="silent").run_dir
    policy, blank, sign = load_policy(run_dir), np.zeros(2, np.float32), np.ones(2, np.float32)
    seen = []
    for first in (blank, sign):
        policy.reset()
        assert policy.memory == {}
        for obs in (first, blank, blank):
            policy.act(obs)
        seen.append(policy.memory)
    assert [memory["length"].tolist() for memory in seen] == [[3], [3]]
    assert seen[0]["obs"][0].tolist() == [[0, 0], [0, 0], [0, 0]]
    assert seen[1]["obs"][0].tolist() == [[1, 1], [0, 0], [0, 0]]
    policy.act(blank)
    assert policy.memory["obs"][0].tolist() == [[0, 0], [0, 0], [0, 0]]
    with pytest.raises(InputError, match="2 observations, but the memory is that of 1 environments"):
        policy.act(np.zeros((2, 2), np.float32))


def test_one_of_several_environments_can_be_forgotten(tiny_config):
    config = tiny_config("scalezero", {"env_id": "CueForTests-v0", "total_timesteps": 64})
    policy = load_policy(train(config, progress="silent").run_dir)
    for _ in range(2):
        policy.act(np.ones((3, 2), np.float32))
    policy.reset(np.array([False, True, False]))
    assert policy.memory["length"].tolist() == [2, 0, 2]
    assert not policy.memory["obs"][1].any()


def test_memory_of_another_context_is_refused(tiny_config):
    config = tiny_config("scalezero", {"env_id": "CueForTests-v0", "total_timesteps": 64})
    policy = load_policy(train(config, progress="silent").run_dir)
    policy.act(np.ones((1, 2), np.float32))
    policy.memory = {name: np.repeat(x, 2, 1) if x.ndim > 1 else x for name, x in policy.memory.items()}
    with pytest.raises(StateMismatch, match=r"memory\.\w+ should be"):
        policy.act(np.ones((1, 2), np.float32))


def test_all_sorts_of_tasks_at_once(tiny_config, monkeypatch):
    """Vectors, numbers, and a board of two players with a mask of legal moves."""
    config = tiny_config(
        "scalezero",
        {
            "env_id": ["CartPole-v1", "FrozenLake-v1", "TicTacToe-v0"],
            "total_timesteps": 120,
            "eval_env_kwargs": {"TicTacToe-v0": {"opponent": "random"}},
        },
        learning_starts=60,
    )
    seen = {"searches": set(), "targets": set()}
    search, make_targets = Search.__call__, planning_targets.value_targets

    def spied_search(self, rules, evaluate, root, **options):
        seen["searches"] |= {round(float(discount), 6) for discount in root.discount}
        return search(self, rules, evaluate, root, **options)

    def spied_targets(sequence, n, count, discount, *args, **options):
        seen["targets"].add(discount)
        return make_targets(sequence, n, count, discount, *args, **options)

    def look(run):
        for actor in run.actor.actors:
            assert type(actor.planner.inference) is NumpyInference

    monkeypatch.setattr(Search, "__call__", spied_search)
    monkeypatch.setattr(planning_targets, "value_targets", spied_targets)
    metrics = train(config, callbacks=[look], progress="silent").metrics
    assert seen == {"searches": {0.997, -0.997}, "targets": {0.997, -0.997}}
    assert -1 <= metrics["eval_return_mean/TicTacToe-v0"] <= 1


def test_images(tiny_config):
    pytest.importorskip("ale_py")
    env_kwargs = {
        "backend": "sync",
        "max_num_frames_per_episode": 100,
        "wrappers": {"atari": {"noop_max": 5}, "frame_stack": 4},
    }
    config = tiny_config(
        "scalezero",
        {
            "env_id": ["ALE/Pong-v5", "CartPole-v1"],
            "env_kwargs": {"ALE/Pong-v5": env_kwargs},
            "total_timesteps": 64,
            "eval_episodes": 1,
        },
    )
    check_run(train(config, progress="silent"), config)


@pytest.mark.parametrize(
    ("config", "kwargs", "error", "message"),
    [
        (
            {},
            {"target_returns": {"CartPol-v1": 4}},
            InputError,
            "'CartPol-v1' is none of the tasks; did you mean",
        ),
        ({"eval_interval": 0}, {"target_returns": {"CartPole-v1": 4}}, ConfigError, "eval_interval 0 there is none"),
        ({"eval_interval": 999}, {"rank_exponent": 1.0}, ConfigError, "rank_exponent.*set eval_interval"),
        ({}, {"target_returns": {"CartPole-v1": "much"}}, ConfigError, "target_returns.*number.*much"),
        ({}, {"target_returns": 475}, ConfigError, "target_returns"),
        ({}, {"heads": 3}, InputError, "width 8 cannot be shared by 3 heads"),
        ({"env_id": "Pendulum-v1", "env_kwargs": {}}, {}, InputError, "scalezero .* needs Discrete"),
    ],
)
def test_what_would_not_work_is_an_error_before_anything_is_made(tiny_config, config, kwargs, error, message):
    config = tiny_config("scalezero", {**TWO, "eval_interval": 80, **config}, **kwargs)
    with pytest.raises(error, match=message):
        train(config, progress="silent")
    assert not config.output_dir.exists()
