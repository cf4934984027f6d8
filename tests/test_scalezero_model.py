"""ScaleZero's world model: remembering equals looking at all tokens, experts are chosen one by one, stages grow."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from rl_training.acting.paths import make_inference
from rl_training.algorithms.optim import Adam, gradient_step
from rl_training.errors import InputError
from rl_training.models.moe import Adapters, MixtureOfExperts, ScaledLinear
from rl_training.models.parameters import FlatParameters
from rl_training.models.scalezero import ScaleZeroModel, TaskModel
from rl_training.models.world_transformer import MAX_DISTANCE, TransformerSize, WorldTransformer
from rl_training.types import Spaces

POLE = Spaces(Box(-1, 1, (4,), np.float32), Discrete(2))
LANDER = Spaces(Box(-1, 1, (8,), np.float32), Discrete(4))
BOARD = Spaces(Dict(observation=Box(0, 1, (2, 3, 3), np.float32), action_mask=MultiBinary(9)), Discrete(9))
PAIR = Spaces(Dict(a=Box(-1, 1, (3,), np.float32), b=Discrete(5)), Discrete(3))
COUNTS = Spaces(MultiDiscrete([3, 4]), Discrete(5))
IMAGE = Spaces(Box(0, 255, (2, 36, 36), np.uint8), Discrete(6))
TASKS = [POLE, LANDER, BOARD, PAIR, COUNTS, IMAGE]
SMALL, FEW = (
    TransformerSize(width=16, layers=2, heads=2, num_experts=3, expert_size=8),
    Adapters(count=2, rank=3, alpha=2.0),
)


def shaken(module: Any, std: float = 0.3) -> Any:
    """With noise on every parameter: much of a new model is zero, and zeros agree with anything."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return module


def small(*spaces: Spaces, size: TransformerSize = SMALL, adapters: Adapters = FEW, **options: Any) -> ScaleZeroModel:
    torch.manual_seed(0)
    return shaken(ScaleZeroModel(spaces or (POLE, LANDER), size, adapters, **options)).eval()


def observations(spaces: Spaces, *lead: int) -> Any:
    """Random tensors [*lead, ...] of a space."""
    spaces.observation.seed(0)
    samples = [spaces.observation.sample() for _ in range(int(np.prod(lead)))]
    if isinstance(spaces.observation, Dict):
        return {k: torch.as_tensor(np.stack([s[k] for s in samples])).unflatten(0, lead) for k in samples[0]}
    return torch.as_tensor(np.stack(samples)).unflatten(0, lead)


def actions(spaces: Spaces, *lead: int) -> Tensor:
    assert isinstance(spaces.action, Discrete)
    return torch.randint(int(spaces.action.n), lead, generator=torch.Generator().manual_seed(1))


def loss_of(model: ScaleZeroModel, task: int = 0) -> Tensor:
    spaces = (POLE, LANDER)[task]
    return sum(
        (x.square().mean() for x in model.unroll(task, observations(spaces, 3, 5), actions(spaces, 3, 4))),
        torch.zeros(()),
    )


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def naive_transformer(transformer: WorldTransformer, tokens: Tensor) -> Tensor:
    """Tokens [L, width], one by one, head by head."""
    x, heads = tokens, transformer.size.heads
    for block in transformer.blocks:
        normed: Any = block.attention_norm(x)
        query, key, value = block.query_key_value(normed).chunk(3, -1)
        rows = []
        for i in range(len(x)):
            parts = []
            for h, part in enumerate(torch.arange(x.shape[1]).chunk(heads)):
                scores = [query[i, part] @ key[j, part] / len(part) ** 0.5 for j in range(i + 1)]
                scores = [s + transformer.distance_bias[h, min(i - j, MAX_DISTANCE - 1)] for j, s in enumerate(scores)]
                weights = torch.stack(scores).softmax(0)
                parts.append(sum(w * value[j, part] for j, w in enumerate(weights)))
            rows.append(torch.cat(parts))
        x = x + block.project(torch.stack(rows))
        x = x + torch.stack([naive_experts(block.feed_forward, token) for token in block.feed_forward_norm(x)])
    return transformer.norm(x)


