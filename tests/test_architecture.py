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
    "types", "yaml_text", "errors", "config", "ops", "models", "data", "envs", "acting", "algorithms",
    "runtime", "reports", "studies", "cli", "__main__", "__init__",
]  # fmt: skip
RUNTIME = [  # within runtime, from the bottom up; what is not named is a leaf that may be used by any of these
    "schedules", "controls", "recipe", "sources", "run", "off_policy", "on_policy", "multi_task",
    "trainer", "registry", "loading", "workflows",
]  # fmt: skip


def imports(path):
    """The modules of this package that a file imports: ["runtime", "run"] is rl_training.runtime.run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                package, *parts = [*(node.module or "").split("."), alias.name]
                is_module = len(parts) == 1 or PACKAGE.joinpath(*parts).with_suffix(".py").exists()
                if package == "rl_training":
                    yield parts if is_module else parts[:-1]
        if isinstance(node, ast.Import):
            yield from (parts for package, *parts in (alias.name.split(".") for alias in node.names)
                        if package == "rl_training" and parts)  # fmt: skip


def everything_behind(path):
    """The modules of this package that are imported with a file: by it, by those, and so on."""
    seen, found = set(), [path.relative_to(PACKAGE).with_suffix("").parts]
    while found:
        module = tuple(found.pop())
        if module not in seen:
            seen.add(module)
            found += imports(PACKAGE.joinpath(*module).with_suffix(".py"))
    return seen


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


@pytest.mark.parametrize("path", sorted((PACKAGE / "acting").glob("*.py")), ids=lambda p: p.name)
def test_acting_needs_neither_learners_nor_runs(path):
    assert not [module for module in everything_behind(path) if module[0] in ("algorithms", "runtime")]


@pytest.mark.parametrize("name", ["evaluation", "policy", "checkpoints"])
def test_what_plays_imports_no_learner(name):
    behind = everything_behind(PACKAGE / "runtime" / f"{name}.py")
    assert not [module for module in behind if module[0] == "algorithms"]
    assert ("runtime", "registry") not in behind  # the table, which leads to all of them


def test_a_policy_is_loaded_without_the_name_of_a_learner():
    """The table of algorithms is the only way from here to a learner, and it is not taken."""
    for name in ("workflows.py", "restoring.py"):
        path = PACKAGE / "runtime" / name
        assert not [target for target in imports(path) if target[0] == "algorithms"], name
        assert "learner" not in ast.dump(ast.parse(path.read_text())).lower(), name


def test_a_run_knows_no_environment_but_that_one_may_fail():
    path = PACKAGE / "runtime" / "run.py"
    assert [target for target in imports(path) if target[0] == "envs"] == [["envs", "faults"]]
    assert "from rl_training.envs.faults import EnvironmentFault\n" in path.read_text()
    assert "gymnasium" not in path.read_text()


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

    shared = ["run", "run_checkpoints", "sources", "recipe", "on_policy", "off_policy", "multi_task"]
    for name in (f"{module}.py" for module in [*shared, "evaluation", "workflows"]):
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
                assert called not in ("eval", "exec", "torch.load", "yaml.unsafe_load"), path
                assert called != "np.load" or "allow_pickle=False" in ast.unparse(node), path


def test_files_and_functions_stay_readable():
    for path in FILES:
        text = path.read_text()
        # All compiled code of the search is one file: numba's cache would not see that another has changed.
        most = 700 if path.name == "tree.py" else 450
        assert text.count("\n") <= most, f"{path} is long: split it"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and "cli" not in path.parts:
                assert node.end_lineno - node.lineno < 65, f"{path.name}: {node.name} is long"


def test_no_two_classes_share_a_name():
    homes = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


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
