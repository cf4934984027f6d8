"""What a run promises beside its numbers: generators, evaluations, signals, its folder, the process it leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

from rl_training import TrainingInterrupted, load_policy, resume_training, train
from rl_training.algorithms.muzero import MuZeroHyperparameters
from rl_training.envs.runner import EnvRunner, FinishedEpisode
from rl_training.envs.tasks import clips_reward
from rl_training.errors import InputError
from rl_training.runtime import atomic_files, evaluation, run_evaluations
from rl_training.runtime import run as run_module
from rl_training.runtime.a2c_trainer import A2C_RECIPE, train_a2c
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.randomness import STREAMS, global_state, own_global_state, seed_of
from rl_training.runtime.run_folder import wandb_options
from rl_training.runtime.setup import pick_device, quick_kernels
from rl_training.types import Spaces
from test_checkpoint_workflows import stop_at, wait_for
from test_contract import assert_equal_state, assert_same_future


class Dicey(gym.Env):
    """Draws from the process-wide generators, as careless environments do."""

    observation_space = gym.spaces.Box(0, 1, (3,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([np.random.random(), random.random(), torch.rand(()).item()], np.float32), {}

    def step(self, action):
        obs, _ = self.reset()
        return obs, float(obs.sum()), bool(obs[0] < 0.1), False, {}


@pytest.fixture
def dicey():
    if "Dicey-v0" not in gym.registry:
        gym.register("Dicey-v0", entry_point=Dicey, max_episode_steps=20)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_evaluating_leaves_the_global_generators_alone(dicey, tiny_config):
    states = []
    for interval in (0, 32):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        result = train(tiny_config("a2c", {"env_id": "Dicey-v0", "eval_interval": interval}), progress="silent")
        states.append(load_checkpoint(result.checkpoint_path).state)
    for part in ("actor", "learner"):
        assert_equal_state(states[0][part], states[1][part])
    assert_equal_state(states[0]["run"]["generators"], states[1]["run"]["generators"])


def test_global_generators_are_saved_and_restored(dicey):
    def draw():
        return random.random(), np.random.random(), torch.rand(()).item()

    inside = []
    for _ in range(2):
        with own_global_state(5):
            inside.append(draw())
    after = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert after == draw()
    assert inside[0] == inside[1] != after


def test_a_resume_goes_on_with_the_global_generators(dicey, tiny_config):
    half = train(tiny_config("a2c", {"env_id": "Dicey-v0"}), callbacks=[stop_at(128)], progress="silent")
    saved = load_checkpoint(half.checkpoint_path).state["run"]["generators"]
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    seen = []
    note = lambda run: seen.append(run.parts["run"].state_dict()["generators"]["python"][1])  # noqa: E731
    original = EnvRunner.step

    def first_step(self, act, *, explore=True):
        if not seen:
            seen.append(global_state())
        return original(self, act, explore=explore)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvRunner, "step", first_step)
        resume_training(half.run_dir, progress="silent", callbacks=[note])
    assert_equal_state(seen[0], saved)


def test_every_use_of_the_seed_has_its_own_stream():
    assert len({seed_of(0, stream) for stream in STREAMS}) == len(STREAMS)
    assert seed_of(0, "model") != seed_of(1, "model")


def best_step(run_dir):
    return load_checkpoint(run_dir / "checkpoints" / "best").step


def test_the_first_of_equal_evaluations_is_the_best(scores, tiny_config):
    scores += [1.0, 3.0, 3.0, 2.0]
    assert best_step(train(tiny_config("a2c", {"eval_interval": 64}), progress="silent").run_dir) == 128


def test_a_resumed_run_remembers_its_evaluations(scores, tiny_config):
    scores += [5.0, 9.0, 4.0, 3.0, 3.0, 3.0]
    counts = []
    count = lambda run: counts.append((run.step, run.evaluations, run.evaluation.best))  # noqa: E731
    half = train(tiny_config("a2c", {"eval_interval": 64}), callbacks=[stop_at(128)], progress="silent")
    resume_training(half.run_dir, callbacks=[count], progress="silent")
    assert counts[0] == (144, 2, 9.0)
    assert counts[-1] == (256, 4, 9.0)
    assert len(scores) == 2


def test_early_stopping_counts_on_after_a_resume(scores, tiny_config):
    scores += [5.0, 4.0, 3.0, 2.0, 1.0]
    config = {"eval_interval": 64, "callbacks": {"early_stopping": {"patience": 3}}}
    half = train(tiny_config("a2c", config), callbacks=[stop_at(128)], progress="silent")
    resumed = resume_training(half.run_dir, progress="silent")
    assert resumed.metrics["global_step"] == 256
    assert "did not improve in 3" in json.loads((resumed.run_dir / "metadata.json").read_text())["status"]


class Counts:
    """A callback that counts its calls, from where it is told to begin."""

    def __init__(self, count=0, name=None):
        self.count, self.name = count, name

    def __call__(self, run):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Others(Counts):
    pass


def test_callbacks_get_their_own_state_back_by_name(tiny_config, capsys):
    half = train(tiny_config("ppo"), callbacks=[Counts(), Others(100), stop_at(128)], progress="silent")
    others = Others()
    resume_training(half.run_dir, callbacks=[others], progress="plain", total_timesteps=160)
    assert others.count == 105  # 4 records before, 1 after
    text = capsys.readouterr().out
    assert f"{half.checkpoint_path} holds the state of a callback Counts, which this run does not have" in text
    assert "Others" not in text
    counts, others = Counts(), Others()
    resume_training(half.run_dir, callbacks=[others, counts], progress="plain", total_timesteps=160)
    assert (counts.count, others.count) == (5, 105)
    assert "a callback" not in capsys.readouterr().out


def test_callbacks_of_one_class_are_told_apart(tiny_config, capsys):
    def resumed(*callbacks):
        resume_training(half.run_dir, callbacks=callbacks, progress="plain", total_timesteps=160)
        return [callback.count for callback in callbacks]

    first = [Counts(0), Counts(100), Counts(200, name="late"), stop_at(128)]
    half = train(tiny_config("ppo"), callbacks=first, progress="silent")
    assert load_checkpoint(half.checkpoint_path).state.keys() >= {
        "callback_Counts", "callback_Counts_2", "callback_late"
    }  # fmt: skip
    assert resumed(Counts(), Counts()) == [5, 105]
    assert "callback late, which this run does not have" in capsys.readouterr().out
    assert resumed(Counts(name="late"), Counts()) == [205, 5]
    assert resumed(Counts(name="new"))[0] == 1
    assert "holds no state of the callback new: it begins anew" in capsys.readouterr().out


def test_a_callbacks_name_is_part_of_a_file_name(tiny_config):
    config = tiny_config("ppo")
    with pytest.raises(InputError, match=r"a callback's name should be letters, digits, _ and -, got '\.\./x'"):
        train(config, callbacks=[Counts(name="../x")], progress="silent")
    assert not config.output_dir.exists() or not list(config.output_dir.iterdir())


@pytest.mark.parametrize("what", ["a run folder", "a checkpoint"])
def test_a_resume_sweeps_what_killed_writers_left_where_it_comes_from(what, tiny_config):
    half = train(tiny_config("ppo"), callbacks=[stop_at(128)], progress="silent")
    dead, alive = (half.run_dir / "checkpoints" / f".step_{step}.99-a.tmp" for step in (1, 2))
    for path in (dead, alive):
        path.mkdir()
        (path / "actor.safetensors").write_bytes(b"half")
    foreign = half.run_dir / "checkpoints" / ".editor.tmp"
    foreign.mkdir()
    lock = atomic_files.lock(alive)
    resume_training(half.run_dir if what == "a run folder" else half.checkpoint_path, progress="silent")
    assert not dead.exists()
    assert (alive / "actor.safetensors").exists()
    assert foreign.exists()
    os.close(lock)


def test_a_run_leaves_the_process_as_it_was(tiny_config):
    torch.set_num_threads(2)
    seen, closed = [], []

    def look(run):
        if not seen:
            seen.append(torch.get_num_threads())
            (runner,) = run.source.runners
            close = runner.envs.close
            runner.envs.close = lambda: closed.append(close())

    train(tiny_config("a2c", {"num_threads": 2}), callbacks=[look], progress="silent")
    auto = tiny_config("a2c", {"num_threads": "auto"})
    train(auto, callbacks=[lambda run: seen.append(torch.get_num_threads())], progress="silent")
    assert seen[:2] == [2, 1]
    assert torch.get_num_threads() == 2
    assert closed == [None]
    torch.set_num_threads(1)


def refuse(run):
    raise InputError("refused")


@pytest.mark.parametrize(
    ("config", "options"),
    [({}, {"run_suffix": "../x"}), ({}, {"prepare": refuse}), ({"env_id": "TicTacToe-v0"}, {})],
    ids=["folder", "loop", "environment"],
)
def test_a_run_that_cannot_begin_leaves_the_process_as_it_was(config, options, tiny_config):
    torch.set_num_threads(2)
    closed = []
    with pytest.MonkeyPatch.context() as patch:
        close = EnvRunner.close
        patch.setattr(EnvRunner, "close", lambda runner: closed.append(close(runner)))
        with pytest.raises(InputError):
            run_module.TrainingRun(tiny_config("a2c", config), A2C_RECIPE, progress="silent", **options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == 2
    assert closed == [None]


def test_building_a_model_draws_nothing_from_torchs_generator(tiny_config):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(tiny_config("ppo"), progress="silent")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_fails_says_so_in_its_folder(tiny_config):
    def fail(run):
        raise RuntimeError("on purpose")

    config = tiny_config("a2c")
    with pytest.raises(RuntimeError, match="on purpose"):
        train(config, callbacks=[fail], progress="silent", run_suffix="failed")
    (folder,) = config.output_dir.iterdir()
    assert json.loads((folder / "metadata.json").read_text())["status"] == "failed: RuntimeError: on purpose"


def test_a_second_interrupt_quits(tiny_config):
    def interrupt(run):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tiny_config("a2c"), callbacks=[interrupt], progress="silent")
    assert not isinstance(caught.value, TrainingInterrupted)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_run_is_not_evaluated(tiny_config):
    interrupt = lambda run: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with pytest.raises(TrainingInterrupted) as caught:
        train(tiny_config("a2c"), callbacks=[interrupt], progress="silent")
    assert "eval_return_mean" not in caught.value.result.metrics


def test_log_lines_come_at_their_interval(tiny_config):
    result = train(tiny_config("a2c", {"log_interval": 64}), progress="silent")
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines] == [64, 128, 192, 256, 256]  # the last is the evaluation


def test_a_final_evaluation_is_not_made_twice(scores, tiny_config):
    scores += [1.0, 2.0]
    train(tiny_config("a2c", {"eval_interval": 128}), progress="silent")
    assert scores == []


def test_length_and_return_of_training_episodes(tiny_config):
    config = {"env_id": "Pendulum-v1", "env_kwargs": {"wrappers": {"time_limit": 7}}}
    metrics = train(tiny_config("a2c", config), progress="silent").metrics
    assert metrics["train_length_mean"] == 7
    assert metrics["train_return_mean"] < 0


def test_a_resumed_run_says_over_which_horizon(tiny_config, capsys):
    result = train(tiny_config("a2c"), progress="silent")
    resume_training(result.run_dir, total_timesteps=320, progress="plain")
    assert "schedules run over 256 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rate", "extend", "remedy"),
    [
        ({"kind": "linear", "start": 1e-3, "end": 0}, "keep", "--extend stretch"),
        ({"kind": "linear", "start": 1e-3, "end": 0, "duration": 128}, "keep", "in a callback"),
        ({"kind": "linear", "start": 1e-3, "end": 0, "duration": 128}, "stretch", "in a callback"),
        ({"kind": "linear", "start": 1e-3, "end": 0}, "stretch", None),
        ({"kind": "linear", "start": 1e-3, "end": 1e-6}, "keep", None),
    ],
)
def test_a_resumed_run_that_will_learn_nothing_names_a_remedy_that_helps(rate, extend, remedy, tiny_config, capsys):
    result = train(tiny_config("a2c", learning_rate=rate), progress="silent")
    resumed = resume_training(result.run_dir, total_timesteps=320, extend=extend, progress="plain")
    before, after = (load_checkpoint(path).state["actor"]["model"] for path in (result.run_dir / "checkpoints" /
        "step_256", resumed.checkpoint_path))  # fmt: skip
    assert all(torch.equal(before[name], after[name]) for name in before) == (remedy is not None)
    out = capsys.readouterr().out
    assert ("WARNING: learning_rate is 0 from step 257 to step 320" in out) == (remedy is not None)
    assert remedy is None or remedy in out


def test_a_resumed_run_says_from_where_on_it_will_learn_nothing(tiny_config, capsys):
    """Schedules that keep their horizon end long before the new total."""
    rate = {"kind": "linear", "start": 1e-3, "end": 0}
    stop = [lambda run: run.stop("half way") if run.step >= 128 else None]
    half = train(tiny_config("a2c", learning_rate=rate), callbacks=stop, progress="silent")
    resume_training(half.run_dir, total_timesteps=1024, progress="plain")
    assert "WARNING: learning_rate is 0 from step 255 to step 1,024" in capsys.readouterr().out
    resume_training(half.run_dir, progress="plain")
    assert "WARNING" not in capsys.readouterr().out


def test_a_policy_has_the_hyperparameters_of_its_step(tiny_config):
    result = train(tiny_config("ppo", ent_coef={"kind": "linear", "start": 0.4, "end": 0.2}), progress="silent")
    assert load_policy(result.run_dir).actor.hp.ent_coef == pytest.approx(0.2)


def test_evaluation_plays_whole_games(tiny_config, monkeypatch):
    given, original = [], evaluation.make_envs
    monkeypatch.setattr(evaluation, "make_envs", lambda *a, **k: given.append(k["training"]) or original(*a, **k))
    train(tiny_config("a2c"), progress="silent")
    assert given == [False]


@pytest.mark.parametrize(
    ("atari", "clips"), [(False, False), (True, True), ({}, True), ({"clip_reward": False}, False)]
)
def test_rewards_are_clipped_as_the_wrappers_say(atari, clips):
    assert clips_reward({"wrappers": {"atari": atari}}) is clips


def test_what_weights_and_biases_is_told(tiny_config):
    assert wandb_options(tiny_config("ppo")) is None
    assert wandb_options(tiny_config("ppo", {"wandb": True, "tags": ["a"]})) == {
        "project": "rl-training",
        "tags": ["a"],
    }
    assert wandb_options(tiny_config("ppo", {"wandb": {"project": "mine"}}))["project"] == "mine"


def episodes(*returns):
    return [FinishedEpisode(0, episode_return, 9) for episode_return in returns]


def test_mean_and_deviation_of_an_evaluation(tiny_config, monkeypatch):
    monkeypatch.setattr(evaluation, "play", lambda *_, **__: episodes(1.0, 3.0))
    player = evaluation.Player(None, Spaces(gym.spaces.Discrete(2), gym.spaces.Discrete(2)), None, "clip")
    metrics = evaluation.evaluate([player], tiny_config("a2c"))
    assert metrics == {"eval_return_mean": 2.0, "eval_return_std": 1.0, "eval_return_min": 1.0, "eval_episodes": 2}


def test_of_games_an_evaluation_tells_the_share_that_was_won(tiny_config, monkeypatch):
    monkeypatch.setattr(evaluation, "play", lambda *_, **__: episodes(1.0, 0.0, -1.0, 1.0, 1.0))
    spaces = Spaces(gym.spaces.Discrete(2), gym.spaces.Discrete(2), num_players=2)
    metrics = evaluation.evaluate([evaluation.Player(None, spaces, None, "clip")], tiny_config("a2c"), num_episodes=5)
    assert metrics["eval_win_rate"] == 0.6
    assert evaluation.describe_evaluation(metrics) == "0.4 ± 0.8 over 5 episodes, 60% won"


def test_an_evaluation_is_logged_once(tiny_config):
    result = train(tiny_config("a2c", {"eval_interval": 128, "log_interval": 32}), progress="silent")
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines if "eval_return_mean" in line] == [128, 256]


def test_a_resumed_run_has_a_best_of_its_own(scores, tiny_config):
    scores += [9.0, 1.0]
    half = train(tiny_config("a2c", {"eval_interval": 128}), callbacks=[stop_at(128)], progress="silent")
    resumed = resume_training(half.run_dir, progress="silent")
    assert best_step(resumed.run_dir) == 256


def test_a_trainer_refuses_the_config_of_another(tiny_config):
    with pytest.raises(InputError, match="this trains a2c"):
        train_a2c(tiny_config("ppo"), progress="silent")


@pytest.mark.parametrize("options", [{"progress": "fancy"}, {"run_suffix": "../x"}])
def test_wrong_options_leave_no_folder(options, tiny_config):
    config = tiny_config("a2c")
    with pytest.raises(InputError):
        train(config, **{"progress": "silent", **options})
    assert not config.output_dir.exists() or not list(config.output_dir.iterdir())


def test_a_checkpoint_from_a_gpu_or_of_an_unknown_environment_can_be_used(tiny_config, monkeypatch):
    from rl_training.runtime import workflows

    result = train(tiny_config("a2c"), progress="silent")
    original = workflows.open_checkpoint

    def elsewhere(*args):
        checkpoint = original(*args)
        checkpoint.config.update(device="cuda:7", env_id="nowhere:Gone-v0")
        return checkpoint

    monkeypatch.setattr(workflows, "open_checkpoint", elsewhere)
    assert load_policy(result.run_dir).act(np.zeros(4, np.float32)) in (0, 1)


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_loses_nothing(tiny_config, tmp_path):
    """A terminal sends it to the workers of an async backend too."""
    config = tiny_config("a2c")
    data = {"algo": "a2c", "env_id": "CartPole-v1", "total_timesteps": 10**6, "num_envs": 2, "checkpoint_interval": 64}
    data |= {"env_kwargs": {"backend": "async"}, "output_dir": str(config.output_dir)}
    path = tmp_path / "async.yaml"
    path.write_text(yaml.safe_dump(data))
    command = [sys.executable, "-m", "rl_training", "train", str(path), "--run-suffix", "tty", "--progress", "silent"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    run_dir = config.output_dir / "a2c__CartPole-v1__seed0__tty"
    wait_for(lambda: any(run_dir.glob("checkpoints/step_*")), process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "resume with" in errors


def test_a_run_whose_last_evaluation_is_interrupted_is_finished(tiny_config, monkeypatch):
    """There is nothing to resume."""

    def endless(*_, stopped, **__):
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()

    monkeypatch.setattr(run_evaluations, "evaluate", endless)
    try:
        result = train(tiny_config("a2c"), progress="silent")
    except TrainingInterrupted as interrupted:  # a KeyboardInterrupt, which would end the tests
        pytest.fail(str(interrupted))
    assert result.metrics["global_step"] == 256
    assert "eval_return_mean" not in result.metrics
    assert json.loads((result.run_dir / "metadata.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("algo", ["a2c", "scalezero"])
def test_an_evaluation_that_was_interrupted_is_made_up_for(algo, tiny_config, monkeypatch):
    """The resumed run evaluates first, and its callbacks see what they would have seen."""
    seen = []
    config = tiny_config(algo, {"eval_interval": 64})
    whole = train(config, callbacks=[lambda run: seen.append((run.step, run.evaluations))], progress="silent")
    expected, evaluate, calls = list(seen), run_evaluations.evaluate, []

    def interrupted(*args, stopped, **options):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args, stopped=stopped, **options)

    seen.clear()
    monkeypatch.setattr(run_evaluations, "evaluate", interrupted)
    with pytest.raises(TrainingInterrupted) as caught:
        train(config, callbacks=[lambda run: seen.append((run.step, run.evaluations))], progress="silent")
    resumed = resume_training(
        caught.value.result.checkpoint_path,
        callbacks=[lambda run: seen.append((run.step, run.evaluations))],
        progress="silent",
    )
    assert seen == expected
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)


def test_best_of_a_resumed_run_is_the_best_of_its_own(tiny_config, scores, tmp_path):
    """Also where the run that it was resumed from did better."""
    scores += [450.0, 20.0, 170.0, 80.0]
    first = train(tiny_config("a2c", {"total_timesteps": 100, "eval_interval": 100}), progress="silent")
    resumed = resume_training(first.run_dir, total_timesteps=400, output_dir=tmp_path / "r", progress="silent")
    assert scores == []
    assert load_checkpoint(resumed.run_dir / "checkpoints" / "best").step == 304  # the record that follows step 300


@pytest.mark.parametrize(
    ("shape", "dtype", "network", "expected"),
    [
        ((4, 84, 84), np.uint8, "auto", "cuda"),
        ((4,), np.float32, "mlp", "cpu"),
        ((3, 6, 7), np.float32, "conv", "cuda"),
        ((3, 6, 7), np.float32, "auto", "cpu"),
    ],
)
def test_auto_takes_a_gpu_for_images_and_for_towers(monkeypatch, shape, dtype, network, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spaces = [Spaces(gym.spaces.Box(0, 255, shape, dtype), gym.spaces.Discrete(2))]
    assert pick_device("auto", spaces, MuZeroHyperparameters(network=network)).type == expected


@pytest.mark.parametrize(
    ("device", "convolutions", "during"),
    [("cuda", True, (True, "high")), ("cuda", False, (True, "highest")), ("cpu", True, (False, "highest"))],
)
def test_a_gpu_takes_quick_kernels_as_long_as_the_run_lasts(device, convolutions, during):
    def chosen():
        return torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()

    assert chosen() == (False, "highest")
    undo = quick_kernels(torch.device(device), convolutions=convolutions)
    seen = chosen()
    undo()
    assert (seen, chosen()) == (during, (False, "highest"))


def test_a_run_asks_for_quick_kernels_and_undoes_them(tiny_config, monkeypatch):
    calls = []
    monkeypatch.setattr(
        run_module,
        "quick_kernels",
        lambda device, convolutions: (calls.append((device.type, convolutions)), lambda: calls.append("undo"))[1],
    )
    train(tiny_config("ppo"), callbacks=[lambda run: calls.append("step")], progress="silent")
    assert (calls[0], set(calls[1:-1]), calls[-1]) == (("cpu", False), {"step"}, "undo")
