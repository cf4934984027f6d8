"""Packed policies: they act as their checkpoints do, hold nothing private, and are read wherever a run folder is."""

from __future__ import annotations

import json
import re
import shutil
import stat
import zipfile

import numpy as np
import pytest
import yaml

from pack_files import EVALUATED, WRAPPED, entries, in_checkpoint, run_of, seal
from rl_training import (
    CheckpointError,
    InputError,
    evaluate_checkpoint,
    export_policy,
    load_policy,
    pack_policy,
    record_demonstrations,
    resume_training,
)
from rl_training.reports import curve_picture
from rl_training.reports import pack as pack_module
from rl_training.runtime import packs
from rl_training.runtime.workflows import play_checkpoint
from test_cli import cli


@pytest.fixture
def run(tiny_config):
    return run_of(tiny_config, "ppo", EVALUATED)


@pytest.fixture
def pack(run, tmp_path):
    return pack_policy(run, tmp_path / "policy.zip").path


# --- a pack is the checkpoint


@pytest.mark.parametrize("algo", ["ppo", "recurrent_ppo", "dqn", "sac", "gail", "dreamer", "muzero"])
def test_a_pack_acts_as_its_checkpoint(algo, tiny_config, tmp_path):
    run = run_of(tiny_config, algo, WRAPPED)
    file = pack_policy(run, tmp_path / "policy.zip").path
    both = [play_checkpoint(path, num_episodes=3, seed=5) for path in (run, file)]
    assert both[0].episodes == both[1].episodes
    shape = load_policy(file).layout.space.shape
    observations = np.random.default_rng(0).standard_normal((4, 3, *shape)).astype(np.float32)
    policies = [load_policy(path) for path in (run, file)]
    for obs in observations:  # several steps: some policies remember
        for kwargs in ({}, {"deterministic": False}):
            one, other = (policy.act(obs, **kwargs) for policy in policies)
            np.testing.assert_array_equal(one, other)
    assert {"actor.safetensors", "manifest.json", "state.json", "config.json"} <= in_checkpoint(file)
    assert not {name.split(".")[0] for name in in_checkpoint(file)} & {"learner", "replay", "runner", "run"}
    with pytest.raises(CheckpointError, match="its training cannot be resumed"):
        resume_training(file, total_timesteps=128, progress="silent")


def test_a_pack_of_several_tasks(tiny_config, tmp_path):
    tasks = ["CartPole-v1", "Acrobot-v1"]
    short = {"env_id": tasks, "env_kwargs": {"wrappers": {"time_limit": 9}}, "total_timesteps": 128, "eval_episodes": 1}
    run = run_of(tiny_config, "scalezero", short)
    file = pack_policy(run, tmp_path / "policy.zip").path
    assert evaluate_checkpoint(file, seed=2) == evaluate_checkpoint(run, seed=2)
    assert load_policy(file, task="Acrobot-v1").act(np.zeros(6, np.float32)) in range(3)
    card = entries(file)["README.md"].decode()
    for words in ('load_policy("policy.zip", task="CartPole-v1")', "| CartPole-v1 |", "| Acrobot-v1 | -9 |", "| all |"):
        assert words in card
    with pytest.raises(InputError, match="give task, one of CartPole-v1, Acrobot-v1"):
        load_policy(file)


def test_every_function_takes_a_pack(pack, run, tmp_path):
    export_policy(pack, pt2=tmp_path / "policy.pt2")
    found = [record_demonstrations(path, tmp_path / "demos.npz", num_episodes=2) for path in (pack, run)]
    np.testing.assert_array_equal(found[0].obs, found[1].obs)
    assert "eval_return_mean" in cli("eval", pack, "--num-episodes", 1)
    shown = json.loads(cli("eval", "--checkpoint", pack, "--json"))
    assert shown["checkpoint"] == str(pack / "checkpoints" / "step_64")
    assert "leave out --best" in cli("eval", pack, "--best", code=2)
    assert "is a file: give run folders" in cli("pack", pack, code=2)
    assert "resume the run folder that it was packed from" in cli("resume", pack, code=2)
    assert "is no folder" in cli("report", pack, code=2)


def test_an_unpacked_pack_is_loaded_too(pack, tmp_path):
    folder = tmp_path / "unpacked"
    shutil.unpack_archive(pack, folder)
    assert evaluate_checkpoint(folder) == evaluate_checkpoint(pack)
    with pytest.raises(CheckpointError, match="its training cannot be resumed"):
        resume_training(folder, total_timesteps=128, progress="silent")
    again = pack_policy(folder, tmp_path / "again.zip")
    assert again.notes == ["without curves and scores of the run: its folder with metrics.jsonl is not there"]
    assert evaluate_checkpoint(again.path) == evaluate_checkpoint(pack)
    assert "Evaluated in training, 2 episodes" in entries(again.path)["README.md"].decode()


