"""Models to plan with: shapes for every kind of space, rows, scaling, value prefixes and consistency."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from probes import random_observation
from rl_training.acting.inference import TorchInference
from rl_training.data.batch import to_tensors
from rl_training.models.efficientzero import EfficientZeroModel
from rl_training.models.muzero import MuZeroModel, PlanningModel, bounded_log_std, min_max_scaled
from rl_training.models.residual import CHANGE_GAIN, ResidualBlock, StackConvolution, planes_first
from rl_training.types import Spaces

VECTOR, BOARD = Box(-1, 1, (4,), np.float32), Box(0, 1, (2, 6, 7), np.float32)
CAMERA = Box(0, 255, (36, 36, 3), np.uint8)
MASKED_BOARD = Dict({"observation": BOARD, "action_mask": MultiBinary(7)})
SMALL: dict[str, Any] = {"value_limit": 6, "reward_limit": 4, "channels": 8, "hidden_sizes": (32,), "latent_size": 16}
CPU = torch.device("cpu")
CASES: dict[str, tuple[Spaces, dict[str, Any], tuple[int, ...]]] = {  # spaces, settings, the latent's shape
    "cartpole": (Spaces(VECTOR, Discrete(2)), {}, (16,)),
    "two hidden layers": (Spaces(VECTOR, Discrete(2)), {"hidden_sizes": (32, 24), "activation": "tanh"}, (16,)),
    "bits": (Spaces(MultiBinary(5), Discrete(3)), {}, (16,)),
    "dict": (Spaces(Dict({"a.b": VECTOR, "c": Discrete(3)}), Discrete(3)), {}, (16,)),
    "masked dict": (Spaces(Dict({"a": VECTOR, "b": VECTOR, "action_mask": MultiBinary(3)}), Discrete(3)), {}, (16,)),
    "dict with image": (Spaces(Dict({"camera": CAMERA, "pose": VECTOR}), Discrete(3)), {}, (16,)),
    "pendulum": (Spaces(VECTOR, Box(-2, 2, (1,), np.float32)), {}, (16,)),
    "matrix of actions": (Spaces(VECTOR, Box(-1, 1, (2, 3), np.float32)), {}, (16,)),
    "gray stack": (Spaces(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6), frame_stack=4), {}, (8, 6, 6)),
    "strides": (Spaces(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6), frame_stack=4), {"stem": "strided"}, (8, 6, 6)),
    "channels-last stack": (Spaces(Box(0, 255, (4, 96, 96, 3), np.uint8), Discrete(18), frame_stack=4), {}, (8, 6, 6)),
    "small image": (Spaces(Box(0, 255, (7, 7, 3), np.uint8), Discrete(3)), {"blocks": 2}, (8, 7, 7)),
    "image and torques": (Spaces(Box(0, 255, (36, 36), np.uint8), Box(-1, 1, (2,), np.float32)), {}, (8, 3, 3)),
    "board": (Spaces(MASKED_BOARD, Discrete(7)), {"network": "conv", "value_limit": 0, "reward_limit": 0}, (8, 6, 7)),
    "board as vector": (Spaces(MASKED_BOARD, Discrete(7)), {"value_limit": 0, "reward_limit": 0}, (16,)),
}  # fmt: skip
MODELS: dict[str, Any] = {"muzero": MuZeroModel, "efficientzero": EfficientZeroModel}
BATCH = 5
everywhere = pytest.mark.parametrize("case", CASES)
both = pytest.mark.parametrize("algo", MODELS)


def new(algo: str, case: str, **settings: Any) -> Any:
    own = {"lstm_size": 12, "projection_size": 16, "prediction_size": 8} if algo == "efficientzero" else {}
    return MODELS[algo](CASES[case][0], **{**SMALL, **own, **CASES[case][1], **settings})


def make(algo: str, case: str, **settings: Any) -> Any:
    """A model that has learned something: no weight, bias or running statistic is what it began as."""
    torch.manual_seed(0)
    model = new(algo, case, **settings)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and not any(tensor is x for x in (model.action_one_hot, model.action_places)):
                tensor.add_(0.1 * torch.rand_like(tensor))
    return model.eval()


def observe(case: str, batch: int = BATCH) -> Any:
    return to_tensors(random_observation(CASES[case][0].observation, batch, np.random.default_rng(0)), CPU)


def actions(case: str, batch: int = BATCH) -> Tensor:
    space = CASES[case][0].action
    if isinstance(space, Discrete):
        return torch.arange(batch) % int(space.n)
    return torch.from_numpy(random_observation(space, batch, np.random.default_rng(1))).flatten(1)


def unroll(model: PlanningModel, case: str, length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(state, action, reward logits) of each transition from represented observations."""
    state, steps = model.represent(observe(case)), []
    for k in range(length):
        action = actions(case).roll(k, 0)
        next_state, logits = model.transition(state, action)
        steps.append((state, action, logits))
        state = next_state
    return steps


