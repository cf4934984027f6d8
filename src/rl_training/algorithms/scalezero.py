"""ScaleZero (arXiv:2509.07945): one UniZero world model (arXiv:2406.10667) for planning in several tasks.

Solved tasks are no longer trained. In later stages low-rank adapters are trained, and the other weights are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_training.acting.planning import Plan, search_arguments
from rl_training.acting.scalezero import ScaleZeroActor, plan_in_task
from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.muzero import cooling
from rl_training.algorithms.optim import Adam, backward, clipped_step, soft_update
from rl_training.algorithms.planning import SearchHyperparameters, policy_loss
from rl_training.algorithms.planning_targets import sequence_targets
from rl_training.algorithms.replay_based import CAPACITY, ReplayLearner
from rl_training.data.batch import to_tensors, tree_map
from rl_training.data.replay import Replay
from rl_training.errors import InputError, nearest
from rl_training.models.parameters import FlatParameters
from rl_training.types import Array, Batch, History, State


@dataclass(frozen=True)
class ScaleZeroHyperparameters(SearchHyperparameters):
    hidden_sizes: tuple[int, ...] = setting((128,), "hidden layer sizes of each task's encoder", low=1)
    width: int = setting(64, "embedding size of tokens and latent states", low=1)
    layers: int = setting(2, "transformer layers", low=1)
    heads: int = setting(4, "attention heads per layer; must divide width", low=1)
    num_experts: int = setting(4, "routed experts per layer; each token uses one of them, and the shared expert", low=1)
    expert_size: int = setting(128, "hidden units of each expert, routed or shared", low=1)
    routing: Literal["probability", "one"] = setting(
        "probability", "weight of the chosen expert: its gate probability (the gate learns), or 1 (the gate is fixed)"
    )
    task_embedding: bool = setting(True, "add a learned task embedding to the tokens")
    context: int = setting(4, "context length of acting and search in steps, including the current one", low=1)
    train_context: int | None = setting(
        None, "context length in training, at least context; None: the sequence and context - 1 steps before it", low=1
    )
    value_limit: int = setting(50, "value support is -limit .. limit after h(x); 0: a scalar in [-1, 1]", low=0)
    reward_limit: int = setting(50, "reward support is -limit .. limit after h(x); 0: a scalar in [-1, 1]", low=0)
    num_adapters: int = setting(4, "adapter stages after the base stage; each adds LoRA adapters to all layers", low=0)
    adapter_rank: int = setting(8, "LoRA rank of an adapter", low=1)
    adapter_alpha: float = setting(4.0, "LoRA alpha: adapters are scaled by adapter_alpha / adapter_rank", low=0.0)
    adapter_dropout: float = setting(0.0, "LoRA dropout: dropout probability of an adapter's input", low=0.0, high=1.0)
    base_stage_steps: int = setting(50_000, "minimum length of the base stage in gradient steps", low=0)
    stage_steps: int = setting(20_000, "maximum length of an adapter stage in gradient steps", low=1)
    target_returns: dict[str, float] | None = setting(  # noqa: RUF009 - nothing writes to it
        None, "evaluation return, by env id, at which a task counts as solved and is no longer trained"
    )
    rank_exponent: float = setting(
        0.0, "loss weight of a task: rank^rank_exponent, where the lowest last evaluation has rank 1", low=0.0
    )
    buffer_capacity: int = setting(100_000, "per task: " + CAPACITY, low=1)
    batch_size: int = setting(32, "batch size: sequences of each task per gradient step", low=1)
    learning_starts: int = setting(1_000, "env steps, counted over all tasks, before learning starts", low=0)
    unroll_steps: int = setting(10, "length of a training sequence in steps", low=1)
    tau: float = scalar(0.05, "soft update (Polyak) coefficient of the target network per gradient step", high=1.0)
    utd_ratio: float = scalar(0.25, "update-to-data ratio: gradient steps per env step, counted over all tasks")
    num_simulations: int = scalar(25, "MCTS simulations per search", low=1)
    temperature: float = scalar(1.0, "actions are sampled in proportion to visits^(1 / temperature)", schedule=cooling)
    root_exploration_fraction: float = scalar(0.25, "share of Dirichlet noise in the root's prior", high=1.0)
    dirichlet_alpha: float = scalar(0.3, "concentration of the root's Dirichlet noise", low=1e-3)
    pb_c_init: float = scalar(1.25, "PUCT constant c1: weight of the prior relative to Q")
    pb_c_base: float = scalar(19652.0, "PUCT constant c2 of log((visits + c2 + 1) / c2) + c1", low=1.0)
    n_step: int = scalar(5, "n-step value targets: rewards summed before bootstrapping", low=1)
    priority_exponent: float = scalar(0.0, "PER alpha; 0: uniform sampling", high=1.0)
    latent_coef: float = scalar(10.0, "latent prediction loss coefficient (squared error)")
    value_coef: float = scalar(0.5, "value loss coefficient")


class ScaleZero(ReplayLearner[Sequence[Replay]]):
    """Each gradient step is on sequences of all unsolved tasks."""

    Hyperparameters = ScaleZeroHyperparameters
    hp: ScaleZeroHyperparameters
    actor: ScaleZeroActor
    prioritized = True

    def __init__(
        self,
        actor: ScaleZeroActor,
        hp: ScaleZeroHyperparameters,
        *,
        rng: np.random.Generator,
        names: Sequence[str] = (),
    ) -> None:
        """names: the env ids of the tasks; without them no task can be solved."""
        super().__init__(actor, hp, rng=rng)
        self.names, self.spaces = list(names), actor.spaces
        self.target_returns = numbered(hp.target_returns or {}, self.names)
        self.model, self.target_model = actor.model, deepcopy(actor.model)
        self.solved: list[int] = []
        self.scores: list[float | None] = [None] * len(self.spaces)  # mean returns of the last evaluation
        self.stage_began = 0  # gradient steps
        self.solved_before = 0  # number of tasks that were solved when the stage began
        self.use_stage(0)

    def use_stage(self, stage: int) -> None:
        """Train the parameters of a stage, with a new optimizer."""
        self.stage = stage
        for model in (self.model, self.target_model):
            model.set_stage(stage)
        self.target_model.requires_grad_(False)
        self.optimizer = Adam(FlatParameters(self.model.parameters()), eps=1e-8)
        self.optimizers = {"model": self.optimizer}
        self.trainable = self.trainable_mask()
        self.actor.rebuild()
        self.target_planners = [self.actor.planner_of(self.target_model, task) for task in range(len(self.spaces))]

    def trainable_mask(self) -> Tensor:
        """[P] 0 for the parameters of solved tasks, else 1."""
        flat = self.optimizer.parameters
        mask = torch.ones_like(flat.vector)
        views = dict(zip(map(id, flat.parameters), flat.views(mask), strict=True))
        for task in self.solved:
            for part in (self.model.encoders[task], self.model.heads[task]):
                for parameter in part.parameters():
                    views[id(parameter)].zero_()
            if self.model.task_embedding is not None:
                views[id(self.model.task_embedding)][task] = 0.0
        return mask

    def stage_is_over(self) -> bool:
        """After `stage_steps`, or once a share of the unsolved tasks, 1 / (adapters left), was solved in this stage."""
        hp, left = self.hp, self.hp.num_adapters - self.stage
        since = self.gradient_steps - self.stage_began
        if left == 0 or (self.stage == 0 and since < hp.base_stage_steps):
            return False
        unsolved, newly = len(self.spaces) - len(self.solved), len(self.solved) - self.solved_before
        return newly >= math.ceil(unsolved / left) or since >= hp.stage_steps

    def next_stage(self) -> None:
        self.use_stage(self.stage + 1)
        self.stage_began, self.solved_before = self.gradient_steps, len(self.solved)

    def note_scores(self, scores: Mapping[int, float]) -> None:
        """Mean returns of an evaluation, by task. A solved task stays solved, and its own parameters are frozen."""
        for task, score in scores.items():
            self.scores[task] = score
            if self.active(task) and score >= self.target_returns.get(task, math.inf):
                self.solved.append(task)
        self.trainable = self.trainable_mask()
        for average in (self.optimizer.mean, self.optimizer.square):
            average.mul_(self.trainable)

    def active(self, task: int) -> bool:
        return task not in self.solved

    def one_step(self, replay: Sequence[Replay]) -> dict[str, Tensor]:
        hp = self.hp
        if self.stage_is_over():
            self.next_stage()
        batches: dict[int, Batch] = {}
        drawn: dict[int, Array] = {}
        for task in filter(self.active, range(len(replay))):
            draw = replay[task].draw
            drawn[task], weight = draw(hp.batch_size, self.rng, beta=hp.beta, exponent=hp.priority_exponent)
            batches[task] = to_tensors(self.targets(task, replay[task], drawn[task]) | {"weight": weight}, self.device)
        report, errors = self.update(batches)
        for task, error in errors.items():
            self.set_priorities(replay[task], drawn[task], error)
        soft_update(self.target_model, self.model, hp.tau)
        self.actor.refresh()
        for planner in self.target_planners:
            planner.refresh()
        numbers = {"stage": self.stage, "active_tasks": len(batches)}
        return report | {name: torch.tensor(float(x), device=self.device) for name, x in numbers.items()}

    def targets(self, task: int, replay: Replay, index: Array) -> dict[str, Any]:
        """The batch of sequences that begin at places [B] of a task's replay: see `sequence_targets`.

        Also the observations [B, H + 1, ...] of all steps, with the last one repeated after the end of an episode, and
        the history before them: without it only the last steps would have as much context as the root of a search.
        """
        targets, sequence = sequence_targets(
            replay,
            index,
            self.hp,
            n=int(self.hp.n_step),
            spaces=self.spaces[task],
            values_at=lambda place: self.target_values(task, replay, place),
            plan_at=lambda place: self.reanalyse(task, replay, place),
            rng=self.rng,
        )
        at = np.minimum(np.arange(self.hp.unroll_steps + 1), sequence["steps"][:, None])
        place = np.take_along_axis(sequence["place"], at, 1)
        obs = tree_map(lambda x: x.reshape(*place.shape, *x.shape[1:]), replay.observations(place.reshape(-1)))
        return targets | {"obs": obs} | self.history_at(replay, index)

    def history_at(self, replay: Replay, place: Array) -> dict[str, History]:
        """The steps before places [B], if the context has any."""
        length = self.model.context - 1
        return {"history": replay.history(place, length)} if length else {}

    @torch.no_grad()
    def target_values(self, task: int, replay: Replay, place: Array) -> Array:
        """[M] The target network's values of the observations at places [M], with the context of a search's root."""
        inputs = to_tensors({"obs": replay.observations(place), **self.history_at(replay, place)}, self.device)
        values = self.target_model.for_task(task).values(inputs["obs"], inputs.get("history"))
        return values.cpu().numpy()

    def reanalyse(self, task: int, replay: Replay, place: Array) -> Plan:
        """Search from the observations at places [M] with the target network and, as in acting, noise."""
        return plan_in_task(
            self.target_planners[task],
            self.target_model,
            replay.observations(place),
            self.hp,
            rng=self.rng,
            **self.history_at(replay, place),
            **search_arguments(self.hp, explore=True),
        )

    def update(self, batches: Mapping[int, Batch]) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Take one gradient step on all of these tasks. Returns (metrics, V - target [B] of first steps by task)."""
        hp, coefficients = self.hp, self.coefficients()
        each: list[dict[str, Tensor]] = []
        totals, errors = {}, {}
        with self.training():
            for task, batch in batches.items():
                losses, errors[task] = self.losses(task, batch)
                total = sum(coefficients[name] * value for name, value in losses.items())
                totals[task] = (batch["weight"] * total).mean()
                each.append({f"{name}_loss": value.detach().mean() for name, value in losses.items()})
        weights = self.task_weights(list(batches))
        loss = torch.stack([weights[task] * total for task, total in totals.items()]).sum()
        backward(self.optimizer, loss)
        # Decoupled (AdamW): Adam would amplify a decay in the gradient where there is no other gradient.
        parameters = self.optimizer.parameters
        parameters.vector.addcmul_(parameters.vector, self.trainable, value=-hp.learning_rate * hp.weight_decay)
        norm = clipped_step(self.optimizer, lr=hp.learning_rate, max_grad_norm=hp.max_grad_norm)
        report = {"loss": loss.detach(), "grad_norm": norm}
        report |= {name: torch.stack([losses[name] for losses in each]).mean() for name in each[0]}
        if len(self.names) > 1:
            report |= {f"loss/{self.names[task]}": total.detach() for task, total in totals.items()}
        return report, errors

    @contextmanager
    def training(self) -> Iterator[None]:
        """Training mode. The dropout of adapters, drawn by torch's generator, is seeded by the learner's."""
        drops = self.stage > 0 and self.hp.adapter_dropout > 0
        self.model.train()
        with torch.random.fork_rng(enabled=drops):
            if drops:
                torch.manual_seed(int(self.rng.integers(1 << 62)))
            yield
        self.model.eval()

    def coefficients(self) -> dict[str, float]:
        hp = self.hp
        return {"latent": hp.latent_coef, "policy": hp.policy_coef, "value": hp.value_coef, "reward": hp.reward_coef}

    def task_weights(self, tasks: Sequence[int]) -> dict[int, float]:
        """Proportional to rank^rank_exponent, with sum 1. The authors' code computes such weights, with an exponent
        that rises from 0.1 to 1, but adds the losses of the tasks without them: that is an exponent of 0."""
        scores = [score for task in tasks if (score := self.scores[task]) is not None]
        if len(scores) < len(tasks):
            return dict.fromkeys(tasks, 1 / len(tasks))
        rank = np.argsort(np.argsort(scores, kind="stable")) + 1.0
        weight = rank**self.hp.rank_exponent
        return dict(zip(tasks, (weight / weight.sum()).tolist(), strict=True))

    def losses(self, task: int, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """(losses [B] by name, means over the steps of a sequence; V - target [B] of the first steps)."""
        model, obs = self.model, batch["obs"]
        predicted = model.unroll(task, obs, batch["action"], batch.get("history"))
        with torch.no_grad():
            encoded = self.target_model.encode(task, tree_map(lambda x: x[:, 1:], obs))
        each = {
            "latent": batch["reward_mask"] * (predicted.latent - encoded).square().mean(-1),
            "policy": batch["policy_mask"] * policy_loss(predicted.policy, batch),
            "value": batch["value_mask"] * model.value_support.loss(predicted.value, batch["value"]),
            "reward": batch["reward_mask"] * model.reward_support.loss(predicted.reward, batch["reward"]),
        }
        error = model.value_support.to_scalar(predicted.value[:, 0].detach()) - batch["value"][:, 0]
        return {name: value.mean(1) for name, value in each.items()}, error

    def state_dict(self) -> State:
        return super().state_dict() | {
            "target_model": self.target_model.state_dict(),
            "stage": self.stage,
            "stage_began": self.stage_began,
            "solved": list(self.solved),
            "solved_before": self.solved_before,
            "scores": list(self.scores),
        }

    def state_pattern(self) -> State:
        """The optimizer's state depends on the stage. It checks it itself."""
        scores = {str(task): float | None for task in range(len(self.spaces))}
        return self.state_dict() | {"optimizers": dict, "scores": list(scores.values()), "solved": [int]}

    def load_state_dict(self, state: State) -> None:
        self.stage_began, self.solved_before = state["stage_began"], state["solved_before"]
        self.solved, self.scores = list(state["solved"]), list(state["scores"])
        self.target_model.load_state_dict(state["target_model"])
        self.use_stage(state["stage"])
        super().load_state_dict(state)


def numbered(returns: Mapping[str, float], names: Sequence[str]) -> dict[int, float]:
    """Returns by the number of the task. Raises InputError for unknown tasks."""
    unknown = [name for name in returns if names and name not in names]
    if unknown:
        raise InputError(
            f"target_returns: {unknown[0]!r} is none of the tasks{nearest(unknown[0], names)} ({', '.join(names)})"
        )
    return {names.index(name): value for name, value in returns.items() if names}
