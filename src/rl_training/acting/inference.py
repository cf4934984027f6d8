"""A model's predictions for the nodes of a search, as arrays; the states stay on the model's device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.acting.capture import Capture, CudaCapture, warmed_up
from rl_training.acting.forward import to_tensors
from rl_training.models.muzero import Inference, PlanningModel
from rl_training.types import Array, History, Observation, TensorTree


class TorchInference:
    """Any model. `initial` begins a search of B roots; `recurrent` then makes node after node, one in each tree."""

    def __init__(self, model: PlanningModel, *, compiled_decoding: bool = False) -> None:
        """compiled_decoding: see `decoded`; for models on the CPU."""
        self.model = model
        self.device = next(model.parameters()).device
        self.states = torch.empty(0, model.state_size, device=self.device)  # [nodes * B, S]
        self.batch = 0
        self.decodes = compiled_decoding and self.device.type == "cpu" and model.has_plain_scalars

    @torch.inference_mode()
    def initial(self, obs: Observation, num_simulations: int, history: History | None = None) -> Array:
        """[B, P + 2] policy, value and reward (0) of the roots; history: the steps before, for models that remember."""
        steps = None if history is None else to_tensors(history, self.device)
        inference = self.root_inference(to_tensors(obs, self.device), steps)
        self.batch = len(inference.state)
        if len(self.states) < self.batch * (num_simulations + 1):
            self.states = inference.state.new_empty(self.batch * (num_simulations + 1), self.model.state_size)
        self.states[: self.batch] = inference.state
        return packed(inference).cpu().numpy()

    def refresh(self) -> None:
        """Called when the model's weights have changed, for inference that keeps copies of them."""

    def root_inference(self, obs: TensorTree, history: History | None) -> Inference:
        return self.model.initial(obs, history)

    @property
    def roots(self) -> Tensor:
        """[B, S]"""
        return self.states[: self.batch]

    @torch.inference_mode()
    def recurrent(self, node: int, parent: Array, action: Array) -> Array:
        """[B, P + 2] policy, value and reward of nodes number `node`, reached from nodes parent [B] by action [B, ...].

        Actions are those of the model: numbers of discrete ones, or continuous ones themselves.
        """
        rows = torch.from_numpy(parent * self.batch + np.arange(self.batch)).to(self.device)
        state, actions = self.states.index_select(0, rows), torch.from_numpy(action).to(self.device)
        if self.decodes:
            next_state, prediction = self.decoded(state, actions)
        else:
            inference = self.model.recurrent(state, actions)
            next_state, prediction = inference.state, packed(inference).cpu().numpy()
        self.states[node * self.batch : (node + 1) * self.batch] = next_state
        return prediction

    def decoded(self, state: Tensor, action: Tensor) -> tuple[Tensor, Array]:
        """The same as `model.recurrent`. Logits become numbers in one compiled loop: a dozen small operations would
        take as long as a small network itself."""
        from rl_training.ops.tree import decode  # numba takes longer to import than all the rest

        model = self.model
        next_state, reward = model.transition(state, action)
        policy, value = model.predict(next_state)
        logits = torch.cat([policy, value, reward], 1).numpy()
        prediction = np.empty((self.batch, model.policy_size + 2), np.float32)
        decode(logits, value.shape[1], prediction, np.empty(logits.shape[1], np.float32))
        return next_state, prediction


