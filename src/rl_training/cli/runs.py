"""Commands that train, resume, evaluate and record."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_training.cli.app import app
from rl_training.cli.options import (
    AllowImport,
    BestOption,
    CheckpointOption,
    ConfigArgument,
    ConfigOption,
    DeviceOption,
    LatestDir,
    OutputDir,
    ProgressOption,
    ResumedArgument,
    RunArgument,
    SeedOption,
    SetOption,
    StochasticOption,
    TaskOption,
    allow,
    load,
    one_config,
    one_run,
    option,
    steps_option,
)

if TYPE_CHECKING:
    from rl_training.runtime.outcome import TrainResult


@app.command()
def train(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    seed: Annotated[int | None, option("Override seed.")] = None,
    total_timesteps: Annotated[int | None, steps_option("Override total_timesteps.")] = None,
    num_envs: Annotated[int | None, option("Override num_envs.")] = None,
    device: DeviceOption = None,
    output_dir: OutputDir = None,
    run_suffix: Annotated[str | None, option("Suffix of the folder's name.")] = None,
    progress: ProgressOption = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Train an agent from a YAML config."""
    loaded = load(
        one_config(config, config_option),
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
    num_episodes: Annotated[int | None, option("Number of episodes; default: eval_episodes.", min=1)] = None,
    best: BestOption = False,
    stochastic: StochasticOption = False,
    seed: SeedOption = None,
    task: Annotated[str | None, option("Evaluate only this env_id of a run in several.")] = None,
    video: Annotated[Path | None, option("Film the first environment: an .mp4 or .gif file.")] = None,
    json_: Annotated[bool, option("Print JSON, with the return of each episode.", "--json")] = False,
    output_dir: LatestDir = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Evaluate a checkpoint in new environments."""
    from rl_training.runtime.workflows import play_checkpoint

    played = play_checkpoint(
        one_run(run, checkpoint, output_dir),
        num_episodes=num_episodes,
        best=best,
        stochastic=stochastic,
        seed=seed,
        task=task,
        video=video,
        device=device or "auto",
        allow_import=allow(allow_import),
    )
    if json_:
        print(json.dumps(played.as_json(), indent=2))
        return
    width = max([18, *map(len, played.metrics)])
    for name, value in played.metrics.items():
        print(f"{name:<{width}} {value:g}")
    if video is not None:
        print(f"wrote {video}", file=sys.stderr)


@app.command()
def demos(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    out: Annotated[Path, typer.Option("--out", help="The npz file to write.")] = Path("demonstrations.npz"),
    episodes: Annotated[int, option("Number of episodes; default: 20.", "--episodes", min=1)] = 20,
    seed: SeedOption = None,
    stochastic: StochasticOption = False,
    task: TaskOption = None,
    output_dir: LatestDir = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Record episodes of a policy as demonstrations, for gail."""
    from rl_training.runtime.demos import describe, record_demonstrations

    recorded = record_demonstrations(
        one_run(run, checkpoint, output_dir),
        out,
        num_episodes=episodes,
        seed=seed,
        stochastic=stochastic,
        task=task,
        device=device or "auto",
        allow_import=allow(allow_import),
    )
    print(f"{describe(recorded)}\nwrote    {out}")


@app.command()
def resume(
    run: ResumedArgument = None,
    checkpoint: CheckpointOption = None,
    total_timesteps: Annotated[
        int | None, steps_option("Env steps in total, with those before; default: the run's.")
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
        one_run(run, checkpoint, output_dir),
        total_timesteps=total_timesteps,
        extend=extend,  # type: ignore[arg-type]
        output_dir=output_dir,
        device=device,
        progress=progress,
        allow_import=allow(allow_import),
    )
    _summarize(result, result.run_dir.parent)


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
