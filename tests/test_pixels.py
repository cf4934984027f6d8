"""Observations that are images of the environment."""

from __future__ import annotations

import importlib
import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from envs_for_tests import CounterEnv
from rl_training import TrainConfig, evaluate_checkpoint, load_policy, record_video
from rl_training.config import PixelOptions
from rl_training.envs.factory import make_envs
from rl_training.envs.pixels import Pixels, scaled
from rl_training.errors import InputError
from rl_training.runtime.loading import check_config
from test_cli import cli

NAME = "DrawnForTests-v0"


class Drawn(CounterEnv):
    """Draws (episode, step, 7) as a colour: each number is 10 of red, 10 of green, 1 of blue."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, as_dict: str = "") -> None:
        super().__init__(length=3)
        self.render_mode, self.as_dict, self.drawn = render_mode, as_dict, 0
        if as_dict:
            self.observation_space = gym.spaces.Dict({as_dict: self.observation_space})

    def _obs(self) -> Any:
        return {self.as_dict: super()._obs()} if self.as_dict else super()._obs()

    def render(self) -> np.ndarray:
        assert self.render_mode == "rgb_array"
        self.drawn += 1
        return np.full((40, 60, 3), (10 * self.episode, 10 * self.t, 7), np.uint8)


class Undrawn(CounterEnv):
    """Draws images, but its constructor has no render_mode."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(length=3)


MISSING = "PackageMissingForTests-v0"


def __getattr__(name: str) -> Any:
    """The environment of a package that is not installed: Gymnasium's own raise this error when they are imported."""
    if name == "Missing":
        raise gym.error.DependencyNotInstalled("no such package")
    raise AttributeError(name)


if NAME not in gym.registry:
    gym.register(NAME, Drawn)
    gym.register("UndrawnForTests-v0", Undrawn)
    gym.register(MISSING, f"{__name__}:Missing")


def envs_of(num_envs: int = 1, *, env_id: str = NAME, backend: str = "auto", **wrappers: Any) -> Any:
    kwargs = {"wrappers": wrappers, "backend": backend}
    return make_envs(env_id, num_envs=num_envs, seed=0, env_kwargs=kwargs, training=True)


def colours(obs: np.ndarray) -> list[list[int]]:
    """Of images [N, H, W, 3] of one colour each."""
    assert (obs == obs[:, :1, :1]).all()
    return obs[:, 0, 0].tolist()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_image_shows_the_state_that_the_action_led_to(backend):
    envs = envs_of(2, backend=backend, pixels={"size": 16})
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    assert colours(envs.reset()) == [[0, 0, 7]] * 2
    for t in (1, 2):
        assert colours(envs.step(np.zeros(2, np.int64)).obs) == [[0, 10 * t, 7]] * 2
    last = envs.step(np.zeros(2, np.int64))
    assert last.terminated.all()
    assert colours(last.next_obs) == [[0, 30, 7]] * 2  # before the reset
    assert colours(last.obs) == [[10, 0, 7]] * 2
    envs.close()


def test_the_state_can_be_kept_beside_the_image():
    envs = envs_of(pixels={"size": 16, "keep_state": True})
    obs = envs.reset()
    assert set(obs) == {"pixels", "state"}
    obs = envs.step(np.zeros(1, np.int64)).obs
    assert obs["state"].tolist() == [[0, 1]]
    assert colours(obs["pixels"]) == [[0, 10, 7]]


def test_of_a_dict_the_keys_are_kept():
    options = PixelOptions(size=16, keep_state=True)
    env = Pixels(gym.make(NAME, render_mode="rgb_array", as_dict="count"), options)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert set(obs) == {"pixels", "count"}
    with pytest.raises(InputError, match="has a key 'pixels' already"):
        Pixels(gym.make(NAME, render_mode="rgb_array", as_dict="pixels"), options)


def test_a_repeated_action_draws_once_and_frames_are_stacked():
    envs = envs_of(pixels={"size": 16}, action_repeat=2, frame_stack=2)
    assert envs.reset().shape == (1, 2, 16, 16, 3)
    drawn = envs.envs[0].unwrapped.drawn
    obs = envs.step(np.zeros(1, np.int64)).obs
    assert envs.envs[0].unwrapped.drawn == drawn + 1
    assert [colours(obs[:, frame]) for frame in (0, 1)] == [[[0, 0, 7]], [[0, 20, 7]]]


