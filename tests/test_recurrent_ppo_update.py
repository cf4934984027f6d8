"""Recurrent PPO: resets within sequences, stored memory, bootstraps and gradients, against slow definitions and
sb3-contrib on the same weights and data."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from build import build
from probes import Probe, random_observation
from rl_training import TrainConfig, train
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.optim import MeanMetrics
from rl_training.algorithms.recurrent_ppo import RecurrentPPO, RecurrentPPOHyperparameters
from rl_training.data.batch import tree_map
from rl_training.data.recurrent import reset_rows
from rl_training.data.rollout import Rollout
from rl_training.envs.factory import make_envs
from rl_training.envs.runner import EnvRunner
from rl_training.errors import InputError
from rl_training.models import recurrent
from rl_training.models.recurrent import RecurrentCore, cut, make_blocks
from rl_training.types import Spaces


class Nowhere(gym.Env):
    """Only its spaces matter."""

    def __init__(self, spaces: Spaces) -> None:
        self.observation_space, self.action_space = spaces.observation, spaces.action


CELLS, CRITICS = ["lstm", "gru"], ["separate", "shared", "none"]
VECTOR = Box(-1, 1, (4,), np.float32)
DISCRETE, CONTINUOUS = Spaces(VECTOR, Discrete(3)), Spaces(VECTOR, Box(-1, 1, (2,), np.float32))


def make(spaces: Spaces = DISCRETE, **changes: Any) -> RecurrentPPO:
    torch.manual_seed(0)
    sizes = {"num_steps": 16, "recurrent_size": 8, "hidden_sizes": (6,), "num_minibatches": 2}
    learner: RecurrentPPO = build("recurrent_ppo", spaces, RecurrentPPOHyperparameters(**sizes | changes))
    with torch.no_grad():  # biases that are not zero, values that differ
        for parameter in learner.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return learner


def random_rollout(learner: RecurrentPPO, spaces: Spaces, *, num_envs: int, seed: int = 0) -> Rollout:
    """Random observations, rewards and ends, acted upon by the learner's actor. It begins within episodes."""
    rng = np.random.default_rng(seed)
    rollout = Rollout(learner.hp.num_steps, num_envs, actor_critic_fields(spaces, learner.hp))
    shapes = learner.model.memory_shape()
    memory: Any = {key: rng.uniform(-1, 1, (num_envs, *shape)).astype(np.float32) for key, shape in shapes.items()}
    first = np.arange(num_envs) % 2 == 0
    while not rollout.full:
        memory = reset_rows(memory, first)
        obs = random_observation(spaces.observation, num_envs, rng)
        decision = learner.actor.act(obs, memory, explore=True, rng=rng)
        terminated, truncated = rng.random((2, num_envs)) < 0.15
        rollout.add(
            {
                "obs": obs,
                "first": first,
                "action": decision.action,
                "reward": rng.standard_normal(num_envs, dtype=np.float32),
                "next_obs": random_observation(spaces.observation, num_envs, rng),
                "terminated": terminated,
                "truncated": truncated,
                "memory": memory,
                "next_memory": decision.memory,
                **decision.extras,
            }
        )
        memory, first = decision.memory, terminated | truncated
    return rollout


def flat_batch(learner: RecurrentPPO, rollout: Rollout) -> Any:
    """The rollout as one minibatch, the environments in their order."""
    batch = learner.learning_batch(rollout, MeanMetrics())
    steps = {key: tree_map(lambda x: x.flatten(0, 1), batch[key]) for key in batch if key not in ("first", "memory")}
    return steps | {"first": batch["first"], "memory": tree_map(lambda x: x[0], batch["memory"])}


def episode_by_episode(core: RecurrentCore, x: Tensor, state: Tensor, first: Tensor) -> Tensor:
    """The outputs [T, M, size]: each episode by a call of its own."""
    columns = []
    for m in range(x.shape[1]):
        begins = [0] + [t for t in range(1, len(x)) if first[t, m]]
        parts = []
        for begin, end in zip(begins, [*begins[1:], len(x)], strict=True):
            known = begin == 0 and not first[0, m]
            parts_of = [part.reshape(1, -1) if known else torch.zeros(1, core.size) for part in state[m]]
            start = tuple(parts_of) if core.is_lstm else parts_of[0]
            parts.append(core.layer(x[begin:end, m], start)[0])
        columns.append(torch.cat(parts))
    return torch.stack(columns, 1)


