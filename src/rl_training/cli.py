"""The command line: verbs that call workflows. Torch is imported inside a verb, so that --help is instant."""

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

from rl_training.runtime.output import leave_lost_output, prepare_output

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.controls import Controls
    from rl_training.runtime.run import TrainResult


class Verbs(TyperGroup):
    """Turns what can go wrong into an exit code: 0 done, 1 training failed, 2 bad input, 130 interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            result = getattr(error, "result", None)
            if result is None:
                _exit("interrupted; nothing was saved since the last checkpoint", 130)
            _exit(f"{error}\nresume with: {_command('resume', result.run_dir)}", 130)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            from rl_training.config import InputError
            from rl_training.runtime.metrics import TrainingDiverged
            from rl_training.runtime.outcome import TrainingFailed

            if isinstance(error, InputError):
                _exit("\n".join(f"error: {line}" for line in str(error).splitlines()) + _trace(error), 2)
            if isinstance(error, TrainingDiverged | TrainingFailed):
                _exit(f"error: {error}", 1)
            raise


def _trace(error: Exception) -> str:
    """What an environment raised, where it did: its author needs to see where."""
    trace = getattr(error, "trace", "")
    return f"\n\n{trace.rstrip()}" if trace else ""


def _exit(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code)


app = typer.Typer(
    name="rl-training",
    cls=Verbs,
    help="Train reinforcement-learning agents from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Check, show and describe configs.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML config.", show_default=False)]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML config.", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: --set algo_kwargs.clip_coef=0.1", show_default=False)
]
AllowImport = Annotated[
    bool, typer.Option("--allow-import", help="Allow an env_id of the form module:id, which imports that module.")
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="A run folder (its newest checkpoint), a checkpoint, or latest: the newest run in --output-dir or runs/.",
        show_default=False,
    ),
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Run folder or checkpoint, instead of RUN.", show_default=False)
]


def _whole(text: str) -> int:
    """A number as the YAML file takes it: 100000, 100_000 or 1e5."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise typer.BadParameter(f"should be a whole number, such as 100_000 or 1e5, got {text!r}")
    return int(number)


def _steps_option(help: str) -> Any:
    return typer.Option(parser=_whole, metavar="STEPS", help=help, show_default=False)


DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps.", show_default=False)]
OutputDir = Annotated[
    Path | None, typer.Option("--output-dir", help="Folder in which the run folder is created.", show_default=False)
]
ProgressOption = Annotated[str, typer.Option("--progress", help="Progress display: auto, live, plain or silent.")]


