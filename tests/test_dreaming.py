"""A look at a world model: what it sees, what it imagines, in which units, and how that is drawn."""

from __future__ import annotations

import dataclasses
import re
import shutil

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch

import envs_for_tests
from conftest import TINY
from rl_training import ALGORITHMS, dream_checkpoint, evaluate_checkpoint, load_policy, train
from rl_training.data.normalize import Normalizer
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime import dreaming, open_loop_plots
from rl_training.runtime.dreaming import in_units_of_environment, predict
from rl_training.runtime.evaluation import Player
from rl_training.runtime.open_loop import OpenLoop, describe
from rl_training.runtime.open_loop_plots import as_rgb, chosen_steps, curves_of, error_image, images_of
from rl_training.types import Spaces, Trajectory
from test_cli import cli

T, S, CONTEXT = 7, 3, 3
GAMMA = 1 - 1 / 50
BOX = gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float32)
OBSERVATIONS = {
    "vector": BOX,
    "image": gym.spaces.Box(0, 255, (16, 18, 3), np.uint8),
    "dict": gym.spaces.Dict(
        {"camera": gym.spaces.Box(0, 255, (16, 16), np.uint8), "place": BOX, "room": gym.spaces.MultiDiscrete([3, 4])}
    ),
}
ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "box": gym.spaces.Box(-1, 1, (2, 2), np.float32),
}


def make_actor(observation, action):
    """An actor whose parameters are all random: no output is zero."""
    hp = ALGORITHMS["dreamer"].recipe.hyperparameters(**{**TINY["dreamer"], "horizon": 50.0})
    torch.manual_seed(0)
    actor = ALGORITHMS["dreamer"].recipe.actor(Spaces(observation, action), hp)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return actor


