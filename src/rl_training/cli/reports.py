"""Commands that compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli.app import app
from rl_training.cli.options import one_run, option


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders, folders of runs, or latest.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
    group_by: Annotated[
        str, typer.Option("--group-by", help="config (all but the seed), run, or keys of the config: algo,gamma.")
    ] = "config",
    metric: Annotated[
        str, typer.Option("--metric", help="Its last values are the scores of the table.")
    ] = "eval_return_mean",
    plot: Annotated[list[str] | None, option("Also draw this metric: --plot value_loss", "--plot")] = None,
    output_dir: Annotated[Path | None, option("Folder in which latest is searched.")] = None,
) -> None:
    """Compare runs: a table of groups, and an HTML page with the curves of all seeds."""
    from rl_training.reports import report as write
    from rl_training.reports import text_table

    paths = [one_run(path, None, output_dir) for path in runs]
    print(text_table(write(paths, out, group_by=group_by, metric=metric, plot=plot or [])))
    print(f"\nwrote {out}")