def test_the_config_in_a_pack_trains(pack, tmp_path):
    (tmp_path / "config.yaml").write_bytes(entries(pack)["config.yaml"])
    assert "Trained 64 steps" in cli("train", tmp_path / "config.yaml", "--output-dir", tmp_path / "again")


# --- what is in it


def test_the_same_policy_gives_the_same_bytes(run, pack, tmp_path):
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(run, copy)
    again = pack_policy(copy, tmp_path / "elsewhere" / "policy.zip").path
    assert again.read_bytes() == pack.read_bytes()
    with zipfile.ZipFile(pack) as archive:
        assert {(info.date_time, info.compress_type) for info in archive.infolist()} == {((1980, 1, 1, 0, 0, 0), 0)}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {stat.S_IFREG | 0o644}


def test_nothing_private_is_packed(tiny_config, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(run_of(tiny_config, "gail", {"tags": ["tag-of-mine"]}), run)
    metadata = json.loads((run / "metadata.json").read_text())
    config = yaml.safe_load((run / "config.yaml").read_text())
    demonstrations = config["algo_kwargs"]["demonstrations"]
    secrets = {"hostname": "host-of-mine", "command": "/home/of-mine/rl-training", "platform": "kernel-of-mine"}
    secrets |= {"git": {"commit": "commit-of-mine", "dirty": True}, "status": "failed: /home/of-mine/full"}
    (run / "metadata.json").write_text(json.dumps(metadata | secrets))
    packed = pack_policy(run, tmp_path / "policy.zip")
    content = packed.path.read_bytes()  # nothing is compressed
    for private in ("of-mine", str(tmp_path.parent), demonstrations, "metrics.jsonl"):
        assert private.encode() not in content, private
    assert b"demonstrations: demonstrations.npz" in content
    assert packed.facts["status"] == "failed"
    assert packed.notes[1:] == ["the run is not finished: failed: /home/of-mine/full"]
    assert set(packed.facts["versions"]) == {"rl_training", "python", "torch", "gymnasium", "numpy"}


def test_a_path_that_acting_needs_stays_and_is_said(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    checkpoint = copy / "checkpoints" / "step_64"
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"eval_env_kwargs": {"xml_file": "/home/me/robot.xml"}, "execution": {}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    seal(checkpoint, "config.json")
    packed = pack_policy(checkpoint, tmp_path / "policy.zip")
    assert packed.notes == ["the config names /home/me/robot.xml: whoever loads the pack needs it, and sees that path"]
    assert load_policy(packed.path)


def test_the_card_says_what_it_is_and_its_commands_run(pack, monkeypatch):
    content = entries(pack)
    card = content["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["tags"] == ["reinforcement-learning", "ppo", "CartPole-v1"]
    facts = json.loads(content["metadata.json"])
    score = facts["evaluation"]["eval_return_mean"]
    for words in ("# ppo on CartPole-v1", "`Discrete(2)`", "| seed | 0 |", "at step 64, 2 episodes", f"{score:g}",
                  "![curves of training](curve.png)", "## Licence", f"torch {facts['versions']['torch']}"):  # fmt: skip
        assert words in card
    assert content["curve.png"].startswith(b"\x89PNG")
    monkeypatch.chdir(pack.parent)
    (commands,), (python,) = (re.findall(rf"```{kind}\n(.*?)```", card, re.DOTALL) for kind in ("bash", "python"))
    lines = commands.splitlines()
    assert "eval_return_mean" in cli(*lines[0].split()[1:])
    assert lines[1] == "rl-training record policy.zip --out film.mp4"
    names = {"obs": np.zeros(4, np.float32)}
    exec(python, names)
    assert names["action"] in (0, 1)


def test_an_environment_of_a_module_is_imported_only_where_that_is_allowed(tiny_config, tmp_path):
    run = run_of(tiny_config, "ppo", {"env_id": "envs_for_tests:CueForTests-v0"})
    file = pack_policy(run, tmp_path / "policy.zip").path
    card = entries(file)["README.md"].decode()
    assert "and the environment's module `envs_for_tests`:" in card
    assert "eval policy.zip --num-episodes 100 --allow-import" in card
    assert "--allow-import" in cli("eval", file, code=2)
    assert "eval_return_mean" in cli("eval", file, "--allow-import")


# --- several seeds


@pytest.fixture
def seeds(tiny_config, tmp_path):
    """Three runs with scores that are chosen here: the second has the best last, the third the best evaluation."""
    folders = []
    for seed, (middle, last) in enumerate([(10.0, 20.0), (30.0, 50.0), (90.0, 35.0)]):
        folder = tmp_path / "runs" / f"seed{seed}"
        shutil.copytree(
            run_of(tiny_config, "ppo", {"seed": seed, "eval_interval": 32, "checkpoint_interval": 32}), folder
        )
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        assert [line["global_step"] for line in evaluations] == [32, 64]
        for line, score in zip(evaluations, (middle, last), strict=True):
            line["eval_return_mean"] = score
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folders.append(folder)
    return folders


def test_of_several_seeds_the_best_is_packed_and_all_are_reported(seeds, tmp_path):
    packed = pack_policy(seeds, tmp_path / "policy.zip")
    scores = packed.facts["scores"]
    assert (packed.facts["seed"], packed.facts["evaluation"]["eval_return_mean"]) == (1, 50.0)
    assert [run["score"] for run in scores["runs"]] == [20.0, 50.0, 35.0]
    assert (scores["iqm"], scores["worst"], scores["worst_seed"]) == (35.0, 20.0, 0)
    assert 20 <= scores["low"] < 35 < scores["high"] <= 50
    card = entries(packed.path)["README.md"].decode()
    assert "| 2 | 64 | finished | 35 |" in card
    assert "Interquartile mean 35, 95 % bootstrap interval 20 to 50; mean 35, worst 20 (seed 0)" in card
    assert "that of seed 1: no run had a higher last evaluation" in card
    assert evaluate_checkpoint(packed.path, seed=3) == evaluate_checkpoint(seeds[1], seed=3)


def test_best_of_several_seeds_is_the_best_checkpoint_of_all(seeds, tmp_path):
    text = cli("pack", tmp_path / "runs", "--best", "--out", tmp_path / "policy.zip")
    facts = json.loads(entries(tmp_path / "policy.zip")["metadata.json"])
    best = json.loads((seeds[2] / "checkpoints" / "best" / "manifest.json").read_text())["info"]["global_step"]
    assert (facts["seed"], facts["global_step"]) == (2, best)
    assert f"policy   ppo on CartPole-v1, seed 2, step {best}" in text
    assert "seeds    3: IQM 35, 95 % interval 20 to 50" in text
    assert f"wrote    {tmp_path / 'policy.zip'}, " in text


def test_a_checkpoint_is_packed_as_it_was_named_with_the_scores_of_other_seeds(seeds, tmp_path):
    packed = pack_policy([seeds[0] / "checkpoints" / "step_32", *seeds[1:]], tmp_path / "policy.zip")
    assert (packed.facts["seed"], packed.facts["chosen_by"]) == (0, "")
    assert (packed.facts["evaluation"]["global_step"], packed.facts["evaluation"]["eval_return_mean"]) == (32, 10.0)
    assert len(packed.facts["scores"]["runs"]) == 3
    with pytest.raises(InputError, match="give one checkpoint, not 2"):
        pack_policy([folder / "checkpoints" / "step_64" for folder in seeds[:2]], tmp_path / "other.zip")
    assert not (tmp_path / "other.zip").exists()


def test_runs_of_several_configs_are_refused(seeds, run, tmp_path):
    with pytest.raises(InputError, match=r"these runs have 2 configs \(ppo on CartPole-v1.*give the seeds of one"):
        pack_policy([seeds[0], run], tmp_path / "policy.zip")


# --- writing


def test_without_matplotlib_there_is_no_picture_and_it_is_said(run, tmp_path, monkeypatch):
    monkeypatch.setattr(curve_picture, "find_spec", lambda name: None)
    packed = pack_policy(run, tmp_path / "policy.zip")
    assert packed.notes == ['without curve.png: that needs matplotlib: pip install "rl-training[plot]"']
    assert "curve.png" not in entries(packed.path)
    assert "curve.png" not in entries(packed.path)["README.md"].decode()


def test_a_pack_that_cannot_be_written_leaves_the_one_before(run, tmp_path, monkeypatch):
    target = tmp_path / "policy.zip"
    target.write_text("before")

    def full(archive, name, blocks):
        if name.endswith("state.json"):
            raise OSError(28, "No space left on device")
        return packs.add_entry(archive, name, blocks)

    monkeypatch.setattr(pack_module, "add_entry", full)
    with pytest.raises(InputError, match=r"policy.zip cannot be written: No space left on device"):
        pack_policy(run, target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if "policy" in path.name] == ["policy.zip"]
    with pytest.raises(InputError, match="is a folder: give the file"):
        pack_policy(run, tmp_path)
    with pytest.raises(InputError, match="nowhere does not exist: give run folders"):
        pack_policy(tmp_path / "nowhere", target)
