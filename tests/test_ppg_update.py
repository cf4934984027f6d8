"""PPG against PPO, against a slow auxiliary phase written from the paper, and the identities of its losses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch import distributions as td

from build import build
from probes import copy_training, random_rollout
from rl_training.algorithms.optim import MeanMetrics
from rl_training.algorithms.ppg import PPG, FixedPolicy, PPGHyperparameters
from rl_training.data.rollout import Rollout
from rl_training.data.state_check import StateMismatch, compare_state
from rl_training.errors import InputError
from rl_training.models.actor_critic import parameter_groups
from rl_training.types import Spaces
from test_ppo_update import CAMERA, CONTINUOUS, DISCRETE, VECTOR, make_ppo, perturb

SPACES = {
    "discrete": DISCRETE,
    "box": CONTINUOUS,
    "multi-discrete": Spaces(VECTOR, MultiDiscrete([2, 3])),
    "multi-binary": Spaces(VECTOR, MultiBinary(3)),
}
IMAGES = Spaces(Box(0, 255, (4, 40, 40), np.uint8), Discrete(4))
DICT = Spaces(Dict({"camera": CAMERA, "pose.x": VECTOR, "gear": Discrete(3)}), Box(-1, 1, (2, 2), np.float32))
BOTH = pytest.mark.parametrize("architecture", ["dual", "detach"])
EPS = 1e-3  # of Adam: large, because the first gradient of the clone term is rounding noise
PPO_LIKE: dict[str, Any] = {"num_minibatches": 4, "update_epochs": 3, "learning_rate": 3e-3}


def make_ppg(spaces: Spaces = DISCRETE, *, seed: int = 0, **changes: Any) -> PPG:
    torch.manual_seed(seed)
    small = {"num_steps": 16, "num_minibatches": 2, "policy_phase_updates": 2, "aux_num_minibatches": 2}
    small |= {"update_epochs": 1, "value_epochs": 1}
    learner: PPG = build("ppg", spaces, PPGHyperparameters(**{**small, **changes}), rng=np.random.default_rng(seed))
    return learner


def rollouts(learner: PPG, spaces: Spaces, count: int, *, num_steps: int = 16, num_envs: int = 4) -> list[Rollout]:
    return [random_rollout(learner, spaces, num_steps=num_steps, num_envs=num_envs, seed=i) for i in range(count)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    """The parts of the model that changed."""
    return {name.partition(".")[0] for name, x in model.state_dict().items() if not torch.equal(before[name], x)}


def with_gradient(model: nn.Module, loss: Tensor) -> set[str]:
    """The parts of the model that get a gradient of the loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name.partition(".")[0] for name, g in zip(names, gradients, strict=True) if g is not None and g.any()}


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("normalize_advantage", [True, False])
def test_without_auxiliary_epochs_it_is_ppo(spaces: Spaces, normalize_advantage: bool) -> None:
    changes = PPO_LIKE | {"ent_coef": 0.01, "clip_vf_coef": 0.5, "normalize_advantage": normalize_advantage}
    ppo = make_ppo(spaces, **changes)
    ppg = make_ppg(spaces, **changes, value_epochs=3, aux_epochs=0, normalize_over="minibatch")
    for rollout in rollouts(ppg, spaces, 5):
        metrics = ppo.update(rollout)
        assert ppg.update(rollout) == metrics
    assert ppg.gradient_steps == ppo.gradient_steps == 60
    assert ppg.rng.bit_generator.state == ppo.rng.bit_generator.state
    expected, found = ppo.model.state_dict(), ppg.model.state_dict()
    assert found.keys() - expected.keys() == {"auxiliary_head.weight", "auxiliary_head.bias"}
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def slow_policy(model: Any, obs: Tensor, spaces: Spaces) -> list[td.Distribution]:
    """Independent parts of the policy, whose KL divergences add."""
    hidden = obs
    for layer in model.policy_trunk:
        hidden = torch.tanh(layer(hidden)) if isinstance(layer, nn.Linear) else hidden
    out = model.policy_head(hidden)
    if isinstance(spaces.action, Discrete):
        return [td.Categorical(logits=out)]
    if isinstance(spaces.action, MultiDiscrete):
        return [td.Categorical(logits=part) for part in out.split([2, 3], -1)]
    if isinstance(spaces.action, MultiBinary):
        return [td.Bernoulli(logits=x) for x in out.unbind(-1)]
    std = model.log_std.exp()
    return [td.Normal(out[:, i], std[i]) for i in range(out.shape[1])]


