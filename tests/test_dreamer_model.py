"""DreamerV3's networks: sizes, initial weights, the block GRU, latents, and how they read and predict observations."""

from __future__ import annotations

import math
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import REPOSITORY
from rl_training.errors import InputError
from rl_training.models.dreamer import SIZES, DreamerModel, Size
from rl_training.models.dreamer_layers import NormedSiLU
from rl_training.models.dreamer_observations import DreamerDecoder, DreamerEncoder, make_part
from rl_training.models.parameters import num_parameters
from rl_training.models.rssm import RSSM, Latent, entropy
from rl_training.types import Spaces

TINY = Size(deter=32, hidden=8, classes=3, units=8, depth=2)
BLOCKS, GROUPS = 8, 32


def box(*shape):
    return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)


def image(*shape):
    return gym.spaces.Box(0, 255, shape, np.uint8)


WALKER = Spaces(
    gym.spaces.Dict({"orientations": box(14), "height": box(1), "velocity": box(9)}),
    gym.spaces.Box(-1, 1, (6,), np.float32),
)


def make(observation=None, action=None, size=TINY, seed=0):
    torch.manual_seed(seed)
    return DreamerModel(Spaces(observation or box(4), action or gym.spaces.Discrete(2)), size)


def rssm(seed=0):
    torch.manual_seed(seed)
    return RSSM(5, 2, deter=16, hidden=4, classes=3)


def some_latent(model, *lead, seed=1):
    generator = torch.Generator().manual_seed(seed)
    stoch = F.one_hot(torch.randint(model.classes, (*lead, model.groups), generator=generator), model.classes)
    return Latent(torch.randn(*lead, model.deter, generator=generator), stoch.float())


