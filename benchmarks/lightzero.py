"""LightZero's search with its C++ tree, on the weights of one of our models: a program for search_speed.py to time.

LightZero need not be installed: a checkout will do, in which `python setup.py build_ext --inplace` has built the trees.
Its files run as they are. What they import besides and a search never calls (ding, ditk, nltk, transformers) is left
out if it is missing, and so are the packages' own __init__ files, which import all of LightZero.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

UNUSED = {
    "nltk.translate.bleu_score": ("sentence_bleu", "SmoothingFunction"),
    "ditk": ("logging",),
    "ding.torch_utils": ("MLP", "ResBlock"),
    "ding.torch_utils.network.normalization": ("build_normalization",),
    "ding.utils": ("SequenceType", "get_rank", "get_world_size", "set_pkg_seed"),
    "transformers": ("AutoModelForCausalLM", "AutoTokenizer"),
}


class NetworkOfOurs(nn.Module):
    """A model of ours as LightZero's searches ask it."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__()
        self.model, self.output, self.calls = model, output, 0

    def recurrent_inference(self, state: Tensor, action: Tensor) -> Any:
        self.calls += 1
        if self.calls % 2:  # since January 2026 its search asks twice and drops the first answer, which we spare it
            return None
        next_state, reward = self.model.transition(state, action)
        policy, value = self.model.predict(next_state)
        return self.output(value, reward, policy, next_state)


def lightzero_search(checkout: Path, actor: Any, obs: np.ndarray, simulations: int) -> Callable[[], object]:
    """One call searches all roots as its collector does: roots, Dirichlet noise, search, visit counts and values."""
    search_class, output = load(checkout)
    from easydict import EasyDict

    model, batch, actions = actor.model, len(obs), actor.planner.num_actions
    limit = model.value_support.limit
    ranges = dict.fromkeys(("value_support_range", "reward_support_range"), (-float(limit), limit + 1.0, 1.0))
    search = search_class(
        EasyDict(
            model=dict(**ranges, categorical_distribution=True),
            num_simulations=simulations,
            discount_factor=0.997,
            device="cpu",
            env_type="not_board_games",
        )
    )
    with torch.no_grad():
        state = model.represent(torch.from_numpy(obs))
        logits = model.predict(state)[0].numpy().tolist()
    network, states = NetworkOfOurs(model, output).eval(), state.numpy()
    legal, to_play, rewards = [list(range(actions))] * batch, [-1] * batch, [0.0] * batch
    cfg = search._cfg

    def run() -> object:
        roots = search_class.roots(batch, legal)
        noise = np.random.dirichlet([cfg.root_dirichlet_alpha] * actions, batch).astype(np.float32).tolist()
        roots.prepare(cfg.root_noise_weight, noise, rewards, logits, to_play)
        search.search(roots, network, states, to_play)
        return roots.get_distributions(), roots.get_values()

    visits = run()[0]
    assert network.calls == 2 * simulations
    assert {sum(each) for each in visits} == {simulations}
    return run


def load(checkout: Path) -> tuple[Any, Any]:
    """(MuZeroMCTSCtree, MZNetworkOutput)"""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    for name in ("lzero", "lzero.mcts", "lzero.mcts.tree_search", "lzero.model"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules.setdefault(name, package)
    missing = {name: words for name, words in UNUSED.items() if find_spec(name.partition(".")[0]) is None}
    placed = set()
    for name, words in missing.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                empty = types.ModuleType(parent)
                empty.__path__ = []
                sys.modules[parent] = empty
                placed.add(parent)
        for word in words:
            setattr(sys.modules[name], word, logging if word == "logging" else object)
    found = (
        import_module("lzero.mcts.tree_search.mcts_ctree").MuZeroMCTSCtree,
        import_module("lzero.model.common").MZNetworkOutput,
    )
    for name in placed:
        del sys.modules[name]  # nobody else is to find it
    return found
