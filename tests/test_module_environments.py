"""An env_id of the form module:id: what its import can do wrong, and the commands that a run of it prints."""

from __future__ import annotations

import shlex
import warnings

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

from rl_training import ConfigError, TrainConfig, train
from rl_training.envs.factory import adopt, make_envs
from rl_training.errors import InputError
from rl_training.runtime.loading import check_config
from test_cli import CARTPOLE, SMALL, cli

REGISTERS = (
    "import gymnasium\n"
    "gymnasium.register('{name}-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
)


def problem(env_id: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(TrainConfig("ppo", env_id, 100))
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, "cannot be imported: ModuleNotFoundError: No module named '{module}'; install it"),
        ("import numpyy", "cannot be imported: ModuleNotFoundError: No module named 'numpyy'; correct it"),
        ("from math import nope", "cannot be imported: ImportError: cannot import name 'nope'"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("x = 1", "was imported, but it does not register 'Quuxotic-v0'"),
    ],
)
def test_the_error_names_the_module_and_the_cause(tmp_path, monkeypatch, code, expected, request):
    module = f"strange_{abs(hash(request.node.name))}"
    if code is not None:
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = problem(f"{module}:Quuxotic-v0")
    assert found.startswith(f"env_id: module '{module}' {expected.format(module=module)}")
    assert "did you mean" not in found
    with pytest.raises(InputError, match=module):
        make_envs(f"{module}:Quuxotic-v0", num_envs=1, seed=0, env_kwargs={}, training=True)


def test_an_id_that_the_module_nearly_registers_is_suggested(tmp_path, monkeypatch):
    (tmp_path / "registers_one.py").write_text(REGISTERS.format(name="Ourgame"))
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not register 'Ourgame-v1'; did you mean 'Ourgame-v0'?" in problem("registers_one:Ourgame-v1")


def test_another_process_has_the_environment_of_the_main_script_and_warns_of_nothing(tmp_path, monkeypatch):
    """The script may have changed what a module registers."""
    (tmp_path / "registers_game.py").write_text(REGISTERS.format(name="Adopted"))
    monkeypatch.syspath_prepend(tmp_path)
    entry_point = "gymnasium.envs.classic_control:CartPoleEnv"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adopt("registers_game:Adopted-v0", EnvSpec("Adopted-v0", entry_point, max_episode_steps=5))
    assert gym.make("Adopted-v0").spec.max_episode_steps == 5


def test_printed_commands_allow_the_import_that_they_need(tmp_path):
    (tmp_path / "prints.py").write_text(REGISTERS.format(name="Printed"))
    words = ["train", CARTPOLE, *SMALL, "--set", "env_id=prints:Printed-v0", "--run-suffix", "m", "--allow-import"]
    text = cli(*words, cwd=tmp_path)
    printed = {
        line.split()[0]: line.split("rl-training ", 1)[1] for line in text.splitlines() if "rl-training " in line
    }
    assert {"evaluate", "resume"} <= printed.keys()
    assert "eval_return_mean" in cli(*shlex.split(printed["evaluate"]), cwd=tmp_path)
    assert "Trained 1,024 steps" in cli(*shlex.split(printed["resume"]), cwd=tmp_path)
    assert "--allow-import" not in cli("train", CARTPOLE, *SMALL, "--run-suffix", "plain", cwd=tmp_path)


def test_so_does_the_command_printed_on_ctrl_c(tmp_path, monkeypatch):
    (tmp_path / "interrupted.py").write_text(REGISTERS.format(name="Interrupted"))
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig("ppo", "interrupted:Interrupted-v0", 64, num_envs=2, output_dir=tmp_path / "runs")
    result = train(config, progress="silent")

    def interrupt(*_, **__):
        from rl_training import TrainingInterrupted

        raise TrainingInterrupted(result)

    monkeypatch.setattr("rl_training.runtime.workflows.train", interrupt)
    message = cli("train", CARTPOLE, code=130, cwd=tmp_path)
    assert f"resume {result.run_dir} --allow-import" in message
