"""The folder of a run: its name, `config.yaml`, `metadata.json` and the log."""

from __future__ import annotations

import re
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from rl_training.config import TrainConfig
from rl_training.errors import InputError
from rl_training.runtime.atomic_files import write_text_atomic
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.hyperparameters import is_given
from rl_training.runtime.metadata import update_metadata, write_metadata
from rl_training.runtime.metrics import MetricsLog, import_wandb

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun

LONGEST_NAME = 80  # characters for the environments in the name of the folder


def open_folder(run: TrainingRun, suffix: str | None) -> tuple[Path, MetricsLog]:
    """Make the folder of a run and open its log. An error leaves no folder behind."""
    config, controls = run.config, run.controls
    wandb, text = wandb_options(config), config_text(config, controls)
    names = {"schedule_names": controls.varying, "hyperparameter_names": controls.schedules}
    if wandb is not None:
        import_wandb()
    path = make_run_dir(config, suffix, run.resume)
    try:
        write_text_atomic(path / "config.yaml", text)
        write_metadata(path, command=sys.argv, seed=config.seed, extra=run_facts(run))
        return path, MetricsLog(path, wandb=wandb, config=config_to_dict(config, controls), **names)
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError(f"run folder {path} cannot be written: {error.strerror or error}") from error
        raise


def make_run_dir(config: TrainConfig, suffix: str | None, resume: Checkpoint | None) -> Path:
    """A new folder `<algo>__<env>__seed<seed>__<suffix or time>`; that of a resumed run names the step it begins at."""
    if suffix is not None and not re.fullmatch(r"[\w.+-]+", suffix):
        raise InputError(f"run_suffix should be letters, digits and . _ + -, got {suffix!r}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    tail = suffix or (f"resumed-at-{resume.step}-{stamp}" if resume else stamp)
    name = f"{config.algo}__{_env_part(config)}__seed{config.seed}__{tail}"
    for attempt in range(1, 1000):
        path = config.output_dir / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if suffix:
                raise InputError(f"run folder {path} exists already; choose another run_suffix") from None
        except OSError as error:
            cause = error.strerror
            raise InputError(f"run folder {path} cannot be made: {cause}; choose another output_dir") from error
    raise InputError(f"no free run folder beside {path}")


def _env_part(config: TrainConfig) -> str:
    """The environments in the name of the folder; the first ones of a long list."""
    names = [re.sub(r"[^\w.-]+", "-", task.env_id) for task in config.tasks]
    shown = [name for i, name in enumerate(names) if i == 0 or len("+".join(names[: i + 1])) <= LONGEST_NAME]
    more = len(names) - len(shown)
    return "+".join(shown) + (f"+{more}-more" if more else "")


def wandb_options(config: TrainConfig) -> dict[str, Any] | None:
    if config.wandb is False:
        return None
    given = {} if config.wandb is True else dict(config.wandb)
    return {"project": "rl-training", "tags": config.tags or None} | given


def config_text(config: TrainConfig, controls: Controls) -> str:
    try:
        text: str = yaml.safe_dump(config_to_dict(config, controls), sort_keys=False)
        return text
    except yaml.YAMLError as error:
        raise InputError(f"YAML cannot hold the config: {error}; use plain numbers, text, lists, dicts") from error


def config_to_dict(config: TrainConfig, controls: Controls) -> dict[str, Any]:
    """The config for YAML and JSON, with all defaults of the algorithm."""
    return asdict(config) | {"output_dir": str(config.output_dir), "algo_kwargs": resolved_kwargs(controls)}


def resolved_kwargs(controls: Controls) -> dict[str, Any]:
    """`algo_kwargs` with all defaults, which read back to the same hyperparameters."""
    values: dict[str, Any] = {}
    left_out: set[str] = set()  # an error to give: they have no effect, or make a default schedule that is given
    for name, declared in controls.declared.items():
        value = getattr(controls.initial, name)
        if name in controls.varying:
            values[name] = controls.varying[name].dump()
        elif declared.auto and value is None:
            values[name] = "auto"
        else:
            values[name] = list(value) if isinstance(value, tuple) else value
        if not declared.has_effect(vars(controls.initial)):
            left_out.add(name)
        if declared.sources:
            left_out |= set(declared.sources) if is_given(name, controls.kwargs) else {name}
    return {name: value for name, value in values.items() if name not in left_out}


def run_facts(run: TrainingRun) -> dict[str, Any]:
    """The entries of `metadata.json` about this run: its devices, and the run it was resumed from."""
    return {
        "device": str(run.device),
        "gpu": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None,
        "num_threads": torch.get_num_threads(),
        **run.source.facts(),
        "schedule_horizon": run.config.horizon,
        "resumed_from": str(run.resume.path) if run.resume else None,
        "resumed_at_step": run.resume.step if run.resume else None,
    }


def write_status(run: TrainingRun, status: str, **more: Any) -> None:
    try:
        update_metadata(run.dir, status=status, **more)
    except OSError as error:
        run.progress.message(f"{run.dir}: the status cannot be written ({error.strerror or error}): {status}")
