"""What `rl-training doctor` says of Ray, and a run on a cluster that was started by the commands of docs/scaling.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY
from ray_clusters import Cluster, cluster
from rl_training.runtime import ray_cluster
from rl_training.runtime.ray_cluster import address_of, described, ray_report, unreachable
from test_cli import cli
from test_documentation import blocks
from test_env_workers import wait_until

posix = pytest.mark.skipif(os.name != "posix", reason="needs process groups")
SOUND = {
    "nodes": [{"CPU": 16.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 8.0}],
    "versions": {"ray": "2.60.0", "python": "3.11.7"},
    "ours": {"ray": "2.60.0", "python": "3.11.7"},
    "is_node": True,
    "wants_token": False,
    "sends_token": False,
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "2 nodes, 24 CPUs, 1 GPU"),
        ({"nodes": [{"CPU": 1.0}]}, "1 node, 1 CPU, 0 GPUs"),
        ({"nodes": []}, "0 nodes, 0 CPUs, 0 GPUs"),
        (
            {"versions": {"ray": "2.58.1", "python": "3.11.7"}},
            "2 nodes, 24 CPUs, 1 GPU; it has ray 2.58.1 and this machine 2.60.0: they should be equal",
        ),
        (
            {"is_node": False, "nodes": []},
            "0 nodes, 0 CPUs, 0 GPUs; this machine is none of its nodes: `ray start --address=...` here before "
            "training",
        ),
    ],
)
def test_what_a_cluster_has_is_told_in_a_line(change, text):
    assert described(SOUND | change) == text


@pytest.mark.parametrize(("wants", "sends", "told"), [(0, 0, False), (1, 1, False), (0, 1, True)])
def test_a_token_that_the_cluster_does_not_know_is_told(wants, sends, told):
    """Ray's own message is that all references to the actors were removed."""
    text = described(SOUND | {"wants_token": bool(wants), "sends_token": bool(sends)})
    assert ("actors would die" in text) == ("RAY_AUTH_MODE=disabled" in text) == told


def test_addresses_are_found_as_ray_finds_them(monkeypatch, tmp_path):
    assert address_of("auto") is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.7:6379\n")
    assert address_of("auto") == "10.0.0.7:6379"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert address_of("auto") == "10.0.0.7:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.8:6379")
    assert address_of("auto") == "10.0.0.8:6379"
    assert address_of("10.0.0.9:1234") == "10.0.0.9:1234"


@pytest.mark.parametrize("address", ["here", "ray://10.0.0.1:10001", ":6379", "10.0.0.1:", "10.0.0.1:http"])
def test_what_is_no_address_is_told(address):
    assert unreachable(address) == "should be HOST:PORT, as `ray start` prints it"


def test_a_port_nobody_listens_at():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    assert "nobody answers there" in unreachable(f"127.0.0.1:{port}")
    assert "nobody answers there" in unreachable("127.0.0.1:99999")


def test_without_ray_an_address_is_an_answer_too(monkeypatch):
    monkeypatch.setattr(ray_cluster, "package_version", lambda name: None)
    assert ray_report() == {}
    assert ray_report("10.0.0.7:6379") == {
        "ray cluster": '10.0.0.7:6379: Ray is missing: pip install "rl-training[ray]"'
    }


def test_doctor_without_a_cluster():
    pytest.importorskip("ray")
    text = cli("doctor")
    assert "ray cluster    none is running here" in text
    assert [line for line in text.splitlines() if line.startswith("ray  ")], "its version"


def test_doctor_and_something_that_is_no_cluster(monkeypatch):
    """It accepts connections and says nothing. Whoever asks is ended, and nobody stays behind."""
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 3.0)
    asking = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: asking.append(more["timeout"]) or run(*args, **more))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        text = cli("doctor", "--address", address)
    assert f"ray cluster    {address}: accepts connections, but gave no answer within 3 s" in text
    assert asking[-1] == 3.0


