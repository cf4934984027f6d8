"""What `rl-training doctor` says of Ray, and a run on a cluster that was started by the commands of docs/scaling.md."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from conftest import REPOSITORY
from ray_clusters import Cluster, cluster
from rl_training.runtime import ray_cluster
from rl_training.runtime.ray_cluster import address_of, described, ray_report, unreachable
from test_cli import cli

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


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    """Two nodes: the first with `ray start --head`, the second with its address."""
    pytest.importorskip("ray")
    with cluster() as found:
        found.start("--head", f"--port={found.port}", "--num-cpus=1", "--num-gpus=3")
        found.start(f"--address={found.address}", "--num-cpus=2")
        yield found


def ours(found: Cluster, *words: str) -> str:
    command = [sys.executable, "-m", "rl_training", *words]
    done = subprocess.run(command, env=found.environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_doctor_on_a_cluster(started, monkeypatch):
    expected = f"ray cluster    {started.address}: 2 nodes, 3 CPUs, 3 GPUs"
    for name in ("RAY_TMPDIR", "RAY_AUTH_MODE", "HOME"):
        monkeypatch.setenv(name, started.environment[name])
    deadline = time.monotonic() + 60  # the directory learns of a node a moment after it has said that it runs
    while expected not in (text := cli("doctor")).splitlines():
        assert time.monotonic() < deadline, text
    assert expected in cli("doctor", "--address", started.address).splitlines()
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    assert f"{expected}; it has no token, but this machine has one" in cli("doctor")


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_a_run_on_a_cluster(started, tmp_path):
    """Three actors, which no single node has room for."""
    words = ["num_envs=6", "execution.backend=ray", "execution.actors=3", "execution.address=auto", "eval_episodes=1"]
    words += [f"output_dir={tmp_path}", "log_interval=1", "eval_interval=0"]
    config = REPOSITORY / "configs" / "appo" / "cartpole.yaml"
    ours(started, "train", str(config), "--total-timesteps", "1000", *(w for word in words for w in ("--set", word)))
    (run,) = tmp_path.iterdir()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["global_step"] >= 1000
    assert {"actor_waiting", "learner_waiting", "queue_fill", "policy_lag_max"} <= logged[0].keys()
