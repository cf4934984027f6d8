"""What an environment does wrong is an error that names it, the step, the entry and the value, on every backend."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from typer.testing import CliRunner

from rl_training import train
from rl_training.cli import app
from rl_training.envs.backends import VectorEnvs
from rl_training.envs.factory import make_envs
from rl_training.envs.faults import EnvironmentFault, observation_problem
from rl_training.envs.runner import BatchChecks, EnvRunner
from rl_training.errors import InputError
from rl_training.types import Decision

GOOD = np.zeros(3, np.float32)
NAN, INF = np.array([0, np.nan, 0], np.float32), np.array([0, 0, np.inf], np.float32)


class Faulty(gym.Env):
    """Flawless but for what `fault` names, at step `at` of an episode, or at the `begin` of one."""

    def __init__(self, fault: str = "", at: int = 2, box: str = "vector") -> None:
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = vector if box == "vector" else spaces.Dict({"a": vector, "n": spaces.Discrete(2)})
        self.action_space = spaces.Discrete(2)
        self.fault, self.at, self.t, self.episode = fault, at, 0, -1

    def _obs(self, value: Any = GOOD, n: Any = 1) -> Any:
        return value if isinstance(self.observation_space, spaces.Box) else {"a": value, "n": n}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        fault = self.fault
        if fault == "reset raises":
            raise KeyError("no such level")
        if fault == "bare reset":
            return self._obs()
        if fault == "reset nan":
            return self._obs(NAN), {}
        if fault == "reset shape":
            return self._obs(np.zeros(2, np.float32)), {}
        if fault == "late reset shape" and self.episode == 7:
            return self._obs(np.zeros(1, np.float32)), {}
        if fault == "keys":
            return {"a": GOOD}, {}
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t == 30
        if self.t != self.at:
            return self._obs(), 1.0, over, False, {}
        match self.fault:
            case "step raises":
                raise ZeroDivisionError("the physics blew up")
            case "hangs":
                time.sleep(60)
            case "dies":
                os._exit(7)
            case "four":
                return self._obs(), 1.0, False, {}
            case "nan":
                return self._obs(NAN), 1.0, False, False, {}
            case "inf":
                return self._obs(INF), 1.0, False, False, {}
            case "shape":
                return self._obs(np.zeros(1, np.float32)), 1.0, False, False, {}
            case "dtype":
                return self._obs(np.array(["a", "b", "c"])), 1.0, False, False, {}
            case "discrete":
                return self._obs(n=2), 1.0, False, False, {}
            case "reward nan":
                return self._obs(), float("nan"), False, False, {}
            case "reward inf":
                return self._obs(), float("inf"), False, False, {}
            case "reward array":
                return self._obs(), np.array([1.0]), False, False, {}
            case "reward None":
                return self._obs(), None, False, False, {}
            case "flag":
                return self._obs(), 1.0, 0, False, {}
        return self._obs(), 1.0, over, False, {}


if "FaultyForTests-v0" not in gym.registry:
    gym.register("FaultyForTests-v0", Faulty)

WHERE = "environment 'FaultyForTests-v0', number 0, at "
FAULTS = {  # at the second step, where everything is checked; and what the error says
    "bare reset": rf"{WHERE}the beginning of its episode 0: reset\(\) should return \(observation, info\), got an arr",
    "reset nan": rf"{WHERE}the beginning of its episode 0: the observation is not finite: \[0.0, nan, 0.0\]",
    "reset shape": rf"{WHERE}the beginning of its episode 0: .* should have shape \(3,\), .* an array of shape \(2,\)",
    "four": rf"{WHERE}step 2 of its episode 0: step\(\) raised ValueError.*should return \(observation, reward, term",
    "nan": rf"{WHERE}step 2 of its episode 0: the observation is not finite: \[0.0, nan, 0.0\]",
    "inf": rf"{WHERE}step 2 of its episode 0: the observation is not finite: \[0.0, 0.0, inf\]",
    "shape": rf"{WHERE}step 2 of its episode 0: the observation should have shape \(3,\)",
    "dtype": rf"{WHERE}step 2 of its episode 0: the observation should have dtype float32",
    "reward nan": rf"{WHERE}step 2 of its episode 0: the reward is nan",
    "reward inf": rf"{WHERE}step 2 of its episode 0: the reward is inf",
    "reward array": rf"{WHERE}step 2 of its episode 0: the reward should be a number, got an array of shape \(1,\)",
    "reward None": rf"{WHERE}step 2 of its episode 0: the reward should be a number, got None",
    "flag": rf"{WHERE}step 2 of its episode 0: terminated should be a bool, got 0 \(int\)",
    "step raises": rf"{WHERE}step 2 of its episode 0: step\(\) raised ZeroDivisionError: the physics blew up",
    "reset raises": rf"{WHERE}the beginning of its episode 0: reset\(\) raised KeyError: 'no such level'",
}
LATER = {key: FAULTS[key].replace("episode 0", "episode").replace("step 2", "step 25") for key in ("nan", "reward inf")}


def zeros(obs: Any, memory: Any, *, explore: bool, rng: Any) -> Decision:
    return Decision(np.zeros(2, np.int64), memory, {})


def play(backend: str, steps: int = 30, **kwargs: Any) -> None:
    """Two environments, of which the first is named: both do the same."""
    env_kwargs = {"backend": backend, **kwargs}
    envs = make_envs("FaultyForTests-v0", num_envs=2, seed=0, env_kwargs=env_kwargs, training=True)
    try:
        runner = EnvRunner(envs, seed=0)
        for _ in range(steps):
            runner.step(zeros)
    finally:
        envs.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    with pytest.raises(EnvironmentFault, match=FAULTS[fault]):
        play("sync", fault=fault)


@pytest.mark.parametrize("fault", ["bare reset", "four", "nan", "reward array", "step raises"])
def test_a_fault_in_another_process_is_named(fault: str, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(EnvironmentFault, match=FAULTS[fault]) as caught:
        play("async", fault=fault)
    if fault == "step raises":
        assert "in step\n" in str(caught.value.__cause__), "with the traceback that the process had"
        assert "ZeroDivisionError: the physics blew up" in caught.value.trace
    assert not [warning for warning in recwarn if "Worker" in str(warning.message)]


@pytest.mark.parametrize("fault", LATER)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_later_steps_are_checked_too(backend: str, fault: str) -> None:
    with pytest.raises(EnvironmentFault, match=LATER[fault]):
        play(backend, fault=fault, at=25)


@pytest.mark.parametrize("fault", ["reward None", "dtype"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_what_cannot_be_stored_is_named_at_any_time(backend: str, fault: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 'FaultyForTests-v0'"):
        play(backend, fault=fault, at=25)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("at", [2, 25])
@pytest.mark.parametrize(
    ("fault", "message"), [("nan", "observation 'a' is not finite"), ("discrete", "observation 'n' is .*2")]
)
def test_the_entry_of_a_dict_is_named(fault: str, message: str, at: int, backend: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        play(backend, fault=fault, at=at, box="dict")


def test_missing_keys_are_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"should have the keys \['a', 'n'\].* got \['a'\]"):
        play("sync", fault="keys", box="dict")


def test_flawless_environments_pass() -> None:
    play("sync", steps=70)
    play("sync", steps=70, box="dict")


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), np.array([1, 2]), np.array([0.5, 1.5])),
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, 1.0], [0.5, None]),
        (spaces.Box(-np.inf, np.inf, (), np.float32), 3.0, np.inf),
        (spaces.Discrete(3, start=1), 3, 4),
        (spaces.Discrete(3), np.int64(2), 1.0),
        (spaces.MultiDiscrete([2, 3], start=[1, 1]), np.array([2, 3]), np.array([3, 3])),
        (spaces.MultiBinary(2), np.array([0, 1], np.int8), np.zeros(3, np.int8)),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), (0, 1), (0,)),
    ],
    ids=str,
)
def test_what_belongs_to_a_space(space: gym.Space, good: Any, bad: Any) -> None:
    assert observation_problem(space, good) is None
    assert observation_problem(space, bad) is not None


def test_images_are_not_searched_for_what_they_cannot_hold() -> None:
    assert BatchChecks(spaces.Box(0, 255, (4, 4), np.uint8), 2).floats == []


class FaultyVector(VectorEnv):
    """Two vectorised environments with one fault."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, fault: str) -> None:
        self.num_envs, self.fault, self.t = 2, fault, 0
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        obs = np.zeros((2, 3), np.float32)
        return obs if self.fault == "bare reset" else (obs[:, :2] if self.fault == "reset shape" else obs, {})

    def step(self, actions: Any) -> Any:
        self.t += 1
        obs, reward, flags = np.zeros((2, 3), np.float32), np.ones(2), np.zeros(2, bool)
        if self.t == 25:
            if self.fault == "raises":
                raise ZeroDivisionError("the physics blew up")
            obs[1, 0] = np.nan if self.fault == "nan" else 0
            reward[1] = np.inf if self.fault == "reward" else 0
        if self.fault == "reward shape":
            reward = reward[:, None]
        if self.fault == "four":
            return obs, reward, flags, {}
        return obs, reward, flags, flags, {}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("bare reset", r"reset\(\) should return \(observation, info\)"),
        ("reset shape", r"the observations should have shape \(2, 3\), got \(2, 2\)"),
        ("four", r"step 1: step\(\) raised ValueError.*should return \(observation, reward, term"),
        ("nan", "number 1, at step 25 of its episode: the observation is not finite"),
        ("reward", "number 1, at step 25 of its episode: the reward is inf"),
        ("reward shape", r"reward should have shape \(2,\), got \(2, 1\)"),
        ("raises", r"step 25: step\(\) raised ZeroDivisionError: the physics blew up"),
    ],
)
def test_a_vectorised_environment_is_checked(fault: str, message: str) -> None:
    envs = VectorEnvs(FaultyVector(fault))
    envs.env_id = "Some-v0"
    with pytest.raises(EnvironmentFault, match=rf"environment 'Some-v0'.*{message}"):
        runner = EnvRunner(envs, seed=0)
        for _ in range(30):
            runner.step(zeros)