def _version(value: bool) -> None:
    if value:
        import rl_training

        print(f"rl-training {rl_training.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


@app.command()
def train(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    seed: Annotated[int | None, typer.Option(help="Override seed.", show_default=False)] = None,
    total_timesteps: Annotated[int | None, _steps_option("Override total_timesteps.")] = None,
    num_envs: Annotated[int | None, typer.Option(help="Override num_envs.", show_default=False)] = None,
    device: DeviceOption = None,
    output_dir: OutputDir = None,
    run_suffix: Annotated[str | None, typer.Option(help="Suffix of the folder's name.", show_default=False)] = None,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Train an agent from a YAML config."""
    named = {
        "seed": seed,
        "total_timesteps": total_timesteps,
        "num_envs": num_envs,
        "device": device,
        "output_dir": output_dir,
    }
    values = {key: value for key, value in named.items() if value is not None}
    loaded = _load(_one_config(config, config_option), set_ or [], allow_import, **values)
    from rl_training.runtime.workflows import train as run

    result = run(loaded, run_suffix=run_suffix, progress=progress)
    _summarize(result, loaded.output_dir)


@app.command("eval")
def evaluate(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    num_episodes: Annotated[
        int | None, typer.Option(min=1, help="Number of episodes; default: eval_episodes.", show_default=False)
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Evaluate only this env_id of a run in several.", show_default=False)
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder in which latest is looked for.", show_default=False)
    ] = None,
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
def resume(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    total_timesteps: Annotated[
        int | None, _steps_option("Env steps in total, including those before; default: the run's.")
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
    _warn(_controls(_load(path, set_ or [], allow_import)))
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
    from rl_training.runtime.setup import config_to_dict, with_env_defaults

    loaded = _load(_one_config(config, config_option), set_ or [], allow_import)
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
    png: Annotated[Path | None, typer.Option(help="Also save a plot as this PNG file.", show_default=False)] = None,
    allow_import: AllowImport = False,
) -> None:
    """Show how every scheduled hyperparameter changes during training."""
    from rl_training.runtime import preview

    path = _one_config(config, config_option)
    controls = _controls(_load(path, set_ or [], allow_import))
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
    from rl_training.config import InputError, nearest
    from rl_training.runtime.controls import fields_of
    from rl_training.runtime.registry import ALGORITHMS
    from rl_training.runtime.schema import default_text
    from rl_training.runtime.strict_types import type_name

    if name is not None and name not in ALGORITHMS:
        raise InputError(f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)} (there are: {', '.join(ALGORITHMS)})")
    for algo, entry in ALGORITHMS.items():
        if name not in (None, algo):
            continue
        recipe = entry.recipe
        players = "1, or 2 who move in turns" if recipe.two_players else "1"
        print(f"{algo}: {recipe.summary}\n  actions       {recipe.actions}\n  observations  {recipe.observations}")
        print(f"  players       {players}\n")
        fields = fields_of(recipe.hyperparameters).values()
        width = max(len(field.name) for field in fields)
        for field in fields:
            mark, default, text = "~" if field.is_scalar else " ", default_text(field), field.help
            if get_origin(field.hint) is Literal:
                text += f" (choices: {type_name(field.hint)})"
            if field.schedule:
                default, text = "scheduled", f"{text} (default: {default})"
            print(f"  {mark} {field.name:<{width}} {default:<12} {field.bounds:<12} {text}")
        print("\n  ~ can be scheduled\n")


@app.command()
def doctor() -> None:
    """Show versions, devices, threads and environment backends."""
    from rl_training.runtime.doctor import report

    for name, text in report().items():
        print(f"{name:<14} {text}")


def _one_config(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise typer.BadParameter("give one config: rl-training ... FILE, or --config FILE")
    path = argument or option
    assert path is not None
    return path


def _one_run(argument: Path | None, option: Path | None, output_dir: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise typer.BadParameter("give one run: rl-training ... RUN, or --checkpoint RUN")
    path = argument or option
    assert path is not None
    if path != Path("latest") or path.exists():  # a folder of that name is meant by its name
        return path
    from rl_training.runtime.metadata import latest_run

    path = latest_run(output_dir or "runs")
    print(f"latest run: {path}", file=sys.stderr)
    return path


def _load(path: Path, overrides: list[str], allow_import: bool, **values: Any) -> TrainConfig:
    from rl_training.runtime.loading import load_config

    return load_config(path, overrides=overrides, allow_import=_allow(allow_import), **values)


def _controls(config: TrainConfig) -> Controls:
    from rl_training.runtime.controls import Controls
    from rl_training.runtime.registry import ALGORITHMS

    return Controls.of(config, ALGORITHMS[config.algo].recipe.hyperparameters)


def _warn(controls: Controls) -> None:
    for line in controls.warnings():
        print(f"warning: {line}", file=sys.stderr)


def _allow(allow_import: bool) -> bool:
    if allow_import:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that a module beside the config is found
    return allow_import


def _summarize(result: TrainResult, output_dir: Path) -> None:
    from rl_training.runtime.evaluation import describe_evaluation
    from rl_training.runtime.progress import summary

    metrics, end = result.metrics, result.schedules_end
    total = 2 * int(metrics["global_step"])
    # With schedules that have come to their end, often at 0, nothing more would be learned.
    extend = ["--extend", "stretch"] if end is not None and total > end else []
    summary(
        f"Trained {int(metrics['global_step']):,} steps.",
        {
            "evaluation": describe_evaluation(metrics) if "eval_return_mean" in metrics else None,
            "run folder": str(result.run_dir),
            "checkpoint": str(result.checkpoint_path),
        },
        {
            "evaluate": _command("eval", result.run_dir, "--num-episodes", 100),
            "resume": _command("resume", result.run_dir, "--total-timesteps", total, *extend),
            "curves": f"{_program('tensorboard')} --logdir {shlex.quote(str(output_dir))}",
        },
    )


def _command(*words: Any) -> str:
    """A command to copy; with what a run named in it needs to be opened."""
    imports = any(_imports_a_module(word) for word in words if isinstance(word, Path))
    flags = ["--allow-import"] if imports else []
    return f"{_program('rl-training')} {shlex.join(map(str, [*words, *flags]))}"


def _imports_a_module(run_dir: Path) -> bool:
    """Whether an env_id of the run has the form module:id."""
    from rl_training.config import InputError, read_document

    try:
        env_id = read_document((run_dir / "config.yaml").read_text(encoding="utf-8"), "config.yaml").data["env_id"]
    except (OSError, InputError, KeyError):  # a hint to the user is no reason to fail
        return False
    return any(":" in name for name in ([env_id] if isinstance(env_id, str) else env_id))


def _program(name: str) -> str:
    """How this program can be called from where the user stands: by name where it is on the PATH, else by its path."""
    import shutil

    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return os.path.relpath(beside)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process; returns its exit code."""
    prepare_output()
    try:
        app(args=None if argv is None else [str(word) for word in argv])
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    finally:
        leave_lost_output()
    return 0


if __name__ == "__main__":
    sys.exit(main())
