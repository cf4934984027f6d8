"""GAIL's rewards and its discriminator against their definitions, written out slowly and in double precision."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from build import build
from probes import copy_training, random_observation, random_rollout
from rl_training.algorithms.gail import GAIL, GAILHyperparameters, learned_reward
from rl_training.algorithms.optim import MeanMetrics, backward
from rl_training.data.demonstrations import Demonstrations
from rl_training.data.normalize import Normalizer
from rl_training.envs.space_json import space_to_json
from rl_training.errors import ConfigError, InputError
from rl_training.models.discriminator import Discriminator, gradient_penalty, interpolate
from rl_training.models.networks import NatureCNN
from rl_training.types import Spaces

VECTOR = Box(-1, 1, (4,), np.float32)
DISCRETE, CONTINUOUS = Spaces(VECTOR, Discrete(3)), Spaces(VECTOR, Box(-1, 1, (2,), np.float32))
MIXED = Spaces(Dict({"camera": Box(0, 255, (36, 36, 3), np.uint8), "pose.x": VECTOR}), MultiDiscrete([2, 3]))
GATES = Spaces(Discrete(5), MultiBinary(3))
STRETCHED = Spaces(Box(0, 255, (4, 40, 40), np.uint8), Box(-1, 1, (2, 2), np.float32))
ALL = {"discrete": DISCRETE, "box": CONTINUOUS, "dict": MIXED, "binary": GATES, "image": STRETCHED}
ANY_SPACES = pytest.mark.parametrize("spaces", ALL.values(), ids=ALL.keys())


def demonstrations(spaces: Spaces, *, size: int = 60, seed: int = 5) -> Demonstrations:
    rng = np.random.default_rng(seed)
    obs = random_observation(spaces.observation, size, rng)
    action = random_observation(spaces.action, size, rng)
    zeros = np.zeros(size, bool)
    json = [space_to_json(space) for space in (spaces.observation, spaces.action)]
    return Demonstrations("x", *json, obs, obs, action, zeros.astype(np.float32), zeros, zeros, np.array([size]))


def make_gail(spaces: Spaces = DISCRETE, *, seed: int = 0, given: Demonstrations | None = None, **changes: Any) -> GAIL:
    torch.manual_seed(seed)
    sizes = {"num_steps": 16, "disc_hidden_sizes": (8, 8), "disc_batch_size": 12, "disc_updates": 3}
    if changes.get("generator", "ppo") == "ppo":
        sizes |= {"num_minibatches": 2, "update_epochs": 2}
    hp = GAILHyperparameters(**{**sizes, **changes})
    rng = np.random.default_rng(seed)
    learner: GAIL = build("gail", spaces, hp, rng=rng, demonstrations=given or demonstrations(spaces))
    return learner


def vector(learner: GAIL) -> Tensor:
    return learner.actor.parameters.vector.clone()


LOGITS = torch.cat([torch.linspace(-40, 40, 321), torch.tensor([-19.999, 19.999, 20.001])]).sort().values


def test_the_reward_is_a_logarithm_of_the_discriminator() -> None:
    """Logit 40: 1 - D is 4e-18, which only double precision and log1p can tell from 0."""
    logit = LOGITS.double()
    log_d, log_not_d = -torch.log1p(torch.exp(-logit)), -torch.log1p(torch.exp(logit))
    for form, expected in (("softplus", -log_not_d), ("logit", log_d - log_not_d), ("log_d", log_d)):
        reward = learned_reward(LOGITS, form)
        torch.testing.assert_close(reward.double(), expected, atol=1e-6, rtol=1e-6)
        assert reward.isfinite().all()
        assert (reward.diff() >= 0).all()
    middle = LOGITS[LOGITS.abs() < 15]
    expected = -torch.log(1 - torch.sigmoid(middle.double()))
    torch.testing.assert_close(learned_reward(middle, "softplus").double(), expected, atol=1e-6, rtol=1e-6)
    assert all((learned_reward(middle, form).diff() > 0).all() for form in ("softplus", "logit", "log_d"))
    assert (learned_reward(LOGITS, "softplus") >= 0).all()
    assert (learned_reward(LOGITS, "log_d") <= 0).all()


def slow_logit(discriminator: Discriminator, point: Tensor) -> Tensor:
    """A vector [D] through the layers by hand."""
    hidden = point
    for layer in discriminator.trunk:
        hidden = layer.weight @ hidden + layer.bias if isinstance(layer, nn.Linear) else torch.tanh(hidden)
    return discriminator.head.weight[0] @ hidden + discriminator.head.bias[0]


def slow_point(spaces: Spaces, obs: Any, action: Any, mean: Tensor, std: Tensor) -> Tensor:
    """One normalised input, category by category."""
    parts: list[float] = []
    for space, value in ((spaces.observation, obs), (spaces.action, action)):
        if isinstance(space, Discrete):
            parts += [float(value == i) for i in range(int(space.n))]
        elif isinstance(space, MultiDiscrete):
            parts += [float(v == i) for v, n in zip(value, space.nvec, strict=True) for i in range(n)]
        elif space is spaces.action and isinstance(space, Box):
            low, high = space.low.flatten(), space.high.flatten()
            parts += [min(max(float(v), low[i]), high[i]) for i, v in enumerate(np.ravel(value))]
        else:
            parts += [float(v) for v in np.ravel(value)]
    return ((torch.tensor(parts, dtype=torch.float64) - mean) / std).clamp(-10, 10)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS, GATES], ids=["discrete", "box", "binary"])
def test_the_gradient_of_the_discriminator_is_that_of_its_definition(spaces: Spaces) -> None:
    """Cross-entropy with the expert's label 1, entropy bonus, and the penalty on points between, one row at a time."""
    size, rng = 7, np.random.default_rng(3)
    gail = make_gail(spaces, disc_ent_coef=0.3, gradient_penalty=2.0)
    shape = (gail.discriminator.vector_size,)
    mean, std = rng.standard_normal(shape), rng.uniform(0.5, 2, shape)
    gail.discriminator.use_statistics(mean, std)
    sides = []
    for _ in range(2):
        obs = random_observation(spaces.observation, size, rng)
        action = random_observation(spaces.action, size, rng) * (3 if isinstance(spaces.action, Box) else 1)
        sides.append((obs, action))
    weight = rng.random(size, dtype=np.float32)
    tensors = [{"obs": torch.from_numpy(obs), "action": torch.from_numpy(action)} for obs, action in sides]
    expert, generated = (gail.points(steps) for steps in tensors)
    loss = gail.loss(expert, generated, torch.from_numpy(weight), MeanMetrics())
    backward(gail.optimizers["discriminator"], loss)

    slow = copy.deepcopy(gail.discriminator).double()
    statistics = torch.from_numpy(mean), torch.from_numpy(std)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(size):
        real, fake = (slow_point(spaces, obs[i], action[i], *statistics) for obs, action in sides)
        for point, label in ((real, 1), (fake, 0)):
            d = torch.sigmoid(slow_logit(slow, point))
            total -= torch.log(d if label else 1 - d) / (2 * size)
            total += 0.3 * (d * d.log() + (1 - d) * (1 - d).log()) / (2 * size)
        between = (float(weight[i]) * real + (1 - float(weight[i])) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(slow_logit(slow, between), between, create_graph=True)
        total += 2.0 * (slope.norm() - 1) ** 2 / size
    total.backward()
    torch.testing.assert_close(loss.double(), total, atol=1e-5, rtol=1e-5)
    pairs = zip(gail.discriminator.named_parameters(), slow.parameters(), strict=True)
    for (name, ours), expected in pairs:
        assert ours.grad is not None, name
        gradient = torch.zeros_like(expected) if expected.grad is None else expected.grad  # of a bias in the penalty
        torch.testing.assert_close(ours.grad.double(), gradient, atol=1e-5, rtol=1e-4)
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in gail.actor.model.parameters())


