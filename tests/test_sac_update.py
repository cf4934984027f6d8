"""SAC: its steps against Stable-Baselines3 on the same weights, batches and noise, and its parts by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, distributions, nn

from build import build, make_replay
from envs_for_tests import Structured
from probes import copy_training
from rl_training.algorithms.sac import SAC, SACHyperparameters
from rl_training.data.batch import tree_map
from rl_training.data.fields import fields_of
from rl_training.data.replay import Replay
from rl_training.envs.episodes import Episodes, SyncEnvs
from rl_training.envs.runner import EnvRunner
from rl_training.errors import InputError
from rl_training.models.sac import SquashedGaussianPolicy, TwinMLP
from rl_training.ops.distributions import TanhGaussian
from rl_training.runtime.sac_trainer import SAC_RECIPE
from rl_training.types import Batch, Spaces

VECTOR, ACTION = Box(-1, 1, (4,), np.float32), Box(-1, 1, (2,), np.float32)
IMAGE = Box(0, 255, (3, 40, 36), np.uint8)
SPACES = Spaces(VECTOR, ACTION)
GAMMA = 0.97


def make_sac(spaces: Spaces = SPACES, *, seed: int = 0, **changes: Any) -> SAC:
    torch.manual_seed(seed)
    hp = SACHyperparameters(**{"hidden_sizes": (16, 8), "gamma": GAMMA, "learning_rate": 1e-3, **changes})
    learner: SAC = build("sac", spaces, hp, rng=np.random.default_rng(seed))
    return learner


def random_batch(spaces: Spaces = SPACES, size: int = 32, *, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)

    def observations(space: gym.Space) -> Any:
        if isinstance(space, Dict):
            return {key: observations(part) for key, part in space.spaces.items()}
        assert isinstance(space, Box)
        shape = (size, *space.shape)
        if space.dtype == np.uint8:
            return torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
        return torch.from_numpy(rng.standard_normal(shape, np.float32))

    assert spaces.action.shape is not None
    return {
        "obs": observations(spaces.observation),
        "action": torch.from_numpy(rng.uniform(-1, 1, (size, *spaces.action.shape)).astype(np.float32)),
        "reward": torch.from_numpy(rng.standard_normal(size, np.float32)),
        "discount": torch.from_numpy(np.where(rng.random(size) < 0.3, 0, GAMMA).astype(np.float32)),
        "next_obs": observations(spaces.observation),
    }


def next_noise(sac: SAC, size: int) -> Tensor:
    """[2, B, A] What the next update is going to draw."""
    return torch.from_numpy(copy.deepcopy(sac.rng).standard_normal((2, size, sac.action_size), dtype=np.float32))


def whole(sac: SAC) -> nn.Module:
    """All that it learns, as one module."""
    module = nn.Module()
    for name in ("policy", "critic", "target_critic", "log_alpha"):
        setattr(module, name, getattr(sac, name))
    return module


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


class Nowhere(gym.Env):
    """Only its spaces matter."""

    def __init__(self, spaces: Spaces) -> None:
        self.observation_space, self.action_space = spaces.observation, spaces.action


def their_actor(actor: Any, get: Any) -> list[Tensor]:
    """SB3's actor in our order and shapes: the layers for mean and deviation are one."""
    hidden = [get(p) for p in actor.latent_pi.parameters()]
    pairs = zip(actor.mu.parameters(), actor.log_std.parameters(), strict=True)
    heads = [torch.cat([get(one), get(other)]) for one, other in pairs]
    return [*hidden, *heads]


def their_critic(critic: Any, get: Any) -> list[Tensor]:
    """SB3's critics in our order and shapes: layer by layer, [2, in, out] and [2, 1, out]."""
    twins = zip(*(network.parameters() for network in critic.q_networks), strict=True)
    pairs = [torch.stack([get(one), get(other)]) for one, other in twins]
    return [pair.transpose(1, 2) if pair.ndim == 3 else pair.unsqueeze(1) for pair in pairs]


