"""The gradient step of planning, against loops over one sequence and one step at a time in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from naive_planning import BOARD, DUEL, PLAIN, TORQUE, Diary, make, new_replay, restore, steps
from naive_replay import Ends
from rl_training.algorithms.base import scalar_names
from rl_training.algorithms.planning import squashed_log_prob
from rl_training.data.batch import to_tensors
from rl_training.models.muzero import scale_gradient
from rl_training.types import Batch, Spaces

LOSSES = ("policy", "value", "reward", "consistency")
NUMBERS = {
    "policy_coef": 0.7,
    "value_coef": 0.4,
    "reward_coef": 1.3,
    "unroll_coef": 0.6,
    "hidden_gradient_scale": 0.5,
    "weight_decay": 0.0,
    "learning_rate": 0.0,
    "max_grad_norm": None,
}
CASES: dict[str, tuple[str, Spaces, dict[str, Any]]] = {
    "muzero": ("muzero", PLAIN, {}),
    "two layers": ("muzero", PLAIN, {"hidden_sizes": (7, 5), "activation": "tanh", "unroll_steps": 1}),
    "two players": ("muzero", DUEL, {"value_limit": 0, "reward_limit": 0}),
    "board": ("gumbel_muzero", BOARD, {"value_limit": 0, "reward_limit": 0}),
    "gumbel": ("gumbel_muzero", PLAIN, {"unroll_steps": 5}),
    "continuous": ("muzero", TORQUE, {}),
    "efficientzero": ("efficientzero", PLAIN, {"lstm_horizon": 2, "consistency_coef": 0.8}),
    "continuous efficientzero": ("efficientzero", TORQUE, {"lstm_horizon": 5}),
}


def prepared(case: str, **changes: Any) -> tuple[Any, Batch]:
    """A learner, and a batch of all kinds of sequences with importance weights."""
    algo, spaces, own = CASES[case]
    learner = make(algo, spaces, **{**NUMBERS, **own, **changes})
    diary = Diary(new_replay(learner)).play(steps(60, spaces=spaces, ends=Ends(0.15, 0.1)))
    index = np.random.default_rng(0).permutation(np.flatnonzero(diary.replay.valid))[:24]
    diary.replay.columns["action"] %= 3  # what names a step in the diary is no action
    if spaces is TORQUE:
        diary.replay.columns["action"] /= 3
    batch = learner.targets(diary.replay, index)
    weight = np.random.default_rng(1).uniform(0.1, 1.0, len(index)).astype(np.float32)
    masks = batch["policy_mask"], batch["value_mask"]
    assert 0.1 < masks[0].mean() < masks[1].mean() < 1 or learner.hp.unroll_steps == 1
    return learner, to_tensors(batch | {"weight": weight}, learner.device)


def h(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 0.001 * x


def cross_entropy_of_number(logits: Tensor, x: float) -> Tensor:
    """-sum over atoms of the two-hot target times log softmax; or, with one logit, the squared error of its tanh."""
    if len(logits) == 1:
        return (torch.tanh(logits[0]) - x) ** 2
    limit = len(logits) // 2
    y = min(max(h(x), -limit), limit)
    below = min(math.floor(y), limit - 1)
    log_p = logits - torch.logsumexp(logits, 0)
    return -(below + 1 - y) * log_p[below + limit] - (y - below) * log_p[below + 1 + limit]


def number_of(logits: Tensor) -> float:
    if len(logits) == 1:
        return math.tanh(logits.item())
    limit, p = len(logits) // 2, torch.softmax(logits, 0).tolist()
    y = sum(q * (i - limit) for i, q in enumerate(p))
    low, high = -1e6, 1e6
    while high - low > 1e-10 * (1 + abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle) < y else (low, middle)
    return low


def cross_entropy_of_policy(policy: Tensor, share: Tensor, candidates: Tensor | None) -> Tensor:
    if candidates is None:
        log_p = policy - torch.logsumexp(policy, 0)
        return -sum((s * logp for s, logp in zip(share, log_p, strict=True)), torch.zeros(()))
    mean, log_std = policy.chunk(2)
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), [torch.distributions.transforms.TanhTransform()]
    )
    return -sum((s * squashed.log_prob(c).sum() for s, c in zip(share, candidates, strict=True)), torch.zeros(()))


def entered(model: Any, state: Tensor, scale: float) -> Tensor:
    """A state as it enters the dynamics: its gradient is scaled by a hook; the memory of an LSTM has none."""
    latent, memory = state[:, : model.latent_size], state[:, model.latent_size :]
    latent = latent.clone()
    if latent.requires_grad:
        latent.register_hook(lambda gradient: scale * gradient)
    return torch.cat([latent, memory], 1)


class InDouble(nn.Module):
    """An encoder whose features, floats by its own will, go on in float64."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, obs: Any) -> Tensor:
        return self.encoder(obs).double()


