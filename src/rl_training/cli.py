"""The command line. Commands import torch when they run, so that --help is instant."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_origin

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.controls import Controls
    from rl_training.runtime.outcome import TrainResult


class Commands(TyperGroup):
    """Turns errors into exit codes: 0 done, 1 training failed, 2 bad input, 130 interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            result = getattr(error, "result", None)
            if result is None:
                _exit("interrupted; nothing was saved since the last checkpoint", 130)
            from rl_training.runtime.commands import command

            _exit(f"{error}\nresume with: {command('resume', result.run_dir)}", 130)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            from rl_training.config import InputError
            from rl_training.runtime.metrics import TrainingDiverged
            from rl_training.runtime.outcome import TrainingFailed

            if isinstance(error, InputError):
                lines = [f"error: {line}" for line in str(error).splitlines()]
                trace = getattr(error, "trace", "")  # of an error inside an environment, for its author
                _exit("\n".join([*lines, "", trace.rstrip()] if trace else lines), 2)
            if isinstance(error, TrainingDiverged | TrainingFailed):
                _exit(f"error: {error}", 1)
            raise


def _exit(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code)


app = typer.Typer(
    name="rl-training",
    cls=Commands,
    help="Train reinforcement-learning agents from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Check, show and describe configs.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **settings)


def _whole(text: str) -> int:
    """A whole number in the forms that YAML has: 100000, 100_000 or 1e5."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise typer.BadParameter(f"should be a whole number, such as 100_000 or 1e5, got {text!r}")
    return int(number)


def _steps_option(help: str) -> Any:
    return _option(help, parser=_whole, metavar="STEPS")


RUN_HELP = "A run folder (its newest checkpoint), a checkpoint, or latest: the newest run in --output-dir or runs/."
IMPORT_HELP = "Allow an env_id of the form module:id, which imports that module."

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML config.", show_default=False)]
ConfigOption = Annotated[Path | None, _option("YAML config.", "--config", "-c")]
SetOption = Annotated[list[str] | None, _option("Override a key: --set algo_kwargs.clip_coef=0.1", "--set")]
AllowImport = Annotated[bool, typer.Option("--allow-import", help=IMPORT_HELP)]
RunArgument = Annotated[Path | None, typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False)]
CheckpointOption = Annotated[Path | None, _option("Run folder or checkpoint, instead of RUN.", "--checkpoint")]
DeviceOption = Annotated[str | None, _option("auto, cpu, cuda, cuda:1, mps.", "--device")]
OutputDir = Annotated[Path | None, _option("Folder in which the run folder is created.", "--output-dir")]
ProgressOption = Annotated[str, typer.Option("--progress", help="Progress display: auto, live, plain or silent.")]


def _version(value: bool) -> None:
    if value:
        import rl_training

        print(f"rl-training {rl_training.__version__}")
        raise typer.Exit


VersionOption = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def _root(version: VersionOption = False) -> None: ...


@app.command()
def train(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    seed: Annotated[int | None, _option("Override seed.")] = None,
    total_timesteps: Annotated[int | None, _steps_option("Override total_timesteps.")] = None,
    num_envs: Annotated[int | None, _option("Override num_envs.")] = None,
    device: DeviceOption = None,
    output_dir: OutputDir = None,
    run_suffix: Annotated[str | None, _option("Suffix of the folder's name.")] = None,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Train an agent from a YAML config."""
    loaded = _load(
        _one_config(config, config_option),
        set_,
        allow_import,
        seed=seed,
        total_timesteps=total_timesteps,
        num_envs=num_envs,
        device=device,
        output_dir=output_dir,
    )
    from rl_training.runtime.workflows import train as run

    result = run(loaded, run_suffix=run_suffix, progress=progress)
    _summarize(result, loaded.output_dir)


@app.command("eval")
def evaluate(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    num_episodes: Annotated[int | None, _option("Number of episodes; default: eval_episodes.", min=1)] = None,
    task: Annotated[str | None, _option("Evaluate only this env_id of a run in several.")] = None,
    output_dir: Annotated[Path | None, _option("Folder in which latest is searched.")] = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Evaluate a checkpoint in new environments."""
    from rl_training.runtime.workflows import evaluate_checkpoint

    path = _one_run(run, checkpoint, output_dir)
    metrics = evaluate_checkpoint(
        path, num_episodes=num_episodes, task=task, device=device or "auto", allow_import=_allow(allow_import)
    )
    width = max([18, *map(len, metrics)])
    for name, value in metrics.items():
        print(f"{name:<{width}} {value:g}")


@app.command()
def demos(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    out: Annotated[Path, typer.Option("--out", help="The npz file to write.")] = Path("demonstrations.npz"),
    episodes: Annotated[int, _option("Number of episodes; default: 20.", "--episodes", min=1)] = 20,
    seed: Annotated[int | None, _option("Seed of environments and actions; default: the run's.", min=0)] = None,
    stochastic: Annotated[bool, _option("Sample actions, as in training.", "--stochastic")] = False,
    task: Annotated[str | None, _option("The env_id to play, of a run in several.")] = None,
    output_dir: Annotated[Path | None, _option("Folder in which latest is searched.")] = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Record episodes of a policy as demonstrations, for gail."""
    from rl_training.runtime.demos import describe, record_demonstrations

    recorded = record_demonstrations(
        _one_run(run, checkpoint, output_dir),
        out,
        num_episodes=episodes,
        seed=seed,
        stochastic=stochastic,
        task=task,
        device=device or "auto",
        allow_import=_allow(allow_import),
    )
    print(f"{describe(recorded)}\nwrote    {out}")


@app.command()
def resume(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    total_timesteps: Annotated[
        int | None, _steps_option("Env steps in total, with those before; default: the run's.")
    ] = None,
    extend: Annotated[str, typer.Option(help="keep: schedules end as before; stretch: at the new total.")] = "keep",
    output_dir: OutputDir = None,
    device: DeviceOption = None,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Resume training from a checkpoint, in a new run folder."""
    from rl_training.runtime.workflows import resume_training

    result = resume_training(
        _one_run(run, checkpoint, output_dir),
        total_timesteps=total_timesteps,
        extend=extend,  # type: ignore[arg-type]
        output_dir=output_dir,
        device=device,
        progress=progress,
        allow_import=_allow(allow_import),
    )
    _summarize(result, result.run_dir.parent)


@config_app.command("check")
def config_check(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Validate a config without training."""
    path = _one_config(config, config_option)
    _warn(_controls(_load(path, set_, allow_import)))
    print(f"{path}: ok")


@config_app.command("show")
def config_show(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Print a config with all defaults filled in."""
    import yaml

    from rl_training.runtime.registry import ALGORITHMS
    from rl_training.runtime.run_folder import config_to_dict
    from rl_training.runtime.setup import with_env_defaults

    loaded = _load(_one_config(config, config_option), set_, allow_import)
    loaded = with_env_defaults(loaded, ALGORITHMS[loaded.algo].recipe)
    print(yaml.safe_dump(config_to_dict(loaded, _controls(loaded)), sort_keys=False), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of configs, with which editors complete and check them."""
    import json

    from rl_training.runtime.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of all config keys and hyperparameters, in Markdown."""
    from rl_training.runtime.schema import reference

    print(reference(), end="")


@app.command()
def schedule(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    png: Annotated[Path | None, _option("Also save a plot as this PNG file.")] = None,
    allow_import: AllowImport = False,
) -> None:
    """Show how every scheduled hyperparameter changes during training."""
    from rl_training.runtime import preview

    path = _one_config(config, config_option)
    controls = _controls(_load(path, set_, allow_import))
    if not controls.varying:
        print(f"{path}: nothing is scheduled; every number keeps its value")
    else:
        print(f"{path}: {len(controls.varying)} hyperparameters scheduled over {controls.horizon:,} env steps\n")
        print(f"{'':<24}" + "".join(f"{column:>12}" for column in preview.COLUMNS))
    for name, values in preview.table(controls):
        print(f"{name:<24}" + "".join(f"{value:>12.5g}" for value in values))
    for name in controls.varying:
        print(f"\n{name}")
        print("\n".join(preview.plot(preview.sampled(controls, name)[1])))
        print(preview.axis(controls.horizon))
    _warn(controls)
    if png is not None:
        preview.save_png(controls, png)
        print(f"\nwrote {png}")


@app.command()
def algorithms(name: Annotated[str | None, typer.Argument(help="One algorithm.", show_default=False)] = None) -> None:
    """List the algorithms and every hyperparameter with its default, bounds and meaning."""
    from rl_training.config import InputError
    from rl_training.runtime.hyperparameters import hyperparameters_of, type_name
    from rl_training.runtime.loading import unknown_algorithm
    from rl_training.runtime.registry import ALGORITHMS

    if name is not None and name not in ALGORITHMS:
        raise InputError(unknown_algorithm(name))
    for algo, entry in ALGORITHMS.items():
        if name not in (None, algo):
            continue
        recipe = entry.recipe
        players = "1, or 2 who move in turns" if recipe.two_players else "1"
        print(f"{algo}: {recipe.summary}\n  actions       {recipe.actions}\n  observations  {recipe.observations}")
        print(f"  players       {players}\n")
        hyperparameters = hyperparameters_of(recipe.hyperparameters)
        width = max(map(len, hyperparameters))
        for declared in hyperparameters.values():
            mark, default, text = "~" if declared.is_scalar else " ", declared.default_text, declared.help
            if get_origin(declared.hint) is Literal:
                text += f" (choices: {type_name(declared.hint)})"
            if declared.schedule:
                default, text = "scheduled", f"{text} (default: {default})"
            print(f"  {mark} {declared.name:<{width}} {default:<12} {declared.bounds:<12} {text}")
        print("\n  ~ can be scheduled\n")


@app.command()
def doctor() -> None:
    """Show versions, devices, threads and environment backends."""
    from rl_training.runtime.metadata import installation_report

    for name, text in installation_report().items():
        print(f"{name:<14} {text}")


def _one(argument: Path | None, option: Path | None, usage: str) -> Path:
    path = argument or option
    if path is None or (argument is not None and option is not None):
        raise typer.BadParameter(usage)
    return path


def _one_config(argument: Path | None, option: Path | None) -> Path:
    return _one(argument, option, "give one config: rl-training ... FILE, or --config FILE")


def _one_run(argument: Path | None, option: Path | None, output_dir: Path | None) -> Path:
    path = _one(argument, option, "give one run: rl-training ... RUN, or --checkpoint RUN")
    if path != Path("latest") or path.exists():  # a folder may have that name
        return path
    from rl_training.runtime.metadata import latest_run

    path = latest_run(output_dir or "runs")
    print(f"latest run: {path}", file=sys.stderr)
    return path


def _load(path: Path, overrides: list[str] | None, allow_import: bool, **values: Any) -> TrainConfig:
    from rl_training.runtime.loading import load_config

    given = {key: value for key, value in values.items() if value is not None}
    return load_config(path, overrides=overrides or [], allow_import=_allow(allow_import), **given)


def _controls(config: TrainConfig) -> Controls:
    from rl_training.runtime.controls import Controls
    from rl_training.runtime.registry import ALGORITHMS

    return Controls.of(config, ALGORITHMS[config.algo].recipe.hyperparameters)


def _warn(controls: Controls) -> None:
    from rl_training.runtime.preview import schedule_warnings

    for line in schedule_warnings(controls):
        print(f"warning: {line}", file=sys.stderr)


def _allow(allow_import: bool) -> bool:
    if allow_import:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for a module beside the config
    return allow_import


def _summarize(result: TrainResult, output_dir: Path) -> None:
    from rl_training.runtime.commands import command, program
    from rl_training.runtime.evaluation import describe_evaluation
    from rl_training.runtime.progress import summary

    metrics, end = result.metrics, result.schedules_end
    total = 2 * int(metrics["global_step"])
    # With schedules at their end, often 0, nothing more would be learned.
    extend = ["--extend", "stretch"] if end is not None and total > end else []
    summary(
        f"Trained {int(metrics['global_step']):,} steps.",
        {
            "evaluation": describe_evaluation(metrics) if "eval_return_mean" in metrics else None,
            "run folder": str(result.run_dir),
            "checkpoint": str(result.checkpoint_path),
        },
        {
            "evaluate": command("eval", result.run_dir, "--num-episodes", 100),
            "resume": command("resume", result.run_dir, "--total-timesteps", total, *extend),
            "curves": f"{program('tensorboard')} --logdir {shlex.quote(str(output_dir))}",
        },
    )


def _prepare_output() -> None:
    """Neither a closed stream nor a character that its encoding lacks may end a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_lost_output() -> None:
    """Drop what a closed terminal did not accept; Python would fail to write it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process, and return its exit code."""
    _prepare_output()
    try:
        app(args=None if argv is None else [str(argument) for argument in argv])
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    finally:
        _drop_lost_output()
    return 0


if __name__ == "__main__":
    sys.exit(main())
