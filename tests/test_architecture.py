"""The shape of the package, kept by a test: imports point down, nothing unsafe is loaded, files stay readable."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "rl_training"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [
    "types", "yaml_text", "config", "ops", "models", "data", "envs", "algorithms",
    "runtime", "cli", "__main__", "__init__",
]  # fmt: skip
RUNTIME = [  # within runtime, from the bottom up; what is not named is a leaf that may be used by any of these
    "schedules", "controls", "run", "multi_task", "off_policy", "on_policy",
    "trainer", "registry", "loading", "workflows",
]  # fmt: skip


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl_training"):
            parts = node.module.split(".")[1:]
            yield from ([parts] if parts else [[alias.name] for alias in node.names])


def runtime_rank(module):
    name = "trainer" if module.endswith("_trainer") else module
    return RUNTIME.index(name) if name in RUNTIME else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts
    for target in imports(path):
        if own[0] == "__init__":
            continue
        assert LAYERS.index(target[0]) <= LAYERS.index(own[0]), f"{'.'.join(own)} imports {'.'.join(target)}"
        if own[0] == target[0] == "runtime" and len(target) > 1:
            mine, its = runtime_rank(own[1]), runtime_rank(target[1])
            assert mine is None or its is None or its <= mine, f"{own[1]} imports {target[1]}"


def test_only_controls_knows_schedules():
    knowing = [p.name for p in FILES if ["runtime", "schedules"] in list(imports(p))]
    assert set(knowing) <= {"controls.py", "schema.py"}


def test_only_the_runner_steps_environments():
    """`.step(` of an environment stands in envs/ alone; algorithms and loops step the runner."""
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] != "envs":
            assert "env.step(" not in path.read_text(), path
            assert "envs.step(" not in path.read_text(), path


def test_the_shared_loop_names_no_algorithm():
    from rl_training import ALGORITHMS

    for name in ("run.py", "on_policy.py", "off_policy.py", "multi_task.py", "evaluation.py", "workflows.py"):
        words = ast.dump(ast.parse((PACKAGE / "runtime" / name).read_text()))
        assert not [algo for algo in ALGORITHMS if f"'{algo}'" in words], name


def test_nothing_that_can_run_code_is_loaded():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "cloudpickle", "dill", "joblib"} & set(names), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "np.load", "yaml.unsafe_load"), path


def test_files_and_functions_stay_readable():
    for path in FILES:
        text = path.read_text()
        # All compiled code of the search is one file: numba's cache would not see that another has changed.
        most = 700 if path.name == "tree.py" else 450
        assert text.count("\n") <= most, f"{path} is long: split it"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and path.name != "cli.py":
                assert node.end_lineno - node.lineno < 65, f"{path.name}: {node.name} is long"


def test_importing_the_package_and_asking_for_help_needs_no_torch():
    code = (
        "import sys, rl_training, rl_training.cli\n"
        "assert 'torch' not in sys.modules and 'gymnasium' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_everything_public_is_there():
    import rl_training

    assert sorted(rl_training._HOMES) == sorted(rl_training.__all__)
    assert all(getattr(rl_training, name) is not None for name in rl_training.__all__)
