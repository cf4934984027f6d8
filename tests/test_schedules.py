"""Schedules against closed forms, bounds checks against brute force, and what may be written in YAML."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.runtime.schedules import KINDS, parse_schedule

H = 1000


def at(spec, step, horizon=H, fixed=None):
    return parse_schedule(spec, fixed=fixed).at(step, horizon)


def test_constant():
    assert at(0.3, 0) == at(0.3, 10**9) == 0.3


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential", "polynomial"])
@pytest.mark.parametrize(("start", "end"), [(0.3, 0.1), (0.1, 0.7), (1.0, 0.0), (2.5e-4, 0.0)])
def test_decays_start_and_end_exactly(kind, start, end):
    spec = {"kind": kind, "start": start, "end": end}
    assert at(spec, 0) == start
    assert at(spec, H - 1) == end
    assert at(spec, H) == at(spec, 50 * H) == end


@pytest.mark.parametrize("step", [0, 1, 250, 499, 998, 999, 1500])
def test_closed_forms(step):
    p = min(step, H - 1) / (H - 1)
    start, end = 0.8, 0.2
    both = {"start": start, "end": end}
    assert at({"kind": "linear", **both}, step) == pytest.approx(start + (end - start) * p)
    cosine = end + (start - end) * 0.5 * (1 + math.cos(math.pi * p))
    assert at({"kind": "cosine", **both}, step) == pytest.approx(cosine)
    assert at({"kind": "exponential", **both}, step) == pytest.approx(start * (end / start) ** p)
    assert at({"kind": "polynomial", **both, "power": 3}, step) == pytest.approx(end + (start - end) * (1 - p) ** 3)


def test_exponential_with_a_rate_decays_towards_zero():
    k, p = 5.0, 300 / 999
    expected = (math.exp(-k * p) - math.exp(-k)) / (1 - math.exp(-k))
    assert at({"kind": "exponential", "start": 1.0, "end": 0.0}, 300) == pytest.approx(expected)


def test_step_at_milestones_and_every():
    milestones = {"kind": "step", "start": 1.0, "factor": 0.5, "milestones": ["50%", 750]}
    assert [at(milestones, s) for s in (0, 499, 500, 749, 750, 999)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    every = {"kind": "step", "start": 1.0, "factor": 0.1, "every": 400}
    assert [at(every, s) for s in (399, 400, 800)] == [1.0, 0.1, pytest.approx(0.01)]


def test_piecewise_interpolates_or_holds():
    points = [[0, 1.0], ["50%", 0.5], ["100%", 0.25]]
    line = {"kind": "piecewise", "points": points}
    assert at(line, 0) == 1.0
    assert at(line, 999) == 0.25
    assert at(line, 333) == pytest.approx(1.0 - 0.5 * 333 / 499.5)
    hold = {"kind": "piecewise", "points": points, "interpolation": "hold"}
    assert [at(hold, s) for s in (0, 499, 500, 998, 999)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_cyclic_goes_there_and_back():
    triangle = {"kind": "cyclic", "start": 0.0, "end": 1.0, "period": 100, "decay": 0.5}
    values = [at(triangle, s) for s in (0, 25, 50, 75, 100, 150, 250)]
    assert values == pytest.approx([0, 0.5, 1, 0.5, 0, 0.5, 0.25])
    cosine = {"kind": "cyclic", "start": 0.0, "end": 1.0, "period": "10%", "shape": "cosine"}
    assert at(cosine, 25) == pytest.approx(0.5)
    assert at(cosine, 50) == pytest.approx(1.0)


def test_sequence_runs_its_segments_one_after_another():
    spec = [
        {"kind": "linear", "start": 0.0, "end": 1.0, "duration": 100},
        {"kind": "constant", "duration": "40%"},
        {"kind": "cosine", "end": 0.5},
    ]
    assert at(spec, 0) == 0.0
    assert at(spec, 99) == 1.0
    assert at(spec, 100) == at(spec, 499) == at(spec, 500) == 1.0
    assert at(spec, 999) == 0.5
    assert at(spec, 750) == pytest.approx(0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi * 250 / 499)))


def test_duration_ends_early_and_holds():
    spec = {"kind": "linear", "start": 1.0, "end": 0.1, "duration": "25%"}
    assert at(spec, 249) == at(spec, 250) == at(spec, 999) == 0.1
    assert at(spec, 100) == pytest.approx(1.0 - 0.9 * 100 / 249)


@pytest.mark.parametrize("step", [0, 1, 9, 10, 99])
def test_warmup_multiplies_and_may_start_elsewhere(step):
    share = min((step + 1) / 10, 1)
    assert at({"kind": "constant", "start": 0.5, "warmup": 10}, step) == pytest.approx(0.5 * share)
    spec = {"kind": "linear", "start": 0.5, "end": 0.0, "warmup": {"steps": "1%", "from": 0.2}}
    linear = 0.5 * (1 - step / 999)
    assert at(spec, step) == pytest.approx(0.2 + (linear - 0.2) * share)


def test_type_and_value_are_accepted_for_kind_and_start():
    assert at({"type": "linear", "value": 0.4, "end": 0.2}, 999) == 0.2
    with pytest.raises(ValueError, match="another name"):
        parse_schedule({"type": "linear", "kind": "linear", "start": 1})


def test_a_bare_word_runs_from_the_fixed_value_to_zero():
    assert at("linear", 0, fixed=0.2) == 0.2
    assert at("cosine", 999, fixed=0.2) == 0.0
    with pytest.raises(ValueError, match="milestones"):
        parse_schedule("step", fixed=0.2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "linar", "start": 1}, "did you mean 'linear'"),
        ({"kind": "linear", "start": 1, "ned": 0}, "ned"),
        ({"kind": "linear"}, "start"),
        ({"kind": "step", "start": 1}, "either milestones or every"),
        ({"kind": "cyclic", "start": 1, "period": 0}, "more than 0"),
        ({"kind": "linear", "start": True}, "number"),
        ({"kind": "linear", "start": "0.3"}, "number"),
        ({"kind": "linear", "start": 1, "duration": "120%"}, "100%"),
        ({"kind": "linear", "start": 1, "duration": 2.5}, "whole number"),
        ([{"kind": "linear", "start": 1}, {"kind": "linear", "start": 1}], "segment 1 needs a duration"),
        ([{"kind": "linear", "start": 1, "duration": "80%"}, {"kind": "linear", "duration": "80%"}], "160%"),
        ([], "list of schedules"),
        ("no such kind", "unknown schedule kind"),
        (None, "mapping"),
    ],
)
def test_what_is_wrong_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(spec)


def test_points_out_of_order_are_found_once_the_horizon_is_known():
    schedule = parse_schedule({"kind": "piecewise", "points": [["50%", 1.0], [100, 0.5]]})
    schedule.check_order(150)
    with pytest.raises(ValueError, match="order of time"):
        schedule.check_order(1000)


def test_first_violation_names_the_very_step():
    schedule = parse_schedule({"kind": "linear", "start": 0.9, "end": -0.1})
    horizon = 1_000_000
    step, value = schedule.first_violation(horizon, low=0.0, high=math.inf)
    assert value < 0 <= schedule.at(step - 1, horizon)
    assert step == pytest.approx(900_000, abs=2)
    assert parse_schedule(0.5).first_violation(horizon, low=0.0, high=1.0) is None


numbers = st.floats(-1.0, 2.0)
amounts = st.one_of(st.integers(1, 400), st.integers(1, 100).map(lambda p: f"{p}%"))
both = st.fixed_dictionaries({"start": numbers, "end": numbers})
extras = st.fixed_dictionaries({}, optional={"warmup": st.integers(1, 500), "duration": amounts})
specs = st.one_of(
    st.tuples(st.sampled_from(["linear", "cosine", "polynomial", "exponential"]), both, extras).map(
        lambda t: {"kind": t[0], **t[1], **t[2]}
    ),
    st.tuples(both, amounts, st.sampled_from(["triangle", "cosine"]), st.floats(0, 1), extras).map(
        lambda t: {"kind": "cyclic", **t[0], "period": t[1], "shape": t[2], "decay": t[3], **t[4]}
    ),
    st.tuples(numbers, st.floats(0, 2), amounts, extras).map(
        lambda t: {"kind": "step", "start": t[0], "factor": t[1], "every": t[2], **t[3]}
    ),
    st.lists(numbers, min_size=1, max_size=5).map(
        lambda v: {"kind": "piecewise", "points": [[f"{100 * i / len(v):g}%", x] for i, x in enumerate(v)]}
    ),
)


@settings(max_examples=150, deadline=None)
@given(specs, st.integers(1, 700))
def test_bounds_check_agrees_with_brute_force(spec, horizon):
    schedule = parse_schedule(spec)
    low, high = 0.0, 1.0
    bad = [s for s in range(horizon) if not low - 1e-9 <= schedule.at(s, horizon) <= high + 1e-9]
    found = schedule.first_violation(horizon, low=low, high=high)
    assert (found is None) == (not bad)
    if bad:
        assert found == (bad[0], schedule.at(bad[0], horizon))


@settings(max_examples=150, deadline=None)
@given(specs, st.integers(1, 700), st.integers(0, 2000))
def test_values_are_finite_hold_past_the_horizon_and_survive_yaml(spec, horizon, step):
    schedule = parse_schedule(spec)
    value = schedule.at(step, horizon)
    assert math.isfinite(value)
    if step >= horizon - 1:
        assert value == schedule.at(horizon - 1, horizon)
    again = parse_schedule(yaml.safe_load(yaml.safe_dump(schedule.dump())))
    assert again.at(step, horizon) == value


def test_every_kind_is_covered_by_the_documentation():
    from conftest import REPOSITORY

    text = (REPOSITORY / "docs" / "schedules.md").read_text()
    assert all(f"`{kind}`" in text for kind in KINDS)


def test_a_run_of_one_step_is_at_its_end():
    assert at({"kind": "linear", "start": 1.0, "end": 0.2}, 0, horizon=1) == 0.2


def test_exponential_takes_its_rate():
    p, k = 300 / 999, 2.0
    expected = (math.exp(-k * p) - math.exp(-k)) / (1 - math.exp(-k))
    assert at({"kind": "exponential", "start": 1.0, "end": 0.0, "rate": k}, 300) == pytest.approx(expected)


def test_a_segment_has_no_warmup_of_its_own():
    with pytest.raises(ValueError, match="belongs to the sequence"):
        parse_schedule([{"kind": "linear", "start": 1.0, "duration": 5, "warmup": 2}, {"kind": "constant"}])


@pytest.mark.parametrize(
    ("spec", "step"),
    [
        ({"kind": "piecewise", "points": [[0, 0.5], [500_100, 0.5], [500_101, 5.0], [500_102, 0.5]]}, 500_101),
        (
            [
                {"kind": "constant", "start": 0.5, "duration": "25%"},
                {"kind": "piecewise", "points": [[0, 0.5], [250_100, 0.5], [250_101, 5.0], [250_102, 0.5]]},
            ],
            500_101,
        ),
        ({"kind": "linear", "start": 1.0005, "end": 0.0, "warmup": 100}, 99),
    ],
    ids=["spike", "spike in a segment", "end of the warm-up"],
)
def test_a_violation_of_a_single_step_is_found_in_a_long_run(spec, step):
    found = parse_schedule(spec).first_violation(1_000_000, low=0.0, high=1.0)
    assert found is not None
    assert found[0] == step


def test_points_are_ordered_within_their_segment():
    def spec(first, second):
        points = [[first, 0.5], [second, 0.1]]
        return [{"kind": "constant", "start": 0.5, "duration": "50%"}, {"kind": "piecewise", "points": points}]

    parse_schedule(spec("50%", 400)).check_order(1000)
    with pytest.raises(ValueError, match="order of time"):
        parse_schedule(spec(300, "50%")).check_order(1000)


def test_a_mapping_without_a_kind_is_told_so():
    with pytest.raises(ValueError, match="needs a kind"):
        parse_schedule({"start": 0.3, "end": 0.1})
    assert at({"value": 0.3}, 5) == 0.3
