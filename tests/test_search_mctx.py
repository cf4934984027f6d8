"""The Gumbel and PUCT searches visit what mctx's do, to the count; the extra `reference` installs mctx."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mctx_reference
from mctx_reference import CASES, Table
from rl_training.ops.search import GUMBEL, GUMBEL_RAW, MCTX_MUZERO, gumbel_outcome
from rl_training.ops.tree import SearchConstants
from rl_training.types import Array

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mctx") is None, reason="needs mctx: pip install -e '.[reference]'"
)
RULES = {
    "gumbel": (GUMBEL, SearchConstants(c_scale=0.1, max_considered=5)),
    "raw": (GUMBEL_RAW, SearchConstants(c_scale=1.0, c_visit=20.0)),
    "puct": (MCTX_MUZERO, SearchConstants(pb_c_init=1.5, pb_c_base=300.0)),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Array]]:
    """What mctx found in each case."""
    path = tmp_path_factory.mktemp("mctx") / "answers.npz"
    subprocess.run([sys.executable, str(Path(mctx_reference.__file__)), str(path)], check=True)
    each: list[dict[str, Array]] = [{} for _ in CASES]
    with np.load(path) as every:
        for key in every.files:
            number, name = key.split("/")
            each[int(number)][name] = every[key]
    return each


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number])))
def test_the_search_is_that_of_mctx(number: int, answers: list[dict[str, Array]]) -> None:
    """With the noise that mctx drew."""
    policy, num_actions, num_simulations, masked, _, discount = CASES[number]
    table, theirs, (rules, constants) = Table(num_actions, discount), answers[number], RULES[policy]
    legal = table.legal if masked else None
    options: dict[str, Any] = {"gumbel": theirs["gumbel"]} if "gumbel" in theirs else {}
    ours = table.search(rules, num_simulations, legal=legal, constants=constants, **options)
    np.testing.assert_array_equal(ours.visits, theirs["visits"])
    visited = ours.visits > 0
    np.testing.assert_allclose(ours.q[visited], theirs["q"][visited], atol=1e-5)
    np.testing.assert_allclose(ours.value, theirs["value"], atol=1e-5)
    if policy != "puct":
        action, target = gumbel_outcome(ours, table.logits[table.start], legal, theirs["gumbel"], constants)
        np.testing.assert_array_equal(action, theirs["action"])
        np.testing.assert_allclose(target, theirs["policy"], atol=1e-3)