class GraphInference(TorchInference):
    """The same on a CUDA device, with `recurrent`, and `initial` of plain observations, captured as graphs: one launch
    instead of one per kernel.

    That of `recurrent` reads its inputs from and writes its outputs to pinned memory of the host. Optimizers and
    `load_state_dict` write weights in place, so graphs stay valid; a batch of another size has graphs of its own.
    `ask` and `answer` are `recurrent` of one part of the trees: many are cut in two, so that the GPU works on one half
    while the host works on the other.
    """

    HALF = 2048  # trees: for fewer at a time the GPU takes hardly less
    MOST = 8  # sizes of batches that have graphs; which was not used for longest goes first

    def __init__(self, model: PlanningModel, capture: Capture | None = None) -> None:
        super().__init__(model)
        self.capture = capture or CudaCapture(self.device)
        self.graphs: dict[tuple[int, int, tuple[int, ...]], Graph] = {}
        self.first_graphs: dict[Any, FirstGraph] = {}
        self.arenas: dict[int, Tensor] = {}
        self.bounds: list[int] = []  # part i is trees bounds[i] to bounds[i + 1]
        self.asked: dict[int, Graph] = {}  # of each part the last

    def initial(self, obs: Observation, num_simulations: int, history: History | None = None) -> Array:
        batch = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        arena = self.arenas.pop(batch, None)
        self.states = self.states[:0] if arena is None else arena
        prediction = super().initial(obs, num_simulations, history)
        self.bounds = [0, batch] if batch < 2 * self.HALF else [0, batch // 2, batch]
        if self.states is not arena:  # a larger one: graphs point into the old one
            self.forget(batch)
        self.arenas[batch] = self.states
        if len(self.arenas) > self.MOST:
            self.forget(next(iter(self.arenas)))
        return prediction

    def root_inference(self, obs: TensorTree, history: History | None) -> Inference:
        if isinstance(obs, dict):
            return super().root_inference(obs, history)
        inputs = {"now": obs, **(history or {})}
        key = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        graph = self.first_graphs.pop(key, None) or FirstGraph(self.model, inputs, self.capture)
        self.first_graphs[key] = graph
        if len(self.first_graphs) > self.MOST:
            del self.first_graphs[next(iter(self.first_graphs))]
        return graph(inputs)

    def forget(self, batch: int) -> None:
        self.arenas.pop(batch, None)
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] != batch}

    def recurrent(self, node: int, parent: Array, action: Array) -> Array:
        parts = list(enumerate(pairwise(self.bounds)))
        for part, (begin, end) in parts:
            self.ask(part, node, parent[begin:end], action[begin:end])
        return np.concatenate([self.answer(part) for part, _ in parts])

    @torch.inference_mode()
    def ask(self, part: int, node: int, parent: Array, action: Array) -> None:
        key = (self.batch, part, action.shape[1:])
        graph = self.graphs.get(key)
        if graph is None:
            trees = np.arange(*self.bounds[part : part + 2])
            graph = self.graphs[key] = Graph(self.model, self.states, self.batch, trees, action, self.capture)
        graph.ask(node, parent, action)
        self.asked[part] = graph

    def answer(self, part: int) -> Array:
        """Valid until that part is asked again."""
        return self.asked[part].answer()


class FirstGraph:
    """`initial` for as many observations `now` as these, and as much history, if they have one, captured. Its output is
    valid until the next call."""

    def __init__(self, model: PlanningModel, inputs: dict[str, Tensor], capture: Capture) -> None:
        self.inputs = {name: x.clone() for name, x in inputs.items()}
        now, history = self.inputs["now"], {name: x for name, x in self.inputs.items() if name != "now"}
        self.captured = warmed_up(capture, lambda: model.initial(now, history or None))

    def __call__(self, inputs: dict[str, Tensor]) -> Inference:
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.captured.replay()
        prediction: Inference = self.captured.output
        return prediction


class Graph:
    """`recurrent` for some of B trees, whose states lie in `states`, captured."""

    def __init__(
        self, model: PlanningModel, states: Tensor, batch: int, trees: Array, action: Array, capture: Capture
    ) -> None:
        device = states.device
        self.batch, self.trees = batch, trees
        self.rows = capture.pinned(torch.zeros(2, len(trees), dtype=torch.int64))  # where from, where to
        self.rows[1] = batch + torch.from_numpy(trees)
        self.action = capture.pinned(torch.from_numpy(action.copy()))
        self.prediction = capture.pinned(torch.empty(len(trees), model.policy_size + 2))
        # Kept: a graph goes on writing to the memory of what it captured, whoever has it by then.
        self.device_inputs = rows, actions = self.rows.to(device, copy=True), self.action.to(device, copy=True)

        def step() -> None:
            rows.copy_(self.rows, non_blocking=True)
            actions.copy_(self.action, non_blocking=True)
            inference = model.recurrent(states.index_select(0, rows[0]), actions)
            states.index_copy_(0, rows[1], inference.state)
            self.prediction.copy_(packed(inference), non_blocking=True)

        self.captured = warmed_up(capture, step)
        self.inputs, self.output = (self.rows.numpy(), self.action.numpy()), self.prediction.numpy()

    def ask(self, node: int, parent: Array, action: Array) -> None:
        rows, actions = self.inputs
        np.multiply(parent, self.batch, out=rows[0])
        rows[0] += self.trees
        np.add(self.trees, node * self.batch, out=rows[1])
        actions[:] = action
        self.captured.launch()

    def answer(self) -> Array:
        self.captured.wait()
        return self.output


def packed(inference: Inference) -> Tensor:
    """Policy, value, reward side by side: one piece travels faster than three."""
    return torch.cat([inference.policy, inference.value.unsqueeze(1), inference.reward.unsqueeze(1)], 1)
