"""What the algorithms share that plan with a learned model: acting by search, targets from sequences, the unrolled
loss (MuZero, Schrittwieser et al., arXiv:1911.08265; Reanalyse, arXiv:2104.06294)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.graphed import GraphedGradient
from rl_training.algorithms.optim import Adam, FlatParameters, backward, clipped_step
from rl_training.algorithms.planner import Plan, Planner
from rl_training.algorithms.replay_based import CAPACITY, ReplayAlgorithm, ReplayHyperparameters
from rl_training.config import InputError
from rl_training.data.batch import to_device, tree_map
from rl_training.data.fields import NUMBER
from rl_training.data.replay import Replay
from rl_training.models.muzero import MuZeroModel, PlanningModel
from rl_training.ops.returns import bootstrap_after, n_step_sum
from rl_training.types import Array, Batch, Decision, Field, Observation, Spaces, State

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class PlanningHyperparameters(ReplayHyperparameters):
    hidden_sizes: tuple[int, ...] = setting((128,), "hidden layer sizes of each network; unused by towers", low=1)
    latent_size: int = setting(64, "size of the latent state; unused by towers", low=1)
    network: Literal["auto", "mlp", "conv"] = setting("auto", "auto: conv (residual towers) for images, else mlp")
    channels: int = setting(64, "channels of the residual towers", low=2)
    blocks: int = setting(1, "residual blocks of each tower", low=1)
    stem: Literal["residual", "strided"] = setting(
        "residual",
        "downsampling of images: residual blocks (as in EfficientZero) or strided convolutions (faster)",
    )
    value_limit: int = setting(30, "value support is -limit .. limit after h(x); 0: a scalar in [-1, 1]", low=0)
    reward_limit: int = setting(30, "reward support is -limit .. limit after h(x); 0: a scalar in [-1, 1]", low=0)
    num_sampled_actions: int = setting(20, "continuous actions: actions sampled at each node of the search", low=2)
    buffer_capacity: int = setting(100_000, CAPACITY, low=1)
    batch_size: int = setting(128, "batch size: sequences per gradient step", low=1)
    learning_starts: int = setting(1_000, "env steps collected, with search, before learning starts", low=0)
    bootstrap: Literal["target", "search"] = setting(
        "target", "value that targets bootstrap from: the target network's, or the one the search found at that step"
    )
    unroll_steps: int = setting(5, "steps the model is unrolled for in training", low=1)
    eval_num_simulations: int | None = setting(None, "simulations in evaluation; None: num_simulations", low=1)
    eval_temperature: float = setting(0.0, "temperature in evaluation; 0: always the best action", low=0.0)
    learning_rate: float = scalar(1e-3, "learning rate of the optimizer")
    weight_decay: float = scalar(1e-4, "decoupled weight decay (AdamW)")
    max_grad_norm: float | None = scalar(5.0, "gradient clipping norm; None: no clipping")
    gamma: float = scalar(0.997, "discount factor", high=1.0)
    tau: float = scalar(1.0, "soft update (Polyak) coefficient of the target network; 1: copy the weights", high=1.0)
    utd_ratio: float = scalar(
        1.0, "update-to-data ratio: gradient steps per env step, counted over all environments", atari=0.25
    )
    target_update_interval: int = scalar(400, "env steps between target network updates", low=1)
    num_simulations: int = scalar(50, "MCTS simulations per search", low=1)
    n_step: int = scalar(10, "n-step value targets: rewards summed before bootstrapping", low=1)
    reanalyse_ratio: float = scalar(
        0.0, "reanalyse: share of sequences whose policy targets are searched again with the target network", high=1.0
    )
    priority_exponent: float = scalar(1.0, "PER alpha; 0: uniform sampling", high=1.0)
    beta: float = scalar(1.0, "PER beta (importance sampling); 1: unbiased", high=1.0)
    policy_coef: float = scalar(1.0, "policy loss coefficient")
    value_coef: float = scalar(1.0, "value loss coefficient")
    reward_coef: float = scalar(1.0, "reward loss coefficient")
    unroll_coef: float = scalar(5.0, "loss coefficient of all unrolled steps together; the first step's is 1")
    hidden_gradient_scale: float = scalar(
        0.5, "factor on the gradient of the latent state at each unrolled step (MuZero: 0.5)", high=1.0
    )


class PlanningAlgorithm(ReplayAlgorithm):
    """Model-based: acts by searching the model, learns it by unrolling it along what was played."""

    Hyperparameters = PlanningHyperparameters
    hp: Any
    prioritized = True
    PRIORITY_FLOOR = 1e-6

    def __init__(
        self,
        model: PlanningModel,
        spaces: Spaces,
        hp: Any,
        *,
        rng: np.random.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(spaces, hp, rng=rng, device=device)
        self.model = model.to(self.device).eval()
        self.target_model = deepcopy(self.model).requires_grad_(False)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = Adam(FlatParameters(self.model.parameters()), eps=1e-8)
        self.planner = Planner(self.model, spaces, num_candidates=hp.num_sampled_actions)
        self.target_planner = Planner(self.target_model, spaces, num_candidates=hp.num_sampled_actions)
        self.graphed = GraphedGradient(self.gradient) if self.device.type == "cuda" else None

    @classmethod
    def build(cls, spaces: Spaces, hp: Any, *, rng: np.random.Generator, device: torch.device) -> Self:
        if not isinstance(spaces.action, gym.spaces.Discrete | gym.spaces.Box):
            raise InputError(
                f"planning takes one discrete action or a Box, not {spaces.action}: use ppo, or make its combinations "
                "one Discrete space with a gymnasium.ActionWrapper"
            )
        return cls(cls.make_model(spaces, hp), spaces, hp, rng=rng, device=device)

    @classmethod
    def make_model(cls, spaces: Spaces, hp: Any) -> PlanningModel:
        return MuZeroModel(spaces, **model_options(hp))

    @abstractmethod
    def plan(
        self,
        obs: Observation,
        *,
        temperature: float,
        num_simulations: int,
        rng: np.random.Generator,
        planner: Planner | None = None,
    ) -> Plan:
        """Search from observations [N, ...], with the numbers of this call; changes nothing.

        planner: with another model than the one that is learned.
        """

    def exploration(self) -> dict[str, float]:
        """Further arguments of `plan` that set exploration noise; 0 switches each of them off."""
        return {}

    def numbers_in_play(self) -> dict[str, Any]:
        """Arguments of `plan` in training: for acting and for reanalysis."""
        hp = self.hp
        return {"temperature": hp.temperature, "num_simulations": hp.num_simulations, **self.exploration()}

    @property
    def discount(self) -> float:
        """What the value of the next state counts: its negative where that is the other player's."""
        return float(-self.hp.gamma if self.spaces.num_players == 2 else self.hp.gamma)

    @property
    def known_bounds(self) -> tuple[float, float]:
        """Of Q: outcomes of board games lie between -1 and 1, of all else nothing is known."""
        return (-1.0, 1.0) if self.spaces.num_players == 2 else (math.inf, -math.inf)

    def numbers_in_evaluation(self) -> dict[str, Any]:
        """Arguments of `plan` in evaluation: no exploration noise."""
        hp = self.hp
        simulations = hp.num_simulations if hp.eval_num_simulations is None else hp.eval_num_simulations
        quiet = dict.fromkeys(self.exploration(), 0.0)
        return {"temperature": hp.eval_temperature, "num_simulations": simulations, **quiet}

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        numbers = self.numbers_in_play() if explore else self.numbers_in_evaluation()
        plan = self.plan(obs, rng=rng, **numbers)
        return Decision(plan.action, memory, stored_with_step(plan))

    def extra_fields(self) -> dict[str, Field]:
        actions, shape = self.planner.num_actions, self.planner.action_shape
        fields = {"policy": Field((actions,), np.dtype(np.float32)), "root_value": NUMBER}
        if shape is not None:
            fields["candidates"] = Field((actions, math.prod(shape)), np.dtype(np.float32))
        return fields

    def warm_up(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        """A search of a model that knows nothing is random enough, and comes with targets."""
        return self.act(obs, memory, explore=explore, rng=rng)

    def learn(self, replay: Replay) -> dict[str, list[Tensor]]:
        if self.target_is_due(replay):
            self.move_target()
        return super().learn(replay)

    def move_target(self) -> None:
        with torch.no_grad():
            for target, parameter in zip(self.target_model.parameters(), self.model.parameters(), strict=True):
                target.lerp_(parameter, self.hp.tau)
            for statistic, newer in zip(self.target_model.buffers(), self.model.buffers(), strict=True):
                statistic.copy_(newer)
        self.target_planner.refresh()

    def take_steps(self, replay: Replay, count: int) -> Iterator[dict[str, Tensor]]:
        """On a GPU many observations take hardly longer than few: there the targets of all steps are made at once."""
        at_once = max(count, 1) if self.device.type == "cuda" else 1
        for _ in range(0, count, at_once):
            yield from self.steps_at_once(replay, at_once)

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        return self.steps_at_once(replay, 1)[0]

    def steps_at_once(self, replay: Replay, count: int) -> list[dict[str, Tensor]]:
        """Gradient steps on batches that are drawn and given their targets together."""
        hp, reports, errors = self.hp, [], []
        drawn = [
            replay.draw(hp.batch_size, self.rng, beta=hp.beta, exponent=hp.priority_exponent) for _ in range(count)
        ]
        index = np.concatenate([places for places, _ in drawn])
        weight = np.concatenate([weights for _, weights in drawn if weights is not None])
        batches = self.as_learned_from(self.to_tensors(self.targets(replay, index) | {"weight": weight}))
        for number in range(count):
            report, error = self.update(part(batches, number, count))
            reports.append(report)
            errors.append(error)
        replay.set_priorities(index, torch.cat(errors).abs().cpu().double().numpy() + self.PRIORITY_FLOOR)
        self.planner.refresh()
        return reports

    def as_learned_from(self, batch: Batch) -> Batch:
        """What a variant changes at random in what it learns from, but not in what it draws targets from."""
        return batch

    def to_tensors(self, batch: dict[str, Any]) -> Batch:
        return {key: to_device(tree_map(torch.as_tensor, value), self.device) for key, value in batch.items()}

    def targets(self, replay: Replay, index: Array) -> dict[str, Any]:
        """What to learn from K + 1 steps of each sequence; beyond the end of an episode, nothing but rewards of 0.

        obs [B, ...], action [B, K, ...], reward [B, K], value and policy [B, K + 1, ...], and masks of what is known.
        """
        hp, count = self.hp, self.hp.unroll_steps + 1
        sequence = replay.sequences(index, count + hp.n_step)
        steps, terminated, place = sequence["steps"], sequence["terminated"], sequence["place"]
        known = np.arange(count) < steps[:, None]
        value = self.value_targets(replay, sequence, self.steps_to_bootstrap(replay, index))
        stored: tuple[str, ...] = ("policy", "candidates")
        policy = {name: sequence[name][:, :count] for name in stored if name in sequence}
        # A number that hardly varies: on a GPU every size of a search has a graph of its own.
        fresh = self.rng.permutation(len(index))[: int(hp.reanalyse_ratio * len(index) + self.rng.random())]
        self.renew_policies(replay, policy, place[:, :count], known, fresh)
        over = terminated[:, None] & ~known
        known_reward = known[:, :-1]
        return policy | {
            "obs": replay.observations(index),
            "action": self.actions(sequence["action"][:, :-1], known_reward, count - 1),
            "reward": np.where(known_reward, sequence["reward"][:, : count - 1], np.float32(0)),
            "value": np.where(known, value, np.float32(0)),
            "policy_mask": known.astype(np.float32),
            "value_mask": (known | over).astype(np.float32),
            "reward_mask": (known | over)[:, :-1].astype(np.float32),
        }

    def value_targets(self, replay: Replay, sequence: dict[str, Array], n: int | Array) -> Array:
        """[B, K + 1] Sums of up to n rewards, and the discounted value of the state after them.

        A terminated episode ends in a state worth 0. Otherwise the row after the last known step holds the observation
        that step led to, whether the episode was truncated there or still runs. No search was made at it: with
        `bootstrap: search` too its value is the target network's.
        """
        steps, terminated, count = sequence["steps"][:, None], sequence["terminated"][:, None], self.hp.unroll_steps + 1
        after = bootstrap_after(sequence["steps"], n, count)
        rows, at = np.arange(len(after))[:, None], np.arange(count) + after
        beyond = at >= steps
        value = sequence["root_value"][rows, at]
        if self.hp.bootstrap == "target" or (beyond & ~terminated).any():
            # Of all states, of which a search's value may replace most: on a GPU each number of them has its graph.
            now = self.values_now(replay, sequence["place"][rows, at])
            value = now if self.hp.bootstrap == "target" else np.where(beyond, now, value)
        ahead = np.where(beyond & terminated, np.float32(0), np.float32(self.discount) ** after * value)
        target: Array = (n_step_sum(sequence["reward"], after, self.discount) + ahead).astype(np.float32)
        return target

    def steps_to_bootstrap(self, replay: Replay, index: Array) -> int | Array:
        """Steps before bootstrapping: one number, or [B]."""
        return int(self.hp.n_step)

    def values_now(self, replay: Replay, place: Array) -> Array:
        """[B, K + 1] The target network's values of the observations at places [B, K + 1]."""
        obs = replay.observations(place.reshape(-1))
        return self.target_planner.inference.initial(obs, 0)[:, -2].reshape(place.shape)

    def inputs_at(self, replay: Replay, place: Array) -> dict[str, Any]:
        """What `plan` takes to search from the places [B] of a replay."""
        return {"obs": replay.observations(place)}

    def renew_policies(
        self, replay: Replay, policy: dict[str, Array], place: Array, known: Array, fresh: Array
    ) -> None:
        """Search sequences number `fresh` anew, with the target network, at all steps that are known [B, K + 1].

        As in play, noise included, as EfficientZero's sources have it. The replay keeps what play found: with policies
        from here in its place, CartPole was learned worse.
        """
        if not len(fresh):
            return
        known = known[fresh]
        place = np.where(known, place[fresh], place[fresh, :1])  # in place of what is not known any observation will do
        inputs = self.inputs_at(replay, place.reshape(-1))
        plan = self.plan(**inputs, rng=self.rng, planner=self.target_planner, **self.numbers_in_play())
        rows, steps = fresh[np.nonzero(known)[0]], np.nonzero(known)[1]
        policy["policy"][rows, steps] = plan.policy.reshape(*known.shape, -1)[known]
        if plan.candidates is not None:
            policy["candidates"][rows, steps] = plan.candidates.reshape(*known.shape, *plan.candidates.shape[1:])[known]

    def actions(self, action: Array, known: Array, count: int) -> Array:
        """[B, K] what was played; beyond the end any action, because the model must learn that none matters there."""
        action, space = action[:, :count], self.spaces.action
        if isinstance(space, gym.spaces.Discrete):
            return np.where(known, action, self.rng.integers(space.n, size=action.shape))
        anything = self.rng.uniform(-1, 1, action.shape).astype(np.float32)
        return np.where(known.reshape(*known.shape, *[1] * (action.ndim - 2)), action, anything)

    def update(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """One gradient step; returns what to report, and V - target of the first steps [B]."""
        hp = self.hp
        graphed = self.graphed
        report = graphed(batch, self.constants_of_gradient()) if graphed else self.gradient(batch)
        # Apart from the gradient: inside it Adam would divide the decay by what the gradients usually are, and weights
        # with small ones, such as what an action adds to a state, would be held at zero.
        self.optimizer.parameters.vector.mul_(1 - hp.learning_rate * hp.weight_decay)
        norm = clipped_step(self.optimizer, lr=hp.learning_rate, max_grad_norm=hp.max_grad_norm)
        error = report.pop("error")
        return report | {"grad_norm": norm, "value": batch["value"][:, 0].mean()}, error

    def constants_of_gradient(self) -> tuple[float, ...]:
        """All scalars that `gradient` reads."""
        return (self.hp.unroll_coef, self.hp.hidden_gradient_scale, *self.coefficients().values())

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """Give the optimizer the loss's gradient; returns what to report, and as `error` V - target [B]."""
        self.model.train()
        losses, error = self.losses(batch)
        self.model.eval()
        total = sum(self.coefficients()[name] * value for name, value in losses.items())
        loss = (batch["weight"] * total).mean()
        backward(self.optimizer, loss)
        each = {f"{name}_loss": value.detach().mean() for name, value in losses.items()}
        return {"loss": loss.detach(), **each, "error": error}

    def coefficients(self) -> dict[str, float]:
        return {"policy": self.hp.policy_coef, "value": self.hp.value_coef, "reward": self.hp.reward_coef}

    def losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Of the policy, the value and the reward, each [B]; and V - target of the first steps [B]."""
        model = self.model
        states, rewards = model.unroll(
            model.represent(batch["obs"]), batch["action"], gradient_scale=self.hp.hidden_gradient_scale
        )
        policy, value = model.predict(torch.cat(states))
        policy, value = (
            x.view(len(states), -1, x.shape[1]).transpose(0, 1) for x in (policy, value)
        )  # [B, K + 1, ...]
        weight = self.step_weights(len(states))
        value_loss = model.value_support.loss(value, batch["value"])
        reward_loss = model.reward_support.loss(rewards, self.reward_target(batch))
        losses = {
            "policy": (weight * batch["policy_mask"] * self.policy_loss(policy, batch)).sum(1),
            "value": (weight * batch["value_mask"] * value_loss).sum(1),
            "reward": (weight[1:] * batch["reward_mask"] * reward_loss).sum(1),
        }
        error = model.value_support.to_scalar(value[:, 0].detach()) - batch["value"][:, 0]
        return losses | self.more_losses(batch, states), error

    def more_losses(self, batch: Batch, states: list[Tensor]) -> dict[str, Tensor]:
        """What a variant learns beside, each [B], from the K + 1 states [B, S] of an unroll."""
        return {}

    def reward_target(self, batch: Batch) -> Tensor:
        """[B, K] What the reward logits are to mean."""
        target: Tensor = batch["reward"]
        return target

    def step_weights(self, count: int) -> Tensor:
        """[K + 1] The first step weighs 1, the K unrolled ones unroll_coef / K each."""
        weight = torch.full((count,), self.hp.unroll_coef / (count - 1), device=self.device)
        weight[:1].fill_(1.0)  # weight[0] = 1 would copy from the host, which no graph can
        return weight

    def policy_loss(self, policy: Tensor, batch: Batch) -> Tensor:
        """[B, K + 1] The cross-entropy of policies [B, K + 1, P] against the searches' shares of the actions."""
        share: Tensor = batch["policy"]
        if "candidates" in batch:
            return -(share * squashed_log_prob(policy, batch["candidates"])).sum(-1)
        return -(share * F.log_softmax(policy, -1)).sum(-1)

    def state_dict(self) -> State:
        return super().state_dict() | {
            "model": self.model.state_dict(),
            "target_model": self.target_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state["model"])
        self.target_model.load_state_dict(state["target_model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.planner.refresh()
        self.target_planner.refresh()


def model_options(hp: PlanningHyperparameters) -> dict[str, Any]:
    names = (
        "latent_size",
        "hidden_sizes",
        "activation",
        "value_limit",
        "reward_limit",
        "network",
        "channels",
        "blocks",
        "stem",
    )
    return {name: getattr(hp, name) for name in names}


def stored_with_step(plan: Plan) -> dict[str, Array]:
    extras = {"policy": plan.policy, "root_value": plan.value}
    return extras if plan.candidates is None else extras | {"candidates": plan.candidates}


def part(batches: Batch, number: int, count: int) -> Batch:
    """Batch `number` of `count` that lie one after the other, whatever a batch has of each kind."""
    return {key: tree_map(lambda x: x.chunk(count)[number], value) for key, value in batches.items()}


def squashed_log_prob(policy: Tensor, action: Tensor) -> Tensor:
    """[..., A] log-density of actions [..., A, D] = tanh(u), u ~ Normal(mean, std), of policies [..., 2 D]."""
    mean, log_std = policy.unsqueeze(-2).chunk(2, -1)
    u = torch.atanh(action)
    density = -0.5 * ((u - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
    return (density - torch.log1p(-action.square())).sum(-1)
