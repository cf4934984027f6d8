"""An algorithm of less than 100 lines, added to the table, keeps the whole contract; nothing else has to know of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import conftest
import fake_algorithm
import test_contract as contract
from rl_training import ALGORITHMS, TrainConfig, train
from rl_training.runtime.hyperparameters import hyperparameters_of

PROMISES = [function for name, function in vars(contract).items() if name.startswith("test_")]
SCALAR, SETTING = "learning_rate", "num_steps"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "fake", fake_algorithm.FAKE)
    monkeypatch.setitem(conftest.TINY, "fake", {SETTING: 8})
    monkeypatch.setitem(conftest.ENVS, "fake", "CartPole-v1")


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_it_keeps(promise, request):
    given = {"algo": "fake", "name": SCALAR}
    names = inspect.signature(promise).parameters
    assert "algo" in names
    promise(**{name: given.get(name) or request.getfixturevalue(name) for name in names})


def test_it_is_short_and_declares_one_scalar_and_one_setting():
    assert len(Path(fake_algorithm.__file__).read_text().splitlines()) < 100
    declared = hyperparameters_of(fake_algorithm.FakeHyperparameters)
    assert {name: field.is_scalar for name, field in declared.items()} == {SCALAR: True, SETTING: False}


def test_it_learns(tmp_path):
    """Random play lasts about 22 steps."""
    config = TrainConfig("fake", "CartPole-v1", 40_000, tmp_path, num_envs=8, algo_kwargs={SCALAR: 0.05})
    assert train(config, progress="silent").metrics["eval_return_mean"] >= 100