def test_a_pixel_is_the_mean_of_those_that_it_covers():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
    expected = np.zeros((16, 16, 3))
    for row in range(16):
        for column in range(16):
            for channel in range(3):
                part = image[3 * row : 3 * row + 3, 4 * column : 4 * column + 4, channel]
                expected[row, column, channel] = sum(int(x) for x in part.flat) / 12
    assert np.abs(scaled(image, 16, grayscale=False) - expected).max() <= 0.5 + 1e-4
    grey = scaled(image, 16, grayscale=True)
    assert grey.shape == (16, 16, 1)
    weighted = 0.299 * expected[..., 0] + 0.587 * expected[..., 1] + 0.114 * expected[..., 2]
    assert np.abs(grey[..., 0] - weighted).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("shape", [(50, 33, 3), (7, 90, 3), (16, 16, 3)])
@pytest.mark.parametrize("grayscale", [False, True])
def test_an_image_of_any_size_keeps_its_brightness(shape, grayscale):
    assert (scaled(np.full(shape, 255, np.uint8), 16, grayscale=grayscale) == 255).all()
    halves = np.zeros(shape, np.uint8)
    halves[:, shape[1] // 2 + 1 :] = 200
    seen = scaled(halves, 16, grayscale=grayscale)
    assert (seen[:, :7] == 0).all()
    assert (seen[:, 10:] == 200).all()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "error"),
    [
        ("TicTacToe-v0", {}, "TicTacToe-v0 draws no images: its render modes are ansi, and rgb_array is needed"),
        (NAME, {"render_mode": "human"}, f"render_mode of {NAME}: wrappers.pixels needs 'rgb_array', got 'human'"),
        ("UndrawnForTests-v0", {}, "the constructor of 'UndrawnForTests-v0' takes no 'render_mode': give it one"),
        (MISSING, {}, "cannot be made: no such package"),
        ("OnlyInEnvPool-v1", {"backend": "envpool"}, r"envpool"),
        ("CartPole-v1", {"backend": "vector"}, "takes no wrappers in vectorised form"),
        ("ALE/Pong-v5", {"wrappers": {"pixels": True, "atari": True}}, "wrappers.atari gives images already"),
    ],
)
def test_what_cannot_be_drawn_is_refused(env_id, kwargs, error):
    if env_id.startswith("ALE"):
        pytest.importorskip("ale_py")
    with pytest.raises(InputError, match=error):
        make_envs(env_id, num_envs=2, seed=0, env_kwargs={"wrappers": {"pixels": True}, **kwargs}, training=True)


def test_workers_draw_after_the_parent_has_used_threads():
    """A forked process has none of its parent's threads, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).exp().sum()
        kwargs = {"wrappers": {"pixels": True}, "backend": "async", "env_timeout": 20.0}
        envs = make_envs("CartPole-v1", num_envs=2, seed=0, env_kwargs=kwargs, training=True)
        assert envs.reset().shape == (2, 64, 64, 3)
        envs.close()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("key", "wrappers", "expected"),
    [
        ("env_kwargs", {"wrappers": {"pixels": True}}, "egl"),
        ("eval_env_kwargs", {"wrappers": {"pixels": {"size": 32}}}, "egl"),
        ("env_kwargs", {"wrappers": {"pixels": False}}, None),
    ],
)
def test_the_screen_is_given_up_before_a_module_is_imported(key, wrappers, expected, tmp_path, monkeypatch):
    """MuJoCo chooses how it draws when it is imported."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    module = f"draws_{key}_{expected}"
    code = "import gymnasium, os\nSEEN = os.environ.get('MUJOCO_GL')\n"
    code += f"gymnasium.register('{module}-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    check_config(TrainConfig("ppo", f"{module}:{module}-v0", 100, **{key: wrappers}))
    assert expected == importlib.import_module(module).SEEN


def test_many_environments_are_not_vectorised():
    envs = envs_of(16, env_id="CartPole-v1", pixels=True)
    assert envs.reset().shape == (16, 64, 64, 3)


def test_a_run_on_images_is_trained_evaluated_filmed_and_used(tmp_path):
    config = {
        "algo": "ppo",
        "env_id": NAME,
        "total_timesteps": 64,
        "num_envs": 2,
        "eval_episodes": 2,
        "checkpoint_interval": 32,
        "env_kwargs": {"wrappers": {"pixels": {"size": 40, "grayscale": True}, "frame_stack": 2}},
        "algo_kwargs": {"num_steps": 16, "num_minibatches": 1, "update_epochs": 1},
        "output_dir": str(tmp_path / "runs"),
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    cli("train", path)
    run = next((tmp_path / "runs").iterdir())
    assert load_policy(run).act(np.zeros((2, 40, 40, 1), np.uint8)) in range(5)
    assert evaluate_checkpoint(run, num_episodes=2)["eval_return_mean"] >= 60  # 10 + 20 + 30, and the actions
    assert record_video(run, tmp_path / "film.gif", num_episodes=1).frames == 4