def rows(space, count, seed=0):
    """`count` samples as arrays [count, ...]."""
    space.seed(seed)
    samples = [space.sample() for _ in range(count)]
    if isinstance(space, gym.spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


def predicted_by(actor, obs, action, context=CONTEXT, samples=S):
    return actor.open_loop(obs, action, context=context, samples=samples, rng=np.random.default_rng(7))


def by_hand(actor, obs, action, sample):
    """One sample of the prediction, step by step: (outputs of the decoder, reward, continuation), each a list of T."""
    model, dynamics = actor.model, actor.model.dynamics
    noise = np.random.default_rng(7).random((T, S, 32), np.float32)[:, sample]
    deter, stoch = torch.zeros(1, 16), torch.zeros(1, 32, 2)
    before = torch.zeros(1, model.policy.action_size)
    results = []
    for t in range(T):
        if t:
            before = model.policy.vector(torch.as_tensor(action[t - 1 : t])).reshape(1, -1)
        latent = type(dynamics.initial(1))(deter, stoch)
        deter = dynamics.deterministic(latent, before)
        logits = dynamics.prior(deter)
        if t < CONTEXT:
            now = {k: torch.as_tensor(v[t : t + 1]) for k, v in (obs if isinstance(obs, dict) else {"": obs}).items()}
            logits = dynamics.posterior(deter, model.encoder(now if isinstance(obs, dict) else now[""]))
        below = logits[0].exp().cumsum(-1)[:, 0]  # of two classes
        stoch = torch.nn.functional.one_hot((below <= torch.from_numpy(noise[t])).long(), 2).float()[None]
        features = torch.cat([deter, stoch.flatten(1)], -1)
        outputs = model.decoder(type(latent)(deter, stoch))
        goes_on = min(1.0, model.continuation(features).sigmoid().item() / GAMMA)
        results.append((outputs, model.mean(model.reward(features)).item(), goes_on))
    return [list(parts) for parts in zip(*results, strict=True)]


def observed(key, output):
    """A decoder's output as an observation."""
    output = output[0].detach().double().numpy()
    if key in ("place", "vector"):
        return (np.sign(output) * (np.exp(np.abs(output)) - 1)).reshape(2, 2)
    if key == "room":
        return np.array([output[:3].argmax(), output[3:].argmax()])
    pixels = np.round(output.clip(0, 1) * 255)
    return pixels[0] if key == "camera" else np.moveaxis(pixels, 0, -1)


@pytest.mark.parametrize(("kind", "action"), [("vector", "discrete"), ("image", "box"), ("dict", "multidiscrete")])
def test_the_prediction_is_that_of_the_models_parts_one_step_after_the_other(kind, action):
    space = OBSERVATIONS[kind]
    actor = make_actor(space, ACTIONS[action])
    obs, actions = rows(space, T), rows(ACTIONS[action], T - 1, seed=1)
    found = predicted_by(actor, obs, actions)
    parts = found.obs if isinstance(found.obs, dict) else {kind: found.obs}
    with torch.no_grad():
        for sample in range(S):
            outputs, rewards, goes_on = by_hand(actor, obs, actions, sample)
            np.testing.assert_allclose(found.reward[sample], rewards, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found.continuation[sample], goes_on, rtol=1e-5, atol=1e-6)
            for key, part in parts.items():
                expected = [observed(key, each.get(key, each.get("observation"))) for each in outputs]
                np.testing.assert_allclose(
                    part[sample], expected, rtol=1e-3, atol=1.0 if part.dtype == np.uint8 else 1e-3
                )
    assert found.reward.shape == found.continuation.shape == (S, T)
    assert len(np.unique(found.reward[:, -1])) == S  # each sample has its own noise
    if kind == "image":
        assert found.obs.shape == (S, T, 16, 18, 3)
        assert found.obs.dtype == np.uint8


def changed(obs, t):
    other = {key: part.copy() for key, part in obs.items()}
    other["place"][t] -= 1000
    other["camera"][t] = 255 - other["camera"][t]
    return other


@pytest.mark.parametrize("t", range(T))
def test_only_the_observations_of_the_context_are_seen(t):
    actor = make_actor(OBSERVATIONS["dict"], ACTIONS["discrete"])
    obs, actions = rows(OBSERVATIONS["dict"], T), rows(ACTIONS["discrete"], T - 1)
    before, after = predicted_by(actor, obs, actions), predicted_by(actor, changed(obs, t), actions)
    same = (before.reward == after.reward).all(0)
    assert same[:t].all()
    assert (before.obs["place"] == after.obs["place"]).all(axis=(0, 2, 3))[:t].all()
    assert same[t:].all() if t >= CONTEXT else not same[t]


def test_an_action_changes_what_comes_after_it_and_nothing_before():
    actor = make_actor(OBSERVATIONS["vector"], ACTIONS["discrete"])
    obs, actions = rows(OBSERVATIONS["vector"], T), rows(ACTIONS["discrete"], T - 1)
    other = actions.copy()
    other[4] = (other[4] + 1) % 3
    same = [
        (predicted_by(actor, obs, each).reward == predicted_by(actor, obs, actions).reward).all(0)
        for each in (actions, other)
    ]
    assert same[0].all()
    assert same[1].tolist() == [True] * 5 + [False] * 2


def test_predictions_are_in_the_units_of_the_environment():
    """symlog is undone by the model, and the normalisation of observations and rewards after it."""
    actor = make_actor(BOX, ACTIONS["discrete"])
    with torch.no_grad():
        actor.model.decoder.outputs[0].weight.zero_()
        actor.model.decoder.outputs[0].bias.copy_(torch.tensor([0.0, 1.0, -2.0, np.log(1001.0)]))
    obs, actions = 50 + 9 * rows(BOX, T), rows(ACTIONS["discrete"], T - 1)
    plain = predict(Player(actor, actor.spaces, None, "clip"), obs, actions, context=2, samples=2, seed=0)
    values = np.array([[0, np.e - 1], [1 - np.e**2, 1000]])
    np.testing.assert_allclose(plain.obs, np.broadcast_to(values, (2, T, 2, 2)), rtol=1e-4)
    normalizer = Normalizer(BOX, 1)
    normalizer.observe(obs)
    for reward in (5.0, -3.0, 8.0):
        normalizer.reward(np.array([reward]), np.array([False]))
    player = Player(actor, actor.spaces, normalizer, "clip")
    scaled = predict(player, obs, actions, context=2, samples=2, seed=0)
    expected = values * obs.std(0) + obs.mean(0)
    np.testing.assert_allclose(scaled.obs, np.broadcast_to(expected, (2, T, 2, 2)), rtol=1e-3, atol=1e-2)
    seen = predict(player._replace(normalizer=None), normalizer.observation(obs), actions, context=2, samples=2, seed=0)
    np.testing.assert_allclose(scaled.reward, seen.reward / normalizer.scale_reward(np.ones(1)), rtol=1e-4)


def test_a_normaliser_can_be_undone():
    space = gym.spaces.Dict({"camera": OBSERVATIONS["image"], "place": BOX})
    obs, normalizer = rows(space, 20), Normalizer(space, 1)
    normalizer.observe(obs)
    back = normalizer.original_observation(normalizer.observation(obs))
    np.testing.assert_allclose(back["place"], obs["place"], rtol=1e-4, atol=1e-5)
    assert (back["camera"] == obs["camera"]).all()
    none = Normalizer(BOX, 1, observation=False, reward=False)
    nothing = Trajectory(obs["place"], np.ones(20), np.ones(20))
    assert in_units_of_environment(nothing, none) == nothing


def trained(folder, env_id="CounterForTests-v0", algo="dreamer", **config):
    """A run of a moment, which learns nothing."""
    sizes = TINY[algo] | ({"learning_starts": 1000} if algo == "dreamer" else {})
    config = {"algo": algo, "env_id": env_id, "total_timesteps": 32, "num_envs": 2, "eval_episodes": 1} | config
    return train({**config, "output_dir": folder, "algo_kwargs": sizes}, progress="silent").run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("dream"))


