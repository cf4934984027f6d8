"""Actors that lag behind the learner: which weights act, what is stored, and that a resume is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_training import ALGORITHMS, resume_training, train
from rl_training.data.batch import flatten
from rl_training.errors import ConfigError
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.impala_trainer import train_impala
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.run import TrainingRun
from rl_training.runtime.sources import LaggingSource, LocalSource, PublishedWeights
from rl_training.types import Weights
from test_contract import assert_equal_state, assert_same_future, same, weights
from test_spaces_in_training import SPACES

ASYNCHRONOUS = sorted(name for name, entry in ALGORITHMS.items() if entry.recipe.asynchronous)
each = pytest.mark.parametrize("algo", ASYNCHRONOUS)


def lagging(lag: int, **config):
    """Each update has a log line: metrics are otherwise means of several."""
    execution = {"backend": "serial", "simulate_lag": lag}
    return {"execution": execution, "total_timesteps": 512, "log_interval": 1, **config}


@each
def test_steps_are_those_of_the_old_weights(algo, tiny_config):
    """The behaviour log-probabilities and the values are those of the weights of three updates ago."""
    recipe, seen = ALGORITHMS[algo].recipe, []
    with TrainingRun(tiny_config(algo, lagging(3), learning_rate=1e-2), recipe, progress="silent") as run:
        for update in range(8):
            seen.append({name: value.clone() for name, value in run.actor.model.state_dict().items()})
            rollout = run.source.collect(run.show_steps)
            version = max(0, update - 3)
            assert (rollout.batch["version"] == version).all()
            old = recipe.actor(run.source.spaces[0], run.actor.hp, device="cpu").model
            newest = logprobs(run.actor.model, rollout)
            old.load_state_dict(seen[version])
            torch.testing.assert_close(logprobs(old, rollout), rollout.batch["logprob"], atol=1e-5, rtol=1e-4)
            if update:
                assert not torch.allclose(newest, rollout.batch["logprob"], atol=1e-5, rtol=1e-4)
            before = rollout.batch["logprob"].clone()
            run.advance(run.source.env_steps)
            metrics = run.learner.update(rollout)
            assert metrics["policy_lag_mean"] == metrics["policy_lag_max"] == update - version
            assert torch.equal(rollout.batch["logprob"], before)


@torch.no_grad()
def logprobs(model, rollout):
    batch = flatten({key: rollout.batch[key] for key in ("obs", "action")})
    return model(batch["obs"])[0].log_prob(batch["action"]).view(rollout.num_steps, rollout.num_envs)


@each
def test_the_lag_is_a_metric_and_changes_the_training(algo, tiny_config):
    results = [train(tiny_config(algo, config), progress="silent") for config in (lagging(0), lagging(2))]
    assert [result.metrics["policy_lag_max"] for result in results] == [0, 2]
    assert not same(*(weights(result.checkpoint_path) for result in results))


@each
def test_without_lag_nothing_is_copied_and_the_run_is_the_plain_one(algo, tiny_config):
    plain = train(tiny_config(algo, {"total_timesteps": 512, "log_interval": 1}), progress="silent")
    serial = train(tiny_config(algo, lagging(0)), progress="silent")
    assert_same_future(plain.checkpoint_path, serial.checkpoint_path)
    with TrainingRun(tiny_config(algo, lagging(0)), ALGORITHMS[algo].recipe, progress="silent") as run:
        assert type(run.source) is LocalSource
        assert run.source.actors == [run.actor]


@each
def test_an_actor_that_is_given_the_newest_weights_trains_as_a_shared_one(algo, tiny_config, monkeypatch):
    """What differs is only whose memory the weights are in."""
    shared = train(tiny_config(algo, lagging(0)), progress="silent")
    init = LaggingSource.__init__
    monkeypatch.setattr(LaggingSource, "__init__", lambda *args, lag, **more: init(*args, lag=0, **more))
    copied = train(tiny_config(algo, lagging(5)), progress="silent")
    assert copied.metrics["policy_lag_max"] == 0
    states = [load_checkpoint(result.checkpoint_path).state for result in (shared, copied)]
    for part in ("actor", "learner", "runner"):
        assert_equal_state(states[0][part], states[1][part])
    assert_equal_state(*(state["run"]["generators"] for state in states))  # the actor's first weights were drawn apart


def test_weights_are_published_once_for_each_version():
    class Counter:
        version = 3

        def weights(self):
            return Weights(np.full(2, self.version, np.float32), {}, self.version)

    published, actor = PublishedWeights(2), Counter()
    oldest = []
    for actor.version in (3, 3, 4, 4, 5, 5, 7):
        oldest.append(published.add(actor).version)
    assert oldest == [3, 3, 3, 3, 4, 4, 5]


@each
@pytest.mark.parametrize("at", [64, 256])
def test_resume_is_exact_with_the_queue_of_old_weights(algo, at, tiny_config, tmp_path):
    """At 64 steps fewer updates lie behind than the lag, at 256 more."""
    whole = train(tiny_config(algo, lagging(5)), progress="silent")
    half = train(tiny_config(algo, lagging(5, total_timesteps=at, schedule_horizon=512)), progress="silent")
    saved = load_checkpoint(half.checkpoint_path).state["published"]["versions"]
    assert len({version["vector"].tobytes() for version in saved}) == len(saved) > 1
    resumed = resume_training(half.run_dir, total_timesteps=512, output_dir=tmp_path / "resumed", progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics["policy_lag_max"] == whole.metrics["policy_lag_max"] == 5


@pytest.mark.parametrize("name", SPACES)
@each
def test_lag_with_images_and_other_actions(algo, name, tiny_config):
    result = train(tiny_config(algo, lagging(2, env_id=f"Every{name}-v0", total_timesteps=128)), progress="silent")
    assert result.metrics["policy_lag_max"] == 2


@pytest.mark.parametrize("algo", sorted(set(ALGORITHMS) - set(ASYNCHRONOUS)))
def test_other_algorithms_refuse_it(algo, tiny_config):
    with pytest.raises(ConfigError, match=rf"^execution: {algo} acts with the newest weights alone: .*appo or impala"):
        train(tiny_config(algo, lagging(1)), progress="silent")


def test_the_trainer_of_another_algorithm_refuses_it_as_well(tiny_config):
    with pytest.raises(ConfigError, match=r"^execution: ppo acts with the newest weights alone"):
        train_ppo(tiny_config("ppo", lagging(1)), progress="silent")


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        ({"backend": "threads"}, "execution.backend: should be 'serial', 'process' or 'ray'"),
        ({"simulate_lag": -1}, "execution.simulate_lag: should be greater than or equal to 0"),
        ({"simulate_lag": 1.5}, "execution.simulate_lag: should be a whole number"),
        ({"simulate_lags": 1}, "execution.simulate_lags: unknown key; did you mean 'simulate_lag'?"),
    ],
)
def test_mistakes_are_named(execution, message, tiny_config):
    for start in (train, train_impala):
        with pytest.raises(ConfigError) as error:
            start(tiny_config("impala", {"execution": execution}), progress="silent")
        assert message in str(error.value)
