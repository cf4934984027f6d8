"""Gumbel MuZero trains end to end: vectors, frames, torques and self-play, its schedules in the final metrics."""

from __future__ import annotations

import pytest

from planning_smoke import SCHEDULES, check_resume, check_schedules, check_self_play, smoke_config
from rl_training import evaluate_checkpoint, train
from rl_training.acting.planning import PlanningActor
from rl_training.errors import ConfigError
from rl_training.runtime.gumbel_muzero_trainer import train_gumbel_muzero
from smoke import check_run


@pytest.mark.parametrize("q_rescale", ["tree", "node", "none"])
def test_gumbel_muzero_trains_with_scheduled_temperature_and_simulations(tiny_config, q_rescale):
    config = tiny_config(
        "gumbel_muzero",
        **SCHEDULES,
        q_rescale=q_rescale,
        c_scale={"kind": "linear", "start": 0.1, "end": 0.5},
        max_considered_actions_schedule={"kind": "linear", "start": 2, "end": 1},
    )
    result = train_gumbel_muzero(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    check_schedules(result)
    assert result.run_dir.name == "gumbel_muzero__CartPole-v1__seed0__smoke"
    assert result.metrics["c_scale"] == pytest.approx(0.5)
    assert result.metrics["max_considered_actions"] == 1
    assert {"loss", "policy_loss", "value_loss", "reward_loss", "grad_norm"} <= result.metrics.keys()
    again = evaluate_checkpoint(result.run_dir)
    assert again["eval_return_mean"] == result.metrics["eval_return_mean"]


def test_fixed_numbers_stay(tiny_config):
    seen = set()
    note = lambda run: seen.add((run.learner.temperature, run.learner.num_simulations))  # noqa: E731
    config = tiny_config("gumbel_muzero", temperature=0.7, num_simulations=4)
    result = train(config, callbacks=[note], progress="silent")
    assert seen == {(0.7, 4)}
    assert (result.metrics["temperature"], result.metrics["num_simulations"]) == (0.7, 4)


def test_every_search_has_the_numbers_of_its_step(tiny_config, monkeypatch):
    """The noise of acting has the scale of its step; evaluation has none."""
    searched, plan = [], PlanningActor.plan

    def spy(self, obs, **numbers):
        searched.append((numbers["temperature"], numbers["num_simulations"]))
        return plan(self, obs, **numbers)

    monkeypatch.setattr(PlanningActor, "plan", spy)
    schedules = {
        "temperature_schedule": {"kind": "linear", "start": 1.0, "end": 0.2},
        "num_simulations_schedule": {"kind": "linear", "start": 2, "end": 6},
    }
    config = tiny_config("gumbel_muzero", {"total_timesteps": 101}, eval_num_simulations=7, **schedules)
    train(config, progress="silent")
    acting = [numbers for numbers in searched if numbers[0] > 0]
    progress = [2 * i / 100 for i in range(51)]
    assert [t for t, _ in acting] == pytest.approx([1 - 0.8 * p for p in progress])
    assert [n for _, n in acting] == [round(2 + 4 * p) for p in progress]
    assert {numbers for numbers in searched if numbers[0] == 0} == {(0.0, 7)}


@pytest.mark.parametrize("case", ["images", "continuous"])
def test_other_spaces(tiny_config, case):
    config = smoke_config(tiny_config, "gumbel_muzero", case, **SCHEDULES)
    result = train(config, progress="silent")
    check_run(result, config)
    check_schedules(result)


def test_self_play(tiny_config):
    check_self_play(tiny_config, "gumbel_muzero")


@pytest.mark.parametrize("case", ["vectors", "images", "continuous", "self-play"])
def test_resume_is_exact(tiny_config, case):
    check_resume(tiny_config, "gumbel_muzero", case)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"q_rescale": "sometimes"}, r"q_rescale.*tree.*node.*none"),
        ({"max_considered_actions": 0}, r"max_considered_actions.*>= 1.*0"),
        ({"root_exploration_fraction": 0.1}, r"root_exploration_fraction"),
    ],
)
def test_numbers_that_make_no_sense_are_errors(tiny_config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_config("gumbel_muzero", **kwargs), progress="silent")