def naive_experts(moe: MixtureOfExperts, token: Tensor) -> Tensor:
    probability = (moe.gate.weight @ token).softmax(0)
    best = int(probability.argmax())
    up, gate = moe.expert_in.effective()[best], len(moe.expert_in.effective()[best]) // 2
    routed = moe.expert_out.effective()[best] @ (F.silu(up[:gate] @ token) * (up[gate:] @ token))
    return probability[best] * routed + moe.shared_out(F.gelu(moe.shared_in(token)))


def test_the_transformer_is_what_its_definition_says() -> None:
    transformer = small().transformer
    tokens = torch.randn(2, 9, SMALL.width)
    out, memory = transformer(tokens, transformer.bias(9, 9))
    assert_near(out, torch.stack([naive_transformer(transformer, row) for row in tokens]))
    assert [tuple(layer.shape) for layer in memory] == [(2, 2, 9, SMALL.width)] * SMALL.layers


def test_sequences_may_be_longer_than_distances_are_told_apart() -> None:
    transformer = small(size=TransformerSize(width=8, layers=1, heads=2, num_experts=2, expert_size=4)).transformer
    tokens = torch.randn(1, MAX_DISTANCE + 3, 8)
    out, _ = transformer(tokens, transformer.bias(MAX_DISTANCE + 3, MAX_DISTANCE + 3))
    assert_near(out[0], naive_transformer(transformer, tokens[0]))


def test_unroll_reads_policy_and_value_off_observations_and_the_rest_off_actions() -> None:
    model, obs, action = small(), observations(LANDER, 2, 4), actions(LANDER, 2, 3)
    latent, heads = model.encode(1, obs), model.heads_of(1)
    tokens = [latent[0, 0]]
    for t in range(3):
        tokens += [heads.action.weight[action[0, t]], latent[0, t + 1]]
    assert model.task_embedding is not None
    out = naive_transformer(model.transformer, torch.stack(tokens) + model.task_embedding[1])
    unrolled = model.unroll(1, obs, action)
    assert_near(unrolled.policy[0], heads.policy(out[::2]))
    assert_near(unrolled.value[0], heads.value(out[::2]))
    assert_near(unrolled.reward[0], heads.reward(out[1::2]))
    assert_near(unrolled.latent[0], heads.latent(out[1::2]))


@pytest.mark.parametrize("changed", ["obs", "action"])
def test_the_future_does_not_change_the_past(changed: str) -> None:
    model, obs, action = small(), observations(POLE, 1, 6), actions(POLE, 1, 5)
    other_obs, other_action = obs.clone(), action.clone()
    if changed == "obs":
        other_obs[:, 3] += 1
    else:
        other_action[:, 3] = 1 - action[:, 3]
    before, after = model.unroll(0, obs, action), model.unroll(0, other_obs, other_action)
    same_observations = 3 if changed == "obs" else 4
    for name, same in (("policy", same_observations), ("value", same_observations), ("reward", 3), ("latent", 3)):
        x, y = getattr(before, name), getattr(after, name)
        assert_near(x[:, :same], y[:, :same])
        assert (x[:, same:] - y[:, same:]).abs().amax(-1).min() > 1e-4, f"{name}: a later step sees it"


def test_a_training_context_ends_what_a_token_sees() -> None:
    model = small(
        size=TransformerSize(width=16, layers=1, heads=2, num_experts=2, expert_size=8), context=2, train_context=2
    )
    obs, action = observations(POLE, 1, 6), actions(POLE, 1, 5)
    other = obs.clone()
    other[:, 1] += 1
    before, after = model.unroll(0, obs, action), model.unroll(0, other, action)
    changed = [bool((before.policy[:, t] - after.policy[:, t]).abs().max() > 1e-4) for t in range(6)]
    assert changed == [False, True, True, False, False, False]


