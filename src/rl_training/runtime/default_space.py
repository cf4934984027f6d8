"""A search space for a config that gives none: the hyperparameters that matter most, around the config's own values.

Ranges follow from the declared bounds: a number without an upper bound is tried on a log scale around its value, a
share of 1 on both sides of it, a size as powers of two around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_training.config import TrainConfig
from rl_training.runtime.controls import Controls
from rl_training.runtime.hyperparameters import Hyperparameter, names_of
from rl_training.runtime.registry import ALGORITHMS

TUNED = (  # in order of importance; those that an algorithm has are tried
    "learning_rate", "max_kl", "disc_learning_rate", "gamma", "ent_coef", "gae_lambda",
    "clip_coef", "num_steps", "update_epochs", "num_minibatches", "aux_epochs", "beta_clone",
    "vf_coef", "batch_size", "n_step", "utd_ratio", "tau", "target_update_interval",
    "temperature", "weight_decay", "latent_coef", "disc_updates", "gradient_penalty", "cg_damping",
    "critic_epochs",
)  # fmt: skip
MOST = 8  # keys: 50 trials find little in more dimensions
RATE = "learning_rate"  # suffix of what is tried with several kinds of schedules
WIDE, NARROW = 10.0, 4.0  # a rate or a small share is tried from value / WIDE to value * WIDE, other numbers NARROW
SIZES = 4  # a setting is tried from value / SIZES to value * SIZES
COUNTS = (4, 2)  # a count from a quarter to twice itself: more epochs and steps cost time
FROM_ZERO = {"ent_coef": [1e-4, 1e-1], "gradient_penalty": [1e-2, 10.0]}  # where the value is 0, which has no scale


def default_space(config: TrainConfig) -> dict[str, Any]:
    """The mapping that the key `tune` would hold."""
    controls = Controls.of(config, ALGORITHMS[config.algo].recipe.hyperparameters)
    found: dict[str, Any] = {}
    for name in TUNED:
        declared = controls.declared.get(name)
        if declared is None or len(found) == MOST or not declared.has_effect(vars(controls.initial)):
            continue
        if name == "num_minibatches" and "cell" in controls.declared:
            continue  # of whole environments: num_envs limits it
        given = next((each for each in names_of(name) if each in config.algo_kwargs), name)
        parts = [f"{each}{part}" for each in names_of(name) for part in ("_schedule", "_warmup_steps")]
        if any(part in config.algo_kwargs for part in parts):
            continue  # the config has a schedule for it under a key of its own
        distribution = space_of(declared, config.algo_kwargs.get(given, declared.config_default))
        if distribution is not None:
            found[f"algo_kwargs.{given}"] = distribution
    return found


def space_of(declared: Hyperparameter, value: Any) -> dict[str, Any] | None:
    """The distribution around a value or a schedule of the config; None if there is no sensible one."""
    if isinstance(value, Mapping):
        start = value.get("start", value.get("value"))
        around = around_value(declared, start)
        if around is None or "kind" not in value:
            return None
        kept = {key: each for key, each in value.items() if key != "value"}
        return {**kept, "start": around}  # the schedule of the config from another start
    around = around_value(declared, value)
    if around is not None and declared.name.endswith(RATE):
        return {"kind": ["constant", "linear", "cosine"], "start": around, "end": 0}
    return around


def around_value(declared: Hyperparameter, value: Any) -> dict[str, Any] | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if declared.is_int:
        return around_size(declared, int(value))
    if value == 0:
        scale = FROM_ZERO.get(declared.name)
        return {"log": scale} if scale else None
    if declared.high == 1:
        return around_share(declared, value)
    factor = WIDE if declared.name.endswith(RATE) or declared.name in FROM_ZERO else NARROW
    low, high = max(declared.low, value / factor), min(declared.high, value * factor)
    return {"log": [rounded(low), rounded(high)]} if 0 < low < high < math.inf else None


def around_size(declared: Hyperparameter, value: int) -> dict[str, Any] | None:
    """A setting, often a power of two, halved and doubled; any count of a range that may be scheduled."""
    if declared.is_scalar:
        low, high = max(declared.low, 1, value // COUNTS[0]), min(declared.high, value * COUNTS[1])
        return {"int_log": [int(low), int(high)]} if low < high else None
    sizes = sorted({value * 2**power // SIZES for power in range(2 * int(math.log2(SIZES)) + 1)})
    options = [size for size in sizes if max(declared.low, 1) <= size <= declared.high]
    return {"choice": options} if len(options) > 1 else None


def around_share(declared: Hyperparameter, value: float) -> dict[str, Any] | None:
    """A number from 0 to 1. Near 1, as gamma is, its distance to 1 is what matters."""
    if value == 1 and not declared.name.endswith("lambda"):
        return None  # it switches something off: a tau of 1 copies the weights
    if value > 0.5:
        distance = 1 - value if value < 1 else 0.1
        options = [rounded(1 - distance * factor) for factor in (5, 2, 1, 0.5, 0.2) if distance * factor < 1]
        return {"choice": sorted({*options, value})}
    return {"log": [rounded(value / WIDE), rounded(min(1.0, value * WIDE))]}


def rounded(number: float) -> float:
    """Three digits, without the noise of binary fractions."""
    return float(f"{number:.3g}") if number < 0.9 else round(number, 4)