def test_the_gradient_penalty_reaches_images() -> None:
    """By finite differences along the gradient, which has to be found in pixels too."""
    torch.manual_seed(0)
    discriminator = Discriminator(MIXED, (8,))
    rng = np.random.default_rng(0)
    points = []
    for _ in range(2):
        obs = {key: torch.from_numpy(x) for key, x in random_observation(MIXED.observation, 1, rng).items()}
        points.append(discriminator.points(obs, torch.from_numpy(random_observation(MIXED.action, 1, rng))))
    middle = interpolate(*points, torch.tensor([0.3]))
    for mixed, one, other in zip(middle, *points, strict=True):
        torch.testing.assert_close(mixed, 0.3 * one + 0.7 * other)
    slow = copy.deepcopy(discriminator).double()
    doubles = [x.double().requires_grad_() for x in middle]

    def logit(vector: Tensor, pixels: Tensor) -> Tensor:
        (cnn,) = slow.images
        assert isinstance(cnn, NatureCNN)
        features = cnn.dense(cnn.convolutions(pixels))
        return slow.head(slow.trunk(torch.cat([vector, features], -1)))[0, 0]

    gradients = torch.autograd.grad(logit(*doubles), doubles)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert float(gradients[1].square().sum()) > 0
    step = 1e-6 / norm
    ahead, behind = ([x + sign * step * g for x, g in zip(doubles, gradients, strict=True)] for sign in (1, -1))
    slope = (logit(*ahead) - logit(*behind)) / 2e-6
    expected = (slope.item() - 1) ** 2
    assert gradient_penalty(discriminator, middle).item() == pytest.approx(expected, rel=1e-3)


