"""ScaleZero's model (arXiv:2509.07945): one UniZero world model (arXiv:2406.10667) for several tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import InputError
from rl_training.models.moe import Adapters, Routing, ScaledLinear
from rl_training.models.muzero import PlanningModel, encoded_space
from rl_training.models.networks import Activation, make_encoder, mlp, zero_linear
from rl_training.models.world_transformer import BLOCKED, TransformerSize, WorldTransformer
from rl_training.ops.support import make_support
from rl_training.types import History, Spaces, TensorTree

TASK_STD = 0.02  # of the initial task embeddings: small, because each task has its own encoder and action tokens


class Unrolled(NamedTuple):
    """The model's predictions for sequences of H steps and H + 1 observations."""

    policy: Tensor  # [B, H + 1, A] logits
    value: Tensor  # [B, H + 1, atoms] logits
    reward: Tensor  # [B, H, atoms] logits
    latent: Tensor  # [B, H, width] of the next observation


class LatentEncoder(nn.Module):
    """A task's observations as normalised latents. The norm has no gain, so that latents cannot shrink."""

    def __init__(self, space: gym.Space, width: int, hidden_sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        self.space, self.key = encoded_space(space)
        self.encoder = make_encoder(self.space, "torch")
        self.network = mlp([self.encoder.size, *hidden_sizes, width], activation, init="torch")
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, obs: TensorTree) -> Tensor:
        """Observations [.., ...] -> [.., width]"""
        if self.key is not None:
            assert isinstance(obs, dict)
            obs = obs[self.key]
        lead, flat = flatten_lead(obs, self.space)
        return cast(Tensor, self.norm(self.network(self.encoder(flat))).unflatten(0, lead))


class Heads(nn.Module):
    """A task's action tokens, and its heads on the outputs of the transformer.

    Policy, value and reward start at zero. The latent's head does not: its norm would have gradients of hundreds there.
    """

    def __init__(self, num_actions: int, width: int, value_size: int, reward_size: int) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.action = nn.Embedding(num_actions, width)  # unit variance, like the latents
        self.policy = head(width, zero_linear(width, num_actions))
        self.value = head(width, zero_linear(width, value_size))
        self.reward = head(width, zero_linear(width, reward_size))
        self.latent = head(width, nn.Linear(width, width), nn.LayerNorm(width, elementwise_affine=False))


