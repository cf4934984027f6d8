"""A policy and a value function that remember: recurrent cores between the encoder and the heads of an actor-critic.

As in sb3-contrib, the cores read the encoder's features, and the hidden layers come after the cores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.actor_critic import ActorCritic
from rl_training.models.networks import Activation, NatureCNN, make_encoder, mlp_trunk
from rl_training.ops.distributions import Distribution
from rl_training.types import Spaces, TensorTree

Cell: TypeAlias = Literal["lstm", "gru"]
CriticMemory: TypeAlias = Literal["separate", "shared", "none"]
WORTH_A_CALL = 256  # padded steps: torch's layer takes about as long for them as another call
# The parameters are parts of one vector, which is not laid out as cuDNN's. It copies the weights for each call.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")


class RecurrentActorCritic(nn.Module):
    """An encoder, recurrent cores on its features, and the heads of an actor-critic on what the cores give.

    critic_memory: separate, the critic has a core of its own; shared, it reads the policy's, and its gradient flows
    into it (CleanRL; sb3-contrib stops it); none, it sees the current observation alone, by a layer of the same size.
    The memory has an entry [N, 1 or 2, size] for each core: its output and, in an LSTM, its cell.
    """

    def __init__(
        self,
        spaces: Spaces,
        hidden_sizes: Sequence[int] = (64,),
        activation: Activation = "tanh",
        *,
        cell: Cell = "lstm",
        recurrent_size: int = 128,
        critic_memory: CriticMemory = "separate",
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = make_encoder(spaces.observation)
        cores = ("policy", "value") if critic_memory == "separate" else ("policy",)
        size = self.encoder.size
        self.cores = nn.ModuleDict({name: RecurrentCore(cell, size, recurrent_size) for name in cores})
        self.value_layer = mlp_trunk([size, recurrent_size], activation) if critic_memory == "none" else None
        latent = gym.spaces.Box(-np.inf, np.inf, (recurrent_size,), np.float32)
        hidden_sizes = () if isinstance(self.encoder, NatureCNN) else hidden_sizes
        self.heads = ActorCritic(Spaces(latent, spaces.action), hidden_sizes, activation, log_std_init=log_std_init)

    def forward(self, obs: TensorTree, first: Tensor, memory: dict[str, Tensor]) -> tuple[Distribution, Tensor]:
        """(policies, values [T * M]) of M sequences of T observations [T * M, ...].

        first [T, M]: where episodes begin; memory [M, ...] is that before the sequences.
        """
        features, segments = self.encoder(obs), cut(first)

        def run(name: str, core: RecurrentCore) -> Tensor:
            output: Tensor = core(features.unflatten(0, first.shape), memory[name], segments)
            return output.flatten(0, 1)

        policy, value = self.latents(features, run)
        return self.heads.policy_of(policy), self.heads.value_of(value)

    def step(self, obs: TensorTree, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(policy outputs [N, A], values [N], the memory after them) of observations [N, ...], one of each episode."""
        features, after = self.encoder(obs), {}

        def run(name: str, core: RecurrentCore) -> Tensor:
            output, after[name] = core.step(features, memory[name])
            return output

        policy, value = self.latents(features, run)
        return self.heads.policy_output(policy), self.heads.value_of(value), after

    def latents(self, features: Tensor, run: Callable[[str, Any], Tensor]) -> tuple[Tensor, Tensor]:
        """(what the policy's head reads, what the critic's reads). run: gives the output of a core."""
        outputs = {name: run(name, core) for name, core in self.cores.items()}
        policy = outputs["policy"]
        if self.value_layer is not None:
            return policy, self.value_layer(features)
        return policy, outputs.get("value", policy)

    def networks(self) -> tuple[nn.Sequential, nn.Sequential]:
        """(policy, value): the perceptrons after the cores; without memory, the critic's is on the features."""
        _, policy, value = self.heads.networks()
        return policy, value if self.value_layer is None else nn.Sequential(*self.value_layer, *value)

    def memory_shape(self) -> dict[str, tuple[int, ...]]:
        """The shape of each entry of a memory, without its first axis."""
        return {name: core.state_shape for name, core in self.cores.items() if isinstance(core, RecurrentCore)}