NAMES = ("encoder", "dynamics", "decoder", "reward", "continuation", "policy", "value")
COUNTS = {  # published, for walker_walk
    "1m": (10_112, 364_416, 51_096, 57_663, 41_153, 50_316, 66_111),
    "12m": (138_752, 5_783_040, 794_136, 721_407, 656_129, 791_052, 853_503),
}
DYNAMICS = {"25m": 12_999_936, "50m": 23_100_416, "100m": 51_952_128, "200m": 92_338_176, "400m": 207_713_280}
TOTALS = {
    "1m": 640_867, "12m": 9_738_019, "25m": 21_782_947, "50m": 38_612_003, "100m": 86_622_499, "200m": 153_769_507,
    "400m": 345_473_059,
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_each_module_are_as_many_as_published(size):
    with torch.device("meta"):
        model = DreamerModel(WALKER, size)
    counts = {name: num_parameters(getattr(model, name)) for name in NAMES}
    assert sum(counts.values()) == TOTALS[size]
    assert counts["dynamics"] == DYNAMICS.get(size, counts["dynamics"])
    if size in COUNTS:
        assert tuple(counts.values()) == COUNTS[size]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trainable == TOTALS[size]  # all but the slow value's


FAN_INS = {  # of the whole input of a block-linear layer, not of one block
    "dynamics.hidden.weight": 2048 + 8 * 3 * 256, "dynamics.gates.weight": 2048, "dynamics.prior_logits.weight": 256,
    "dynamics.of_deter.0.weight": 2048, "dynamics.posterior_trunk.0.weight": 2048 + 256, "encoder.mlp.2.weight": 256,
    "decoder.mlp.0.weight": 2048 + 512, "continuation.output.weight": 256,
}  # fmt: skip


def test_weights_are_truncated_normals_scaled_by_the_width_of_the_input():
    torch.manual_seed(0)
    weights = dict(DreamerModel(WALKER, "12m").named_parameters())
    for name, fan_in in FAN_INS.items():
        scaled = weights[name].detach() * math.sqrt(fan_in)
        assert scaled.std().item() == pytest.approx(1.0, abs=0.1 if "continuation" in name else 0.02), name
        assert scaled.abs().max() <= 2 * 1.1369
        assert scaled.abs().max() > 2.0
    policy = weights["policy.output.weight"].detach() * math.sqrt(256)
    assert policy.std().item() == pytest.approx(0.01, rel=0.1)
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert (weight == 0).all(), name
        if name.endswith("gain"):
            assert (weight == 1).all(), name
    assert not weights["reward.output.weight"].any()
    assert not weights["value.output.weight"].any()


def test_first_values_and_rewards_are_zero_and_policies_almost_uniform():
    model = make(action=gym.spaces.Discrete(5))
    latent = some_latent(model.dynamics, 7)
    for head in (model.reward, model.value, model.slow_value):
        assert (model.mean(head(latent)) == 0).all()
    probs = model.policy(latent).log_probs.exp()
    assert (probs - 0.2).abs().max() < 0.02
    policy = make(action=WALKER.action).policy(latent)
    assert (policy.std - 0.8927).abs().max() < 0.01
    assert policy.mean.abs().max() < 0.1


def test_normed_silu_is_the_equation_along_any_axis():
    x = torch.randn(2, 6, 3, 4)
    norm = NormedSiLU(6, dim=-3)
    norm.gain.data = torch.rand(6) + 1
    for index in np.ndindex(2, 3, 4):
        column = x[index[0], :, index[1], index[2]].numpy()
        y = column / np.sqrt((column**2).mean() + 1e-4) * norm.gain.detach().numpy()
        actual = norm(x)[index[0], :, index[1], index[2]].detach().numpy()
        np.testing.assert_allclose(actual, y / (1 + np.exp(-y)), rtol=1e-5, atol=1e-6)


def normed_silu(x, gain):
    y = x / np.sqrt((x * x).mean() + 1e-4) * gain
    return y / (1 + np.exp(-y))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive_deterministic(model, deter, stoch, action):
    """One row, with eight separate dense GRU cells that each see their part of the state and all inputs."""
    p = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    inputs = []
    for name, x in (("of_deter", deter), ("of_stoch", stoch.ravel()), ("of_action", action)):
        inputs.append(normed_silu(p[f"{name}.0.weight"] @ x + p[f"{name}.0.bias"], p[f"{name}.1.gain"]))
    size = model.deter // BLOCKS
    hidden = []
    for block in range(BLOCKS):
        seen = np.concatenate([deter[block * size : (block + 1) * size], *inputs])
        hidden.append(seen @ p["hidden.weight"][block] + p["hidden.bias"][block * size : (block + 1) * size])
    hidden = normed_silu(np.concatenate(hidden), p["hidden_norm.gain"])
    new = []
    for block in range(BLOCKS):
        own = slice(block * size, (block + 1) * size)
        gates = hidden[own] @ p["gates.weight"][block] + p["gates.bias"][3 * block * size : 3 * (block + 1) * size]
        reset, candidate, update = np.split(gates, 3)
        candidate, update = np.tanh(sigmoid(reset) * candidate), sigmoid(update - 1)
        new.append(update * candidate + (1 - update) * deter[own])
    return np.concatenate(new)


def test_block_gru_is_eight_dense_cells():
    model = rssm()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "gain")):
                parameter.normal_()
    latent, action = some_latent(model, 6), 3 * torch.randn(6, 2)
    actual = model.deterministic(latent, action)
    small = action / action.abs().clamp(min=1)
    for n in range(6):
        row = (x[n].double().numpy() for x in (latent.deter, latent.stoch, small))
        np.testing.assert_allclose(actual[n].detach(), naive_deterministic(model, *row), atol=1e-5)


def test_an_episodes_first_state_does_not_depend_on_what_was_before():
    model = rssm()
    first = torch.tensor([True, False, True])
    states = [model.deterministic(some_latent(model, 3, seed=s), torch.randn(3, 2), first) for s in range(2)]
    assert torch.equal(states[0][[0, 2]], states[1][[0, 2]])
    assert not torch.equal(states[0][1], states[1][1])
    assert torch.equal(states[0][:1], model.deterministic(model.initial(1), torch.zeros(1, 2)))