@pytest.mark.parametrize("hidden_sizes", [(16, 8), (16,)], ids=str)
@pytest.mark.parametrize("alpha", [None, 0.3], ids=["learned alpha", "fixed alpha"])
def test_steps_are_those_of_stable_baselines3(
    alpha: float | None, hidden_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stable_baselines3 import SAC as TheirSAC
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples
    from stable_baselines3.common.vec_env import DummyVecEnv

    theirs = TheirSAC(
        "MlpPolicy",
        DummyVecEnv([lambda: Nowhere(SPACES)]),
        learning_rate=1e-3,
        gamma=GAMMA,
        tau=0.1,
        ent_coef="auto_0.5" if alpha is None else alpha,
        buffer_size=10,
        policy_kwargs={"net_arch": list(hidden_sizes)},
        device="cpu",
    )
    theirs.set_logger(Logger(None, []))
    # Theirs guards log(1 - a^2) against zero by adding 1e-6, which shifts every density; ours needs no guard.
    theirs.actor.action_dist.epsilon = 0.0
    with torch.no_grad():  # far from one, where 1 - a^2 has lost its digits
        theirs.actor.log_std.bias.sub_(1.0)
        for parameter in theirs.critic_target.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = make_sac(hidden_sizes=hidden_sizes, alpha=alpha, tau=0.1, initial_alpha=0.5)
    weights = [
        (ours.policy, their_actor(theirs.actor, lambda p: p.data)),
        (ours.critic, their_critic(theirs.critic, lambda p: p.data)),
        (ours.target_critic, their_critic(theirs.critic_target, lambda p: p.data)),
    ]
    for model, values in weights:
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(value)

    for i in range(5):
        batch = random_batch(seed=i)
        draws = iter(next_noise(ours, 32))
        monkeypatch.setattr(distributions.normal, "_standard_normal", lambda *_, draws=draws, **__: next(draws))
        samples = ReplayBufferSamples(
            batch["obs"], batch["action"], batch["next_obs"], (batch["discount"] == 0).float()[:, None],
            batch["reward"][:, None],
        )  # fmt: skip
        theirs.replay_buffer.sample = lambda *_, samples=samples, **__: samples
        theirs.train(1, 32)
        ours.update(batch)

    close: Any = {"atol": 1e-6, "rtol": 0.0}
    mine = ours.optimizers
    networks = [(mine["policy"], theirs.actor, their_actor), (mine["critic"], theirs.critic, their_critic)]
    for optimizer, network, in_our_order in networks:
        flat, moments = optimizer.parameters, network.optimizer.state
        for vector, get in (
            (flat.vector, lambda p: p.data),
            (optimizer.mean, lambda p, moments=moments: moments[p]["exp_avg"]),
            (optimizer.square, lambda p, moments=moments: moments[p]["exp_avg_sq"]),
        ):
            for tensor, other in zip(flat.views(vector), in_our_order(network, get), strict=True):
                torch.testing.assert_close(tensor, other, **close)
    targets = their_critic(theirs.critic_target, lambda p: p.data)
    for tensor, other in zip(ours.target_critic.parameters(), targets, strict=True):
        torch.testing.assert_close(tensor.data, other, **close)
    if alpha is None:
        torch.testing.assert_close(ours.log_alpha.data, theirs.log_ent_coef.data[0], **close)
        state = theirs.ent_coef_optimizer.state[theirs.log_ent_coef]
        for vector, key in ((mine["alpha"].mean, "exp_avg"), (mine["alpha"].square, "exp_avg_sq")):
            torch.testing.assert_close(vector[0], state[key][0], **close)
    else:
        assert ours.log_alpha.item() == pytest.approx(math.log(0.5))


def torchs(mean: Tensor, log_std: Tensor) -> distributions.Distribution:
    normal = distributions.Normal(mean, log_std.exp())
    return distributions.Independent(
        distributions.TransformedDistribution(normal, distributions.TanhTransform(cache_size=1)), 1
    )


def test_the_squashed_gaussian_is_that_of_torch() -> None:
    torch.manual_seed(0)
    mean, log_std, noise = torch.randn(200, 3), 0.5 * torch.randn(200, 3), torch.randn(200, 3)
    policy = TanhGaussian(mean, log_std)
    action, log_prob = policy.sample_with_log_prob(noise)
    inside = (action.abs() < 0.999).all(-1)
    assert inside.sum() > 100
    expected = torchs(mean, log_std).log_prob(action)
    torch.testing.assert_close(log_prob[inside], expected[inside], atol=1e-3, rtol=1e-4)
    double = TanhGaussian(mean.double(), log_std.double()).sample_with_log_prob(noise.double())
    exact = torchs(mean.double(), log_std.double()).log_prob(double[0])
    torch.testing.assert_close(double[1], exact, atol=1e-6, rtol=1e-6)
    assert torch.equal(policy.sample(noise.numpy()), action)
    assert torch.equal(policy.mode, mean.tanh())
    in_numpy = TanhGaussian(mean.numpy(), log_std.numpy())
    np.testing.assert_allclose(in_numpy.sample(noise.numpy()), action, atol=1e-6)
    np.testing.assert_allclose(in_numpy.mode, policy.mode, atol=1e-6)


@pytest.mark.parametrize("u", [-20.0, 20.0])
def test_densities_and_gradients_are_finite_where_tanh_is_flat(u: float) -> None:
    mean = torch.full((1, 1), u, requires_grad=True)
    action, log_prob = TanhGaussian(mean, torch.zeros(1, 1)).sample_with_log_prob(torch.zeros(1, 1))
    assert action.abs().item() == 1.0
    # 1 - tanh(u)^2 is 4 exp(-2 |u|) there
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - math.log(4) + 2 * abs(u), rel=1e-5)
    log_prob.backward()
    assert mean.grad.item() == pytest.approx(2 * math.copysign(1, u), rel=1e-5)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.4)])