class RecurrentCore(nn.Module):
    """One layer of LSTM or GRU cells. Weights are orthogonal and biases zero, as in CleanRL."""

    def __init__(self, cell: Cell, input_size: int, size: int) -> None:
        super().__init__()
        self.is_lstm, self.size = cell == "lstm", size
        self.layer = nn.LSTM(input_size, size) if self.is_lstm else nn.GRU(input_size, size)
        for name, parameter in self.layer.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        self.state_shape = (2 if self.is_lstm else 1, size)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """features [N, F] and state [N, K, size] to (output [N, size], the next state)."""
        output, after = self.layer(features.unsqueeze(0), self.to_torch(state))
        return output[0], self.from_torch(after)

    def forward(self, features: Tensor, state: Tensor, segments: Segments) -> Tensor:
        """Outputs [T, M, size] of sequences of features [T, M, F]; state [M, K, size] is that before them."""
        state = state * segments.goes_on
        if segments.uncut:
            return cast(Tensor, self.layer(features, self.to_torch(state))[0])
        sizes = [steps * rows for steps, rows in segments.blocks]
        padded = features.new_zeros(sum(sizes), features.shape[-1])
        padded = padded.index_copy(0, segments.place, features.flatten(0, 1))
        state = state.new_zeros(segments.blocks[0][1], *state.shape[1:]).index_copy(0, segments.earliest, state)
        outputs = []
        for part, (steps, rows) in zip(torch.split(padded, sizes), segments.blocks, strict=True):
            output, after = self.layer(part.view(steps, rows, -1), self.to_torch(state[:rows]))
            outputs.append(output.flatten(0, 1))
            state = self.from_torch(after)
        return torch.cat(outputs).index_select(0, segments.place).view(*features.shape[:2], -1)

    def to_torch(self, state: Tensor) -> Any:
        """[N, K, size] as torch's recurrent layers take it: [1, N, size], for an LSTM two of them."""
        hidden, *cell = (part.unsqueeze(0).contiguous() for part in state.unbind(1))
        return (hidden, *cell) if cell else hidden

    def from_torch(self, state: Any) -> Tensor:
        return torch.cat(state if self.is_lstm else [state]).movedim(0, 1)


class Segments(NamedTuple):
    """M sequences of T steps, cut where episodes begin: no reset is left within a segment.

    All segments, the longest first, run side by side through the kernel of torch's layer. Blocks bound the padding: a
    block is some steps of the segments that are not yet over, and most of these last until its end.
    """

    blocks: list[tuple[int, int]]  # (steps, number of segments) of each
    uncut: bool  # whether the segments are the sequences
    place: Tensor  # [T * M] of each step in the blocks, flattened
    earliest: Tensor  # [M] the first segment of each sequence
    goes_on: Tensor  # [M, 1, 1] whether it continues the episode before it, and so begins with its memory


def cut(first: Tensor) -> Segments:
    """first [T, M]: where episodes begin."""
    steps, sequences = first.shape
    begins = first.clone()
    begins[0] = True
    segment = begins.T.flatten().cumsum(0).view(sequences, steps).T - 1  # [T, M] of the segment of each step
    time = torch.arange(steps, device=first.device).unsqueeze(1)
    offset = time - torch.where(begins, time, 0).cummax(0).values  # [T, M] of each step in its segment
    lengths, order = segment.flatten().bincount().sort(descending=True, stable=True)
    segment = order.argsort()[segment]  # the longest is number 0
    blocks = make_blocks(lengths.tolist())
    width = torch.tensor([rows for length, rows in blocks for _ in range(length)], device=first.device)
    place = (width.cumsum(0) - width)[offset] + segment
    return Segments(blocks, len(lengths) == sequences, place.flatten(), segment[0], ~first[0].view(-1, 1, 1))


def make_blocks(lengths: list[int]) -> list[tuple[int, int]]:
    """(steps, rows) of blocks that hold segments of these lengths, the longest first.

    A block ends where half of its segments are over, if the padding that this saves is worth another call.
    """
    blocks, begin, rows = [], 0, len(lengths)
    while rows:
        end = lengths[rows // 2]
        if (lengths[0] - end) * (rows - rows // 2) < WORTH_A_CALL:
            end = lengths[0]
        blocks.append((end - begin, rows))
        begin, rows = end, sum(length > end for length in lengths)
    return blocks
