"""Videos of episodes: every image of what was played, and nothing that was not."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest

import rl_training.runtime.video
import rl_training.runtime.workflows
from envs_for_tests import CounterEnv
from rl_training import evaluate_checkpoint, load_policy, record_video, train
from rl_training.envs.factory import make_envs
from rl_training.envs.filming import film, filmed_kwargs, frames_per_second
from rl_training.errors import InputError, MissingPackage
from test_cli import cli


class Numbered(CounterEnv):
    """Counts, and draws its count: a grey image of odd size, 40 * episode + 10 * step."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, draws: str = "images") -> None:
        super().__init__(length=3)
        self.render_mode, self.draws = render_mode, draws

    def render(self) -> Any:
        if self.draws == "errors":
            raise RuntimeError("no GL context")
        if self.draws == "text":
            return "abc"
        return np.full((33, 35, 3), 40 * self.episode + 10 * self.t, np.uint8)


if "NumberedForTests-v0" not in gym.registry:
    gym.register("NumberedForTests-v0", Numbered)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    config = {
        "algo": "ppo",
        "env_id": "NumberedForTests-v0",
        "total_timesteps": 32,
        "num_envs": 1,
        "eval_interval": 16,
        "algo_kwargs": {"num_steps": 16, "num_minibatches": 1},
        "output_dir": tmp_path_factory.mktemp("video"),
    }
    return train(config, progress="silent").run_dir


def shades(path) -> list[int]:
    """The grey of each image of a file."""
    with imageio.get_reader(path) as reader:
        return [round(float(image.mean())) for image in reader]


TWO_EPISODES = [0, 10, 20, 30, 40, 50, 60, 70]  # each its first observation and three steps


@pytest.mark.parametrize(("suffix", "error"), [(".gif", 0), (".mp4", 3)])
def test_a_video_shows_whole_episodes_and_no_image_more(suffix, error, run_dir, tmp_path):
    recorded = record_video(run_dir, tmp_path / f"film{suffix}", num_episodes=2)
    assert np.abs(np.subtract(shades(tmp_path / f"film{suffix}"), TWO_EPISODES)).max() <= error
    assert [episode.length for episode in recorded.episodes] == [3, 3]
    assert (recorded.frames, recorded.fps) == (8, 20)
    assert [path.name for path in tmp_path.iterdir()] == [f"film{suffix}"]


def test_it_plays_what_evaluation_would(run_dir, tmp_path):
    policy, env = load_policy(run_dir), CounterEnv()
    obs, _ = env.reset()
    expected = 0.0
    for _ in range(3):
        obs, reward, *_ = env.step(policy.act(obs))
        expected += reward
    recorded = record_video(run_dir, tmp_path / "film.gif", num_episodes=1)
    assert recorded.episodes[0].episode_return == expected


def test_the_seed_of_a_recording_decides_its_actions(run_dir, tmp_path):
    def returns(**options):
        played = record_video(run_dir, tmp_path / "film.gif", num_episodes=6, stochastic=True, **options).episodes
        return [episode.episode_return for episode in played]

    assert returns(seed=1) == returns(seed=1)
    assert len({tuple(returns(seed=seed)) for seed in range(3)}) > 1
    assert record_video(run_dir, tmp_path / "film.gif", num_episodes=1, fps=5).fps == 5


def test_the_record_command(run_dir, tmp_path):
    out = tmp_path / "new" / "film.gif"
    text = cli("record", run_dir, "--out", out, "--episodes", 2, "--best")
    assert "images   8 at 20 per second, 0.4 s" in text
    assert f"wrote    {out}" in text
    assert shades(out) == TWO_EPISODES


@pytest.mark.parametrize(
    ("draws", "error"),
    [
        ("errors", "NumberedForTests-v0 cannot be drawn: RuntimeError: no GL context; .*MUJOCO_GL=egl"),
        ("text", r"NumberedForTests-v0 cannot be drawn: render\(\) should give bytes .*, got str"),
    ],
)
def test_an_environment_that_fails_to_draw_is_named_and_leaves_no_file(draws, error, run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Numbered.__init__, "__defaults__", (None, draws))
    with pytest.raises(InputError, match=error):
        record_video(run_dir, tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())


def test_an_environment_without_images_is_refused_before_anything_is_made():
    with pytest.raises(InputError, match=r"TicTacToe-v0 draws no images: its render modes are ansi, .* rgb_array"):
        filmed_kwargs("TicTacToe-v0", {})
    with pytest.raises(InputError, match="CounterForTests-v0 draws no images: its render modes are none"):
        filmed_kwargs("CounterForTests-v0", {})


