"""ScaleZero (arXiv:2509.07945): one UniZero world model (arXiv:2406.10667) for several tasks, which grows in stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.config import InputError
from rl_training.models.moe import Adapters, Routing, ScaledLinear
from rl_training.models.muzero import PlanningModel, visible, zero_linear
from rl_training.models.networks import Activation, make_encoder, mlp
from rl_training.models.world_transformer import BLOCKED, Size, WorldTransformer
from rl_training.ops.support import make_support
from rl_training.types import History, Spaces, TensorTree

TASK_STD = 0.02  # tasks have encoders and actions of their own: their embedding may start small


class Unrolled(NamedTuple):
    """What the model says of sequences of H steps: before each and after the last of them, and of each step."""

    policy: Tensor  # [B, H + 1, A] logits
    value: Tensor  # [B, H + 1, atoms] logits
    reward: Tensor  # [B, H, atoms] logits
    latent: Tensor  # [B, H, width] of the observation that follows


class LatentEncoder(nn.Module):
    """A task's observations as normalised latents. No gain is learned: latents cannot shrink to be predicted easily."""

    def __init__(self, space: gym.Space, width: int, hidden_sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        self.space, self.key = visible(space)
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
    """A task's actions as tokens, and what it reads off the transformer's outputs.

    All but the latent's end in zeros. Through its normalisation those would have gradients of hundreds.
    """

    def __init__(self, num_actions: int, width: int, value_size: int, reward_size: int) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.action = nn.Embedding(num_actions, width)  # of unit variance, as the latents are
        self.policy = head(width, zero_linear(width, num_actions))
        self.value = head(width, zero_linear(width, value_size))
        self.reward = head(width, zero_linear(width, reward_size))
        self.latent = head(width, nn.Linear(width, width), nn.LayerNorm(width, elementwise_affine=False))


class ScaleZeroModel(nn.Module):
    """One transformer; encoder, actions and heads of each task its own; a task's embedding is added to its tokens.

    A step is two tokens: the latent, from which policy and value are read, then the action, from which reward and next
    latent are. All stages' parameters are there from the start, so that checkpoints keep their shapes.
    """

    stage: Tensor

    def __init__(
        self,
        spaces: Sequence[Spaces],
        size: Size | None = None,
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
        """hidden_sizes and activation are of the encoders. context: steps that a root or a node of a search looks back
        upon, its own included. train_context: the same in unrolled sequences; None, as in the paper, is all of them."""
        super().__init__()
        if context < 1:
            raise InputError(f"context {context}: a step sees itself, give 1 or more")
        if train_context is not None and train_context < context:
            raise InputError(
                f"train_context {train_context}: a search would look back upon more steps (context {context}) than is "
                "ever trained: make it context or more, or None"
            )
        size, adapters = size or Size(), adapters or Adapters()
        self.context, self.train_context, self.adapters = context, train_context, adapters
        self.value_support, self.reward_support = make_support(value_limit), make_support(reward_limit)
        self.transformer = WorldTransformer(size, adapters, routing=routing)
        width, value_size, reward_size = size.width, self.value_support.size, self.reward_support.size
        self.encoders = nn.ModuleList(LatentEncoder(s.observation, width, hidden_sizes, activation) for s in spaces)
        self.heads = nn.ModuleList(Heads(count_actions(s.action), width, value_size, reward_size) for s in spaces)
        self.task = nn.Parameter(torch.randn(len(spaces), width) * TASK_STD) if task_embedding else None
        self.register_buffer("stage", torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_post_hook(_follow_stage)  # type: ignore[no-untyped-call]
        self.set_stage(0)

    def encode(self, task: int, obs: TensorTree) -> Tensor:
        """Observations [.., ...] -> latents [.., width]. A copy of `encoders` makes a target encoder."""
        return cast(Tensor, self.encoders[task](obs))

    def unroll(self, task: int, obs: TensorTree, action: Tensor, history: History | None = None) -> Unrolled:
        """Observations [B, H + 1, ...] and actions [B, H]: one causal pass over the true observations' latents, and
        over the history before them, of which nothing is predicted."""
        heads = self.heads_of(task)
        tokens, blocked = self.tokens(task, obs, action, history)
        bias = self.transformer.bias(tokens.shape[1], tokens.shape[1], self.train_context) + blocked[:, None, None]
        out, _ = self.transformer(tokens, bias, newest=2 * action.shape[1] + 1)
        at_observation, at_action = out[:, ::2], out[:, 1::2]
        return Unrolled(
            heads.policy(at_observation), heads.value(at_observation), heads.reward(at_action), heads.latent(at_action)
        )

    def tokens(self, task: int, obs: TensorTree, action: Tensor, history: History | None) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, width] of a history of up to P steps, of observations [B, H + 1, ...] and actions [B, H];
        L = 2 (P + H) + 1. And [B, L] what is added to all scores of a token: BLOCKED where there was no such step."""
        unknown = 0
        if history is not None:
            obs, action = joined(history["obs"], obs), torch.cat([history["action"], action], 1)
            unknown = 2 * (history["action"].shape[1] - history["length"].unsqueeze(1))
        latents, actions = self.encode(task, obs), self.heads_of(task).action(action)
        steps = torch.stack([latents[:, :-1], actions], 2).flatten(1, 2)
        tokens = self.conditioned(task, torch.cat([steps, latents[:, -1:]], 1))
        blocked = BLOCKED * (torch.arange(tokens.shape[1], device=tokens.device) < unknown).float()
        return tokens, blocked.expand(tokens.shape[:2])

    def for_task(self, task: int) -> TaskModel:
        """The model as a search for one task sees it: a view, which needs no refresh when the model learns."""
        return TaskModel(self, task)

    def heads_of(self, task: int) -> Heads:
        return cast(Heads, self.heads[task])

    def conditioned(self, task: int, tokens: Tensor) -> Tensor:
        return tokens if self.task is None else tokens + self.task[task]

    def add_stage(self) -> None:
        """Freeze what the transformer has learned, and let the next adapter of every layer learn."""
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
        """What learns in a stage (now: the present one). Encoders, actions, heads and task embeddings always do.

        Of the transformer stage 0 trains all but adapters and scales, later ones nothing but adapters and scales.
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
        """Within, no weight changes: what the stages add up to is computed once, not in each call. For searches.

        On a GPU it is not: a captured graph goes on reading what it was captured with, which must be the parameters.
        """
        for layer in self.scaled_layers():
            layer.kept = None if layer.weight.is_cuda else layer.combine(dropout=0.0).detach()
        try:
            yield
        finally:
            for layer in self.scaled_layers():
                layer.kept = None


class TaskModel(PlanningModel):
    """A state is what the transformer remembers after an observation's token, and what it put out there.

    It remembers the keys and values of at most 2 context - 1 tokens, the newest in the last place, so that a place is a
    distance; places that nothing has come to are blocked. Each transition forgets the two oldest, a whole step.
    Row: keys and values [layers, 2, places, width], the output [width], 0 or BLOCKED [places].
    """

    def __init__(self, model: ScaleZeroModel, task: int) -> None:
        super().__init__()
        self.model, self.task, self.own = model, task, model.heads_of(task)
        self.value_support, self.reward_support = model.value_support, model.reward_support
        self.policy_size = self.own.num_actions
        self.width, self.places = model.transformer.size.width, 2 * model.context - 1
        self.shape = (model.transformer.size.layers, 2, self.places, self.width)
        self.sizes = [math.prod(self.shape), self.width, self.places]
        self.state_size = sum(self.sizes)

    def represent(self, obs: TensorTree) -> Tensor:
        return self.recall(obs, None)

    def recall(self, obs: TensorTree, history: History | None) -> Tensor:
        """The states after a history of up to context - 1 steps, or after none."""
        out, memory, blocked = self.newest(obs, history)
        missing = self.places - blocked.shape[1]
        kept = F.pad(torch.stack(memory, 1), (0, 0, missing, 0))
        return torch.cat([kept.flatten(1), out, F.pad(blocked, (missing, 0), value=BLOCKED)], 1)

    def values(self, obs: TensorTree, history: History | None) -> Tensor:
        """[B] Those of `initial`, without its states."""
        return self.value_support.to_scalar(self.own.value(self.newest(obs, history)[0]))

    def newest(self, obs: TensorTree, history: History | None) -> tuple[Tensor, list[Tensor], Tensor]:
        """Outputs [B, width] at observations [B, ...]; each layer's keys and values [B, 2, L, width] of the history's
        tokens and theirs; which of them are blocked [B, L].

        One causal pass, anew for each root: what is remembered are steps, so that it is never older than the weights.
        """
        model = self.model
        seen = {key: x.unsqueeze(1) for key, x in obs.items()} if isinstance(obs, dict) else obs.unsqueeze(1)
        count = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        no_action = torch.empty(count, 0, dtype=torch.int64, device=self.own.action.weight.device)
        tokens, blocked = model.tokens(self.task, seen, no_action, history)
        bias = model.transformer.bias(tokens.shape[1], tokens.shape[1]) + blocked[:, None, None]
        out, memory = model.transformer(tokens, bias, newest=1)
        return out.squeeze(1), memory, blocked

    def predict(self, state: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.split(state, self.sizes, 1)[1]
        return self.own.policy(out), self.own.value(out)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        out, memory, blocked = self.act(state, action)
        return self.look(self.own.latent(out), memory, blocked), self.own.reward(out)

    def act(self, state: Tensor, action: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """The output [B, width] at the action's token; what is remembered then, less its oldest step; and blocked."""
        memory, _, blocked = torch.split(state, self.sizes, 1)
        past = memory.reshape(len(state), *self.shape).unbind(1)
        out, kept = self.append(self.own.action(action), past, F.pad(blocked, (0, 1)))
        return out, [x[:, :, 2:] for x in kept], F.pad(blocked[:, 2:], (0, min(2, self.places)))

    def look(self, latent: Tensor, past: Sequence[Tensor], blocked: Tensor) -> Tensor:
        """The state after latents [B, width] at the end of a memory of places - 1 tokens."""
        out, memory = self.append(latent, past, blocked)
        return torch.cat([torch.stack(memory, 1).flatten(1), out, blocked], 1)

    def append(self, token: Tensor, past: Sequence[Tensor], blocked: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, width] at tokens [B, width], and the memory with them."""
        model = self.model
        bias = model.transformer.bias(1, blocked.shape[1]) + blocked[:, None, None]
        out, memory = model.transformer(model.conditioned(self.task, token).unsqueeze(1), bias, past)
        return out.squeeze(1), memory


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
    """The leading axes of observations [.., ...], and these with one axis [N, ...] in place of those."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: flatten_lead(obs[key], part) for key, part in space.spaces.items()}
        return next(iter(parts.values()))[0], {key: flat for key, (_, flat) in parts.items()}
    assert space.shape is not None
    lead = obs.shape[: obs.ndim - len(space.shape)]
    return tuple(lead), obs.flatten(0, len(lead) - 1)


def joined(earlier: Any, later: Any) -> Any:
    """Observations [B, P, ...] and [B, H, ...] -> [B, P + H, ...]"""
    if isinstance(later, dict):
        return {key: joined(earlier[key], part) for key, part in later.items()}
    return torch.cat([earlier, later], 1)


def _follow_stage(model: ScaleZeroModel, _: Any) -> None:
    model.set_stage(int(model.stage))
