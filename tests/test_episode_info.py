"""Success and other numbers of an episode's last info: as means over episodes in the log, however they are stepped."""

from __future__ import annotations

import json
from functools import partial
from statistics import fmean
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import evaluate_checkpoint, resume_training, train
from rl_training.envs.backends import EnvPoolEnvs, VectorEnvs
from rl_training.envs.episode_info import batch_values, info_means, values_of
from rl_training.envs.episodes import Episodes
from rl_training.envs.factory import make_envs
from rl_training.envs.faults import EnvironmentFault
from rl_training.envs.runner import EnvRunner, FinishedEpisode
from rl_training.envs.runner_state import RunnerState
from rl_training.types import Decision


class Told(gym.Env):
    """Episodes of `length` steps. The info has the number of the episode, and at its end whether that is even."""

    def __init__(self, length: int = 3, first: int = 0, wrong: bool = False) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.episode, self.wrong = length, first - 1, wrong

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        self.draw = self.np_random.random()
        return np.zeros(2, np.float32), {"number": -1000.0}  # that of a reset does not count

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.length
        info: dict[str, Any] = {"number": self.episode + 0.25 * self.t, "draw": self.draw}
        if over:
            info["is_success"] = self.episode % 2 == 0
            info["rare"] = "text" if self.wrong else np.array([7])
            if self.episode % 2 and not self.wrong:
                del info["rare"]
        return np.zeros(2, np.float32), 1.0, over, False, info


gym.register("Told-v0", f"{__name__}:Told")
KEYS = ("number", "rare")


class ToldPool:
    """The same as EnvPool would give it: infos are arrays, and the caller resets."""

    def __init__(self, envs: list[gym.Env]) -> None:
        self.envs = envs
        self.observation_space, self.action_space = envs[0].observation_space, envs[0].action_space

    def reset(self, ids: Any = None) -> tuple[Any, dict[str, Any]]:
        ids = np.arange(len(self.envs)) if ids is None else ids
        return np.stack([self.envs[i].reset()[0] for i in ids]), {"env_id": np.asarray(ids)}

    def step(self, action: Any) -> tuple[Any, ...]:
        rows = [env.step(0) for env in self.envs]
        info = {name: np.array([row[4].get(name, 0) for row in rows], float) for name in ("number", "is_success")}
        return (*(np.array([row[i] for row in rows]) for i in range(4)), info)

    def close(self) -> None: ...


LENGTHS = (2, 3)
MAKE = [partial(Told, length=length) for length in LENGTHS]


def vector(mode: AutoresetMode) -> VectorEnvs:
    return VectorEnvs(SyncVectorEnv(MAKE, autoreset_mode=mode), log_info=KEYS)


def wrapped(mode: AutoresetMode) -> VectorEnvs:
    make = [lambda i=i, one=one: Episodes(one(), seed=0, index=i, log_info=KEYS) for i, one in enumerate(MAKE)]
    return VectorEnvs(SyncVectorEnv(make, autoreset_mode=mode), log_info=KEYS)


BACKENDS = {
    "next_step": partial(vector, AutoresetMode.NEXT_STEP),
    "same_step": partial(vector, AutoresetMode.SAME_STEP),
    "disabled": partial(vector, AutoresetMode.DISABLED),
    "episodes": partial(wrapped, AutoresetMode.SAME_STEP),
}


def still(obs: Any, memory: Any, **_: Any) -> Decision:
    return Decision(np.zeros(len(obs), np.int64), {}, {})


def played(envs: Any, steps: int = 14) -> list[FinishedEpisode]:
    runner, found = EnvRunner(envs, seed=0), []
    for _ in range(steps):
        runner.step(still)
        found += runner.statistics.finished
    assert [dict(info) for info in runner.statistics.recent_infos] == [dict(episode.info) for episode in found]
    return found