@both
@everywhere
@torch.no_grad()
def test_shapes_and_scaling(algo: str, case: str) -> None:
    model, obs = make(algo, case), observe(case)
    spaces, _, latent_shape = CASES[case]
    discrete = isinstance(spaces.action, Discrete)
    assert model.latent_shape == latent_shape
    assert model.latent_size == np.prod(latent_shape)
    assert model.state_size == model.latent_size + (26 if algo == "efficientzero" else 0)
    assert model.policy_size == (spaces.action.n if discrete else 2 * np.prod(spaces.action.shape))
    root = model.initial(obs)
    leaf = model.recurrent(root.state, actions(case))
    state, logits = model.transition(root.state, actions(case))
    policy, value = model.predict(state)
    assert logits.shape == (BATCH, model.reward_support.size)
    assert value.shape == (BATCH, model.value_support.size)
    torch.testing.assert_close(leaf.state, state)
    torch.testing.assert_close(leaf.policy, policy)
    torch.testing.assert_close(leaf.value, model.value_support.to_scalar(value))
    assert not root.reward.any()
    for inference in (root, leaf):
        assert inference.state.shape == (BATCH, model.state_size)
        assert inference.policy.shape == (BATCH, model.policy_size)
        assert inference.reward.shape == inference.value.shape == (BATCH,)
        latent = inference.state[:, : model.latent_size]
        torch.testing.assert_close(latent.amin(1), torch.zeros(BATCH))
        torch.testing.assert_close(latent.amax(1), torch.ones(BATCH))
        assert all(torch.isfinite(part).all() for part in inference)
    assert not torch.equal(leaf.state, root.state)


@both
@everywhere
@torch.no_grad()
def test_rows_can_be_gathered(algo: str, case: str) -> None:
    """A search asks for rows in any order, from any depth, in batches of any size."""
    model = make(algo, case)
    steps = unroll(model, case, 7)
    states = torch.stack([state for state, _, _ in steps])  # [7, B, S]
    depth, lane = torch.tensor([6, 0, 5, 4, 2, 5]), torch.tensor([3, 1, 4, 0, 0, 2])
    picked = torch.stack([steps[d][1][b] for d, b in zip(depth, lane, strict=True)])
    together = model.recurrent(states[depth, lane], picked)
    for i, (d, b) in enumerate(zip(depth, lane, strict=True)):
        alone = model.recurrent(states[d, b : b + 1], picked[i : i + 1])
        for ours, its in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[i : i + 1], its, atol=1e-4, rtol=1e-3)


@both
@pytest.mark.parametrize("case", ["cartpole", "pendulum", "gray stack", "board"])
def test_a_new_model_says_nothing(algo: str, case: str) -> None:
    model = new(algo, case)
    root = model.initial(observe(case))
    leaf = model.recurrent(root.state, actions(case))
    for inference in (root, leaf):
        assert not inference.policy.any()  # all actions alike; or mean 0, standard deviation 1
        assert max(inference.value.abs().max(), inference.reward.abs().max()) < 1e-5


@both
@pytest.mark.parametrize("case", ["cartpole", "pendulum", "channels-last stack", "board"])
def test_a_loss_reaches_every_weight(algo: str, case: str) -> None:
    model = make(algo, case).train()
    state, loss = model.represent(observe(case)), torch.zeros(())
    for _ in range(2):
        policy, value = model.predict(state)
        state, reward = model.transition(state, actions(case))
        targets = model.value_support.loss(value, torch.ones(BATCH)) + model.reward_support.loss(
            reward, torch.ones(BATCH)
        )
        loss = loss + targets.sum() - policy.log_softmax(-1)[:, 0].sum()
    if algo == "efficientzero":
        loss = loss + model.consistency_loss(state, model.represent(observe(case)).roll(1, 0)).sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if "dynamics" in name or "representation" in name:
            assert parameter.grad.any(), name


