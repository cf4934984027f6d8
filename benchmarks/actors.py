"""Env steps per second with actors in processes, beside the same algorithm in one process, and PPO.

python benchmarks/actors.py                     # CartPole-v1, then a task whose step takes 2 ms of CPU time
python benchmarks/actors.py --actors 8 --num-envs 64

Programs take turns. The clock runs from the first record of a run to the last: starting processes is not counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from versus import measure

PROGRAM = """
import json, sys, tempfile, time
from statistics import fmean
from rl_training import TrainConfig, train
steps, seed = int(sys.argv[1]), int(sys.argv[2])
clock = []
def note(run):
    clock.append((time.perf_counter(), run.step, dict(run.metrics)))
with tempfile.TemporaryDirectory() as folder:
    config = TrainConfig(total_timesteps=steps, output_dir=folder, seed=seed, eval_interval=0, eval_episodes=1,
                         checkpoint_interval=0, log_interval=max(1, steps // 20), **CONFIG)
    train(config, callbacks=[note], progress="silent")
(begin, first, _), (end, last, metrics) = clock[0], clock[-1]
means = {key: fmean(row[key] for _, _, row in clock if key in row) for key in metrics  # none before the first log line
         if key.startswith(("policy_lag", "actor_waiting", "learner_waiting"))}
print(json.dumps({"wall": end - begin, "steps": last - first, **means}))
"""
TASKS = {"CartPole-v1": 400_000, "slow_tasks:SlowCartPole-v1": 8_000}  # env steps of a run
ON_POLICY = {"num_steps": 32, "hidden_sizes": [64, 64]}


def programs(env_id: str, num_envs: int, actors: int) -> dict[str, str]:
    task = {"env_id": env_id, "num_envs": num_envs}
    process = {"execution": {"backend": "process", "actors": actors}}
    impala = {"algo": "impala", "algo_kwargs": ON_POLICY}
    appo = {"algo": "appo", "algo_kwargs": ON_POLICY | {"num_minibatches": 4, "update_epochs": 4}}
    configs = {
        "impala, serial": task | impala,
        f"impala, {actors} processes": task | impala | process,
        "appo, serial": task | appo,
        f"appo, {actors} processes": task | appo | process,
        "ppo": task | appo | {"algo": "ppo"},
    }
    start = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})  # where slow_tasks is\n"
    return {name: f"{start}CONFIG = {config!r}\n{PROGRAM}" for name, config in configs.items()}


def compare(env_id: str, steps: int, repeats: int, num_envs: int, actors: int) -> None:
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(repeats):
        for name, code in programs(env_id, num_envs, actors).items():
            rows.setdefault(name, []).append(measure(code, steps, seed))
    speeds = {name: [row["steps"] / row["wall"] for row in results] for name, results in rows.items()}
    print(f"\n{env_id}: {num_envs} environments, {steps:,} steps, {repeats} runs each, in turns\n")
    print("| | steps per second: median (min to max) | x serial | x ppo | lag | actors wait | learner waits |")
    print("|---|---|---|---|---|---|---|")
    for name, found in speeds.items():
        serial = speeds.get(f"{name.split(',')[0]}, serial", found)
        cells = [f"{median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"]
        cells += [ratio(found, serial), ratio(found, speeds["ppo"])]
        for key, form in (("policy_lag_mean", ".1f"), ("actor_waiting", ".0%"), ("learner_waiting", ".0%")):
            values = [row[key] for row in rows[name] if key in row]
            cells.append(format(median(values), form) if values else "")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median of the ratios of runs that followed one another."""
    return f"{median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--actors", type=int, default=2)
    args = parser.parse_args()
    for env_id, steps in TASKS.items():
        compare(env_id, steps, args.repeats, args.num_envs, args.actors)
