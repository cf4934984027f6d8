"""Commands that train many runs: bench, tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rl_training.cli.app import app
from rl_training.cli.options import (
    AllowImport,
    ConfigArgument,
    ConfigOption,
    ProgressOption,
    SetOption,
    allow,
    load,
    one_config,
    option,
)

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.studies.tune import TuneResult

RAY_HERE = "here"  # what a bare --ray stands for


class WithRay(TyperCommand):
    """A command whose option --ray may be given without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], "-"]
        bare = [
            word == "--ray" and (after.startswith("-") or after.endswith((".yaml", ".yml")))
            for word, after in zip(args, following, strict=True)
        ]
        spelt = [f"--ray={RAY_HERE}" if is_bare else word for word, is_bare in zip(args, bare, strict=True)]
        return super().parse_args(ctx, spelt)


def ray_address(given: str | None) -> str | None:
    """As Python's functions take it: "" to start Ray on this machine."""
    return "" if given == RAY_HERE else given


JobsOption = Annotated[int | None, option("Runs at a time; default: 1, with --ray one per core.", "--jobs", min=1)]
RayOption = Annotated[
    str | None, option("Run on Ray: of this machine, or of the cluster at ADDRESS.", "--ray", metavar="[ADDRESS]")
]


@app.command(cls=WithRay)
def bench(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="YAML configs.", show_default=False)],
    seeds: Annotated[str, typer.Option(help="Seeds of each config: 0-4 or 0,3,7.")] = "0-4",
    jobs: JobsOption = None,
    set_: SetOption = None,
    ray: RayOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the report; the same again continues.")] = Path(
        "bench"
    ),
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Train configs with several seeds each, in parallel, and compare them."""
    from rl_training.reports import text_table
    from rl_training.studies.bench import bench as run
    from rl_training.studies.bench import parse_seeds

    result = run(
        configs,
        seeds=parse_seeds(seeds),
        jobs=jobs,
        overrides=set_ or [],
        out=out,
        ray=ray_address(ray),
        progress=progress,
        allow_import=allow(allow_import),
    )
    print(f"\n{text_table(result.rows)}\n\nwrote {result.report_path}" if result.rows else "no run has a log")
    for failed in result.failed:
        typer.echo(f"failed: {failed.config} seed {failed.seed}: {failed.outcome.error}", err=True)
    if result.failed:
        raise typer.Exit(1)


@app.command(cls=WithRay)
def tune(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    trials: Annotated[int, typer.Option(help="Trials in total, with those of earlier calls.", min=1)] = 50,
    jobs: JobsOption = None,
    seeds: Annotated[str | None, option("Seeds of each trial: 0-2 or 0,3,7; default: the config's.")] = None,
    metric: Annotated[str, typer.Option(help="Metric of a trial: its last value, as a mean over seeds.")] = (
        "eval_return_mean"
    ),
    direction: Annotated[str, typer.Option(help="maximize or minimize the metric.")] = "maximize",
    pruner: Annotated[str, typer.Option(help="median: end trials below the median of the others; none.")] = "median",
    startup_trials: Annotated[int, typer.Option(help="First trials, drawn at random and never pruned.", min=0)] = 10,
    set_: SetOption = None,
    ray: RayOption = None,
    out: Annotated[Path | None, option("Folder of the study; default: tune/NAME; the same again continues.")] = None,
    show_space: Annotated[bool, option("Print the search space as the key tune, and stop.", "--show-space")] = False,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Search for good hyperparameters: those of the config's key tune, or a default choice."""
    path = one_config(config, config_option)
    if show_space:
        _show_space(load(path, set_, allow_import))
        return
    from rl_training.studies.bench import parse_seeds
    from rl_training.studies.tune import tune as run

    result = run(
        path,
        trials=trials,
        jobs=jobs,
        seeds=None if seeds is None else parse_seeds(seeds),
        metric=metric,
        direction=direction,  # type: ignore[arg-type]
        pruner=pruner,  # type: ignore[arg-type]
        startup_trials=startup_trials,
        overrides=set_ or [],
        out=out,
        ray=ray_address(ray),
        progress=progress,
        allow_import=allow(allow_import),
    )
    _summarize(result)


def _show_space(config: TrainConfig) -> None:
    import yaml

    from rl_training.studies.default_space import default_space

    space = config.tune or default_space(config)
    print(yaml.safe_dump({"tune": space}, sort_keys=False, default_flow_style=None, width=120), end="")


def _summarize(result: TuneResult) -> None:
    from rl_training.runtime.commands import command
    from rl_training.runtime.progress import summary

    counts = ", ".join(f"{count} {state}" for state, count in result.states.items())
    if result.value is None:
        first = f"; {result.errors[0]}" if result.errors else ""
        typer.echo(
            f"error: no trial is complete ({counts}){first}\noutputs are in {result.folder}/trial*/*/output.txt",
            err=True,
        )
        raise typer.Exit(1)
    params = {name.removeprefix("algo_kwargs."): f"{value}" for name, value in result.params.items()}
    summary(
        f"Tuned: {counts}. Best value {result.value:g}.",
        {**params, "report": str(result.report_path)},
        {"train": command("train", result.config_path)},
    )
