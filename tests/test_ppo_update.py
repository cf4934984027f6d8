"""PPO's update: gradients against Stable-Baselines3 on the same weights and data, and the identities of the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from build import build
from probes import copy_training, random_rollout
from rl_training.algorithms.a2c import A2CHyperparameters
from rl_training.algorithms.optim import Adam, MeanMetrics, gradient_step
from rl_training.algorithms.ppo import PPO, PPOHyperparameters, approx_kl, clip_fraction, clipped_surrogate
from rl_training.data.batch import flatten
from rl_training.data.rollout import Rollout
from rl_training.models.actor_critic import ActorCritic
from rl_training.models.parameters import FlatParameters
from rl_training.types import Spaces

VECTOR = Box(-1, 1, (4,), np.float32)
DISCRETE, CONTINUOUS = Spaces(VECTOR, Discrete(3)), Spaces(VECTOR, Box(-1, 1, (2,), np.float32))


def make_ppo(spaces: Spaces = DISCRETE, *, seed: int = 0, **changes: Any) -> PPO:
    torch.manual_seed(seed)
    hp = PPOHyperparameters(**{"num_steps": 16, **changes})
    learner: PPO = build("ppo", spaces, hp, rng=np.random.default_rng(seed))
    return learner


def perturb(model: nn.Module, scale: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def vector(learner: Any) -> Tensor:
    return learner.optimizers["model"].parameters.vector.clone()


class Nowhere(gym.Env):
    """Only its spaces matter."""

    def __init__(self, spaces: Spaces) -> None:
        self.observation_space, self.action_space = spaces.observation, spaces.action


def their_parameters(policy: Any) -> list[nn.Parameter]:
    """Of a Stable-Baselines3 policy, in the order of ActorCritic.parameters()."""
    extractor = policy.mlp_extractor
    modules = (extractor.policy_net, policy.action_net, extractor.value_net, policy.value_net)
    log_std = [policy.log_std] if hasattr(policy, "log_std") else []
    return log_std + [p for module in modules for p in module.parameters()]


def copy_weights(model: ActorCritic, policy: Any) -> None:
    for target, source in zip(their_parameters(policy), model.parameters(), strict=True):
        target.data.copy_(source.data)


def fill_their_buffer(buffer: Any, rollout: Rollout, last_values: np.ndarray) -> None:
    """The same rollout; truncation is bootstrapped in the reward, as that package does."""
    data = rollout.arrays
    time, env, _ = rollout.ends()
    reward = data["reward"].copy()
    inner = data["truncated"][time, env]
    reward[time[inner], env[inner]] += buffer.gamma * last_values[inner]
    start = np.ones(rollout.num_envs)
    buffer.reset()
    for t in range(rollout.num_steps):
        value, logprob = (torch.from_numpy(data[key][t]) for key in ("value", "logprob"))
        action = data["action"][t].reshape(rollout.num_envs, -1)
        buffer.add(data["obs"][t], action, reward[t], start, value, logprob)
        start = data["terminated"][t] | data["truncated"][t]
    final = np.zeros(rollout.num_envs, np.float32)
    final[env[time == rollout.num_steps - 1]] = last_values[time == rollout.num_steps - 1]
    buffer.compute_returns_and_advantage(torch.from_numpy(final), start)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("clip_vf_coef", [None, 0.1])
def test_gradients_are_those_of_stable_baselines3(spaces: Spaces, clip_vf_coef: float | None) -> None:
    from stable_baselines3 import PPO as TheirPPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    num_envs, num_steps = 4, 16
    ours = make_ppo(spaces, clip_vf_coef=clip_vf_coef, ent_coef=0.02, update_epochs=1, num_minibatches=1)
    rollout = random_rollout(ours, spaces, num_steps=num_steps, num_envs=num_envs)
    last_values = ours.end_values(rollout.ends()[2]).numpy()
    theirs = TheirPPO(
        "MlpPolicy",
        DummyVecEnv([lambda: Nowhere(spaces)] * num_envs),
        n_steps=num_steps,
        batch_size=num_steps * num_envs,
        n_epochs=1,
        ent_coef=0.02,
        clip_range_vf=clip_vf_coef,
        device="cpu",
    )
    theirs.set_logger(Logger(None, []))
    fill_their_buffer(theirs.rollout_buffer, rollout, last_values)
    # The advantages are those of the policy that acted; the step is taken from another, so that ratios are clipped.
    batch = flatten(ours.learning_batch(rollout, MeanMetrics()))
    perturb(ours.model, 0.1)
    copy_weights(ours.model, theirs.policy)

    gradients: list[Tensor] = []
    theirs.policy.optimizer.step = lambda *_: gradients.extend(p.grad.clone() for p in their_parameters(theirs.policy))
    theirs.train()

    loss, log_ratio = ours.loss(batch, MeanMetrics())
    assert 0.2 < clip_fraction(log_ratio, ours.hp.clip_coef) < 0.9
    gradient_step(ours.optimizers["model"], loss, lr=0.0, max_grad_norm=ours.hp.max_grad_norm)
    for parameter, expected in zip(ours.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_before_the_first_step_nothing_has_moved_and_the_gradient_is_a2cs(spaces: Spaces) -> None:
    ppo = make_ppo(spaces, normalize_advantage=False, ent_coef=0.01, gae_lambda=1.0)
    rollout = random_rollout(ppo, spaces, num_steps=8, num_envs=4)
    loss, log_ratio = ppo.loss(flatten(ppo.learning_batch(rollout, MeanMetrics())), MeanMetrics())
    torch.testing.assert_close(log_ratio, torch.zeros(32), atol=1e-6, rtol=0)
    assert approx_kl(log_ratio) < 1e-6
    assert clip_fraction(log_ratio, ppo.hp.clip_coef) == 0
    gradient_step(ppo.optimizers["model"], loss, lr=0.0, max_grad_norm=None)

    hp = A2CHyperparameters(ent_coef=0.01, gae_lambda=1.0, learning_rate=0.0, max_grad_norm=None)
    a2c = build("a2c", spaces, hp)
    a2c.model.load_state_dict(ppo.model.state_dict())
    a2c.update(rollout)
    gradients = [learner.optimizers["model"].parameters.gradient for learner in (ppo, a2c)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_the_surrogate_and_its_gradient_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    ratio, advantage = (torch.rand(1000) + 0.5).requires_grad_(), torch.randn(1000)
    ours = clipped_surrogate(ratio, advantage, 0.2)
    (gradient,) = torch.autograd.grad(ours, ratio)
    papers = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    (expected,) = torch.autograd.grad(papers, ratio)
    torch.testing.assert_close(ours, papers)
    torch.testing.assert_close(gradient, expected)


def test_an_update_takes_all_its_steps_and_reports() -> None:
    ppo = make_ppo(update_epochs=3, num_minibatches=5, ent_coef=0.01)
    before = vector(ppo)
    metrics = ppo.update(random_rollout(ppo, DISCRETE, num_steps=7, num_envs=3))
    assert ppo.gradient_steps == 15
    assert not torch.equal(before, vector(ppo))
    expected = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance", "grad_norm"}
    assert set(metrics) == expected
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    assert 0 < metrics["approx_kl"] < 1
    assert 0 < metrics["entropy"] <= np.log(3) + 1e-6


def test_target_kl_ends_an_update_before_the_step_that_would_go_further() -> None:
    changes = {"learning_rate": 3e-2, "num_minibatches": 1, "update_epochs": 10}
    free, bound = make_ppo(**changes), make_ppo(**changes, target_kl=1e-4)
    rollout = random_rollout(free, DISCRETE, num_steps=16, num_envs=4)
    free.update(rollout)
    bound.update(rollout)
    assert free.gradient_steps == 10
    assert bound.gradient_steps == 1  # the second step's minibatch is found too far away
    one = make_ppo(**{**changes, "update_epochs": 1})
    one.update(rollout)
    assert torch.equal(vector(one), vector(bound))
    loose = make_ppo(**changes, target_kl=1e3)
    loose.update(rollout)
    assert torch.equal(vector(free), vector(loose))


@pytest.mark.parametrize(("share", "steps"), [(0.9, 1), (1.1, 1), (1.49, 1), (1.51, 0), (2.0, 0)])
def test_an_update_ends_at_one_and_a_half_times_target_kl(share: float, steps: int) -> None:
    """The policy has moved `share` times target_kl away when the update begins."""
    ppo = make_ppo(num_minibatches=1, update_epochs=1)
    rollout = random_rollout(ppo, DISCRETE, num_steps=16, num_envs=4)
    perturb(ppo.model, 0.1)
    data = rollout.batch
    with torch.no_grad():
        policy, _ = ppo.model(data["obs"].flatten(0, 1))
        log_ratio = (policy.log_prob(data["action"].flatten()) - data["logprob"].flatten()).double()
    kl = float((log_ratio.exp() - 1 - log_ratio).mean())
    assert kl > 1e-4
    ppo.hp, before = dataclasses.replace(ppo.hp, target_kl=kl / share), vector(ppo)
    ppo.update(rollout)
    assert ppo.gradient_steps == steps
    assert torch.equal(vector(ppo), before) == (steps == 0)


def test_one_sample_is_not_normalized() -> None:
    ppo = make_ppo(num_minibatches=100, update_epochs=1)
    metrics = ppo.update(random_rollout(ppo, DISCRETE, num_steps=3, num_envs=2))
    assert ppo.gradient_steps == 6
    assert np.isfinite(metrics["policy_loss"])


CAMERA = Box(0, 255, (36, 36, 3), np.uint8)


@pytest.mark.parametrize(
    "spaces",
    [
        Spaces(Dict({"camera": CAMERA, "pose.x": VECTOR, "gear": Discrete(3)}), MultiDiscrete([2, 3])),
        Spaces(Box(0, 255, (4, 40, 40), np.uint8), Discrete(4)),
        Spaces(Discrete(5), MultiBinary(3)),
        Spaces(MultiDiscrete([2, 3]), Box(-1, 1, (2, 2), np.float32)),
    ],
    ids=["dict", "image", "categories", "matrix action"],
)
def test_other_spaces_are_learned_from(spaces: Spaces) -> None:
    ppo = make_ppo(spaces, ent_coef=0.01, learning_rate=1e-3)
    rollout = random_rollout(ppo, spaces, num_steps=4, num_envs=3)
    before = {name: x.clone() for name, x in ppo.model.named_parameters()}
    metrics = ppo.update(rollout)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(not torch.equal(before[name], x) for name, x in ppo.model.named_parameters())


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-4},
        {"gamma": 0.5},
        {"gae_lambda": 0.5},
        {"ent_coef": 0.1},
        {"vf_coef": 0.1},
        {"max_grad_norm": 0.01},
        {"clip_coef": 0.001},
        {"clip_vf_coef": 0.001},
        {"target_kl": 1e-6},
        {"update_epochs": 3},
        {"num_minibatches": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_scalar_has_an_attribute_and_an_effect(change: dict[str, float]) -> None:
    ((name, value),) = change.items()
    as_usual, changed = make_ppo(), make_ppo()
    rollout = random_rollout(as_usual, DISCRETE, num_steps=16, num_envs=4)
    assert getattr(changed, name) == getattr(as_usual.hp, name)
    setattr(changed, name, value)
    assert getattr(changed.hp, name) == value
    for learner in (as_usual, changed):
        learner.update(rollout)
    assert not torch.equal(vector(as_usual), vector(changed))


def test_evaluation_is_greedy_unless_told_otherwise() -> None:
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((64, 4), dtype=np.float32)
    actor = make_ppo().actor
    greedy = [actor.act(obs, {}, explore=False, rng=rng).action for _ in range(2)]
    np.testing.assert_array_equal(*greedy)
    actor.hp = dataclasses.replace(actor.hp, deterministic_eval=False)
    assert (actor.act(obs, {}, explore=False, rng=rng).action != greedy[0]).any()


def test_the_state_is_complete() -> None:
    ppo, copy = make_ppo(seed=0), make_ppo(seed=1)
    first, second = (random_rollout(ppo, DISCRETE, num_steps=16, num_envs=4, seed=i) for i in range(2))
    ppo.update(first)
    copy_training(ppo, copy)
    ppo.update(second)
    copy.update(second)
    assert torch.equal(vector(ppo), vector(copy))
    assert ppo.gradient_steps == copy.gradient_steps
    assert ppo.rng.bit_generator.state == copy.rng.bit_generator.state
    obs = np.ones((3, 4), np.float32)
    decisions = [each.actor.act(obs, {}, explore=True, rng=np.random.default_rng(3)) for each in (ppo, copy)]
    np.testing.assert_array_equal(decisions[0].extras["value"], decisions[1].extras["value"])
    np.testing.assert_array_equal(decisions[0].action, decisions[1].action)


def test_adam_is_torchs() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    theirs = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    theirs.load_state_dict(ours.state_dict())
    optimizer = Adam(FlatParameters(ours.parameters()))
    reference = torch.optim.Adam(theirs.parameters(), eps=1e-5)
    for i in range(20):
        x, lr = torch.randn(8, 5), 1e-2 / (i + 1)
        norm = gradient_step(optimizer, ours(x).square().sum(), lr=lr, max_grad_norm=0.5)
        reference.zero_grad()
        theirs(x).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        torch.testing.assert_close(norm, expected, atol=1e-6, rtol=1e-6)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-7, rtol=1e-6)


def test_flat_parameters_are_views_and_keep_memory_formats() -> None:
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 2)).to(memory_format=torch.channels_last)
    image = torch.rand(2, 3, 3, 3)
    before, weights = network(image), {name: x.clone() for name, x in network.state_dict().items()}
    flat = FlatParameters(network.parameters())
    assert torch.equal(network(image), before)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    flat.vector.zero_()
    assert not network(image).any()
    network.load_state_dict(weights)
    assert torch.equal(network(image), before)
    assert flat.vector.any()
    network(image).sum().backward()
    torch.testing.assert_close(flat.gradient.sum(), sum(p.grad.sum() for p in network.parameters()))


def test_every_epoch_sees_all_rows_once_in_an_order_of_its_own() -> None:
    ppo = make_ppo(update_epochs=3, num_minibatches=4)
    names = ("obs", "action", "logprob", "value", "advantage", "target")
    batch = {name: torch.arange(64).reshape(16, 4) for name in names}
    seen = [minibatch["action"].tolist() for _, minibatch in ppo.steps(batch)]
    assert [len(minibatch) for minibatch in seen] == [16] * 12
    epochs = np.reshape(seen, (3, 64))
    np.testing.assert_array_equal(np.sort(epochs, 1), [range(64)] * 3)
    assert len(np.unique(epochs, axis=0)) == 3
