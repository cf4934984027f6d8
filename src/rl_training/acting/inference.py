"""A model's predictions for the nodes of a search, as arrays. The states stay on the device of the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.acting.capture import CudaCapture, capture_after_warm_up
from rl_training.data.batch import to_tensors
from rl_training.data.history import num_rows
from rl_training.models.muzero import Inference, PlanningModel
from rl_training.types import Array, History, Observation, TensorTree


class TorchInference:
    """Inference for any model. `initial` evaluates B roots, each call of `recurrent` one new node of each tree."""

    def __init__(self, model: PlanningModel, *, compiled_decoding: bool = False) -> None:
        """compiled_decoding: use `decoded`, if the model is on the CPU."""
        self.model = model
        self.device = next(model.parameters()).device
        self.states = torch.empty(0, model.state_size, device=self.device)  # [nodes * B, S]
        self.batch = 0
        kind = type(model)
        plain = (kind.scalars, kind.recurrent) == (PlanningModel.scalars, PlanningModel.recurrent)  # see `decoded`
        self.decodes = compiled_decoding and self.device.type == "cpu" and plain

    @torch.inference_mode()
    def initial(self, obs: Observation, num_simulations: int, history: History | None = None) -> Array:
        """[B, P + 2] Policy, value and reward 0 of the roots. history: the steps before, for models with a context."""
        steps = None if history is None else to_tensors(history, self.device)
        inference = self.root_inference(to_tensors(obs, self.device), steps)
        self.batch = len(inference.state)
        if len(self.states) < self.batch * (num_simulations + 1):
            self.states = inference.state.new_empty(self.batch * (num_simulations + 1), self.model.state_size)
        self.states[: self.batch] = inference.state
        return packed(inference).cpu().numpy()

    def refresh(self) -> None:
        """Called after the weights of the model have changed, for inference with copies of them."""

    def root_inference(self, obs: TensorTree, history: History | None) -> Inference:
        return self.model.initial(obs, history)

    @property
    def roots(self) -> Tensor:
        """The states [B, S] of the roots."""
        return self.states[: self.batch]

    @torch.inference_mode()
    def recurrent(self, node: int, parent: Array, action: Array) -> Array:
        """[B, P + 2] Policy, value and reward of nodes number `node`, children of parent [B] by action [B, ...]."""
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
        """`model.recurrent` with logits decoded in one compiled loop: a dozen small operations would take as long as a
        small network."""
        from rl_training.ops.tree import decode  # here, because importing numba is slow

        model = self.model
        next_state, reward = model.transition(state, action)
        policy, value = model.predict(next_state)
        logits = torch.cat([policy, value, reward], 1).numpy()
        prediction = np.empty((self.batch, model.policy_size + 2), np.float32)
        decode(logits, value.shape[1], prediction, np.empty(logits.shape[1], np.float32))
        return next_state, prediction


class GraphInference(TorchInference):
    """Inference on a CUDA device, with graphs captured of `recurrent`, and of `initial` unless observations are dicts.

    The graph of `recurrent` reads and writes pinned memory of the host. Optimizers and `load_state_dict` write weights
    in place, so graphs stay valid. Each batch size has its own graphs. `ask` and `answer` are `recurrent` for one part
    of the trees: large batches have two parts, so that the GPU works on one while the host works on the other.
    """

    HALF = 2048  # trees: the GPU is hardly faster with fewer
    MOST = 8  # batch sizes with graphs; the least recently used is dropped

    def __init__(self, model: PlanningModel, capture: CudaCapture | None = None) -> None:
        super().__init__(model)
        self.capture = capture or CudaCapture(self.device)
        self.graphs: dict[tuple[int, int, tuple[int, ...]], Graph] = {}
        self.first_graphs: dict[Any, FirstGraph] = {}
        self.arenas: dict[int, Tensor] = {}
        self.bounds: list[int] = []  # part i is trees bounds[i] to bounds[i + 1]
        self.asked: dict[int, Graph] = {}  # the last graph of each part

    def initial(self, obs: Observation, num_simulations: int, history: History | None = None) -> Array:
        batch = num_rows(obs)
        arena = self.arenas.pop(batch, None)
        self.states = self.states[:0] if arena is None else arena
        prediction = super().initial(obs, num_simulations, history)
        self.bounds = [0, batch] if batch < 2 * self.HALF else [0, batch // 2, batch]
        if self.states is not arena:  # it was too small, and its graphs point into it
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
        """Valid until the next `ask` for that part."""
        return self.asked[part].answer()


class FirstGraph:
    """`initial`, captured for observations `now`, and a history, of certain shapes. The output is valid until the next
    call."""

    def __init__(self, model: PlanningModel, inputs: dict[str, Tensor], capture: CudaCapture) -> None:
        self.inputs = {name: x.clone() for name, x in inputs.items()}
        now, history = self.inputs["now"], {name: x for name, x in self.inputs.items() if name != "now"}
        self.captured = capture_after_warm_up(capture, lambda: model.initial(now, history or None))

    def __call__(self, inputs: dict[str, Tensor]) -> Inference:
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.captured.replay()
        return cast(Inference, self.captured.output)


class Graph:
    """`recurrent`, captured for some of B trees with states in `states` [nodes * B, S]."""

    def __init__(
        self, model: PlanningModel, states: Tensor, batch: int, trees: Array, action: Array, capture: CudaCapture
    ) -> None:
        device = states.device
        self.batch, self.trees = batch, trees
        self.rows = capture.pinned(torch.zeros(2, len(trees), dtype=torch.int64))  # of parents, of new nodes
        self.rows[1] = batch + torch.from_numpy(trees)
        self.action = capture.pinned(torch.from_numpy(action.copy()))
        self.prediction = capture.pinned(torch.empty(len(trees), model.policy_size + 2))
        # Kept as an attribute: the graph writes to this memory at each replay, even after it is freed.
        self.device_inputs = rows, actions = self.rows.to(device, copy=True), self.action.to(device, copy=True)

        def step() -> None:
            rows.copy_(self.rows, non_blocking=True)
            actions.copy_(self.action, non_blocking=True)
            inference = model.recurrent(states.index_select(0, rows[0]), actions)
            states.index_copy_(0, rows[1], inference.state)
            self.prediction.copy_(packed(inference), non_blocking=True)

        self.captured = capture_after_warm_up(capture, step)
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
    """[B, P + 2] Policy, value and reward: one copy to the host is faster than three."""
    return torch.cat([inference.policy, inference.value.unsqueeze(1), inference.reward.unsqueeze(1)], 1)
