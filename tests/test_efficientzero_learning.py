"""EfficientZero learns what its actions are paid: the value prefix sees them soon, and its searches then take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from build import build, make_replay
from envs_for_tests import SixSteps
from rl_training import TrainConfig, train
from rl_training.algorithms.efficientzero import EfficientZeroHyperparameters, value_prefixes
from rl_training.data.batch import to_tensors
from rl_training.data.replay import Replay
from rl_training.types import Batch, Spaces


def random_play(learner: Any, *, episodes: int, num_envs: int = 4, seed: int = 0) -> Replay:
    """Episodes of SixSteps in which every action is as likely."""
    rng, replay = np.random.default_rng(seed), make_replay("efficientzero", learner, learner.spaces, num_envs)
    envs = [SixSteps() for _ in range(num_envs)]
    for _ in range(episodes // num_envs):
        obs, over = np.stack([env.reset()[0] for env in envs]), False
        first = np.ones(num_envs, bool)
        while not over:
            action = rng.integers(4, size=num_envs)
            next_obs, reward, terminated, truncated, _ = (
                np.array(column)
                for column in zip(*[env.step(a) for env, a in zip(envs, action, strict=True)], strict=True)
            )
            uniform = {"policy": np.full((num_envs, 4), 0.25, np.float32), "root_value": np.zeros(num_envs, np.float32)}
            replay.add(
                {
                    "obs": obs, "action": action, "reward": reward.astype(np.float32), "next_obs": next_obs,
                    "terminated": terminated, "truncated": truncated, "first": first, **uniform,
                }
            )  # fmt: skip
            obs, first, over = next_obs, terminated, terminated.all()
    return replay


@torch.no_grad()
def reward_losses(learner: Any, batch: Batch) -> tuple[float, float, float]:
    """Cross-entropies per step of value prefixes: the model's, that of the best guess which knows the observation and
    how far it has come but no action, and that of one which knows the prefix."""
    model = learner.model
    target = model.reward_support.to_probs(value_prefixes(batch["reward"], model.lstm_horizon))  # [B, K, atoms]
    _, logits = model.unroll(model.represent(batch["obs"]), batch["action"], gradient_scale=1.0)
    blind = torch.zeros_like(target)
    step = batch["obs"].argmax(1)
    for number in step.unique():
        blind[step == number] = target[step == number].mean(0)
    entropies = [-torch.xlogy(target, guess).sum(-1).mean().item() for guess in (logits.softmax(-1), blind, target)]
    return entropies[0], entropies[1], entropies[2]


def test_the_value_prefix_soon_sees_actions() -> None:
    torch.manual_seed(0)
    env, hp = SixSteps(), EfficientZeroHyperparameters(reanalyse_ratio=0.0, batch_size=64)
    learner = build("efficientzero", Spaces(env.observation_space, env.action_space), hp)
    replay = random_play(learner, episodes=200)
    index, _ = replay.draw(512, np.random.default_rng(1), beta=0.0, exponent=0.0)
    batch = to_tensors(learner.targets(replay, index), learner.device)
    for _ in range(300):
        learner.one_step(replay)
    loss, blind, least = reward_losses(learner, batch)
    assert blind - least > 0.2  # there is something to see
    assert loss < (blind + least) / 2, (loss, blind, least)


def test_six_steps_are_learned(tmp_path: Any) -> None:
    """Of 6; random play earns 1.5. All but sizes and budgets are defaults."""
    small = {"batch_size": 32, "num_simulations": 12, "learning_starts": 200}
    config = TrainConfig("efficientzero", "SixStepsForTests-v0", 1300, tmp_path, 1, 4, algo_kwargs=small)
    assert train(config, progress="silent").metrics["eval_return_mean"] >= 5
