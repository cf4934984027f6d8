"""Actors: everything needed to play, and nothing else. No optimizer, no target network, no demonstrations."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rl_training.acting.paths import make_forward
from rl_training.config import InputError
from rl_training.models.actor_critic import ActorCritic
from rl_training.models.parameters import FlatParameters, num_parameters, pack_weights, unpack_weights
from rl_training.models.q_network import QNetwork
from rl_training.models.sac import SquashedGaussianPolicy
from rl_training.types import Decision, Memory, Observation, Spaces, State, Weights


class Actor(Protocol):
    hp: Any  # the hyperparameters in force: the run replaces them as training advances
    spaces: Spaces
    device: torch.device
    num_parameters: int
    version: int  # of the weights: see Weights

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        """Choose actions for N environments; all randomness comes from `rng`, which belongs to the caller."""
        ...

    def weights(self) -> Weights: ...

    def load(self, weights: Weights) -> None:
        """Play with these weights from now on."""
        ...

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class NetworkOwner:
    """One network, its version, and the ways to read and write its weights."""

    def __init__(self, model: nn.Module, *, device: torch.device | str) -> None:
        self.model, self.device = model.to(device), torch.device(device)
        self.num_parameters = num_parameters(model)
        self.version = 0

    def refresh(self) -> None:
        """Called when the weights have changed, for actors that keep copies of them."""

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
    """Plays with one network, whose parameters are one vector; how it chooses actions is the subclass's `act`.

    A learner in the same process shares this network: it writes to the vector, and nothing is copied.
    """

    def __init__(self, model: nn.Module, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        super().__init__(model, device=device)
        self.spaces, self.hp = spaces, hp
        self.parameters = FlatParameters(model.parameters())


class ActorCriticActor(NetworkActor):
    """Samples from a policy, and stores the action's log-probability and the state's value with the step."""

    model: ActorCritic

    def __init__(self, spaces: Spaces, hp: Any, *, device: torch.device | str = "cpu") -> None:
        model = ActorCritic(spaces, hp.hidden_sizes, hp.activation, log_std_init=hp.log_std_init)
        super().__init__(model, spaces, hp, device=device)
        self.forward = make_forward(model.encoder, *model.networks())

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        output, value = self.forward(obs)
        policy = self.model.acting_policy(output)
        explore = explore or not self.hp.deterministic_eval
        action = policy.sample(policy.noise(rng)) if explore else policy.mode
        logprob = policy.log_prob(action)
        if isinstance(action, Tensor):
            action, logprob = action.numpy(), logprob.numpy()
        return Decision(action, memory, {"logprob": logprob, "value": value[:, 0]})


class EpsilonGreedyActor(NetworkActor):
    """Takes the action of the highest value, or with probability epsilon a random one."""

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
            # One uniform number per environment: below epsilon it also tells which action, u * A / epsilon.
            uniform = rng.random(len(q))
            random = uniform < epsilon
            action[random] = uniform[random] * (q.shape[-1] / epsilon)
        return Decision(action, memory, {})


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
        policy = self.model.policy(output)
        explore = explore or not self.hp.deterministic_eval
        action = policy.sample(policy.noise(rng)) if explore else policy.mode
        return Decision(action.reshape(len(action), *(self.spaces.action.shape or ())), memory, {})


class RandomActor:
    """Uniformly random actions of the model's action space."""

    def __init__(self, spaces: Spaces) -> None:
        self.space = spaces.action

    def act(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        num_envs = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        if isinstance(self.space, gym.spaces.Discrete):
            return Decision(rng.integers(self.space.n, size=num_envs), memory, {})
        assert isinstance(self.space, gym.spaces.Box)
        shape = (num_envs, *self.space.shape)
        return Decision(rng.uniform(self.space.low, self.space.high, shape).astype(np.float32), memory, {})
