"""The acceptance bars: train each config on its seeds, evaluate over 100 episodes, compare, write docs/results.md.

A bar is a number that each seed must reach, with another for their mean in some rows, or a peer: Stable-Baselines3
trained on the same seeds, whose mean must be reached.
Of a run of several tasks it is what a run of each task alone reaches with as many steps. Some rows are compared with
another row by the return throughout training: the mean of its last 100 episodes over all log lines.

make accept                                  # all of them
python benchmarks/accept.py ppo-cartpole     # some of them

Runs that need a GPU are left out where there is none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.json"
EPISODES = 100
SB3 = "Stable-Baselines3"


class Peer(NamedTuple):
    algorithm: str  # of Stable-Baselines3
    kwargs: dict[str, Any]  # all else is its default


class Alone(NamedTuple):
    """Every task of a run, beside a run of that task alone with as many steps."""

    tasks: tuple[str, ...]
    share: float  # of its return


class Like(NamedTuple):
    """Learning as another row does: the return throughout training differs by less than a share, in the mean."""

    row: str
    within: float


class Worse(NamedTuple):
    """Learning less than another row: the return throughout training is lower, in the mean."""

    row: str


class Bar(NamedTuple):
    config: str
    seeds: int
    bar: float | Peer | Alone | Like | Worse | None  # None: to compare with the row above
    mean: float | None = None  # a further bar, for the mean of all seeds
    train: float | None = None  # another, for the last 100 training episodes of each
    steps: int | None = None  # default: the config's
    cost: int = 1  # roughly, in minutes: the longest begin first
    of: Literal["eval", "worst", "wins"] = "eval"  # the mean, the worst episode, or the share of games won
    episodes: int = EPISODES
    overrides: tuple[str, ...] = ()  # of the config
    window: tuple[int, int] | None = None  # the bar `train` is for the episodes that end between these steps
    limits: tuple[tuple[str, float], ...] = ()  # metrics, and what none of their logged values exceeds
    gpu: bool = False
    expert: str | None = None  # the config of the policy whose 20 episodes are the demonstrations


BARS = {
    "ppo-cartpole": Bar("configs/ppo/cartpole.yaml", 5, 495),
    "ppo-pendulum": Bar("configs/ppo/pendulum.yaml", 3, -250),
    "a2c-cartpole": Bar("configs/a2c/cartpole.yaml", 3, 490),
    "ppo-halfcheetah": Bar("configs/ppo/halfcheetah.yaml", 1, 5000, cost=7),
    "sac-pendulum": Bar("configs/sac/pendulum.yaml", 3, -165, cost=4),
    # The peer's numbers are those that rl-zoo tuned for it.
    "sac-halfcheetah": Bar(
        "configs/sac/halfcheetah.yaml", 1, Peer("SAC", {"learning_starts": 10_000}), steps=100_000, cost=20
    ),
    "trpo-cartpole": Bar("configs/trpo/cartpole.yaml", 5, 450, mean=485, limits=(("kl", 0.01),)),
    "trpo-hopper": Bar("configs/trpo/hopper.yaml", 1, 2600, cost=12, limits=(("kl", 0.015),)),
    "ppg-cartpole": Bar("configs/ppg/cartpole.yaml", 3, 495, limits=(("aux_kl", 0.05),)),
    "recurrent-ppo-cartpole": Bar("configs/recurrent_ppo/cartpole_no_velocity.yaml", 3, 450, mean=475, cost=3),
    "ppo-cartpole-no-velocity": Bar("configs/ppo/cartpole.yaml", 3, None, overrides=("env_id=CartPoleNoVelocity-v1",)),
    "gail-cartpole": Bar("configs/gail/cartpole.yaml", 3, 450, cost=3, expert="configs/ppo/cartpole.yaml"),
    **{
        f"{algo}-cartpole-{name}": Bar(
            f"configs/{algo}/cartpole.yaml", seeds, bar, train=train, overrides=tuple(f"execution.{x}" for x in where)
        )
        for algo in ("impala", "appo")
        for name, seeds, bar, train, where in (
            ("processes", 3, 475, 450, ("backend=process", "actors=2")),
            ("ray", 1, 475, 450, ("backend=ray", "actors=2")),
            ("lag", 3, 475, 450, ("simulate_lag=16",)),
        )
    },
    **{
        f"{algo}-cartpole-lag-uncorrected": Bar(
            f"configs/{algo}/cartpole.yaml",
            3,
            Worse(f"{algo}-cartpole-lag"),
            overrides=("execution.simulate_lag=16", "algo_kwargs.correction=false"),
        )
        for algo in ("impala", "appo")
    },
    "ppo-cartpole-as-appo": Bar("configs/appo/cartpole.yaml", 3, None, overrides=("algo=ppo",)),
    "appo-cartpole": Bar("configs/appo/cartpole.yaml", 3, Like("ppo-cartpole-as-appo", 0.05)),
    "dqn-cartpole": Bar("configs/dqn/cartpole.yaml", 3, 475),
    "dqn-mountaincar": Bar("configs/dqn/mountaincar.yaml", 3, -115, cost=2),
    "dqn-lunarlander": Bar("configs/dqn/lunarlander.yaml", 1, 200, cost=5),
    "muzero-cartpole": Bar("configs/muzero/cartpole.yaml", 5, 475, cost=3),
    "gumbel-muzero-cartpole": Bar("configs/gumbel_muzero/cartpole.yaml", 3, 475, cost=3),
    "muzero-cartpole-4-simulations": Bar(
        "configs/gumbel_muzero/cartpole.yaml", 3, None, cost=3, overrides=("algo=muzero",)
    ),
    "efficientzero-cartpole": Bar("configs/efficientzero/cartpole.yaml", 3, 475, cost=8),
    "dreamer-cartpole": Bar("configs/dreamer/cartpole.yaml", 2, 400, cost=6),
    "dreamer-cartpole-pixels": Bar("configs/dreamer/cartpole_pixels.yaml", 2, 400, cost=20),
    "dreamer-pendulum": Bar("configs/dreamer/pendulum.yaml", 2, -300, cost=8),
    # The published score is 516 ± 14, of training episodes in the last 20,000 of 100,000 frames, which are 2 to a step.
    "dreamer-swingup": Bar(
        "configs/dreamer/dmc_cartpole_swingup_cpu.yaml", 2, 480, train=480, window=(40_000, 50_000), cost=25
    ),
    "muzero-lunarlander": Bar("configs/muzero/lunarlander.yaml", 1, 200, cost=30),
    "muzero-tictactoe": Bar("configs/muzero/tictactoe.yaml", 1, 0, cost=6, of="worst"),
    "muzero-connect-four": Bar(
        "configs/muzero/connect_four.yaml",
        1,
        0.6,
        cost=12,
        of="wins",
        episodes=50,
        overrides=("device=cuda",),
        gpu=True,
    ),
    "efficientzero-pong": Bar("configs/efficientzero/atari_pong.yaml", 1, 10, cost=20, episodes=8, gpu=True),
    "appo-pong": Bar(
        "configs/appo/atari_pong.yaml",
        1,
        18,
        train=20,
        cost=4,
        episodes=10,
        gpu=True,
        overrides=("execution.actor_device=cuda", "env_kwargs.num_threads=4"),
    ),
    "scalezero-classic": Bar(
        "configs/scalezero/classic.yaml",
        2,
        Alone(("CartPole-v1", "Acrobot-v1", "MountainCar-v0"), 0.9),
        cost=20,
        overrides=("algo_kwargs.target_returns=null",),  # a task that rests would leave its steps to the others
    ),
}
OURS = """
import json, sys, time
from rl_training import evaluate_checkpoint, load_config, train
from rl_training.envs.runner import EpisodeStatistics
path, seed, episodes, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
(limited, window), steps = json.loads(sys.argv[5]), sys.argv[6:]
words = [f"seed={seed}", f"output_dir={out}", "eval_interval=0", *steps]
ended, played, add = [], 0, EpisodeStatistics.add  # (env step, return); evaluation comes last
def note(statistics, step):
    global played
    add(statistics, step)
    played += len(step.reward)
    ended.extend((played, episode.episode_return) for episode in statistics.finished)