@both
@pytest.mark.parametrize("case", ["cartpole", "pendulum", "masked dict", "gray stack", "board"])
def test_nothing_asks_what_a_number_is(algo: str, case: str) -> None:
    """As a CUDA graph demands; tensors on "meta" have no numbers to ask for."""
    model, obs = make(algo, case).to("meta"), observe(case)
    obs = {key: x.to("meta") for key, x in obs.items()} if isinstance(obs, dict) else obs.to("meta")
    root = model.initial(obs)
    leaf = model.recurrent(root.state, actions(case).to("meta"))
    assert leaf.state.shape == (BATCH, model.state_size)


@both
@torch.no_grad()
def test_modes_matter_to_normalisation_alone(algo: str) -> None:
    for case, same in (("cartpole", True), ("board", False)):
        model = make(algo, case)
        state = model.represent(observe(case))
        following = [model.train(mode).transition(state, actions(case))[0] for mode in (False, True)]
        assert torch.allclose(*following) == same


@both
@pytest.mark.parametrize("case", ["cartpole", "gray stack"])
@torch.no_grad()
def test_copies_and_saved_weights_give_the_same(algo: str, case: str) -> None:
    model, other = make(algo, case), new(algo, case).eval()
    other.load_state_dict({key: x.contiguous() for key, x in model.state_dict().items()})
    state = model.represent(observe(case))
    for copy in (deepcopy(model), other):
        for ours, its in zip(model.recurrent(state, actions(case)), copy.recurrent(state, actions(case)), strict=True):
            torch.testing.assert_close(ours, its)


@pytest.mark.parametrize("case", ["cartpole", "two hidden layers"])
@torch.no_grad()
def test_perceptrons_are_plain_layers(case: str) -> None:
    """What a compiled search reads: pairs of Linear and activation, then Linear heads, with min-max scaling between."""
    model = make("muzero", case)
    activation = np.tanh if case == "two hidden layers" else lambda x: np.maximum(x, 0)

    def linear(layer: nn.Module, x: np.ndarray) -> np.ndarray:
        assert isinstance(layer, nn.Linear)
        return x @ layer.weight.numpy().T + layer.bias.numpy()

    def trunk(layers: nn.Module, x: np.ndarray) -> np.ndarray:
        assert isinstance(layers, nn.Sequential)
        assert len(layers) == 2 * len(CASES[case][1].get("hidden_sizes", (32,)))
        for layer in layers[::2]:
            x = activation(linear(layer, x))
        return x

    state, action = model.represent(observe(case)), actions(case)
    x = trunk(model.dynamics_trunk, np.concatenate([state.numpy(), np.eye(2, dtype=np.float32)[action]], 1))
    reward, latent = linear(model.reward, x), linear(model.next_state, x)
    latent = (latent - latent.min(1, keepdims=True)) / np.ptp(latent, 1, keepdims=True)
    x = trunk(model.prediction_trunk, latent)
    next_state, reward_logits = model.transition(state, action)
    policy, value_logits = model.predict(next_state)
    for ours, theirs in [
        (latent, next_state), (reward, reward_logits),
        (linear(model.policy, x), policy), (linear(model.value, x), value_logits),
    ]:  # fmt: skip
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-4)


class Own(MuZeroModel):
    def recurrent(self, state: Tensor, action: Tensor) -> Any:
        said = super().recurrent(state, action)
        return said._replace(reward=said.reward + 1)


@pytest.mark.parametrize("case", ["cartpole", "pendulum", "gray stack", "board"])
@pytest.mark.parametrize("kind", [MuZeroModel, EfficientZeroModel, Own])
def test_a_search_is_told_what_the_model_says(case: str, kind: Any) -> None:
    """Where logits are decoded in compiled code too, and where a model has a word of its own."""
    torch.manual_seed(0)
    model = kind(CASES[case][0], **{**SMALL, **CASES[case][1]}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    inference, obs = TorchInference(model, compiled_decoding=True), observe(case)
    inference.initial(obs, 1)
    assert inference.decodes == (kind is MuZeroModel)
    parent, action = np.zeros(BATCH, np.int64), actions(case)
    with torch.no_grad():
        said = model.recurrent(model.represent(obs), action)
    word = inference.recurrent(1, parent, action.numpy())
    expected = torch.cat([said.policy, said.value[:, None], said.reward[:, None]], 1)
    assert expected[:, -2:].std(0).min() > 1e-3
    np.testing.assert_allclose(word, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inference.states[BATCH : 2 * BATCH], said.state)


def test_min_max_scaling_by_hand() -> None:
    latent = torch.tensor([[1.0, 3.0, 2.0], [-4.0, 0.0, -1.0], [7.0, 7.0, 7.0], [0.0, 4e-6, 0.0]])
    expected = torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.75], [0.0, 0.0, 0.0], [0.0, 0.4, 0.0]])
    torch.testing.assert_close(min_max_scaled(latent), expected)
    wide = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(min_max_scaled, wide)


