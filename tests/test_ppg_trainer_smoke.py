"""PPG trains end to end, and its schedules are seen in the final metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import TINY
from rl_training import resume_training, train
from rl_training.runtime.checkpoints import load_checkpoint
from rl_training.runtime.ppg_trainer import train_ppg
from smoke import check_run
from test_contract import assert_same_future

AUXILIARY = {"aux_kl", "aux_value_loss", "aux_clone_loss", "aux_true_value_loss", "aux_grad_norm"}


@pytest.mark.parametrize("architecture", ["dual", "detach"])
def test_ppg_trains_with_scheduled_entropy_clip_and_clone_weight(tiny_config, architecture):
    config = tiny_config(
        "ppg",
        architecture=architecture,
        ent_coef_schedule={"type": "linear", "start": 0.02, "end": 0.005},
        clip_coef_schedule={"kind": "cosine", "start": 0.3, "end": 0.1},
        beta_clone_schedule={"kind": "linear", "start": 2.0, "end": 1.0},
        aux_learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
    )
    result = train_ppg(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "ppg__CartPole-v1__seed0__smoke"
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert result.metrics["clip_coef"] == pytest.approx(0.1)
    assert result.metrics["beta_clone"] == pytest.approx(1.0)
    assert result.metrics["aux_learning_rate"] == 0.0
    losses = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"}
    assert losses | AUXILIARY <= result.metrics.keys()
    # 8 updates of 2 epochs with 2 minibatches, and 2 phases of 2 epochs with 2 minibatches for each of 3 rollouts
    assert result.metrics["gradient_steps"] == 8 * 2 * 2 + 2 * 2 * 2 * 3


def test_clip_range_is_another_name(tiny_config):
    result = train_ppg(tiny_config("ppg", clip_range_schedule={"kind": "linear", "start": 0.3, "end": 0.1}))
    assert result.metrics["clip_coef"] == pytest.approx(0.1)


def test_without_auxiliary_epochs_a_run_is_ppos(tiny_config):
    both = {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
    ppo = train(tiny_config("ppo", **both), progress="silent")
    ppg = train(tiny_config("ppg", **both, aux_epochs=0, normalize_over="minibatch"), progress="silent")
    expected, found = (load_checkpoint(result.checkpoint_path).state["actor"]["model"] for result in (ppo, ppg))
    assert found.keys() > expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert ppg.metrics["eval_return_mean"] == ppo.metrics["eval_return_mean"]
    assert not AUXILIARY & ppg.metrics.keys()


@pytest.mark.parametrize("stop", [128, 160, 192])
def test_a_run_that_stopped_anywhere_in_a_phase_goes_on_as_if_it_had_not(tiny_config, tmp_path, stop):
    """Updates 4, 5 and 6 end there, the last of these with a phase of three updates."""
    whole = train(tiny_config("ppg", {"total_timesteps": 384}), progress="silent")
    half = train(tiny_config("ppg", {"total_timesteps": stop, "schedule_horizon": 384}), progress="silent")
    phase = load_checkpoint(half.checkpoint_path).state["learner"]["phase"]
    assert phase["count"] == stop // 32 % 3
    assert len(phase["obs"]) == len(phase["target"]) == 32 * phase["count"]
    resumed = resume_training(half.run_dir, total_timesteps=384, output_dir=tmp_path / "resumed", progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)


@pytest.mark.parametrize("architecture", ["dual", "detach"])
def test_images(tiny_config, architecture):
    pytest.importorskip("ale_py")
    config = tiny_config(
        "ppg",
        {"env_id": "ALE/Pong-v5", "total_timesteps": 64, "eval_episodes": 1, "env_kwargs": PONG},
        **TINY["ppg"] | {"num_steps": 8},
        architecture=architecture,
    )
    result = train_ppg(config, progress="silent")
    check_run(result, config)
    phase = load_checkpoint(result.checkpoint_path).state["learner"]["phase"]
    assert phase["count"] == 1  # the fourth update began a phase
    assert phase["obs"].dtype == torch.uint8
    assert phase["obs"].shape == (16, 2, 84, 84)


PONG = {"wrappers": {"atari": True, "frame_stack": 2, "time_limit": 20}}


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id):
    """Box actions; Discrete observations; Tuple observations."""
    config = tiny_config("ppg", {"env_id": env_id, "total_timesteps": 128})
    result = train_ppg(config, progress="silent")
    check_run(result, config)
    assert np.isfinite(result.metrics["aux_kl"])
