"""The public resolvers, and hyperparameters as the training step sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rl_training import (
    ConfigError,
    TrainConfig,
    resolve_clip_coefficient,
    resolve_entropy_coefficient,
    resolve_num_simulations,
    resolve_temperature,
)
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.ppo import PPOHyperparameters
from rl_training.runtime.controls import Controls
from rl_training.runtime.preview import idle_learning_rates
from rl_training.runtime.run_folder import resolved_kwargs

H = 1000
RESOLVERS = [
    (resolve_entropy_coefficient, "ent_coef"),
    (resolve_clip_coefficient, "clip_coef"),
    (resolve_temperature, "temperature"),
]


def config(**algo_kwargs):
    return TrainConfig("ppo", "CartPole-v1", H, algo_kwargs=algo_kwargs)


@pytest.mark.parametrize(("resolve", "name"), RESOLVERS)
def test_fixed_default_and_scheduled(resolve, name):
    assert resolve(config(), step=5, default=0.7) == 0.7
    assert resolve(config(**{name: 0.3}), step=5, default=0.7) == 0.3
    linear = config(**{name: {"kind": "linear", "start": 0.4, "end": 0.1}})
    assert resolve(linear, step=0, default=0.7) == 0.4
    assert resolve(linear, step=H - 1, default=0.7) == 0.1
    assert resolve(linear, step=10 * H, default=0.7) == 0.1
    triple = config(**{name: 0.5, f"{name}_schedule": "linear", f"{name}_warmup_steps": 100})
    assert resolve(triple, step=49, default=0.7) == pytest.approx(0.5 * (1 - 49 / 999) * 0.5)
    from_default = config(**{f"{name}_schedule": "cosine"})
    assert resolve(from_default, step=0, default=0.7) == 0.7


@pytest.mark.parametrize(("resolve", "name"), RESOLVERS)
def test_warmup_applies_to_a_fixed_value(resolve, name):
    warm = config(**{name: 0.8, f"{name}_warmup_steps": 10})
    assert [resolve(warm, step=s, default=0) for s in (0, 4, 9, 500)] == pytest.approx([0.08, 0.4, 0.8, 0.8])


@pytest.mark.parametrize(("resolve", "name"), RESOLVERS)
def test_a_negative_value_is_an_error_that_names_it(resolve, name):
    below = config(**{name: {"kind": "linear", "start": 0.1, "end": -0.1}})
    assert resolve(below, step=0, default=0) == 0.1
    with pytest.raises(ValueError, match=name):
        resolve(below, step=H - 1, default=0)
    with pytest.raises(ValueError, match=name):
        resolve(config(**{name: -1.0}), step=0, default=0)


def test_aliases_work_both_ways():
    assert resolve_clip_coefficient(config(clip_range=0.3), step=0, default=0.2) == 0.3
    assert resolve_clip_coefficient(config(clip_range_schedule="linear"), step=H - 1, default=0.2) == 0.0
    assert resolve_clip_coefficient(config(clip_range_warmup_steps=2), step=0, default=0.2) == 0.1
    assert resolve_entropy_coefficient(config(entropy_coef=0.3), step=0, default=0.2) == 0.3
    key = {"coefficient_key": "entropy_coef"}
    assert resolve_entropy_coefficient(config(ent_coef=0.3), step=0, default=0.2, **key) == 0.3


def test_one_number_by_two_names_is_an_error():
    with pytest.raises(ValueError, match=r"clip_coef.*clip_range"):
        resolve_clip_coefficient(config(clip_coef=0.1, clip_range=0.2), step=0, default=0.2)
    with pytest.raises(ValueError, match=r"ent_coef.*entropy_coef"):
        resolve_entropy_coefficient(config(ent_coef=0.1, entropy_coef_schedule="linear"), step=0, default=0.2)


def test_num_simulations_is_a_whole_number_of_at_least_one():
    down = config(num_simulations={"kind": "linear", "start": 8, "end": 0})
    values = [resolve_num_simulations(down, step=s, default=50) for s in range(0, H, 37)]
    assert all(isinstance(v, int) and v >= 1 for v in values)
    assert values[0] == 8
    assert resolve_num_simulations(down, step=H, default=50) == 1
    assert resolve_num_simulations(config(), step=0, default=50) == 50
    with pytest.raises(ValueError, match="num_simulations"):
        resolve_num_simulations(config(num_simulations=-3), step=0, default=50)


def test_the_horizon_can_be_that_of_an_earlier_run():
    longer = TrainConfig("ppo", "CartPole-v1", 10 * H, schedule_horizon=H, algo_kwargs={"clip_coef_schedule": "linear"})
    assert resolve_clip_coefficient(longer, step=H - 1, default=0.2) == 0.0


@dataclass(frozen=True)
class Numbers:
    clip_coef: float = scalar(0.2, "a coefficient")
    gamma: float = scalar(0.99, "bounded above", high=1.0)
    temperature: float = scalar(1.0, "bounded below", low=0.1)
    num_simulations: int = scalar(50, "a whole number", low=1)
    target_kl: float | None = scalar(None, "may be switched off")
    hidden_sizes: tuple[int, ...] = setting((64, 64), "a setting", low=1)


def controls(**kwargs):
    return Controls(Numbers, kwargs, H)


def test_controls_agree_with_the_resolvers():
    kwargs = {"clip_range": {"kind": "cosine", "start": 0.3, "end": 0.1}, "clip_range_warmup_steps": 200}
    both = controls(**kwargs)
    for step in (0, 100, 400, 999, 2000):
        assert both.at(step).clip_coef == resolve_clip_coefficient(config(**kwargs), step=step, default=0.2)


def test_controls_resolve_only_what_varies_and_round_whole_numbers():
    both = controls(num_simulations={"kind": "linear", "start": 4, "end": 1})
    assert [both.at(s).num_simulations for s in (0, 400, 999)] == [4, 3, 1]
    assert both.at(0).clip_coef == 0.2
    constant = controls(gamma=0.99)
    assert constant.at(0) is constant.at(5)
    assert constant.at(5) == Numbers()
    assert "target_kl" not in both.scalars_of(both.at(0))
    assert controls(target_kl={"kind": "linear", "start": 0.1, "end": 0.02}).at(999).target_kl == 0.02


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clip_ceof": 0.1}, r"algo_kwargs.clip_ceof: unknown hyperparameter; did you mean 'clip_coef'\?"),
        ({"gamma": 1.5}, r"algo_kwargs.gamma: should be in \[0, 1\], got 1.5"),
        ({"gamma": {"kind": "linear", "start": 0.9, "end": 1.1}}, r"at step 500 of 1,000"),
        ({"clip_coef": {"kind": "linear", "start": 0.9, "end": -0.1}}, r"should be >= 0, got .* at step 900 of 1,000"),
        ({"temperature_warmup_steps": 100}, r"warmup: \{steps: ..., from: ...\}"),
        ({"num_simulations": 0}, "should be >= 1, got 0"),
        ({"num_simulations": {"kind": "linear", "start": 4, "end": -4}}, "num_simulations"),
        ({"clip_coef": True}, "True"),
        ({"clip_coef": "0.2"}, "should be a number"),
        ({"clip_coef": "linear"}, "write clip_coef_schedule: linear"),
        ({"clip_coef": None}, "got nothing"),
        ({"clip_coef": 0.1, "clip_range": 0.1}, "two names of one number"),
        ({"clip_coef": {"kind": "linear"}, "clip_coef_schedule": "linear"}, "has a schedule already"),
        (
            {"clip_coef_schedule": {"kind": "linear", "warmup": 5}, "clip_coef_warmup_steps": 5},
            "warm-up in its schedule",
        ),
        ({"target_kl_warmup_steps": 5}, "switched off"),
        ({"hidden_sizes": [64, 0]}, "should be >= 1"),
        ({"hidden_sizes": 64}, "hidden_sizes"),
        ({"hidden_sizes_schedule": "linear"}, "hidden_sizes is fixed for the whole run"),
    ],
)
def test_what_is_wrong_is_said_at_once_and_by_name(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        controls(**kwargs)


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        controls(gamma=2, clip_coef=-1, nonsense=3)
    assert len(caught.value.problems) == 3


def test_resolved_reads_back_to_the_same():
    first = controls(clip_range_schedule="cosine", temperature=0.5, temperature_warmup_steps=0, num_simulations=7)
    again = Controls(Numbers, resolved_kwargs(first), H)
    assert all(first.at(s) == again.at(s) for s in range(0, H, 97))


def test_rounding_beyond_a_bound_is_clipped():
    assert controls(gamma={"kind": "linear", "start": 0.9, "end": 1.0 + 5e-10}).at(H).gamma == 1.0


def test_points_out_of_order_are_refused():
    with pytest.raises(ConfigError, match="order of time"):
        controls(clip_coef={"kind": "piecewise", "points": [["50%", 0.1], [100, 0.2]]})


@pytest.mark.parametrize("warmup", [False, "", [], {}, -1, 2.5, "101%"])
def test_a_warmup_that_is_no_amount_is_named(warmup):
    with pytest.raises(ConfigError, match="'clip_coef_warmup_steps' should be env steps"):
        controls(clip_coef_warmup_steps=warmup)


@pytest.mark.parametrize("kwargs", [{"num_simulations": 2.5}, {"hidden_sizes": ["64"]}, {"hidden_sizes": [True]}])
def test_whole_numbers_are_whole(kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        controls(**kwargs)


def test_numpy_numbers_are_numbers():
    assert controls(clip_coef=np.float32(0.5)).at(0).clip_coef == 0.5


@pytest.mark.parametrize(
    ("rate", "step", "idle"),
    [
        ({"kind": "linear", "start": 0.1, "end": 0}, H - 2, False),
        ({"kind": "linear", "start": 0.1, "end": 0}, H - 1, True),
        ({"kind": "cosine", "start": 0.1, "end": 0}, 2 * H, True),
        ({"kind": "linear", "start": 0.1, "end": 1e-12}, 2 * H, False),
        ({"kind": "linear", "start": 0.1, "end": 0, "duration": 100}, 50, False),
        ({"kind": "linear", "start": 0.1, "end": 0, "duration": 100}, 100, True),
        ({"kind": "piecewise", "points": [[0, 0.1], [100, 0], [500, 0], [501, 0.1], [502, 0]]}, 200, False),
        ({"kind": "piecewise", "points": [[0, 0.1], [100, 0], [500, 0], [501, 0.1], [502, 0]]}, 502, True),
        (0.0, 0, True),
        (0.1, 0, False),
    ],
)
def test_a_learning_rate_that_is_zero_to_the_end_is_found(rate, step, idle):
    made = Controls(PPOHyperparameters, {"learning_rate": rate}, H)
    values = [made.at(later).learning_rate for later in range(step, 2 * H + 1)]
    assert (not any(values)) == idle  # the schedule is what the case says
    assert idle_learning_rates(made, step) == (["learning_rate"] if idle else [])
    made.overrides["learning_rate"] = 0.2
    assert idle_learning_rates(made, step) == []
    made.overrides["learning_rate"] = 0.0
    assert idle_learning_rates(made, step) == ["learning_rate"]