def test_actions_are_scaled_into_the_unit_box_with_a_constant():
    model, latent = rssm(), some_latent(rssm(), 1)
    action = torch.tensor([[4.0, -0.5]], requires_grad=True)
    state = model.deterministic(latent, action)
    assert torch.equal(state, model.deterministic(latent, torch.tensor([[1.0, -0.5]])))
    state.square().sum().backward()
    inside = torch.tensor([[1.0, -0.5]], requires_grad=True)
    model.deterministic(latent, inside).square().sum().backward()
    torch.testing.assert_close(action.grad, inside.grad / torch.tensor([4.0, 1.0]))


def test_logits_are_log_probabilities_with_one_percent_of_chance():
    model = rssm()
    with torch.no_grad():
        model.prior_logits.bias.copy_(1e4 * torch.eye(3)[0].repeat(GROUPS))
    logits = model.prior(torch.randn(4, 16))
    assert logits.shape == (4, GROUPS, 3)
    np.testing.assert_allclose(logits.detach().exp().sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(logits.detach().exp()[..., 1:], 0.01 / 3, rtol=1e-4)


def test_samples_are_one_hot_follow_the_noise_and_have_the_gradient_of_probabilities():
    model = rssm()
    probs = torch.tensor([0.2, 0.5, 0.3]).expand(4000, GROUPS, 3)
    logits = probs.log().requires_grad_()
    noise = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.999999]).repeat(6)[:GROUPS]
    chosen = model.sample(logits[0], noise).argmax(-1)
    assert chosen.tolist() == ([0, 0, 1, 1, 2, 2] * 6)[:GROUPS]
    torch.manual_seed(1)
    sample = model.sample(logits)
    assert set(sample.detach().unique().tolist()) == {0.0, 1.0}
    assert (sample.sum(-1) == 1).all()
    np.testing.assert_allclose(sample.detach().mean((0, 1)), [0.2, 0.5, 0.3], atol=0.01)
    (sample[0] * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    expected = probs[0] * torch.tensor([1.0, 2.0, 4.0])  # d exp(l) / dl
    torch.testing.assert_close(logits.grad[0], expected)


def test_kl_is_that_of_torch_summed_over_groups_and_stops_gradients():
    model = rssm()
    posterior, prior = (torch.randn(5, GROUPS, 3).log_softmax(-1).requires_grad_() for _ in range(2))
    dynamics, representation = model.kl_losses(posterior, prior, 1.0)
    p, q = (torch.distributions.Categorical(logits=x.detach()) for x in (posterior, prior))
    expected = torch.distributions.kl_divergence(p, q).sum(-1)
    torch.testing.assert_close(dynamics.detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(representation.detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy(posterior).detach(), p.entropy().sum(-1))
    dynamics.sum().backward()
    assert posterior.grad is None
    assert prior.grad.abs().max() > 0
    prior.grad = None
    representation.sum().backward()
    assert prior.grad is None
    assert posterior.grad.abs().max() > 0


def test_free_nats_are_those_of_the_sum():
    model = rssm()
    prior = torch.randn(1, GROUPS, 3).log_softmax(-1).requires_grad_()
    close = (prior.detach() + 0.1 * torch.randn(1, GROUPS, 3)).log_softmax(-1).requires_grad_()
    exact = model.kl_losses(close, prior, 0.0)[0].item()
    assert 0 < exact < 1
    losses = model.kl_losses(close, prior, 1.0)
    assert [loss.item() for loss in losses] == [1.0, 1.0]
    sum(losses).sum().backward()
    assert not prior.grad.any()
    assert not close.grad.any()
    # 32 groups of 0.06 nats are above the limit together
    wide = (prior.detach() + 0.5 * torch.randn(1, GROUPS, 3)).log_softmax(-1)
    assert model.kl_losses(wide, prior, 1.0)[0].item() > 1


def test_observe_is_a_step_at_a_time_and_begins_anew_at_first():
    model = rssm()
    tokens, actions, noise = torch.randn(4, 3, 5), torch.randn(4, 3, 2), torch.rand(4, 3, GROUPS)
    first = torch.zeros(4, 3, dtype=torch.bool)
    first[2, 1] = True
    carry = some_latent(model, 3)
    states, logits = model.observe(tokens, actions, first, carry, noise)
    for n in range(3):
        latent = Latent(*(x[n : n + 1] for x in carry))
        for t in range(4):
            if n == 1 and t == 2:
                latent, action = model.initial(1), torch.zeros(1, 2)
            else:
                action = actions[t, n : n + 1]
            deter = model.deterministic(latent, action)
            expected = model.posterior(deter, tokens[t, n : n + 1])
            latent = Latent(deter, model.sample(expected, noise[t, n : n + 1]))
            torch.testing.assert_close(logits[t, n], expected[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(states.deter[t, n], deter[0], atol=1e-5, rtol=1e-5)
            assert torch.equal(states.stoch[t, n].argmax(-1), latent.stoch[0].argmax(-1))


def test_gradients_reach_what_came_before_but_not_across_a_first_step():
    model = rssm()
    for begins in (False, True):
        tokens = torch.randn(3, 1, 5, requires_grad=True)
        first = torch.tensor([[False], [False], [begins]])
        states, _ = model.observe(tokens, torch.randn(3, 1, 2), first, model.initial(1), torch.rand(3, 1, GROUPS))
        states.deter[2].square().sum().backward()
        assert bool(tokens.grad[1].any()) != begins
        assert not tokens.grad[2].any()  # the deterministic state comes before the observation


def test_imagination_is_the_trained_dynamics():
    model = rssm()
    latent, action, noise = some_latent(model, 3), torch.randn(3, 2), torch.rand(3, GROUPS)
    after = model.imagine(latent, action, noise)
    deter = model.deterministic(latent, action)
    assert torch.equal(after.deter, deter)
    assert torch.equal(after.stoch, model.sample(model.prior(deter), noise))


MIXED = gym.spaces.Dict(
    {
        "camera": image(64, 64, 3),
        "map": image(20, 84),
        "speed": box(2, 3),
        "kind": gym.spaces.Discrete(4),
        "cards": gym.spaces.MultiDiscrete([2, 3]),
        "buttons": gym.spaces.MultiBinary(3),
    }
)


def batch_of(space, *lead, seed=0):
    space.seed(seed)
    rows = [space.sample() for _ in range(math.prod(lead))]
    if isinstance(space, gym.spaces.Dict):
        return {key: stack([row[key] for row in rows], lead) for key in space.spaces}
    return stack(rows, lead)


def stack(rows, lead):
    stacked = torch.from_numpy(np.stack(rows))
    return stacked.reshape(*lead, *stacked.shape[1:])


@pytest.mark.parametrize(
    "space", [*MIXED.spaces.values(), MIXED, image(3, 64, 64), image(4, 84, 84), image(3, 96, 96)], ids=str
)
def test_every_kind_of_observation_is_encoded_decoded_and_has_a_loss(space):
    model = make(space)
    obs = batch_of(space, 3, 2)
    tokens = model.encoder(obs)
    assert tokens.shape == (3, 2, model.encoder.size)
    latent, _ = model.dynamics.observe(tokens, torch.zeros(3, 2, 2), torch.zeros(3, 2), model.dynamics.initial(2))
    outputs = model.decoder(latent)
    losses = model.decoder.losses(outputs, obs)
    keys = set(space.spaces) if isinstance(space, gym.spaces.Dict) else {"observation"}
    assert set(losses) == keys
    assert all(loss.shape == (3, 2) and loss.isfinite().all() for loss in losses.values())
    sum(loss.mean() for loss in losses.values()).backward()
    for name, parameter in [*model.encoder.named_parameters(), *model.decoder.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    arrays = obs if isinstance(obs, dict) else {"observation": obs}
    for key, predicted in model.decoder.observations(outputs).items():
        assert predicted.shape == arrays[key].shape


@pytest.mark.parametrize("shape", [(16, 18), (3, 16, 18), (16, 18, 3), (2, 16, 18), (4, 16, 18, 3), (4, 3, 16, 18)])
def test_a_predicted_image_has_the_axes_of_the_observation(shape):
    """What the network would give for a perfect prediction of an observation becomes that observation."""
    part = make_part(image(*shape))
    obs = batch_of(image(*shape), 2, 3)
    output = part.pixels(obs.flatten(0, 1)).unflatten(0, (2, 3))
    assert torch.equal(part.observation(output), obs)


def test_losses_of_observations_are_sums_over_what_a_key_holds():
    decoder = make(MIXED).decoder
    obs = batch_of(MIXED, 1, 1, seed=4)
    generator = torch.Generator().manual_seed(1)
    outputs = {
        key: torch.rand(1, 1, *shape, generator=generator)
        for key, shape in {"camera": (3, 64, 64), "map": (1, 20, 84), "speed": (6,), "kind": (4,), "cards": (5,),
                           "buttons": (6,)}.items()
    }  # fmt: skip
    losses = {key: loss.item() for key, loss in decoder.losses(outputs, obs).items()}
    out = {key: x[0, 0].double().numpy() for key, x in outputs.items()}
    raw = {key: x[0, 0].numpy() for key, x in obs.items()}

    camera = ((out["camera"] - raw["camera"].transpose(2, 0, 1) / 255) ** 2).sum()
    picture = ((out["map"][0] - raw["map"] / 255) ** 2).sum()
    x = raw["speed"].astype(np.float64).ravel()
    speed = ((out["speed"] - np.sign(x) * np.log1p(np.abs(x))) ** 2).sum()

    def cross_entropy(logits, category):
        return np.log(np.exp(logits).sum()) - logits[category]

    kind = cross_entropy(out["kind"], raw["kind"])
    cards = cross_entropy(out["cards"][:2], raw["cards"][0]) + cross_entropy(out["cards"][2:], raw["cards"][1])
    buttons = sum(cross_entropy(out["buttons"][2 * i : 2 * i + 2], raw["buttons"][i]) for i in range(3))
    expected = {"camera": camera, "map": picture, "speed": speed, "kind": kind, "cards": cards, "buttons": buttons}
    assert losses == pytest.approx(expected, rel=1e-5)


def test_vectors_are_read_as_symlog_and_images_around_zero():
    torch.manual_seed(0)
    encoder = DreamerEncoder(gym.spaces.Dict({"b": box(2), "a": gym.spaces.Discrete(3)}), units=4, layers=3, depth=2)
    seen = []
    encoder.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    encoder({"b": torch.tensor([[9.0, -99.0]]), "a": torch.tensor([2])})
    torch.testing.assert_close(seen[0], torch.tensor([[0, 0, 1, math.log(10), -math.log(100)]]))  # keys are sorted
    encoder = DreamerEncoder(image(64, 64, 3), units=4, layers=3, depth=2)
    encoder.cnn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    encoder(torch.full((1, 64, 64, 3), 255, dtype=torch.uint8))
    assert seen[1].shape == (1, 3, 64, 64)
    assert (seen[1] == 0.5).all()


def test_image_networks_have_the_published_layers():
    encoder = DreamerEncoder(image(64, 64, 3), units=64, layers=3, depth=4)
    convolutions = [m for m in encoder.cnn if isinstance(m, torch.nn.Conv2d)]
    assert [(m.in_channels, m.out_channels) for m in convolutions] == [(3, 8), (8, 12), (12, 16), (16, 16)]
    assert encoder.size == 16 * 4 * 4
    decoder = DreamerDecoder(image(64, 64, 3), deter=512, stoch=128, units=64, layers=3, depth=4)
    convolutions = [m for m in decoder.cnn.layers if isinstance(m, torch.nn.Conv2d)]
    assert [(m.in_channels, m.out_channels) for m in convolutions] == [(16, 16), (16, 12), (12, 8), (8, 3)]
    of_deter = 512 * 256 // 8 + 256
    of_stoch = 128 * 128 + 2 * 128 + 128 * 256 + 256
    layers = sum(m.in_channels * m.out_channels * 25 + m.out_channels for m in convolutions) + 16 + 12 + 8
    assert num_parameters(decoder) == of_deter + of_stoch + 16 + layers


def test_too_large_images_and_unknown_spaces_are_named():
    with pytest.raises(InputError, match=r"camera: \(300, 300, 3\)"):
        make(gym.spaces.Dict({"camera": image(300, 300, 3)}))
    with pytest.raises(InputError, match="no policy for action space"):
        make(action=gym.spaces.MultiBinary(3))
    with pytest.raises(InputError, match="no network for observation space"):
        make(gym.spaces.Text(3))


@pytest.mark.parametrize(
    ("action", "shape"),
    [(gym.spaces.Discrete(3), ()), (gym.spaces.MultiDiscrete([2, 4]), (2,)), (WALKER.action, (6,))],
    ids=["discrete", "multidiscrete", "box"],
)
def test_policies_sample_actions_that_the_dynamics_read(action, shape):
    model = make(action=action)
    latent = some_latent(model.dynamics, 5, 2)
    policy = model.policy(latent)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    samples = [
        policy.sample(model.policy.draw_noise(5, 2, like=latent.deter, generator=generator)) for generator in generators
    ]
    assert torch.equal(*samples)
    assert samples[0].shape == (5, 2, *shape)
    vector = model.policy.vector(samples[0])
    assert vector.shape == (5, 2, model.policy.action_size)
    if shape != (6,):
        assert (vector.sum(-1) == max(1, len(shape) and shape[0])).all()
    assert model.dynamics.deterministic(latent, vector).shape == (5, 2, TINY.deter)
    assert policy.log_prob(samples[0]).shape == policy.entropy().shape == (5, 2)
    again = policy.sample(policy.noise(np.random.default_rng(0)))
    assert again.shape == samples[0].shape


def test_bounded_policy_is_the_equation():
    model = make(action=gym.spaces.Box(-1, 1, (2,), np.float32))
    with torch.no_grad():
        for layer in (model.policy.output, model.policy.spread):
            layer.bias.copy_(torch.tensor([0.7, -1.5]))
            layer.weight.zero_()
    policy, action = model.policy(some_latent(model.dynamics, 3)), torch.randn(3, 2)
    std = 0.1 + 0.9 / (1 + np.exp(-np.array([2.7, 0.5])))
    normal = torch.distributions.Normal(torch.tensor([0.7, -1.5]).tanh(), torch.from_numpy(std).float())
    torch.testing.assert_close(policy.log_prob(action), normal.log_prob(action).sum(-1))
    torch.testing.assert_close(policy.entropy(), normal.entropy().sum(-1).expand(3))
    torch.testing.assert_close(policy.sample(torch.ones(3, 2)), (normal.mean + normal.stddev).expand(3, 2))


def test_the_page_on_world_models_has_the_sizes():
    rows = re.findall(r"^\| `(\d+m)` \|(.*)\|$", (REPOSITORY / "docs" / "world_models.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(SIZES)
    for name, cells in rows:
        *widths, of_vector, of_image = (int(cell.replace(",", "")) for cell in cells.split("|"))
        assert tuple(widths) == SIZES[name]
        for space, count in ((box(24), of_vector), (image(64, 64, 3), of_image)):
            with torch.device("meta"):  # without memory
                model = DreamerModel(Spaces(space, WALKER.action), name)
            assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == count
