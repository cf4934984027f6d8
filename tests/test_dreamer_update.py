"""DreamerV3's learner: what it draws, when it learns, what each loss reaches, and the losses by the definition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from build import build, make_replay
from conftest import TINY
from rl_training.algorithms.dreamer import Dreamer, DreamerHyperparameters, sequences
from rl_training.algorithms.dreamer_losses import imagine, observe
from rl_training.data.replay import Replay
from rl_training.data.windows import NewWindows, draw_new_first
from rl_training.errors import InputError
from rl_training.models.rssm import Latent
from rl_training.ops.two_hot import symexp_bins
from rl_training.types import Spaces, Step

DISCRETE = Spaces(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(5))
CONTINUOUS = Spaces(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32))
HP = {"precision": "float32", **TINY["dreamer"], "batch_size": 3, "batch_length": 5}


def make(spaces: Spaces = DISCRETE, **changes: Any) -> Dreamer:
    torch.manual_seed(0)
    learner = build("dreamer", spaces, DreamerHyperparameters(**{**HP, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # heads that begin with zeros would hide what reaches them
        for parameter in learner.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return learner


def stream(num_envs: int, lengths: tuple[int, ...] = (4, 7, 2), seed: int = 0) -> Iterator[Step]:
    """Steps of which every number tells where it belongs: observation t of episode e of environment n is [n, e, t].

    The reward that comes with it is 100 n + 10 e + t + 0.5, the action before it (n + e + t) % 5. Even episodes
    terminate, odd ones are truncated. The stored latent of an observation is (n + e + t) / 16.
    """
    rng = np.random.default_rng(seed)
    place = [[0, 0] for _ in range(num_envs)]  # episode and time
    while True:
        rows = []
        for n, (e, t) in enumerate(place):
            over = t + 1 == lengths[(n + e) % len(lengths)]
            rows.append((n, e, t, over))
            place[n] = [e + 1, 0] if over else [e, t + 1]
        n, e, t, over = (np.array(x) for x in zip(*rows, strict=True))
        obs = np.stack([n, e, t], 1).astype(np.float32)
        yield {
            "obs": obs,
            "first": t == 0,
            "action": (n + e + t + 1) % 5,
            "reward": (100 * n + 10 * e + t + 1.5).astype(np.float32),
            "terminated": over & (e % 2 == 0),
            "truncated": over & (e % 2 == 1),
            "next_obs": obs + np.array([0, 0, 1], np.float32),
            "deter": np.repeat((n + e + t)[:, None] / 16, 16, 1).astype(np.float16),
            "stoch": rng.integers(0, 2, (num_envs, 32)).astype(np.uint8),
        }


def filled(learner: Dreamer, steps: int = 40, num_envs: int = 2, spaces: Spaces = DISCRETE) -> Replay:
    replay, source = make_replay("dreamer", learner, spaces, num_envs), stream(num_envs)
    for _ in range(steps):
        replay.add(next(source))
    return replay


def batch_of(learner: Dreamer, spaces: Spaces = DISCRETE, seed: int = 0) -> dict[str, Any]:
    """A batch in which episodes begin and end, with rewards of any size."""
    rng, (T, B) = np.random.default_rng(seed), (5, 3)
    size = learner.model.policy.action_size
    last = rng.random((T, B)) < 0.3
    first = np.concatenate([rng.random((1, B)) < 0.3, last[:-1]])
    numbers = {"obs": rng.standard_normal((T, B, 3)), "reward": 3 * rng.standard_normal((T, B))}
    action = rng.standard_normal((T, B, size)) if spaces is CONTINUOUS else np.eye(size)[rng.integers(0, size, (T, B))]
    numbers |= {"action": action, "deter": rng.uniform(-1, 1, (B, 16)), "stoch": np.eye(2)[rng.integers(0, 2, (B, 32))]}
    flags = {"first": first, "last": last, "terminated": last & (rng.random((T, B)) < 0.5)}
    return {name: torch.from_numpy(x.astype(np.float32)) for name, x in numbers.items()} | {
        name: torch.from_numpy(x) for name, x in flags.items()
    }


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_a_row_holds_what_came_with_its_observation() -> None:
    """Reward, action before it and end; nothing of another episode; the latent is that of the row before the first."""
    learner = make()
    replay, rng = filled(learner), np.random.default_rng(0)
    new = NewWindows(2, 6)
    seen = set()
    for _ in range(60):
        batch = sequences(replay, draw_new_first(replay, new, 3, rng))
        n, e, t = np.moveaxis(batch["obs"], -1, 0).astype(int)
        first = t == 0
        np.testing.assert_array_equal(batch["first"], first)
        np.testing.assert_array_equal(batch["reward"], np.where(first, 0, 100 * n + 10 * e + t + 0.5))
        np.testing.assert_array_equal(batch["action"], np.where(first, 0, (n + e + t) % 5))
        length = np.array([4, 7, 2])[(n + e) % 3]  # steps, one fewer than observations
        np.testing.assert_array_equal(batch["last"], t == length)
        np.testing.assert_array_equal(batch["terminated"], (t == length) & (e % 2 == 0))
        inside = ~first[0]
        np.testing.assert_array_equal(batch["deter"][inside, 0], ((n + e + t)[0, inside] - 1) / 16)
        seen |= {(a, b) for a, b in zip(batch["last"].ravel(), batch["terminated"].ravel(), strict=True)}
    assert seen == {(True, True), (True, False), (False, False)}


def test_every_new_window_is_taken_once_the_oldest_first() -> None:
    learner = make()
    replay, source, new = make_replay("dreamer", learner, DISCRETE, 2), stream(2), NewWindows(2, 6)
    taken = []
    for _ in range(90):
        replay.add(next(source))
        taken += [tuple(row) for row in new.take(replay.ring, 3)]
    assert len(set(taken)) == len(taken)
    for env in range(2):
        mine = [np.array(w) - env * replay.ring.length for w in taken if w[0] // replay.ring.length == env]
        np.testing.assert_array_equal(np.concatenate(mine), np.arange(6 * len(mine)))
        assert 6 * (len(mine) + 1) > replay.ring.cursor[env] >= 6 * len(mine)


def test_new_windows_come_first_and_the_rest_is_drawn_at_random() -> None:
    learner = make()
    replay, new, rng = filled(learner, 20), NewWindows(2, 6), np.random.default_rng(0)
    first = draw_new_first(replay, new, 3, rng)
    second, third = (draw_new_first(replay, new, 8, rng) for _ in range(2))
    assert sorted(first[:, 0] % replay.ring.length) == [0, 0, 6]
    fresh = [p % replay.ring.length for p in second[:, 0]]
    assert sum(p % 6 == 0 for p in fresh[:5]) == 5
    assert not np.array_equal(second, third)


def test_windows_that_are_too_old_are_left_out_and_a_new_replay_begins_anew() -> None:
    learner = make(buffer_capacity=40)
    replay, new = filled(learner, 200), NewWindows(2, 6)
    oldest, end = replay.ring.complete_rows()
    place = new.take(replay.ring, 100)
    assert (replay.ring.age(place) <= replay.ring.rows + 1).all()
    assert len(place) == ((end - oldest) // 6).sum()
    empty = make_replay("dreamer", learner, DISCRETE, 2)
    assert len(new.take(empty.ring, 4)) == 0
    for _, step in zip(range(10), stream(2), strict=False):
        empty.add(step)
    assert sorted(new.take(empty.ring, 4)[:, 0] % replay.ring.length) == [0, 0, 6]


def test_latents_of_the_batch_are_written_back() -> None:
    learner = make(warmup_updates=0)
    replay = filled(learner, 6)  # two windows, so that each place is known
    learner.new_windows = NewWindows(2, 6)
    before = {name: replay.columns[name].copy() for name in ("deter", "stoch")}
    seen: list[Any] = []
    update = learner.update
    learner.update = lambda *x: seen.append(update(*x)) or seen[-1]  # type: ignore[func-returns-value,method-assign]
    learner.hp = dataclasses.replace(learner.hp, batch_size=2)
    learner.one_step(replay)
    latent = seen[0][1]
    for env in range(2):
        rows = replay.ring.places(np.array(env), np.arange(6))
        np.testing.assert_array_equal(replay.columns["deter"][rows[0]], before["deter"][rows[0]])
        deter = latent.deter[:, env].half().numpy()
        np.testing.assert_array_equal(replay.columns["deter"][rows[1:]], deter)
        np.testing.assert_array_equal(replay.columns["stoch"][rows[1:]], latent.stoch[:, env].argmax(-1).numpy())


def test_a_replay_too_small_for_a_sequence_is_refused() -> None:
    learner = make(buffer_capacity=8)
    with pytest.raises(InputError, match=r"a sequence takes 6 rows .* keeps 4 for each of 2 environments"):
        learner.learn(make_replay("dreamer", learner, DISCRETE, 2))


# --- when it learns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1.0, 0.1, 15.0, 3.7, 1 / 3, 1000.0])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_train_ratio_is_kept_without_rounding(ratio: float, num_envs: int) -> None:
    learner = make(train_ratio=ratio, learning_starts=0)
    taken = 0
    for step in range(1, 2001):
        taken += learner.steps_due(step * num_envs)
        exact = Fraction(round(ratio * 10**6), 10**6) * step * num_envs / 15
        assert taken == math.floor(exact)


def test_steps_before_learning_starts_are_not_caught_up() -> None:
    learner = make(train_ratio=15.0, learning_starts=100)
    assert [learner.steps_due(added) for added in (50, 99, 100, 101, 103)] == [0, 0, 1, 1, 2]


def test_learning_waits_for_the_first_window() -> None:
    learner = make(train_ratio=15.0, learning_starts=0)
    replay, source = make_replay("dreamer", learner, DISCRETE, 2), stream(2, (100,))
    counts = []
    for _ in range(8):
        replay.add(next(source))
        learner.learn(replay)
        counts.append(learner.gradient_steps)
    assert counts == [0, 0, 0, 0, 0, 2, 4, 6]


def test_the_first_gradient_steps_are_small() -> None:
    learner = make(warmup_updates=4)
    factors = []
    for step in range(6):
        learner.gradient_steps = step
        factors.append(learner.warmup())
    assert factors == [0, 0.25, 0.5, 0.75, 1, 1]


# --- what each loss reaches -------------------------------------------------------------------------------------------

REACHES = {
    "dynamics": {"dynamics", "encoder"},  # the prior's input, the GRU's state, comes from earlier observations
    "representation": {"dynamics", "encoder"},
    "reconstruction": {"decoder", "dynamics", "encoder"},
    "reward": {"reward", "dynamics", "encoder"},
    "continuation": {"continuation", "dynamics", "encoder"},
    "policy": {"policy"},
    "value": {"value"},
    "replay_value": {"value", "dynamics", "encoder"},
}


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", REACHES)
def test_what_a_loss_trains(name: str, spaces: Spaces) -> None:
    learner = make(spaces, free_nats=0.0)
    batch = batch_of(learner, spaces)
    losses, _, _ = learner.losses(batch, learner.noise(batch))
    learner.model.zero_grad(set_to_none=True)
    losses[name].mean().backward()
    moved = {n.split(".")[0] for n, p in learner.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == REACHES[name]


def test_the_policy_of_the_prior_and_of_the_posterior_have_losses_of_their_own() -> None:
    """`dynamics` trains the prior and not the posterior, `representation` the other way round."""
    learner = make(free_nats=0.0)
    batch = batch_of(learner)
    losses, _, _ = learner.losses(batch, learner.noise(batch))
    for name, trained, untouched in (
        ("dynamics", "prior_logits", "posterior_logits"),
        ("representation", "posterior_logits", "prior_logits"),
    ):
        learner.model.zero_grad(set_to_none=True)
        losses[name].mean().backward(retain_graph=True)
        last = dict(learner.model.dynamics.named_parameters())
        assert last[f"{trained}.weight"].grad.abs().sum() > 0
        if name == "representation":
            assert last[f"{untouched}.weight"].grad is None or not last[f"{untouched}.weight"].grad.any()


# --- the losses, by the definition ------------------------------------------------------------------------------------


def two_hot_cross_entropy(logits: torch.Tensor, target: float) -> float:
    """-sum of p log q, where p lies on the two bins around the target."""
    bins, log_q = symexp_bins().double().tolist(), logits.double().log_softmax(-1).tolist()
    above = next(k for k, edge in enumerate(bins) if edge > target)
    weight = (target - bins[above - 1]) / (bins[above] - bins[above - 1])
    return -((1 - weight) * log_q[above - 1] + weight * log_q[above])


def number(logits: torch.Tensor) -> float:
    bins = symexp_bins().double()
    pairs = zip(logits.double().softmax(-1).tolist(), bins.tolist(), strict=True)
    return math.fsum(p * edge for p, edge in pairs)


def state(latent: Latent, *index: int) -> Latent:
    return Latent(latent.deter[index], latent.stoch[index])


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_losses_of_behaviour_by_the_definition(spaces: Spaces) -> None:
    """The losses of policy and value for each imagined state, and those of replayed ones, in loops over numbers."""
    learner = make(spaces, horizon=20.0, gae_lambda=0.9, ent_coef=0.03, slow_value_coef=0.7, return_limit=0.01)
    hp, model = learner.hp, learner.model
    batch = batch_of(learner, spaces)
    noise = learner.noise(batch)
    with torch.no_grad():
        losses, metrics, latent = learner.losses(batch, noise)
        dream = imagine(learner.path, Latent(latent.deter.flatten(0, 1), latent.stoch.flatten(0, 1)), noise)
        H, M = noise.prior.shape[:2]
        value = [[number(model.value(dream.features[h, m])) for m in range(M)] for h in range(H + 1)]
        slow = [[number(model.slow_value(dream.features[h, m])) for m in range(M)] for h in range(H + 1)]
        reward = [[number(model.reward(dream.features[h, m])) for m in range(M)] for h in range(H + 1)]
        goes_on = [[model.continuation(dream.features[h, m]).sigmoid().item() for m in range(M)] for h in range(H + 1)]

        def returns(h: int, m: int) -> float:
            if h == H:
                return value[h][m]
            after = (1 - hp.gae_lambda) * value[h + 1][m] + hp.gae_lambda * returns(h + 1, m)
            return reward[h + 1][m] + goes_on[h + 1][m] * after

        imagined = [[returns(h, m) for m in range(M)] for h in range(H)]
        low, high = np.percentile(np.array(imagined), [5, 95])
        scale = max(hp.return_limit, hp.return_rate * (high - low))
        assert metrics["return_scale"].item() == pytest.approx(scale, rel=1e-4)
        for h in range(H):
            for m in range(M):
                at = dream.features[h, m]
                weight = math.prod(goes_on[k][m] for k in range(h + 1))
                policy = model.policy(at)
                gain = policy.log_prob(dream.action[h, m]).item() * (imagined[h][m] - value[h][m]) / scale
                expected = -weight * (gain + hp.ent_coef * policy.entropy().item())
                assert losses["policy"][h, m].item() == pytest.approx(expected, rel=2e-3, abs=1e-4)
                logits = model.value(at)
                loss = two_hot_cross_entropy(logits, imagined[h][m])
                loss += hp.slow_value_coef * two_hot_cross_entropy(logits, slow[h][m])
                assert losses["value"][h, m].item() == pytest.approx(weight * loss, rel=1e-3)

        T, B = batch["reward"].shape
        bootstrap = np.array(imagined[0]).reshape(T, B)

        def replayed(t: int, b: int) -> float:
            if t == T - 1:
                return float(bootstrap[t, b])
            if batch["terminated"][t + 1, b]:
                return batch["reward"][t + 1, b].item()
            kept = 0.0 if batch["last"][t + 1, b] else hp.gae_lambda
            after = (1 - kept) * bootstrap[t + 1, b] + kept * (replayed(t + 1, b) if kept else 0.0)
            return batch["reward"][t + 1, b].item() + (1 - 1 / 20) * after

        for t in range(T - 1):
            for b in range(B):
                logits = model.value(state(latent, t, b))
                target = number(model.slow_value(state(latent, t, b)))
                loss = two_hot_cross_entropy(logits, replayed(t, b)) + 0.7 * two_hot_cross_entropy(logits, target)
                expected = 0.0 if batch["last"][t, b] else loss
                assert losses["replay_value"][t, b].item() == pytest.approx(expected, rel=1e-3)


def test_the_continuation_is_that_of_termination_and_holds_the_discount() -> None:
    """The loss is least where the prediction is gamma, or 0 after a termination; a truncated episode could go on."""
    learner = make(horizon=20.0)
    batch = batch_of(learner)
    assert (batch["last"] & ~batch["terminated"]).any()
    noise = learner.noise(batch)
    losses, _, latent = learner.losses(batch, noise)
    probability = learner.model.continuation(latent).sigmoid().double()
    target = torch.where(batch["terminated"], 0.0, 1 - 1 / 20).double()
    expected = -(target * probability.log() + (1 - target) * (1 - probability).log())
    torch.testing.assert_close(losses["continuation"].double(), expected, rtol=1e-4, atol=1e-5)


def test_an_episode_begins_with_nothing_of_what_was_before() -> None:
    learner = make()
    batch = batch_of(learner)
    batch["first"][2] = True
    noise = torch.rand(5, 3, 32)
    other = dict(batch, deter=-batch["deter"], stoch=batch["stoch"].flip(-1), action=batch["action"].clone())
    other["action"][:3] = other["action"][:3].roll(1, -1)
    one, _ = observe(learner.path, batch, noise)
    two, _ = observe(learner.path, other, noise)
    assert not torch.equal(one.deter[1], two.deter[1])
    torch.testing.assert_close(one.deter[2:], two.deter[2:], rtol=0, atol=0)


def test_the_actor_sees_what_the_learner_sees() -> None:
    """Step by step with its memory, the actor has the latents of a sequence that is observed at once."""
    learner = make()
    batch = batch_of(learner)
    batch["first"][:] = False
    batch["first"][0] = True
    seen, memory, actions, numbers = [], {}, [], []
    rng = np.random.default_rng(0)
    for t in range(5):
        uniform = np.random.default_rng(rng.bit_generator.seed_seq.spawn(1)[0])
        state_before = uniform.bit_generator.state
        numbers.append(uniform.random((3, 32), np.float32))
        uniform.bit_generator.state = state_before
        decision = learner.actor.act(batch["obs"][t].numpy(), memory, explore=True, rng=uniform)
        memory = decision.memory
        seen.append(decision.memory["deter"])
        actions.append(torch.nn.functional.one_hot(torch.from_numpy(decision.action), 5).float())
        np.testing.assert_array_equal(decision.extras["deter"], np.asarray(memory["deter"]).astype(np.float16))
        np.testing.assert_array_equal(decision.extras["stoch"], np.asarray(memory["stoch"]).argmax(-1))
    batch["action"] = torch.stack([torch.zeros(3, 5), *actions[:-1]])
    with torch.no_grad():
        latent, _ = observe(learner.path, batch, torch.from_numpy(np.stack(numbers)))
    np.testing.assert_allclose(np.stack(seen), latent.deter.numpy(), atol=1e-5)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_evaluation_takes_the_most_likely_action_unless_it_should_sample(spaces: Spaces) -> None:
    for deterministic, explore in ((True, False), (False, False), (True, True)):
        actor = make(spaces, deterministic_eval=deterministic).actor
        obs = np.random.default_rng(0).standard_normal((50, 3), np.float32)
        decision = actor.act(obs, {}, explore=explore, rng=np.random.default_rng(1))
        latent = Latent(*(torch.as_tensor(decision.memory[name]) for name in Latent._fields))
        with torch.no_grad():
            likely = actor.model.policy(latent).mode.numpy()
        assert np.allclose(decision.action, likely) == (deterministic and not explore)


def test_the_slow_critic_follows_by_tau() -> None:
    learner = make(warmup_updates=0, tau=0.25)
    batch = batch_of(learner)
    slow = [p.clone() for p in learner.model.slow_value.parameters()]
    learner.update(batch, learner.noise(batch))
    after, now = (list(head.parameters()) for head in (learner.model.slow_value, learner.model.value))
    for old, new, target in zip(slow, after, now, strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * target)


def test_updates_lower_the_loss_of_a_batch() -> None:
    learner = make(warmup_updates=0, learning_rate=3e-3)
    batch = batch_of(learner)
    losses = []
    for _ in range(30):
        report, _ = learner.update(batch, learner.noise(batch))
        losses.append((report["reconstruction_loss"] + report["reward_loss"]).item())
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