def documented(start: str) -> list[list[str]]:
    """The words after `start` in the commands of docs/scaling.md."""
    text = "\n".join(blocks((REPOSITORY / "docs" / "scaling.md").read_text(), "bash"))
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[len(start.split()) :] for words in commands if words[: len(start.split())] == start.split()]


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    """Two nodes, by the commands of docs/scaling.md, on a free port and with few CPUs."""
    pytest.importorskip("ray")
    (token,), (head, node) = documented("ray get-auth-token"), documented("ray start")
    exported = dict(word.split("=") for (word,) in documented("export"))
    with cluster(exported) as found:
        found.ray("get-auth-token", *token)
        found.start(*(f"--port={found.port}" if word.startswith("--port") else word for word in head), "--num-cpus=1")
        node = [f"--address={found.address}" if word.startswith("--address") else word for word in node]
        found.start(*node, "--num-cpus=2", "--num-gpus=3")
        found.node = node  # how one more is started
        yield found


@pytest.fixture
def here(started, monkeypatch) -> None:
    """What this process asks of Ray goes to the cluster."""
    for name in ("RAY_TMPDIR", "HOME", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, started.environment[name])


class Ours:
    """A command of ours in the cluster's environment."""

    def __init__(self, found: Cluster, folder: Path, *words: str) -> None:
        self.output = folder / "output"
        with open(self.output, "w") as output:
            command = [sys.executable, "-m", "rl_training", *words]
            self.process = subprocess.Popen(command, env=found.environment, stdout=output, stderr=output)

    def wait_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)

    def end(self, code: int) -> str:
        assert self.process.wait(120) == code, self.output.read_text()
        return self.output.read_text()


def small(folder: Path, **keys: object) -> list[str]:
    """What makes a documented run short."""
    keys = {"output_dir": folder, "num_envs": 6, "eval_episodes": 1, "eval_interval": 0, "log_interval": 1, **keys}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def logged(folder: Path) -> list[dict]:
    paths = list(folder.glob("*/metrics.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@posix
def test_doctor_on_a_cluster(started, here, monkeypatch, tmp_path):
    expected = f"ray cluster    {started.address}: 2 nodes, 3 CPUs, 3 GPUs"
    deadline = time.monotonic() + 60  # the directory learns of a node a moment after it has said that it runs
    while expected not in (text := cli("doctor")).splitlines():
        assert time.monotonic() < deadline, text
    assert expected in cli("doctor", "--address", started.address).splitlines()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"ray cluster    {started.address}: wants a token that this machine does not have" in cli("doctor")


@posix
def test_the_documented_run_on_a_cluster_that_loses_a_machine(started, tmp_path):
    """Three actors on nodes with one and two CPUs; then a node with two is added, and the other with two killed."""
    (command,) = [words for words in documented("rl-training train") if "execution.address=auto" in words]
    words = [*command[1:], *small(tmp_path, **{"execution.actors": 3}), "--total-timesteps", "10_000_000"]
    run = Ours(started, tmp_path, "train", str(REPOSITORY / command[0]), *words)
    try:
        run.wait_until(lambda: len(logged(tmp_path)) > 3)
        assert any({"actor_waiting", "queue_fill", "policy_lag_max"} <= line.keys() for line in logged(tmp_path))
        started.start(*started.node, "--num-cpus=2")
        started.stop(1)
        run.wait_until(lambda: logged(tmp_path)[-1].get("actor_restarts", 0) >= 2)
        before = logged(tmp_path)[-1]["global_step"]
        run.wait_until(lambda: logged(tmp_path)[-1]["global_step"] > before + 1000)
        run.process.send_signal(signal.SIGTERM)
        assert "started anew" in run.end(130)
    finally:
        run.process.kill()


@posix
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_learner_that_is_killed_leaves_no_actor_on_the_cluster(started, tmp_path):
    (command,) = [words for words in documented("rl-training train") if "execution.address=auto" in words]
    words = [*command[1:], *small(tmp_path, **{"execution.actors": 2}), "--total-timesteps", "10_000_000"]
    run = Ours(started, tmp_path, "train", str(REPOSITORY / command[0]), *words)
    try:
        run.wait_until(lambda: len(logged(tmp_path)) > 1)
        assert len(actors_of(started)) == 2
    finally:
        run.process.kill()
    run.process.wait()
    assert wait_until(lambda: not actors_of(started), 60)


def actors_of(found: Cluster) -> list[str]:
    """The processes on the cluster's nodes that play."""
    actors = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(found.folder).encode() in (entry / "environ").read_bytes():
                actors += re.findall("ray::RayWorker", (entry / "cmdline").read_text())
    return actors
