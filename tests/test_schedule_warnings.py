"""A schedule that does nothing is reported, and the preview shows how far a schedule goes."""

from __future__ import annotations

import pytest
import yaml

from rl_training import ALGORITHMS
from rl_training.runtime.controls import Controls
from rl_training.runtime.preview import COLUMNS, extremes, schedule_warnings, table
from test_cli import cli

H = 10_000


def controls(algo="ppo", horizon=H, **kwargs):
    return Controls(ALGORITHMS[algo].recipe.hyperparameters, kwargs, horizon)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"ent_coef_schedule": "linear"}, "ent_coef is scheduled, but stays 0 from the first step to the last"),
        ({"ent_coef": {"kind": "cosine", "start": 0.1, "end": 0.1}}, "stays 0.1"),
        ({"ent_coef_warmup_steps": 100}, "stays 0"),
        ({"clip_coef": {"kind": "step", "factor": 1, "every": "10%"}}, "clip_coef is scheduled, but stays 0.2"),
        ({"clip_coef": {"kind": "step", "milestones": [2 * H]}}, "clip_coef is scheduled, but stays 0.2"),
        ({"clip_coef": {"kind": "piecewise", "points": [[0, 0.3]]}}, "clip_coef is scheduled, but stays 0.3"),
        ({"clip_coef": {"kind": "cyclic", "end": 0.2, "period": "10%"}}, "clip_coef is scheduled, but stays 0.2"),
        ({"clip_coef": {"value": 0.3, "warmup": {"steps": 5, "from": 0.3}}}, "clip_coef is scheduled, but stays 0.3"),
        ({"clip_coef": [{"value": 0.3, "duration": 100}, {"value": 0.3}]}, "clip_coef is scheduled, but stays 0.3"),
        ({"update_epochs": {"kind": "linear", "start": 4, "end": 4.2}}, "update_epochs is scheduled, but stays 4"),
        (
            {"clip_coef_warmup_steps": 4 * H},
            "clip_coef: its warm-up takes 40,000 steps, the run only 10,000: it comes no further than 0.05",
        ),
        (
            {"clip_coef": {"kind": "linear", "duration": 2 * H}},
            "clip_coef: its schedule takes 20,000 steps, the run only 10,000: it comes no further than 0.1",
        ),
        (
            {"clip_coef": [{"kind": "linear", "end": 0.1, "duration": 9000}, {"kind": "linear", "duration": 9000}]},
            "clip_coef: its schedule takes 18,000 steps",
        ),
    ],
)
def test_a_schedule_without_effect_is_reported(kwargs, expected):
    (line,) = schedule_warnings(controls(**kwargs))
    assert expected in line


@pytest.mark.parametrize(
    ("algo", "kwargs"),
    [
        ("ppo", {}),
        ("ppo", {"ent_coef": 0.0, "clip_coef": 0.1}),
        ("ppo", {"ent_coef": {"kind": "constant", "start": 0.0}}),
        ("ppo", {"ent_coef": 0.1, "ent_coef_schedule": "linear", "ent_coef_warmup_steps": "100%"}),
        ("ppo", {"clip_coef": {"kind": "cyclic", "period": "25%"}}),
        ("ppo", {"clip_coef": [{"kind": "linear", "duration": "50%"}, {"kind": "linear", "end": 1}]}),
        ("ppo", {"clip_coef": {"kind": "step", "milestones": ["99.99%"]}}),
        ("dqn", {"exploration_fraction": 0.0, "final_epsilon": 1.0}),  # by default, not because it was scheduled
    ],
)
def test_one_with_an_effect_is_not(algo, kwargs):
    assert schedule_warnings(controls(algo, **kwargs)) == []


def test_the_warning_is_seen_in_every_command(tmp_path):
    data = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 64, "num_envs": 2, "output_dir": str(tmp_path)}
    data |= {"eval_episodes": 1, "algo_kwargs": {"num_steps": 16, "ent_coef_schedule": "linear"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    warning = "warning: ent_coef is scheduled, but stays 0"
    for words in (["config", "check", path], ["schedule", path], ["train", path, "--progress", "plain"]):
        assert warning in cli(*words, all_output=True), words


def test_the_table_shows_how_far_a_cycle_goes():
    """With a period of a quarter every quarter of the run is at the edge of a period, where a cycle is at rest."""
    cycle = {"kind": "cyclic", "start": 0.2, "end": 0.02, "period": "25%"}
    ((name, values),) = table(controls(horizon=H + 1, clip_coef=cycle))
    row = dict(zip(COLUMNS, values, strict=True))
    assert name == "clip_coef"
    assert [row[f"{quarter}%"] for quarter in (0, 25, 50, 75, 100)] == pytest.approx([0.2] * 5, abs=1e-3)
    assert (row["min"], row["max"]) == pytest.approx((0.02, 0.2), abs=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "cyclic", "start": 0.5, "end": 0.1, "period": 37},
        {"kind": "cyclic", "start": 0.5, "end": 0.1, "period": 1301, "shape": "cosine", "decay": 0.7},
        {"kind": "piecewise", "points": [[0, 0.1], [1234, 0.9], [1240, 0.2], ["100%", 0.3]]},
        {"kind": "step", "start": 0.8, "factor": 0.5, "milestones": [17, 9990]},
        [{"kind": "linear", "start": 0.1, "end": 0.7, "duration": 333}, {"kind": "cosine", "end": 0.05}],
        {"kind": "linear", "start": 0.5, "end": 0.1, "warmup": {"steps": 999, "from": 0.9}},
    ],
    ids=str,
)
def test_extremes_are_those_of_every_step(spec):
    both = controls(clip_coef=spec)
    every = [both.at(step).clip_coef for step in range(H)]
    assert extremes(both, "clip_coef") == pytest.approx((min(every), max(every)), rel=1e-9)
