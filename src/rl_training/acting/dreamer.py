"""The actor of DreamerV3: a policy on the latent state of a world model, which it carries from step to step."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rl_training.acting.actor import NetworkActor, choose, without
from rl_training.acting.dreamer_open_loop import predict_open_loop
from rl_training.acting.exportable import Choice, Exportable
from rl_training.acting.recurrent import checked_memory
from rl_training.data.batch import rows_of, to_array, to_tensors
from rl_training.data.fields import step_fields
from rl_training.data.history import num_rows
from rl_training.errors import InputError
from rl_training.models.dreamer import SIZES, DreamerModel, Size
from rl_training.models.rssm import BLOCKS, GROUPS, Latent
from rl_training.types import Array, Decision, Field, Fields, Memory, Observation, Spaces, TensorTree, Trajectory

DETER = np.dtype(np.float16)  # states lie in [-1, 1], where float16 is finer than the published code's bfloat16

LEFT_OUT = "the sampling of latent states: the file takes the most probable one of each, the policy draws them"


def size_of(hp: Any) -> Size:
    """The preset `size`, with the widths that are given by themselves."""
    given = {name: getattr(hp, name) for name in Size._fields if getattr(hp, name) is not None}
    size = SIZES[hp.size]._replace(**given)
    if size.deter % BLOCKS or size.depth % 2:
        raise InputError(f"deter should be a multiple of {BLOCKS} and depth of 2, got {size.deter} and {size.depth}")
    return size


def dreamer_fields(spaces: Spaces, hp: Any) -> Fields:
    """A step also holds the latent of its observation: the category of each of its variables, and the GRU's state."""
    deter, stoch = Field((size_of(hp).deter,), DETER), Field((GROUPS,), np.dtype(np.uint8))
    return step_fields(spaces, {"deter": deter, "stoch": stoch})


class DreamerActor(NetworkActor):
    """Samples a latent from the observation and the memory, and an action from the policy of that latent.

    The memory is the latent and the action of the step before. Rows of zeros are the state at the start of an episode.
    """

    model: DreamerModel
    samples_latents = True  # else the most probable ones are taken

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        if isinstance(spaces.action, gym.spaces.MultiBinary):
            raise InputError(
                f"dreamer acts in Discrete, MultiDiscrete and Box spaces, not in {spaces.action}: use ppo, or a "
                "gymnasium.ActionWrapper that offers MultiDiscrete actions"
            )
        super().__init__(DreamerModel(spaces, size_of(hp)), spaces, hp, device=device)

    @torch.no_grad()
    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        before, action = self.recall(memory, obs)
        noise = None
        if self.samples_latents:
            noise = torch.from_numpy(rng.random((num_rows(obs), GROUPS), np.float32)).to(self.device)
        latent = see(self.model, to_tensors(obs, self.device), before, action, noise)
        action = choose(self.model.policy(latent), sample=explore or not self.hp.deterministic_eval, rng=rng)
        after: Memory = {"deter": latent.deter, "stoch": latent.stoch, "action": self.model.policy.vector(action)}
        extras = {"deter": to_array(latent.deter.half()), "stoch": to_array(latent.stoch.argmax(-1).byte())}
        taken = to_array(action).reshape(num_rows(obs), *(self.spaces.action.shape or ()))
        if self.device.type == "cpu":
            after = {name: to_array(torch.as_tensor(part)) for name, part in after.items()}
        return Decision(taken, after, extras)

    def recall(self, memory: Memory, obs: Observation) -> tuple[Latent, Tensor]:
        """The latent and the action before observations [N, ...]."""
        parts = checked_memory(memory, obs, self.memory_shape())
        deter, stoch, action = (
            torch.as_tensor(parts[name], device=self.device) for name in ("deter", "stoch", "action")
        )
        return Latent(deter, stoch), action

    def memory_shape(self) -> dict[str, tuple[int, ...]]:
        size = self.model.size
        return {"deter": (size.deter,), "stoch": (GROUPS, size.classes), "action": (self.model.policy.action_size,)}

    def exportable(self) -> Exportable:
        decided = without(self, deterministic_eval=True)
        decided.samples_latents = False
        fields: Fields = {name: Field(shape, np.dtype(np.float32)) for name, shape in self.memory_shape().items()}
        network = ExportedDreamer(self.model, self.spaces.action.shape or ())
        return Exportable(network, fields, decided, self.mode_scores, LEFT_OUT)

    @torch.no_grad()
    def mode_scores(self, obs: Observation, memory: Memory) -> Array:
        """[N, ...] by which the action of the most probable latents is chosen."""
        latent = see(self.model, to_tensors(obs, self.device), *self.recall(memory, obs), None)
        return to_array(scores_of(self.model, latent))

    @torch.no_grad()
    def open_loop(
        self, obs: Observation, action: Array, *, context: int, samples: int, rng: np.random.Generator
    ) -> Trajectory:
        """What the world model predicts of T observations of an episode, of which it sees the first `context`.

        obs [T, ...] are as `act` gets them, and action [T - 1, ...] as it returned them. The predictions are in S
        samples [S, T, ...] and in the same units.
        """
        length = num_rows(obs)
        noise = torch.from_numpy(rng.random((length, samples, GROUPS), np.float32)).to(self.device)
        seen = to_tensors(rows_of(obs, slice(context)), self.device)
        actions = self.model.policy.vector(torch.as_tensor(action, device=self.device)).flatten(1)
        return predict_open_loop(self.model, seen, actions, noise, gamma=self.hp.gamma)


class ExportedDreamer(nn.Module):
    """The policy on the most probable latents, with the memory of the actor."""

    def __init__(self, model: DreamerModel, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.shape = model, shape

    def forward(self, obs: TensorTree, memory: dict[str, Tensor]) -> Choice:
        before = Latent(memory["deter"], memory["stoch"])
        latent = see(self.model, obs, before, memory["action"], None)
        action = self.model.policy(latent).mode
        after = {"deter": latent.deter, "stoch": latent.stoch, "action": self.model.policy.vector(action)}
        return Choice(action.reshape(-1, *self.shape), scores_of(self.model, latent), after)


def see(model: DreamerModel, obs: TensorTree, before: Latent, action: Tensor, noise: Tensor | None) -> Latent:
    """The latents after observations [N, ...]. noise [N, S]: uniform numbers; None: the most probable latents."""
    deter = model.dynamics.deterministic(before, action)
    logits = model.dynamics.posterior(deter, model.encoder(obs))
    if noise is not None:
        return Latent(deter, model.dynamics.sample(logits, noise))
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return Latent(deter, (logits.argmax(-1, keepdim=True) == classes).to(deter.dtype))


def scores_of(model: DreamerModel, latent: Latent) -> Tensor:
    """[N, A] logits of all choices, or means before they are squashed."""
    return cast(Tensor, model.policy.output(model.policy.hidden(latent)))
