"""Commands about configs, algorithms and the installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_origin

import typer

from rl_training.cli.app import app, config_app
from rl_training.cli.options import (
    AllowImport,
    ConfigArgument,
    ConfigOption,
    SetOption,
    controls_of,
    load,
    one_config,
    option,
    warn,
)


@config_app.command("check")
def config_check(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Validate a config without training."""
    path = one_config(config, config_option)
    warn(controls_of(load(path, set_, allow_import)))
    print(f"{path}: ok")


@config_app.command("show")
def config_show(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    allow_import: AllowImport = False,
) -> None:
    """Print a config with all defaults filled in."""
    import yaml

    from rl_training.runtime.registry import ALGORITHMS
    from rl_training.runtime.run_folder import config_to_dict
    from rl_training.runtime.setup import with_env_defaults

    loaded = load(one_config(config, config_option), set_, allow_import)
    loaded = with_env_defaults(loaded, ALGORITHMS[loaded.algo].recipe)
    print(yaml.safe_dump(config_to_dict(loaded, controls_of(loaded)), sort_keys=False), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of configs, with which editors complete and check them."""
    import json

    from rl_training.runtime.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of all config keys and hyperparameters, in Markdown."""
    from rl_training.runtime.schema import reference

    print(reference(), end="")


@app.command()
def schedule(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    set_: SetOption = None,
    png: Annotated[Path | None, option("Also save a plot as this PNG file.")] = None,
    allow_import: AllowImport = False,
) -> None:
    """Show how every scheduled hyperparameter changes during training."""
    from rl_training.runtime import preview

    path = one_config(config, config_option)
    controls = controls_of(load(path, set_, allow_import))
    if not controls.varying:
        print(f"{path}: nothing is scheduled; every number keeps its value")
    else:
        print(f"{path}: {len(controls.varying)} hyperparameters scheduled over {controls.horizon:,} env steps\n")
        print(f"{'':<24}" + "".join(f"{column:>12}" for column in preview.COLUMNS))
    for name, values in preview.table(controls):
        print(f"{name:<24}" + "".join(f"{value:>12.5g}" for value in values))
    for name in controls.varying:
        print(f"\n{name}")
        print("\n".join(preview.plot(preview.sampled(controls, name)[1])))
        print(preview.axis(controls.horizon))
    warn(controls)
    if png is not None:
        preview.save_png(controls, png)
        print(f"\nwrote {png}")


@app.command()
def algorithms(name: Annotated[str | None, typer.Argument(help="One algorithm.", show_default=False)] = None) -> None:
    """List the algorithms and every hyperparameter with its default, bounds and meaning."""
    from rl_training.errors import InputError
    from rl_training.runtime.hyperparameters import hyperparameters_of, type_name
    from rl_training.runtime.loading import unknown_algorithm
    from rl_training.runtime.registry import ALGORITHMS

    if name is not None and name not in ALGORITHMS:
        raise InputError(unknown_algorithm(name))
    for algo, entry in ALGORITHMS.items():
        if name not in (None, algo):
            continue
        recipe = entry.recipe
        players = "1, or 2 who move in turns" if recipe.two_players else "1"
        print(f"{algo}: {recipe.summary}\n  actions       {recipe.actions}\n  observations  {recipe.observations}")
        print(f"  players       {players}\n")
        hyperparameters = hyperparameters_of(recipe.hyperparameters)
        width = max(map(len, hyperparameters))
        for declared in hyperparameters.values():
            mark, default, text = "~" if declared.is_scalar else " ", declared.default_text, declared.help
            if get_origin(declared.hint) is Literal:
                text += f" (choices: {type_name(declared.hint)})"
            if declared.schedule:
                default, text = "scheduled", f"{text} (default: {default})"
            print(f"  {mark} {declared.name:<{width}} {default:<12} {declared.bounds:<12} {text}")
        print("\n  ~ can be scheduled\n")


@app.command()
def doctor(
    address: Annotated[str | None, option("The Ray cluster: HOST:PORT; default: that of this machine, if any.")] = None,
) -> None:
    """Show versions, devices, threads, environment backends, and what a Ray cluster has."""
    from rl_training.runtime.metadata import installation_report
    from rl_training.runtime.ray_cluster import ray_report

    for name, text in (installation_report() | ray_report(address)).items():
        print(f"{name:<14} {text}")