if window:
    EpisodeStatistics.add = note
config = load_config(path, overrides=words)
started, cpu = time.perf_counter(), time.process_time()
result = train(config, progress="silent")
spent = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=episodes)
row = {"eval": metrics["eval_return_mean"], "std": metrics["eval_return_std"], **spent}
row |= {"worst": metrics["eval_return_min"], "wins": metrics.get("eval_win_rate")}
log = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
row["largest"] = {name: max(line[name] for line in log if name in line) for name in limited}
curve = [line["train_return_mean"] for line in log if line.get("train_return_mean") is not None]
row["throughout"] = sum(curve) / max(1, len(curve))
row["tasks"] = {key.split("/", 1)[1]: value for key, value in metrics.items() if key.startswith("eval_return_mean/")}
inside = [value for step, value in ended if window and window[0] < step <= window[1]]
row["train"] = sum(inside) / len(inside) if window else result.metrics["train_return_mean"]
print(json.dumps(row | {"steps": int(result.metrics["global_step"])}))
"""
PEER = """
import json, sys, time
import stable_baselines3, torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from rl_training import load_config
path, seed, episodes, peer, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
name, kwargs = json.loads(peer)
torch.set_num_threads(1)
config = load_config(path)
started, cpu = time.perf_counter(), time.process_time()
env = make_vec_env(config.env_id, 1, seed=seed)
model = getattr(stable_baselines3, name)("MlpPolicy", env, seed=seed, device="cpu", **kwargs)
model.learn(int(steps[0]) if steps else config.total_timesteps)
spent = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
train = sum(e["r"] for e in model.ep_info_buffer) / len(model.ep_info_buffer)
mean, std = evaluate_policy(model, make_vec_env(config.env_id, 1, seed=seed + 1000), episodes)
print(json.dumps({"eval": float(mean), "std": float(std), "train": train, "steps": model.num_timesteps, **spent}))
"""


EXPERT = """
import sys
from rl_training import load_config, record_demonstrations, train
result = train(load_config(sys.argv[1], overrides=[f"output_dir={sys.argv[2]}"]), progress="silent")
found = record_demonstrations(result.checkpoint_path, sys.argv[3])
print(f"expert {sys.argv[1]}: {found.returns.mean():.1f}", flush=True)
"""


def record_experts(names: list[str], out: Path) -> None:
    """Train the experts of these bars, one after the other, and record their demonstrations."""
    for config in {bar.expert for name in names if (bar := BARS[name]).expert}:
        words = [
            sys.executable,
            "-c",
            EXPERT,
            str(ROOT / config),
            str(out / "experts"),
            str(demonstrations(config, out)),
        ]
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def demonstrations(expert: str, out: Path) -> Path:
    return out / f"{expert.replace('/', '-')}.npz"


def measure(name: str, seed: int, out: Path, *, peer: str = "") -> dict:
    """One run. peer: whose it is, where not the row's own: SB3's, or that of a task alone."""
    bar = BARS[name]
    ours = peer != SB3
    code, where = (OURS, str(out / name)) if ours else (PEER, json.dumps(bar.bar))
    steps = [] if bar.steps is None else [f"total_timesteps={bar.steps}" if ours else str(bar.steps)]
    steps += bar.overrides if ours else []
    if bar.expert:
        steps.append(f"algo_kwargs.demonstrations={demonstrations(bar.expert, out)}")
    if ours and peer:
        steps += alone(bar, peer)
    limited = [json.dumps([[metric for metric, _ in bar.limits], bar.window])] if ours else []
    words = [sys.executable, "-c", code, str(ROOT / bar.config), str(seed), str(bar.episodes), where, *limited, *steps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name} seed {seed} failed:\n{done.stderr}")
    row = json.loads(done.stdout.splitlines()[-1])
    whose = f" ({peer})" if peer else ""
    print(f"{name}{whose} seed {seed}: {told(row, bar)} ({wanted(bar)}), {row['cpu']:.0f} CPU s", flush=True)
    return row | {"seed": seed, "peer": peer, "date": time.strftime("%Y-%m-%d"), "machine": machine()}


def alone(bar: Bar, env_id: str) -> list[str]:
    """What makes of a run of several tasks one of a single task, with its share of the steps."""
    from rl_training import load_config

    config = load_config(ROOT / bar.config)
    task = next(task for task in config.tasks if task.env_id == env_id)
    steps = (bar.steps or config.total_timesteps) // len(config.tasks)
    return [f"env_id={env_id}", f"total_timesteps={steps}", f"env_kwargs={json.dumps(task.env_kwargs)}"]


def wanted(bar: Bar) -> str:
    if bar.bar is None:
        return f"for comparison: {', '.join(bar.overrides)}"
    if isinstance(bar.bar, Alone):
        return f"each task >= {bar.bar.share:.0%} of its run alone"
    if isinstance(bar.bar, Like | Worse):
        close = f"within {bar.bar.within:.0%} of" if isinstance(bar.bar, Like) else "below"
        return f"throughout training {close} {bar.bar.row} ({', '.join(bar.overrides) or 'no lag'})"
    if bar.of == "wins":
        return f"games won > {bar.bar:.0%}"
    if not isinstance(bar.bar, Peer):
        bars = [f"{'worst episode of ' if bar.of == 'worst' else ''}each >= {bar.bar:g}"]
        bars += [] if bar.mean is None else [f"mean >= {bar.mean:g}"]
        when = f" from step {bar.window[0]:,} to {bar.window[1]:,}" if bar.window else ""
        bars += [] if bar.train is None else [f"train{when} >= {bar.train:g}"]
        return ", ".join(bars + [f"{name} <= {limit:g} throughout" for name, limit in bar.limits])
    numbers = ", ".join(f"{key} {value}" for key, value in bar.bar.kwargs.items())
    return f"mean >= Stable-Baselines3's {bar.bar.algorithm} ({numbers}, else its defaults)"


def reached(name: str, results: dict[str, list[dict]]) -> bool:
    bar = BARS[name]
    ours, peers = parted(results.get(name, []))
    if isinstance(bar.bar, Alone):
        singles = {(row["peer"], row["seed"]): row["eval"] for row in peers}
        pairs = [(row["tasks"][task], singles.get((task, row["seed"]))) for row in ours for task in bar.bar.tasks]
        slack = 1 - bar.bar.share  # of the absolute return: most are negative
        return len(ours) == bar.seeds and all(
            single is not None and score >= single - slack * abs(single) for score, single in pairs
        )
    if isinstance(bar.bar, Peer):
        enough = len(ours) == len(peers) == bar.seeds
        return enough and fmean(row["eval"] for row in ours) >= fmean(row["eval"] for row in peers)
    if bar.bar is None:
        return True
    if isinstance(bar.bar, Like | Worse):
        theirs = parted(results.get(bar.bar.row, []))[0]
        if len(ours) != bar.seeds or len(theirs) != BARS[bar.bar.row].seeds:
            return False
        mean, other = (fmean(row["throughout"] for row in rows) for rows in (ours, theirs))
        return mean < other if isinstance(bar.bar, Worse) else abs(mean - other) <= bar.bar.within * abs(other)
    if bar.mean is not None and (not ours or fmean(row["eval"] for row in ours) < bar.mean):
        return False
    if bar.train is not None and any(row["train"] < bar.train for row in ours):
        return False
    if any(row["largest"][metric] > limit for row in ours for metric, limit in bar.limits):
        return False
    worst = min((row[bar.of] for row in ours), default=-math.inf)
    return len(ours) == bar.seeds and (worst > bar.bar if bar.of == "wins" else worst >= bar.bar)


def parted(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The row's own runs, and those beside it."""
    return [row for row in rows if not row.get("peer")], [row for row in rows if row.get("peer")]


