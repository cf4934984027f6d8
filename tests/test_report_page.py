"""The page of a report, in its text and in a headless browser: it draws what the runs hold, and reports no error."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import CHROMIUM, Page, browser
from rl_training.errors import InputError
from rl_training.reports import group_runs, load_runs, report
from rl_training.reports.bands import band_of
from rl_training.reports.page import page, rounded, static
from run_folders import write_run
from test_cli import cli
from test_statistics import slow_iqm

UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # uPlot 1.6.32 as npm has it
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def data_of(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: three seeds, of which one failed and one was stopped; and a single one, with a name like a tag."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a0", seed=0, scores=(10.0, 20.0, 30.0, 40.0))
    write_run(folder / "a1", seed=1, scores=(14.0, 28.0), status="failed: TrainingDiverged: loss is nan")
    write_run(folder / "a2", seed=2, scores=(18.0, 36.0, 54.0), status="stopped: received SIGINT")
    write_run(folder / "b", kwargs={"clip_coef": 0.4, "name": "</script><b>"}, more={"value_loss": 3.0})
    return folder


def test_the_page_is_one_file_that_needs_no_network(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    rows = report([runs], out)
    text = out.read_text()
    assert len(rows) == 2
    assert not re.findall(r'(?:src|href)="(?!data:)', text), "nothing is loaded from elsewhere"
    assert hashlib.sha256(static("uPlot.iife.min.js").encode()).hexdigest() == UPLOT
    assert static("uPlot.iife.min.js") in text
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "{{" not in text.replace(static("uPlot.iife.min.js"), "")
    assert text.count("</script>") == 3, "a value of a config ends no script"


def test_five_long_curves_take_about_130_kilobytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for seed in range(5):
        write_run(tmp_path / f"s{seed}", seed=seed, scores=tuple(rng.normal(200, 30, 1_000)), every=1_000)
    assert len(page(group_runs(load_runs([tmp_path])))) < 150_000


def test_panels_are_train_and_eval_apart_and_what_varies(runs: Path) -> None:
    groups = group_runs(load_runs([runs]))
    panels = data_of(page(groups))["panels"]
    assert [(panel["name"], panel.get("schedule", False)) for panel in panels] == [
        ("eval_return_mean", False),
        ("train_return_mean", False),
        ("ent_coef", True),
    ]
    more = data_of(page(groups, plot=["value_loss"]))["panels"]
    assert [panel["name"] for panel in more][2] == "value_loss"
    with pytest.raises(InputError, match="no run has the metric 'value_los'"):
        page(groups, plot=["value_los"])


def test_the_data_of_the_page_are_the_logs(runs: Path) -> None:
    first, second = data_of(page(group_runs(load_runs([runs]))))["groups"]
    assert [run["status"].split(":")[0] for run in first["runs"]] == ["finished", "failed", "stopped"]
    assert first["runs"][1]["eval"] == {
        "steps": [100, 200],
        "seconds": [10, 20],
        "values": {"eval_return_mean": [14, 28]},
    }
    assert first["runs"][0]["train"]["values"]["ent_coef"][0] == 0.0175
    assert "ent_coef" not in first["runs"][1]["train"]["values"], "one line for runs with the same schedule"
    assert [run["same"] for run in first["runs"]] == [[], ["ent_coef"], ["ent_coef"]]
    band = first["bands"]["eval_return_mean"]["steps"]
    assert band["x"] == [100, 200, 300]
    assert band["iqm"] == [14, 28, 42]
    assert band["runs"] == [3, 3, 2]
    assert second["bands"]["eval_return_mean"] == {}


def test_a_band_is_over_the_runs_that_have_come_so_far() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 6))
    lengths = [6, 6, 4, 6, 2]
    curves = [(np.arange(n) * 10.0, row[:n]) for n, row in zip(lengths, values, strict=True)]
    band = band_of(curves, ["a"] * 5)
    assert list(band.runs) == [5, 5, 4, 4, 3, 3]
    expected = [slow_iqm([row[t] for n, row in zip(lengths, values, strict=True) if t < n]) for t in range(6)]
    np.testing.assert_allclose(band.iqm, expected)
    assert ((band.low <= band.iqm) & (band.iqm <= band.high)).all()
    between = band_of([(np.array([0.0, 10.0]), np.array([0.0, 100.0])), (np.array([5.0]), np.array([70.0]))], "ab")
    assert (list(between.x), list(between.iqm), list(between.runs)) == ([5.0], [60.0], [2])
    assert band_of([(np.array([0.0]), np.array([1.0])), (np.array([5.0]), np.array([1.0]))], "aa") is None


def test_a_line_without_a_time_takes_only_itself_off_the_wall_clock_axis(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_run(tmp_path / f"s{seed}", seed=seed, scores=(1.0, 2.0, 3.0))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    del lines[-1]["wall_seconds"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = data_of(page(group_runs(load_runs([tmp_path]))))["groups"]
    bands = group["bands"]["eval_return_mean"]
    assert (bands["steps"]["x"], bands["seconds"]["x"]) == ([100, 200, 300], [10, 20])


@pytest.mark.parametrize(("value", "short"), [(123456.0, 123460), (0.123456, 0.12346), (3.0, 3), (float("nan"), None)])
def test_values_have_few_digits(value: float, short: float | None) -> None:
    assert rounded(value) == short


def test_the_command_prints_the_table_and_writes_the_page(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    given = [runs / "a0", runs / "a1", runs / "b"]
    text = cli("report", *given, "--out", out, "--group-by", "run", "--plot", "value_loss")
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["a0", "a1", "b"]
    assert f"wrote {out}" in text
    assert data_of(out.read_text())["panels"][2]["name"] == "value_loss"
    assert "there is no run in" in cli("report", tmp_path, "--out", out, code=2)
    assert "cannot be written" in cli("report", *given, "--out", out / "below", code=2)


@pytest.fixture(scope="module")
def shown(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("browser")
    report([runs], folder / "report.html")
    with browser(folder / "profile") as tab:
        tab.look(1200)
        tab.open(folder / "report.html")
        tab.wait_for_frame()
        yield tab


# How many pixels of each panel's picture are about as a group is drawn: of its colour, whatever their strength.
PIXELS = """((group) => report.plots().map(({ plot }) => {
  const { ctx, bbox } = plot;
  const own = getComputedStyle(document.documentElement).getPropertyValue(`--colour-${group}`).trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(own.slice(at, at + 2), 16));
  const { left, top, width, height } = bbox;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(ctx.canvas, left, top, width, height, 0, 0, width, height);
  const { data } = copy.getImageData(0, 0, width, height);
  let count = 0;
  const apart = (i) => Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && apart(i) < 30) count++;
  return count;
}))"""


def pixels(tab: Page, group: int) -> list[int]:
    tab.wait_for_frame()
    return list(tab.run(f"{PIXELS}({group})"))


def click(tab: Page, text: str) -> None:
    tab.run(f"[...document.querySelectorAll('#legend button')].find((each) => each.textContent === {text!r}).click()")


def slide(tab: Page, smoothing: float) -> None:
    tab.run(f"""(() => {{
      const slider = document.querySelector('[name=smoothing]');
      slider.value = {smoothing};
      slider.dispatchEvent(new Event('input', {{ bubbles: true }}));
    }})()""")


def center(tab: Page, panel: int, share: float) -> tuple[float, float]:
    """A point in a panel, at a share of its width."""
    tab.run(f"report.plots()[{panel}].box.scrollIntoView()")
    tab.wait_for_frame()
    box = tab.run(f"(({{x, y, width, height}}) => [x, y, width, height])"
                  f"(report.plots()[{panel}].plot.over.getBoundingClientRect())")  # fmt: skip
    return box[0] + share * box[2], box[1] + box[3] / 2


@needs_browser
@pytest.mark.parametrize("width", [1200, 420])
@pytest.mark.parametrize("dark", [False, True])
def test_every_panel_shows_the_curves_of_every_group(shown: Page, width: int, dark: bool) -> None:
    shown.look(width, dark=dark)
    for group in (0, 1):
        counts = pixels(shown, group)
        assert len(counts) == 3
        assert all(count > 50 for count in counts), (group, counts)
    assert shown.run("document.documentElement.scrollWidth <= innerWidth"), "no part is wider than the window"
    for plot, box in shown.run("report.plots().map(({ plot, box }) => [plot.width, box.clientWidth])"):
        assert plot == box
    assert shown.errors == []
    shown.look(1200)


@needs_browser
def test_the_legend_hides_groups_and_seeds(shown: Page) -> None:
    first, second = pixels(shown, 0), pixels(shown, 1)
    click(shown, "ppo on CartPole-v1, clip_coef 0.2")
    assert pixels(shown, 0) == [0, 0, 0]
    assert pixels(shown, 1)[0] > 50
    click(shown, "ppo on CartPole-v1, clip_coef 0.2")
    assert (pixels(shown, 0), pixels(shown, 1)) == (first, second)
    lines = "report.plots()[0].lines.filter(({ kind }) => kind === 'seed').length"
    assert shown.run(lines) == 3
    click(shown, "seed 1 ×")
    assert shown.run(lines) == 2
    click(shown, "seed 1 ×")
    assert shown.errors == []


@needs_browser
def test_hovering_shows_values_and_dragging_zooms_all_panels(shown: Page) -> None:
    shown.mouse("mouseMoved", *center(shown, 0, 0.5))  # of 400 steps: the middle of the axis is step 200
    shown.wait_for_frame()
    tip = shown.run("report.plots()[0].tip.innerText")
    assert "200 steps" in tip
    assert "IQM 28 [20 to 36], 3 of 3 runs" in tip
    assert "seed 0: 20, seed 1: 28, seed 2: 36" in tip
    start, end = center(shown, 0, 0.25), center(shown, 0, 0.75)
    shown.mouse("mousePressed", *start)
    shown.mouse("mouseMoved", *end)
    shown.mouse("mouseReleased", *end)
    shown.wait_for_frame()
    ranges = "report.plots().map(({ plot }) => [plot.scales.x.min, plot.scales.x.max])"
    for low, high in shown.run(ranges):
        assert (low, high) == (pytest.approx(100, abs=3), pytest.approx(300, abs=3))
    shown.run("document.getElementById('whole').click()")
    shown.wait_for_frame()
    assert shown.run(ranges) == [[0, 400]] * 3
    assert shown.errors == []


@needs_browser
def test_wall_clock_and_smoothing(shown: Page) -> None:
    """A run of this page takes a second for ten steps. The smoothed mean of 0 and 10 with weight 0.5 is 6.67."""
    shown.run("document.querySelector('[value=seconds]').click()")
    assert shown.run("report.plots().map(({ plot }) => plot.scales.x.max)") == [40] * 3
    assert all(count > 50 for count in pixels(shown, 0))
    schedules = "report.plots()[2].lines.map(({ group, x, y }) => [group, x, y])"
    lines = shown.run(schedules)
    assert [group for group, _, _ in lines] == [0, 0, 0, 1], "each run at its own speed"
    assert lines[1][1:] == [[5, 10, 15, 20], [0.0175, 0.015, 0.0125, 0.01]]
    assert shown.run("document.getElementById('note').textContent") == ""
    slide(shown, 0.5)
    drawn = "report.plots()[0].lines.find(({ kind, group }) => kind === 'alone' && group === 1).y"
    assert shown.run(drawn) == pytest.approx([10.0, (10 * 0.25 + 20 * 0.5) / 0.75])
    slide(shown, 0)
    shown.run("document.querySelector('[value=steps]').click()")
    assert len(shown.run(schedules)) == 2
    assert shown.errors == []


@needs_browser
def test_the_tables_tell_what_failed(shown: Page) -> None:
    assert "3: 1 failed, 1 stopped" in shown.run("document.getElementById('groups').innerText")
    bad = shown.run("[...document.querySelectorAll('td.bad')].map((each) => each.textContent)")
    assert bad == ["3: 1 failed, 1 stopped", "failed: TrainingDiverged: loss is nan"]
