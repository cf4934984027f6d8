"""Recorded episodes: what the file holds is what was played, raw, and the command says what it wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import envs_for_tests  # noqa: F401  registers ids
from demonstrations_for_tests import play_randomly, random_demonstrations, save
from rl_training import TrainConfig, load_policy, record_demonstrations, train
from rl_training.data.demonstrations import file_content, named_arrays, read_demonstrations
from rl_training.envs.demonstrations import in_model_spaces
from rl_training.envs.space_json import space_to_json
from rl_training.envs.spaces import ObservationLayout, action_map, model_space
from rl_training.errors import InputError
from rl_training.runtime import demos
from rl_training.types import Spaces
from test_cli import cli


def trained(folder, algo="ppo", env_id="CartPole-v1", **more):
    kwargs = {"ppo": {"num_steps": 16, "num_minibatches": 2}, "sac": {"learning_starts": 32, "batch_size": 8}}[algo]
    data = {"algo": algo, "env_id": env_id, "total_timesteps": 128, "output_dir": folder, "num_envs": 2, "seed": 3}
    return train({**data, "eval_episodes": 1, "algo_kwargs": kwargs, **more}, progress="silent")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    wrappers = {"wrappers": {"normalize_observation": True}}
    return trained(tmp_path_factory.mktemp("runs"), env_kwargs=wrappers).run_dir


def assert_same(one, other):
    assert dataclasses.asdict(one).keys() == dataclasses.asdict(other).keys()
    for name, value in file_content(one).items():
        np.testing.assert_array_equal(value, file_content(other)[name])


def test_the_command_writes_what_it_says(run_dir, tmp_path):
    path = tmp_path / "new" / "demos.npz"
    text = cli("demos", run_dir, "--episodes", 5, "--out", path)
    found = read_demonstrations(path)
    assert f"episodes 5, steps {found.num_steps:,}" in text
    assert f"return   {found.returns.mean():.1f} ± {found.returns.std():.1f}" in text
    assert f"length   {found.lengths.mean():.1f}" in text
    assert str(path) in text
    assert [each.name for each in path.parent.iterdir()] == ["demos.npz"]  # nothing temporary is left
    with np.load(path, allow_pickle=False) as file:
        assert json.loads(str(file["about"]))["env_id"] == "CartPole-v1"
    assert found.obs.shape == (found.num_steps, 4)
    np.testing.assert_array_equal(found.returns, found.lengths)  # CartPole pays 1 for each step
    assert found.terminated[found.episode_end - 1].all()
    assert found.terminated.sum() == 5


def test_the_steps_are_the_policys_in_the_environments_own_terms(run_dir, tmp_path):
    """The policy normalises what it sees; the file holds what the environment gave, and each episode is one."""
    found = record_demonstrations(run_dir, tmp_path / "x.npz", num_episodes=3)
    assert_same(found, read_demonstrations(tmp_path / "x.npz"))
    policy, env = load_policy(run_dir), gym.make("CartPole-v1").unwrapped
    np.testing.assert_array_equal(policy.act(found.obs), found.action)
    for start, end in zip([0, *found.episode_end[:-1]], found.episode_end, strict=True):
        env.reset()
        env.state = found.obs[start].astype(np.float64)
        for t in range(start, end):
            obs, reward, terminated, _, _ = env.step(found.action[t])
            np.testing.assert_allclose(obs, found.next_obs[t], atol=1e-3)
            assert (reward, terminated) == (found.reward[t], found.terminated[t])
            if t + 1 < end:
                np.testing.assert_array_equal(found.next_obs[t], found.obs[t + 1])


def test_the_seed_decides_and_sampling_differs(run_dir, tmp_path):
    def record(**options):
        return record_demonstrations(run_dir, tmp_path / "x.npz", num_episodes=2, **options)

    assert_same(record(), record(seed=3))  # that of the run
    assert not np.array_equal(record().obs[0], record(seed=4).obs[0])
    sampled = record(stochastic=True)
    assert_same(sampled, record(stochastic=True))
    policy = load_policy(run_dir)
    assert (policy.act(sampled.obs) != sampled.action).any()


def test_more_episodes_than_environments_are_divided_among_them(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_training.runtime.evaluation.MAX_PARALLEL", 3)
    found = record_demonstrations(run_dir, tmp_path / "x.npz", num_episodes=8)
    assert len(found.episode_end) == 8
    assert found.episode_end[-1] == found.num_steps == len(found.obs)


def test_actions_are_those_that_the_environment_took(tmp_path):
    """SAC plays in [-1, 1], the pendulum in [-2, 2]; its episodes are truncated after 200 steps."""
    result = trained(tmp_path, "sac", "Pendulum-v1", num_envs=1, total_timesteps=64)
    found = record_demonstrations(result.run_dir, tmp_path / "x.npz", num_episodes=1)
    np.testing.assert_allclose(load_policy(result.run_dir).act(found.obs), found.action, atol=1e-6)
    assert found.truncated.tolist() == [False] * 199 + [True]
    assert not found.terminated.any()


def test_nested_observations_and_actions_from_another_number_survive(tmp_path):
    found = play_randomly("StructuredForTests-v0", {}, 20)
    path = tmp_path / "x.npz"
    save(path, found)
    again = read_demonstrations(path)
    assert_same(found, again)
    assert again.checksum == found.checksum != play_randomly("StructuredForTests-v0", {}, 19).checksum
    env = gym.make("StructuredForTests-v0").unwrapped
    spaces = Spaces(model_space(env.observation_space), action_map(env.action_space, "clip")[1])
    obs, action = in_model_spaces(again, spaces)
    assert set(obs) == {key for key, _ in named_arrays("", obs) for key in [key.removeprefix(".")]}
    np.testing.assert_array_equal(action, found.action + 1)  # the first action is -1
    layout = ObservationLayout(env.observation_space)
    first = layout.empty(1)
    layout.write(first, 0, env.reset()[0])
    for key, array in first.items():
        np.testing.assert_array_equal(obs[key][0], array[0])


def broken(**changes):
    return lambda content: {**content, **{name: change(content[name]) for name, change in changes.items()}}


def without(name):
    return lambda content: {key: value for key, value in content.items() if key != name}


def about(**changes):
    return broken(about=lambda x: np.array(json.dumps({**json.loads(str(x)), **changes})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken(action=lambda x: x[:-1]), "it has 39 actions, but obs has shape"),
        (broken(obs=lambda x: x[:-1]), "it has 40 actions, but obs has shape"),
        (broken(obs=lambda x: np.where(x == x[0], np.nan, x)), "obs is not finite"),
        (broken(reward=lambda x: x.astype(str)), "reward should be numbers"),
        (broken(reward=lambda x: x[:, None]), "reward should be float32"),
        (broken(terminated=lambda x: x.astype(np.int64)), "terminated should be bool"),
        (broken(episode_end=lambda x: x - 1), "episode_end should rise to the number of steps, 40"),
        (broken(episode_end=lambda x: np.array([0, 40])), "episode_end should rise"),
        (broken(episode_end=lambda x: np.array([30, 20, 40])), "episode_end should rise"),
        (lambda content: {k: v if k == "about" else v[:0] for k, v in content.items()}, "it has no steps"),
        (without("about"), "damaged"),
        (without("obs"), "it has no obs"),
        (without("reward"), "damaged"),
        (broken(about=lambda x: np.array("[1]")), "its format"),
        (broken(about=lambda x: np.array("{")), "damaged"),
        (about(format="other"), "its format is not"),
        (about(more=1), "damaged"),
        (broken(action=lambda x: x.astype(object)), "damaged"),
    ],
)
def test_files_whose_arrays_do_not_fit_are_refused(change, message, tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, **change(file_content(play_randomly("CartPole-v1", {}, 40))))
    with pytest.raises(InputError, match=r"x\.npz does not hold demonstrations: ") as caught:
        read_demonstrations(path)
    assert message in str(caught.value)


def test_reading_runs_no_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    content = file_content(play_randomly("CartPole-v1", {}, 40))
    np.savez(tmp_path / "x.npz", **{**content, "obs": np.array([Trap()] * 40, object)})
    with pytest.raises(InputError, match="damaged"):
        read_demonstrations(tmp_path / "x.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation_space": {"space": "Ring"}}, "their spaces cannot be read"),
        ({"action_space": {}}, "their spaces cannot be read"),
        ({"obs": np.zeros((40, 5), np.float32)}, "observations of Box"),
        ({"action": np.full(40, 7)}, "some actions are not in Discrete"),
        ({"action": np.zeros(40, np.float32)}, "some actions are not in Discrete"),
    ],
)
def test_arrays_that_are_not_of_their_spaces_are_refused(change, message):
    given = dataclasses.replace(play_randomly("CartPole-v1", {}, 40), **change)
    env = gym.make("CartPole-v1")
    with pytest.raises(InputError, match=message):
        in_model_spaces(given, Spaces(env.observation_space, env.action_space))


def test_images_are_bytes_and_vectors_are_not():
    """Networks divide bytes by 255, and nothing else."""
    given = play_randomly("CartPole-v1", {}, 10)
    vectors = gym.make("CartPole-v1")
    images = gym.spaces.Box(0, 255, (4,), np.uint8)
    as_images = dataclasses.replace(given, observation_space=space_to_json(images))
    for wrong, space in (
        (dataclasses.replace(given, obs=given.obs.astype(np.uint8)), vectors.observation_space),
        (as_images, images),
    ):
        with pytest.raises(InputError, match=f"should have dtype {space.dtype}, got {wrong.obs.dtype}"):
            in_model_spaces(wrong, Spaces(space, vectors.action_space))


def test_what_cannot_be_recorded_is_an_error(run_dir, tmp_path):
    with pytest.raises(InputError, match="num_episodes should be at least 1"):
        record_demonstrations(run_dir, tmp_path / "x.npz", num_episodes=0)
    with pytest.raises(InputError, match="is a folder"):
        record_demonstrations(run_dir, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        record_demonstrations(run_dir, tmp_path / "file" / "x.npz", num_episodes=1)
    assert "does not exist" in cli("demos", tmp_path / "nothing", code=2)


def test_a_broken_write_leaves_the_old_file(run_dir, tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    record_demonstrations(run_dir, path, num_episodes=1)
    before = path.read_bytes()

    def fail(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demos.np, "savez_compressed", fail)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        record_demonstrations(run_dir, path, num_episodes=1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_module_is_imported_only_where_that_is_allowed(tmp_path):
    config = TrainConfig("ppo", "envs_for_tests:CounterForTests-v0", 32, tmp_path, num_envs=1, eval_episodes=1)
    result = train(dataclasses.replace(config, algo_kwargs={"num_steps": 16, "num_minibatches": 1}), progress="silent")
    words = ("demos", result.run_dir, "--episodes", 1, "--out", tmp_path / "x.npz")
    assert "--allow-import" in cli(*words, code=2)
    assert "episodes 1" in cli(*words, "--allow-import")


def test_the_same_file_is_made_once():
    assert random_demonstrations("CartPole-v1") == random_demonstrations("CartPole-v1")