def copy_in_double(model: Any) -> Any:
    other = copy.deepcopy(model).double()
    other.encoder = InDouble(other.encoder)
    return other


def in_double(batch: Batch) -> Batch:
    def double(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: double(part) for key, part in x.items()}
        return x.double() if x.is_floating_point() else x

    return double(batch)


def taken(tree: Any, b: int) -> Any:
    return {key: x[b : b + 1] for key, x in tree.items()} if isinstance(tree, dict) else tree[b : b + 1]


def naive_losses(learner: Any, model: Any, batch: Batch) -> tuple[dict[str, Tensor], list[float]]:
    """Each loss [B], and the error of each first value."""
    hp, batch = learner.hp, in_double(batch)
    K = hp.unroll_steps
    losses: dict[str, list[Tensor]] = {name: [] for name in LOSSES}
    errors, imagined = [], []
    for b in range(len(batch["weight"])):
        state = model.represent(taken(batch["obs"], b))
        terms = {name: torch.zeros((), dtype=torch.float64) for name in LOSSES}
        prefix = 0.0
        for k in range(K + 1):
            weight = 1.0 if k == 0 else hp.unroll_coef / K
            policy, value = (x[0] for x in model.predict(state))
            candidates = batch["candidates"][b, k] if "candidates" in batch else None
            if batch["policy_mask"][b, k]:
                terms["policy"] += weight * cross_entropy_of_policy(policy, batch["policy"][b, k], candidates)
            if batch["value_mask"][b, k]:
                terms["value"] += weight * cross_entropy_of_number(value, batch["value"][b, k].item())
            if k == 0:
                errors.append(number_of(value.detach()) - batch["value"][b, 0].item())
            if k == K:
                break
            entering = entered(model, state, hp.hidden_gradient_scale)
            state, logits = model.transition(entering, batch["action"][b, k : k + 1])
            imagined.append(state)
            reward = batch["reward"][b, k].item()
            if hasattr(hp, "lstm_horizon"):
                prefix = reward if k % hp.lstm_horizon == 0 else prefix + reward
                reward = prefix
            if batch["reward_mask"][b, k]:  # of a step that belongs to the unrolled state it leads to
                terms["reward"] += hp.unroll_coef / K * cross_entropy_of_number(logits[0], reward)
        for name in LOSSES:
            losses[name].append(terms[name])
    if "next_obs" in batch:
        losses["consistency"] = naive_consistency(learner, model, batch, torch.cat(imagined))
    else:
        del losses["consistency"]
    return {name: torch.stack(list(terms)) for name, terms in losses.items()}, errors


def naive_consistency(learner: Any, model: Any, batch: Batch, imagined: Tensor) -> list[Tensor]:
    """Normalised over the batch, so not one at a time."""
    K, size = learner.hp.unroll_steps, model.latent_size
    goal = model.projector(model.represent(batch["next_obs"])[:, :size]).detach()
    guess = model.predictor(model.projector(imagined[:, :size]))
    terms = []
    for b in range(len(batch["weight"])):
        term = torch.zeros((), dtype=torch.float64)
        for k in range(K):
            if batch["policy_mask"][b, k + 1]:
                x, y = guess[b * K + k], goal[b * K + k]
                term = term - learner.hp.unroll_coef / K * (x @ y) / (x.norm() * y.norm())
        terms.append(term)
    return terms