def table(results: dict[str, list[dict]]) -> str:
    fewer = ", ".join(f"{name}: {bar.episodes}" for name, bar in BARS.items() if bar.episodes != EPISODES)
    lines = [
        "# Results",
        "",
        "Made by `make accept` (`python benchmarks/accept.py NAME` for one row), one core per run, on "
        f"{machines(results)}.",
        f"`eval`: mean return of {EPISODES} deterministic episodes ({fewer}) on fresh environments with the weights at "
        "the end of training, per seed (0, 1, ...). `train`: the last 100 training episodes, or those that end between "
        "the steps in the column `bar`; throughout training: the mean of that over all log lines, in parentheses. "
        "Seconds are for training alone.",
        "",
        "| run | config | env steps | bar | eval per seed | train per seed | reached | CPU s | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, bar in BARS.items():
        rows = results.get(name, [])
        ours, peers = parted(rows)
        config = f"`{bar.config}`" + (", on a GPU" if bar.gpu else "")
        where = [word for word in bar.overrides if word.startswith("execution.")]
        if where and "execution." not in wanted(bar):
            config += f", {', '.join(where)}"
        verdict = "" if bar.bar is None else "yes" if reached(name, results) else "**no**"
        if ours:
            lines.append(line(name, config, bar, ours, verdict))
        else:  # what runs beside it may be through first
            lines.append(f"| {name} | {config} | | {wanted(bar)} | not run | | | | |")
        for peer in dict.fromkeys(row["peer"] for row in peers):
            beside = [row for row in peers if row["peer"] == peer]
            lines.append(line("the same", peer if peer == SB3 else f"{peer} alone", bar._replace(of="eval"), beside))
    return "\n".join(lines) + "\n"


def line(name: str, config: str, bar: Bar, rows: list[dict], verdict: str = "") -> str:
    evals, trains = (told(row, bar) for row in rows), (f"{row['train']:.1f}" for row in rows if "train" in row)
    seconds = [spread([row[key] for row in rows if key in row]) for key in ("cpu", "wall")]
    steps, bars = f"{rows[0]['steps']:,}", "" if rows[0].get("peer") else wanted(bar)
    between = "; " if rows[0].get("tasks") else ", "
    cells = [name, config, steps, bars, between.join(evals), ", ".join(trains), verdict, *seconds]
    return f"| {' | '.join(cells)} |"


def told(row: dict, bar: Bar) -> str:
    """What an evaluation came to: the mean return, of each task of several; and what else the bar is of."""
    mean = f"{row['eval']:.1f}"
    if bar.of == "wins":
        return f"{mean}, {row['wins']:.0%} won"
    if "throughout" in row and is_compared(bar):
        return f"{mean} ({row['throughout']:.0f})"
    if bar.of == "worst":
        return f"{mean}, worst {row['worst']:.1f}"
    return ", ".join(f"{task} {value:.1f}" for task, value in row["tasks"].items()) if row.get("tasks") else mean


def is_compared(bar: Bar) -> bool:
    """Whether the return throughout training is what this row, or another beside it, is judged by."""
    return any(bar in (each, BARS[each.bar.row]) for each in BARS.values() if isinstance(each.bar, Like | Worse))


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.0f}" for value in values)
    return f"{min(values):.0f} to {max(values):.0f}"


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"
    return f"one {gpu} with {cores}" if (gpu := gpu_name()) else cores


