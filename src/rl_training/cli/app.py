"""The application: its errors as exit codes, its output, and the function that runs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Turns errors into exit codes: 0 done, 1 training failed, 2 bad input, 130 interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            result = getattr(error, "result", None)
            if result is None:
                _exit(str(error) or "interrupted; nothing was saved since the last checkpoint", 130)
            from rl_training.runtime.commands import command

            _exit(f"{error}\nresume with: {command('resume', result.run_dir)}", 130)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            from rl_training.errors import InputError
            from rl_training.runtime.metrics import TrainingDiverged
            from rl_training.runtime.outcome import TrainingFailed

            if isinstance(error, InputError):
                lines = [f"error: {line}" for line in str(error).splitlines()]
                trace = getattr(error, "trace", "")  # of an error inside an environment, for its author
                _exit("\n".join([*lines, "", trace.rstrip()] if trace else lines), 2)
            if isinstance(error, TrainingDiverged | TrainingFailed):
                _exit(f"error: {error}", 1)
            raise


def _exit(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code)


app = typer.Typer(
    name="rl-training",
    cls=Commands,
    help="Train reinforcement-learning agents from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Check, show and describe configs.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def _version(value: bool) -> None:
    if value:
        import rl_training

        print(f"rl-training {rl_training.__version__}")
        raise typer.Exit


VersionOption = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def _root(version: VersionOption = False) -> None: ...


def _prepare_output() -> None:
    """Neither a closed stream nor a character that its encoding lacks may end a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_lost_output() -> None:
    """Drop what a closed terminal did not accept; Python would fail to write it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process, and return its exit code."""
    _prepare_output()
    try:
        app(args=None if argv is None else [str(argument) for argument in argv])
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    finally:
        _drop_lost_output()
    return 0
