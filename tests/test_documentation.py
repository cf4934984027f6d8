"""What the README shows is true: its config, its commands, its table, its links."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY
from fake_jobs import FakePlace, finished
from rl_training import ALGORITHMS, export_policy, load_config, load_policy, train
from rl_training.config import Execution
from rl_training.errors import read_document
from rl_training.reports.groups import NO_DIFFERENCE
from rl_training.reports.page import MORE
from rl_training.reports.table import HEADINGS
from rl_training.runtime.loading import build_config
from rl_training.runtime.metadata import EXTRAS
from rl_training.runtime.progress import ACTORS, bottleneck
from rl_training.runtime.search_space import DISTRIBUTIONS
from rl_training.studies import bench as bench_module
from rl_training.studies import jobs
from run_folders import write_run
from test_cli import cli

README = (REPOSITORY / "README.md").read_text()
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_config_in_the_readme_is_the_one_that_was_drawn():
    shown, *_ = blocks(README, "yaml")
    assert shown == (REPOSITORY / "configs" / "readme.yaml").read_text()
    cli("config", "check", REPOSITORY / "configs" / "readme.yaml")


def test_every_config_in_the_readme_is_valid():
    for block in blocks(README, "yaml"):
        build_config(read_document(block, "README.md").data)


def test_the_config_and_the_python_of_the_page_on_world_models_run(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs" / "world_models.md").read_text()
    (block,), (python,) = blocks(page, "yaml"), blocks(page, "python")
    short = {"total_timesteps": 40, "eval_interval": 0, "eval_episodes": 1, "output_dir": str(tmp_path)}
    run = train(build_config(read_document(block, "world_models.md").data | short), progress="silent").run_dir
    monkeypatch.chdir(tmp_path)
    exec(compile(re.sub(r'"runs/[^"]*"', f"{str(run)!r}", python), "world_models.md", "exec"), {})
    assert (tmp_path / "dream.png").exists()


def commands(page):
    """The words after `rl-training` of each command in a page's blocks."""
    lines = "\n".join(blocks(page.read_text(), "bash")).splitlines()
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("rl-training")]
    return [words[1:] for words in found]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda p: p.name)
def test_every_verb_exists_with_its_options(page):
    assert page.name != "README.md" or len(commands(page)) >= 7
    for verb, *rest in commands(page):
        help_text = cli(verb, "--help")
        for option in (word for word in rest if word.startswith("--")):
            assert option in help_text, f"{verb} {option}"
        for sub_verb in rest[0].split("|") if rest and "|" in rest[0] else []:
            assert sub_verb in help_text


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda p: p.name)
def test_what_is_overridden_can_be(page):
    for verb, *rest in commands(page):
        if verb == "train" and (REPOSITORY / rest[0]).exists():
            overrides = [word for before, word in itertools.pairwise(rest) if before == "--set"]
            load_config(REPOSITORY / rest[0], overrides=overrides)


SCALING = (REPOSITORY / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("block", blocks(SCALING, "yaml"), ids=("process", "cluster", "lag"))
def test_configs_of_the_page_on_scaling_train(block, tmp_path):
    """That of the cluster is only read: see test_ray_cluster.py."""
    data = read_document(block, "scaling.md").data
    config = build_config(data)
    execution = Execution.of(config.execution)
    assert config.num_envs is None or config.num_envs % execution.actors == 0
    if execution.backend != "ray":
        short = {"total_timesteps": 640, "output_dir": str(tmp_path), "eval_episodes": 1, "eval_interval": 0}
        result = train(build_config(data | short), progress="silent")
        assert result.metrics["global_step"] >= 640


def test_what_the_page_on_scaling_says_is_shown_is_shown():
    assert bottleneck({"actor_waiting": 0.02, "learner_waiting": 0.61})[0] in SCALING.splitlines()
    table = SCALING.split("| shown | metric")[1].split("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", table)} == {*ACTORS.values(), "actor_waiting", "learner_waiting"}
    for name in ACTORS:
        assert name in table, name


def test_the_table_lists_exactly_the_algorithms_there_are():
    table = README.split("## Algorithms")[1].split("##")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(ALGORITHMS)


def extras():
    """The names of what pyproject.toml offers to install, without the tools of development."""
    section = (REPOSITORY / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)) - {"dev", "reference"}


