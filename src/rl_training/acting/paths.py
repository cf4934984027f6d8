"""The choice between the plain path through a network and a faster one with the same results.

`benchmarks/fast_paths.py` measures the gain of each fast path. A test compares each with the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl_training.acting.dreamer_fused import fused_path
from rl_training.acting.dreamer_path import DreamerPath, Precision
from rl_training.acting.forward import Forward, NumpyForward, TorchForward, is_numpy_mlp
from rl_training.acting.fused import is_fusable
from rl_training.acting.graphed import GraphedGradient
from rl_training.acting.inference import GraphInference, TorchInference
from rl_training.acting.numpy_transformer import NumpyInference
from rl_training.acting.q_gradient import QGradient
from rl_training.acting.recurrent_forward import NumpyRecurrentForward, RecurrentForward, TorchRecurrentForward
from rl_training.models.dreamer import DreamerModel
from rl_training.models.muzero import PlanningModel
from rl_training.models.networks import Flatten
from rl_training.models.q_network import QNetwork
from rl_training.models.recurrent import RecurrentActorCritic
from rl_training.models.scalezero import TaskModel
from rl_training.types import Batch

# Up to so many multiplications in a layer numpy is faster than torch. Beyond, its BLAS starts threads.
SMALL_LAYER = 1 << 18
SMALL_EXPERTS = 1 << 18  # multiplications of all experts for one token: numpy runs all of them for each token
_plain = False


@contextmanager
def plain_paths() -> Iterator[None]:
    """A context in which all actors and learners are built with plain paths: for tests and benchmarks."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def make_forward(encoder: nn.Module, *networks: nn.Module) -> Forward:
    """A function from observations to the outputs of networks with one encoder. Make a new one after moving them."""
    if not _plain and reads_vectors(encoder) and all(map(is_numpy_mlp, networks)):
        return NumpyForward(*networks)
    return TorchForward(encoder, *networks)


def make_recurrent_forward(model: RecurrentActorCritic) -> RecurrentForward:
    """A function from observations and memory to the outputs of a recurrent actor-critic and its next memory."""
    if not _plain and reads_vectors(model.encoder) and all(map(is_numpy_mlp, model.networks())):
        return NumpyRecurrentForward(model)
    return TorchRecurrentForward(model)


def reads_vectors(encoder: nn.Module) -> bool:
    return isinstance(encoder, Flatten) and not encoder.is_bytes


def make_inference(model: PlanningModel) -> TorchInference:
    """A model's predictions for the nodes of a search."""
    device = next(model.parameters()).device.type
    if not _plain and device == "cuda":
        return GraphInference(model)
    if not _plain and device == "cpu" and isinstance(model, TaskModel) and has_small_experts(model):
        return NumpyInference(model)
    return TorchInference(model, compiled_decoding=not _plain)


def has_small_experts(model: TaskModel) -> bool:
    size = model.model.transformer.size
    return 3 * size.num_experts * size.expert_size * size.width <= SMALL_EXPERTS


def runs_inside_search(model: PlanningModel) -> bool:
    """Whether the compiled search evaluates the model itself."""
    return not _plain and is_fusable(model)


def make_q_gradient(model: QNetwork, target_model: QNetwork, *, batch_size: int) -> QGradient | None:
    """DQN's gradient in numpy; None where autograd is faster."""
    if _plain or not reads_vectors(model.encoder) or not is_numpy_mlp(model.head):
        return None
    hidden = [layer.out_features for layer in list(model.head.children())[:-1] if isinstance(layer, nn.Linear)]
    return QGradient(model, target_model) if batch_size * max(hidden, default=1) ** 2 <= SMALL_LAYER else None


def make_dreamer_path(model: DreamerModel, precision: Precision, device: torch.device, *, rows: int) -> DreamerPath:
    """How DreamerV3 trains on batches of `rows` sequences. Make a new one after moving the model."""
    half = precision == "bfloat16" or (precision == "auto" and (device.type == "cuda" or has_bfloat16()))
    dtype = torch.bfloat16 if half else torch.float32
    if not _plain and device.type == "cuda":
        return fused_path(model, dtype, rows)
    if not _plain and device.type == "cpu":
        from rl_training.acting.dreamer_compiled import CompiledPath  # here, because importing numba is slow

        return CompiledPath(model, dtype)
    return DreamerPath(model, dtype)


def has_bfloat16() -> bool:
    """Whether the processor multiplies matrices of bfloat16, several times as fast as those of float32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # not public
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def make_gradient(
    gradient: Callable[[Batch], dict[str, Tensor]],
    device: torch.device,
    constants: Callable[[], tuple[float, ...]] = tuple,
) -> Callable[[Batch], dict[str, Tensor]]:
    """A function that computes a gradient, or takes a gradient step, on a GPU as a captured graph.

    constants: the numbers that it reads, if not as tensors.
    """
    return gradient if _plain or device.type != "cuda" else GraphedGradient(gradient, constants)
