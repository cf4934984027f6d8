"""Packing a policy to share it: one zip file with weights, config and a model card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZipFile

import yaml

from rl_training.errors import InputError, cut
from rl_training.reports.curve_picture import can_draw, curve_picture
from rl_training.reports.groups import Group, group_runs
from rl_training.reports.model_card import CURVE, model_card
from rl_training.reports.runs import Run, is_number, is_run, load_runs
from rl_training.reports.table import METRIC, VERSIONS, row_of
from rl_training.runtime.atomic_files import write_atomic
from rl_training.runtime.checkpoint_format import MANIFEST, Checkpoint, write_files
from rl_training.runtime.checkpoints import best_of, open_checkpoint, step_dir_name
from rl_training.runtime.number_text import number
from rl_training.runtime.packs import add_entry
from rl_training.runtime.workflows import ACTING, config_of

# Keys of the config on which neither acting nor another training depends: folders and services of whoever trained.
NOT_SHARED = ("output_dir", "wandb", "tags", "tune")
MACHINE = ("processor", "cpu_count", "gpu", "device", "started")  # of metadata.json; not its paths, host, command, git


class PackedPolicy(NamedTuple):
    """What was packed, and where."""

    path: Path
    size: int  # bytes
    facts: dict[str, Any]  # metadata.json of the pack: scores, versions, machine
    notes: list[str]  # what its author may want to know


class Chosen(NamedTuple):
    checkpoint: Checkpoint
    run: Run | None  # that of the checkpoint; None: its log is not there
    group: Group | None  # all runs that are reported
    reason: str  # why it was chosen from several, "" if there was nothing to choose


def pack_policy(
    runs: str | Path | Iterable[str | Path], out: str | Path = "policy.zip", *, best: bool = False
) -> PackedPolicy:
    """Write the policy of a run folder or checkpoint to a zip file, with config and model card.

    Of several runs, which differ in their seed, the one with the highest score is packed and the scores of all are
    reported. best: its checkpoint with the best evaluation, not the newest. `load_policy` and the other functions take
    the file wherever they take a run folder.
    """
    target = Path(out)
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the file to write")
    chosen = choose([Path(path) for path in ([runs] if isinstance(runs, str | Path) else runs)], best=best)
    config = shared_config(chosen.checkpoint.config)
    config_of(chosen.checkpoint, needs_env=False)  # what cannot be loaded here is not worth sharing
    facts = facts_of(chosen, config)
    picture = curve_picture(chosen.group) if chosen.group is not None and can_draw() else None
    pages = {
        "README.md": model_card(facts, chosen.checkpoint.info["spaces"], file=target.name, curve=picture is not None),
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "metadata.json": json.dumps(facts, indent=2, ensure_ascii=False) + "\n",
    }
    contents = {name: text.encode() for name, text in pages.items()} | ({CURVE: picture} if picture else {})
    try:
        write_atomic(target, lambda file: write_pack(file, contents, chosen.checkpoint, config))
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
    return PackedPolicy(target, target.stat().st_size, facts, notes_of(chosen, config, picture))


def write_pack(file: BinaryIO, pages: Mapping[str, bytes], checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    folder = f"checkpoints/{step_dir_name(checkpoint.step)}"
    with ZipFile(file, "w") as archive:
        for name, content in pages.items():
            add_entry(archive, name, [content])
        write_files(
            lambda name, blocks: add_entry(archive, f"{folder}/{name}", blocks),
            checkpoint.state,
            config,
            checkpoint.info,
            checkpoint.created,
        )


def choose(paths: Sequence[Path], *, best: bool) -> Chosen:
    """A checkpoint that is given, or that of the run with the highest score."""
    for path in paths:
        if path.is_file():
            raise InputError(f"{path} is a file: give run folders or a checkpoint's directory")
    given = [path for path in paths if is_checkpoint(path)]
    if len(given) > 1:
        raise InputError(f"give one checkpoint, not {len(given)}; the other seeds as run folders")
    runs = load_runs(folder for path in paths if (folder := log_folder(path)) is not None)
    group = one_group(runs)
    if given:
        checkpoint = open_checkpoint(best_of(given[0]) if best else given[0], ACTING)
        run = next((run for run in runs if log_folder(given[0]) in run.folders), None)
        return Chosen(checkpoint, run, group, "")
    ranked = sorted(runs, key=lambda run: -score_of(run, best=best))
    run = next((run for run in ranked if has_checkpoint(run)), ranked[0])
    reason = f"{'best' if best else 'last'} evaluation" if len(runs) > 1 else ""
    return Chosen(open_checkpoint(best_folder(run) if best else run.folders[-1], ACTING), run, group, reason)


def is_checkpoint(path: Path) -> bool:
    """Whether there is something to load without a log: a checkpoint, or a folder that holds some."""
    return (path / MANIFEST).is_file() or ((path / "checkpoints").is_dir() and not is_run(path))


def log_folder(path: Path) -> Path | None:
    """The folder of the run, or of runs, to which a path belongs; None for a checkpoint without its run."""
    if not is_checkpoint(path):
        return path
    folder = path.resolve().parent.parent if (path / MANIFEST).is_file() else path
    return folder if is_run(folder) else None


def one_group(runs: Sequence[Run]) -> Group | None:
    if not runs:
        return None
    groups = group_runs(runs)
    if len(groups) > 1:
        names = cut("; ".join(group.name for group in groups))
        raise InputError(f"these runs have {len(groups)} configs ({names}): give the seeds of one of them, or one run")
    return groups[0]


def score_of(run: Run, *, best: bool) -> float:
    values = run.curve(METRIC).values
    return float("-inf") if not len(values) else float(values.max() if best else values[-1])


def has_checkpoint(run: Run) -> bool:
    return any((run.folders[-1] / "checkpoints").glob(f"*/{MANIFEST}"))


def best_folder(run: Run) -> Path:
    """The best checkpoint of a run; one that was resumed may have it in an earlier folder."""
    found = [folder for folder in reversed(run.folders) if (folder / "checkpoints" / "best" / MANIFEST).is_file()]
    return best_of(found[0] if found else run.folders[-1])


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what is nobody else's business."""
    shared = {key: value for key, value in config.items() if key not in NOT_SHARED}
    execution = {key: value for key, value in config.get("execution", {}).items() if key != "address"}
    kwargs = {key: file_name(value) for key, value in config.get("algo_kwargs", {}).items()}
    return shared | {"execution": execution, "algo_kwargs": kwargs}