def test_the_true_side_is_the_episode_that_evaluation_plays(run_dir):
    dream = dream_checkpoint(run_dir, context=2)
    policy, env = load_policy(run_dir), envs_for_tests.CounterEnv()
    obs, _ = env.reset()
    expected = [(obs, 0.0, 1.0)]
    for _ in range(3):
        obs, reward, terminated, *_ = env.step(policy.act(obs))
        expected.append((obs, reward, 1.0 - terminated))
    for found, known in zip(dream.true, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(found, known)
    assert (dream.env_id, dream.step, dream.context) == ("CounterForTests-v0", 32, 2)
    assert dream.predicted.obs.shape == (8, 4, 2)
    assert dream.true.reward.sum() == evaluate_checkpoint(run_dir, num_episodes=1)["eval_return_mean"]


def test_an_episode_is_cut_after_context_and_steps_and_a_truncation_is_no_end(tmp_path):
    run = trained(tmp_path, env_kwargs={"length": 4, "ends": "truncated"})
    assert dream_checkpoint(run, context=1, steps=2).true.obs[:, 1].tolist() == [0, 1, 2]
    whole = dream_checkpoint(run, context=1, steps=30)
    assert whole.true.obs[:, 1].tolist() == [0, 1, 2, 3, 4]
    assert whole.true.continuation.tolist() == [1.0] * 5


def test_the_seed_decides_the_episode_and_the_samples(tmp_path):
    run = trained(tmp_path, "CartPole-v1")

    def first(**options):
        dream = dream_checkpoint(run, steps=3, context=2, **options)
        return dream.true.obs[0].tolist(), dream.predicted.obs.tolist()

    assert first(seed=3) == first(seed=3)
    assert first(seed=3)[0] != first(seed=4)[0]
    assert first() == first(seed=0)  # the run's
    samples = dream_checkpoint(run, steps=3, context=2).predicted.obs
    assert len(np.unique(samples[:, -1, 0])) == 8


def test_clipped_rewards_are_shown_as_they_were_learned(run_dir, monkeypatch):
    monkeypatch.setattr(dreaming, "clips_reward", lambda _: True)
    assert dream_checkpoint(run_dir, context=1).true.reward.tolist() == [0, 1, 1, 1]


def test_the_command_draws_curves(run_dir, tmp_path):
    png, gif = tmp_path / "new" / "a.png", tmp_path / "new" / "a.gif"
    text = cli("dream", run_dir, "--png", png, "--gif", gif, "--context", 2, "--samples", 2, "--best")
    assert "CounterForTests-v0, observations: 2 seen, 2 imagined" in text
    assert re.search(r"observation  root mean square error \S+ \(what was seen last: 1.12\)", text)
    assert text.endswith(f"wrote {png}\nwrote {gif}\n")
    assert imageio.imread(png).std() > 5
    assert len(imageio.mimread(gif)) == 4
    assert sorted(path.name for path in png.parent.iterdir()) == ["a.gif", "a.png"]
    words = ["--output-dir", run_dir.parent, "--context", 1, "--steps", 2, "--fps", 5, "--seed", 1, "--stochastic"]
    assert "1 seen, 2 imagined" in cli("dream", "latest", *words, "--gif", gif)
    assert len(imageio.mimread(gif)) == 3


def test_the_best_checkpoint_is_taken_where_that_is_asked_for(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("best"))
    assert dream_checkpoint(tmp_path / "run", context=1).step == 32
    with pytest.raises(InputError, match="has no checkpoint `best`"):
        dream_checkpoint(tmp_path / "run", best=True)


def test_actions_are_sampled_where_that_is_asked_for(run_dir):
    rewards = [
        [dream_checkpoint(run_dir, context=1, stochastic=sample, seed=i).true.reward.tolist() for i in range(4)]
        for sample in (True, False)
    ]
    assert rewards[0] != rewards[1]


def test_true_observations_are_not_normalised(tmp_path):
    run = trained(tmp_path, env_kwargs={"wrappers": {"normalize_observation": True, "normalize_reward": True}})
    dream = dream_checkpoint(run, context=1)
    assert dream.true.obs.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert dream.true.reward[1] >= 10


def test_other_algorithms_are_refused_by_name(tmp_path):
    run = trained(tmp_path / "runs", "CartPole-v1", "ppo")
    error = cli("dream", run, "--png", tmp_path / "a.png", code=2)
    assert "was trained by ppo, which has no model that predicts observations: give a run of dreamer" in error
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"context": 0}, "context should be at least 1, got 0"),
        ({"samples": 0}, "samples should be at least 1"),
        ({"steps": 10**6}, "at most 10,000 together, got 1,000,005"),
        ({"context": 4}, "the episode ended after 4 observations and nothing is left to imagine: lower context"),
        ({"png": "a.jpg"}, "a.jpg: --png writes a .png file"),
        ({"gif": "a.mp4"}, "a.mp4: --gif writes a .gif file"),
        ({"gif": "a.gif", "fps": 80}, "fps should be more than 0 and at most 50, got 80"),
        ({"png": "folder.png"}, "folder.png is a folder"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_and_leaves_no_file(options, error, run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=re.escape(error)):
        dream_checkpoint(run_dir, **({"png": "dream.png"} | options))
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_missing_packages_and_files_are_told(run_dir, tmp_path, monkeypatch):
    assert "--png FILE, --gif FILE or both" in cli("dream", run_dir, code=2)
    monkeypatch.setattr(open_loop_plots, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=re.escape('--gif needs matplotlib: pip install "rl-training[plot]"')):
        dream_checkpoint(run_dir, gif=tmp_path / "a.gif")


def hand_made(obs, predicted, context=2, env_id="Some-v0"):
    """A prediction of observations [T, ...] by [S, T, ...]."""
    shape = next(iter(predicted.values())).shape[:2] if isinstance(predicted, dict) else predicted.shape[:2]
    true = Trajectory(obs, np.zeros(shape[1], np.float32), np.ones(shape[1], np.float32))
    return OpenLoop(env_id, 10, context, true, Trajectory(predicted, np.zeros(shape), np.ones(shape)))


def shades(count, *shape):
    """Images of one grey each, which grows."""
    return np.broadcast_to(
        (20 * np.arange(count, dtype=np.uint8)).reshape(-1, *[1] * len(shape)), (count, *shape)
    ).copy()


def test_a_gif_shows_true_predicted_and_error_of_every_step(tmp_path):
    true = shades(6, 16, 16, 3)
    predicted = np.stack([true + 40, true])  # of the samples, the first is shown
    open_loop_plots.write_gif(hand_made(true, predicted), tmp_path / "a.gif", 10.0)
    frames = np.stack(imageio.mimread(tmp_path / "a.gif"))[..., :3].astype(float)
    assert len(frames) == 6
    third = frames.shape[2] // 3
    for i, expected in enumerate((20 * np.arange(6), 20 * np.arange(6) + 40, [147] * 6)):
        middle = frames[:, 150:250, i * third + 50 : (i + 1) * third - 50].mean((1, 2, 3))
        np.testing.assert_allclose(middle, expected, atol=4)


def test_curves_of_a_gif_grow(tmp_path):
    obs = np.linspace(0, 1, 12, dtype=np.float32)[:, None]
    open_loop_plots.write_gif(hand_made(obs, obs[None] + 0.1), tmp_path / "a.gif", 10.0)
    frames = np.stack(imageio.mimread(tmp_path / "a.gif"))[..., :3].astype(int)
    colored = (np.ptp(frames, -1) > 60).sum((1, 2))  # pixels in the colour of predictions
    assert len(frames) == 12
    assert (np.diff(colored) > 0).all()


@pytest.mark.parametrize("kind", ["image", "dict"])
def test_images_and_dicts_are_drawn(kind, tmp_path):
    space = OBSERVATIONS[kind]
    obs = rows(space, 5)
    predicted = {key: np.stack([part] * 2) for key, part in obs.items()} if kind == "dict" else np.stack([obs] * 2)
    dream = hand_made(obs, predicted)
    open_loop_plots.write_png(dream, tmp_path / "a.png")
    assert imageio.imread(tmp_path / "a.png").std() > 5
    assert len(list(open_loop_plots.animation(dream))) == 5
    assert list(images_of(dream)) == (["camera"] if kind == "dict" else [""])
    names = [curve.name for curve in curves_of(dream)]
    places = [f"place[{i}, {j}]" for i in (0, 1) for j in (0, 1)]
    numbers = [*places, "room[0]", "room[1]"] if kind == "dict" else []
    assert names == [*numbers, "reward", "probability that the episode goes on"]
    text = describe(dream)
    assert ("room    wrong categories 0%" in text) == (kind == "dict")
    assert "root mean square error 0 (what was seen last:" in text


def test_a_run_with_a_dict_of_images_and_numbers(tmp_path):
    run = trained(tmp_path / "runs", "StructuredForTests-v0")
    dream = dream_checkpoint(run, context=1, samples=2, png=tmp_path / "a.png", gif=tmp_path / "a.gif")
    assert dream.true.obs.keys() == dream.predicted.obs.keys() == {"camera", "parts.0", "parts.1", "flags", "dials"}
    for key, part in dream.true.obs.items():
        assert dream.predicted.obs[key].shape == (2, *part.shape)
    assert dream.true.obs["parts.0"].tolist() == [0, 1, 2, 3]
    assert len(imageio.mimread(tmp_path / "a.gif")) == 4


def test_more_numbers_than_there_is_room_for_are_left_out_and_that_is_said(tmp_path):
    obs = np.random.default_rng(0).random((4, 30))
    dream = hand_made(obs, obs[None])
    assert len(curves_of(dream)) == 26
    assert "the first 24 of 30 numbers" in open_loop_plots.text_of(dream)
    open_loop_plots.write_png(dream, tmp_path / "a.png")


@pytest.mark.parametrize(
    "shape", [(8, 9), (8, 9, 1), (8, 9, 3), (3, 8, 9), (1, 8, 9), (2, 8, 9), (4, 8, 9, 3), (4, 3, 8, 9)]
)
def test_images_of_every_layout_are_shown_in_colour(shape):
    images = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)
    newest = images[:, -1] if len(shape) == 4 else images
    channels = {2: newest[..., None]}.get(len(shape), newest if shape[-1] < 8 else np.moveaxis(newest, 1, -1))
    expected = channels if channels.shape[-1] == 3 else channels[..., [-1] * 3]
    np.testing.assert_array_equal(as_rgb(images), expected)