def test_a_run_that_cannot_be_filmed_is_one_line_on_the_command_line(tiny_config, tmp_path):
    run = train(tiny_config("ppo", {"env_id": "CounterForTests-v0", "total_timesteps": 32}), progress="silent").run_dir
    assert "render modes are none" in cli("record", run, "--out", tmp_path / "x.mp4", code=2)
    assert not (tmp_path / "x.mp4").exists()


def test_wrong_files_and_numbers_are_refused(run_dir, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=re.escape("film.avi: a video is an .mp4 or a .gif file")):
        record_video(run_dir, tmp_path / "film.avi")
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        record_video(run_dir, tmp_path / "folder.mp4")
    with pytest.raises(InputError, match="fps should be more than 0"):
        record_video(run_dir, tmp_path / "film.mp4", fps=0)
    with pytest.raises(InputError, match="num_episodes should be at least 1"):
        record_video(run_dir, tmp_path / "film.mp4", num_episodes=0)
    monkeypatch.setattr(rl_training.runtime.video, "find_spec", lambda name: None if "ffmpeg" in name else name)
    with pytest.raises(MissingPackage, match=r'imageio_ffmpeg: pip install "rl-training\[video\]"'):
        record_video(run_dir, tmp_path / "film.mp4")


def test_the_screen_is_given_up_before_the_environment_s_module_is_imported(run_dir, tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    seen = []
    checked = rl_training.runtime.workflows.config_of
    monkeypatch.setattr(
        rl_training.runtime.workflows,
        "config_of",
        lambda *given, **options: [seen.append(os.environ.get("MUJOCO_GL")), checked(*given, **options)][1],
    )
    record_video(run_dir, tmp_path / "film.gif", num_episodes=1)
    assert seen[0] == "egl"


def test_the_speed_is_that_of_the_environment():
    kwargs = filmed_kwargs("NumberedForTests-v0", {"wrappers": {"action_repeat": 4}})
    envs = make_envs("NumberedForTests-v0", num_envs=1, seed=0, env_kwargs=kwargs, training=False)
    assert frames_per_second(envs, kwargs) == 5
    envs.close()


def test_filming_can_be_ended_between_two_steps():
    kwargs = filmed_kwargs("NumberedForTests-v0", {})
    envs = make_envs("NumberedForTests-v0", num_envs=2, seed=0, env_kwargs=kwargs, training=False)
    seen = []
    end = film(envs, lambda image: seen.append(int(image[0, 0, 0])))
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    end()
    envs.step(np.zeros(2, np.int64))
    envs.close()
    assert seen == [0, 10]


def test_eval_with_a_video_gives_the_same_results_and_films_the_first_environment(run_dir, tmp_path):
    plain = evaluate_checkpoint(run_dir, num_episodes=3)
    assert evaluate_checkpoint(run_dir, num_episodes=3, video=tmp_path / "film.gif") == plain
    assert shades(tmp_path / "film.gif") == TWO_EPISODES[:4]


def test_eval_takes_best_stochastic_seed_and_prints_json(run_dir):
    words = ["eval", run_dir, "--num-episodes", 20, "--json"]
    usual, best = json.loads(cli(*words)), json.loads(cli(*words, "--best"))
    assert usual["checkpoint"].endswith("step_32")
    assert best["checkpoint"].endswith("best")
    assert usual["returns"].keys() == {"NumberedForTests-v0"}
    assert len(usual["returns"]["NumberedForTests-v0"]) == usual["eval_episodes"] == 20
    assert usual["eval_return_mean"] == pytest.approx(np.mean(usual["returns"]["NumberedForTests-v0"]))
    sampled = [json.loads(cli(*words, "--stochastic", "--seed", seed)) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1]
    assert sampled[0]["seed"] == 1
    assert sampled[0]["returns"] != sampled[2]["returns"]
    assert len(set(sampled[0]["returns"]["NumberedForTests-v0"])) > 1


def test_best_of_a_run_that_was_never_evaluated_is_an_error(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("best"))
    assert "has no checkpoint `best`" in cli("eval", tmp_path / "run", "--best", code=2)
    assert "best" in json.loads(cli("eval", run_dir / "checkpoints" / "step_32", "--best", "--json"))["checkpoint"]