def test_log_std_stays_in_its_range() -> None:
    policy = torch.tensor([[7.0, -3.0, 0.0, 100.0], [0.5, 0.0, -100.0, 0.1]])
    bounded = bounded_log_std(policy)
    torch.testing.assert_close(bounded[:, :2], policy[:, :2])
    torch.testing.assert_close(bounded[:, 2:], torch.tensor([[0.0, 2.0], [-5.0, 0.1]]), atol=0.1, rtol=0)
    torch.testing.assert_close(bounded[0, 2], torch.tensor(0.0))


@both
@pytest.mark.parametrize("case", ["board", "board as vector", "masked dict"])
@torch.no_grad()
def test_the_mask_is_not_seen_and_the_rest_is(algo: str, case: str) -> None:
    model, obs = make(algo, case), observe(case)
    state = model.represent(obs)
    torch.testing.assert_close(model.represent({**obs, "action_mask": 1 - obs["action_mask"]}), state)
    for key in set(obs) - {"action_mask"}:
        assert not torch.allclose(model.represent({**obs, key: 1 - obs[key]}), state), key


@torch.no_grad()
def test_a_mask_of_another_kind_is_an_observation() -> None:
    space = Dict({"a": VECTOR, "action_mask": Box(0, 1, (3,), np.float32)})
    model = MuZeroModel(Spaces(space, Discrete(3)))
    obs = {"a": torch.rand(2, 4), "action_mask": torch.rand(2, 3)}
    assert not torch.allclose(model.represent(obs), model.represent({**obs, "action_mask": torch.zeros(2, 3)}))