def expected(env: int, count: int, first: int = 0) -> list[dict[str, float]]:
    """By hand: of every episode its number and a quarter for each step, and a 7 of every second one."""
    numbers = range(first, first + count)
    rows = [{"is_success": float(n % 2 == 0), "number": n + 0.25 * LENGTHS[env], "rare": 7.0} for n in numbers]
    return [row if row["is_success"] else {key: row[key] for key in ("is_success", "number")} for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_those_of_the_last_step(backend: str) -> None:
    episodes = played(BACKENDS[backend]())
    for env in (0, 1):
        infos = [dict(episode.info) for episode in episodes if episode.env == env]
        assert len(infos) >= 3
        # A vectorised environment may have been reset once more before the first step.
        assert infos == expected(env, len(infos), first=int(infos[0]["number"] - 0.25 * LENGTHS[env]))


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_values_of_made_environments(backend: str) -> None:
    kwargs = {"backend": backend, "length": 3}
    envs = make_envs("Told-v0", num_envs=2, seed=0, env_kwargs=kwargs, training=True, log_info=["number"])
    try:
        episodes = played(envs, 7)
    finally:
        envs.close()
    assert [dict(episode.info) for episode in episodes if episode.env == 1] == [
        {"is_success": 1.0, "number": 0.75},
        {"is_success": 0.0, "number": 1.75},
    ]


def test_values_of_envpool() -> None:
    episodes = played(EnvPoolEnvs(ToldPool([make() for make in MAKE]), num_envs=2, log_info=KEYS), 6)
    infos = [dict(episode.info) for episode in episodes if episode.env == 0]
    assert infos == [{"is_success": float(n % 2 == 0), "number": n + 0.5} for n in range(3)]


def test_masks_tell_which_environments_have_a_value() -> None:
    infos = {"number": np.array([1.0, 2.0, 3.0]), "_number": np.array([True, False, True]), "all": np.array([4, 5, 6])}
    values = batch_values(infos, [1, 2], ("number", "all", "none"), "here")
    assert values == {1: {"all": 5.0}, 2: {"number": 3.0, "all": 6.0}}


def test_what_is_no_number_is_named() -> None:
    info = {"a": True, "b": np.float32(2), "c": np.array([[3]])}
    assert values_of(info, "abcd", "") == {"a": 1.0, "b": 2.0, "c": 3.0}
    kwargs = {"length": 2, "wrong": True}
    envs = make_envs("Told-v0", num_envs=1, seed=0, env_kwargs=kwargs, training=True, log_info=["rare"])
    where = r"'Told-v0', number 0, at step 2 .*"
    with pytest.raises(EnvironmentFault, match=where + r"info\['rare'\] should be a number.*'text'"):
        played(envs)


def test_means_are_over_the_episodes_that_have_a_value() -> None:
    episodes = [{"is_success": 1.0, "x": 3.0}, {"is_success": 0.0}, {"x": 5.0}]
    assert info_means("eval", episodes) == {"eval_success_rate": 0.5, "eval_info_x": 4.0}
    assert info_means("train", []) == {}


def test_a_checkpoint_keeps_the_values_of_recent_episodes() -> None:
    kwargs = {"length": 2}
    first, second = (
        EnvRunner(make_envs("Told-v0", num_envs=2, seed=0, env_kwargs=kwargs, training=True), seed=0) for _ in range(2)
    )
    for _ in range(5):
        first.step(still)
    RunnerState(second).load_state_dict(RunnerState(first).state_dict())
    assert list(second.statistics.recent_infos) == list(first.statistics.recent_infos)
    assert len(second.statistics.recent_infos) == 4


def lines(run_dir: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def told_config(tiny_config: Any, algo: str, **config: Any) -> Any:
    base = {"env_id": "Told-v0", "log_info": ["number"], "log_interval": 64, "eval_interval": 128, "eval_episodes": 4}
    return tiny_config(algo, base | config)


@pytest.mark.parametrize("algo", ["a2c", "dqn"])
def test_the_log_has_success_and_what_the_config_names(algo: str, tiny_config: Any, capsys: Any) -> None:
    result = train(told_config(tiny_config, algo, log_info=["number", "nunber"]), progress="plain")
    logged = lines(result.run_dir)
    train_lines, eval_lines = ([line for line in logged if line["kind"] == kind] for kind in ("train", "eval"))
    # 64 steps of two environments are 10 whole episodes of 3 steps in each, of numbers 0 to 9, that end 0.75 later.
    assert train_lines[0]["train_success_rate"] == 0.5
    assert train_lines[0]["train_info_number"] == pytest.approx(fmean(range(10)) + 0.75)
    assert eval_lines[0]["eval_success_rate"] == 1.0, "of four environments the first episode each, which is number 0"
    assert eval_lines[0]["eval_info_number"] == 0.75
    assert result.metrics["eval_success_rate"] == 1.0
    text = capsys.readouterr().out
    assert text.count("no episode so far had a number 'nunber'") == 1
    assert "100% succeeded" in text


def test_a_resumed_run_and_an_evaluation_of_a_checkpoint_log_the_same(tiny_config: Any) -> None:
    config = told_config(tiny_config, "a2c", log_info=["draw"])
    whole = train(config, progress="silent")
    half = train(config, callbacks=[lambda run: run.stop("half") if run.step >= 128 else None], progress="silent")
    resumed = resume_training(half.run_dir, progress="silent")
    last, all_of_it = lines(resumed.run_dir), lines(whole.run_dir)
    for name in ("train_info_draw", "eval_info_draw", "eval_success_rate"):
        assert [line.get(name) for line in last] == [line.get(name) for line in all_of_it[3:]]
        assert 0 < resumed.metrics[name] == whole.metrics[name]
    assert evaluate_checkpoint(whole.run_dir)["eval_info_draw"] == whole.metrics["eval_info_draw"]


def test_actors_in_processes_send_what_is_logged(tiny_config: Any) -> None:
    execution = {"backend": "process", "actors": 2, "queue": 0}
    result = train(told_config(tiny_config, "impala", execution=execution), progress="silent")
    first = lines(result.run_dir)[0]
    assert first["train_info_number"] == pytest.approx(fmean(range(10)) + 0.75)
    assert first["train_success_rate"] == 0.5
