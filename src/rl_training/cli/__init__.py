"""The command line. Commands import torch when they run, so that --help is instant."""

from rl_training.cli import runs, many, sharing, configs  # noqa: F401, I001 - each adds its commands; --help lists them in this order
from rl_training.cli.app import app, main

__all__ = ["app", "main"]
