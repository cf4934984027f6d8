"""Commands that show a trained policy and its world model, and that export it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli.app import app
from rl_training.cli.options import (
    AllowImport,
    BestOption,
    CheckpointOption,
    DeviceOption,
    LatestDir,
    RunArgument,
    SeedOption,
    StochasticOption,
    TaskOption,
    allow,
    one_run,
    option,
)


@app.command()
def record(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    out: Annotated[Path, typer.Option("--out", help="The .mp4 or .gif file to write.")] = Path("video.mp4"),
    episodes: Annotated[int, option("Number of episodes; default: 3.", "--episodes", min=1)] = 3,
    best: BestOption = False,
    stochastic: StochasticOption = False,
    seed: SeedOption = None,
    fps: Annotated[float | None, option("Images per second; default: the environment's speed.", "--fps")] = None,
    task: TaskOption = None,
    output_dir: LatestDir = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Record a video of a policy."""
    from rl_training.runtime.recording import describe, record_video

    recorded = record_video(
        one_run(run, checkpoint, output_dir),
        out,
        num_episodes=episodes,
        best=best,
        stochastic=stochastic,
        seed=seed,
        fps=fps,
        task=task,
        device=device or "auto",
        allow_import=allow(allow_import),
    )
    print(f"{describe(recorded)}\nwrote    {out}")


@app.command()
def export(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    onnx: Annotated[Path | None, option("Write ONNX, for onnxruntime and others.", "--onnx")] = None,
    pt2: Annotated[Path | None, option("Write torch.export's format, for torch.", "--pt2")] = None,
    best: BestOption = False,
    task: TaskOption = None,
    output_dir: LatestDir = None,
) -> None:
    """Export a policy as a file that runs without rl-training."""
    from rl_training.runtime.exporting import describe_export, export_policy

    exported = export_policy(one_run(run, checkpoint, output_dir), onnx=onnx, pt2=pt2, best=best, task=task)
    print(describe_export(exported))


@app.command()
def dream(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    png: Annotated[Path | None, option("The .png file to draw.", "--png")] = None,
    gif: Annotated[Path | None, option("The .gif file to draw.", "--gif")] = None,
    context: Annotated[int, option("Observations that the model sees; default: 5.", min=1)] = 5,
    steps: Annotated[int, option("Observations that it imagines; default: 45.", min=1)] = 45,
    samples: Annotated[int, option("Samples of the prediction; default: 8.", min=1)] = 8,
    best: BestOption = False,
    stochastic: StochasticOption = False,
    seed: SeedOption = None,
    fps: Annotated[float, option("Images per second of the gif; default: 10.", "--fps")] = 10.0,
    output_dir: LatestDir = None,
    device: DeviceOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Draw real observations and the predictions of a world model."""
    if png is None and gif is None:
        raise typer.BadParameter("give the file to draw: --png FILE, --gif FILE or both")
    from rl_training.runtime.dreaming import dream_checkpoint
    from rl_training.runtime.open_loop import describe

    dreamt = dream_checkpoint(
        one_run(run, checkpoint, output_dir),
        png=png,
        gif=gif,
        context=context,
        steps=steps,
        samples=samples,
        best=best,
        stochastic=stochastic,
        seed=seed,
        fps=fps,
        device=device or "auto",
        allow_import=allow(allow_import),
    )
    print(describe(dreamt))
    for path in (png, gif):
        if path is not None:
            print(f"wrote {path}")


@app.command()
def pack(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run folder, checkpoint or latest; or several seeds, or a folder of them.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The .zip file to write.")] = Path("policy.zip"),
    best: BestOption = False,
    output_dir: LatestDir = None,
) -> None:
    """Pack a policy in one file to share: weights, config, model card."""
    from rl_training.reports.pack import describe_pack, pack_policy

    print(describe_pack(pack_policy([one_run(run, None, output_dir) for run in runs], out, best=best)))