def test_the_density_integrates_to_one(mean: float, log_std: float) -> None:
    u = torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(-1)
    noise = (u - mean) / math.exp(log_std)
    policy = TanhGaussian(torch.full_like(u, mean), torch.full_like(u, log_std))
    action, log_prob = policy.sample_with_log_prob(noise)
    assert torch.trapezoid(log_prob.exp(), action.squeeze(-1)).item() == pytest.approx(1.0, abs=1e-6)


def test_deviations_are_kept_between_bounds() -> None:
    policy = SquashedGaussianPolicy.policy(torch.tensor([[0.5, -0.5, -100.0, 100.0]]))
    assert policy.mean.tolist() == [[0.5, -0.5]]
    assert policy.log_std.tolist() == [[-20.0, 2.0]]


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
@pytest.mark.parametrize("hidden_sizes", [(), (5,), (5, 6)], ids=str)
def test_twins_are_two_perceptrons(activation: Any, hidden_sizes: tuple[int, ...]) -> None:
    from rl_training.models.networks import mlp

    torch.manual_seed(0)
    twin, x = TwinMLP([3, *hidden_sizes, 1], activation), torch.randn(7, 3)
    out = twin(x)
    gradients = torch.autograd.grad(out.square().sum(), list(twin.parameters()))
    for i in range(2):
        single = mlp([3, *hidden_sizes, 1], activation, init="torch")
        for ours, parameter in zip(single.parameters(), twin.parameters(), strict=True):
            ours.data.copy_(parameter[i].T if ours.ndim == 2 else parameter[i, 0])
        torch.testing.assert_close(out[i], single(x))
        expected = torch.autograd.grad(single(x).square().sum(), list(single.parameters()))
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient[i], other.T if other.ndim == 2 else other[None])


def test_twins_begin_as_linear_layers_do() -> None:
    torch.manual_seed(0)
    twin = TwinMLP([100, 400, 1], "relu")
    weight, bias = twin.layers[0]
    for tensor in (weight, bias):
        assert 0.098 < tensor.abs().max().item() <= 0.1
        assert abs(tensor.std().item() - 0.1 / math.sqrt(3)) < 0.003
    assert not torch.equal(weight[0], weight[1])


def make_runner(env: gym.Env) -> EnvRunner:
    envs = SyncEnvs([lambda: Episodes(gym.wrappers.FlattenObservation(env), seed=0, index=0)])
    return EnvRunner(envs, seed=0, box_actions=SAC_RECIPE.box_actions)


