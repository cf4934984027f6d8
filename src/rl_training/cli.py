"""The command line: verbs that call workflows. Torch is imported inside a verb, so that --help is instant."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

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
            _exit(f"{error}\nresume with: {_command('resume', '--checkpoint', result.run_dir)}", 130)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            from rl_training.config import InputError
            from rl_training.runtime.metrics import TrainingDiverged
            from rl_training.runtime.outcome import TrainingFailed

            if isinstance(error, InputError):
                _exit("\n".join(f"error: {line}" for line in str(error).splitlines()), 2)
            if isinstance(error, TrainingDiverged | TrainingFailed):
                _exit(f"error: {error}", 1)
            raise


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

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file.", show_default=False)]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file.", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: --set algo_kwargs.clip_coef=0.1", show_default=False)
]
AllowImport = Annotated[
    bool, typer.Option("--allow-import", help="Allow an env_id of the form module:id, which imports that module.")
]
CheckpointOption = Annotated[Path, typer.Option("--checkpoint", help="A checkpoint, or a run folder (its newest).")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps.", show_default=False)]
OutputDir = Annotated[
    Path | None, typer.Option("--output-dir", help="Folder for the run's folder.", show_default=False)
]
ProgressOption = Annotated[str, typer.Option("--progress", help="auto, live, plain or silent.")]


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"rl-training {version('rl-training')}")
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
    total_timesteps: Annotated[int | None, typer.Option(help="Override total_timesteps.", show_default=False)] = None,
    num_envs: Annotated[int | None, typer.Option(help="Override num_envs.", show_default=False)] = None,
    device: DeviceOption = None,
    output_dir: OutputDir = None,
    run_suffix: Annotated[str | None, typer.Option(help="End of the run folder's name.", show_default=False)] = None,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Train as a YAML file says."""
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
    checkpoint: CheckpointOption,
    num_episodes: Annotated[int | None, typer.Option(min=1, help="Default: eval_episodes.", show_default=False)] = None,
    task: Annotated[str | None, typer.Option(help="Of several env_ids only this one.", show_default=False)] = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Evaluate a checkpoint on fresh environments."""
    from rl_training.runtime.workflows import evaluate_checkpoint

    metrics = evaluate_checkpoint(
        checkpoint, num_episodes=num_episodes, task=task, device=device or "auto", allow_import=_allow(allow_import)
    )
    width = max([18, *map(len, metrics)])
    for name, value in metrics.items():
        print(f"{name:<{width}} {value:g}")


@app.command()
def resume(
    checkpoint: CheckpointOption,
    total_timesteps: Annotated[int | None, typer.Option(help="Default: the run's own.", show_default=False)] = None,
    extend: Annotated[str, typer.Option(help="keep: schedules hold their end; stretch: over the new total.")] = "keep",
    output_dir: OutputDir = None,
    device: DeviceOption = None,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Go on from a checkpoint, in a new run folder."""
    from rl_training.runtime.workflows import resume_training

    result = resume_training(
        checkpoint,
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
    """Validate a config; nothing is made."""
    path = _one_config(config, config_option)
    _load(path, set_ or [], allow_import)
    print(f"{path}: ok")


@config_app.command("show")
def config_show(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Print a config with every default spelt out."""
    import yaml

    from rl_training.runtime.setup import config_to_dict

    loaded = _load(_one_config(config, config_option), set_ or [], allow_import)
    print(yaml.safe_dump(config_to_dict(loaded, _controls(loaded)), sort_keys=False), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print a JSON Schema, with which editors complete and check configs."""
    import json

    from rl_training.runtime.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of all keys and hyperparameters, in Markdown."""
    from rl_training.runtime.schema import reference

    print(reference(), end="")


@app.command()
def schedule(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    png: Annotated[Path | None, typer.Option(help="Also draw them into this file.", show_default=False)] = None,
    allow_import: AllowImport = False,
) -> None:
    """Show what every scheduled number will do, before training."""
    from rl_training.runtime import preview

    path = _one_config(config, config_option)
    controls = _controls(_load(path, set_ or [], allow_import))
    if not controls.varying:
        print(f"{path}: nothing is scheduled; every number keeps its value")
    else:
        print(f"{path}: {len(controls.varying)} scheduled over {controls.horizon:,} env steps\n")
        print(f"{'':<24}" + "".join(f"{percent:>11}%" for percent in preview.QUARTERS))
    for name, values in preview.table(controls):
        print(f"{name:<24}" + "".join(f"{value:>12.5g}" for value in values))
    for name in controls.varying:
        print(f"\n{name}")
        print("\n".join(preview.plot(preview.sampled(controls, name)[1])))
    if png is not None:
        preview.save_png(controls, png)
        print(f"\nwrote {png}")


@app.command()
def algorithms(name: Annotated[str | None, typer.Argument(help="Only this one.", show_default=False)] = None) -> None:
    """List the algorithms and every hyperparameter with its default, bounds and meaning."""
    from rl_training.config import InputError, nearest
    from rl_training.runtime.controls import fields_of
    from rl_training.runtime.registry import ALGORITHMS
    from rl_training.runtime.schema import default_text

    if name is not None and name not in ALGORITHMS:
        raise InputError(f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)} (there are: {', '.join(ALGORITHMS)})")
    for algo, entry in ALGORITHMS.items():
        if name not in (None, algo):
            continue
        recipe = entry.recipe
        print(f"{algo}: {recipe.summary}\n  actions       {recipe.actions}\n  observations  {recipe.observations}\n")
        for field in fields_of(recipe.hyperparameters).values():
            mark = "~" if field.is_scalar else " "
            print(f"  {mark} {field.name:<22} {default_text(field):<12} {field.bounds:<12} {field.help}")
        print("\n  ~ can be scheduled\n")


@app.command()
def doctor() -> None:
    """Show versions, devices, threads and the environment backends found."""
    import importlib.util

    import torch

    from rl_training.runtime.metadata import package_versions

    for package, version in package_versions().items():
        print(f"{package:<14} {version}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"{'devices':<14} cpu{''.join(f', cuda:{i} ({gpu})' for i, gpu in enumerate(gpus))}")
    omp = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"{'threads':<14} torch {torch.get_num_threads()}, cores {os.cpu_count()}, OMP_NUM_THREADS {omp}")
    extras = {
        "ale": "ale_py",
        "mujoco": "mujoco",
        "box2d": "Box2D",
        "envpool": "envpool",
        "wandb": "wandb",
        "ray": "ray",
    }
    found = {extra: importlib.util.find_spec(module) is not None for extra, module in extras.items()}
    print(f"{'backends':<14} sync, async, vector{''.join(f', {b}' for b in ('ale', 'envpool') if found[b])}")
    missing = [
        f"rl-training[{'atari' if e == 'ale' else e}]" for e, there in found.items() if not there and e != "envpool"
    ]
    if missing:
        print(f"{'not installed':<14} {', '.join(missing)}")


def _one_config(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise typer.BadParameter("give one config: rl-training ... FILE, or --config FILE")
    path = argument or option
    assert path is not None
    return path


def _load(path: Path, overrides: list[str], allow_import: bool, **values: Any) -> TrainConfig:
    from rl_training.runtime.loading import load_config

    return load_config(path, overrides=overrides, allow_import=_allow(allow_import), **values)


def _controls(config: TrainConfig) -> Controls:
    from rl_training.runtime.controls import Controls
    from rl_training.runtime.registry import ALGORITHMS

    return Controls(ALGORITHMS[config.algo].recipe.hyperparameters, config.algo_kwargs, config.horizon)


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
            "evaluation": describe_evaluation(metrics),
            "run folder": str(result.run_dir),
            "checkpoint": str(result.checkpoint_path),
        },
        {
            "evaluate": _command("eval", "--checkpoint", result.run_dir, "--num-episodes", 100),
            "resume": _command("resume", "--checkpoint", result.run_dir, "--total-timesteps", total, *extend),
            "curves": f"{_program('tensorboard')} --logdir {shlex.quote(str(output_dir))}",
        },
    )


def _command(*words: Any) -> str:
    return f"{_program('rl-training')} {shlex.join(map(str, words))}"


def _program(name: str) -> str:
    """How this program can be called from where the user stands: by name where it is on the PATH, else by its path."""
    import shutil

    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return os.path.relpath(beside)


def main() -> None:
    try:
        app()
    finally:
        _leave_lost_output()


def _leave_lost_output() -> None:
    """What a terminal that is gone did not take is dropped, or Python would fail to write it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