def file_name(value: Any) -> Any:
    """A file that training read, such as demonstrations, without its folder."""
    return PureWindowsPath(value).name if isinstance(value, str) and is_machine_path(value) else value


def is_machine_path(text: str) -> bool:
    return text.startswith(("/", "~")) or PureWindowsPath(text).is_absolute()


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(item)


def facts_of(chosen: Chosen, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the model card says, as plain data."""
    checkpoint, run, group, reason = chosen
    metadata = run.metadata if run is not None else {}
    versions = metadata.get("versions") or {}
    return {
        "algo": config["algo"],
        "env_id": config["env_id"],
        "seed": config.get("seed", 0),
        "global_step": checkpoint.step,
        "chosen_by": reason,
        "evaluation": evaluation_of(checkpoint, run),
        "scores": scores_of(group),
        "status": run.status.split(":")[0] if run is not None else None,
        **{key: metadata.get(key) for key in MACHINE},
        "steps_per_second": run.score("steps_per_second") if run is not None else None,
        "wall_seconds": run.wall_seconds if run is not None else None,
        "versions": {name: str(versions[name]) for name in VERSIONS if name in versions},
    }


def evaluation_of(checkpoint: Checkpoint, run: Run | None) -> dict[str, Any]:
    """The last evaluation up to the step of a checkpoint; of one without a log that which it has noted."""
    noted = {"global_step": None, **checkpoint.info.get("metrics", {})}
    lines = run.lines if run is not None else []
    known = [line for line in lines if line["kind"] == "eval" and line["global_step"] <= checkpoint.step]
    line = known[-1] if known else {**noted, "global_step": None}
    metrics = {name: value for name, value in line.items() if name.startswith("eval_") and is_number(value)}
    return {"global_step": line["global_step"], "episodes": checkpoint.config.get("eval_episodes"), **metrics}


def scores_of(group: Group | None) -> dict[str, Any]:
    """The last evaluation of each run, and their interquartile mean with its interval."""
    if group is None:
        return {"metric": METRIC, "runs": []}
    row = row_of(group, METRIC)
    statistics = {name: getattr(row, name) for name in ("iqm", "low", "high", "mean", "worst", "worst_seed")}
    runs = [
        {"seed": run.seed, "steps": run.step, "status": run.status.split(":")[0], "score": run.score(METRIC)}
        for run in group.runs
    ]
    return {"metric": METRIC, **statistics, "runs": runs}


def notes_of(chosen: Chosen, config: Mapping[str, Any], picture: bytes | None) -> list[str]:
    notes = []
    if chosen.group is None:
        notes.append("without curves and scores of the run: its folder with metrics.jsonl is not there")
    elif picture is None and can_draw():
        notes.append(f"without {CURVE}: the log has no curve")
    elif picture is None:
        notes.append(f'without {CURVE}: that needs matplotlib: pip install "rl-training[plot]"')
    if chosen.run is not None and chosen.run.status != "finished":
        notes.append(f"the run is not finished: {chosen.run.status}")
    paths = [text for text in texts_in(config) if is_machine_path(text)]
    notes += [f"the config names {text}: whoever loads the pack needs it, and sees that path" for text in paths]
    return notes


def describe_pack(packed: PackedPolicy) -> str:
    facts = packed.facts
    env = facts["env_id"] if isinstance(facts["env_id"], str) else ", ".join(facts["env_id"])
    scores, evaluation = facts["scores"], facts["evaluation"]
    lines = [f"policy   {facts['algo']} on {env}, seed {facts['seed']}, step {facts['global_step']:,}"]
    if is_number(evaluation.get(METRIC)):
        lines.append(f"score    {number(evaluation[METRIC])}, the mean return of its last evaluation")
    if len(scores["runs"]) > 1 and scores["iqm"] is not None:
        interval = f", 95 % interval {number(scores['low'])} to {number(scores['high'])}" if scores["low"] else ""
        lines.append(f"seeds    {len(scores['runs'])}: IQM {number(scores['iqm'])}{interval}")
    lines += [f"note     {note}" for note in packed.notes]
    return "\n".join([*lines, f"wrote    {packed.path}, {packed.size:,} bytes"])
