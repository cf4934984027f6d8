"""Environments that make trouble in the process that steps them, and where that is known from outside."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Mischief(gym.Env):
    """Episodes of eight steps, whose observations are random. At step `at` of a process it does what `fault` says.

    It does so `times` times in all, counted by files in `folder` over all processes.
    """

    def __init__(self, folder: str = "", fault: str = "", at: int = 20, times: int = 1) -> None:
        self.observation_space, self.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3)
        self.folder, self.fault, self.at, self.times = Path(folder), fault, at, times
        self.t = self.steps = 0
        if fault == "cannot be made" and self.my_turn():
            raise RuntimeError("no licence")
        if fault == "simulator":
            self.simulator = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def my_turn(self) -> bool:
        for number in range(self.times):
            try:
                os.close(os.open(self.folder / f"{self.fault}{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t, self.steps = self.t + 1, self.steps + 1
        if self.fault and self.steps == self.at and self.my_turn():
            self.make_trouble()
        return self.np_random.normal(size=2).astype(np.float32), float(action == 1), self.t == 8, False, {}

    def make_trouble(self) -> None:
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raises":
            raise RuntimeError("the gripper broke")
        if self.fault == "exits":
            raise SystemExit(3)
        if self.fault == "crashes":
            ctypes.string_at(0)
        if self.fault == "hangs":
            time.sleep(600)
        if self.fault == "keeps the interpreter":
            ctypes.PyDLL(None).sleep(600)
        if self.fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)


gym.register("MischiefForTests-v0", Mischief)
