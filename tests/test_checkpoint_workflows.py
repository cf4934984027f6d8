"""Train, stop in every way a run can stop, resume, evaluate, predict: from checkpoints alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

from rl_training import (
    ALGORITHMS,
    CheckpointError,
    TrainingInterrupted,
    evaluate_checkpoint,
    load_config,
    load_policy,
    predict_checkpoint,
    resume_training,
    train,
)
from rl_training.runtime.checkpoints import load_checkpoint
from test_contract import assert_same_future, weights

ALGOS = sorted(ALGORITHMS)
NORMALISED = {"wrappers": {"normalize_observation": True, "normalize_reward": True}}


def stop_at(step):
    def callback(run):
        if run.step >= step:
            run.stop("told to")

    return callback


CASES = [
    (algo, env_id)
    for algo in ALGOS
    for env_id, kind in (("CartPole-v1", "Discrete"), ("Pendulum-v1", "Box"))
    if kind in ALGORITHMS[algo].recipe.actions.split(", ")
]


@pytest.mark.parametrize(("algo", "env_id"), CASES)
def test_a_run_stopped_half_way_resumes_exactly(algo, env_id, tiny_config):
    """With schedules and normalisers under way, in the middle of episodes, with a ring that has come round."""
    wrappers = {"normalize_observation": True} | ({} if algo == "gail" else {"normalize_reward": True})
    env_kwargs = {"wrappers": wrappers}  # gail has a reward of its own
    config = {"total_timesteps": 768, "env_id": env_id, "env_kwargs": env_kwargs, "eval_interval": 128}
    discount = "horizon" if algo == "dreamer" else "gamma"
    kwargs = {"learning_rate": {"kind": "cosine", "start": 1e-3, "end": 0.0}}
    kwargs[discount] = {"kind": "linear", "end": 1.0 if algo == "dreamer" else 0.0}
    whole = train(tiny_config(algo, config, **kwargs), progress="silent")
    half = train(tiny_config(algo, config, **kwargs), callbacks=[stop_at(400)], progress="silent")
    assert 400 <= half.metrics["global_step"] < 768
    resumed = resume_training(half.checkpoint_path, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics.keys() == whole.metrics.keys()
    for name in whole.metrics.keys() - {"steps_per_second"}:
        assert resumed.metrics[name] == pytest.approx(whole.metrics[name], nan_ok=True, abs=0), name


@pytest.mark.parametrize("env_kwargs", [{"backend": "vector"}, {"backend": "async"}])
def test_other_backends_resume_exactly(env_kwargs, tiny_config):
    config = {"total_timesteps": 512, "env_kwargs": env_kwargs}
    whole = train(tiny_config("ppo", config), progress="silent")
    half = train(tiny_config("ppo", config), callbacks=[stop_at(200)], progress="silent")
    resumed = resume_training(half.checkpoint_path, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)


SCRIPT = """
import sys
from rl_training import load_config, train
train(load_config(sys.argv[1]), run_suffix="killed", progress="silent")
"""


@pytest.fixture
def long_run(tiny_config, tmp_path):
    """A config of some seconds, as a file, with checkpoints on the way."""
    config = tiny_config("ppo", {"total_timesteps": 30_000}, num_steps=64, clip_coef_schedule="linear")
    data = {
        "algo": config.algo,
        "env_id": config.env_id,
        "total_timesteps": config.total_timesteps,
        "num_envs": 2,
        "eval_episodes": 1,
        "checkpoint_interval": 256,
        "output_dir": str(config.output_dir),
        "algo_kwargs": config.algo_kwargs,
    }
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_run_resumes_exactly(long_run, tmp_path):
    """kill -9 at a random moment; then the newest checkpoint, resumed, must meet a run that was never killed."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(long_run)], stderr=subprocess.PIPE, text=True)
    run_dir = tmp_path / "runs" / "ppo__CartPole-v1__seed0__killed"
    wait_for(lambda: len(list(run_dir.glob("checkpoints/step_*"))) >= 2, process)
    time.sleep(random.uniform(0, 0.5))
    process.kill()
    process.communicate()
    newest = max(int(p.name.removeprefix("step_")) for p in run_dir.glob("checkpoints/step_*"))
    target = newest + 1024
    whole = train(load_config(long_run), callbacks=[stop_at(target)], progress="silent")
    resumed = resume_training(run_dir, callbacks=[stop_at(target)], progress="silent")
    assert load_checkpoint(resumed.checkpoint_path).step == load_checkpoint(whole.checkpoint_path).step
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_resume(number, long_run, tmp_path):
    command = [
        sys.executable,
        "-m",
        "rl_training",
        "train",
        str(long_run),
        "--run-suffix",
        "sig",
        "--progress",
        "plain",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = tmp_path / "runs" / "ppo__CartPole-v1__seed0__sig"
    wait_for(lambda: any(run_dir.glob("checkpoints/step_*")), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"resume {run_dir}" in errors
    assert "Traceback" not in errors
    assert json.loads((run_dir / "metadata.json").read_text())["status"].startswith("stopped: received SIG")
    step = load_checkpoint(next(iter(sorted(run_dir.glob("checkpoints/step_*"))))).step
    assert 0 < step < 30_000


def test_an_interrupt_in_a_library_call_raises_with_the_result(tiny_config):
    def interrupt(run):
        if run.step >= 128:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingInterrupted) as caught:
        train(tiny_config("ppo"), callbacks=[interrupt], progress="silent")
    assert load_checkpoint(caught.value.result.checkpoint_path).step == caught.value.result.metrics["global_step"]
    assert signal.getsignal(signal.SIGINT) is before


def test_extending_keeps_or_stretches_the_schedules(tiny_config, tmp_path):
    config = tiny_config("ppo", {"total_timesteps": 256}, clip_coef={"kind": "linear", "start": 0.4, "end": 0.2})
    result = train(config, progress="silent")
    kept = resume_training(result.run_dir, total_timesteps=512, progress="silent")
    assert kept.metrics["clip_coef"] == 0.2
    assert yaml.safe_load((kept.run_dir / "config.yaml").read_text())["schedule_horizon"] == 256
    stretched = resume_training(
        result.run_dir, total_timesteps=512, extend="stretch", output_dir=tmp_path / "other", progress="silent"
    )
    assert stretched.metrics["clip_coef"] == 0.2
    logged = [json.loads(line) for line in (stretched.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert load_config(stretched.run_dir / "config.yaml").horizon == 512
    assert logged
    again = resume_training(kept.run_dir, total_timesteps=768, progress="silent")
    assert load_config(again.run_dir / "config.yaml").horizon == 256
    half_way = resume_training(
        result.run_dir, total_timesteps=512, extend="stretch", callbacks=[stop_at(384)], progress="silent"
    )
    assert half_way.metrics["clip_coef"] == pytest.approx(0.4 - 0.2 * 384 / 511)


def test_a_resumed_run_has_a_folder_of_its_own_that_names_its_origin(tiny_config):
    result = train(tiny_config("ppo"), progress="silent")
    resumed = resume_training(result.run_dir, total_timesteps=320, progress="silent")
    assert resumed.run_dir != result.run_dir
    metadata = json.loads((resumed.run_dir / "metadata.json").read_text())
    assert metadata["resumed_from"] == str(result.checkpoint_path)
    assert metadata["resumed_at_step"] == 256
    assert metadata["environments_not_restored"] == []
    assert "resumed-at-256" in resumed.run_dir.name


def test_nothing_left_to_train_is_said_so(tiny_config):
    result = train(tiny_config("ppo"), progress="silent")
    with pytest.raises(ValueError, match="total_timesteps more than 256"):
        resume_training(result.run_dir)
    with pytest.raises(ValueError, match="keep or stretch"):
        resume_training(result.run_dir, extend="both")


class Forgetful(gym.Env):
    """Draws from no generator that a seed could set."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.frombuffer(os.urandom(2), np.uint8).astype(np.float32) / 255, {}

    def step(self, action):
        obs, _ = self.reset()
        return obs, 1.0, bool(obs[0] < 0.05), False, {}


def test_environments_that_cannot_be_restored_are_named(tiny_config, capsys):
    if "Forgetful-v0" not in gym.registry:
        gym.register("Forgetful-v0", entry_point=Forgetful, max_episode_steps=50)
    result = train(tiny_config("ppo", {"env_id": "Forgetful-v0"}), progress="silent")
    resumed = resume_training(result.run_dir, total_timesteps=320, progress="plain")
    assert "cannot give back their state" in capsys.readouterr().out
    assert json.loads((resumed.run_dir / "metadata.json").read_text())["environments_not_restored"] == [0, 1]


def test_evaluate_a_checkpoint_a_run_folder_and_the_best(tiny_config):
    result = train(tiny_config("ppo", {"eval_interval": 64}), progress="silent")
    metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=3)
    assert metrics.keys() == {"eval_return_mean", "eval_return_std", "eval_return_min", "eval_episodes"}
    assert metrics["eval_episodes"] == 3
    assert evaluate_checkpoint(result.run_dir, num_episodes=3) == metrics
    best = evaluate_checkpoint(result.run_dir / "checkpoints" / "best")
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert best["eval_return_mean"] == max(line["eval_return_mean"] for line in lines if "eval_return_mean" in line)


def test_the_policy_sees_what_training_saw(tiny_config):
    """A policy in someone's own loop earns exactly what evaluation reports: same normaliser, same actions."""
    config = tiny_config("ppo", {"env_id": "Pendulum-v1", "env_kwargs": NORMALISED, "eval_episodes": 1})
    result = train(config, progress="silent")
    policy = load_policy(result.run_dir)
    env = gym.make("Pendulum-v1")
    from rl_training.envs.episodes import episode_seed
    from rl_training.runtime.randomness import seed_of

    obs, _ = env.reset(seed=episode_seed(seed_of(config.seed, "evaluation"), 0, 0))
    total, done = 0.0, False
    while not done:
        action = policy.act(obs)
        assert env.action_space.contains(action)
        obs, reward, terminated, truncated, _ = env.step(action)
        total, done = total + float(reward), terminated or truncated
    assert total == pytest.approx(result.metrics["eval_return_mean"], rel=1e-6)
    assert np.array_equal(predict_checkpoint(result.run_dir, obs), policy.act(obs))
    noisy = {float(policy.act(obs, deterministic=False)[0]) for _ in range(5)}
    assert len(noisy) > 1


def test_only_the_newest_checkpoints_are_kept(tiny_config):
    result = train(tiny_config("ppo", {"checkpoint_interval": 32, "keep_checkpoints": 2}), progress="silent")
    names = sorted(p.name for p in (result.run_dir / "checkpoints").iterdir())
    assert names == ["best", "step_224", "step_256"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "foreign"])
def test_a_damaged_checkpoint_is_refused_whole(damage, tiny_config, tmp_path):
    result = train(tiny_config("ppo", {"checkpoint_interval": 0}), progress="silent")
    file = result.checkpoint_path / "actor.safetensors"
    data = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(data[:-7])
    elif damage == "flip":
        file.write_bytes(data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    elif damage == "remove":
        file.unlink()
    path = tmp_path / "elsewhere"
    path.mkdir()
    target = path if damage == "foreign" else result.checkpoint_path
    for use in (evaluate_checkpoint, load_policy, resume_training):
        with pytest.raises(CheckpointError):
            use(target)


def test_divergence_stops_the_run_and_keeps_the_last_good_checkpoint(tiny_config):
    from rl_training.runtime.metrics import TrainingDiverged

    def poison(run):
        if run.step >= 128:
            with torch.no_grad():
                next(run.learner.model.parameters()).fill_(float("nan"))

    with pytest.raises(TrainingDiverged, match=r"step 160.*loss.*last good checkpoint is .*step_128"):
        train(tiny_config("ppo", {"checkpoint_interval": 64}), callbacks=[poison_after_save(poison)], progress="silent")


def poison_after_save(poison):
    """Callbacks run before the checkpoint of the same record: wait one record, so that step 128 is saved whole."""
    seen = []

    def callback(run):
        if seen:
            poison(run)
        if run.step >= 96:
            seen.append(run.step)

    return callback


def test_early_stopping_from_the_config(tiny_config):
    config = {"eval_interval": 64, "total_timesteps": 4096, "callbacks": {"early_stopping": {"target": 1.0}}}
    result = train(tiny_config("ppo", config), progress="silent")
    assert result.metrics["global_step"] == 64
    status = json.loads((result.run_dir / "metadata.json").read_text())["status"]
    assert "target" in status


def test_weights_are_plain_tensors(tiny_config):
    result = train(tiny_config("a2c"), progress="silent")
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights(result.checkpoint_path).values())
