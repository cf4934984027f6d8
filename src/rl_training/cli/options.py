"""Arguments and options that several commands share, and the functions that read them."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.controls import Controls


def option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **settings)


def whole(text: str) -> int:
    """A whole number in the forms that YAML has: 100000, 100_000 or 1e5."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise typer.BadParameter(f"should be a whole number, such as 100_000 or 1e5, got {text!r}")
    return int(number)


def run_argument(kinds: str) -> Any:
    text = f"{kinds}, or latest: the newest run in --output-dir or runs/."
    return typer.Argument(metavar="RUN", help=text, show_default=False)


def steps_option(help: str) -> Any:
    return option(help, parser=whole, metavar="STEPS")


IMPORT_HELP = "Allow an env_id of the form module:id, which imports that module."

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML config.", show_default=False)]
ConfigOption = Annotated[Path | None, option("YAML config.", "--config", "-c")]
SetOption = Annotated[list[str] | None, option("Override a key: --set algo_kwargs.clip_coef=0.1", "--set")]
AllowImport = Annotated[bool, typer.Option("--allow-import", help=IMPORT_HELP)]
RunArgument = Annotated[Path | None, run_argument("Run folder (its newest checkpoint), checkpoint, pack")]
ResumedArgument = Annotated[Path | None, run_argument("Run folder (its newest checkpoint), checkpoint")]
CheckpointOption = Annotated[Path | None, option("Run folder or checkpoint, instead of RUN.", "--checkpoint")]
DeviceOption = Annotated[str | None, option("auto, cpu, cuda, cuda:1, mps.", "--device")]
OutputDir = Annotated[Path | None, option("Folder in which the run folder is created.", "--output-dir")]
ProgressOption = Annotated[str, typer.Option("--progress", help="Progress display: auto, live, plain or silent.")]


BestOption = Annotated[bool, option("The checkpoint with the best evaluation of the run.", "--best")]
StochasticOption = Annotated[bool, option("Sample actions, as in training.", "--stochastic")]
SeedOption = Annotated[int | None, option("Seed of environments and actions; default: the run's.", "--seed", min=0)]
TaskOption = Annotated[str | None, option("The env_id, of a run in several.", "--task")]
LatestDir = Annotated[Path | None, option("Folder in which latest is searched.", "--output-dir")]


def one(argument: Path | None, option: Path | None, usage: str) -> Path:
    path = argument or option
    if path is None or (argument is not None and option is not None):
        raise typer.BadParameter(usage)
    return path


def one_config(argument: Path | None, option: Path | None) -> Path:
    return one(argument, option, "give one config: rl-training ... FILE, or --config FILE")


def one_run(argument: Path | None, option: Path | None, output_dir: Path | None) -> Path:
    path = one(argument, option, "give one run: rl-training ... RUN, or --checkpoint RUN")
    if path != Path("latest") or path.exists():  # a folder may have that name
        return path
    from rl_training.runtime.metadata import latest_run

    path = latest_run(output_dir or "runs")
    print(f"latest run: {path}", file=sys.stderr)
    return path


def load(path: Path, overrides: list[str] | None, allow_import: bool, **values: Any) -> TrainConfig:
    from rl_training.runtime.loading import load_config

    given = {key: value for key, value in values.items() if value is not None}
    return load_config(path, overrides=overrides or [], allow_import=allow(allow_import), **given)


def controls_of(config: TrainConfig) -> Controls:
    from rl_training.runtime.controls import Controls
    from rl_training.runtime.registry import ALGORITHMS

    return Controls.of(config, ALGORITHMS[config.algo].recipe.hyperparameters)


def warn(controls: Controls) -> None:
    from rl_training.runtime.preview import schedule_warnings

    for line in schedule_warnings(controls):
        print(f"warning: {line}", file=sys.stderr)


def allow(allow_import: bool) -> bool:
    if allow_import:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for a module beside the config
    return allow_import
