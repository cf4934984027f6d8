"""What can be learned of a Ray cluster from outside: where it is, whether it answers, and what it has.

A driver of Ray would start processes on the cluster, and waits minutes for one that is gone. So the address is tried
first, and another process, which can be killed, asks the cluster's directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.runtime.metadata import package_version
from rl_training.runtime.processes import import_path

CONNECT_SECONDS, ANSWER_SECONDS = 3.0, 20.0
NO_TOKEN = "wants a token that this machine does not have: copy ~/.ray/auth_token from the cluster's first machine"


def ray_report(address: str | None = None) -> dict[str, str]:
    """A line for `rl-training doctor` about the cluster at an address, by default the one that Ray would find."""
    if package_version("ray") is None:
        return {} if address is None else {"ray cluster": f'{address}: Ray is missing: pip install "rl-training[ray]"'}
    found = address_of(address or "auto")
    if found is None:
        return {"ray cluster": "none is running here; execution.backend: ray without an address starts Ray itself"}
    return {"ray cluster": f"{found}: {unreachable(found) or _asked(found)}"}


def address_of(address: str) -> str | None:
    """host:port of an address as Ray reads it; auto: RAY_ADDRESS, or the cluster that was started here last."""
    if address != "auto":
        return address
    if given := os.environ.get("RAY_ADDRESS"):
        return given if given != "auto" else _address_in_file()
    return _address_in_file()


def _address_in_file() -> str | None:
    """Ray's note of the cluster that this machine belongs to."""
    on_linux = os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None
    default = "/tmp" if os.name == "posix" else tempfile.gettempdir()
    folder = os.environ.get("RAY_TMPDIR") or on_linux or default
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def unreachable(address: str) -> str | None:
    """Why nobody answers at host:port; None if somebody does."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return "should be HOST:PORT, as `ray start` prints it"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        return f"nobody answers there ({error}); was the cluster stopped?"
    return None


def _asked(address: str) -> str:
    command = [sys.executable, "-m", "rl_training.runtime.ray_probe", address]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": import_path()},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"accepts connections, but gave no answer within {ANSWER_SECONDS:g} s: is it Ray's port (6379)?"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return NO_TOKEN if "AuthenticationError" in last else f"cannot be read: {last}"
    return described(json.loads(done.stdout.splitlines()[-1]))


def described(cluster: Mapping[str, Any]) -> str:
    """`cluster`: see ray_probe.py."""
    nodes: list[Mapping[str, float]] = cluster["nodes"]
    cores, gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    text = f"{_number(len(nodes), 'node')}, {_number(cores, 'CPU')}, {_number(gpus, 'GPU')}"
    for name in ("ray", "python"):
        theirs, ours = cluster["versions"].get(name), cluster["ours"][name]
        if theirs not in (None, ours):
            text += f"; it has {name} {theirs} and this machine {ours}: they should be equal"
    if cluster["sends_token"] and not cluster["wants_token"]:
        text += "; it has no token, but this machine has one (~/.ray/auth_token), so that actors would die: "
        text += "stop the cluster and start it again, or set RAY_AUTH_MODE=disabled"
    if not cluster["is_node"]:
        text += "; this machine is none of its nodes: `ray start --address=...` here before training"
    return text


def _number(count: float, name: str) -> str:
    return f"{count:g} {name}{'' if count == 1 else 's'}"