def test_an_environment_that_hangs_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=rf"{WHERE}step 2 of its episode 0: no answer within 0.5 s.*env_timeout"):
        play("async", fault="hangs", env_timeout=0.5)


def test_an_environment_whose_process_dies_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=rf"{WHERE}step 2 of its episode 0: its process ended with exit code 7"):
        play("async", fault="dies")


FAILING = {"env_id": "FaultyForTests-v0", "checkpoint_interval": 8, "env_kwargs": {"fault": "step raises", "at": 25}}


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_the_last_good_checkpoint_is_named(backend: str, tiny_config: Any, tmp_path: Any) -> None:
    config = tiny_config("a2c", FAILING | {"env_kwargs": FAILING["env_kwargs"] | {"backend": backend}}, num_steps=4)
    with pytest.raises(EnvironmentFault, match=r"the last good checkpoint is .*step_48") as caught:
        train(config, progress="silent")
    assert caught.value.__cause__ is not None
    assert (next((tmp_path / "runs").iterdir()) / "checkpoints" / "step_48").is_dir()


def test_a_fault_in_evaluation_says_so(tiny_config: Any) -> None:
    config = {"env_id": "FaultyForTests-v0", "eval_env_kwargs": {"fault": "nan"}, "total_timesteps": 32}
    with pytest.raises(EnvironmentFault, match=rf"in evaluation, {WHERE}step 2.*the last good checkpoint is .*step_32"):
        train(tiny_config("a2c", config), progress="silent")


