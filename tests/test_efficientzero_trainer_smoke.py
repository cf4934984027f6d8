"""EfficientZero trains end to end: vectors, frames, torques and self-play, its schedules in the final metrics."""

from __future__ import annotations

import pytest
import torch

from planning_smoke import SCHEDULES, check_resume, check_schedules, check_self_play, smoke_config
from rl_training import evaluate_checkpoint, train
from rl_training.errors import ConfigError
from rl_training.runtime.efficientzero_trainer import train_efficientzero
from smoke import check_run


@pytest.mark.parametrize("lstm_horizon", [1, 2, 5])
def test_efficientzero_trains_with_scheduled_temperature_and_simulations(tiny_config, lstm_horizon):
    config = tiny_config(
        "efficientzero",
        **SCHEDULES,
        lstm_horizon=lstm_horizon,
        consistency_coef={"kind": "linear", "start": 2.0, "end": 0.5},
        n_step_decay_schedule={"kind": "linear", "start": 10, "end": 100},
    )
    result = train_efficientzero(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    check_schedules(result)
    assert result.run_dir.name == "efficientzero__CartPole-v1__seed0__smoke"
    assert result.metrics["consistency_coef"] == pytest.approx(0.5)
    assert result.metrics["n_step_decay"] == 100
    assert result.metrics["beta"] == pytest.approx(1)  # by default it rises to that
    assert {"loss", "policy_loss", "value_loss", "reward_loss", "consistency_loss"} <= result.metrics.keys()
    assert abs(result.metrics["consistency_loss"]) <= result.metrics["unroll_coef"] == 5  # cosines of K steps
    again = evaluate_checkpoint(result.run_dir)
    assert again["eval_return_mean"] == result.metrics["eval_return_mean"]


def test_fixed_numbers_stay(tiny_config):
    seen = set()
    note = lambda run: seen.add((run.learner.temperature, run.learner.num_simulations))  # noqa: E731
    config = tiny_config("efficientzero", temperature=0.7, num_simulations=4)
    result = train(config, callbacks=[note], progress="silent")
    assert seen == {(0.7, 4)}
    assert (result.metrics["temperature"], result.metrics["num_simulations"]) == (0.7, 4)


@pytest.mark.parametrize("case", ["images", "continuous"])
def test_other_spaces(tiny_config, case):
    config = smoke_config(tiny_config, "efficientzero", case, **SCHEDULES)
    result = train(config, progress="silent")
    check_run(result, config)
    check_schedules(result)


@pytest.mark.parametrize("augment", [True, False])
def test_images_are_changed_where_it_is_wanted(tiny_config, augment, monkeypatch):
    """Black ones, so that what is learned from is known."""
    from rl_training.algorithms import efficientzero

    learned_from, update = [], efficientzero.EfficientZero.update
    monkeypatch.setattr(efficientzero, "augmented", lambda obs, space, rng: torch.zeros_like(obs))
    monkeypatch.setattr(
        efficientzero.EfficientZero, "update", lambda self, batch: (learned_from.append(batch), update(self, batch))[1]
    )
    train(smoke_config(tiny_config, "efficientzero", "images", augment=augment), progress="silent")
    black = {key: {bool((batch[key] == 0).all()) for batch in learned_from} for key in ("obs", "next_obs")}
    assert black == {"obs": {augment}, "next_obs": {augment}}
    assert {batch["next_obs"].shape for batch in learned_from} == {(8, 4, 84, 84)}  # two that followed each of four


def test_self_play(tiny_config):
    check_self_play(tiny_config, "efficientzero")


@pytest.mark.parametrize("case", ["vectors", "images", "continuous", "self-play"])
def test_resume_is_exact(tiny_config, case):
    check_resume(tiny_config, "efficientzero", case)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lstm_horizon": 0}, r"lstm_horizon.*>= 1.*0"),
        ({"n_step_decay": 0}, r"n_step_decay.*>= 1.*0"),
        ({"consistency_coef": -1}, r"consistency_coef.*>= 0.*-1"),
    ],
)
def test_numbers_that_make_no_sense_are_errors(tiny_config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_config("efficientzero", **kwargs), progress="silent")