class ScaleZeroModel(nn.Module):
    """One transformer, with an encoder, action tokens, heads and an embedding added to the tokens for each task.

    A step is two tokens. Policy and value are read at the latent's, reward and next latent at the action's. Adapters of
    all stages are allocated at the start, so that checkpoints keep their shapes.
    """

    stage: Tensor

    def __init__(
        self,
        spaces: Sequence[Spaces],
        size: TransformerSize | None = None,
        adapters: Adapters | None = None,
        *,
        hidden_sizes: Sequence[int] = (128,),
        activation: Activation = "relu",
        context: int = 4,
        train_context: int | None = None,
        value_limit: int = 50,
        reward_limit: int = 50,
        task_embedding: bool = True,
        routing: Routing = "probability",
    ) -> None:
        """hidden_sizes and activation are of the encoders. context: steps that the newest token sees in acting and
        search, its own included. train_context: the same in training; None, as in the paper: the whole sequence."""
        super().__init__()
        if context < 1:
            raise InputError(f"context {context}: a step sees itself, give 1 or more")
        if train_context is not None and train_context < context:
            raise InputError(
                f"train_context {train_context}: a search would look back upon more steps (context {context}) than is "
                "ever trained: make it context or more, or None"
            )
        size, adapters = size or TransformerSize(), adapters or Adapters()
        self.context, self.train_context, self.adapters = context, train_context, adapters
        self.value_support, self.reward_support = make_support(value_limit), make_support(reward_limit)
        self.transformer = WorldTransformer(size, adapters, routing=routing)
        width, value_size, reward_size = size.width, self.value_support.size, self.reward_support.size
        self.encoders = nn.ModuleList(LatentEncoder(s.observation, width, hidden_sizes, activation) for s in spaces)
        self.heads = nn.ModuleList(Heads(count_actions(s.action), width, value_size, reward_size) for s in spaces)
        self.task_embedding = nn.Parameter(torch.randn(len(spaces), width) * TASK_STD) if task_embedding else None
        self.register_buffer("stage", torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_post_hook(_follow_stage)  # type: ignore[no-untyped-call]
        self.set_stage(0)

    def encode(self, task: int, obs: TensorTree) -> Tensor:
        """Observations [.., ...] -> latents [.., width]"""
        return cast(Tensor, self.encoders[task](obs))

    def unroll(self, task: int, obs: TensorTree, action: Tensor, history: History | None = None) -> Unrolled:
        """One causal pass over observations [B, H + 1, ...] and actions [B, H], and over the history before them, for
        which nothing is predicted."""
        heads = self.heads_of(task)
        tokens, blocked = self.tokens(task, obs, action, history)
        bias = self.transformer.bias(tokens.shape[1], tokens.shape[1], self.train_context) + blocked[:, None, None]
        out, _ = self.transformer(tokens, bias, newest=2 * action.shape[1] + 1)
        at_observation, at_action = out[:, ::2], out[:, 1::2]
        return Unrolled(
            heads.policy(at_observation), heads.value(at_observation), heads.reward(at_action), heads.latent(at_action)
        )

    def tokens(self, task: int, obs: TensorTree, action: Tensor, history: History | None) -> tuple[Tensor, Tensor]:
        """(tokens [B, L, width], biases [B, L] on their attention scores: BLOCKED for steps missing in the history).

        From a history of up to P steps, observations [B, H + 1, ...] and actions [B, H]: L = 2 (P + H) + 1.
        """
        missing: Tensor | int = 0  # tokens
        if history is not None:
            obs, action = concatenated(history["obs"], obs), torch.cat([history["action"], action], 1)
            missing = 2 * (history["action"].shape[1] - history["length"].unsqueeze(1))
        latents, actions = self.encode(task, obs), self.heads_of(task).action(action)
        steps = torch.stack([latents[:, :-1], actions], 2).flatten(1, 2)
        tokens = self.conditioned(task, torch.cat([steps, latents[:, -1:]], 1))
        blocked = BLOCKED * (torch.arange(tokens.shape[1], device=tokens.device) < missing).float()
        return tokens, blocked.expand(tokens.shape[:2])

    def for_task(self, task: int) -> TaskModel:
        """A view of the model for searches in one task. It shares the weights."""
        return TaskModel(self, task)

    def heads_of(self, task: int) -> Heads:
        return cast(Heads, self.heads[task])

    def conditioned(self, task: int, tokens: Tensor) -> Tensor:
        return tokens if self.task_embedding is None else tokens + self.task_embedding[task]

    def add_stage(self) -> None:
        """Freeze the trained weights of the transformer and train the next adapter of each layer."""
        self.set_stage(int(self.stage) + 1)

    def set_stage(self, stage: int) -> None:
        if not 0 <= stage <= self.adapters.count:
            raise InputError(f"stage {stage}: a layer has {self.adapters.count} adapters; make the model with more")
        self.stage.fill_(stage)
        self.requires_grad_(False)
        for parameter in self.trainable_parameters(stage):
            parameter.requires_grad_(True)
        for layer in self.scaled_layers():
            layer.stage = stage

    def trainable_parameters(self, stage: int | None = None) -> list[nn.Parameter]:
        """The parameters that a stage, by default the current one, trains.

        Stage 0 trains the transformer without adapters and scales, later stages only those. All else is always trained.
        """
        stage = int(self.stage) if stage is None else stage
        layers = list(self.scaled_layers())
        frozen = {id(p) for part in (layers if stage == 0 else [self.transformer]) for p in part.parameters()}
        frozen -= {id(p) for layer in layers for p in layer.trainable(stage)}
        return [p for p in self.parameters() if id(p) not in frozen]

    def scaled_layers(self) -> Iterator[ScaledLinear]:
        return (module for module in self.transformer.modules() if isinstance(module, ScaledLinear))

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """A context for searches, in which no weight changes: each layer combines its adapters once, not in each call.

        Not on a GPU: a captured graph keeps reading the tensors of its capture, which must be the parameters.
        """
        for layer in self.scaled_layers():
            layer.fixed = None if layer.weight.is_cuda else layer.combine(dropout=0.0).detach()
        try:
            yield
        finally:
            for layer in self.scaled_layers():
                layer.fixed = None


class TaskModel(PlanningModel):
    """A state is the transformer's cache of keys and values after an observation's token, and the output at that token.

    The cache has 2 context - 1 places. The newest token is in the last one, so that a place is a distance. Empty places
    are blocked. Each transition drops the oldest step, which is two tokens.
    Row: keys and values [layers, 2, places, width], the output [width], 0 or BLOCKED [places].
    """

    def __init__(self, model: ScaleZeroModel, task: int) -> None:
        super().__init__()
        self.model, self.task, self.heads = model, task, model.heads_of(task)
        self.value_support, self.reward_support = model.value_support, model.reward_support
        self.policy_size = self.heads.num_actions
        self.width, self.places = model.transformer.size.width, 2 * model.context - 1
        self.cache_shape = (model.transformer.size.layers, 2, self.places, self.width)
        self.row_sizes = [math.prod(self.cache_shape), self.width, self.places]
        self.state_size = sum(self.row_sizes)

    def represent(self, obs: TensorTree) -> Tensor:
        return self.recall(obs, None)

    def recall(self, obs: TensorTree, history: History | None) -> Tensor:
        """The states after a history of up to context - 1 steps, or after none."""
        out, cache, blocked = self.root_outputs(obs, history)
        empty = self.places - blocked.shape[1]
        filled = F.pad(torch.stack(cache, 1), (0, 0, empty, 0))
        return torch.cat([filled.flatten(1), out, F.pad(blocked, (empty, 0), value=BLOCKED)], 1)

    def values(self, obs: TensorTree, history: History | None) -> Tensor:
        """[B] The values of `initial`, without its states."""
        return self.value_support.to_scalar(self.heads.value(self.root_outputs(obs, history)[0]))

    def root_outputs(self, obs: TensorTree, history: History | None) -> tuple[Tensor, list[Tensor], Tensor]:
        """(outputs [B, width] at observations [B, ...], each layer's cache [B, 2, L, width] of the history's tokens and
        theirs, 0 or BLOCKED [B, L]).

        One causal pass for each root. A history holds steps, not keys and values, which old weights would have made.
        """
        model = self.model
        current = {key: x.unsqueeze(1) for key, x in obs.items()} if isinstance(obs, dict) else obs.unsqueeze(1)
        count = (next(iter(obs.values())) if isinstance(obs, dict) else obs).shape[0]
        no_action = torch.empty(count, 0, dtype=torch.int64, device=self.heads.action.weight.device)
        tokens, blocked = model.tokens(self.task, current, no_action, history)
        bias = model.transformer.bias(tokens.shape[1], tokens.shape[1]) + blocked[:, None, None]
        out, cache = model.transformer(tokens, bias, newest=1)
        return out.squeeze(1), cache, blocked

    def predict(self, state: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.split(state, self.row_sizes, 1)[1]
        return self.heads.policy(out), self.heads.value(out)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        out, cache, blocked = self.append_action(state, action)
        return self.append_latent(self.heads.latent(out), cache, blocked), self.heads.reward(out)

    def append_action(self, state: Tensor, action: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """(outputs [B, width] at the actions' tokens, the cache with them and without the oldest step, its blocks)."""
        flat_cache, _, blocked = torch.split(state, self.row_sizes, 1)
        past = flat_cache.reshape(len(state), *self.cache_shape).unbind(1)
        out, cache = self.append(self.heads.action(action), past, F.pad(blocked, (0, 1)))
        return out, [x[:, :, 2:] for x in cache], F.pad(blocked[:, 2:], (0, min(2, self.places)))

    def append_latent(self, latent: Tensor, past: Sequence[Tensor], blocked: Tensor) -> Tensor:
        """The states after latents [B, width] are appended to a cache of places - 1 tokens."""
        out, cache = self.append(latent, past, blocked)
        return torch.cat([torch.stack(cache, 1).flatten(1), out, blocked], 1)

    def append(self, token: Tensor, past: Sequence[Tensor], blocked: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(outputs [B, width] at tokens [B, width], the cache with them)."""
        model = self.model
        bias = model.transformer.bias(1, blocked.shape[1]) + blocked[:, None, None]
        out, cache = model.transformer(model.conditioned(self.task, token).unsqueeze(1), bias, past)
        return out.squeeze(1), cache


def head(width: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), *last)


def count_actions(space: gym.Space) -> int:
    if not isinstance(space, gym.spaces.Discrete):
        raise InputError(
            f"scalezero has a token for each action and needs Discrete ones, not {space}: use ppo, or a "
            "gymnasium.ActionWrapper that offers a choice of actions"
        )
    return int(space.n)


def flatten_lead(obs: Any, space: gym.Space) -> tuple[tuple[int, ...], Any]:
    """(the leading axes of observations [.., ...], the observations with these flattened to one [N, ...])."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: flatten_lead(obs[key], part) for key, part in space.spaces.items()}
        return next(iter(parts.values()))[0], {key: flat for key, (_, flat) in parts.items()}
    assert space.shape is not None
    lead = obs.shape[: obs.ndim - len(space.shape)]
    return tuple(lead), obs.flatten(0, len(lead) - 1)


def concatenated(earlier: Any, later: Any) -> Any:
    """Observations [B, P, ...] and [B, H, ...] -> [B, P + H, ...]"""
    if isinstance(later, dict):
        return {key: concatenated(earlier[key], part) for key, part in later.items()}
    return torch.cat([earlier, later], 1)


def _follow_stage(model: ScaleZeroModel, _: Any) -> None:
    model.set_stage(int(model.stage))