def test_the_command_line_shows_the_environments_own_traceback(tmp_path: Any) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "algo: ppo\nenv_id: FaultyForTests-v0\ntotal_timesteps: 512\nenv_kwargs: {fault: step raises}\n"
        f"num_envs: 2\noutput_dir: {tmp_path / 'runs'}\nalgo_kwargs: {{num_steps: 16}}\n"
    )
    result = CliRunner().invoke(app, ["train", str(config), "--progress", "silent"])
    assert result.exit_code == 2
    first, *rest = result.stderr.splitlines()
    assert first.startswith(
        "error: environment 'FaultyForTests-v0', number 0, at step 2 of its episode 0: step() raised"
    )
    assert rest[1] == "Traceback (most recent call last):"
    assert rest[-1] == "ZeroDivisionError: the physics blew up"
    assert sum("Traceback" in line for line in rest) == 1


def test_errors_of_input_pass_as_they_are() -> None:
    """A board game that is given a move it does not have says so itself."""
    envs = make_envs("TicTacToe-v0", num_envs=1, seed=0, env_kwargs={}, training=True)
    envs.reset()
    with pytest.raises(InputError, match=r"^TicTacToe has no action 9"):
        envs.step(np.array([9]))


class Fragile(gym.Env):
    """Cannot be made by the second of its makers; starts a process, which its `close` ends in its own time."""

    observation_space, action_space = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)

    def __init__(self, folder: str, fault: str = "") -> None:
        self.folder, self.fault, self.t = Path(folder), fault, 0
        name = multiprocessing.current_process().name
        if fault == "constructor" and "Worker" in name and name.endswith("1"):
            raise OSError("the port is taken")
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t = 0
        return GOOD, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.fault == "raises" and self.t == 3:
            raise ZeroDivisionError("the physics blew up")
        return GOOD, 1.0, False, False, {}

    def close(self) -> None:
        self.child.terminate()
        self.child.wait()
        (self.folder / str(os.getpid())).touch()


if "FragileForTests-v0" not in gym.registry:
    gym.register("FragileForTests-v0", Fragile)


def fragile(tmp_path: Path, fault: str = "") -> Any:
    kwargs = {"backend": "async", "folder": str(tmp_path), "fault": fault}
    return make_envs("FragileForTests-v0", num_envs=2, seed=0, env_kwargs=kwargs, training=True)


def test_an_environment_that_cannot_be_made_in_its_process_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"'FragileForTests-v0', number 1: its constructor raised OSError: the port"
    ):
        fragile(tmp_path, "constructor")


def test_an_environment_may_close_after_an_error_and_end_its_own_processes(tmp_path: Path) -> None:
    """It runs in a process that ignores the signals of its group; its children do not."""
    envs = fragile(tmp_path, "raises")
    envs.reset()
    with pytest.raises(EnvironmentFault, match="blew up"):
        for _ in range(5):
            envs.step(np.zeros(2, np.int64))
    workers = {str(process.pid) for process in envs.env.processes}
    envs.close()
    assert workers <= {path.name for path in tmp_path.iterdir()}  # each has waited for its child to end


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_shape_that_would_be_broadcast_is_an_error_at_any_time(backend: str) -> None:
    kwargs = {"backend": backend, "fault": "late reset shape", "at": 99}
    envs = make_envs("FaultyForTests-v0", num_envs=2, seed=0, env_kwargs=kwargs, training=True)
    envs.reset()
    try:
        with pytest.raises(EnvironmentFault, match=r"number 0, at the beginning of its episode 7: .* shape \(3,\)"):
            for _ in range(30 * 8):
                envs.step(np.zeros(2, np.int64))
    finally:
        envs.close()
