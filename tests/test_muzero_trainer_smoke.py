"""MuZero trains end to end: vectors, frames, torques and self-play, its schedules in the final metrics."""

from __future__ import annotations

import pytest

from planning_smoke import SCHEDULES, check_resume, check_schedules, check_self_play, smoke_config
from rl_training import evaluate_checkpoint, predict_checkpoint, resume_training, train
from rl_training.acting.planning import PlanningActor
from rl_training.algorithms.muzero import MuZeroHyperparameters
from rl_training.errors import ConfigError, InputError
from rl_training.runtime.controls import Controls
from rl_training.runtime.muzero_trainer import train_muzero
from smoke import check_run


def test_muzero_trains_with_scheduled_temperature_and_simulations(tiny_config):
    config = tiny_config(
        "muzero",
        **SCHEDULES,
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
        root_exploration_fraction_schedule={"kind": "linear", "start": 0.5, "end": 0.0},
    )
    result = train_muzero(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    check_schedules(result)
    assert result.run_dir.name == "muzero__CartPole-v1__seed0__smoke"
    assert result.metrics["root_exploration_fraction"] == 0.0
    assert result.metrics["learning_rate"] == 0.0
    assert {"loss", "policy_loss", "value_loss", "reward_loss", "grad_norm", "value"} <= result.metrics.keys()
    again = evaluate_checkpoint(result.run_dir)
    assert again["eval_return_mean"] == result.metrics["eval_return_mean"]
    assert predict_checkpoint(result.checkpoint_path, [0.0, 0.1, 0.0, -0.1]) in (0, 1)


def test_fixed_numbers_stay(tiny_config):
    seen = set()
    note = lambda run: seen.add((run.learner.temperature, run.learner.num_simulations))  # noqa: E731
    result = train(tiny_config("muzero", temperature=0.7, num_simulations=4), callbacks=[note], progress="silent")
    assert seen == {(0.7, 4)}
    assert (result.metrics["temperature"], result.metrics["num_simulations"]) == (0.7, 4)


def test_every_search_has_the_numbers_of_its_step(tiny_config, monkeypatch):
    """What a schedule says is what the search is asked for: in acting, not in evaluation."""
    searched, plan = [], PlanningActor.plan

    def spy(self, obs, **numbers):
        searched.append((numbers["temperature"], numbers["num_simulations"], numbers["root_exploration_fraction"]))
        return plan(self, obs, **numbers)

    monkeypatch.setattr(PlanningActor, "plan", spy)
    schedules = {
        "temperature_schedule": {"kind": "linear", "start": 1.0, "end": 0.2},
        "num_simulations_schedule": {"kind": "linear", "start": 2, "end": 6},
    }
    train(tiny_config("muzero", {"total_timesteps": 101}, eval_num_simulations=7, **schedules), progress="silent")
    acting = [numbers for numbers in searched if numbers[2] > 0]
    progress = [2 * i / 100 for i in range(51)]
    assert [t for t, _, _ in acting] == pytest.approx([1 - 0.8 * p for p in progress])
    assert [n for _, n, _ in acting] == [round(2 + 4 * p) for p in progress]
    assert {numbers for numbers in searched if numbers[2] == 0} == {(0.0, 7, 0.0)}


def test_the_default_temperature_and_learning_rate_fall(tiny_config):
    seen = {}
    config = tiny_config("muzero", {"total_timesteps": 400})

    def note(run):
        seen[run.step] = run.learner.temperature, run.learner.learning_rate

    train(config, callbacks=[note], progress="silent")
    for step, (temperature, rate) in seen.items():
        done = min(step / 399, 1.0)
        assert temperature == pytest.approx(0.5 - 0.4 * done)
        assert rate == pytest.approx(2e-3 - 1.9e-3 * done)


def test_on_atari_the_temperature_falls_in_the_steps_of_the_paper():
    atari = Controls(MuZeroHyperparameters, {}, 400, atari=True)
    assert [atari.at(step).temperature for step in (2, 150, 220, 290, 320, 399)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert {atari.at(step).learning_rate for step in (0, 399)} == {1e-3}
    assert (atari.at(0).priority_exponent, atari.at(0).hidden_gradient_scale) == (1.0, 0.5)
    given = Controls(MuZeroHyperparameters, {"temperature": 0.3}, 400, atari=True)
    assert {given.at(step).temperature for step in (0, 399)} == {0.3}


@pytest.mark.parametrize("case", ["images", "continuous"])
def test_other_spaces(tiny_config, case):
    config = smoke_config(tiny_config, "muzero", case, **SCHEDULES)
    result = train(config, progress="silent")
    check_run(result, config)
    check_schedules(result)


def test_self_play(tiny_config):
    check_self_play(tiny_config, "muzero")


@pytest.mark.parametrize("case", ["vectors", "images", "continuous", "self-play"])
def test_resume_is_exact(tiny_config, case):
    check_resume(tiny_config, "muzero", case)


def test_values_of_past_searches_can_be_bootstrapped_from(tiny_config):
    check_resume(tiny_config, "muzero", "vectors", bootstrap="search", priority_exponent=0.0, reanalyse_ratio=0.0)


def test_a_run_goes_on_without_its_replay(tiny_config):
    result = train(tiny_config("muzero", {"eval_interval": 256}), progress="silent")
    resumed = resume_training(result.run_dir / "checkpoints" / "best", total_timesteps=512, progress="silent")
    assert resumed.metrics["global_step"] == 512
    assert resumed.metrics["gradient_steps"] > result.metrics["gradient_steps"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_simulations": 0}, r"num_simulations.*>= 1.*0"),
        ({"temperature": -1.0}, r"temperature.*>= 0.*-1"),
        ({"root_exploration_fraction": 1.5}, r"root_exploration_fraction.*\[0, 1\].*1.5"),
        ({"reanalyse_ratio": 2}, r"reanalyse_ratio.*\[0, 1\].*2"),
        ({"bootstrap": "never"}, r"bootstrap.*target.*search"),
        ({"hidden_sizes": []}, r"hidden_sizes is empty"),
    ],
)
def test_numbers_that_make_no_sense_are_errors(tiny_config, kwargs, message):
    with pytest.raises((ConfigError, InputError), match=message):
        train(tiny_config("muzero", **kwargs), progress="silent")
