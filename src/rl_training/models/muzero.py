"""The interface of planning models, and the model of MuZero (Schrittwieser et al., arXiv:1911.08265)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.networks import Activation, is_image, make_encoder, mlp_trunk, zero_linear
from rl_training.models.residual import (
    Dynamics,
    Planes,
    Stem,
    dense_head,
    flat_features,
    places_on_board,
    representation_tower,
    residual_blocks,
)
from rl_training.ops.support import AnySupport, make_support
from rl_training.types import History, Spaces, TensorTree

Network: TypeAlias = Literal["auto", "mlp", "conv"]
LOG_STD_RANGE = (-5.0, 2.0)
SMALLEST_RANGE = 1e-5  # of a latent: an almost constant one is not scaled to [0, 1]


class Inference(NamedTuple):
    """A model's predictions for B states, for a search."""

    state: Tensor  # [B, S]
    reward: Tensor  # [B] of the transition to the state; 0 for roots
    value: Tensor  # [B]
    policy: Tensor  # [B, P]


class PlanningModel(nn.Module):
    """The interface for searches and losses. A state is a row of floats, so that states of a batch can be gathered.

    The policy is P logits for discrete actions; D means, then D log_stds, for continuous actions [D].
    """

    state_size: int  # S
    policy_size: int  # P
    value_support: AnySupport
    reward_support: AnySupport

    def represent(self, obs: TensorTree) -> Tensor:
        """Observations [B, ...] to states [B, S]."""
        raise NotImplementedError

    def recall(self, obs: TensorTree, history: History) -> Tensor:
        """Observations [B, ...] and the steps before them to states [B, S], in models with a context."""
        raise NotImplementedError

    def predict(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """States [B, S] to (policy [B, P], value logits [B, value_support.size])."""
        raise NotImplementedError

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """States [B, S] and actions [B] or [B, D] to (next states [B, S], reward logits [B, reward_support.size])."""
        raise NotImplementedError

    def scalars(self, state: Tensor, next_state: Tensor, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(rewards [B] of transitions, values [B] of the next states), from their logits."""
        if self.reward_support.size != self.value_support.size:
            return self.reward_support.to_scalar(reward), self.value_support.to_scalar(value)
        both = self.value_support.to_scalar(torch.stack([reward, value]))  # one support: half the operations
        return both[0], both[1]

    def unroll(self, state: Tensor, actions: Tensor, *, gradient_scale: float) -> tuple[list[Tensor], Tensor]:
        """States [B, S] and actions [B, K, ...] to (K + 1 states, reward logits [B, K, R]), for training.

        The gradient is multiplied by `gradient_scale` at each step back, so that long unrolls do not dominate the
        gradient of the first steps. The states may hold only what `predict` reads.
        """
        states, rewards = [state], []
        for action in actions.unbind(1):
            state, reward = self.transition(scale_gradient(states[-1], gradient_scale), action)
            states.append(state)
            rewards.append(reward)
        return states, torch.stack(rewards, 1)

    def initial(self, obs: TensorTree, history: History | None = None) -> Inference:
        state = self.represent(obs) if history is None else self.recall(obs, history)
        policy, value = self.predict(state)
        return Inference(state, state.new_zeros(len(state)), self.value_support.to_scalar(value), policy)

    def recurrent(self, state: Tensor, action: Tensor) -> Inference:
        next_state, reward_logits = self.transition(state, action)
        policy, value_logits = self.predict(next_state)
        reward, value = self.scalars(state, next_state, reward_logits, value_logits)
        return Inference(next_state, reward, value, policy)


class MuZeroModel(PlanningModel):
    """Representation, dynamics and prediction: perceptrons without normalisation layers, or residual towers with them.

    network "auto" takes towers for images. The latent is scaled to [0, 1] over all numbers of a state, not per channel.
    In towers each action has its own input plane, as in MuZero on Atari: EfficientZero's single plane of a / A would
    order the actions. On a board one more plane marks the cells where the action may put a stone.
    """

    action_one_hot: Tensor | None
    action_places: Tensor | None  # [A, H * W]

    def __init__(
        self,
        spaces: Spaces,
        *,
        latent_size: int = 64,
        hidden_sizes: Sequence[int] = (128,),
        activation: Activation = "relu",
        value_limit: int = 30,
        reward_limit: int = 30,
        network: Network = "auto",
        channels: int = 64,
        blocks: int = 1,
        stem: Stem = "residual",
    ) -> None:
        """Perceptrons use latent_size, hidden_sizes and activation; towers use stem, and channels and blocks in each of
        the three parts. A limit of 30 represents values up to 900; the paper's is 300; 0 is a scalar in [-1, 1]."""
        super().__init__()
        self.value_support, self.reward_support = make_support(value_limit), make_support(reward_limit)
        space, self.observation_key = encoded_space(spaces.observation)
        self.continuous, action_size, self.policy_size = action_sizes(spaces.action)
        one_hot = None if self.continuous else torch.eye(action_size)
        self.register_buffer("action_one_hot", one_hot, persistent=False)
        if network == "conv" or (network == "auto" and is_image(space)):
            stack = spaces.frame_stack if space is spaces.observation else 1  # entries of a Dict may differ in it
            parts = tower_parts(space, spaces.action, channels, blocks, stem=stem, stack=stack)
        else:
            parts = perceptron_parts(space, action_size, latent_size, hidden_sizes, activation)
        self.register_buffer("action_places", parts.action_places, persistent=False)
        self.latent_shape, self.is_tower = parts.latent_shape, len(parts.latent_shape) == 3
        self.latent_size = self.state_size = math.prod(parts.latent_shape)
        self.encoder, self.representation = parts.encoder, parts.representation
        self.dynamics_trunk, self.next_state = parts.dynamics_trunk, parts.next_state
        self.reward = parts.head(self.reward_support.size)
        self.prediction_trunk = parts.prediction_trunk
        self.policy, self.value = parts.head(self.policy_size), parts.head(self.value_support.size)
        if self.is_tower:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 1.3 times as fast on CPUs

    def represent(self, obs: TensorTree) -> Tensor:
        if self.observation_key is not None:
            assert isinstance(obs, dict)
            obs = obs[self.observation_key]
        planes = self.encoder(obs)
        with half_precision(planes.device, enabled=self.is_tower and not torch.is_grad_enabled()):
            features = self.representation(planes)
        return self.as_latent(features.float() if features.dtype == torch.float16 else features)

    def predict(self, state: Tensor) -> tuple[Tensor, Tensor]:
        features = self.prediction_trunk(self.as_planes(state) if self.is_tower else state)
        policy = self.policy(features)
        return bounded_log_std(policy) if self.continuous else policy, self.value(features)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        features = self.dynamics_features(state, action)
        return self.next_latent(features), self.reward(features)

    def dynamics_features(self, latent: Tensor, action: Tensor) -> Tensor:
        return cast(Tensor, self.dynamics_trunk(self.with_action(latent, action)))

    def with_action(self, latent: Tensor, action: Tensor) -> Tensor:
        """Latents [B, L] and actions [B] or [B, ...], concatenated: vectors [B, L + A], or planes for towers."""
        numbers = action.flatten(1) if self.action_one_hot is None else F.embedding(action, self.action_one_hot)
        if not self.is_tower:
            return torch.cat([latent, numbers], 1)
        channels, *board = self.latent_shape
        cells = [latent.view(-1, *board, channels), numbers[:, None, None, :].expand(-1, *board, -1)]
        if self.action_places is not None:
            cells.append(F.embedding(action, self.action_places).view(-1, *board, 1))
        return torch.cat(cells, 3).permute(0, 3, 1, 2)

    def next_latent(self, features: Tensor) -> Tensor:
        """Features of the dynamics to latents [B, L]."""
        return self.as_latent(self.next_state(features))

    def as_latent(self, features: Tensor) -> Tensor:
        """Vectors, or planes [B, C, H, W], to rows [B, L] in [0, 1]. The rows of planes are in channels-last order, the
        memory layout of the convolutions: no conversion copies them."""
        return min_max_scaled(features.permute(0, 2, 3, 1).flatten(1) if self.is_tower else features)

    def as_planes(self, latent: Tensor) -> Tensor:
        channels, *board = self.latent_shape
        return latent.view(-1, *board, channels).permute(0, 3, 1, 2)


class Parts(NamedTuple):
    """The parts that differ between perceptrons and towers."""

    latent_shape: tuple[int, ...]
    encoder: nn.Module
    representation: nn.Module
    dynamics_trunk: nn.Module
    next_state: nn.Module
    prediction_trunk: nn.Module
    head: Callable[[int], nn.Module]  # (number of outputs) -> a head on a trunk's features
    action_places: Tensor | None = None


def perceptron_parts(
    space: gym.Space, action_size: int, latent_size: int, hidden_sizes: Sequence[int], activation: Activation
) -> Parts:
    if not hidden_sizes:
        raise InputError("hidden_sizes is empty, but a planning model needs a hidden layer: give at least one size")

    def trunk(fan_in: int) -> nn.Sequential:
        return mlp_trunk([fan_in, *hidden_sizes], activation, init="torch")

    encoder = make_encoder(space, "torch")
    return Parts(
        latent_shape=(latent_size,),
        encoder=encoder,
        representation=nn.Sequential(*trunk(encoder.size), nn.Linear(hidden_sizes[-1], latent_size)),
        dynamics_trunk=trunk(latent_size + action_size),
        next_state=nn.Linear(hidden_sizes[-1], latent_size),
        prediction_trunk=trunk(latent_size),
        head=lambda outputs: zero_linear(hidden_sizes[-1], outputs),
    )


def tower_parts(
    space: gym.Space, action_space: gym.Space, channels: int, blocks: int, *, stem: Stem, stack: int
) -> Parts:
    continuous, action_size, _ = action_sizes(action_space)
    encoder = Planes(space)
    representation, latent_shape = representation_tower(encoder.shape, channels, blocks, stack=stack, stem=stem)
    is_board = not continuous and encoder.shape[1:] == tuple(latent_shape[1:])
    places = places_on_board(action_size, *latent_shape[1:]) if is_board else None

    def head(outputs: int) -> nn.Sequential:
        features, size = flat_features(latent_shape)
        return nn.Sequential(features, dense_head(size, outputs))

    return Parts(
        latent_shape=tuple(latent_shape),
        encoder=encoder,
        representation=representation,
        dynamics_trunk=Dynamics(channels, action_size + (places is not None), blocks),
        next_state=nn.Identity(),
        prediction_trunk=residual_blocks(channels, blocks),
        head=head,
        action_places=places,
    )


def encoded_space(space: gym.Space) -> tuple[gym.Space, str | None]:
    """The space without a mask of legal actions. If one entry is left: its space and its key."""
    if not isinstance(space, gym.spaces.Dict):
        return space, None
    entries = dict(space.spaces)
    if isinstance(entries.get("action_mask"), gym.spaces.MultiBinary):
        del entries["action_mask"]
    if len(entries) == 1:
        key, part = entries.popitem()
        return part, key
    return gym.spaces.Dict(entries), None


def action_sizes(space: gym.Space) -> tuple[bool, int, int]:
    """(whether actions are continuous, numbers per action in the dynamics, numbers per policy)."""
    if isinstance(space, gym.spaces.Discrete):
        return False, int(space.n), int(space.n)
    if isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
        size = math.prod(space.shape)
        return True, size, 2 * size
    raise InputError(
        f"no planning over action space {space}: supported are Discrete and Box of floats; wrap the environment with "
        "gymnasium.wrappers.TransformAction"
    )


class ScaledGradient(torch.autograd.Function):
    """The identity. The gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.scale, None


def half_precision(device: torch.device, *, enabled: bool) -> AbstractContextManager[Any]:
    """Autocast to 16-bit floats on a GPU where TF32 is allowed: half the memory traffic, and no fewer digits than TF32.

    Not for training: gradients would need scaling against underflow.
    """
    if not (enabled and device.type == "cuda" and torch.backends.cudnn.allow_tf32):
        return nullcontext()
    return torch.autocast(device.type, torch.float16, cache_enabled=False)


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    return cast(Tensor, ScaledGradient.apply(x, scale))  # type: ignore[no-untyped-call]


def min_max_scaled(latent: Tensor) -> Tensor:
    """Each row of [B, L] scaled to [0, 1]."""
    low, high = latent.amin(1, keepdim=True), latent.amax(1, keepdim=True)
    return (latent - low) / (high - low).clamp(min=SMALLEST_RANGE)


def bounded_log_std(policy: Tensor) -> Tensor:
    """[B, 2 D]: the means unchanged, the log_stds squashed into LOG_STD_RANGE by a function that maps 0 to 0."""
    mean, log_std = policy.chunk(2, 1)
    low, high = LOG_STD_RANGE
    return torch.cat([mean, low + (high - low) * torch.sigmoid(log_std + math.log(-low / high))], 1)
