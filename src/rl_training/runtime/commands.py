"""Commands for the user to copy."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rl_training.errors import InputError, read_document


def command(*arguments: Any) -> str:
    """A command of ours, with --allow-import if it names a run that needs it."""
    imports = any(_imports_a_module(path) for path in arguments if isinstance(path, Path))
    return f"{program('rl-training')} {shlex.join([*map(str, arguments), *(['--allow-import'] if imports else [])])}"


def _imports_a_module(run_dir: Path) -> bool:
    """Whether an env_id of the run has the form module:id."""
    try:
        env_id = read_document((run_dir / "config.yaml").read_text(encoding="utf-8"), "config.yaml").data["env_id"]
    except (OSError, InputError, KeyError):  # the command is only a hint: no reason to fail
        return False
    return any(":" in name for name in ([env_id] if isinstance(env_id, str) else env_id))


def program(name: str) -> str:
    """How to call a program here: by name if it is on the PATH, else by its path."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return os.path.relpath(beside)