def test_an_error_is_shown_around_grey():
    true, predicted = np.array([0, 255, 255, 9], np.uint8), np.array([255, 0, 255, 9], np.uint8)
    assert error_image(true, predicted).tolist() == [255, 0, 127, 127]


@pytest.mark.parametrize(("length", "context"), [(2, 1), (5, 4), (12, 3), (50, 5), (1000, 5)])
def test_of_many_steps_the_first_and_the_last_are_among_the_images(length, context):
    dream = hand_made(np.zeros((length, 1)), np.zeros((1, length, 1)), context)
    chosen = chosen_steps(dream).tolist()
    assert {0, context - 1, context, length - 1} <= set(chosen)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= 10


def test_dreamers_discount_does_not_hide_that_the_episode_goes_on():
    actor = make_actor(BOX, ACTIONS["discrete"])
    with torch.no_grad():
        actor.model.continuation.output.weight.zero_()
        actor.model.continuation.output.bias.fill_(float(np.log(GAMMA / (1 - GAMMA))))  # the probability is gamma
        obs, actions = rows(BOX, T), rows(ACTIONS["discrete"], T - 1)
        np.testing.assert_allclose(predicted_by(actor, obs, actions).continuation, 1, rtol=1e-5)
        actor.model.continuation.output.bias.fill_(20.0)
    assert (predicted_by(actor, obs, actions).continuation == 1).all()
    actor.hp = dataclasses.replace(actor.hp, horizon=1.0)  # a discount factor of 0
    assert (predicted_by(actor, obs, actions).continuation <= 1).all()
