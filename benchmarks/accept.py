"""The acceptance bars: train each config on its seeds, evaluate over 100 episodes, compare, write docs/results.md.

make accept                                  # all of them
python benchmarks/accept.py ppo-cartpole     # some of them
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.json"
EPISODES = 100


class Bar(NamedTuple):
    config: str
    seeds: int
    bar: float
    episodes: int = EPISODES


BARS = {
    "ppo-cartpole": Bar("configs/ppo/cartpole.yaml", 5, 495),
    "ppo-pendulum": Bar("configs/ppo/pendulum.yaml", 3, -250),
    "a2c-cartpole": Bar("configs/a2c/cartpole.yaml", 3, 490),
    "ppo-halfcheetah": Bar("configs/ppo/halfcheetah.yaml", 1, 5000),
}
CHILD = """
import json, sys, time
from rl_training import evaluate_checkpoint, load_config, train
path, seed, episodes, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = load_config(path, overrides=[f"seed={seed}", f"output_dir={out}", "eval_interval=0"])
started, cpu = time.perf_counter(), time.process_time()
result = train(config, progress="silent")
spent = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
metrics = evaluate_checkpoint(result.checkpoint_path, num_episodes=episodes)
row = {"eval": metrics["eval_return_mean"], "std": metrics["eval_return_std"], **spent}
print(json.dumps(row | {"train": result.metrics["train_return_mean"], "steps": int(result.metrics["global_step"])}))
"""


def measure(name: str, seed: int, out: Path) -> dict:
    bar = BARS[name]
    words = [sys.executable, "-c", CHILD, str(ROOT / bar.config), str(seed), str(bar.episodes), str(out / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name} seed {seed} failed:\n{done.stderr}")
    row = json.loads(done.stdout.splitlines()[-1])
    verdict = "ok" if row["eval"] >= bar.bar else "BELOW"
    print(f"{name} seed {seed}: {row['eval']:.1f} (bar {bar.bar:g}) {verdict}, {row['cpu']:.0f} CPU s", flush=True)
    return row | {"seed": seed, "bar": bar.bar, "date": time.strftime("%Y-%m-%d")}


def table(results: dict[str, list[dict]]) -> str:
    lines = [
        "# Results",
        "",
        f"Made by `make accept` (`python benchmarks/accept.py NAME` for one row) on {machine()}, one core per run.",
        f"`eval`: mean return of {EPISODES} deterministic episodes on fresh environments with the weights at the end "
        "of training, per seed (0, 1, ...). `train`: the last 100 training episodes. Seconds are for training alone.",
        "",
        "| run | config | env steps | bar | eval per seed | train per seed | reached | CPU s | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, bar in BARS.items():
        rows = results.get(name)
        if not rows:
            lines.append(f"| {name} | `{bar.config}` | | {bar.bar:g} | not run | | | | |")
            continue
        reached = "yes" if all(row["eval"] >= bar.bar for row in rows) and len(rows) == bar.seeds else "**no**"
        evals, trains = (", ".join(f"{row[key]:.1f}" for row in rows) for key in ("eval", "train"))
        seconds = " | ".join(spread([row[key] for row in rows]) for key in ("cpu", "wall"))
        cells = (
            name,
            f"`{bar.config}`",
            f"{rows[0]['steps']:,}",
            f"each >= {bar.bar:g}",
            evals,
            trains,
            reached,
            seconds,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    return f"{min(values):.0f}" if len(values) == 1 else f"{min(values):.0f} to {max(values):.0f}"


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BARS), help=f"which bars: {', '.join(BARS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs" / "accept")
    args = parser.parse_args()
    unknown = set(args.names) - set(BARS)
    if unknown:
        parser.error(f"unknown bars {', '.join(sorted(unknown))}; there are {', '.join(BARS)}")
    work = [
        (name, seed) for name in sorted(args.names, key=lambda n: -BARS[n].seeds) for seed in range(BARS[name].seeds)
    ]
    work.sort(key=lambda item: item[0] != "ppo-halfcheetah")  # the longest first, so that the others run beside it
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda item: (item[0], measure(*item, args.output_dir)), work))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.names:
        results[name] = sorted((row for which, row in rows if which == name), key=lambda row: row["seed"])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "docs" / "results.md"
    kept = page.read_text().split("\n## ", 1)[1:] if page.exists() else []
    page.write_text(table(results) + "".join(f"\n## {part}" for part in kept))
    print(table(results))
    sys.exit(any(row["eval"] < row["bar"] for _, row in rows))


if __name__ == "__main__":
    main()
