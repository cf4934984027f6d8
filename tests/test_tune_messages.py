"""What tune says of trials that end before their last seed."""

from __future__ import annotations

import re

import pytest

from fake_jobs import FakePlace, evaluation, failed, finished
from rl_training.studies import jobs
from test_cli import cli

pytest.importorskip("optuna")
from rl_training.studies import tune as tune_module

CONFIG = """
algo: a2c
env_id: CartPole-v1
total_timesteps: 1_000
eval_interval: 500
tune: {algo_kwargs.gamma: {uniform: [0.9, 0.99]}}
"""


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Call tune with jobs that play a script."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def call(play, *words, code=0):
        monkeypatch.setattr(tune_module, "make_place", lambda number, ray: FakePlace(1, play))
        fixed = ["tune", tmp_path / "config.yaml", "--out", tmp_path / "study", "--progress", "plain"]
        return cli(*fixed, *words, code=code, all_output=True)

    return call


def test_a_metric_that_there_is_not_is_said_with_the_first_trial(tuned, tmp_path):
    text = tuned(lambda order, host: iter([finished(1.0)]), "--trials", 2, "--metric", "eval_retrun_mean", code=1)
    message = "eval_retrun_mean is no number at the end of the run; did you mean 'eval_return_mean'?"
    assert text.index(f"trial 0: failed: {message}") < text.index("trial 1: gamma")
    assert f"error: no trial is complete (2 failed); trial 0: {message}" in text
    assert f"outputs are in {tmp_path / 'study'}/trial*/*/output.txt" in text


def test_errors_of_trials_are_in_the_result(tuned):
    text = tuned(
        lambda order, host: iter([failed("boom\ntrace") if "trial0000" in order["folder"] else finished(2.0)]),
        "--trials", 3,
    )  # fmt: skip
    assert "trial 0: failed: boom\n" in text
    assert re.search(r"Tuned: 1 failed, 2 complete. Best value 2", text)


def test_a_trial_that_is_pruned_between_seeds_says_so(tuned):
    def play(order, host):
        score = 1.0 if "trial0002" in order["folder"] else 9.0
        yield evaluation(500, 1_000, score)
        yield finished(score)

    text = tuned(play, "--trials", 3, "--seeds", "0-1", "--startup-trials", 1)
    assert "trial 2: pruned after 1 of 2 seeds" in text
    assert "Tuned: 2 complete, 1 pruned. Best value 9" in text
