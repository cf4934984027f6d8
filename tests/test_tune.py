"""The search: what is tried, what is ended early, what a second call continues, and the page about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from browser import CHROMIUM, browser
from fake_jobs import FakeHost, FakePlace, evaluation, failed, finished
from rl_training import load_config, train
from rl_training.errors import InputError
from rl_training.studies import jobs
from run_folders import write_run
from test_cli import cli

optuna = pytest.importorskip("optuna")
from rl_training.studies import study_plots  # noqa: E402
from rl_training.studies import tune as tune_module  # noqa: E402
from rl_training.studies.tune import TuneResult, tune  # noqa: E402

GAMMA = "algo_kwargs.gamma"
CONFIG = {
    "algo": "a2c",
    "env_id": "CartPole-v1",
    "total_timesteps": 1_000,
    "eval_interval": 100,
    "algo_kwargs": {"gamma": 0.95},
    "tune": {GAMMA: {"uniform": [0.9, 0.99]}},
}
Play = Callable[[dict[str, Any], FakeHost], Iterator[dict[str, Any]]]
Call = Callable[..., TuneResult]


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call tune with jobs that play a script; the orders of the jobs are in `search.orders`."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)

    def call(play: Play, size: int = 1, config: dict[str, Any] = CONFIG, **options: Any) -> TuneResult:
        place = FakePlace(size, play)
        monkeypatch.setattr(tune_module, "make_place", lambda number, ray: place)
        call.orders = [host.order for host in place.hosts]  # type: ignore[attr-defined]
        try:
            return tune(config, **{"out": tmp_path / "study", "progress": "silent", **options})
        finally:
            assert place.closed or not place.hosts
            call.orders = [host.order for host in place.hosts]  # type: ignore[attr-defined]

    return call


def gamma_of(order: dict[str, Any]) -> float:
    return float(order["config"]["algo_kwargs"]["gamma"])


def by_gamma(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
    """The score is the discount, and a tenth of the seed."""
    yield finished(gamma_of(order) + order["config"]["seed"] / 10)


def trials_of(study: Path) -> list[Any]:
    return list(optuna.load_study(study_name="tune", storage=f"sqlite:///{study / 'study.db'}").trials)


def test_the_search_begins_with_the_values_of_the_config_and_finds_better_ones(search: Any, tmp_path: Path) -> None:
    result = search(by_gamma, trials=12, seeds=[0, 2], size=2)
    assert result.states == {"complete": 12}
    assert gamma_of(search.orders[0]) == 0.95
    tried = {gamma_of(order) for order in search.orders}
    assert len(tried) == 12
    assert result.value == pytest.approx(max(tried) + 0.1), "the mean of two seeds"
    assert result.params == {GAMMA: max(tried)}
    seeds = [(gamma_of(order), order["config"]["seed"]) for order in search.orders]
    assert sorted(seeds) == sorted((gamma, seed) for gamma in tried for seed in (0, 2))
    assert not any(order["config"]["tune"] for order in search.orders if "tune" in order["config"])
    text = result.config_path.read_text()
    assert text.startswith(f"# eval_return_mean {result.value:g}, the mean of seeds 0, 2: trial ")
    assert yaml.safe_load(text) == {key: value for key, value in CONFIG.items() if key != "tune"} | {
        "algo_kwargs": {"gamma": max(tried)}
    }
    assert load_config(result.config_path) == result.config


def test_the_lowest_value_of_another_metric(search: Any) -> None:
    def play(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
        yield {**finished(1.0), "metrics": {"value_loss": gamma_of(order)}}

    result = search(play, trials=5, metric="value_loss", direction="minimize")
    assert result.value == min(map(gamma_of, search.orders))


def test_the_sampler_learns_where_good_values_are(search: Any) -> None:
    """After ten random trials, later ones lie near the best: a random search would have 3 of 12 above 0.965."""

    def play(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
        yield finished(-abs(gamma_of(order) - 0.98))

    search(play, trials=25)
    later = [gamma_of(order) for order in search.orders[13:]]
    assert sum(gamma > 0.965 for gamma in later) >= 9, later


SCHEDULED = CONFIG | {
    "tune": {
        "algo_kwargs.ent_coef": {
            "kind": ["constant", "linear", "cosine"], "start": {"log": [1e-3, 1e-1]}, "end": {"choice": [0, 1e-4]},
        }
    }
}  # fmt: skip


def test_schedules_are_tuned_by_kind_start_and_end(search: Any) -> None:
    score = {"constant": 1.0, "linear": 2.0, "cosine": 3.0}

    def play(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
        yield finished(score[order["config"]["algo_kwargs"]["ent_coef"]["kind"]])

    result = search(play, config=SCHEDULED, trials=15, startup_trials=15)
    tried = [order["config"]["algo_kwargs"]["ent_coef"] for order in search.orders[1:]]
    assert {each["kind"] for each in tried} == set(score)
    assert {"end" in each for each in tried if each["kind"] == "constant"} == {False}
    assert {each["end"] for each in tried if each["kind"] != "constant"} == {0, 1e-4}
    assert result.config.algo_kwargs["ent_coef"]["kind"] == "cosine"
    assert set(result.params) == {f"algo_kwargs.ent_coef.{part}" for part in ("kind", "start", "end")}


def steadily(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
    """Ten evaluations of a score that is known from the start, but the first trials are the good ones."""
    number = int(re.search(r"trial(\d+)", order["folder"])[1])  # type: ignore[index]
    score = 5.0 if number < 3 else 1.0
    for step in range(100, 1_000, 100):
        yield evaluation(step, 1_000, score)
        if "prune" in host.heard:
            yield finished(score, "pruned")
            return
    yield finished(score)


def test_a_bad_trial_is_ended_by_its_evaluations(search: Any, tmp_path: Path) -> None:
    """Not before a third of a run, and not before as many trials as the first random ones are complete."""
    result = search(steadily, trials=5, seeds=[0, 1], startup_trials=3)
    assert result.states == {"complete": 3, "pruned": 2}
    first, *_, last = trials_of(tmp_path / "study")
    assert sorted(first.intermediate_values) == list(range(100, 2_001, 100)), "seeds one after the other"
    assert sorted(last.intermediate_values) == [100, 200, 300, 400]
    assert [len([each for each in search.orders if f"trial000{i}" in each["folder"]]) for i in range(5)] == [
        2,
        2,
        2,
        1,
        1,
    ]


def test_without_pruning_every_trial_is_complete(search: Any) -> None:
    assert search(steadily, trials=5, startup_trials=3, pruner="none").states == {"complete": 5}


def test_a_bad_first_seed_ends_a_trial_before_its_second(search: Any) -> None:
    def play(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
        yield finished(1.0 if "trial0003" in order["folder"] else 5.0)

    result = search(play, trials=4, seeds=[0, 1], startup_trials=3)
    assert result.states == {"complete": 3, "pruned": 1}
    assert len(search.orders) == 7


def test_a_config_without_evaluations_gets_some_for_the_pruner(search: Any) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "eval_interval"}
    search(by_gamma, config=config, trials=1)
    assert search.orders[0]["config"]["eval_interval"] == 100


def test_an_interrupted_search_goes_on_with_its_trial_and_its_finished_seeds(search: Any, tmp_path: Path) -> None:
    def stopped_in_the_second(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
        yield evaluation(500, 1_000, 1.0)
        if "trial0001" in order["folder"] and order["config"]["seed"] == 1:
            raise KeyboardInterrupt
        yield from by_gamma(order, host)

    with pytest.raises(KeyboardInterrupt):
        search(stopped_in_the_second, trials=4, seeds=[0, 1])
    first = search.orders
    assert [trial.state.name for trial in trials_of(tmp_path / "study")] == ["COMPLETE", "RUNNING"]
    assert load_config(tmp_path / "study" / "best.yaml").algo_kwargs["gamma"] == 0.95, "the best so far is written"
    result = search(by_gamma, trials=4, seeds=[0, 1])
    assert result.states == {"complete": 4}
    again, *others = search.orders
    assert again == first[-1], "the same values, and the seed that had not finished"
    assert len(others) == 2 * 2
    assert len({gamma_of(order) for order in [*first, *others]}) == 4
    assert search(by_gamma, trials=4, seeds=[0, 1]).states == {"complete": 4}
    assert search.orders == []
    assert search(by_gamma, trials=6, seeds=[0, 1]).states == {"complete": 6}


def test_no_more_trials_than_asked_for_are_taken_up_again(search: Any, tmp_path: Path) -> None:
    def interrupted(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
        if "trial0000" in order["folder"]:
            yield from by_gamma(order, host)
        yield {}
        if "trial0002" in order["folder"]:
            raise KeyboardInterrupt
        yield from [{}] * 9

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, trials=5, size=2)
    assert [trial.state.name for trial in trials_of(tmp_path / "study")] == ["COMPLETE", "RUNNING", "RUNNING"]
    assert search(by_gamma, trials=2, size=2).states == {"complete": 2, "running": 1}
    assert search(by_gamma, trials=2).states == {"complete": 2, "running": 1}
    assert search.orders == []


def test_a_folder_of_another_study_is_refused(search: Any, tmp_path: Path) -> None:
    search(by_gamma, trials=1)
    before = (tmp_path / "study" / "study.json").read_text()
    for options, names in (
        ({"seeds": [3]}, "seeds"),
        ({"direction": "minimize", "pruner": "none"}, "direction, pruner"),
        ({"space": {GAMMA: {"uniform": [0.5, 0.9]}}}, "space"),
        ({"config": CONFIG | {"num_envs": 3}}, "config"),
    ):
        with pytest.raises(InputError, match=f"holds a study that differs in {names}: choose another folder"):
            search(by_gamma, trials=2, **options)
    assert (tmp_path / "study" / "study.json").read_text() == before
    with jobs.locked(tmp_path / "study", "tune"), pytest.raises(InputError, match="another tune is running in"):
        tune(CONFIG, out=tmp_path / "study")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials should be at least 1"),
        ({"seeds": [1, 1]}, "seeds should be different"),
        ({"direction": "maximise"}, "did you mean 'maximize'"),
        ({"pruner": "hyperband"}, "pruner should be median or none, got 'hyperband'"),
        ({"startup_trials": -1}, "startup_trials should be at least 0"),
        ({"space": {GAMMA: {"uniform": [0.9, 2]}}}, r"tune\.algo_kwargs\.gamma: .* 2"),
    ],
)
def test_wrong_options_are_named_before_anything_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        tune(CONFIG, out=tmp_path / "study", **options)
    assert not (tmp_path / "study").exists()


def with_curves(order: dict[str, Any], host: FakeHost) -> Iterator[dict[str, Any]]:
    """As `steadily`, with a run folder for the report; the last trial fails."""
    if "trial0004" in order["folder"]:
        yield failed("boom <b>")
        return
    config = order["config"]
    run = Path(order["folder"]) / "run"
    write_run(run, seed=config["seed"], scores=(1.0, gamma_of(order)), algo="a2c", kwargs=config["algo_kwargs"])
    for message in steadily(order, host):
        message["metrics"]["eval_return_mean"] += gamma_of(order)
        yield {**message, "run_dir": str(run)} if message["kind"] == "end" else message


def test_the_page_has_the_plots_of_the_study(search: Any, tmp_path: Path) -> None:
    config = CONFIG | {"tune": {**CONFIG["tune"], **SCHEDULED["tune"]}}  # type: ignore[dict-item]
    result = search(with_curves, config=config, trials=6, seeds=[0, 1], startup_trials=3)
    assert result.states["complete"] == 3
    text = result.report_path.read_text()
    section = text[text.index("<section class='study'>") : text.index("</section>")]
    headings = re.findall("<h2>(.*?)</h2>", section)
    assert headings[0] == "Trials"
    assert {"Importance of the parameters (PED-ANOVA)", "Parallel coordinates of the complete trials",
            "During training", "Best trials"} <= set(headings)  # fmt: skip
    marks = {kind: section.count(f"class='{kind}'") for kind in ("complete", "pruned", "failed")}
    assert marks == {"complete": 3, "pruned": 2, "failed": 1}
    assert section.count("class='line'") == 3
    assert (section.count("class='curve'"), section.count("class='curve cut'")) == (3, 2)
    assert "boom &lt;b&gt;" in section
    assert "<title>Study of a2c-CartPole-v1: 6 trials</title>" in text
    if CHROMIUM is None:
        return
    with browser(tmp_path / "profile") as tab:
        for width in (1200, 400):
            tab.look(width, dark=width == 400)
            tab.open(result.report_path)
            tab.wait_for_frame()
            heights = tab.run("[...document.querySelectorAll('.study svg')].map((each) => each.clientHeight)")
            assert len(heights) == 4
            assert min(heights) > 20
            assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert tab.run("report.plots().length") >= 2
        assert tab.errors == []


def test_importances_tell_which_parameter_matters(search: Any, recwarn: pytest.WarningsRecorder) -> None:
    config = CONFIG | {"tune": {**CONFIG["tune"], "algo_kwargs.vf_coef": {"uniform": [0.1, 1]}}}  # type: ignore[dict-item]
    search(by_gamma, config=config, trials=16)
    study = optuna.load_study(study_name="tune", storage=f"sqlite:///{tmp_of(search) / 'study.db'}")
    found = study_plots.importances(study)
    assert list(found) == [GAMMA, "algo_kwargs.vf_coef"]
    assert found[GAMMA] > 0.6
    assert not [each for each in recwarn if "optuna" in each.filename]


def tmp_of(search: Any) -> Path:
    return Path(search.orders[0]["folder"]).parent.parent


def test_a_study_with_no_complete_trial(search: Any, tmp_path: Path) -> None:
    result = search(lambda order, host: iter([failed("boom")]), trials=2)
    assert (result.value, result.config, result.params) == (None, None, {})
    assert sum(result.states.values()) == 2
    assert not result.config_path.exists()


def test_real_trials(tmp_path: Path) -> None:
    """Two in parallel, with evaluations on the way, from the command line; the best config trains."""
    config = tmp_path / "small.yaml"
    small = CONFIG | {"eval_interval": 500, "eval_episodes": 2, "num_envs": 2, "device": "cpu", "num_threads": 1}
    config.write_text(yaml.safe_dump(small))
    text = cli("tune", config, "--trials", 2, "--jobs", 2, "--out", tmp_path / "study", "--progress", "plain")
    assert "Tuned: 2 complete. Best value" in text
    assert f"train {tmp_path / 'study' / 'best.yaml'}" in text
    folders = sorted((tmp_path / "study").glob("trial*/seed0/*/"))
    assert len(folders) == 2
    assert not list((tmp_path / "study").glob("trial*/seed0/*/checkpoints/step_*")), "replay buffers are large"
    best = load_config(tmp_path / "study" / "best.yaml", output_dir=tmp_path / "runs")
    result = train(best, progress="silent")
    values = [trial.value for trial in trials_of(tmp_path / "study")]
    assert result.metrics["eval_return_mean"] == max(values)
