"""The SAC reference script says what it did: a return, a run folder, an action within Pendulum's bounds."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import REPOSITORY
from rl_training import evaluate_checkpoint


def test_the_script_trains_evaluates_and_acts(tmp_path):
    script = REPOSITORY / "examples" / "sac_pendulum_reference.py"
    words = ["--total-timesteps", "300", "--eval-episodes", "3", "--output-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=True)
    said = re.search(r"return (-\d+\.\d) ± .* over 3 episodes", done.stdout)
    torque = re.search(r"first torque (-?\d\.\d+)", done.stdout)
    assert said
    assert torque
    assert abs(float(torque[1])) <= 2.0
    (run_dir,) = tmp_path.iterdir()
    assert str(run_dir) in done.stdout
    again = evaluate_checkpoint(run_dir, num_episodes=3)["eval_return_mean"]
    assert float(said[1]) == round(again, 1)