FIRSTS = {
    "none": [],
    "at the beginning": [(0, 0), (0, 2)],
    "adjacent": [(4, 1), (5, 1), (6, 1)],
    "at the end": [(11, 0), (11, 1), (11, 2)],
    "everywhere": [(t, m) for t in range(12) for m in range(3)],
    "mixed": [(0, 1), (1, 1), (3, 0), (7, 2), (8, 2), (11, 1)],
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("worth", [0, 10**9], ids=["many blocks", "one block"])
@pytest.mark.parametrize("places", FIRSTS)
def test_resets_within_sequences_are_episodes_of_their_own(
    places: str, worth: int, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "WORTH_A_CALL", worth)
    torch.manual_seed(1)
    core, first = RecurrentCore(cell, 5, 7), torch.zeros(12, 3, dtype=torch.bool)
    for t, m in FIRSTS[places]:
        first[t, m] = True
    x, state = torch.randn(12, 3, 5, requires_grad=True), torch.randn(3, *core.state_shape)
    weight = torch.randn(12, 3, 7)
    gradients = []
    outputs = [core(x, state, cut(first)), episode_by_episode(core, x, state, first)]
    for output in outputs:
        gradients.append(torch.autograd.grad((output * weight).sum(), [x, *core.parameters()]))
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_blocks_hold_all_steps_with_little_padding() -> None:
    """Long and short episodes together, as many as need padding most."""
    lengths = [128, 128] + [40] * 10 + [20] * 80 + [5] * 500
    blocks = make_blocks(lengths)
    assert sum(steps for steps, _ in blocks) == 128
    time = 0
    for steps, rows in blocks:
        assert rows == sum(length > time for length in lengths)
        time += steps
    assert sum(steps * rows for steps, rows in blocks) < 1.5 * sum(lengths)
    assert make_blocks([6, 3, 3, 1]) == [(6, 4)], "little padding is cheaper than another call"


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_is_a_sequence_of_one(cell: str) -> None:
    torch.manual_seed(1)
    core = RecurrentCore(cell, 5, 7)
    x, state = torch.randn(6, 3, 5), torch.randn(3, *core.state_shape)
    expected = core(x, state, cut(torch.zeros(6, 3, dtype=torch.bool)))
    for t in range(6):
        output, state = core.step(x[t], state)
        torch.testing.assert_close(output, expected[t], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(state[:, 0], expected[t], atol=1e-6, rtol=1e-5)


def playing(learner: RecurrentPPO, *, time_limit: int) -> EnvRunner:
    kwargs = {"wrappers": {"time_limit": time_limit}}
    envs = make_envs("CartPoleNoVelocity-v1", num_envs=4, seed=3, env_kwargs=kwargs, training=True)
    return EnvRunner(envs, seed=3)


CARTPOLE = Spaces(Box(-np.inf, np.inf, (4,), np.float32), Discrete(2))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("critic_memory", CRITICS)
def test_minibatches_reproduce_what_acting_computed(critic_memory: str, cell: str) -> None:
    """Before any gradient step, in rollouts that begin and end within episodes: the ratio is 1 everywhere."""
    learner = make(CARTPOLE, cell=cell, critic_memory=critic_memory, num_steps=40, update_epochs=2)
    runner = playing(learner, time_limit=14)
    for number in range(2):
        rollout = Rollout(40, 4, actor_critic_fields(CARTPOLE, learner.hp))
        while not rollout.full:
            rollout.add(runner.step(learner.actor.act))
        data = rollout.arrays
        assert all(data[name].any() for name in ("terminated", "truncated"))
        assert data["first"][1:].any()
        if number:
            assert not data["first"][0].all()
            assert all(part.any() for part in rollout.start_memory.values())
        minibatches = [part for _, part in learner.steps(learner.learning_batch(rollout, MeanMetrics()))]
        assert len(minibatches) == 4
        for batch in minibatches:
            assert batch["first"].shape == (40, 2)
            policy, value = learner.predict(batch)
            torch.testing.assert_close(value, batch["value"], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(policy.log_prob(batch["action"]), batch["logprob"], atol=1e-5, rtol=1e-5)


def test_each_epoch_has_all_environments_once_in_an_order_of_its_own() -> None:
    learner = make(num_minibatches=3, update_epochs=8)
    batch = learner.learning_batch(random_rollout(learner, DISCRETE, num_envs=6), MeanMetrics())
    batch["target"] = torch.arange(6.0).expand(16, 6)
    parts = [minibatch["target"].view(16, 2) for _, minibatch in learner.steps(batch)]
    assert all((part == part[0]).all() for part in parts)
    orders = [tuple(torch.cat([part[0] for part in parts[i : i + 3]]).tolist()) for i in range(0, 24, 3)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(set(orders)) > 4


class Slow:
    """Values of whole episodes from their beginning, one call of the layers for each."""

    def __init__(self, learner: RecurrentPPO) -> None:
        self.model = learner.model

    def last_value(self, episode: list[np.ndarray]) -> float:
        features = torch.from_numpy(np.stack(episode))
        core = self.model.cores["value"].layer
        output, _ = core(features)
        return self.model.heads.value(output[-1:]).item()


@pytest.mark.parametrize("cell", CELLS)
def test_advantages_bootstrap_with_the_memory_after_the_last_step(cell: str) -> None:
    """The definition, environment by environment: sum of (gamma lambda)^k delta, cut where the episode ends.

    The value of a truncated episode's last observation, and of the one after the rollout, is read from the whole
    episode, which may have begun in the rollout before.
    """
    gamma, lam = 0.9, 0.8
    learner = make(CARTPOLE, cell=cell, num_steps=20, gamma=gamma, gae_lambda=lam)
    runner, slow = playing(learner, time_limit=9), Slow(learner)
    episodes: list[list[np.ndarray]] = [[] for _ in range(4)]
    for _ in range(2):
        rollout = Rollout(20, 4, actor_critic_fields(CARTPOLE, learner.hp))
        delta, over = np.zeros((20, 4)), np.zeros((20, 4), bool)
        for t in range(20):
            step = runner.step(learner.actor.act)
            rollout.add(step)
            for n, episode in enumerate(episodes):
                if step["first"][n]:
                    episode.clear()
                episode.append(step["obs"][n].copy())
                next_value = 0.0 if step["terminated"][n] else slow.last_value([*episode, step["next_obs"][n]])
                delta[t, n] = step["reward"][n] + gamma * next_value - slow.last_value(episode)
                over[t, n] = step["terminated"][n] or step["truncated"][n]
        assert rollout.arrays["truncated"].any()
        expected = np.zeros((20, 4))
        for n in range(4):
            for t in range(20):
                for k in range(t, 20):
                    expected[t, n] += (gamma * lam) ** (k - t) * delta[k, n]
                    if over[k, n]:
                        break
        advantage = learner.advantages(rollout, rollout.batch)
        np.testing.assert_allclose(advantage.numpy(), expected, atol=1e-5)


def their_ppo(spaces: Spaces, learner: RecurrentPPO, num_envs: int) -> Any:
    """sb3-contrib's RecurrentPPO with the learner's weights."""
    from sb3_contrib import RecurrentPPO as TheirPPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    hp = learner.hp
    theirs = TheirPPO(
        "MlpLstmPolicy",
        DummyVecEnv([lambda: Nowhere(spaces)] * num_envs),
        n_steps=hp.num_steps,
        batch_size=hp.num_steps * num_envs,
        n_epochs=1,
        ent_coef=hp.ent_coef,
        vf_coef=hp.vf_coef,
        clip_range=hp.clip_coef,
        clip_range_vf=hp.clip_vf_coef,
        device="cpu",
        policy_kwargs={
            "net_arch": list(hp.hidden_sizes),
            "lstm_hidden_size": hp.recurrent_size,
            "shared_lstm": hp.critic_memory == "shared",
            "enable_critic_lstm": hp.critic_memory == "separate",
        },
    )
    theirs.set_logger(Logger(None, []))
    for ours, parameter in zip(learner.model.parameters(), their_parameters(theirs.policy), strict=True):
        parameter.data.copy_(ours.data)
    return theirs


def their_parameters(policy: Any) -> list[nn.Parameter]:
    """In the order of RecurrentActorCritic.parameters()."""
    extractor = policy.mlp_extractor
    cores = [policy.lstm_actor, *([policy.lstm_critic] if policy.lstm_critic is not None else [])]
    heads = (extractor.policy_net, policy.action_net, extractor.value_net, policy.value_net)
    log_std = [policy.log_std] if hasattr(policy, "log_std") else []
    return [p for core in cores for p in core.parameters()] + log_std + [p for head in heads for p in head.parameters()]


def their_states(learner: RecurrentPPO, rollout: Rollout) -> list[Any]:
    """The states before each step: those of the actor and of the critic, (hidden, cell) [1, N, size] of each."""
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    memory, states, data = rollout.start_memory, [], rollout.batch
    for t in range(rollout.num_steps):
        memory = {key: part * ~data["first"][t].view(-1, 1, 1) for key, part in memory.items()}
        policy = tuple(part.unsqueeze(0) for part in memory["policy"].unbind(1))
        value = tuple(part.unsqueeze(0) for part in memory.get("value", memory["policy"]).unbind(1))
        states.append(RNNStates(policy, value))
        with torch.no_grad():
            _, _, memory = learner.model.step(data["obs"][t], memory)
    return states


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("critic_memory", ["separate", "shared"])
def test_values_log_probabilities_and_entropy_are_those_of_sb3_contrib(spaces: Spaces, critic_memory: str) -> None:
    learner = make(spaces, critic_memory=critic_memory)
    rollout = random_rollout(learner, spaces, num_envs=5)
    theirs, states = their_ppo(spaces, learner, 5), their_states(learner, rollout)
    data = rollout.batch
    assert data["first"][1:].any()

    def by_env(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(0, 1)

    expected = theirs.policy.evaluate_actions(
        by_env(data["obs"]), by_env(data["action"]), states[0], by_env(data["first"].float())
    )
    policy, value = learner.predict(flat_batch(learner, rollout))
    ours = value, policy.log_prob(data["action"].flatten(0, 1)), policy.entropy()
    for mine, other in zip(ours, expected, strict=True):
        mine = mine.expand(80) if mine.ndim == 0 else mine
        torch.testing.assert_close(by_env(mine.view(16, 5)), other.flatten(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize(("critic_memory", "vf_coef"), [("separate", 0.5), ("shared", 0.0)])
def test_gradients_are_those_of_sb3_contrib(
    spaces: Spaces, critic_memory: str, vf_coef: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shared core that package stops the critic's gradient, so there the policy's is compared."""
    learner = make(
        spaces, critic_memory=critic_memory, vf_coef=vf_coef, ent_coef=0.02, clip_vf_coef=0.1, max_grad_norm=0.5
    )
    rollout = random_rollout(learner, spaces, num_envs=5)
    states, batch = their_states(learner, rollout), flat_batch(learner, rollout)
    time, env, after = rollout.ends()
    end_value = learner.end_values(after).numpy()
    with torch.no_grad():  # from another policy, so that ratios and values are clipped
        for parameter in learner.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs = their_ppo(spaces, learner, 5)
    fill_their_buffer(theirs.rollout_buffer, rollout, states, time, env, end_value)
    gradients: list[Tensor] = []
    theirs.policy.optimizer.step = lambda *_: gradients.extend(
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in their_parameters(theirs.policy)
    )
    monkeypatch.setattr(np.random, "randint", lambda *_: 0)  # that package cuts one sequence at a random place
    theirs.train()

    loss, log_ratio = learner.loss(batch, MeanMetrics())
    assert 0.05 < ((log_ratio.exp() - 1).abs() > learner.hp.clip_coef).float().mean() < 0.9
    learner.model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(learner.model.parameters(), 0.5)
    for (name, parameter), expected in zip(learner.model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def fill_their_buffer(
    buffer: Any, rollout: Rollout, states: list[Any], time: np.ndarray, env: np.ndarray, end_value: np.ndarray
) -> None:
    """The same rollout; truncation is bootstrapped in the reward, as that package does."""
    data, last = rollout.arrays, rollout.num_steps - 1
    reward = data["reward"].copy()
    inner = data["truncated"][time, env]
    reward[time[inner], env[inner]] += buffer.gamma * end_value[inner]
    buffer.reset()
    for t in range(rollout.num_steps):
        value, logprob = (torch.from_numpy(data[key][t]) for key in ("value", "logprob"))
        action = data["action"][t].reshape(rollout.num_envs, -1)
        start = data["first"][t].astype(np.float32)
        buffer.add(data["obs"][t], action, reward[t], start, value, logprob, lstm_states=states[t])
    final = np.zeros(rollout.num_envs, np.float32)
    final[env[time == last]] = end_value[time == last]
    buffer.compute_returns_and_advantage(torch.from_numpy(final), data["terminated"][last] | data["truncated"][last])


def test_the_critics_gradient_flows_into_a_shared_core_alone() -> None:
    for critic_memory, flows in (("separate", False), ("shared", True), ("none", False)):
        learner = make(critic_memory=critic_memory)
        _, value = learner.predict(flat_batch(learner, random_rollout(learner, DISCRETE, num_envs=2)))
        core = list(learner.model.cores["policy"].parameters())
        gradients = torch.autograd.grad(value.square().sum(), core, allow_unused=True)
        assert all((gradient is not None and gradient.any()) == flows for gradient in gradients)


CAMERA = Box(0, 255, (36, 36, 3), np.uint8)


@pytest.mark.parametrize("critic_memory", CRITICS)
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
def test_every_space_is_remembered_and_learned_from(spaces: Spaces, critic_memory: str) -> None:
    learner = make(spaces, critic_memory=critic_memory, num_steps=6, ent_coef=0.01, learning_rate=1e-3)
    rollout = random_rollout(learner, spaces, num_envs=3)
    batch = flat_batch(learner, rollout)
    policy, value = learner.predict(batch)
    torch.testing.assert_close(value, batch["value"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.log_prob(batch["action"]), batch["logprob"], atol=1e-4, rtol=1e-4)
    before = {name: x.clone() for name, x in learner.model.named_parameters()}
    metrics = learner.update(rollout)
    assert learner.gradient_steps == 20
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(not torch.equal(before[name], x) for name, x in learner.model.named_parameters())


def test_a_memory_of_another_shape_is_an_error() -> None:
    learner, rng = make(), np.random.default_rng(0)
    obs = np.zeros((2, 4), np.float32)
    memory = learner.actor.act(obs, {}, explore=False, rng=rng).memory
    with pytest.raises(InputError, match="3 observations, but the memory is that of 2 environments"):
        learner.actor.act(np.zeros((3, 4), np.float32), memory, explore=False, rng=rng)
    wrong = {"policy": memory["policy"]}
    with pytest.raises(InputError, match=r"a memory of shapes .* is not one of this policy"):
        learner.actor.act(obs, wrong, explore=False, rng=rng)


class Cue(Probe):
    """A sign is shown at the first step alone; the action of the last step earns 1 if it is that sign, else -1."""

    length = 5

    def see(self) -> np.ndarray:
        return np.full(1, self.sign if self.t == 0 else 0.0, np.float32)

    def earn(self, action: Any) -> float:
        return 0.0 if self.t < self.length - 1 else 1.0 if (action == 1) == (self.sign > 0) else -1.0


gym.register("Cue-v0", Cue)


def test_what_was_shown_once_is_remembered(tmp_path: Any) -> None:
    """Without memory no policy earns more than 0 on average."""
    returns = {}
    shared = {"num_steps": 20, "num_minibatches": 1, "learning_rate": 5e-3, "update_epochs": 4}
    for algo, extra in (("ppo", {}), ("recurrent_ppo", {"recurrent_size": 16, "hidden_sizes": (16,)})):
        config = TrainConfig(algo, "Cue-v0", 6_400, tmp_path, 1, 16, eval_episodes=64, algo_kwargs=shared | extra)
        returns[algo] = train(config, progress="silent").metrics["eval_return_mean"]
    assert returns["recurrent_ppo"] == 1.0
    assert abs(returns["ppo"]) < 0.5
