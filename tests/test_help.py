"""Help texts: each hyperparameter, config key and command-line option has one, short and in the terms of the field."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from rl_training import ALGORITHMS
from rl_training.cli import app
from rl_training.config import AtariOptions, EnvOptions, PixelOptions, Wrappers, config_fields
from rl_training.runtime.callbacks import CallbackOptions, EarlyStoppingOptions, TimeLimitOptions
from rl_training.runtime.hyperparameters import hyperparameters_of
from rl_training.runtime.schedules import KINDS, Warmup
from test_cli import cli

LONGEST = 110  # characters
VAGUE = (  # phrases that make a reader ask: what is meant?
    r"^(what|whose|how far|how it|how long|where|of the|of that|the same|by)\b",
    r"\b(anew|beside|from then on|so many|this far|of whichever|earns? nothing|looks? back)\b",
    r"\b(longe(r|st) gradients?|lose per|takes off|is worth|weighs?|alike|spelt|is made|as a \w+ says)\b",
)
TERMS = {  # what users of other libraries look for
    "learning_rate": "learning rate",
    "gamma": "discount factor",
    "max_grad_norm": "gradient clipping",
    "weight_decay": "decoupled weight decay",
    "clip_coef": "clip range",
    "clip_vf_coef": "clip",
    "target_kl": "KL",
    "gae_lambda": "GAE",
    "ent_coef": "entropy bonus",
    "buffer_capacity": "replay buffer",
    "batch_size": "batch size",
    "tau": "soft update",
    "target_update_interval": "target network update",
    "utd_ratio": "update-to-data",
    "priority_exponent": "PER alpha",
    "beta": "PER beta",
    "num_simulations": "simulations per search",
    "pb_c_init": "PUCT",
    "pb_c_base": "PUCT",
    "adapter_rank": "LoRA",
}


def hyperparameters():
    return {
        f"{algo}.{field.name}": field.help
        for algo, entry in ALGORITHMS.items()
        for field in hyperparameters_of(entry.recipe.hyperparameters).values()
    }


def config_keys():
    options = [
        AtariOptions,
        PixelOptions,
        Wrappers,
        EnvOptions,
        EarlyStoppingOptions,
        TimeLimitOptions,
        CallbackOptions,
        Warmup,
    ]
    models = {cls.__name__: cls.model_fields for cls in [*options, *KINDS.values()]} | {"TrainConfig": config_fields()}
    return {
        f"{cls}.{name}": info.description
        for cls, fields in models.items()
        for name, info in fields.items()
        if name != "kind"  # it names the schedule
    }


def command_line():
    texts = {}

    def collect(command, path):
        texts[path] = (command.help or "").strip()
        for parameter in command.params:
            texts[f"{path} {parameter.name}"] = getattr(parameter, "help", "")
        for name, sub_command in getattr(command, "commands", {}).items():
            collect(sub_command, f"{path} {name}")

    collect(get_command(app), "rl-training")
    return texts


ALL = hyperparameters() | config_keys() | command_line()


def test_there_are_texts_of_each_kind():
    assert {
        "ppo.clip_coef",
        "TrainConfig.seed",
        "Wrappers.atari",
        "Cyclic.decay",
        "rl-training train seed",
    } <= ALL.keys()


@pytest.mark.parametrize("name", ALL)
def test_a_help_text_is_short_and_clear(name):
    text = ALL[name]
    assert text
    assert text.strip() == text
    assert len(text) <= LONGEST, f"{len(text)} characters"
    for phrase in VAGUE:
        assert not re.search(phrase, text, re.IGNORECASE), text


@pytest.mark.parametrize("name", [name for name in hyperparameters() if name.split(".")[1] in TERMS])
def test_a_help_text_has_the_term_of_the_field(name):
    assert TERMS[name.split(".")[1]] in ALL[name]


def test_the_list_of_hyperparameters_keeps_its_columns():
    """Also behind long names and behind defaults that are schedules, which stand after the text."""
    listed = cli("algorithms", "efficientzero").splitlines()
    fields = hyperparameters_of(ALGORITHMS["efficientzero"].recipe.hyperparameters)
    rows = {line[4:].split()[0]: line for line in listed if line[4:].split() and line[4:].split()[0] in fields}
    assert rows.keys() == fields.keys()
    assert {rows[name].index(field.help) for name, field in fields.items()} == {rows["gamma"].index("discount factor")}
    assert rows["beta"].endswith("(default: {kind: linear, start: 0.4, end: 1.0})")
    assert rows["stem"].endswith("(choices: residual, strided)")