@ANY_SPACES
def test_an_update_learns_in_all_spaces(spaces: Spaces) -> None:
    gail = make_gail(spaces, learning_rate=1e-3, gradient_penalty=1.0)
    rollout = random_rollout(gail, spaces, num_steps=16, num_envs=2)
    policy = vector(gail)
    judge = {name: x.clone() for name, x in gail.discriminator.named_parameters()}
    metrics = gail.update(rollout)
    assert all(np.isfinite(value) for value in metrics.values())
    names = {"disc_loss", "disc_entropy", "disc_accuracy_expert", "disc_accuracy_generator", "disc_gradient_penalty"}
    assert names | {"learned_reward", "policy_loss", "approx_kl"} <= metrics.keys()
    assert not torch.equal(policy, vector(gail))
    assert all(not torch.equal(judge[name], x) for name, x in gail.discriminator.named_parameters())
    assert gail.gradient_steps == 4


def test_the_environments_reward_is_replaced_by_that_of_the_discriminator_before_its_update() -> None:
    gail = make_gail(CONTINUOUS, num_steps=8)
    first, second = (random_rollout(gail, CONTINUOUS, num_steps=8, num_envs=3, seed=i) for i in range(2))
    gail.update(first)
    old, before = copy.deepcopy(gail), gail.rewards.state_dict()
    gail.update(second)
    steps = {key: second.batch[key].flatten(0, 1) for key in ("obs", "action")}
    old.observe(steps)
    raw = np.array([old.rate({key: x[i : i + 1] for key, x in steps.items()}).item() for i in range(24)])
    count, mean, squares = before["count"] + 24, before["mean"], before["squares"]
    new_mean = (mean * before["count"] + raw.sum()) / count
    variance = (squares + before["count"] * (mean - new_mean) ** 2 + ((raw - new_mean) ** 2).sum()) / count
    expected = ((raw - new_mean) / np.sqrt(variance + 1e-8)).reshape(8, 3)
    np.testing.assert_allclose(second.arrays["reward"], expected, atol=1e-5)


def test_without_centering_rewards_keep_their_sign() -> None:
    gail = make_gail(center_reward=False)
    rollout = random_rollout(gail, DISCRETE, num_steps=16, num_envs=2)
    gail.update(rollout)
    assert (rollout.arrays["reward"] > 0).all()
    centered = make_gail()
    rollout = random_rollout(centered, DISCRETE, num_steps=16, num_envs=2)
    centered.update(rollout)
    assert abs(rollout.arrays["reward"].mean()) < 1e-5
    assert rollout.arrays["reward"].std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("generator", ["ppo", "trpo"])
def test_the_environments_reward_reaches_nothing(generator: str) -> None:
    states = []
    for factor in (1, -100):
        gail = make_gail(generator=generator)
        for i in range(3):
            rollout = random_rollout(gail, DISCRETE, num_steps=16, num_envs=2, seed=i)
            rollout.arrays["reward"] *= factor
            gail.update(rollout)
        states.append(torch.cat([vector(gail), *(p.flatten() for p in gail.discriminator.parameters())]))
    assert torch.equal(*states)


def test_box_actions_are_judged_as_the_environment_executes_them() -> None:
    discriminator = Discriminator(CONTINUOUS, (8,))
    obs = torch.zeros(2, 4)
    wild, executed = torch.tensor([[3.0, -7.0]]).repeat(2, 1), torch.tensor([[1.0, -1.0]]).repeat(2, 1)
    assert torch.equal(discriminator.points(obs, wild)[0], discriminator.points(obs, executed)[0])


def test_the_experts_observations_are_normalised_as_the_policys_are() -> None:
    gail = make_gail()
    normalizer = Normalizer(VECTOR, 1, reward=False)
    normalizer.observe(np.random.default_rng(0).normal(3, 5, (100, 4)).astype(np.float32))
    state = copy.deepcopy(gail.rng)
    raw = gail.draw_expert(9)
    gail.rng, gail.normalizer = state, normalizer
    scaled = gail.draw_expert(9)
    np.testing.assert_array_equal(scaled["obs"].numpy(), normalizer.observation(raw["obs"].numpy()))
    assert torch.equal(scaled["action"], raw["action"])