def slow_values(model: Any, obs: Tensor, *, dual: bool) -> tuple[Tensor, Tensor]:
    """(value [B], auxiliary value [B])."""
    hidden, own = obs, obs
    for layer in model.policy_trunk:
        hidden = torch.tanh(layer(hidden)) if isinstance(layer, nn.Linear) else hidden
    for layer in model.value_trunk:
        own = torch.tanh(layer(own)) if isinstance(layer, nn.Linear) else own
    value = model.value_head(own if dual else hidden.detach())
    return value[:, 0], model.auxiliary_head(hidden)[:, 0]


def slow_auxiliary_phase(ppg: PPG, model: Any, obs: Tensor, target: Tensor, spaces: Spaces, rng: Any) -> list[float]:
    """Equation by equation, with torch's Adam. Returns the KL of each minibatch."""
    hp, kls = ppg.hp, []
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=hp.aux_learning_rate, eps=EPS)
    for _ in range(hp.aux_epochs):
        order = rng.permutation(len(target))
        for index in np.array_split(order, hp.aux_num_minibatches * hp.policy_phase_updates):
            x, y = obs[index], target[index]
            value, auxiliary = slow_values(model, x, dual=hp.architecture == "dual")
            with torch.no_grad():
                old = slow_policy(teacher, x, spaces)
            pairs = zip(old, slow_policy(model, x, spaces), strict=True)
            kl = sum(td.kl_divergence(p, q) for p, q in pairs).mean()
            loss = 0.5 * ((auxiliary - y) ** 2).mean() + hp.beta_clone * kl + 0.5 * ((value - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            if hp.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), hp.max_grad_norm)
            optimizer.step()
            kls.append(float(kl.detach()))
    return kls


@BOTH
@pytest.mark.parametrize("action", SPACES)
def test_the_auxiliary_phase_is_that_of_the_paper(architecture: Any, action: str) -> None:
    """Targets are noted when their rollout is learned from: those of the phase are not computed again."""
    spaces, noted, at_phase = SPACES[action], [], []
    numbers = {"aux_epochs": 8, "beta_clone": 0.7, "aux_learning_rate": 3e-3, "learning_rate": 1e-2}
    ppg = make_ppg(spaces, architecture=architecture, update_epochs=2, value_epochs=2, **numbers)
    perturb(ppg.model, 0.1)
    ppg.optimizers["auxiliary"].eps = EPS  # type: ignore[attr-defined]
    learning_batch, auxiliary_phase = ppg.learning_batch, ppg.auxiliary_phase

    def note_batch(rollout: Rollout, metrics: MeanMetrics) -> Any:
        batch = learning_batch(rollout, metrics)
        noted.append((batch["obs"].flatten(0, 1).clone(), batch["target"].flatten().clone()))
        return batch

    def note_phase(metrics: MeanMetrics) -> None:
        at_phase.append((copy.deepcopy(ppg.model), copy.deepcopy(ppg.rng)))
        auxiliary_phase(metrics)

    ppg.learning_batch, ppg.auxiliary_phase = note_batch, note_phase  # type: ignore[method-assign]
    for seed in range(2):
        metrics = ppg.update(random_rollout(ppg, spaces, num_steps=9, num_envs=3, seed=seed))
    ((model, rng),) = at_phase
    before = state_of(model)
    obs, target = (torch.cat(parts) for parts in zip(*noted, strict=True))
    teacher = copy.deepcopy(model)
    kls = slow_auxiliary_phase(ppg, model, obs, target, spaces, rng)
    assert rng.bit_generator.state == ppg.rng.bit_generator.state
    for name, x in model.state_dict().items():
        assert not torch.equal(before[name], x), name
        torch.testing.assert_close(ppg.model.state_dict()[name], x, atol=1e-6, rtol=1e-6, msg=name)
    assert metrics["aux_clone_loss"] == pytest.approx(np.mean(kls), rel=1e-4)
    with torch.no_grad():
        pairs = zip(slow_policy(teacher, obs, spaces), slow_policy(model, obs, spaces), strict=True)
        kl = sum(td.kl_divergence(p, q) for p, q in pairs).mean()
    assert metrics["aux_kl"] == pytest.approx(float(kl), rel=1e-3)
    assert metrics["aux_kl"] > 1e-4