@both
@pytest.mark.parametrize("case", ["cartpole", "pendulum", "matrix of actions", "gray stack", "board"])
@torch.no_grad()
def test_every_action_leads_elsewhere(algo: str, case: str) -> None:
    model, space = make(algo, case), CASES[case][0].action
    state = model.represent(observe(case))[:1]
    if isinstance(space, Discrete):
        every = torch.arange(int(space.n))
    else:
        every = torch.cat([torch.zeros(1, model.policy_size // 2), torch.eye(model.policy_size // 2)])
    following = model.transition(state.expand(len(every), -1), every)[0][:, : model.latent_size]
    assert torch.cdist(following, following).add(torch.eye(len(every))).min() > 1e-4
    if case == "matrix of actions":
        torch.testing.assert_close(
            model.transition(state, every[:1].reshape(1, 2, 3))[0], model.transition(state, every[:1])[0]
        )


@torch.no_grad()
def test_the_layout_of_an_image_does_not_change_what_is_seen() -> None:
    image = torch.randint(0, 256, (2, 4, 40, 48, 3), dtype=torch.uint8)  # [B, stack, H, W, C]
    states = []
    for shape, obs in (((4, 40, 48, 3), image), ((4, 3, 40, 48), image.permute(0, 1, 4, 2, 3))):
        torch.manual_seed(0)
        model = MuZeroModel(Spaces(Box(0, 255, shape, np.uint8), Discrete(3)), channels=8).eval()
        states.append(model.represent(obs))
        assert model.latent_shape == (8, 3, 3)
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize(
    ("shape", "planes"),
    [
        ((2, 6, 7), (2, 6, 7)),
        ((6, 7, 2), (2, 6, 7)),
        ((17, 8, 8), (17, 8, 8)),
        ((8, 8, 17), (17, 8, 8)),
        ((3, 3, 3), (3, 3, 3)),
        ((9, 9), (1, 9, 9)),
        ((84, 84, 4), (4, 84, 84)),
        ((4, 2, 6, 7), (8, 6, 7)),
    ],
)
def test_planes_are_found(shape: tuple[int, ...], planes: tuple[int, int, int]) -> None:
    to_planes, found = planes_first(shape)
    assert found == planes
    assert to_planes(torch.zeros(5, *shape)).shape == (5, *planes)


@torch.no_grad()
@pytest.mark.parametrize(("channels", "size", "stride", "padding"), [(1, 8, 4, 2), (1, 3, 2, 1), (3, 3, 1, 1)])
def test_a_stack_is_seen_as_its_newest_image_and_its_changes(
    channels: int, size: int, stride: int, padding: int
) -> None:
    layer = StackConvolution(4, 4 * channels, 5, size, stride, padding)
    images = torch.rand(2, 4, channels, 12, 12)
    seen = [images[:, 3], *(CHANGE_GAIN * (images[:, i] - images[:, i - 1]) for i in (1, 2, 3))]
    expected = F.conv2d(torch.cat(seen, 1), layer.weight, stride=stride, padding=padding)
    torch.testing.assert_close(layer(images.flatten(1, 2)), expected, atol=1e-4, rtol=1e-4)


def ball_in_a_room(batch: int = 32) -> Tensor:
    """[B, 4, 84, 84] A ball of 2 x 2 pixels that flies in its own way through a room with bright walls."""
    rng = np.random.default_rng(0)
    images = np.full((batch, 4, 84, 84), 87, np.uint8)
    images[:, :, 14:17] = images[:, :, 77:80] = 236
    for image, place, speed in zip(
        images, rng.integers(24, 60, (batch, 2)), rng.integers(-2, 3, (batch, 2)), strict=True
    ):
        for time in range(4):
            row, column = place + time * speed
            image[time, row : row + 2, column : column + 2] = 236
    return torch.from_numpy(images)


@torch.no_grad()
@pytest.mark.parametrize("stem", ["residual", "strided"])
def test_a_tower_that_has_learned_nothing_sees_a_small_thing_that_moves(stem: str) -> None:
    """Where latents of different moments are no further apart than rounding, nothing is learned from them."""
    obs, spread = ball_in_a_room(), []
    for stack in (1, 4):
        torch.manual_seed(0)
        spaces = Spaces(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6), frame_stack=stack)
        model = MuZeroModel(spaces, channels=32, stem=stem)
        for _ in range(30):  # so that statistics are those of such images
            model.train().represent(obs)
        spread.append(model.eval().represent(obs).std(0).mean())
    assert spread[1] > 4 * spread[0]


@pytest.mark.parametrize("stem", ["residual", "strided"])
def test_only_stacks_of_images_are_seen_as_changes(stem: str) -> None:
    stack, camera = Box(0, 255, (4, 36, 36), np.uint8), Box(0, 255, (7, 7), np.uint8)
    for spaces, expected in (
        (Spaces(stack, Discrete(3), frame_stack=4), True),
        (Spaces(Box(0, 255, (4, 7, 7), np.uint8), Discrete(3), frame_stack=4), True),
        (Spaces(stack, Discrete(3)), False),
        (Spaces(camera, Discrete(3)), False),
        (Spaces(Dict({"board": stack, "action_mask": MultiBinary(3)}), Discrete(3), frame_stack=4), False),
        (Spaces(Box(0, 255, (6, 40, 4), np.uint8), Discrete(3), frame_stack=6), False),  # read as 4 planes of 6 x 40
    ):
        model = MuZeroModel(spaces, **SMALL, stem=stem, network="conv")
        assert any(isinstance(layer, StackConvolution) for layer in model.representation.modules()) is expected


def test_strides_shrink_images_as_far_as_blocks_do() -> None:
    for side in (64, 84, 96):
        spaces = Spaces(Box(0, 255, (4, side, side), np.uint8), Discrete(3), frame_stack=4)
        blocks, strides = (MuZeroModel(spaces, **SMALL, stem=stem) for stem in ("residual", "strided"))
        assert blocks.latent_shape == strides.latent_shape


@torch.no_grad()
def test_strides_take_a_sixth_of_the_work_of_blocks() -> None:
    products = {"residual": 0, "strided": 0}
    for stem in products:

        def count(layer: nn.Module, _: Any, planes: Tensor, stem: str = stem) -> None:
            products[stem] += planes[0].numel() * layer.weight[0].numel()

        spaces = Spaces(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6), frame_stack=4)
        model = MuZeroModel(spaces, channels=64, stem=stem)
        for layer in model.representation.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(count)
        model.eval().represent(torch.zeros(1, 4, 84, 84, dtype=torch.uint8))
    assert 1 / 7 < products["strided"] / products["residual"] < 1 / 6


@torch.no_grad()
def test_bytes_are_scaled_and_floats_are_not() -> None:
    for space, scale in ((Box(0, 255, (7, 7, 3), np.uint8), 255), (Box(0, 255, (7, 7, 3), np.float32), 1)):
        model = MuZeroModel(Spaces(space, Discrete(3)), network="conv", channels=8)
        planes = model.encoder(torch.full((1, 7, 7, 3), 51, dtype=torch.uint8))
        torch.testing.assert_close(planes, torch.full((1, 3, 7, 7), 51 / scale))


@torch.no_grad()
def test_dynamics_add_the_latent_and_take_a_plane_for_each_action() -> None:
    model = make("muzero", "board")
    latent, action = model.represent(observe("board")), torch.tensor([3, 0, 6, 1, 2])
    planes = model.with_action(latent, action)
    torch.testing.assert_close(planes[:, :8].permute(0, 2, 3, 1).flatten(1), latent)
    torch.testing.assert_close(planes[:, 8:15], F.one_hot(action, 7).float()[:, :, None, None].expand(-1, -1, 6, 7))
    for place, column in zip(planes[:, 15], action, strict=True):
        assert place.sum() == 6
        assert (place[:, column] == 1).all()
    assert planes.shape[1] == 16
    trunk = model.dynamics_trunk
    nn.init.zeros_(trunk.first[1].weight)
    nn.init.zeros_(trunk.first[1].bias)
    torch.testing.assert_close(trunk(planes), trunk.blocks(planes[:, :8]))


@torch.no_grad()
def test_an_action_that_is_a_cell_is_shown_in_its_place_and_one_that_is_no_place_is_not() -> None:
    cells = MuZeroModel(Spaces(Box(0, 1, (2, 3, 4), np.float32), Discrete(12)), network="conv", channels=8)
    latent = torch.zeros(2, cells.state_size)
    place = cells.with_action(latent, torch.tensor([0, 6]))[:, -1]
    assert place.nonzero().tolist() == [[0, 0, 0], [1, 1, 2]]  # in reading order, as the games number their cells
    moves = MuZeroModel(Spaces(Box(0, 1, (2, 3, 4), np.float32), Discrete(5)), network="conv", channels=8)
    assert moves.with_action(latent, torch.tensor([0, 4])).shape[1] == 8 + 5


@torch.no_grad()
def test_a_residual_block_adds_its_input() -> None:
    x = torch.rand(2, 8, 5, 5)
    block = ResidualBlock(8, 8).eval()
    nn.init.zeros_(block.second[1].weight)
    torch.testing.assert_close(block(x), x)
    assert ResidualBlock(8, 16, stride=2)(x).shape == (2, 16, 3, 3)


@torch.no_grad()
def manual_prefixes(model: Any, case: str, length: int) -> Tensor:
    """[length, B] value prefixes by torch's own LSTM over the features of every `lstm_horizon` transitions."""
    lstm = nn.LSTM(model.lstm.input_size, model.lstm_size)
    lstm.load_state_dict({f"{name}_l0": x for name, x in model.lstm.state_dict().items()})
    latent = model.represent(observe(case))[:, : model.latent_size]
    features = []
    for k in range(length):
        trunk = model.dynamics_trunk(model.with_action(latent, actions(case).roll(k, 0)))
        features.append(model.reward_features(trunk))
        latent = model.next_latent(trunk)
    stretches = [
        lstm(torch.stack(features[i : i + model.lstm_horizon]))[0] for i in range(0, length, model.lstm_horizon)
    ]
    return torch.stack([model.reward_support.to_scalar(model.reward(h)) for h in torch.cat(stretches)])


@pytest.mark.parametrize("horizon", [1, 3, 5])
@pytest.mark.parametrize("case", ["cartpole", "gray stack", "board"])
@torch.no_grad()
def test_value_prefixes_begin_anew_after_the_horizon(case: str, horizon: int) -> None:
    model, length = make("efficientzero", case, lstm_horizon=horizon), 12
    expected = manual_prefixes(model, case, length)
    steps = unroll(model, case, length)
    prefixes = torch.stack([model.reward_support.to_scalar(logits) for _, _, logits in steps])
    torch.testing.assert_close(prefixes, expected, atol=1e-5, rtol=1e-4)
    rewards = torch.stack([model.recurrent(state, action).reward for state, action, _ in steps])
    before = torch.cat([torch.zeros(1, BATCH), expected[:-1]])
    before[::horizon] = 0
    torch.testing.assert_close(rewards, expected - before, atol=1e-5, rtol=1e-4)
    for k, (state, _, _) in enumerate(steps):
        counted = 0 if k == 0 else (k - 1) % horizon + 1
        assert (state[:, -1] == counted).all()
    torch.testing.assert_close(rewards[:horizon].sum(0), prefixes[horizon - 1], atol=1e-5, rtol=1e-4)


def test_the_lstm_learns_through_time_but_not_past_its_horizon() -> None:
    """A prefix depends on earlier transitions of its stretch through the LSTM, on others through the latent alone."""
    for length, reaches in ((5, True), (6, False)):
        model = make("efficientzero", "cartpole")
        state = model.represent(observe("cartpole"))
        state, _ = model.transition(state, actions("cartpole"))
        first = state.detach().requires_grad_()
        state = first
        for _ in range(length - 1):
            state, logits = model.transition(state, actions("cartpole"))
        model.reward_support.loss(logits, torch.ones(BATCH)).sum().backward()
        memory = first.grad[:, model.latent_size : -2]
        assert memory.any() == reaches
        assert first.grad[:, : model.latent_size].any()


@pytest.mark.parametrize("case", ["cartpole", "gray stack"])
def test_consistency_is_a_negative_cosine_whose_target_stands_still(case: str) -> None:
    model = make("efficientzero", case).train()
    predicted, target = (torch.rand(BATCH, model.state_size, requires_grad=True) for _ in range(2))
    loss = model.consistency_loss(predicted, target)
    size = model.latent_size
    guess = model.predictor(model.projector(predicted[:, :size]))
    torch.testing.assert_close(model.project(predicted[:, :size], True), guess)
    goal = model.projector(target[:, :size])
    torch.testing.assert_close(model.project(target[:, :size], False), goal)
    torch.testing.assert_close(loss, -(F.normalize(guess, dim=1) * F.normalize(goal, dim=1)).sum(1))
    assert loss.shape == (BATCH,)
    assert loss.abs().max() <= 1 + 1e-6
    standing = -F.cosine_similarity(guess, goal.detach()).sum()
    weights = list(model.projector.parameters())
    expected = torch.autograd.grad(standing, [predicted, *weights])
    ours = torch.autograd.grad(loss.sum(), [predicted, *weights, target], allow_unused=True)
    assert ours[-1] is None
    torch.testing.assert_close(ours[:-1], expected)
    assert ours[0][:, :size].any()
    assert not ours[0][:, size:].any()  # the LSTM's part of a row is no part of the latent


def test_sizes_that_are_not_given() -> None:
    small, paper = (EfficientZeroModel(CASES[case][0]) for case in ("cartpole", "gray stack"))
    for model, lstm, projection, prediction in ((small, 64, 128, 64), (paper, 512, 1024, 512)):
        assert model.lstm_size == model.lstm.hidden_size == lstm
        widths = [layer.out_features for layer in model.projector if isinstance(layer, nn.Linear)]
        assert widths == [projection] * 3
        assert [layer.out_features for layer in model.predictor[::3]] == [prediction, projection]
        kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 3
        assert [type(layer) for layer in model.projector] == kinds[:-1]  # its output is normalised, not rectified
    assert paper.latent_shape == (64, 6, 6)
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in MuZeroModel(CASES["cartpole"][0]).modules())


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"action space MultiDiscrete.*TransformAction"):
        MuZeroModel(Spaces(VECTOR, MultiDiscrete([2, 3])))
    with pytest.raises(ValueError, match="action space Box"):
        MuZeroModel(Spaces(VECTOR, Box(0, 9, (2,), np.int64)))
    with pytest.raises(ValueError, match=r"'conv' needs images.*Box.*\(4,\).*'mlp'"):
        MuZeroModel(Spaces(VECTOR, Discrete(2)), network="conv")
    with pytest.raises(ValueError, match="hidden_sizes is empty"):
        MuZeroModel(Spaces(VECTOR, Discrete(2)), hidden_sizes=())
    with pytest.raises(ValueError, match="no network for observation space Text"):
        MuZeroModel(Spaces(gym.spaces.Text(5), Discrete(2)))
