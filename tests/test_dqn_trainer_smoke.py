"""DQN trains end to end: every option, vectors, frames and nested observations; schedules are in the metrics."""

from __future__ import annotations

import json

import pytest

from rl_training import load_config, resume_training, train
from rl_training.acting.actor import EpsilonGreedyActor, RandomActor
from rl_training.errors import ConfigError, InputError
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.dqn_trainer import train_dqn
from smoke import check_run
from test_contract import assert_same_future

PLAIN = {"double": False, "dueling": False, "prioritized": False, "n_step": 1}


@pytest.mark.parametrize("option", [{}, {"double": True}, {"dueling": True}, {"prioritized": True}, {"n_step": 3}])
def test_dqn_trains_with_scheduled_epsilon(tiny_config, option):
    config = tiny_config(
        "dqn",
        **{**PLAIN, **option},
        epsilon_schedule={"kind": "cosine", "start": 0.8, "end": 0.1},
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
        target_update_interval={"kind": "linear", "start": 8, "end": 32},
    )
    result = train_dqn(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "dqn__CartPole-v1__seed0__smoke"
    assert result.metrics["epsilon"] == pytest.approx(0.1)
    assert result.metrics["target_update_interval"] == 32
    assert result.metrics["learning_rate"] == 0.0
    assert {"loss", "q_value", "grad_norm"} <= result.metrics.keys()
    assert ("beta" in result.metrics) == ("prioritized" in option)


def test_epsilon_falls_over_the_exploration_fraction_by_default(tiny_config):
    seen = []
    config = tiny_config("dqn", {"total_timesteps": 400}, exploration_fraction=0.5, final_epsilon=0.2)
    train(config, callbacks=[lambda run: seen.append((run.step, run.learner.epsilon))], progress="silent")
    expected = {step: max(0.2, 1 - 0.8 * step / 199) for step, _ in seen}
    assert dict(seen) == pytest.approx(expected)


def test_the_saved_config_reads_back_to_the_same(tiny_config):
    """Epsilon is saved as the settings that make it, or, where it was given, without them."""
    for kwargs in ({"exploration_fraction": 0.5}, {"epsilon": 0.3}):
        result = train(tiny_config("dqn", {"total_timesteps": 64}, **kwargs), progress="silent")
        saved = load_config(result.run_dir / "config.yaml").algo_kwargs
        assert ("epsilon" in saved, "exploration_fraction" in saved) == ("epsilon" in kwargs, "epsilon" not in kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"epsilon": 0.1, "exploration_fraction": 0.2}, "exploration_fraction.*no effect, because epsilon is given"),
        ({"prioritized": False, "beta": 0.5}, "beta.*has no effect without prioritized: true"),
        ({"prioritized": False, "priority_exponent": 0.5}, "priority_exponent.*has no effect without prioritized"),
        ({"epsilon": 1.5}, r"epsilon.*\[0, 1\].*1.5"),
        ({"epsilon": "auto"}, "epsilon.*number or a schedule.*'auto'"),
    ],
)
def test_numbers_that_would_do_nothing_are_errors(tiny_config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_config("dqn", **kwargs), progress="silent")


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id):
    """Discrete and Tuple observations."""
    config = tiny_config("dqn", {"env_id": env_id, "total_timesteps": 64})
    check_run(train(config, progress="silent"), config)


@pytest.mark.parametrize("backend", ["auto", "sync"])
def test_dqn_trains_on_pong_frames_that_are_stored_once(tiny_config, backend):
    pytest.importorskip("ale_py")
    env_kwargs = {
        "backend": backend,
        "max_num_frames_per_episode": 200,
        "wrappers": {"atari": {"noop_max": 5}, "frame_stack": 4},
    }
    seen = []
    config = tiny_config(
        "dqn",
        {"env_id": "ALE/Pong-v5", "total_timesteps": 48, "env_kwargs": env_kwargs},
        **{**PLAIN, "dueling": True, "learning_starts": 16, "utd_ratio": 0.1},
    )
    callback = lambda run: seen.append(run.parts["replay"].obs.shape[1:])  # noqa: E731
    check_run(train(config, callbacks=[callback], progress="silent"), config)
    assert set(seen) == {(84, 84)}


@pytest.mark.parametrize("env_kwargs", [{"backend": "vector"}, {"backend": "async"}, {"wrappers": {"frame_stack": 3}}])
def test_other_backends_and_stacks_resume_exactly(tiny_config, env_kwargs):
    config = {"total_timesteps": 600, "env_kwargs": env_kwargs}
    whole = train(tiny_config("dqn", config), progress="silent")
    half = train(
        tiny_config("dqn", config),
        callbacks=[lambda run: run.stop("half way") if run.step >= 400 else None],
        progress="silent",
    )
    resumed = resume_training(half.checkpoint_path, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)