@pytest.mark.parametrize("action", SPACES)
def test_the_clone_term_is_flat_where_the_auxiliary_phase_begins(action: str) -> None:
    ppg = make_ppg(SPACES[action])
    perturb(ppg.model, 0.3)
    obs = torch.randn(50, 4)
    old = FixedPolicy(ppg.model, obs, 5)

    def kl_and_gradient() -> tuple[float, float]:
        kl = old.of(old.output).kl(ppg.model(obs)[0]).mean()  # type: ignore[arg-type]
        parameters = parameter_groups(ppg.model)["policy"]
        return float(kl.detach()), float(torch.cat([g.flatten() for g in torch.autograd.grad(kl, parameters)]).norm())

    kl, slope = kl_and_gradient()
    assert abs(kl) < 1e-7
    assert slope < 1e-6
    perturb(ppg.model, 0.1)  # the old policy stays
    kl, slope = kl_and_gradient()
    assert kl > 1e-3
    assert slope > 1e-2
    assert float(old.kl(ppg.model, obs, 3)) == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("spaces", [CONTINUOUS, IMAGES, DICT], ids=["vector", "image", "dict"])
@BOTH
def test_which_loss_reaches_which_part(architecture: Any, spaces: Spaces) -> None:
    ppg = make_ppg(spaces, architecture=architecture)
    (rollout,) = rollouts(ppg, spaces, 1, num_steps=2, num_envs=2)
    batch = ppg.learning_batch(rollout, MeanMetrics())
    obs = {key: x.flatten(0, 1) for key, x in batch["obs"].items()} if spaces is DICT else batch["obs"].flatten(0, 1)
    policy, value, auxiliary = ppg.model.with_auxiliary(obs)
    encoder = {"encoder"} if any(True for _ in ppg.model.encoder.parameters()) else set()
    trunk = encoder | ({"policy_trunk"} if len(ppg.model.policy_trunk) else set())
    own = {name.replace("policy_trunk", "value_trunk").replace("encoder", "value_encoder") for name in trunk}
    assert with_gradient(ppg.model, auxiliary.sum()) == trunk | {"auxiliary_head"}
    assert with_gradient(ppg.model, value.sum()) == {"value_head"} | (own if architecture == "dual" else set())
    parts = with_gradient(ppg.model, policy.log_prob(batch["action"].flatten(0, 1)).sum())
    assert parts - {"log_std"} == trunk | {"policy_head"}


@BOTH
def test_the_policy_phase_leaves_the_auxiliary_head_alone(architecture: Any) -> None:
    ppg = make_ppg(architecture=architecture)
    first, second = rollouts(ppg, DISCRETE, 2)
    before = state_of(ppg.model)
    assert not any(name.startswith("aux_") for name in ppg.update(first))
    shared = {"policy_trunk", "policy_head", "value_head"}
    assert moved(before, ppg.model) == shared | ({"value_trunk"} if architecture == "dual" else set())
    metrics = ppg.update(second)
    assert {"aux_kl", "aux_value_loss", "aux_clone_loss", "aux_true_value_loss"} <= metrics.keys()
    assert "auxiliary_head" in moved(before, ppg.model)
    assert ppg.phase.count == 0
    assert float(ppg.optimizers["auxiliary"].steps) == 6 * 2 * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("update_epochs", "value_epochs"), [(1, 3), (3, 1)])
def test_policy_and_value_have_epochs_of_their_own(update_epochs: int, value_epochs: int) -> None:
    epochs = {"policy": update_epochs, "value": value_epochs}
    once, ppg = make_ppg(), make_ppg(update_epochs=update_epochs, value_epochs=value_epochs)
    (rollout,) = rollouts(ppg, DISCRETE, 1)
    for learner in (once, ppg):
        learner.update(rollout)
    assert {name: int(ppg.optimizers[name].steps) for name in epochs} == {  # type: ignore[attr-defined]
        name: 2 * count for name, count in epochs.items()
    }
    assert ppg.gradient_steps == 6
    for name, count in epochs.items():
        expected, found = parameter_groups(once.model)[name], parameter_groups(ppg.model)[name]
        assert [torch.equal(*pair) for pair in zip(expected, found, strict=True)] == [count == 1] * len(found)


@pytest.mark.parametrize("normalize_over", ["rollout", "minibatch"])
def test_advantages_are_normalized_once_over_all_of_a_rollout_or_in_each_minibatch(normalize_over: Any) -> None:
    ppg, seen = make_ppg(normalize_over=normalize_over, num_minibatches=4), []
    minibatch_advantage = ppg.minibatch_advantage

    def note(advantage: Tensor) -> Tensor:
        seen.append(minibatch_advantage(advantage))
        return seen[-1]

    ppg.minibatch_advantage = note  # type: ignore[method-assign]
    (rollout,) = rollouts(ppg, DISCRETE, 1)
    advantage = np.sort(ppg.learning_batch(rollout, MeanMetrics())["advantage"].flatten())
    ppg.update(rollout)
    every = np.sort(torch.cat(seen))
    whole = (advantage - advantage.mean()) / advantage.std(ddof=1)
    assert np.allclose(every, whole, atol=1e-5) == (normalize_over == "rollout")
    assert all(abs(float(x.mean())) < 1e-6 for x in seen) == (normalize_over == "minibatch")


