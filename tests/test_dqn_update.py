"""DQN: its step against Stable-Baselines3 on the same weights and batches, its targets by hand, its clocks exactly."""

from __future__ import annotations

import copy
import math
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn

from build import build, make_replay
from naive_replay import Ends, stream
from probes import copy_training
from rl_training.algorithms.dqn import DQN, DQNHyperparameters
from rl_training.models.q_network import QNetwork
from rl_training.types import Batch, Spaces

VECTOR, IMAGE = Box(-1, 1, (4,), np.float32), Box(0, 255, (4, 40, 36), np.uint8)
SPACES = Spaces(VECTOR, Discrete(3))
TABLE = Spaces(Discrete(4), Discrete(3))  # one-hot, so that a linear layer is a table


def make_dqn(spaces: Spaces = SPACES, *, seed: int = 0, **changes: Any) -> DQN:
    torch.manual_seed(seed)
    hp = DQNHyperparameters(**{"hidden_sizes": (16, 16), "buffer_capacity": 1000, "batch_size": 8, **changes})
    learner: DQN = build("dqn", spaces, hp, rng=np.random.default_rng(seed))
    return learner


def perturb(model: nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def random_batch(spaces: Spaces, size: int, *, gamma: float = 0.99, seed: int = 0) -> Batch:
    rng, space = np.random.default_rng(seed), spaces.observation

    def observations() -> Tensor:
        if isinstance(space, Discrete):
            return torch.from_numpy(rng.integers(0, int(space.n), size))
        assert isinstance(space, Box)
        shape = (size, *space.shape)
        image = space.dtype == np.uint8
        return torch.from_numpy(rng.integers(0, 256, shape, np.uint8) if image else rng.standard_normal(shape, "f4"))

    return {
        "obs": observations(),
        "action": torch.from_numpy(rng.integers(0, 3, size)),
        "reward": torch.from_numpy(rng.standard_normal(size, np.float32) * 2),  # on both sides of Huber's corner
        "discount": torch.from_numpy(np.where(rng.random(size) < 0.3, 0, gamma).astype(np.float32)),
        "next_obs": observations(),
    }


class Nowhere(gym.Env):
    """Only its spaces matter."""

    def __init__(self, spaces: Spaces) -> None:
        self.observation_space, self.action_space = spaces.observation, spaces.action


@pytest.mark.parametrize("max_grad_norm", [10.0, 0.05], ids=["free", "clipped"])
@pytest.mark.parametrize("spaces", [SPACES, Spaces(IMAGE, Discrete(3))], ids=["mlp", "cnn"])
def test_a_step_is_that_of_stable_baselines3(spaces: Spaces, max_grad_norm: float) -> None:
    from stable_baselines3 import DQN as TheirDQN
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples
    from stable_baselines3.common.vec_env import DummyVecEnv

    image = spaces.observation is IMAGE
    lr = 1e-5 if image else 1e-3  # Adam makes whole steps of rounding errors: keep them short where there are many
    ours = make_dqn(spaces, double=False, learning_rate=lr, max_grad_norm=max_grad_norm, gamma=0.97)
    perturb(ours.target_model, 0.1)
    theirs = TheirDQN(
        "CnnPolicy" if image else "MlpPolicy",
        DummyVecEnv([lambda: Nowhere(spaces)]),
        learning_rate=lr,
        gamma=0.97,
        max_grad_norm=max_grad_norm,
        buffer_size=10,
        policy_kwargs={} if image else {"net_arch": [16, 16]},
        device="cpu",
    )
    theirs.set_logger(Logger(None, []))
    pairs = [(theirs.q_net, ours.model), (theirs.q_net_target, ours.target_model)]
    for network, model in pairs:
        for target, source in zip(network.parameters(), model.parameters(), strict=True):
            target.data.copy_(source.data)

    for i in range(3):
        batch = random_batch(spaces, 16, gamma=0.97, seed=i)
        samples = ReplayBufferSamples(
            batch["obs"], batch["action"][:, None], batch["next_obs"], (batch["discount"] == 0).float()[:, None],
            batch["reward"][:, None],
        )  # fmt: skip
        theirs.replay_buffer.sample = lambda *_, samples=samples, **__: samples
        theirs.train(1, 16)
        ours.update(batch)
    moments = theirs.policy.optimizer.state
    optimizer = ours.optimizers["model"]
    flat = optimizer.parameters
    assert [p.shape for p in flat.parameters] == [p.shape for p in theirs.q_net.parameters()]
    for ours_now, mean, square, parameter in zip(
        flat.views(flat.vector), flat.views(optimizer.mean), flat.views(optimizer.square), theirs.q_net.parameters(),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours_now, parameter.data, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(mean, moments[parameter]["exp_avg"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(square, moments[parameter]["exp_avg_sq"], atol=1e-6, rtol=1e-6)
    for ours_kept, theirs_kept in zip(ours.target_model.parameters(), theirs.q_net_target.parameters(), strict=True):
        assert torch.equal(ours_kept, theirs_kept)


def set_table(model: nn.Module, table: Tensor) -> None:
    """Q(s, a) = table[s, a]."""
    weight, bias = model.parameters()
    with torch.no_grad():
        weight.copy_(table.T)
        bias.zero_()


Q = torch.tensor([[1.0, 2.0, 0.0], [5.0, -1.0, 4.0], [0.5, 0.25, 0.75], [-2.0, -1.0, -3.0]])
Q_TARGET = torch.tensor([[8.0, -4.0, 16.0], [0.5, 1.5, 2.0], [-1.0, 2.0, 1.0], [4.0, 0.25, 3.0]])


@pytest.mark.parametrize("double", [False, True])
def test_targets_are_those_of_a_table(double: bool) -> None:
    dqn = make_dqn(TABLE, hidden_sizes=(), double=double, learning_rate=0.0)
    set_table(dqn.model, Q)
    set_table(dqn.target_model, Q_TARGET)
    batch = {
        "obs": torch.tensor([0, 1, 2, 3]),
        "action": torch.tensor([2, 0, 1, 1]),
        "reward": torch.tensor([1.0, -2.0, 0.5, 4.0]),
        "discount": torch.tensor([0.5, 0.25, 0.0, 1.0]),
        "next_obs": torch.tensor([1, 2, 0, 3]),
    }
    # argmax Q: s1 -> 0, s2 -> 2, s0 -> 1, s3 -> 1;  max Q_TARGET: s1 -> 2, s2 -> 2, s0 -> 16, s3 -> 4
    after = torch.tensor([0.5, 1.0, -4.0, 0.25]) if double else torch.tensor([2.0, 2.0, 16.0, 4.0])
    expected = batch["reward"] + batch["discount"] * after - torch.tensor([0.0, 5.0, 0.25, -1.0])
    _, td_error = dqn.update(batch)
    assert td_error.shape == (4,)
    assert torch.equal(td_error.abs(), expected.abs())


def test_dueling_heads_meet_in_the_middle() -> None:
    torch.manual_seed(0)
    model = QNetwork(SPACES, (16, 16), "relu", dueling=True)
    outputs: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features in (1, 3):
            module.register_forward_hook(lambda module, _, out: outputs.update({module.out_features: out}))
    q = model(torch.randn(5, 4))
    value, advantage = outputs[1], outputs[3]
    assert q.shape == (5, 3)
    torch.testing.assert_close(q, value + advantage - advantage.mean(1, keepdim=True))
    torch.testing.assert_close(q.mean(1, keepdim=True), value)
    for action in range(3):
        to_value, to_advantage = torch.autograd.grad(q[:, action].sum(), (value, advantage), retain_graph=True)
        torch.testing.assert_close(to_value, torch.ones(5, 1))
        torch.testing.assert_close(to_advantage, (torch.eye(3)[action] - 1 / 3).expand(5, 3))


@pytest.mark.parametrize("spaces", [SPACES, Spaces(IMAGE, Discrete(3)), Spaces(Dict({"a": VECTOR, "b": Discrete(2)}),
                                    Discrete(3))], ids=["vector", "image", "dict"])  # fmt: skip
@pytest.mark.parametrize("dueling", [False, True])
def test_greedy_actions_are_those_of_the_model(spaces: Spaces, dueling: bool) -> None:
    dqn, rng = make_dqn(spaces, dueling=dueling, epsilon=1.0, eval_epsilon=0.0), np.random.default_rng(0)
    spaces.observation.seed(0)
    for _ in range(3):
        samples = [spaces.observation.sample() for _ in range(32)]
        is_dict = isinstance(samples[0], dict)
        obs = {k: np.stack([s[k] for s in samples]) for k in samples[0]} if is_dict else np.stack(samples)
        tensors = {k: torch.from_numpy(x) for k, x in obs.items()} if is_dict else torch.from_numpy(obs)
        decision = dqn.actor.act(obs, {}, explore=False, rng=rng)
        with torch.no_grad():
            np.testing.assert_array_equal(decision.action, dqn.model(tensors).argmax(1))
        perturb(dqn.model, 0.3)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_importance_weights_enter_the_loss(double: bool, dueling: bool) -> None:
    dqn = make_dqn(double=double, dueling=dueling, learning_rate=0.0, max_grad_norm=1e9)
    perturb(dqn.target_model, 0.3)
    batch = random_batch(SPACES, 32)
    weight = torch.rand(32)
    model = copy.deepcopy(dqn.model)
    q = model(batch["obs"])[range(32), batch["action"]]
    with torch.no_grad():
        following = dqn.target_model(batch["next_obs"])
        best = (model if double else dqn.target_model)(batch["next_obs"]).argmax(1)
        target = batch["reward"] + batch["discount"] * following[range(32), best]
    error = target - q
    huber = torch.where(error.abs() < 1, 0.5 * error**2, error.abs() - 0.5)
    assert 0.1 < (error.abs() < 1).float().mean() < 0.9
    gradients = torch.autograd.grad((weight * huber).mean(), list(model.parameters()))
    _, td_error = dqn.update({**batch, "weight": weight})
    torch.testing.assert_close(td_error.abs(), error.detach().abs(), atol=1e-6, rtol=1e-6)
    flat = dqn.optimizers["model"].parameters
    for ours, expected in zip(flat.views(flat.gradient), gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_no_gradient_reaches_the_target() -> None:
    dqn = make_dqn(double=True)
    before = copy.deepcopy(dqn.target_model.state_dict())
    dqn.update(random_batch(SPACES, 8))
    for name, x in dqn.target_model.state_dict().items():
        assert torch.equal(x, before[name])
    assert not torch.equal(next(dqn.model.parameters()), next(dqn.target_model.parameters()))


def test_target_and_network_begin_alike_and_tau_moves_one_to_the_other() -> None:
    dqn = make_dqn(tau=0.25)
    for p, q in zip(dqn.model.parameters(), dqn.target_model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.data_ptr() != q.data_ptr()
    perturb(dqn.model, 1.0)
    before = [q.clone() for q in dqn.target_model.parameters()]
    dqn.move_target()
    for p, q, old in zip(dqn.model.parameters(), dqn.target_model.parameters(), before, strict=True):
        torch.testing.assert_close(q, 0.25 * p + 0.75 * old, atol=1e-6, rtol=1e-6)
    dqn.tau = 1.0
    dqn.move_target()
    for p, q in zip(dqn.model.parameters(), dqn.target_model.parameters(), strict=True):
        assert torch.equal(p, q)


class Spy:
    """Drives `learn` with a replay and writes down when what was done; the steps themselves are left out."""

    def __init__(self, num_envs: int, **changes: Any) -> None:
        space = Spaces(Box(-np.inf, np.inf, (2,), np.float32), Discrete(3))
        self.dqn = make_dqn(space, hidden_sizes=(4,), batch_size=2, **changes)
        self.num_envs, self.replay = num_envs, make_replay("dqn", self.dqn, space, num_envs)
        self.gradients: list[tuple[int, int]] = []  # (env steps, gradient steps so far) after each call
        self.moves: list[tuple[int, int]] = []  # the same at each move of the target
        move = self.dqn.move_target

        def spy_move() -> None:
            self.moves.append((self.replay.added, self.dqn.gradient_steps))
            move()

        self.dqn.move_target = spy_move  # type: ignore[method-assign]
        self.dqn.one_step = lambda replay: {}  # type: ignore[method-assign]

    def run(self, steps: int, ends: Ends | None = None) -> Spy:
        for step in islice(stream(self.num_envs, ends=ends or Ends(0, 0.1, 0)), steps):
            step["action"] %= 3
            del step["logprob"]  # DQN declares no extras
            self.replay.add(step)
            self.dqn.learn(self.replay)
            self.gradients.append((self.replay.added, self.dqn.gradient_steps))
        return self


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("train_frequency", [1, 4, 10])
@pytest.mark.parametrize("utd_ratio", [0.25, 1.0, 1.5])
@pytest.mark.parametrize("learning_starts", [0, 20])
def test_gradient_steps_are_counted_exactly(
    num_envs: int, train_frequency: int, utd_ratio: float, learning_starts: int
) -> None:
    changes = {"utd_ratio": utd_ratio, "train_frequency": train_frequency, "learning_starts": learning_starts}
    spy = Spy(num_envs, target_update_interval=1000, **changes).run(40)
    paid = max(0, (learning_starts - 1) // num_envs * num_envs)  # steps of which nothing is ever learned
    learned, expected = paid, []
    for added in range(num_envs, 40 * num_envs + 1, num_envs):
        if added >= learning_starts and added - learned >= train_frequency:
            learned = added
        expected.append((added, math.floor(utd_ratio * (learned - paid))))
    assert spy.gradients == expected
    assert expected[-1][1] > 0


def test_fractions_of_gradient_steps_do_not_get_lost() -> None:
    """Nor does their sum come late: ten times 0.1 is one, though not in floating point."""
    for added, steps in Spy(1, utd_ratio=0.1, train_frequency=1, learning_starts=0).run(300).gradients:
        assert steps == added // 10


def test_dead_rows_are_no_env_steps() -> None:
    spy = Spy(3, utd_ratio=1.0, learning_starts=0, train_frequency=1).run(50, Ends(0.2, 0.2, dead=1.0))
    assert spy.replay.added < 140
    assert all(added == steps for added, steps in spy.gradients)


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("train_frequency", [1, 4])
@pytest.mark.parametrize("interval", [5, 7, 40])
def test_the_target_follows_every_so_many_env_steps(num_envs: int, train_frequency: int, interval: int) -> None:
    changes = {"train_frequency": train_frequency, "target_update_interval": interval}
    spy = Spy(num_envs, learning_starts=0, utd_ratio=0.25, **changes).run(80)
    expected, before, steps_before = [], 0, 0
    for added, gradient_steps in spy.gradients:
        if added // interval > before // interval:  # a multiple was reached: no drift where steps come in bundles
            expected.append((added, steps_before))  # first the target, then the steps towards it
        before, steps_before = added, gradient_steps
    assert spy.moves == expected
    assert len(expected) == (80 * num_envs // interval if num_envs < interval else 80)


def test_priorities_are_the_errors_of_the_transitions_drawn() -> None:
    spaces = Spaces(Box(-np.inf, np.inf, (2,), np.float32), Discrete(3))
    dqn = make_dqn(spaces, prioritized=True, priority_exponent=0.7, learning_rate=0.0, beta=0.5, n_step=3, gamma=0.9)
    replay = make_replay("dqn", dqn, spaces, 2)
    for step in islice(stream(2), 40):
        step["action"] %= 3
        del step["logprob"]  # DQN declares no extras
        replay.add(step)
    batches, priorities = [], []
    sample, set_priorities = replay.sample, replay.set_priorities

    def spy_sample(*args: Any, **how: Any) -> Batch:
        assert (how["beta"], how["n_step"], how["gamma"]) == (0.5, 3, 0.9)
        batches.append(sample(*args, **how))
        return batches[-1]

    def spy_set(index: Any, priority: Any) -> None:
        priorities.append((np.array(index), np.array(priority)))
        set_priorities(index, priority)

    replay.sample, replay.set_priorities = spy_sample, spy_set  # type: ignore[method-assign]
    for _ in range(3):
        dqn.one_step(replay)
    for batch, (index, priority) in zip(batches, priorities, strict=True):
        _, td_error = dqn.update(batch)  # the weights have not moved
        np.testing.assert_array_equal(index, batch["index"])
        np.testing.assert_allclose(priority, td_error.abs(), atol=1e-5)
        assert (priority > td_error.abs().numpy()).all()  # never zero, or it would never be drawn again


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("hidden_sizes", [(), (16,), (32, 24)])
def test_a_small_network_learns_in_numpy_what_it_would_in_torch(
    activation: str, double: bool, hidden_sizes: tuple[int, ...]
) -> None:
    """Loss, errors and weights over several steps, with importance weights and errors on both sides of one."""
    spaces = Spaces(Box(-np.inf, np.inf, (5,), np.float32), Discrete(4))
    changes = {"activation": activation, "double": double, "hidden_sizes": hidden_sizes, "learning_rate": 0.01}
    fast, slow = (make_dqn(spaces, **changes) for _ in range(2))
    copy_training(fast, slow)
    slow.numpy_gradient = None
    assert fast.numpy_gradient is not None
    rng = np.random.default_rng(1)
    for step in range(6):
        obs, next_obs = torch.from_numpy(rng.standard_normal((2, 32, 5), dtype=np.float32))
        reward, weight = torch.from_numpy(rng.standard_normal((2, 32), dtype=np.float32))
        batch = {
            "obs": obs,
            "next_obs": next_obs,
            "action": torch.from_numpy(rng.integers(4, size=32)),
            "reward": 2 * reward,
            "discount": torch.from_numpy(rng.choice(np.array([0.0, 0.9], np.float32), 32)),
            **({"weight": weight.abs()} if step % 2 else {}),
        }
        (report, error), (expected, expected_error) = fast.update(batch), slow.update(batch)
        torch.testing.assert_close(error, expected_error, atol=1e-5, rtol=1e-5)
        assert {k: v.item() for k, v in report.items()} == pytest.approx(
            {k: v.item() for k, v in expected.items()}, rel=1e-4
        )
        if step == 2:
            for dqn in (fast, slow):
                dqn.move_target()
    for name, value in fast.model.state_dict().items():
        torch.testing.assert_close(value, slow.model.state_dict()[name], atol=1e-5, rtol=1e-4)
    large = make_dqn(spaces, hidden_sizes=(512, 512))
    assert large.numpy_gradient is None


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
def test_every_environment_tosses_a_coin_of_its_own(epsilon: float) -> None:
    dqn = make_dqn(TABLE, hidden_sizes=(), epsilon=epsilon, learning_starts=0)
    set_table(dqn.model, Q)
    rng, obs = np.random.default_rng(0), np.array([0, 1, 2, 3] * 10)
    actions = np.stack([dqn.actor.act(obs, {}, explore=True, rng=rng).action for _ in range(2500)])  # 100,000 draws
    other = actions != Q.argmax(1).numpy()[obs]
    p = epsilon * 2 / 3  # a random action may be the best one
    assert abs(other.mean() - p) <= 5 * math.sqrt(p * (1 - p) / other.size)
    assert (abs(other.mean(0) - p) <= 5 * math.sqrt(p * (1 - p) / 2500)).all()
    together = np.array([(other[:, i] & other[:, i - 1]).mean() for i in range(40)])
    assert (abs(together - p * p) <= 5 * math.sqrt(p * p * (1 - p * p) / 2500)).all()
    in_a_row = (other[1:] & other[:-1]).mean(0)
    assert (abs(in_a_row - p * p) <= 6 * math.sqrt(p * p / 2500)).all()
    if epsilon == 1.0:
        for action in range(3):
            assert abs((actions == action).mean() - 1 / 3) <= 5 * math.sqrt(2 / 9 / actions.size)


def test_evaluation_has_an_epsilon_of_its_own() -> None:
    obs = np.array([0, 1, 2, 3] * 250)
    best = Q.argmax(1).numpy()[obs]
    for eval_epsilon in (0.0, 0.3):
        dqn = make_dqn(TABLE, hidden_sizes=(), epsilon=1.0, eval_epsilon=eval_epsilon)
        set_table(dqn.model, Q)
        action = dqn.actor.act(obs, {}, explore=False, rng=np.random.default_rng(0)).action
        p = eval_epsilon * 2 / 3
        assert abs((action != best).mean() - p) <= 5 * math.sqrt(p * (1 - p) / 1000)


def test_the_loss_is_hubers() -> None:
    """Far from the target the gradient does not grow."""
    dqn = make_dqn(TABLE, hidden_sizes=(), double=False, learning_rate=0.0, max_grad_norm=1e9)
    set_table(dqn.model, torch.zeros(4, 3))
    for reward in (0.5, 1.0, 30.0, -30.0):
        one = torch.zeros(1, dtype=torch.int64)
        batch = {"obs": one, "action": one, "reward": torch.tensor([reward]), "discount": torch.zeros(1)}
        dqn.update({**batch, "next_obs": one})
        weight, _ = dqn.model.parameters()
        assert weight.grad is not None
        x = torch.zeros(1, requires_grad=True)
        (expected,) = torch.autograd.grad(F.smooth_l1_loss(x, torch.tensor([reward])), x)
        torch.testing.assert_close(weight.grad[0, 0], expected[0])