def test_the_input_statistics_are_those_of_expert_and_policy_together() -> None:
    gail = make_gail(CONTINUOUS)
    rollout = random_rollout(gail, CONTINUOUS, num_steps=16, num_envs=2)
    steps = {key: rollout.batch[key].flatten(0, 1) for key in ("obs", "action")}
    expert = copy.deepcopy(gail).draw_expert(32)
    gail.observe(steps)
    rows = [torch.cat([s["obs"], s["action"].clamp(-1, 1)], 1).double().numpy() for s in (expert, steps)]
    together = np.concatenate(rows)
    np.testing.assert_allclose(gail.discriminator.mean, together.mean(0), atol=1e-6)
    np.testing.assert_allclose(1 / gail.discriminator.scale, together.std(0), atol=1e-5)


def test_the_discriminator_tells_an_expert_from_the_policy() -> None:
    """The expert takes action 2 wherever the first number is positive, else action 0."""
    given = demonstrations(DISCRETE, size=500)
    given = dataclasses.replace(given, action=np.where(given.obs[:, 0] > 0, 2, 0))
    numbers = {"disc_learning_rate": 1e-2, "disc_updates": 200, "disc_batch_size": 64, "gradient_penalty": 0.0}
    gail = make_gail(given=given, learning_rate=0.0, **numbers)
    gail.update(random_rollout(gail, DISCRETE, num_steps=64, num_envs=8))
    obs = torch.from_numpy(given.obs[:100])
    actions = [torch.from_numpy(action[:100]) for action in (given.action, 2 - given.action)]
    right, wrong = (gail.rate({"obs": obs, "action": action}) for action in actions)
    assert (right > wrong).float().mean() > 0.95


@pytest.mark.parametrize("generator", ["ppo", "trpo"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disc_learning_rate", 1e-4),
        ("disc_updates", 1),
        ("disc_batch_size", 5),
        ("gradient_penalty", 0.5),
        ("disc_ent_coef", 0.5),
        ("gamma", 0.5),
    ],
)
def test_numbers_are_read_at_each_update(name: str, value: float, generator: str) -> None:
    as_usual, changed = (make_gail(generator=generator, seed=0) for _ in range(2))
    setattr(changed, name, value)
    for i in range(2):  # the discriminator's numbers reach the policy through the reward of the next rollout
        rollout = random_rollout(make_gail(), DISCRETE, num_steps=16, num_envs=4, seed=i)
        for learner in (as_usual, changed):
            learner.update(copy.deepcopy(rollout))
    assert not torch.equal(vector(as_usual), vector(changed))


@pytest.mark.parametrize("generator", ["ppo", "trpo"])
def test_the_state_is_complete(generator: str) -> None:
    gail, other = (make_gail(generator=generator, seed=seed, given=demonstrations(DISCRETE)) for seed in range(2))
    first, second = (random_rollout(gail, DISCRETE, num_steps=16, num_envs=4, seed=i) for i in range(2))
    gail.update(first)
    copy_training(gail, other)
    for learner in (gail, other):
        learner.update(copy.deepcopy(second))
    assert torch.equal(vector(gail), vector(other))
    for mine, theirs in zip(gail.discriminator.parameters(), other.discriminator.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert gail.gradient_steps == other.gradient_steps > 0


def test_a_state_of_other_demonstrations_is_refused() -> None:
    gail, other = make_gail(given=demonstrations(DISCRETE)), make_gail(given=demonstrations(DISCRETE, seed=6))
    with pytest.raises(InputError, match=r"algo_kwargs.demonstrations: .* has changed"):
        other.load_state_dict(gail.state_dict())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Spaces(Box(-1, 1, (5,), np.float32), Discrete(3)), r"observations Box\(.*\(5,\).* this environment has Box"),
        (Spaces(VECTOR, Discrete(4)), r"actions Discrete\(4\), this environment has Discrete\(3\)"),
        (Spaces(VECTOR, Box(-1, 1, (2,), np.float32)), "actions Box"),
    ],
)
def test_demonstrations_of_other_spaces_are_refused(found: Spaces, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algo_kwargs.demonstrations: demonstrations of x have {message}"):
        make_gail(given=demonstrations(found))


def test_actions_that_do_not_count_from_zero_are_counted_from_zero() -> None:
    """The environment's first action is 5, the model's 0."""
    given = demonstrations(DISCRETE)
    shifted = dataclasses.replace(given, action_space=space_to_json(Discrete(3, start=5)), action=given.action + 5)
    assert np.array_equal(make_gail(given=shifted).expert_action, given.action)
    with pytest.raises(ConfigError, match="some actions are not in"):
        make_gail(given=dataclasses.replace(given, action=given.action + 5))
