"""A number that a callback writes takes the place of its schedule: in later updates, in the log, after a resume."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from conftest import TINY, learning_rates
from rl_training import ALGORITHMS, load_policy, resume_training, train
from rl_training.algorithms.laprop import LaProp
from rl_training.algorithms.optim import Adam, RMSprop
from rl_training.algorithms.ppo import PPO
from rl_training.errors import InputError
from rl_training.runtime.checkpoints import load_checkpoint
from test_checkpoint_workflows import stop_at
from test_contract import assert_same_future

FALLING = {"kind": "linear", "start": 1e-3, "end": 1e-4}


def quiet(config, *callbacks):
    return train(config, callbacks=callbacks, progress="silent")


def learner_after(config):
    """The learner of a run that is over."""
    seen = []
    quiet(config, lambda run: seen.append(run.learner))
    return seen[-1]


def write_at(step, **values):
    """Writes once, at the first record from `step` on."""

    def callback(run):
        if run.step >= step and not callback.done:
            callback.done = True
            for name, value in values.items():
                setattr(run.learner, name, value)

    callback.done = False
    return callback


def noting(used, step):
    """lr: a number, or a tensor of float32."""
    return lambda self, lr: (used.append(round(float(lr), 9)), step(self, lr))


def rates_used(monkeypatch):
    """The learning rates that optimizers are given."""
    used = []
    for optimizer in (Adam, LaProp, RMSprop):
        monkeypatch.setattr(optimizer, "step", noting(used, optimizer.step))
    return used


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_every_update_after_a_write_uses_the_written_value(algo, tiny_config, monkeypatch):
    used, seen = rates_used(monkeypatch), []

    def note(run):
        seen.extend((run.step, lr) for lr in used)
        used.clear()

    config = tiny_config(algo, {"log_interval": 32}, **learning_rates(algo, FALLING))
    result = quiet(config, note, write_at(128, **learning_rates(algo, 5e-4)))
    written = next(step for step, _ in seen if step > 128)
    assert {lr for step, lr in seen if step > 128} == {5e-4}
    assert 5e-4 not in {lr for step, lr in seen if step < written}
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if line["kind"] == "train" and line["global_step"] >= written]
    assert {line["learning_rate"] for line in later} == {5e-4}
    assert result.metrics["learning_rate"] == 5e-4


def test_the_clip_that_is_written_is_the_one_that_clips(tiny_config, monkeypatch):
    used, loss = [], PPO.loss
    monkeypatch.setattr(PPO, "loss", lambda self, *args: (used.append(self.hp.clip_coef), loss(self, *args))[1])
    quiet(tiny_config("ppo", {"total_timesteps": 96}, clip_coef=0.2), write_at(32, clip_coef=0.01))
    steps = TINY["ppo"]["num_minibatches"] * TINY["ppo"]["update_epochs"]
    assert used == [0.2] * steps + [0.01] * 2 * steps


def test_a_value_that_is_the_one_in_force_holds_as_well(tiny_config):
    """The write of a scheduled number's own value stops the schedule there."""
    hold = lambda run: setattr(run.learner, "clip_coef", run.learner.clip_coef) if run.step == 128 else None  # noqa: E731
    result = quiet(tiny_config("ppo", clip_coef={"kind": "linear", "start": 0.4, "end": 0.2}), hold)
    assert result.metrics["clip_coef"] == pytest.approx(0.4 - 0.2 * 128 / 255)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_written_value_survives_a_resume_exactly(algo, tiny_config, capsys):
    def config():
        return tiny_config(algo, learning_rate=FALLING, gamma={"kind": "linear", "start": 0.9, "end": 0.8})

    written = {"learning_rate": 5e-4, "max_grad_norm": None}
    whole = quiet(config(), write_at(64, **written))
    half = quiet(config(), write_at(64, **written), stop_at(128))
    resumed = resume_training(half.run_dir, progress="plain")
    assert "learning_rate stays at 0.0005" in capsys.readouterr().out
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics["learning_rate"] == 5e-4
    assert resumed.metrics["gamma"] == pytest.approx(0.8)
    assert "max_grad_norm" not in resumed.metrics
    hp = load_policy(half.run_dir).actor.hp
    assert (hp.learning_rate, hp.max_grad_norm) == (5e-4, None)


