"""A headless Chromium, driven through its debugging pipe: messages of JSON that end with a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT = 60.0  # seconds for an answer
# The pipes are numbers 3 and 4 of the browser, whatever their numbers are here.
LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """An empty page. The profile is a folder that only this browser uses."""
    assert CHROMIUM is not None
    reads, to_browser = os.pipe()
    from_browser, writes = os.pipe()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    launch = [sys.executable, "-S", "-c", LAUNCH, str(reads), str(writes), *command]
    process = subprocess.Popen(launch, pass_fds=(reads, writes), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.close(reads)
    os.close(writes)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)  # the browser ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser)


class Page:
    """One tab. `errors`: all that its console and its scripts have complained of."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._waiting = write, read, b""
        self._count, self._session = 0, ""
        self.errors: list[str] = []
        self.loaded = False
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._read, 1 << 20) if ready else b""
            if not block:
                raise TimeoutError("the browser does not answer")
            self._waiting += block
        message, _, self._waiting = self._waiting.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Log.entryAdded":
            self.errors.append(str(parameters["entry"]["text"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(" ".join(str(each.get("value")) for each in parameters["args"]))

    def open(self, path: Path) -> None:
        self.loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self._note(self._next())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.wait_for_frame()

    def wait_for_frame(self) -> None:
        """Until what scripts have asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 1) -> None:
        buttons = {"mouseMoved": "none"}.get(kind, "left")
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=buttons, clickCount=clicks)

    def picture(self, path: Path) -> Path:
        """The whole page as a PNG file."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path