def test_the_larger_beta_clone_the_less_the_policy_moves() -> None:
    kl = []
    for beta_clone in (0.0, 1.0, 1e4):
        ppg = make_ppg(CONTINUOUS, beta_clone=beta_clone, aux_learning_rate=3e-4, aux_epochs=20)
        perturb(ppg.model, 0.1)
        kl += [ppg.update(rollout).get("aux_kl") for rollout in rollouts(ppg, CONTINUOUS, 2)][1:]
    assert kl[0] > 10 * kl[1] > 100 * kl[2]
    assert kl[2] < 2e-5


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("spaces", [DISCRETE, IMAGES, DICT], ids=["vector", "image", "dict"])
def test_the_state_is_complete_anywhere_in_a_phase(spaces: Spaces, count: int) -> None:
    changes = {"policy_phase_updates": 3, "aux_epochs": 1, "aux_num_minibatches": 1}
    ppg, other = (make_ppg(spaces, seed=seed, **changes) for seed in range(2))
    every = rollouts(ppg, spaces, count + 3, num_steps=3, num_envs=2)
    for rollout in every[:count]:
        ppg.update(rollout)
    state = copy.deepcopy(ppg.state_dict())
    compare_state(other.state_pattern(), state, "learner")
    copy_training(ppg, other)
    assert other.phase.count == count % 3
    for rollout in every[count:]:
        assert ppg.update(rollout) == other.update(rollout)
    assert all(torch.equal(other.model.state_dict()[name], x) for name, x in ppg.model.state_dict().items())
    compare_state(ppg.state_dict(), other.state_dict(), "learner")


def test_the_phase_keeps_observations_as_they_are_and_outlives_the_rollout() -> None:
    ppg = make_ppg(IMAGES, aux_epochs=1)
    (rollout,) = rollouts(ppg, IMAGES, 1, num_steps=3, num_envs=2)
    obs = rollout.batch["obs"].clone()
    ppg.update(rollout)
    rollout.arrays["obs"][:] = 0  # the next rollout is written to the same arrays
    samples = ppg.phase.samples()
    assert samples["obs"].dtype == torch.uint8
    assert torch.equal(samples["obs"], obs.flatten(0, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"count": 2},
        {"count": 0},
        {"count": 1, "target": torch.zeros(5)},
        {"count": 1, "obs": torch.zeros(8, 5)},
        {"count": 1, "obs": torch.zeros(8, 4, dtype=torch.float64)},
        {"count": 1, "target": torch.zeros(8, 1)},
    ],
    ids=str,
)
def test_a_phase_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    ppg = make_ppg()
    (rollout,) = rollouts(ppg, DISCRETE, 1, num_steps=4, num_envs=2)
    ppg.update(rollout)
    state = ppg.state_dict()
    state["phase"] = {**state["phase"], **change}
    with pytest.raises(StateMismatch, match="phase"):
        make_ppg().load_state_dict(state)


def test_a_rollout_of_another_size_is_refused_within_a_phase() -> None:
    ppg = make_ppg()
    for num_envs in (2, 4):  # from here on, the phase is that of the second
        ppg.phase.clear()
        ppg.update(*rollouts(ppg, DISCRETE, 1, num_envs=num_envs))
    with pytest.raises(InputError, match=r"a rollout of 32 samples .* rollouts of 64"):
        ppg.update(*rollouts(ppg, DISCRETE, 1, num_envs=2))


@BOTH
@pytest.mark.parametrize(
    "spaces", [DICT, IMAGES, Spaces(Discrete(5), MultiBinary(3)), SPACES["multi-discrete"]], ids=str
)
def test_other_spaces_are_learned_from(spaces: Spaces, architecture: Any) -> None:
    ppg = make_ppg(spaces, architecture=architecture, ent_coef=0.01, learning_rate=1e-3, aux_epochs=2)
    before = state_of(ppg.model)
    for rollout in rollouts(ppg, spaces, 2, num_steps=4, num_envs=3):
        metrics = ppg.update(rollout)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(not torch.equal(before[name], x) for name, x in ppg.model.state_dict().items())