def machines(results: dict[str, list[dict]]) -> str:
    """Where the rows were made: most on the first of these, the others as named."""
    rows_of: dict[str, list[str]] = {}
    for name in BARS:
        for where in dict.fromkeys(row["machine"] for row in results.get(name, [])):
            rows_of.setdefault(where, []).append(name)
    first, *others = sorted(rows_of, key=lambda where: -len(rows_of[where])) or [machine()]
    return "; ".join([first, *(f"{', '.join(rows_of[where])} on {where}" for where in others)])


def write(results: dict[str, list[dict]]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "docs" / "results.md"
    kept = page.read_text().split("\n## ", 1)[1:] if page.exists() else []
    page.write_text(table(results) + "".join(f"\n## {part}" for part in kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which bars, all by default: {', '.join(BARS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs" / "accept")
    args = parser.parse_args()
    unknown = set(args.names) - set(BARS)
    if unknown:
        parser.error(f"unknown bars {', '.join(sorted(unknown))}; there are {', '.join(BARS)}")
    names = args.names or [name for name, bar in BARS.items() if not bar.gpu or gpu_name()]
    work = [(name, seed, peer) for name in names for seed in range(BARS[name].seeds) for peer in runs_of(BARS[name])]
    work.sort(key=lambda item: (-BARS[item[0]].cost, item[1]))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        results[name] = []
    record_experts(names, args.output_dir)
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(measure, name, seed, args.output_dir, peer=peer): name for name, seed, peer in work}
        for future in as_completed(waiting):  # written each time: a run that fails takes none of the others with it
            rows = results[waiting[future]]
            rows.append(future.result())
            rows.sort(key=lambda row: (row["peer"], row["seed"]))
            write(results)
    print(table(results))
    sys.exit(not all(reached(name, results) for name in names))


def runs_of(bar: Bar) -> tuple[str, ...]:
    """Its own, and whose else beside it."""
    if isinstance(bar.bar, Alone):
        return ("", *bar.bar.tasks)
    return ("", SB3) if isinstance(bar.bar, Peer) else ("",)


def gpu_name() -> str:
    """Empty where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


if __name__ == "__main__":
    main()
