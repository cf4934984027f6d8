"""The model card of a packed policy, as Markdown: what it is, how good it is, how to use it, how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.envs.space_json import space_from_json
from rl_training.errors import cut
from rl_training.reports.runs import is_number
from rl_training.reports.table import METRIC
from rl_training.runtime.number_text import duration, number
from rl_training.runtime.registry import ALGORITHMS

CURVE = "curve.png"
TEXTS = {METRIC: "mean return", "eval_return_std": "standard deviation", "eval_return_min": "worst episode",
         "eval_success_rate": "success rate", "eval_win_rate": "games won"}  # fmt: skip

USE = """
## Use

With the Python package `rl-training`{version}{packages}:

```bash
rl-training eval {file} --num-episodes 100{imports}
rl-training record {file} --out film.mp4{imports}
```

```python
from rl_training import load_policy

policy = load_policy("{file}"{task})
policy.reset()  # where an episode begins
action = policy.act(obs)  # for one observation or a batch, after the wrappers of config.yaml
```

Loading runs no code: the file holds weights as safetensors, and texts. Training cannot be resumed from it, but
`rl-training train config.yaml` trains a policy of the same kind.
"""

LICENCE = """
## Licence

None is stated. Whoever shares this file chooses one, and may add it as a file `LICENSE`.
"""


def model_card(facts: Mapping[str, Any], spaces: Mapping[str, Any], *, file: str, curve: bool) -> str:
    """`facts`: the content of metadata.json; `spaces`: those of the checkpoint; `file`: the name of the pack."""
    parts = [front_matter(facts), about(facts, spaces), scores(facts)]
    if curve:
        parts.append(f"\n![curves of training]({CURVE})\n")
    return "".join([*parts, use(facts, file), origin(facts), LICENCE])


def front_matter(facts: Mapping[str, Any]) -> str:
    """The header that hubs of models read."""
    tags = ["reinforcement-learning", facts["algo"], *env_ids(facts)]
    return (
        "---\n"
        "library_name: rl-training\n"
        "pipeline_tag: reinforcement-learning\n"
        f"tags: {json.dumps(tags, ensure_ascii=False)}\n"
        "---\n\n"
    )


def env_ids(facts: Mapping[str, Any]) -> list[str]:
    given = facts["env_id"]
    return [given] if isinstance(given, str) else list(given)


def about(facts: Mapping[str, Any], spaces: Mapping[str, Any]) -> str:
    algo, names = facts["algo"], env_ids(facts)
    rows = [("algorithm", f"`{algo}`: {ALGORITHMS[algo].recipe.summary}")]
    rows.append(("environment", ", ".join(f"`{name}`" for name in names)))
    for name, own in zip(names, [spaces] if len(names) == 1 else [spaces[name] for name in names], strict=True):
        of = "" if len(names) == 1 else f" of `{name}`"
        rows.append((f"observations{of}", space_text(own["env_observation"])))
        rows.append((f"actions{of}", space_text(own["env_action"])))
    rows.append(("steps of training", f"{facts['global_step']:,}"))
    rows.append(("seed", str(facts["seed"])))
    return f"# {algo} on {', '.join(names)}\n\n{markdown_table(('', ''), rows)}"


def space_text(space: dict[str, Any]) -> str:
    """A space in one line; bounds of large ones are cut."""
    return f"`{cut(' '.join(str(space_from_json(space)).split()))}`"


def scores(facts: Mapping[str, Any]) -> str:
    text = "\n## Scores\n\n" + evaluation_text(facts)
    found = facts["scores"]
    runs = found["runs"]
    if len(runs) > 1:
        text += "\n" + seeds_text(facts, found, runs)
    return text


def evaluation_text(facts: Mapping[str, Any]) -> str:
    """The last evaluation up to the packed step, a row for each task."""
    found = facts["evaluation"]
    if not is_number(found.get(METRIC)):
        return "This policy was not evaluated in training.\n"
    at = f" at step {found['global_step']:,}" if found.get("global_step") is not None else ""
    names = env_ids(facts)
    tasks = ["", *(f"/{name}" for name in names)] if len(names) > 1 else [""]
    known = [name for name in TEXTS if is_number(found.get(name))]
    rows = [
        [task.removeprefix("/") or "all", *(number(found.get(name + task, float("nan"))) for name in known)]
        for task in tasks
    ]
    if len(names) == 1:
        rows[0][0] = names[0]
    heading = ("environment", *(TEXTS[name] for name in known))
    return f"Evaluated in training{at}, {found['episodes']} episodes:\n\n{markdown_table(heading, rows)}"


def seeds_text(facts: Mapping[str, Any], found: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The scores of all runs, and from which of them the policy is."""
    text = f"The same training with {len(runs)} seeds; a score is the mean return of a run's last evaluation:\n\n"
    rows = [
        (str(run["seed"]), f"{run['steps']:,}", run["status"], "-" if run["score"] is None else number(run["score"]))
        for run in runs
    ]
    text += markdown_table(("seed", "steps", "status", "score"), rows)
    if found["iqm"] is not None:
        text += f"\nInterquartile mean {number(found['iqm'])}"
        if found["low"] is not None:
            text += f", 95 % bootstrap interval {number(found['low'])} to {number(found['high'])}"
        text += f"; mean {number(found['mean'])}, worst {number(found['worst'])} (seed {found['worst_seed']}).\n"
    if facts["chosen_by"]:
        text += (
            f"\nThis policy is that of seed {facts['seed']}: no run had a higher {facts['chosen_by']}. What the "
            "training gives on average is the interquartile mean, not the score of this policy.\n"
        )
    return text


def use(facts: Mapping[str, Any], file: str) -> str:
    names, version = env_ids(facts), facts["versions"].get("rl_training")
    modules = sorted({name.split(":")[0] for name in names if ":" in name})
    packages = f", and the environment's module {', '.join(f'`{name}`' for name in modules)}" if modules else ""
    return USE.format(
        file=file,
        version=f" {version}" if version else "",
        packages=packages,
        imports=" --allow-import" if modules else "",
        task="" if len(names) == 1 else f', task="{names[0]}"',
    )


def origin(facts: Mapping[str, Any]) -> str:
    """Date, speed, machine and versions, as far as they are known."""
    parts = [facts.get("gpu"), facts.get("processor"), f"{facts['cpu_count']} cores" if facts.get("cpu_count") else ""]
    speed = facts.get("steps_per_second")
    rows = [
        ("trained", str(facts.get("started") or "")[:10]),
        ("status of the run", facts.get("status") or ""),
        ("time", duration(facts["wall_seconds"]) if facts.get("wall_seconds") else ""),
        ("speed", f"{speed:,.0f} steps per second" if speed else ""),
        ("device", facts.get("device") or ""),
        ("machine", ", ".join(str(part) for part in parts if part)),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
    ]
    known = [(name, text) for name, text in rows if text]
    text = "\n## How it was made\n\nAll settings are in `config.yaml`.\n"
    return text + (f"\n{markdown_table(('', ''), known)}" if known else "")


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
