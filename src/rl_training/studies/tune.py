"""Hyperparameter search with Optuna: trials are configs, each the mean of several seeds, and bad ones are pruned."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import yaml

from rl_training.config import TrainConfig, config_fields
from rl_training.errors import ConfigError, InputError, MissingPackage, nearest
from rl_training.reports import write_report
from rl_training.runtime.atomic_files import write_text_atomic
from rl_training.runtime.loading import build_config
from rl_training.runtime.search_space import Space
from rl_training.studies.bench import REPORT, groups_of, named_configs
from rl_training.studies.default_space import default_space
from rl_training.studies.job_process import PRUNED
from rl_training.studies.jobs import (
    JOB,
    Job,
    Jobs,
    JobsInterrupted,
    Outcome,
    Place,
    finished_before,
    locked,
    make_place,
    plain_config,
    read_job,
)
from rl_training.studies.jobs_view import make_view
from rl_training.studies.study_plots import ranked, study_section
from rl_training.types import Metrics

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise MissingPackage('tuning needs Optuna: pip install "rl-training[tune]"') from error

DATABASE, STUDY, BEST = "study.db", "study.json", "best.yaml"  # files of a study's folder
EVALUATIONS = 10  # of a run, where the config has none but at its end: pruning needs some
MOST_DRAWN = 5  # trials whose curves are in the report
Direction = Literal["maximize", "minimize"]


@dataclasses.dataclass(frozen=True)
class TuneResult:
    folder: Path
    value: float | None  # of the best trial: the mean over its seeds; None: no trial has finished
    params: dict[str, Any]  # of the best trial, by parameter
    config: TrainConfig | None  # the best config, which `best.yaml` holds
    states: dict[str, int]  # the number of trials that are complete, pruned, failed
    errors: list[str]  # of those that failed

    @property
    def config_path(self) -> Path:
        return self.folder / BEST

    @property
    def report_path(self) -> Path:
        return self.folder / REPORT


def tune(
    config: TrainConfig | Mapping[str, Any] | str | Path,
    *,
    trials: int = 50,
    jobs: int | None = None,
    seeds: Iterable[int] | None = None,
    space: Mapping[str, Any] | None = None,
    metric: str = "eval_return_mean",
    direction: Direction = "maximize",
    pruner: Literal["median", "none"] = "median",
    startup_trials: int = 10,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    ray: str | None = None,
    progress: str = "auto",
    allow_import: bool = True,
) -> TuneResult:
    """Search for good hyperparameters, `jobs` trials at a time, until the study in `out` has so many `trials`.

    `space` replaces the key `tune` of the config; without both, a space around the config's own values is searched.
    A trial trains the `seeds` (default: the config's own) one after the other; its value is the mean of the last
    `metric` of each. The first `startup_trials` are random but for the config's own values, and are never pruned. The
    same call continues an interrupted study.
    """
    name, loaded = next(iter(named_configs(config, overrides, allow_import).items()))  # type: ignore[arg-type]
    folder = Path("tune", name) if out is None else Path(out)
    options = StudyOptions(trials, _seeds(seeds, loaded), metric, direction, pruner, startup_trials)
    space_spec = dict(space or loaded.tune or default_space(loaded))
    base = with_evaluations(dataclasses.replace(loaded, tune={}), options)
    build_config({**config_data(base), "tune": space_spec}, needs_env=False)  # the space is checked with the config
    with locked(folder, "tune"):
        study = open_study(folder, base, space_spec, options)
        search = StudySearch(study, Space(space_spec, base.algo), base, folder, options, allow_import=allow_import)
        try:
            if search.left:
                run_search(search, name, jobs=jobs, ray=ray, progress=progress)
        finally:
            result = write_best(study, loaded, search.space, folder, options)
            write_page(study, name, folder, options)
    return result


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    trials: int
    seeds: list[int]
    metric: str
    direction: Direction
    pruner: str
    startup_trials: int

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"trials should be at least 1, got {self.trials}")
        if self.startup_trials < 0:
            raise InputError(f"startup_trials should be at least 0, got {self.startup_trials}")
        for name, value, known in (
            ("direction", self.direction, ("maximize", "minimize")),
            ("pruner", self.pruner, ("median", "none")),
        ):
            if value not in known:
                raise InputError(f"{name} should be {' or '.join(known)}, got {value!r}{nearest(str(value), known)}")


def _seeds(given: Iterable[int] | None, config: TrainConfig) -> list[int]:
    seeds = [config.seed] if given is None else list(given)
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise InputError(f"seeds should be different numbers from 0 on, got {seeds}")
    return seeds


def with_evaluations(config: TrainConfig, options: StudyOptions) -> TrainConfig:
    """Pruning compares evaluations during training; of checkpoints, a trial needs only those to resume from."""
    interval = config.eval_interval
    if options.pruner != "none" and interval == 0:
        interval = max(1, config.total_timesteps // EVALUATIONS)
    return dataclasses.replace(config, eval_interval=interval, keep_checkpoints=1)


def config_data(config: TrainConfig) -> dict[str, Any]:
    """A config as its file would spell it: the keys that differ from their defaults."""
    data: dict[str, Any] = {}
    for name, declared in config_fields().items():
        value = getattr(config, name)
        if declared.is_required() or value != declared.get_default(call_default_factory=True):
            data[name] = str(value) if isinstance(value, Path) else value
    return data


def open_study(folder: Path, base: TrainConfig, space: Mapping[str, Any], options: StudyOptions) -> optuna.Study:
    """The study in a folder, or a new one. An InputError if the folder's study is of another config or space."""
    content = {
        "config": plain_config(config_data(base), "the config"),
        "space": json.loads(json.dumps(space)),
        **{key: value for key, value in dataclasses.asdict(options).items() if key != "trials"},
    }
    path = folder / STUDY
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else content
    different = [key for key in content if before.get(key) != content[key]]
    if different:
        raise InputError(
            f"{folder} holds a study that differs in {', '.join(different)}: choose another folder with --out, or "
            "repeat the first command to continue it"
        )
    write_text_atomic(path, json.dumps(content, indent=2) + "\n")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{(folder / DATABASE).absolute()}")
    return optuna.create_study(
        study_name="tune", storage=storage, direction=options.direction, load_if_exists=True,
        pruner=make_pruner(base, options),
    )  # fmt: skip


def make_pruner(base: TrainConfig, options: StudyOptions) -> optuna.pruners.BasePruner:
    """Never before a third of the first seed: early evaluations say little about later ones."""
    if options.pruner == "none":
        return optuna.pruners.NopPruner()
    return optuna.pruners.MedianPruner(
        n_startup_trials=options.startup_trials, n_warmup_steps=base.total_timesteps // 3
    )


@dataclasses.dataclass
class Running:
    """A trial under way: its seeds run one after the other, so that a bad one is pruned before all were trained."""

    trial: Trial
    config: dict[str, Any]
    scores: list[float] = dataclasses.field(default_factory=list)  # of the seeds that have finished
    reported: set[int] = dataclasses.field(default_factory=set)
    waiting: bool = True  # for a job of its next seed


class StudySearch:
    """The plan: trials, as Optuna proposes them."""

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        base: TrainConfig,
        folder: Path,
        options: StudyOptions,
        *,
        allow_import: bool,
    ) -> None:
        self.study, self.space, self.base, self.folder, self.options = study, space, base, folder, options
        self.allow_import = allow_import
        self.data = plain_config(config_data(base), "the config")
        self.running: dict[int, Running] = {}  # by number of the trial
        self.jobs: dict[Path, Running] = {}  # by folder: those under way
        trials = study.get_trials(deepcopy=False)
        if not trials:
            study.enqueue_trial(space.params_of(self.data))
        self.tell: Callable[[str], None] = lambda text: None  # shows a line
        self.resumed = [trial for trial in trials if trial.state == TrialState.RUNNING]

    @property
    def left(self) -> int:
        """Trials to run until the study has as many as it shall have."""
        done: int = sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))
        return max(0, self.options.trials - done)

    def use(self, place: Place) -> None:
        """Choose the sampler. Its seed counts trials: a study that is continued shall not repeat its first draws."""
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.base.seed + len(self.study.get_trials(deepcopy=False)),
            n_startup_trials=self.options.startup_trials,
            constant_liar=place.size > 1,  # trials under way count as bad, so that others are tried elsewhere
        )

    def next(self) -> Job | None:
        while True:
            running = next((each for each in self.running.values() if each.waiting), None)
            if running is None:
                running = self._begin()
            if running is None:
                return None
            job = self.job_of(running)
            before = finished_before(job)
            running.waiting = False
            self.jobs[job.folder] = running
            if before is None:
                return job
            self.ended(job, before)  # finished, but its trial was interrupted before it knew

    def _begin(self) -> Running | None:
        """A trial that was interrupted, or a new one."""
        if len(self.running) >= self.left:
            return None
        if self.resumed:
            frozen = self.resumed.pop(0)
            trial, reported = Trial(self.study, frozen._trial_id), set(frozen.intermediate_values)
        else:
            trial, reported = self.study.ask(), set()
        drawn = self.space.apply(self.data, trial)
        running = self.running[trial.number] = Running(trial, drawn, reported=reported)
        self.tell(f"trial {trial.number}: {params_text(trial.params)}")
        return running

    def job_of(self, running: Running) -> Job:
        seed, number = self.options.seeds[len(running.scores)], running.trial.number
        name = f"trial {number}" + (f" seed {seed}" if len(self.options.seeds) > 1 else "")
        folder = trial_folder(self.folder, number) / f"seed{seed}"
        return Job(name, folder, {**running.config, "seed": seed}, self.allow_import, asks=True)

    def evaluated(self, job: Job, step: int, metrics: Metrics) -> bool:
        running = self.jobs[job.folder]
        total, interval = self.base.total_timesteps, self.base.eval_interval
        if step >= total or self.options.metric not in metrics:
            return True  # the end of the run tells
        self._report(running, step // interval * interval, metrics[self.options.metric])
        return not running.trial.should_prune()

    def _report(self, running: Running, step: int, score: float) -> None:
        """The mean of the seeds so far, at a step that is the same for all trials."""
        step += len(running.scores) * self.base.total_timesteps
        if step not in running.reported:
            running.reported.add(step)
            running.trial.report(fmean([*running.scores, score]), step)

    def ended(self, job: Job, outcome: Outcome) -> None:
        running = self.jobs.pop(job.folder)
        metric, trial = self.options.metric, running.trial
        if outcome.status == "interrupted":
            return
        if outcome.status == "failed":
            self._tell(running, TrialState.FAIL, error=outcome.error)
        elif outcome.reason == PRUNED:
            self._tell(running, TrialState.PRUNED)
        elif metric not in outcome.metrics:
            known = ", ".join(sorted(outcome.metrics))
            error = f"{metric} is no number at the end of the run{nearest(metric, outcome.metrics)}; there are: {known}"
            self._tell(running, TrialState.FAIL, error=error)
        else:
            self._report(running, self.base.total_timesteps, outcome.metrics[metric])
            running.scores.append(outcome.metrics[metric])
            if len(running.scores) == len(self.options.seeds):
                self._tell(running, TrialState.COMPLETE)
            elif trial.should_prune():
                self._tell(running, TrialState.PRUNED)
                self.tell(
                    f"trial {trial.number}: pruned after {len(running.scores)} of {len(self.options.seeds)} seeds"
                )
            else:
                running.waiting = True

    def _tell(self, running: Running, state: TrialState, error: str | None = None) -> None:
        trial = running.trial
        trial.set_user_attr("scores", running.scores)
        if error is not None:
            trial.set_user_attr("error", error)
            self.tell(f"trial {trial.number}: failed: {error.splitlines()[0]}")
        del self.running[trial.number]
        self.study.tell(trial, fmean(running.scores) if state == TrialState.COMPLETE else None, state=state)
        discard_checkpoints(trial_folder(self.folder, trial.number))
        best = best_trial(self.study)
        if best is not None and state == TrialState.COMPLETE:
            self.tell(f"trial {trial.number}: {fmean(running.scores):g} (best: trial {best.number}, {best.value:g})")


def params_text(params: Mapping[str, Any]) -> str:
    """`learning_rate 0.0003, gamma 0.99`"""
    each = [
        f"{name.removeprefix('algo_kwargs.')} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in params.items()
    ]
    return ", ".join(each)


def discard_checkpoints(folder: Path) -> None:
    """Of a trial that is over, keep only the best checkpoint of each run: replay buffers of 50 trials are large."""
    for path in folder.glob("*/*/checkpoints/step_*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)


def run_search(search: StudySearch, name: str, *, jobs: int | None, ray: str | None, progress: str) -> None:
    place = make_place(jobs, ray)
    view = None
    try:
        search.use(place)
        done = search.options.trials - search.left
        title = f"tune {name}, {place.size} at a time"
        view = make_view(progress, title, None)
        if done:
            view.message(f"{done} of {search.options.trials} trials are over already")
        search.tell = view.message
        Jobs(search, place, view).run()
    except JobsInterrupted:
        done = search.options.trials - search.left
        over = f"{done} of {search.options.trials} trials are over"
        raise JobsInterrupted(f"interrupted: {over}; the same command continues with the others") from None
    finally:
        if view is not None:
            view.close()
        place.close()


def write_page(study: optuna.Study, name: str, folder: Path, options: StudyOptions) -> None:
    """The plots of the study, and the curves of its best trials."""
    trials = study.get_trials(deepcopy=False)
    complete = ranked(trials, options.direction)
    outcomes: dict[str, list[Outcome]] = {}
    for trial in (complete or trials)[:MOST_DRAWN]:
        jobs = [read_job(path.parent) for path in sorted(trial_folder(folder, trial.number).glob(f"*/{JOB}"))]
        outcomes[f"trial {trial.number}"] = [found[1] for found in jobs if found is not None]
    groups = [dataclasses.replace(group, differences={}) for group in groups_of(outcomes)]  # a plot shows them
    if groups:
        section = study_section(study, options.metric)
        write_report(groups, folder / REPORT, title=f"Study of {name}: {len(trials)} trials", section=section)


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial{number:04}"


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    with contextlib.suppress(ValueError):  # no trial is complete
        return study.best_trial
    return None


def write_best(
    study: optuna.Study, loaded: TrainConfig, space: Space, folder: Path, options: StudyOptions
) -> TuneResult:
    """Write the best config so far as YAML."""
    best = best_trial(study)
    trials = study.get_trials(deepcopy=False)
    states = dict(Counter("failed" if trial.state == TrialState.FAIL else trial.state.name.lower() for trial in trials))
    errors = [f"trial {trial.number}: {error}" for trial in trials if (error := trial.user_attrs.get("error"))]
    if best is None:
        return TuneResult(folder, None, {}, None, states, errors)
    data = space.apply(config_data(dataclasses.replace(loaded, tune={})), optuna.trial.FixedTrial(best.params))
    seeds = ", ".join(map(str, options.seeds))
    comment = (
        f"# {options.metric} {best.value:g}, the mean of seeds {seeds}: trial {best.number} of {len(study.trials)}\n"
    )
    write_text_atomic(folder / BEST, comment + yaml.safe_dump(data, sort_keys=False, default_flow_style=None))
    try:
        config = build_config(data, needs_env=False)
    except ConfigError as error:
        raise InputError(f"{folder / BEST} is no valid config any more: {error}") from error
    return TuneResult(folder, best.value, dict(best.params), config, states, errors)