@pytest.mark.parametrize(("context", "steps"), [(4, 3), (1, 0), (2, 1), (7, 6)])
def test_within_its_context_remembering_equals_one_pass(context: int, steps: int) -> None:
    assert_remembering_equals_unroll(small(context=context), steps)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_beyond_its_context_remembering_equals_a_pass_with_that_context(context: int) -> None:
    assert_remembering_equals_unroll(small(context=context, train_context=context), 10)


def assert_remembering_equals_unroll(model: ScaleZeroModel, steps: int) -> None:
    obs, action = observations(LANDER, 3, steps + 1), actions(LANDER, 3, steps)
    unrolled, view = model.unroll(1, obs, action), model.for_task(1)
    state = view.represent(obs[:, 0])
    for t in range(steps + 1):
        policy, value = view.predict(state)
        assert_near(policy, unrolled.policy[:, t])
        assert_near(value, unrolled.value[:, t])
        if t < steps:
            _, reward = view.transition(state, action[:, t])
            assert_near(reward, unrolled.reward[:, t])
            assert_near(view.heads.latent(view.append_action(state, action[:, t])[0]), unrolled.latent[:, t])
            state = observe(view, state, action[:, t], obs[:, t + 1])


def observe(view: TaskModel, state: Tensor, action: Tensor, obs: Tensor) -> Tensor:
    """The states after actions [B] that led to observations [B, ...], as remembered keys and values have it."""
    _, memory, blocked = view.append_action(state, action)
    return view.append_latent(view.model.encode(view.task, obs), memory, blocked)


def history_of(obs: Any, action: Tensor, length: Any, count: int) -> dict[str, Any]:
    """The last `count` steps before observations obs[:, -1], of which length [B] are known; the others are noise."""
    length = torch.as_tensor(length)
    unknown = torch.arange(count) < count - length[:, None]
    obs = obs[:, -count - 1 : -1].clone() if count else obs[:, :0]
    obs[unknown] = 1e3 * torch.randn_like(obs[unknown])
    return {"obs": obs, "action": action[:, action.shape[1] - count :].masked_fill(unknown, 1), "length": length}


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_root_with_a_history_is_the_last_position_of_the_whole_sequence(context: int, layers: int) -> None:
    """And one step after the other from the first: policy, value, and all that a search goes on with."""
    model = small(context=context, size=TransformerSize(width=16, layers=layers, heads=2, num_experts=3, expert_size=8))
    view, count = model.for_task(1), context - 1
    obs, action = observations(LANDER, context, context), actions(LANDER, context, count)
    lengths = torch.arange(context)  # one row of each
    root = view.initial(obs[:, -1], history_of(obs, action, lengths, count))
    assert root.state.shape == (context, view.state_size)
    assert_near(view.values(obs[:, -1], history_of(obs, action, lengths, count)), root.value)
    for b, length in enumerate(lengths.tolist()):
        own_obs, own_action = obs[b : b + 1, count - length :], action[b : b + 1, count - length :]
        unrolled = model.unroll(1, own_obs, own_action)
        assert_near(root.policy[b], unrolled.policy[0, -1])
        assert_near(root.value[b], model.value_support.to_scalar(unrolled.value[0, -1]))
        state = view.represent(own_obs[:, 0])
        for t in range(length):
            state = observe(view, state, own_action[:, t], own_obs[:, t + 1])
        nodes = [state, root.state[b : b + 1]]
        for _ in range(3):  # into the tree
            (nodes[0], *expected), (nodes[1], *actual) = (view.recurrent(node, torch.tensor([2])) for node in nodes)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("train_context", [None, 4, 5])