def test_every_extra_is_one_that_the_package_asks_for():
    """What needs an extra names it where it is missing: in an error, or in the table of the environments' packages."""
    source = "\n".join(path.read_text() for path in (REPOSITORY / "src").rglob("*.py"))
    asked = set(re.findall(r"rl-training\[([\w-]+)\]", source))
    asked |= set(re.findall(r'"([\w-]+)"', re.search(r"for name in \((.*?)\) if name in where", source)[1]))
    assert extras() == asked
    offered = re.search(r"\(extras: (.*?)\)", README)[1]
    assert set(re.findall(r"`([\w-]+)`", offered)) == extras() | {"dev"}


def test_doctor_knows_every_extra(monkeypatch):
    assert set(EXTRAS) == extras()
    monkeypatch.setattr("rl_training.runtime.metadata.find_spec", lambda name: None)
    missing = next(line for line in cli("doctor").splitlines() if line.startswith("not installed"))
    assert set(re.findall(r"rl-training\[([\w-]+)\]", missing)) == extras()


def test_make_test_and_the_gate_install_every_extra_that_tests_need():
    """A test whose package is missing is skipped, and nobody notices."""
    installed = extras() - {"plot", "wandb"} | {"dev"}  # dev has plot; wandb is replaced in tests
    for file, words in ((REPOSITORY / "Makefile", installed), (REPOSITORY / ".ci" / "run", {*installed, "reference"})):
        assert set(re.search(r"EXTRAS\s*\??=\s*(\S+)", file.read_text())[1].split(",")) == words, file


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:^|`)make (\w+)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_train_installs_what_the_schedule_picture_of_the_readme_needs(tmp_path):
    assert re.search(r"rl-training schedule .*--png", README)
    dry_run = ["make", "--dry-run", "train", f"VENV={tmp_path / 'venv'}"]
    commands = subprocess.run(dry_run, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    extras = re.findall(r"[\w-]+", "".join(re.findall(r"pip.* install .*\.\[(.*?)\]", commands)))
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert any(re.search(rf'^{extra} = \[.*"matplotlib', project, re.MULTILINE) for extra in extras), commands


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_commands_and_python_of_the_guide_to_reports_run(tmp_path, monkeypatch):
    guide = (REPOSITORY / "docs" / "reports.md").read_text()
    kwargs = {"gamma": 0.5}
    for algo in ("ppo", "sac"):
        more = {"value_loss": 1.0, "train_success_rate": 0.5}
        write_run(tmp_path / "runs" / f"{algo}__a", algo=algo, kwargs=kwargs, more=more, scores=(10.0, 20.0, 30.0))
    monkeypatch.chdir(tmp_path)
    (commands,) = blocks(guide, "bash")
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:2] == ["rl-training", "report"]
        paths = [sorted(tmp_path.glob(word)) if "*" in word else [word] for word in words[2:]]
        arguments = [str(path) for found in paths for path in found]
        refused = "eval_success_rate" in line  # which these runs do not have
        text = cli("report", *arguments, code=2 if refused else 0)
        assert ("no run has the metric 'eval_success_rate'" in text) if refused else ("wrote" in text)
    (python,) = blocks(guide, "python")
    exec(compile(python, "reports.md", "exec"), {})
    for name in ("report.html", "compare.html", "by_algo.html"):
        assert (tmp_path / name).stat().st_size > 50_000
    headings = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE)))
    assert headings == [*HEADINGS[1:5], *HEADINGS[6:], *MORE]
    assert "`seeds`" in guide
    for key in NO_DIFFERENCE - {"seed"}:
        assert f"`{key}`" in guide, key


TUNING = (REPOSITORY / "docs" / "tuning.md").read_text()


def finishes(order, host):
    """A job that leaves a run folder, with a score by its seed."""
    config, folder = order["config"], Path(order["folder"]) / "run"
    score = 100.0 + config["seed"]
    write_run(folder, scores=(score / 2, score), kwargs=config["algo_kwargs"], seed=config["seed"])
    metrics = {"eval_return_mean": score, "train_return_mean": score - 1}
    yield {**finished(score), "metrics": metrics, "run_dir": str(folder)}


@pytest.fixture
def fake_jobs(tmp_path, monkeypatch):
    """Where the guide's commands run: with its configs, and jobs that only pretend to train."""
    for name in ("ppo/cartpole.yaml", "a2c/cartpole.yaml"):
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / "configs" / name, path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)
    place = FakePlace(2, finishes)
    monkeypatch.setattr(bench_module, "make_place", lambda number, ray: place)
    return place


def test_commands_of_the_guide_to_bench_and_tune_run(fake_jobs, tmp_path, monkeypatch):
    tune_module = pytest.importorskip("rl_training.studies.tune", exc_type=ImportError)
    monkeypatch.setattr(tune_module, "make_place", lambda number, ray: fake_jobs)
    for words in commands(REPOSITORY / "docs" / "tuning.md"):
        if "--trials" in words:  # a tenth of them is as good here
            place = words.index("--trials") + 1
            words[place] = str(int(words[place]) // 10)
        text = cli(*words, *([] if "--show-space" in words else ["--progress", "silent"]))
        if words[0] == "bench":
            assert "wrote" in text
        elif "--show-space" in words:
            assert "algo_kwargs.learning_rate" in text
        else:
            assert f"Tuned: {words[words.index('--trials') + 1]} complete" in text
    study = Path("tune", "ppo-cartpole")
    for path in (*(study / name for name in ("best.yaml", "report.html", "study.db", "study.json")),
                 "compare/a2c-cartpole/seed7/job.json", "tuned/report.html"):  # fmt: skip
        assert Path(path).is_file(), path
    assert len(list(study.glob("trial*/seed*/job.json"))) == 8 * 3


def test_python_of_the_guide_to_bench_and_tune_runs(fake_jobs, monkeypatch, capsys):
    tune_module = pytest.importorskip("rl_training.studies.tune", exc_type=ImportError)
    monkeypatch.setattr(tune_module, "make_place", lambda number, ray: fake_jobs)
    (python,) = blocks(TUNING, "python")
    exec(compile(python, "tuning.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "ppo-CartPole-v1 101.0" in printed
    assert "clip_grid/report.html []" in printed
    assert "{'complete': 20}" in printed


def test_the_search_space_in_the_guide_is_valid_and_every_form_is_in_it():
    (block,) = blocks(TUNING, "yaml")
    config = build_config(read_document(block, "tuning.md").data)
    assert config.tune
    table = TUNING.split("the values to try:")[1].split("The space is checked")[0]
    for form in (*DISTRIBUTIONS, "kind"):
        assert f"{{{form}: " in block, form
        assert f"`{{{form}: " in table, form


SHARING = (REPOSITORY / "docs" / "sharing.md").read_text()


def test_what_the_guide_to_sharing_shows_of_export_and_pack_runs(tiny_config, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    short = {"total_timesteps": 64, "eval_episodes": 2, "eval_interval": 32, "output_dir": tmp_path / "runs"}
    for seed, suffix in ((1, "a"), (2, "b")):
        train(tiny_config("ppo", short | {"seed": seed}), run_suffix=suffix, progress="silent")
    for words in commands(REPOSITORY / "docs" / "sharing.md"):
        if words[0] in ("export", "pack"):
            assert "wrote" in cli(*words)
    pack_names = {name.split("/")[0] for name in zipfile.ZipFile("policy.zip").namelist()}
    table = SHARING.split("| in the file | |")[1].split("\n\n")[0]
    assert pack_names == {name.split("/")[0] for name in re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)}
    onnx, pack = blocks(SHARING, "python")[1:]
    exec(compile(pack, "sharing.md", "exec"), {})
    recurrent = train(tiny_config("recurrent_ppo", short), progress="silent").run_dir
    export_policy(recurrent, onnx="policy.onnx")
    found = {}
    exec(compile(onnx, "sharing.md", "exec"), found)
    policy, memory = load_policy(recurrent), found["empty_memory"]()
    for obs in np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32):
        action, memory = found["act"](obs, memory)
        assert action == policy.act(obs)
    assert memory.keys() == {"memory.policy"}


def test_every_guide_is_linked_from_the_readme():
    for path in (REPOSITORY / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in README, path.name


def test_schedules_in_the_documentation_are_read():
    for block in blocks((REPOSITORY / "docs" / "schedules.md").read_text(), "yaml"):
        from rl_training.runtime.controls import Controls

        kwargs = read_document(block, "schedules.md").data["algo_kwargs"]
        assert Controls(ALGORITHMS["ppo"].recipe.hyperparameters, kwargs, 1_000_000).varying