def test_frames_and_lost_lives_resume_exactly(tiny_config):
    """Breakout without FIRE at its lives' ends loses one soon: the first stack of the next then shows the last."""
    pytest.importorskip("ale_py")
    env_kwargs = {"backend": "sync", "max_num_frames_per_episode": 200, "wrappers": {"atari": True, "frame_stack": 4}}
    config = {"env_id": "ALE/Breakout-v5", "total_timesteps": 140, "env_kwargs": env_kwargs, "eval_episodes": 1}
    kwargs = {"learning_starts": 80, "utd_ratio": 0.05, "buffer_capacity": 90, "eval_epsilon": 0.1}
    whole = train(tiny_config("dqn", config, **kwargs), progress="silent")
    half = train(
        tiny_config("dqn", config, **kwargs),
        callbacks=[lambda run: run.stop("half way") if run.step >= 100 else None],
        progress="silent",
    )
    resumed = resume_training(half.checkpoint_path, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    saved = load_checkpoint(whole.checkpoint_path).state["replay"]
    ends = sum(int(part.sum()) for part in saved["columns"]["terminated"])
    assert ends > 0


def test_the_replay_is_saved_with_the_checkpoint_but_not_with_the_best(tiny_config):
    result = train(tiny_config("dqn", {"eval_interval": 128}, buffer_capacity=10**6), progress="silent")
    saved = result.checkpoint_path / "replay.safetensors"
    assert saved.stat().st_size < 100_000  # 256 steps, not a million
    assert not (result.run_dir / "checkpoints" / "best" / "replay.safetensors").exists()
    resumed = resume_training(result.run_dir / "checkpoints" / "best", total_timesteps=512, progress="silent")
    metadata = json.loads((resumed.run_dir / "metadata.json").read_text())
    assert metadata["resumed_at_step"] <= 256
    assert resumed.metrics["global_step"] == 512
    assert resumed.metrics["gradient_steps"] >= result.metrics["gradient_steps"] + 50


def test_the_target_network_moves_on_in_a_run_resumed_without_its_replay(tiny_config):
    result = train(tiny_config("dqn", {"eval_interval": 256}), progress="silent")
    moves = []

    def spy(run):
        if run.learner.target_moved_at not in moves:
            moves.append(run.learner.target_moved_at)

    path = result.run_dir / "checkpoints" / "best"
    resume_training(path, total_timesteps=512, callbacks=[spy], progress="silent")
    assert moves[-3:] == [66, 130, 194]  # every 64 env steps of the new replay's


def test_a_replay_that_does_not_fit_is_an_error_that_leaves_nothing_behind(tiny_config):
    for capacity, message in ((2**31 - 1, "GB, and there are .* GB"), (10**15, "should be at most")):
        config = tiny_config("dqn", buffer_capacity=capacity)
        with pytest.raises(InputError, match=rf"buffer_capacity: .*{message}"):
            train(config, progress="silent")
        assert not config.output_dir.exists()


def test_a_run_that_ends_before_learning_starts_says_so(tiny_config, capsys):
    train(tiny_config("dqn", {"total_timesteps": 32}), progress="plain")
    assert "nothing will be learned: learning starts at step 32" in capsys.readouterr().out


def test_a_warm_up_alone_keeps_the_default_schedule(tiny_config):
    seen = {}
    config = tiny_config("dqn", {"total_timesteps": 400}, epsilon_warmup_steps=10, exploration_fraction=0.5)
    train(config, callbacks=[lambda run: seen.update({run.step: run.learner.epsilon})], progress="silent")
    assert seen[4] == pytest.approx(0.5 * (1 - 0.95 * 4 / 199))
    assert seen[400] == 0.05


def test_clipping_can_be_switched_off(tiny_config):
    metrics = train(tiny_config("dqn", {"total_timesteps": 64}, max_grad_norm=None), progress="silent").metrics
    assert "max_grad_norm" not in metrics


def test_the_recipe_says_how_to_act_before_learning_starts(tiny_config, monkeypatch):
    called = []
    for kind in (RandomActor, EpsilonGreedyActor):

        def note(self, *args, kind=kind, original=kind.act, **options):
            if options["explore"]:
                called.append(kind)
            return original(self, *args, **options)

        monkeypatch.setattr(kind, "act", note)
    train(tiny_config("dqn", learning_starts=64), progress="silent")
    assert called == [RandomActor] * 32 + [EpsilonGreedyActor] * 96
