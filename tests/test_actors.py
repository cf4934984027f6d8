"""Actors that lag behind the learner, in its process and in others: which weights act, what is stored, exact resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from actor_runs import messages, process
from rl_training import ALGORITHMS, resume_training, train
from rl_training.data.batch import flatten
from rl_training.errors import ConfigError
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.impala_trainer import train_impala
from rl_training.runtime.loading import as_config
from rl_training.runtime.metrics import RunningMeans
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.process_fleet import ProcessFleet
from rl_training.runtime.run import TrainingRun
from rl_training.runtime.sources import LaggingSource, LocalSource, PublishedWeights
from rl_training.types import Weights
from smoke import check_run
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
        ({"actors": 2}, "execution: actors has no effect with backend: serial, only with process or ray"),
        ({"backend": "process", "simulate_lag": 2}, "simulate_lag has no effect with backend: process"),
        ({"backend": "process", "address": "auto"}, "address has no effect with backend: process, only with ray"),
        ({"backend": "process", "actors": 0}, "execution.actors: should be greater than or equal to 1"),
        ({"backend": "process", "actor_timeout": 0}, "execution.actor_timeout: should be greater than 0"),
        ({"backend": "process", "on_actor_death": "ignore"}, "execution.on_actor_death: should be 'restart' or 'fail'"),
        ({"backend": "process", "queue": 0, "when_full": "drop"}, "when_full: drop has no effect with queue: 0"),
        ({"backend": "process", "actors": 3}, "execution.actors: 2 environments cannot be shared out among 3 actors"),
        ({"backend": "process", "actor_device": "auto"}, "execution.actor_device: should be cpu, cuda, cuda:<index>"),
        ({"backend": "process", "actor_device": "cuda:99"}, "execution.actor_device: 'cuda:99' is not available"),
        ({"backend": "ray", "actor_device": "cuda:0"}, "execution.actor_device: should be cpu or cuda with backend: r"),
    ],
)
def test_mistakes_are_named(execution, message, tiny_config):
    """By a check of the config as well as by a run."""
    for start in (as_config, train_impala):
        with pytest.raises(ConfigError) as error:
            start(tiny_config("impala", {"execution": execution}))
        assert message in str(error.value)


def test_environments_are_shared_out_from_the_algorithms_own_number_of_them():
    config = {"algo": "impala", "env_id": "CartPole-v1", "total_timesteps": 1}
    with pytest.raises(ConfigError, match=r"execution.actors: 16 environments cannot be shared out among 3 actors"):
        as_config(config | {"execution": {"backend": "process", "actors": 3}})
    assert as_config(config | {"execution": {"backend": "process", "actors": 8}})


def test_the_largest_lag_of_a_log_line_is_the_largest_of_its_updates():
    means = RunningMeans()
    for lag in (1.0, 7.0, 2.0):
        means.add({"policy_lag_mean": lag, "policy_lag_max": lag})
    restored = RunningMeans()
    restored.load_state_dict(means.state_dict())
    restored.add({"policy_lag_mean": 2.0, "policy_lag_max": 3.0})
    assert restored.mean() == {"policy_lag_mean": 3.0, "policy_lag_max": 7.0}
    restored.add({"policy_lag_max": 2.0})
    assert restored.mean() == {"policy_lag_max": 2.0}


BOTH = {"normalize_observation": True, "normalize_reward": True}
CASES = {"impala": {}, "impala with memory": {"recurrent": True, "recurrent_size": 8}, "appo": {}}
ALL_METRICS = {
    "policy_lag_mean", "policy_lag_max", "queue_fill", "rollouts_dropped", "actor_restarts",
    "actor_steps_per_second", "learner_steps_per_second", "actor_waiting", "learner_waiting",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_actor_in_lock_step_trains_as_this_process_does(case, tiny_config):
    """With a discount that changes, which also scales rewards."""
    algo, env = case.split()[0], {"env_kwargs": {"wrappers": BOTH}, "log_interval": 1}
    gamma = {"gamma_schedule": {"kind": "linear", "start": 0.5, "end": 0.9}}
    executions = {"serial": {}, "process": process(actors=1, queue=0)}
    results = {
        name: train(tiny_config(algo, {**env, **execution}, **CASES[case], **gamma), progress="silent")
        for name, execution in executions.items()
    }
    serial, elsewhere = (load_checkpoint(result.checkpoint_path).state for result in results.values())
    for part in ("actor", "learner"):
        assert_equal_state(serial[part], elsewhere[part])
    (worker,) = elsewhere["runner"]["workers"]
    for key in ("observation", "reward"):
        assert_equal_state(serial["normalizer"][key], elsewhere["normalizer"][key])
    assert_equal_state(serial["normalizer"]["returns"], worker["returns"])
    there, here = ({**runner, "memory": None} for runner in (worker["runner"], serial["runner"]))
    assert_equal_state({**there, "recent_returns": None}, {**here, "recent_returns": None})
    memory = serial["runner"]["memory"]
    assert all(np.array_equal(memory[key], worker["runner"]["memory"][key]) for key in memory)
    metrics = {name: value for name, value in results["serial"].metrics.items() if name != "steps_per_second"}
    assert metrics.items() <= results["process"].metrics.items()
    assert metrics["policy_lag_max"] == 0


def test_resume_in_lock_step_is_exact(tiny_config, tmp_path, monkeypatch):
    told = messages(monkeypatch)
    config = {**process(actors=2, queue=0), "checkpoint_interval": 128, "env_kwargs": {"wrappers": BOTH}}
    whole = train(tiny_config("appo", config), progress="silent")
    half = whole.run_dir / "checkpoints" / "step_128"
    resumed = resume_training(half, output_dir=tmp_path / "resumed", progress="silent")
    one, other = (load_checkpoint(result.checkpoint_path).state for result in (whole, resumed))
    for part in ("actor", "learner", "runner", "normalizer"):
        assert_equal_state(one[part], other[part])
    assert not [line for line in told if "not bit for bit" in line]


def test_resume_beside_the_learner_is_valid_and_says_that_it_is_not_exact(tiny_config, tmp_path, monkeypatch):
    told = messages(monkeypatch)
    config = tiny_config("impala", process(actors=2), recurrent=True, cell="gru", recurrent_size=8)
    half = train(config, progress="silent")
    assert half.metrics.keys() >= ALL_METRICS
    assert half.metrics["policy_lag_max"] >= half.metrics["policy_lag_mean"] >= 0
    workers = load_checkpoint(half.checkpoint_path).state["runner"]["workers"]
    assert [len(worker["runner"]["first"]) for worker in workers] == [1, 1]
    resumed = resume_training(half.run_dir, total_timesteps=512, output_dir=tmp_path / "resumed", progress="silent")
    assert resumed.metrics["global_step"] == 512
    facts = json.loads((resumed.run_dir / "metadata.json").read_text())
    assert facts["environments_not_restored"] == []
    assert facts["backend"] == json.loads((half.run_dir / "metadata.json").read_text())["backend"]
    assert len([line for line in told if "a valid continuation, but not bit for bit" in line]) == 1
    assert not [line for line in told if "began new episodes" in line]


REMOTE = [("impala", "MultiDiscrete"), ("appo", "Box"), ("impala", "DiscreteFromFive"), ("appo", "MultiBinary")]


@pytest.mark.parametrize(("algo", "name"), REMOTE)
def test_images_and_other_actions_in_another_process(algo, name, tiny_config):
    """With schedules, which the actor is told as well."""
    clip = {"clip_coef_schedule": {"kind": "linear", "start": 0.3, "end": 0.1}} if algo == "appo" else {}
    entropy = {"ent_coef_schedule": {"kind": "linear", "start": 0.02, "end": 0.005}}
    config = tiny_config(
        algo, {"env_id": f"Every{name}-v0", "total_timesteps": 64, **process(actors=1)}, **entropy, **clip
    )
    result = train(config, progress="silent")
    check_run(result, config)
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert not clip or result.metrics["clip_coef"] == pytest.approx(0.1)


def test_each_order_has_the_current_hyperparameters(tiny_config, monkeypatch):
    """gamma is the one that it needs: rewards are divided by the deviation of the discounted return."""
    orders, order = [], ProcessFleet.order
    monkeypatch.setattr(ProcessFleet, "order", lambda self, i, o: (orders.append(o.hp.gamma), order(self, i, o))[1])
    gamma = {"kind": "linear", "start": 0.5, "end": 0.9}
    config = tiny_config("impala", {**process(actors=1, queue=0), "total_timesteps": 64}, gamma_schedule=gamma)
    train(config, progress="silent")
    np.testing.assert_allclose(orders, [0.5 + 0.4 * step / 63 for step in (0, 16, 32, 48)])
