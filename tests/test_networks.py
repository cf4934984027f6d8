"""Initialisation, an encoder for every observation space, and acting in numpy against the torch it copies."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn

from probes import random_observation
from rl_training.acting.forward import NumpyForward, TorchForward
from rl_training.acting.paths import make_forward
from rl_training.algorithms.optim import Adam, descend
from rl_training.data.batch import to_tensors
from rl_training.models.actor_critic import ActorCritic, parameter_groups
from rl_training.models.networks import NatureCNN, make_encoder, mlp
from rl_training.models.parameters import FlatParameters
from rl_training.models.phasic import ARCHITECTURES, DualActorCritic
from rl_training.types import Spaces

VECTOR, IMAGE = Box(-1, 1, (3,), np.float32), Box(0, 255, (4, 84, 84), np.uint8)
CPU = torch.device("cpu")


def assert_orthogonal(weight: Tensor, gain: float) -> None:
    matrix = weight.detach().flatten(1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5, rtol=1e-5)


def linears(network: nn.Module) -> list[Any]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


def test_layers_are_orthogonal_with_the_usual_gains() -> None:
    model = ActorCritic(Spaces(Box(-1, 1, (7,)), Discrete(5)), (64, 32))
    for network, head_gain in zip(model.networks()[1:], (0.01, 1.0), strict=True):
        gains = [2**0.5, 2**0.5, head_gain]
        for layer, gain in zip(linears(network), gains, strict=True):
            assert_orthogonal(layer.weight, gain)
            assert not layer.bias.any()
    for layer in linears(make_encoder(IMAGE)):
        assert_orthogonal(layer.weight, 2**0.5)


def test_mlp_has_an_activation_between_layers_only() -> None:
    assert [type(layer) for layer in mlp([3, 8, 8, 2], "relu")] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in mlp([3, 2])] == [nn.Linear]


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((84, 84), 1),
        ((4, 84, 84), 4),
        ((84, 96, 3), 3),
        ((3, 64, 64), 3),
        ((4, 84, 84, 3), 12),
        ((4, 3, 84, 84), 12),
        ((36, 36, 1), 1),
    ],
)
def test_images_of_every_layout_are_encoded(shape: tuple[int, ...], channels: int) -> None:
    space = Box(0, 255, shape, np.uint8)
    encoder = make_encoder(space)
    assert isinstance(encoder, NatureCNN)
    assert linears(encoder)[0].in_channels == channels
    features = encoder(torch.from_numpy(random_observation(space, 2, np.random.default_rng(0))))
    assert features.shape == (2, 512)
    assert (features >= 0).all()


def test_the_layout_of_an_image_does_not_change_what_is_seen() -> None:
    image = torch.randint(0, 256, (2, 4, 40, 48, 3), dtype=torch.uint8)  # [B, stack, H, W, C]
    torch.manual_seed(0)
    last = make_encoder(Box(0, 255, (4, 40, 48, 3), np.uint8))
    torch.manual_seed(0)
    first = make_encoder(Box(0, 255, (4, 3, 40, 48), np.uint8))
    torch.testing.assert_close(last(image), first(image.permute(0, 1, 4, 2, 3)))


def test_the_nature_cnn_is_that_of_stable_baselines3() -> None:
    from stable_baselines3.common.torch_layers import NatureCNN as TheirCNN

    ours, theirs = make_encoder(IMAGE), TheirCNN(IMAGE)
    for target, source in zip(linears(theirs), linears(ours), strict=True):
        target.load_state_dict(source.state_dict())
    image = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(ours(image), theirs(image / 255), atol=1e-5, rtol=1e-5)


def test_small_images_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"\(7, 7, 3\).*36 x 36.*FlattenObservation"):
        make_encoder(Box(0, 255, (7, 7, 3), np.uint8))


def test_categories_bits_and_bytes_become_vectors() -> None:
    assert make_encoder(Discrete(3))(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert make_encoder(MultiDiscrete([2, 3]))(torch.tensor([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]
    assert make_encoder(MultiBinary(3))(torch.tensor([[1, 0, 1]], dtype=torch.int8)).tolist() == [[1, 0, 1]]
    ram = make_encoder(Box(0, 255, (2,), np.uint8))
    assert ram(torch.tensor([[0, 255]], dtype=torch.uint8)).tolist() == [[0, 1]]
    assert make_encoder(Box(-1, 1, (2, 3)))(torch.ones(5, 2, 3)).shape == (5, 6)
    assert make_encoder(Box(-1, 1, ()))(torch.ones(5)).shape == (5, 1)


def test_unknown_spaces_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"no network for observation space Text.*TransformObservation"):
        make_encoder(gym.spaces.Text(5))
    with pytest.raises(ValueError, match=r"no policy for action space Text.*TransformAction"):
        ActorCritic(Spaces(VECTOR, gym.spaces.Text(5)))
    with pytest.raises(ValueError, match="no policy for action space Box"):
        ActorCritic(Spaces(VECTOR, Box(0, 9, (2,), np.int64)))


OBSERVATIONS = {
    "vector": VECTOR,
    "matrix": Box(-1, 1, (2, 3), np.float32),
    "image": IMAGE,
    "discrete": Discrete(4),
    "multi-discrete": MultiDiscrete([3, 2]),
    "multi-binary": MultiBinary(5),
    "dict": Dict({"a.b": VECTOR, "c": Discrete(3)}),
    "dict with image": Dict({"camera": Box(0, 255, (36, 36, 3), np.uint8), "pose": VECTOR}),
}
ACTIONS: dict[str, tuple[gym.Space, tuple[int, ...], type]] = {
    "discrete": (Discrete(4), (), np.int64),
    "multi-discrete": (MultiDiscrete([3, 2]), (2,), np.int64),
    "multi-binary": (MultiBinary(4), (4,), np.int8),
    "multi-binary 2d": (MultiBinary((2, 3)), (2, 3), np.int8),
    "box": (Box(-1, 1, (2,), np.float32), (2,), np.float32),
    "box 2d": (Box(-1, 1, (2, 3), np.float32), (2, 3), np.float32),
}


def acting_of(model: ActorCritic, kind: Any = make_forward) -> Any:
    """What `act` makes of a model: observations -> (policy, values [N])."""
    forward = kind(*model.networks())

    def acting(obs: Any) -> Any:
        output, value = forward(obs)
        return model.acting_policy(output), value[:, 0]

    acting.in_numpy = isinstance(forward, NumpyForward)
    return acting


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
@torch.no_grad()
def test_acting_gives_what_the_model_gives(observation: str, action: str) -> None:
    rng, space = np.random.default_rng(0), OBSERVATIONS[observation]
    action_space, shape, dtype = ACTIONS[action]
    model = ActorCritic(Spaces(space, action_space), (16, 16))
    acting = acting_of(model)
    assert acting.in_numpy == (observation in ("vector", "matrix", "multi-binary"))
    for num_envs in (6, 1, 6):
        obs = random_observation(space, num_envs, rng)
        policy, value = acting(obs)
        sample = np.asarray(policy.sample(policy.noise(rng)))
        assert sample.shape == (num_envs, *shape)
        assert sample.dtype == dtype
        expected, expected_value = model(to_tensors(obs, CPU))
        tensor = torch.from_numpy(sample)
        log_prob = policy.log_prob(sample if isinstance(policy.mode, np.ndarray) else tensor)
        np.testing.assert_allclose(value, expected_value, atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(policy.mode, expected.mode, atol=1e-6)
        np.testing.assert_allclose(log_prob, expected.log_prob(tensor), atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(value, model.value(to_tensors(obs, CPU)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("architecture", ["dual", "detach"])
@pytest.mark.parametrize("observation", ["vector", "image", "dict with image"])
@torch.no_grad()
def test_acting_reads_every_architecture(observation: str, architecture: Any) -> None:
    rng, space = np.random.default_rng(0), OBSERVATIONS[observation]
    model = ARCHITECTURES[architecture](Spaces(space, Discrete(4)), (16, 16))
    acting, obs = acting_of(model), random_observation(space, 5, rng)
    assert acting.in_numpy == (observation == "vector")
    tensors = to_tensors(obs, CPU)
    (policy, value), (expected, expected_value) = acting(obs), model(tensors)
    np.testing.assert_allclose(policy.log_probs, expected.log_probs, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(value, expected_value, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(value, model.value(tensors), atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(
        model.action_head.make(model.policy_output(model.encoder(tensors)), None).mode, policy.mode
    )
    assert value.std() > 0


@pytest.mark.parametrize("space", [VECTOR, IMAGE], ids=["vector", "image"])
def test_two_networks_share_nothing_and_begin_as_one_shared_encoder_does(space: gym.Space) -> None:
    torch.manual_seed(0)
    shared = ActorCritic(Spaces(space, Discrete(4)), (16, 16)).state_dict()
    torch.manual_seed(0)
    dual = DualActorCritic(Spaces(space, Discrete(4)), (16, 16))
    kept = {name for name, x in dual.state_dict().items() if name in shared and torch.equal(x, shared[name])}
    assert {name for name in shared if name.startswith(("encoder", "policy"))} <= kept
    assert kept == shared.keys() or space is IMAGE  # of images, the second encoder draws before the value head
    groups = parameter_groups(dual)
    assert [id(p) for group in groups.values() for p in group] == [id(p) for p in dual.parameters()]
    own = {name.partition(".")[0] for name, p in dual.named_parameters() if any(p is q for q in groups["value"])}
    assert own == ({"value_encoder", "value_head"} if space is IMAGE else {"value_trunk", "value_head"})


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_acting_in_numpy_follows_the_weights(activation: Any) -> None:
    spaces = Spaces(VECTOR, Box(-1, 1, (2,), np.float32))
    model, other = (ActorCritic(spaces, (32, 32), activation) for _ in range(2))
    acting, slow = acting_of(model), acting_of(model, TorchForward)
    assert acting.in_numpy == (activation in ("tanh", "relu"))
    obs = random_observation(VECTOR, 8, np.random.default_rng(0))

    def check() -> None:
        (policy, value), (expected, expected_value) = acting(obs), slow(obs)
        np.testing.assert_allclose(value, expected_value, atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(policy.mode, expected.mode, atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(policy.log_std, expected.log_std)

    check()
    before = acting(obs)[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    check()
    assert not np.allclose(before, acting(obs)[1])
    model.load_state_dict(other.state_dict())
    check()


def test_what_acting_returns_is_not_overwritten_by_the_next_call() -> None:
    model = ActorCritic(Spaces(VECTOR, Box(-1, 1, (2,), np.float32)))
    acting, rng = acting_of(model), np.random.default_rng(0)
    policy, value = acting(random_observation(VECTOR, 4, rng))
    kept = policy.mode.copy(), value.copy()
    acting(random_observation(VECTOR, 4, rng))
    np.testing.assert_array_equal(policy.mode, kept[0])
    np.testing.assert_array_equal(value, kept[1])


@pytest.mark.parametrize("moved", ["policy", "value"])
@pytest.mark.parametrize(
    "spaces",
    [
        Spaces(VECTOR, Discrete(4)),
        Spaces(VECTOR, Box(-1, 1, (2,), np.float32)),
        Spaces(IMAGE, Discrete(4)),
        Spaces(OBSERVATIONS["dict with image"], Box(-1, 1, (2,), np.float32)),
    ],
    ids=["vector", "vector, box", "image", "dict with image"],
)
def test_policy_and_value_are_groups_of_parameters_that_are_stepped_alone(spaces: Spaces, moved: str) -> None:
    model = ActorCritic(spaces, (16, 16))
    flat, groups = FlatParameters(model.parameters()), parameter_groups(model)
    policy, value = ([id(p) for p in groups[name]] for name in ("policy", "value"))
    assert not set(policy) & set(value)
    assert policy + value == [id(p) for p in model.parameters()]  # all of them, each group in one piece
    assert {id(p) for p in model.encoder.parameters()} <= set(policy)
    assert model.log_std is None or id(model.log_std) in policy

    still = "value" if moved == "policy" else "policy"
    part, rest = flat.group(groups[moved]), flat.group(groups[still])
    assert len(part.vector) + len(rest.vector) == len(flat.vector)
    assert part.vector.untyped_storage().data_ptr() == flat.vector.untyped_storage().data_ptr()
    before, kept = part.vector.clone(), rest.vector.clone()
    rng = np.random.default_rng(0)
    obs = to_tensors(random_observation(spaces.observation, 5, rng), CPU)
    action = torch.from_numpy(random_observation(spaces.action, 5, rng))
    optimizer, outputs = Adam(part), []
    for _ in range(2):
        distribution, value_now = model(obs)
        outputs.append((distribution.log_prob(action).detach(), value_now.detach()))
        descend(optimizer, distribution.log_prob(action).sum() + value_now.square().sum(), lr=1e-3)
    assert torch.equal(rest.vector, kept)
    assert not torch.equal(part.vector, before)
    torch.testing.assert_close(flat.gradient.square().sum(), part.gradient.square().sum())  # the rest got none
    (log_prob, values), (log_prob_after, values_after) = outputs
    shared = bool(list(model.encoder.parameters()))
    assert torch.equal(log_prob, log_prob_after) == (moved == "value")
    assert torch.equal(values, values_after) == (moved == "policy" and not shared)


def test_a_group_in_pieces_is_refused() -> None:
    model = ActorCritic(Spaces(VECTOR, Discrete(4)), (16, 16))
    flat, (first, _, third, *_) = FlatParameters(model.parameters()), model.parameters()
    with pytest.raises(ValueError, match="consecutive"):
        flat.group([first, third])