def test_the_first_position_of_a_sequence_with_a_history_is_that_of_a_root(train_context: int | None) -> None:
    """And the positions after it are those of one long sequence, where that is known from its beginning."""
    model = small(train_context=train_context)
    obs, action = observations(POLE, 4, 9), actions(POLE, 4, 8)
    lengths = torch.tensor([0, 1, 2, 3])
    history = history_of(obs[:, :4], action[:, :3], lengths, 3)
    unrolled = model.unroll(0, obs[:, 3:], action[:, 3:], history)
    root = model.for_task(0).initial(obs[:, 3], history)
    assert_near(unrolled.policy[:, 0], root.policy)
    assert_near(model.value_support.to_scalar(unrolled.value[:, 0]), root.value)
    assert [x.shape[1] for x in unrolled] == [6, 6, 5, 5]
    for b, length in enumerate(lengths.tolist()):
        whole = model.unroll(0, obs[b : b + 1, 3 - length :], action[b : b + 1, 3 - length :])
        for x, y in zip(unrolled, whole, strict=True):
            assert_near(x[b], y[0, length:])


@pytest.mark.parametrize("changed", ["obs", "action"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_every_step_of_a_history_is_seen(changed: str, step: int) -> None:
    view = small().for_task(0)
    obs, action = observations(POLE, 1, 4), actions(POLE, 1, 3)
    before = view.initial(obs[:, -1], history_of(obs, action, [3], 3))
    if changed == "obs":
        obs[:, step] += 1
    else:
        action[:, step] = 1 - action[:, step]
    after = view.initial(obs[:, -1], history_of(obs, action, [3], 3))
    assert (before.policy - after.policy).abs().max() > 1e-4
    assert (before.value - after.value).abs().max() > 1e-4


def test_histories_of_dicts() -> None:
    model = small(BOARD)
    view, obs, action = model.for_task(0), observations(BOARD, 2, 4), actions(BOARD, 2, 3)
    history = {"obs": {k: x[:, :3] for k, x in obs.items()}, "action": action, "length": torch.tensor([3, 3])}
    root = view.initial({k: x[:, 3] for k, x in obs.items()}, history)
    assert_near(root.policy, model.unroll(0, obs, action).policy[:, -1])


def test_a_transition_goes_on_with_the_latent_it_predicts() -> None:
    model = small()
    view, action = model.for_task(0), actions(POLE, 3)
    inference = view.initial(observations(POLE, 1))
    assert model.task_embedding is not None
    tokens = [model.encode(0, observations(POLE, 1))[0]]
    for t in range(3):  # as many as the context holds with the first
        inference = view.recurrent(inference.state, action[t : t + 1])
        tokens.append(view.heads.action.weight[action[t]])
        out = naive_transformer(model.transformer, torch.stack(tokens) + model.task_embedding[0])[-1]
        assert_near(inference.reward[0], model.reward_support.to_scalar(view.heads.reward(out)))
        tokens.append(view.heads.latent(out))
        out = naive_transformer(model.transformer, torch.stack(tokens) + model.task_embedding[0])[-1]
        assert_near(inference.policy[0], view.heads.policy(out))
        assert_near(inference.value[0], model.value_support.to_scalar(view.heads.value(out)))


def test_what_is_older_than_the_context_is_forgotten() -> None:
    view = small(size=TransformerSize(width=16, layers=1, heads=2, num_experts=2, expert_size=8), context=3).for_task(0)
    obs, action = observations(POLE, 2, 5), actions(POLE, 1, 4).expand(2, -1)
    obs[1, 2:] = obs[0, 2:]  # two pasts, then the same
    state = view.represent(obs[:, 0])
    apart = []
    for t in range(4):
        state = observe(view, state, action[:, t], obs[:, t + 1])
        first, second = view.predict(state)[0]
        apart.append(bool((first - second).abs().max() > 1e-4))
    assert apart == [True, True, True, False]


def test_rows_can_be_gathered_from_any_depth_in_any_order() -> None:
    view = small().for_task(0)
    root = view.initial(observations(POLE, 4)).state
    nodes = [root]
    for t in range(6):
        nodes.append(view.recurrent(nodes[-1], actions(POLE, 7, 4)[t]).state)
    rows, action = torch.stack(nodes), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    depth, tree = torch.tensor([6, 0, 3, 3, 1, 5, 0, 2]), torch.tensor([3, 0, 1, 1, 2, 0, 2, 3])
    together = view.recurrent(rows[depth, tree], action)
    for b in range(8):
        alone = view.recurrent(rows[depth[b], tree[b]].unsqueeze(0), action[b : b + 1])
        for x, y in zip(together, alone, strict=True):
            assert_near(x[b : b + 1], y)
    copied = view.recurrent(torch.from_numpy(rows[depth, tree].detach().numpy().copy()), action)
    assert torch.equal(copied.state, together.state)


def test_states_are_rows_of_the_announced_size_and_finite() -> None:
    view = small(*TASKS).for_task(1)
    inference = view.initial(observations(LANDER, 5))
    assert inference.state.shape == (5, view.state_size)
    assert not inference.reward.any()
    for _ in range(6):
        inference = view.recurrent(inference.state, actions(LANDER, 5))
        assert [x.shape for x in inference] == [(5, view.state_size), (5,), (5,), (5, 4)]
        assert all(x.isfinite().all() for x in inference)
        assert inference.state.dtype == torch.float32


@pytest.mark.parametrize("task", range(len(TASKS)))
def test_tasks_of_any_space_share_one_model(task: int) -> None:
    model, spaces = small(*TASKS), TASKS[task]
    obs, action = observations(spaces, 2, 4), actions(spaces, 2, 3)
    unrolled = model.unroll(task, obs, action)
    width, atoms, num_actions = SMALL.width, 101, int(spaces.action.n)  # type: ignore[attr-defined]
    assert [x.shape for x in unrolled] == [(2, 4, num_actions), (2, 4, atoms), (2, 3, atoms), (2, 3, width)]
    first = {k: x[:, 0] for k, x in obs.items()} if isinstance(obs, dict) else obs[:, 0]
    assert_near(model.encode(task, first), model.encode(task, obs)[:, 0])
    inference = model.for_task(task).initial(first)
    assert inference.policy.shape == (2, num_actions)
    assert_near(inference.policy, unrolled.policy[:, 0])


def test_a_mask_of_legal_actions_is_not_seen() -> None:
    model, obs = small(BOARD), observations(BOARD, 2)
    other = {**obs, "action_mask": 1 - obs["action_mask"]}
    assert torch.equal(model.encode(0, obs), model.encode(0, other))


def test_latents_are_normalised_where_encoded_and_where_predicted() -> None:
    model = small()
    obs, action = observations(POLE, 3, 5), actions(POLE, 3, 4)
    for latent in (model.encode(0, obs), model.unroll(0, obs, action).latent):
        assert_near(latent.mean(-1), torch.zeros(latent.shape[:-1]))
        torch.testing.assert_close(latent.std(-1, correction=0), torch.ones(latent.shape[:-1]), atol=1e-3, rtol=0.0)


def test_a_task_teaches_the_transformer_and_its_own_parts_only() -> None:
    model = small()
    loss_of(model, 1).backward()  # type: ignore[no-untyped-call]
    for parts in (model.encoders, model.heads):
        assert all(p.grad is None for p in parts[0].parameters())
        assert all(p.grad is not None and p.grad.any() for p in parts[1].parameters())
    assert model.task_embedding is not None
    assert model.task_embedding.grad is not None
    assert not model.task_embedding.grad[0].any()
    assert model.task_embedding.grad[1].any()
    assert all(p.grad is not None for p in model.transformer.parameters() if p.requires_grad)


def test_a_task_is_told_from_another_by_its_embedding() -> None:
    model = small(POLE, POLE)
    model.encoders[1], model.heads[1] = model.encoders[0], model.heads[0]
    obs, action = observations(POLE, 2, 3), actions(POLE, 2, 2)
    assert not torch.allclose(model.unroll(0, obs, action).policy, model.unroll(1, obs, action).policy, atol=1e-3)
    model.task_embedding = None
    assert torch.equal(model.unroll(0, obs, action).policy, model.unroll(1, obs, action).policy)
    assert small(task_embedding=False).task_embedding is None


def test_a_new_model_favours_nothing() -> None:
    inference = ScaleZeroModel([POLE]).for_task(0).initial(observations(POLE, 3))
    assert not inference.policy.any()
    assert_near(inference.value, torch.zeros(3))


def mixture(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    return shaken(MixtureOfExperts(6, 5, 4, FEW, **options))


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_a_token_goes_to_its_best_expert_and_the_shared_one(num_tokens: int) -> None:
    moe, x = mixture(), torch.randn(num_tokens, 6)
    assert_near(moe(x), torch.stack([naive_experts(moe, token) for token in x]))
    expert = moe.gate(x).argmax(-1)
    assert_near(moe.all_experts(x, expert), moe.chosen_experts(x, expert))


@pytest.mark.parametrize("way", ["chosen_experts", "all_experts"])
@pytest.mark.parametrize("expert", range(4))
def test_gradients_reach_the_chosen_expert_only(expert: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = mixture()
    monkeypatch.setattr(moe, "chosen_experts", getattr(moe, way))  # a GPU goes the other
    candidates = torch.randn(200, 6)
    x = candidates[moe.gate(candidates).argmax(-1) == expert][:3]
    assert len(x)
    moe(x).square().sum().backward()
    for layer in (moe.expert_in, moe.expert_out):
        assert layer.weight.grad is not None
        assert [bool(g.any()) for g in layer.weight.grad] == [e == expert for e in range(4)]
    for layer in (moe.shared_in, moe.shared_out):
        assert layer.weight.grad is not None
        assert layer.weight.grad.any()


def test_the_gate_learns_from_probabilities_only() -> None:
    x = torch.randn(5, 6)
    learning, fixed = mixture(), mixture(routing="one")
    for moe in (learning, fixed):
        moe(x).square().sum().backward()
    assert learning.gate.weight.grad is not None
    assert learning.gate.weight.grad.any()
    assert fixed.gate.weight.grad is None
    probability = learning.gate(x).softmax(-1).amax(-1, keepdim=True)
    shared = learning.shared_out(F.gelu(learning.shared_in(x)))
    assert_near((fixed(x) - shared) * probability, learning(x) - shared)


def at_stage(layer: ScaledLinear, stage: int) -> ScaledLinear:
    layer.stage = stage
    return layer


@pytest.mark.parametrize("copies", [0, 3])
def test_a_layer_is_its_base_and_a_new_adapter_changes_nothing(copies: int) -> None:
    layer = ScaledLinear(5, 4, FEW, copies=copies, bias=not copies)
    assert torch.equal(layer.effective(), layer.weight)
    assert torch.equal(at_stage(layer, 1).effective(), layer.weight)
    if not copies:
        x = torch.randn(7, 5)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("copies", [0, 3])
def test_a_layer_is_the_scaled_sum_of_its_stages(copies: int) -> None:
    torch.manual_seed(0)
    layer = shaken(ScaledLinear(5, 4, FEW, copies=copies, bias=not copies), 1.0)
    scale = 1 + 0.2 * layer.scale_logit.tanh().unsqueeze(-1).unsqueeze(-1)
    assert ((scale > 0.8) & (scale < 1.2)).all()
    a0, a1 = scale.unbind(-3)
    first, second = ((2.0 / 3) * (up @ down) for up, down in zip(layer.up, layer.down, strict=True))
    assert_near(at_stage(layer, 1).effective(), a0 * layer.weight + first)
    assert_near(at_stage(layer, 2).effective(), a0 * layer.weight + a1 * first + second)


def test_adapters_start_small_and_scales_at_one() -> None:
    torch.manual_seed(0)
    layer = ScaledLinear(300, 200, Adapters(count=3, rank=50))
    assert all(0.009 < down.detach().std() < 0.011 for down in layer.down)
    assert not any(up.any() for up in layer.up)
    assert not layer.scale_logit.any()


def names(model: ScaleZeroModel, stage: int) -> set[str]:
    chosen = {id(p) for p in model.trainable_parameters(stage)}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def test_what_learns_in_each_stage() -> None:
    model = small()
    everything = {name for name, _ in model.named_parameters()}
    own = {name for name in everything if not name.startswith("transformer.")}
    adapters = {name for name in everything if name.split(".")[-1][:-1] in ("up", "down")}
    scales = {name for name in everything if name.endswith("scale_logit")}
    assert len(scales) == 6 * SMALL.layers  # two of attention, two of the experts, two of the shared expert
    assert len(adapters) == 2 * FEW.count * len(scales)
    assert names(model, 0) == everything - adapters - scales
    for stage in (1, 2):
        newest = {name for name in adapters if name.endswith(str(stage))}
        assert names(model, stage) == own | newest | scales
        model.add_stage()
        assert {name for name, p in model.named_parameters() if p.requires_grad} == names(model, stage)
        assert names(model, int(model.stage)) == names(model, stage)
        assert len(model.trainable_parameters()) == len(names(model, stage))


def test_a_stage_moves_its_own_parameters_and_scales_before_it() -> None:
    model = small()
    for layer in model.scaled_layers():  # as they are when new
        for parameter in (layer.scale_logit, *layer.up):
            nn.init.zeros_(parameter)
    for stage in (0, 1, 2):
        if stage:
            before, copied = loss_of(model), copy.deepcopy(model)
            model.add_stage()
            assert_near(loss_of(model), before)
            assert int(copied.stage) == stage - 1, "a copy has a stage of its own"
        old = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = Adam(FlatParameters(model.trainable_parameters()))
        for _ in range(3):
            gradient_step(optimizer, loss_of(model, 0) + loss_of(model, 1), lr=1e-2, max_grad_norm=None)
        moved = {name for name, p in model.named_parameters() if not torch.equal(old[name], p)}
        assert moved == names(model, stage)
        for layer in model.scaled_layers():
            assert not layer.scale_logit[..., stage:].any(), "scales of the newest adapter and of later ones"
            assert all(scale.any() for scale in layer.scale_logit[..., :stage].unbind(-1))


def test_learning_goes_on_in_a_new_stage() -> None:
    torch.manual_seed(0)
    model = ScaleZeroModel([POLE], SMALL, FEW)
    obs, action = observations(POLE, 8, 5), actions(POLE, 8, 4)

    def loss(target: Tensor) -> Tensor:
        return F.cross_entropy(model.unroll(0, obs, action).policy[:, :-1].flatten(0, 1), target.flatten())

    for stage, target in enumerate((action, 1 - action)):
        if stage:
            model.add_stage()
            for parts in (model.encoders, model.heads):  # so that it is the transformer which learns
                parts.requires_grad_(False)
        before = loss(target).item()
        optimizer = Adam(FlatParameters(model.parameters()))
        for _ in range(80):
            gradient_step(optimizer, loss(target), lr=1e-2, max_grad_norm=5.0)
        assert loss(target).item() < 0.5 * before


def test_checkpoints_keep_their_shapes_and_bring_their_stage() -> None:
    model, fresh = small(), small()
    shapes = {key: x.shape for key, x in model.state_dict().items()}
    model.add_stage()
    model.add_stage()
    shaken(model)
    assert {key: x.shape for key, x in model.state_dict().items()} == shapes
    fresh.load_state_dict(model.state_dict())
    assert int(fresh.stage) == 2
    assert {n for n, p in fresh.named_parameters() if p.requires_grad} == names(model, 2)
    assert torch.equal(loss_of(fresh), loss_of(model))


def test_weights_can_be_fixed_for_a_search() -> None:
    model = small()
    model.add_stage()
    model.add_stage()
    view, action = model.for_task(0), actions(POLE, 4)
    root = view.initial(observations(POLE, 4))
    free = view.recurrent(root.state, action)
    with model.fixed_weights():
        assert torch.equal(view.recurrent(root.state, action).state, free.state)
        for layer in model.scaled_layers():
            layer.combine = None  # type: ignore[assignment, method-assign]
        assert torch.equal(view.recurrent(root.state, action).state, free.state), "computed but once"
    for layer in model.scaled_layers():
        del layer.combine
        nn.init.zeros_(layer.weight)
    assert not torch.allclose(view.recurrent(root.state, action).state, free.state), "fixed no longer"


def test_dropout_is_for_training_and_for_adapters() -> None:
    model = small(adapters=Adapters(count=2, rank=3, alpha=2.0, dropout=0.5))
    model.train()
    assert torch.equal(loss_of(model), loss_of(model)), "no adapter is in use yet"
    model.add_stage()
    assert not torch.equal(loss_of(model), loss_of(model))
    with model.fixed_weights():
        fixed = loss_of(model)
    model.eval()
    assert torch.equal(loss_of(model), loss_of(model))
    assert torch.equal(loss_of(model), fixed)


def test_dropout_keeps_the_mean_of_a_layer() -> None:
    torch.manual_seed(0)
    layer = at_stage(shaken(ScaledLinear(4, 3, Adapters(1, 2, 2.0, dropout=0.25)), 1.0), 1)
    with torch.no_grad():
        mean = torch.stack([layer.train().effective() for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, layer.eval().effective(), atol=0.1, rtol=0.0)


def test_equal_seeds_make_equal_models_and_equal_answers() -> None:
    first, second = small(), small()
    assert all(
        torch.equal(x, y) for x, y in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    view, action = first.for_task(1), actions(LANDER, 4)
    root = view.initial(observations(LANDER, 4))
    again = view.initial(observations(LANDER, 4))
    for x, y in zip(view.recurrent(root.state, action), view.recurrent(again.state, action), strict=True):
        assert torch.equal(x, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_captured_on_a_gpu_says_the_same() -> None:
    model = small()
    here, there = (make_inference(m.for_task(0)) for m in (model, copy.deepcopy(model).cuda()))
    obs, action = observations(POLE, 4).numpy(), actions(POLE, 6, 4).numpy()
    steps = history_of(observations(POLE, 4, 4), actions(POLE, 4, 3), [0, 1, 2, 3], 3)
    for history in (None, {name: x.numpy() for name, x in steps.items()}):
        np.testing.assert_allclose(there.initial(obs, 6, history), here.initial(obs, 6, history), atol=1e-4)
        for node in range(1, 7):
            parent = np.array([node - 1, 0, node // 2, max(node - 2, 0)])
            words = (inference.recurrent(node, parent, action[node - 1]) for inference in (there, here))
            np.testing.assert_allclose(*words, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ScaleZeroModel([Spaces(POLE.observation, Box(-1, 1, (2,)))]), "Discrete"),
        (lambda: ScaleZeroModel([POLE], TransformerSize(width=10, heads=4)), "multiple"),
        (lambda: ScaleZeroModel([POLE], context=0), "context 0"),
        (lambda: ScaleZeroModel([POLE], context=4, train_context=3), "train_context 3: .* make it context or more"),
        (lambda: small().set_stage(FEW.count + 1), "2 adapters"),
    ],
)
def test_errors_name_the_remedy(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_a_view_is_a_planning_model_of_its_task() -> None:
    model = small(*TASKS)
    views = [model.for_task(task) for task in range(len(TASKS))]
    assert all(isinstance(view, TaskModel) for view in views)
    assert [view.policy_size for view in views] == [2, 4, 9, 3, 5, 6]
    assert len({view.state_size for view in views}) == 1