def test_a_write_before_a_checkpoint_of_the_same_record_is_in_it(tiny_config):
    config = tiny_config("ppo", {"checkpoint_interval": 64}, learning_rate=FALLING)

    def write_and_fail(run):
        if run.step > 64:
            raise RuntimeError("on purpose")
        if run.step == 64:
            run.learner.learning_rate = 5e-4

    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(config, write_and_fail)
    (run_dir,) = config.output_dir.iterdir()
    assert load_checkpoint(run_dir / "checkpoints" / "step_64").state["controls"] == {
        "overrides": {"learning_rate": 5e-4}
    }


def test_whole_hyperparameters_may_be_replaced(tiny_config):
    def replace(run):
        if run.step == 64:
            run.learner.hp = dataclasses.replace(run.learner.hp, clip_coef=0.05, update_epochs=1)

    metrics = quiet(tiny_config("ppo", clip_coef=FALLING, learning_rate=FALLING), replace).metrics
    assert (metrics["clip_coef"], metrics["update_epochs"]) == (0.05, 1)
    assert metrics["learning_rate"] == pytest.approx(1e-4)  # was not written, so its schedule goes on


def test_a_setting_cannot_be_changed_by_replacing_all(tiny_config):
    def replace(run):
        run.learner.hp = dataclasses.replace(run.learner.hp, num_steps=8)

    with pytest.raises(InputError, match="num_steps is a setting, fixed for the whole run"):
        quiet(tiny_config("ppo"), replace)


def test_foreign_hyperparameters_are_refused(tiny_config):
    def replace(run):
        run.learner.hp = object()

    with pytest.raises(InputError, match="should be a PPOHyperparameters, got a object"):
        quiet(tiny_config("ppo"), replace)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gamma", 1.5, r"gamma should be a finite number in \[0, 1\], got 1.5"),
        ("clip_coef", -0.1, r"clip_coef should be a finite number in \[0, inf\]"),
        ("learning_rate", float("nan"), "learning_rate should be a finite number"),
        ("learning_rate", float("inf"), "learning_rate should be a finite number"),
        ("update_epochs", 2.5, "update_epochs should be a whole number, got 2.5"),
        ("update_epochs", 0, r"update_epochs should be a finite number in \[1, inf\]"),
        ("learning_rate", None, "learning_rate should be a number, got None"),
        ("learning_rate", "fast", "learning_rate should be a number, got 'fast'"),
        ("learning_rate", True, "learning_rate should be a number, got True"),
    ],
)
def test_bounds_are_those_of_the_config(name, value, message, tiny_config):
    learner = learner_after(tiny_config("ppo", {"total_timesteps": 32}))
    before = learner.hp
    with pytest.raises(InputError, match=message):
        setattr(learner, name, value)
    assert learner.hp is before


def test_a_number_without_effect_cannot_be_written(tiny_config):
    learner = learner_after(tiny_config("dqn", {"total_timesteps": 32}, prioritized=False))
    with pytest.raises(InputError, match="beta has no effect without prioritized: true"):
        learner.beta = 0.5


def test_whole_numbers_stay_whole_and_numpy_numbers_become_plain(tiny_config):
    write = write_at(32, update_epochs=3.0, clip_coef=np.float32(0.25), num_minibatches=np.int64(4))
    result = quiet(tiny_config("ppo"), write)
    overrides = load_checkpoint(result.checkpoint_path).state["controls"]["overrides"]
    assert overrides == {"clip_coef": 0.25, "update_epochs": 3, "num_minibatches": 4}
    assert [type(value) for value in overrides.values()] == [float, int, int]


def test_the_reward_normaliser_follows_a_written_gamma(tiny_config):
    seen = []

    def note(run):
        seen.append((run.source.normalizers[0].gamma, run.learner.gamma))
        run.learner.gamma = 0.5

    config = {"env_kwargs": {"wrappers": {"normalize_reward": True}}, "total_timesteps": 96}
    result = train(tiny_config("ppo", config, gamma=0.9), callbacks=[note], progress="silent")
    assert seen == [(0.9, 0.9), (0.5, 0.5), (0.5, 0.5)]
    assert result.metrics["gamma"] == 0.5


def test_without_a_run_a_write_is_only_a_write(tiny_config):
    learner = learner_after(tiny_config("ppo", {"total_timesteps": 32}, learning_rate=FALLING))
    learner.learning_rate = 0.25
    assert learner.hp.learning_rate == 0.25
    obs = np.zeros((1, 4), np.float32)
    assert learner.actor.act(obs, {}, explore=False, rng=np.random.default_rng(0)).action[0] in (0, 1)


def test_a_run_without_writes_has_none_in_its_checkpoint(tiny_config):
    result = quiet(tiny_config("ppo", {"total_timesteps": 32}))
    assert load_checkpoint(result.checkpoint_path).state["controls"] == {"overrides": {}}