BOUNDS = [(-2.0, 2.0), (0.0, 1.0), (5.0, 7.0)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_the_replay_holds_actions_in_one_range_and_the_environment_gets_its_own(low: float, high: float) -> None:
    env = Structured(Box(low, high, (2, 3), np.float32))
    runner = make_runner(env)
    sac = make_sac(runner.spaces)
    with torch.no_grad():  # wide, so that some actions end up at the very edge
        sac.policy.network[-1].bias[6:] = 2.0
    replay = make_replay("sac", sac, runner.spaces, 1)
    for _ in range(30):
        replay.add(runner.step(sac.actor.act))
    action = replay.sample(64, np.random.default_rng(0), gamma=0.9)["action"].numpy()
    assert action.shape == (64, 2, 3)
    assert action.dtype == np.float32
    assert action.min() < -0.9
    assert action.max() > 0.9
    assert np.abs(action).max() <= 1.0
    kept = replay.columns["action"][replay.valid]
    assert all(env.action_space.contains(a) for a in env.received)
    np.testing.assert_allclose(np.array(env.received), low + (kept + 1) / 2 * (high - low), atol=1e-5)


def test_bounds_change_neither_policy_nor_density() -> None:
    """Entropy is that of actions in [-1, 1], which `target_entropy` refers to."""
    seen = []
    for low, high in BOUNDS:
        env = Structured(Box(low, high, (2,), np.float32))
        runner = make_runner(env)
        sac = make_sac(Spaces(VECTOR, runner.spaces.action))
        decision = sac.actor.act(np.ones((3, 4), np.float32), None, explore=True, rng=np.random.default_rng(1))
        seen.append((decision.action.tolist(), sac.update(random_batch())["entropy"].item()))
    assert seen[0] == seen[1] == seen[2]


def test_infinite_bounds_are_an_error_with_a_remedy() -> None:
    env = Structured(Box(-np.inf, np.inf, (2,), np.float32))
    with pytest.raises(InputError, match=r"finite.*ppo"):
        make_runner(env)


@pytest.mark.parametrize("space", [Discrete(3), gym.spaces.MultiBinary(2), Box(-1, 1, (), np.float32)], ids=str)
def test_other_action_spaces_are_an_error_with_a_remedy(space: gym.Space) -> None:
    with pytest.raises(InputError, match="use dqn or ppo"):
        build("sac", Spaces(VECTOR, space), SACHyperparameters())


def test_acting() -> None:
    sac, obs = make_sac(), np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    policy = sac.policy(torch.from_numpy(obs))
    noise = np.random.default_rng(3).standard_normal((5, 2), dtype=np.float32)
    explored = sac.actor.act(obs, {}, explore=True, rng=np.random.default_rng(3))
    np.testing.assert_allclose(explored.action, policy.sample(noise).detach(), atol=1e-6)
    calm = sac.actor.act(obs, {}, explore=False, rng=np.random.default_rng(3))
    np.testing.assert_allclose(calm.action, policy.mean.tanh().detach(), atol=1e-6)
    assert calm.memory == {}
    assert calm.extras == {}
    sampling = make_sac(deterministic_eval=False).actor.act(obs, {}, explore=False, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(sampling.action, explored.action)


@pytest.mark.parametrize(("offset", "rises"), [(+1.0, True), (-1.0, False)])
def test_alpha_rises_where_entropy_is_below_its_target_and_falls_above(offset: float, rises: bool) -> None:
    entropy = make_sac().update(random_batch())["entropy"].item()
    sac = make_sac(target_entropy=entropy + offset)
    report = sac.update(random_batch())
    assert report["alpha"].item() == 1.0  # in force in this very step
    assert report["alpha_loss"].item() == 0.0  # its logarithm being 0
    assert (sac.log_alpha.item() > 0) == rises
    assert sac.update(random_batch())["alpha"].item() == pytest.approx(math.exp(1e-3 if rises else -1e-3), rel=1e-5)


def test_the_automatic_target_is_minus_the_number_of_dimensions() -> None:
    spaces = Spaces(VECTOR, Box(-1, 1, (2, 3), np.float32))
    automatic, given, other = (
        make_sac(spaces),
        make_sac(spaces, target_entropy=-6.0),
        make_sac(spaces, target_entropy=9),
    )
    batch = random_batch(spaces)
    reports = [sac.update(batch) for sac in (automatic, given, other)]
    assert reports[0]["target_entropy"].item() == -6.0
    assert torch.equal(automatic.log_alpha, given.log_alpha)
    assert not torch.equal(automatic.log_alpha, other.log_alpha)


def test_a_fixed_alpha_stays_and_weighs_entropy() -> None:
    fixed, heavier = make_sac(alpha=0.1), make_sac(alpha=0.5)
    batch, before = random_batch(), snapshot(whole(fixed))
    for _ in range(3):
        report = fixed.update(batch)
        heavier.update(batch)
    assert report.keys().isdisjoint({"alpha_loss", "target_entropy"})
    assert "log_alpha" not in changed(whole(fixed), before)
    assert fixed.optimizers["alpha"].steps.item() == 0
    assert changed(fixed.policy, snapshot(heavier.policy))
    learned = make_sac(initial_alpha=0.1, alpha_learning_rate=0.0)
    for _ in range(3):
        learned.update(batch)
    for mine, other in zip(whole(learned).parameters(), whole(fixed).parameters(), strict=True):
        torch.testing.assert_close(mine, other if mine is not learned.log_alpha else mine)


class KnownCritic(nn.Module):
    """Q(s, a) = -4 |a|^2 for both twins; the weights of the learned one are there, but say nothing."""

    def __init__(self, learned: nn.Module) -> None:
        super().__init__()
        self.learned = learned

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return (-4 * action.square().sum(-1)).expand(2, -1) + 0.0 * self.learned(obs, action)


def test_alpha_settles_where_the_best_policy_has_the_target_entropy() -> None:
    """The best policy is exp(Q / alpha), normalised: nearly a normal of variance alpha / 8, whose entropy is known."""
    spaces, target = Spaces(VECTOR, Box(-1, 1, (1,), np.float32)), -1.5
    sac = make_sac(spaces, target_entropy=target, learning_rate=0.03, initial_alpha=0.1)
    sac.critic = KnownCritic(sac.critic)  # type: ignore[assignment]
    alphas, entropies = [], []
    for step in range(300):
        report = sac.update(random_batch(spaces, 128, seed=step % 50))
        alphas.append(report["alpha"])
        entropies.append(report["entropy"])
    variance = math.exp(2 * target) / (2 * math.pi * math.e)
    assert torch.stack(entropies[-150:]).mean().item() == pytest.approx(target, rel=0.05)
    assert torch.stack(alphas[-150:]).mean().item() == pytest.approx(8 * variance, rel=0.05)


def test_each_loss_moves_its_own_network() -> None:
    """The first Adam moment after one step is a tenth of the gradient: compared with each loss's own, by autograd."""
    sac, batch = make_sac(initial_alpha=0.5), random_batch()
    twin = make_sac(initial_alpha=0.5)
    noise = next_noise(sac, 32)
    report = sac.update(batch)

    next_action, next_log_prob = twin.policy(batch["next_obs"]).sample_with_log_prob(noise[1])  # by the actor as it was
    q1, q2 = twin.target_critic(batch["next_obs"], next_action)
    target = batch["reward"] + batch["discount"] * (torch.min(q1, q2) - 0.5 * next_log_prob)
    q1, q2 = twin.critic(batch["obs"], batch["action"])
    critic_loss = 0.5 * (((q1 - target.detach()) ** 2).mean() + ((q2 - target.detach()) ** 2).mean())
    action, log_prob = twin.policy(batch["obs"]).sample_with_log_prob(noise[0])
    q1, q2 = sac.critic(batch["obs"], action)  # by the critics as they are after their step
    actor_loss = (0.5 * log_prob - torch.min(q1, q2)).mean()
    for name, loss, optimizer, model in (
        ("critic_loss", critic_loss, sac.optimizers["critic"], twin.critic),
        ("actor_loss", actor_loss, sac.optimizers["policy"], twin.policy),
    ):
        assert report[name].item() == pytest.approx(loss.item(), rel=1e-5)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for moment, gradient in zip(optimizer.parameters.views(optimizer.mean), gradients, strict=True):
            torch.testing.assert_close(moment, 0.1 * gradient, atol=1e-7, rtol=1e-4)
    assert report["entropy"].item() == pytest.approx(-log_prob.mean().item(), rel=1e-5)
    assert report["q_value"].item() == pytest.approx(twin.critic(batch["obs"], batch["action"]).mean().item(), rel=1e-5)


def test_each_network_has_its_own_learning_rate() -> None:
    batch = random_batch()
    frozen = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "alpha_learning_rate": 0.0}
    for name, moving in (
        ("learning_rate", {"policy"}),
        ("critic_learning_rate", {"critic", "target_critic"}),
        ("alpha_learning_rate", {"log_alpha"}),
    ):
        sac = make_sac(**(frozen | {name: 1e-3}))
        before = snapshot(whole(sac))
        sac.update(batch)
        assert {key.split(".")[0] for key in changed(whole(sac), before)} == moving
    one, other = make_sac(learning_rate=2e-3), make_sac(critic_learning_rate=2e-3, alpha_learning_rate=2e-3)
    other.learning_rate = 2e-3
    for sac in (one, other):
        sac.update(batch)
    assert not changed(whole(one), snapshot(whole(other)))


def test_targets_follow_the_actor_of_now_and_the_target_critics() -> None:
    sac, batch, noise = make_sac(), random_batch(), torch.randn(32, 2)
    goes_on = batch["discount"] > 0
    before = sac.targets(batch, 0.2, noise)
    for model, matters in ((sac.critic, False), (sac.policy, True), (sac.target_critic, True)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        after = sac.targets(batch, 0.2, noise)
        assert torch.equal(before[~goes_on], after[~goes_on])
        assert (before != after)[goes_on].all() if matters else torch.equal(before, after), type(model)
        before = after
    assert not before.requires_grad


def test_the_target_moves_by_tau() -> None:
    sac, batch = make_sac(tau=0.25), random_batch()
    before = snapshot(sac.target_critic)
    sac.update(batch)
    for name, tensor in sac.target_critic.state_dict().items():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * sac.critic.state_dict()[name])


def test_a_terminated_step_has_no_future_and_a_truncated_one_does() -> None:
    """Two episodes of one step each, which end in the same state, the one for good, the other by the clock."""
    sac = make_sac()
    obs, end = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    step = {"obs": obs, "next_obs": end, "first": np.ones(2, bool), "action": np.zeros((2, 2), np.float32)}
    step |= {"reward": np.array([3.0, 3.0], np.float32)}
    step |= {"terminated": np.array([True, False]), "truncated": np.array([False, True])}
    replay = Replay(100, 2, fields_of(step))
    replay.add(step)
    batch, noise = replay.transitions(np.flatnonzero(replay.valid), gamma=GAMMA), torch.randn(2, 2)
    target = sac.targets(batch, 0.2, noise)
    assert target[0].item() == 3.0
    action, log_prob = sac.policy(torch.ones(1, 4)).sample_with_log_prob(noise[1:])
    value = sac.target_critic(torch.ones(1, 4), action).min() - 0.2 * log_prob
    assert target[1].item() == pytest.approx(3.0 + GAMMA * value.item(), rel=1e-5)


@pytest.mark.parametrize("observation", [IMAGE, Dict({"camera": IMAGE, "speed": VECTOR})], ids=["image", "dict"])
def test_one_update_moves_every_encoder(observation: gym.Space) -> None:
    spaces = Spaces(observation, Box(-1, 1, (2, 2), np.float32))
    sac, batch = make_sac(spaces), random_batch(spaces, 4)
    before = snapshot(whole(sac))
    sac.update(batch)
    still = before.keys() - changed(whole(sac), before)
    assert not {name for name in still if "encoder" in name}
    shared = {p.data_ptr() for p in sac.policy.parameters()} & {p.data_ptr() for p in sac.critic.parameters()}
    assert not shared
    obs = tree_map(lambda x: x.numpy(), batch["obs"])
    action = sac.actor.act(obs, {}, explore=True, rng=np.random.default_rng(0)).action
    assert action.shape == (4, 2, 2)
    assert action.dtype == np.float32


def test_the_state_is_complete() -> None:
    sac, other, batch = make_sac(), make_sac(seed=1), random_batch()
    sac.update(batch)
    state = sac.state_dict()
    assert state.keys() >= {"critic", "target_critic", "log_alpha"}
    assert state["optimizers"].keys() == {"policy", "critic", "alpha"}
    assert sac.actor.state_dict()["model"].keys() == sac.policy.state_dict().keys()
    copy_training(sac, other)
    for learner in (sac, other):
        learner.update(batch)
    assert not changed(whole(sac), snapshot(whole(other)))
    obs = np.ones((1, 4), np.float32)
    actions = [
        each.actor.act(obs, {}, explore=False, rng=np.random.default_rng(0)).action.tolist() for each in (sac, other)
    ]
    assert actions[0] == actions[1]
