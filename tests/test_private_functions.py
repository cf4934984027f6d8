"""Functions that libraries do not make public stand behind ours, beside a public way that gives the same bits."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.algorithms import optim
from rl_training.algorithms.optim import Adam
from rl_training.config import TrainConfig, config_fields
from rl_training.models.parameters import FlatParameters
from rl_training.ops import tile, tree
from rl_training.ops.search import MUZERO, Evaluation, Search
from rl_training.runtime import event_files, phases


def stepped(step) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    network = nn.Linear(37, 5)
    adam = Adam(FlatParameters(network.parameters()), eps=1e-5)
    for i in range(5):
        adam.parameters.gradient.copy_(torch.randn_like(adam.parameters.gradient))
        step(adam, 1e-3 / (i + 1))
    return adam.parameters.vector, adam.mean, adam.square, adam.steps


def test_adams_kernel_and_the_public_optimizer_give_the_same_bits():
    for ours, public in zip(stepped(Adam.step), stepped(optim.public_adam_step), strict=True):
        assert torch.equal(ours, public)


def test_adam_takes_the_public_way_where_torch_has_no_such_kernel(monkeypatch):
    expected, calls, public = stepped(Adam.step), [], optim.public_adam_step
    monkeypatch.setattr(optim, "ADAM_KERNEL", None)
    monkeypatch.setattr(optim, "public_adam_step", lambda *given: calls.append(public(*given)))
    for ours, other in zip(expected, stepped(Adam.step), strict=True):
        assert torch.equal(ours, other)
    assert len(calls) == 5


@pytest.mark.parametrize("inputs", [8, 64, 92])
def test_tiles_and_plain_loops_give_the_same_bits(inputs):
    rng = np.random.default_rng(inputs)
    for rows, ways, name in ((tile.ROWS, 1, "many_rows"), (1, 4, "one_row")):
        x = rng.standard_normal((rows, inputs), dtype=np.float32)
        weight = rng.standard_normal((inputs, tile.LANES), dtype=np.float32)
        out = rng.standard_normal((rows, tile.LANES), dtype=np.float32)
        plain, other = tile.plain_tile(rows, tile.VECTORS, ways), out.copy()
        fast = getattr(tile, name)

        @tree.compiled
        def call(x, weight, out, fast=fast, inputs=inputs):
            fast(x, weight, out, 0, 0, inputs)

        call(x, weight, out)
        plain(x, weight, other, 0, 0, inputs)
        assert not np.array_equal(other, np.zeros_like(other))
        np.testing.assert_array_equal(out, other)


def test_a_search_with_reference_counts_gives_the_same_bits(monkeypatch):
    """The same file compiled without numba's private option."""
    monkeypatch.setattr(tree.numba.core.options.DefaultOptions, "_nrt", None)
    monkeypatch.delattr(tree.numba.core.options.DefaultOptions, "_nrt")
    spec = importlib.util.spec_from_file_location("counted_tree", Path(tree.__file__))
    counted = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "counted_tree", counted)
    spec.loader.exec_module(counted)
    assert counted.PLAIN == {"error_model": "numpy"}
    monkeypatch.undo()
    assert tree.PLAIN["_nrt"] is False
    rng = np.random.default_rng(0)
    answers = rng.standard_normal((9, 3, 4)).astype(np.float32)
    results = []
    for grow in (tree.muzero, counted.compose(counted.puct, counted.puct, counted.by_tree, "counted").grow):
        search = Search(2)
        root = Evaluation(answers[0, :, :2], answers[0, :, 2], np.zeros(3, np.float32), 0.9)
        prepared, table = search._prepare(MUZERO, 3, 8, None, None, tree.SearchConstants())
        room = np.empty((2, 2), np.float32)
        first = np.concatenate([root.logits, root.value[:, None], root.reward[:, None]], 1)
        for node, prediction in enumerate([first, *answers[1:]]):
            discount = np.full(3, 0.9, np.float32)
            grow(prepared, 0, 3, node, np.ascontiguousarray(prediction), discount, table, tree.SearchConstants(), room)
        results.append([array.copy() for array in prepared])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_fields_of_a_config_are_those_pydantic_has():
    ours, theirs = config_fields(), TrainConfig.__pydantic_fields__
    assert list(ours) == list(theirs)
    for name, field in theirs.items():
        assert (ours[name].description, ours[name].metadata) == (field.description, field.metadata)
        assert (ours[name].default, ours[name].default_factory) == (field.default, field.default_factory)


def test_events_are_the_same_through_torchs_public_writer(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = {"train/loss": 0.25, "eval/return": 3.5}
    found = []
    for name, kind in (("own", event_files.EventFile), ("public", event_files.TorchEventFile)):
        events = kind(tmp_path / name)
        for step in (1, 2):
            events.write(step, written)
        events.flush()
        events.close()
        read = EventAccumulator(str(tmp_path / name)).Reload()
        found.append({tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]})
    assert found[0] == found[1] == {tag: [(1, value), (2, value)] for tag, value in written.items()}


def test_events_go_to_the_public_writer_where_tensorboard_has_no_such_records(tmp_path, monkeypatch):
    importlib.import_module("torch.utils.tensorboard")  # it has its own copy of the records by then
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    events = event_files.open_events(tmp_path)
    assert isinstance(events, event_files.TorchEventFile)
    events.close()


def test_compiling_is_no_phase_of_its_own_where_numba_has_no_events(monkeypatch):
    import numba.core

    monkeypatch.delattr(numba.core, "event", raising=False)
    monkeypatch.setitem(sys.modules, "numba.core.event", None)
    clock = phases.Phases()
    clock.enter("learning")
    with phases.compilation_phase(clock):
        assert tree.compiled(lambda x: x + 1)(1) == 2
    clock.enter("collecting")
    assert "compiling" not in clock.seconds()