def naive_step(learner: Any, batch: Batch) -> tuple[dict[str, Tensor], list[float], Tensor, list[Tensor]]:
    """(losses, errors, loss, its gradients) on a copy in float64."""
    model = copy_in_double(learner.model).train()
    losses, errors = naive_losses(learner, model, batch)
    total = sum(getattr(learner.hp, f"{name}_coef") * x for name, x in losses.items())
    assert isinstance(total, Tensor)
    loss = sum((w.double() * t for w, t in zip(batch["weight"], total, strict=True)), torch.zeros(())) / len(total)
    return losses, errors, loss, list(torch.autograd.grad(loss, list(model.parameters())))


def flat(learner: Any) -> list[Tensor]:
    """The gradients of the last step, in the parameters' shapes."""
    parameters = learner.optimizers["model"].parameters
    return parameters.views(parameters.gradient)


@pytest.mark.parametrize("scale", [0.5, 1.0, 0.0])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_loops(case: str, scale: float) -> None:
    learner, batch = prepared(case, hidden_gradient_scale=scale)
    losses, errors, loss, gradients = naive_step(learner, batch)
    report, error = learner.update(batch)
    assert report["loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    for name, expected in losses.items():
        assert report[f"{name}_loss"].item() == pytest.approx(expected.mean().item(), rel=1e-4, abs=1e-5), name
    assert report["value"].item() == pytest.approx(batch["value"][:, 0].mean().item(), rel=1e-5)
    np.testing.assert_allclose(error, errors, atol=1e-4, rtol=1e-4)
    length = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert report["grad_norm"].item() == pytest.approx(length, rel=1e-3)
    for (name, _), ours, theirs in zip(learner.model.named_parameters(), flat(learner), gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4 * length, rtol=1e-3, msg=name)


@pytest.mark.parametrize("case", ["muzero", "efficientzero"])
def test_each_number_weighs_what_it_says(case: str) -> None:
    """The gradient is linear in every coefficient, and none of the others change with one."""
    base = dict.fromkeys(("policy_coef", "value_coef", "reward_coef", "consistency_coef"), 0.0)
    if case == "muzero":
        del base["consistency_coef"]

    def gradient(**numbers: float) -> Tensor:
        learner, batch = prepared(case, **{**base, **numbers})
        learner.update(batch)
        return torch.cat([g.flatten() for g in flat(learner)])

    alone = {name: gradient(**{name: 1.0}) for name in base}
    assert all(g.norm() > 1e-3 for g in alone.values())
    assert gradient().norm() == 0
    together = gradient(**{name: 0.5 + i for i, name in enumerate(base)})
    expected = sum((0.5 + i) * g for i, g in enumerate(alone.values()))
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_all_scalars_that_a_gradient_reads_are_named(case: str) -> None:
    """A captured gradient keeps the numbers it was captured with: it must know when one of them has changed."""
    learner, batch = prepared(case)
    hp, read = learner.hp, set()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(hp, name)

    learner.hp = Recorder()
    learner.gradient(batch)
    scalars = read & set(scalar_names(type(hp)))
    assert {"value_coef", "unroll_coef", "hidden_gradient_scale"} <= scalars
    learner.hp = hp
    before = learner.constants_of_gradient()
    for name in scalars:
        learner.hp = dataclasses.replace(hp, **{name: 0.5 * getattr(hp, name) + 0.1})
        assert learner.constants_of_gradient() != before, name


def test_importance_weights_scale_what_each_sequence_teaches() -> None:
    learner, batch = prepared("muzero")
    gradients = []
    for b in (3, 7):
        weight = torch.zeros_like(batch["weight"])
        weight[b] = 1.0
        learner.update(batch | {"weight": weight})
        gradients.append([g.clone() for g in flat(learner)])
    weight = torch.zeros_like(batch["weight"])
    weight[3], weight[7] = 0.25, 0.75
    learner.update(batch | {"weight": weight})
    for mixed, first, second in zip(flat(learner), *gradients, strict=True):
        torch.testing.assert_close(mixed, 0.25 * first + 0.75 * second, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("case", ["muzero", "continuous", "efficientzero"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_step_is_adams_on_a_clipped_gradient_and_decay_is_apart(case: str, max_grad_norm: float | None) -> None:
    numbers = {"learning_rate": 1e-2, "weight_decay": 0.3, "max_grad_norm": max_grad_norm}
    learner, batch = prepared(case, **numbers)
    before = [p.detach().clone() for p in learner.model.parameters()]
    decay_free, _ = prepared(case)
    decay_free.update(batch)
    theirs = [nn.Parameter(p.clone()) for p in before]
    for p, gradient in zip(theirs, flat(decay_free), strict=True):
        p.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm or math.inf)
    torch.optim.AdamW(theirs, lr=1e-2, eps=1e-8, weight_decay=0.3).step()
    report, _ = learner.update(batch)
    assert report["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
    for ours, expected, old in zip(learner.model.parameters(), theirs, before, strict=True):
        torch.testing.assert_close(ours.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
        moved = ours.detach() - 0.997 * old
        assert moved.abs().max() <= 1.01e-2
    assert moved.abs().max() > 0.9e-2  # a first step of Adam is as long as the learning rate


def test_without_decay_what_nothing_teaches_stays() -> None:
    """Absorbing and unknown steps teach no policy: with those alone the policy's head has no gradient."""
    learner, batch = prepared("muzero", learning_rate=0.1)
    before = learner.model.policy.weight.detach().clone()
    learner.update(batch | {"policy_mask": torch.zeros_like(batch["policy_mask"])})
    assert torch.equal(learner.model.policy.weight, before)


def test_nothing_beyond_the_masks_matters() -> None:
    learner, batch = prepared("muzero")
    losses, error = learner.losses(batch)
    noisy = dict(batch)
    for key, mask in (("policy", "policy_mask"), ("value", "value_mask"), ("reward", "reward_mask")):
        hidden = batch[mask] == 0
        assert hidden.any()
        noisy[key] = batch[key].clone()
        noisy[key][hidden] = 5.0
    again, error_again = learner.losses(noisy)
    for name in losses:
        assert torch.equal(losses[name], again[name])
    assert torch.equal(error, error_again)


def test_the_network_is_trained_in_training_mode_and_searched_in_the_other() -> None:
    learner, batch = prepared("efficientzero", learning_rate=1e-3)
    modes = []
    losses = learner.losses
    learner.losses = lambda batch: (modes.append(learner.model.training), losses(batch))[1]
    learner.update(batch)
    assert modes == [True]
    assert not any(module.training for module in learner.model.modules())
    assert not any(module.training for module in learner.target_model.modules())


@pytest.mark.parametrize("case", CASES)
def test_priorities_are_the_errors_of_the_sequences_drawn(case: str) -> None:
    algo, spaces, own = CASES[case]
    numbers = {**NUMBERS, "priority_exponent": 0.7, "beta": 0.5, "batch_size": 8}
    learner = make(algo, spaces, **{**numbers, **own})
    diary = Diary(new_replay(learner)).play(steps(40, spaces=spaces))
    replay = diary.replay
    replay.columns["action"] = replay.columns["action"] % 3 / (3 if spaces is TORQUE else 1)
    replay.columns["action"] = replay.columns["action"].astype(np.float32 if spaces is TORQUE else np.int64)
    drawn, batches, given = [], [], []
    draw, targets, set_priorities = replay.draw, learner.targets, replay.set_priorities

    def spy_draw(count: int, rng: Any, **how: Any) -> Any:
        assert count == 8
        assert how == {"beta": 0.5, "exponent": 0.7}
        drawn.append(draw(count, rng, **how))
        return drawn[-1]

    def spy_targets(replay: Any, index: Any) -> Any:
        batches.append(targets(replay, index))
        return batches[-1]

    def spy_set(index: Any, priority: Any) -> None:
        given.append((index, priority))
        set_priorities(index, priority)

    replay.draw, replay.set_priorities, learner.targets = spy_draw, spy_set, spy_targets  # type: ignore[method-assign]
    for _ in range(3):
        report = learner.one_step(replay)
        assert {"loss", "policy_loss", "value_loss", "reward_loss", "grad_norm"} <= report.keys()
    model = copy_in_double(learner.model)
    for (index, _), batch, (at, priority) in zip(drawn, batches, given, strict=True):
        np.testing.assert_array_equal(at, index)
        with torch.no_grad():
            obs = in_double(to_tensors(batch, learner.device))["obs"]
            value = [number_of(logits) for logits in model.predict(model.represent(obs))[1]]
        np.testing.assert_allclose(priority, np.abs(np.array(value) - batch["value"][:, 0]), atol=1e-4, rtol=1e-4)
        assert (priority > 0).all()
        # A sequence drawn twice may differ in its last bits by its place in the batch; one of the two is kept.
        np.testing.assert_allclose(replay.priorities.priority[given[-1][0]], given[-1][1], rtol=1e-5)


def test_steps_at_once_are_steps_on_parts_of_one_batch() -> None:
    learner = make("efficientzero", priority_exponent=0.7, beta=0.5, batch_size=8)
    replay = Diary(new_replay(learner)).play(steps(40)).replay
    replay.columns["action"] %= 3
    replay.set_priorities(np.flatnonzero(replay.valid), np.random.default_rng(0).uniform(0.1, 3.0, replay.valid.sum()))
    made, seen, given = [], [], []
    targets, update, set_priorities = learner.targets, learner.update, replay.set_priorities
    learner.targets = lambda *a: (made.append((a[1], targets(*a))), made[-1][1])[1]
    learner.update = lambda batch: (seen.append((batch, update(batch))), seen[-1][1])[1]
    replay.set_priorities = lambda *a: (given.append(a), set_priorities(*a))[1]  # type: ignore[method-assign]
    before = learner.model.state_dict()["policy.weight"].clone()
    assert len(learner.steps_at_once(replay, 3)) == 3
    ((index, whole),) = made
    assert len(index) == 24
    for key, value in whole.items():
        parts = [batch[key] for batch, _ in seen]
        assert len({len(part) for part in parts}) == 1
        np.testing.assert_array_equal(np.concatenate(parts), value)
    for batch, _ in seen:
        assert batch["weight"].max() == 1, "each batch has weights of its own"
    ((at, priority),) = given
    np.testing.assert_array_equal(at, index)
    errors = np.concatenate([error.abs().numpy() for _, (_, error) in seen])
    np.testing.assert_allclose(priority, errors + learner.PRIORITY_FLOOR, rtol=1e-5)
    assert not torch.equal(before, learner.model.state_dict()["policy.weight"])


@pytest.mark.parametrize(("device", "expected"), [("cpu", [1, 1, 1]), ("cuda", [3])])
def test_steps_are_taken_at_once_on_a_gpu_alone(device: str, expected: list[int]) -> None:
    learner = make("muzero")
    learner.device = torch.device(device)
    counts: list[int] = []
    learner.steps_at_once = lambda replay, count: (counts.append(count), [{}] * count)[1]
    assert list(learner.take_steps(None, 0)) == []
    assert len(list(learner.take_steps(None, 3))) == 3
    assert counts == expected


def test_importance_weights_reach_the_update() -> None:
    learner = make("muzero", priority_exponent=1.0, beta=0.7, batch_size=8)
    diary = Diary(new_replay(learner)).play(steps(40))
    diary.replay.columns["action"] %= 3
    priority = np.random.default_rng(0).uniform(0.1, 3.0, int(diary.replay.valid.sum()))
    places = np.flatnonzero(diary.replay.valid)
    diary.replay.set_priorities(places, priority)
    seen = []
    draw, update = diary.replay.draw, learner.update
    diary.replay.draw = lambda *a, **k: (seen.append(draw(*a, **k)), seen[-1])[1]  # type: ignore[method-assign]
    learner.update = lambda batch: (seen.append(batch["weight"]), update(batch))[1]
    learner.one_step(diary.replay)
    (index, _), weight = seen
    p = dict(zip(places.tolist(), priority.tolist(), strict=True))
    expected = np.array([p[i] for i in index.tolist()]) ** -0.7
    np.testing.assert_allclose(weight, expected / expected.max(), rtol=1e-4)


def test_scaled_gradients_leave_values_alone() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    y = scale_gradient(x, 0.25)
    torch.testing.assert_close(y, x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 0.25 * 2 * x.detach())


@pytest.mark.parametrize("action", [-0.999, -0.5, 0.0, 0.3, 0.999])
def test_squashed_densities_integrate_to_one_and_are_torchs(action: float) -> None:
    policy = torch.tensor([0.4, -0.2, -0.5, 0.3], dtype=torch.float64)
    there = torch.tensor([[action, 0.1]], dtype=torch.float64)
    expected = -cross_entropy_of_policy(policy, torch.ones(1, dtype=torch.float64), there)
    torch.testing.assert_close(squashed_log_prob(policy, there)[0], expected)
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1]
    one = torch.tensor([0.4, -0.5], dtype=torch.float64)
    total = squashed_log_prob(one, grid[:, None]).exp().sum() * (grid[1] - grid[0])
    assert total.item() == pytest.approx(1, abs=1e-4)


def test_the_target_network_moves_by_tau_and_takes_statistics_over() -> None:
    learner, batch = prepared("efficientzero", learning_rate=0.1, tau=0.25)
    before = [p.clone() for p in learner.target_model.parameters()]
    learner.update(batch)
    assert all(torch.equal(p, old) for p, old in zip(learner.target_model.parameters(), before, strict=True))
    learner.move_target()
    pairs = zip(learner.target_model.parameters(), learner.model.parameters(), before, strict=True)
    for target, parameter, old in pairs:
        torch.testing.assert_close(target, 0.25 * parameter + 0.75 * old, atol=1e-6, rtol=1e-5)
        assert not target.requires_grad
    buffers = dict(learner.model.named_buffers())
    assert any("running_mean" in name for name in buffers)
    for name, buffer in learner.target_model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("interval", [6, 10])
def test_the_target_follows_every_so_many_env_steps(interval: int) -> None:
    learner = make("muzero", target_update_interval=interval, learning_starts=0, utd_ratio=0.0)
    replay, moves = new_replay(learner), []
    learner.move_target = lambda: moves.append(replay.added)
    for step in steps(30, ends=Ends(0, 0.1, 0)):
        replay.add(step)
        learner.learn(replay)
    assert moves == [added for added in range(2, 61, 2) if added // interval > (added - 2) // interval]


def test_everything_that_is_learned_is_saved() -> None:
    learner, batch = prepared("efficientzero", learning_rate=1e-2)
    learner.update(batch)
    learner.move_target()
    learner.update(batch)
    other = make("efficientzero", seed=5, **{**NUMBERS, **CASES["efficientzero"][2], "learning_rate": 1e-2})
    restore(other, learner)
    for _ in range(2):
        first, second = learner.update(batch)[0], other.update(batch)[0]
        assert {k: v.item() for k, v in first.items()} == {k: v.item() for k, v in second.items()}
    for model in ("model", "target_model"):
        for x, y in zip(*(getattr(a, model).state_dict().values() for a in (learner, other)), strict=True):
            assert torch.equal(x, y)
    assert learner.rng.random() == other.rng.random()


def test_a_loss_of_numbers_by_hand() -> None:
    """Of the helper above: halfway between two atoms, both count half."""
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0], dtype=torch.float64)
    x = 0.5 / (1 / (math.sqrt(1.5) + 1) + 0.001)  # near h(x) = 0.5
    for _ in range(50):
        x += (0.5 - h(x)) / (0.5 / math.sqrt(x + 1) + 0.001)
    expected = -0.5 * (F.log_softmax(logits, 0)[2] + F.log_softmax(logits, 0)[3])
    torch.testing.assert_close(cross_entropy_of_number(logits, x), expected)
    assert h(number_of(logits)) == pytest.approx((torch.softmax(logits, 0) @ torch.arange(-2.0, 3.0).double()).item())
