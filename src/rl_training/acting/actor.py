"""Actors: a network and a rule for choosing actions, without optimizers and target networks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol, TypeVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rl_training.acting.exportable import (
    Exportable,
    ExportedActorCritic,
    ExportedQNetwork,
    ExportedSquashedGaussian,
)
from rl_training.acting.paths import make_forward
from rl_training.data.history import num_rows
from rl_training.errors import InputError
from rl_training.models.actor_critic import ActorCritic
from rl_training.models.parameters import FlatParameters, num_parameters, pack_weights, unpack_weights
from rl_training.models.phasic import ARCHITECTURES, PhasicActorCritic
from rl_training.models.q_network import QNetwork
from rl_training.models.sac import SquashedGaussianPolicy
from rl_training.types import Array, Decision, Memory, Observation, Spaces, State, Weights

A = TypeVar("A")


class Actor(Protocol):
    hp: Any  # the current hyperparameters: the run replaces them as training advances
    spaces: Spaces
    device: torch.device
    num_parameters: int
    version: int  # of the weights: see Weights

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        """Choose actions for N environments. All randomness comes from `rng`."""
        ...

    def weights(self) -> Weights: ...

    def load(self, weights: Weights) -> None:
        """Use these weights from now on."""
        ...

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class NetworkOwner:
    """A network, the version of its weights, and methods to read and write them."""

    def __init__(self, model: nn.Module, *, device: torch.device | str) -> None:
        self.model, self.device = model.to(device), torch.device(device)
        self.num_parameters = num_parameters(model)
        self.version = 0

    def refresh(self) -> None:
        """Called after the weights have changed, for actors with copies of them."""

    def weights(self) -> Weights:
        return pack_weights(self.model, self.version)

    def load(self, weights: Weights) -> None:
        unpack_weights(self.model, weights)
        self.version = weights.version
        self.refresh()

    def state_dict(self) -> State:
        return {"model": self.model.state_dict(), "version": self.version}

    def state_pattern(self) -> State:
        return self.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.version = state["version"]
        self.refresh()


class NetworkActor(NetworkOwner):
    """An actor with one network, whose parameters are one vector. Subclasses have `act`.

    A learner in the same process shares the network and writes to the vector: nothing is copied.
    """

    def __init__(self, model: nn.Module, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        super().__init__(model, device=device)
        self.spaces, self.hp = spaces, hp
        self.parameters = FlatParameters(model.parameters())


class ActorCriticActor(NetworkActor):
    """Samples from a policy. Stores the log-probability of the action and the value of the state with the step."""

    model: ActorCritic

    def __init__(
        self,
        spaces: Spaces,
        hp: Any,
        *,
        device: torch.device | str = "cpu",
        network: type[ActorCritic] = ActorCritic,
    ) -> None:
        model = network(spaces, hp.hidden_sizes, hp.activation, log_std_init=hp.log_std_init)
        super().__init__(model, spaces, hp, device=device)
        self.forward = make_forward(*model.networks())

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        output, value = self.forward(obs)
        policy = self.model.acting_policy(output)
        return decide(policy, value, memory, sample=explore or not self.hp.deterministic_eval, rng=rng)

    def exportable(self) -> Exportable:
        network = ExportedActorCritic(self.model)
        return Exportable(network, {}, without(self, deterministic_eval=True), lambda obs, _: self.forward(obs)[0])


class VersionedActor(ActorCriticActor):
    """Also stores the version of its weights with each step: how old the policy is when a learner uses the step."""

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        return with_version(super().act(obs, memory, explore=explore, rng=rng), self.version)


def with_version(decision: Decision, version: int) -> Decision:
    action, memory, extras = decision
    return Decision(action, memory, {**extras, "version": np.full(len(action), version, np.int64)})


class PhasicActor(ActorCriticActor):
    """An actor of phasic policy gradient, where the architecture is a hyperparameter."""

    model: PhasicActorCritic

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        super().__init__(spaces, hp, device=device, network=ARCHITECTURES[hp.architecture])


class EpsilonGreedyActor(NetworkActor):
    """Takes the action of the highest Q-value, or with probability epsilon a random one."""

    model: QNetwork

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        model = QNetwork(spaces, hp.hidden_sizes, hp.activation, dueling=hp.dueling)
        super().__init__(model, spaces, hp, device=device)
        self.forward = make_forward(model.encoder, model.head)

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        (q,) = self.forward(obs)
        action = q.argmax(-1)
        epsilon = self.hp.epsilon if explore else self.hp.eval_epsilon
        if epsilon > 0:
            # One uniform number u per environment. Where u < epsilon, u * A / epsilon is the random action.
            uniform = rng.random(len(q))
            random = uniform < epsilon
            action[random] = uniform[random] * (q.shape[-1] / epsilon)
        return Decision(action, memory, {})

    def exportable(self) -> Exportable:
        network = ExportedQNetwork(self.model)
        return Exportable(network, {}, without(self, eval_epsilon=0.0), lambda obs, _: self.forward(obs)[0])


class SquashedGaussianActor(NetworkActor):
    """Samples from the policy of soft actor-critic."""

    model: SquashedGaussianPolicy

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        if not (isinstance(spaces.action, gym.spaces.Box) and spaces.action.shape):
            raise InputError(
                f"soft actor-critic acts in Box spaces of floats with at least one axis, not {spaces.action}: use dqn "
                "or ppo, or a gymnasium.ActionWrapper that offers such a Box"
            )
        super().__init__(SquashedGaussianPolicy(spaces, hp.hidden_sizes, hp.activation), spaces, hp, device=device)
        self.forward = make_forward(self.model.encoder, self.model.network)

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        (output,) = self.forward(obs)
        action = choose(self.model.policy(output), sample=explore or not self.hp.deterministic_eval, rng=rng)
        return Decision(action.reshape(len(action), *(self.spaces.action.shape or ())), memory, {})

    def exportable(self) -> Exportable:
        def scores(obs: Observation, _: Memory) -> Array:
            mean: Array = self.model.policy(self.forward(obs)[0]).mean
            return mean

        network = ExportedSquashedGaussian(self.model, self.spaces.action.shape or ())
        return Exportable(network, {}, without(self, deterministic_eval=True), scores)


def without(actor: A, **randomness: Any) -> A:
    """The actor with other hyperparameters, for decisions without randomness."""
    other = copy.copy(actor)
    other.hp = dataclasses.replace(actor.hp, **randomness)  # type: ignore[attr-defined]
    return other


class RandomActor:
    """Uniformly random actions, in the action space of models."""

    def __init__(self, spaces: Spaces) -> None:
        self.space = spaces.action

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        if isinstance(self.space, gym.spaces.Discrete):
            return Decision(rng.integers(self.space.n, size=num_rows(obs)), memory, {})
        assert isinstance(self.space, gym.spaces.Box)
        shape = (num_rows(obs), *self.space.shape)
        return Decision(rng.uniform(self.space.low, self.space.high, shape).astype(np.float32), memory, {})


def decide(policy: Any, value: Array, memory: Memory, *, sample: bool, rng: np.random.Generator) -> Decision:
    """The decision of an actor-critic; value [N, 1]."""
    action = choose(policy, sample=sample, rng=rng)
    logprob = policy.log_prob(action)
    if isinstance(action, Tensor):
        action, logprob = action.numpy(), logprob.numpy()
    return Decision(action, memory, {"logprob": logprob, "value": value[:, 0]})


def choose(policy: Any, *, sample: bool, rng: np.random.Generator) -> Any:
    """A sample of the policy, or its mode."""
    return policy.sample(policy.noise(rng)) if sample else policy.mode
