"""Deep Q-learning (Mnih et al., 2015), with double (arXiv:1509.06461) and dueling (1511.06581) networks, prioritized
replay (1511.05952) and n-step returns as options."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.algorithms.base import scalar, setting
from rl_training.algorithms.optim import Adam, FlatParameters, backward, clipped_step
from rl_training.algorithms.replay_based import CAPACITY, ReplayAlgorithm, ReplayHyperparameters, annealing
from rl_training.data.replay import Replay
from rl_training.models.acting import NumpyForward, flat, make_forward
from rl_training.models.numpy_mlp import NumpyMLP
from rl_training.models.q_network import QNetwork
from rl_training.types import Batch, Decision, Observation, Spaces, State

if TYPE_CHECKING:
    from typing_extensions import Self

SMALL = 1 << 18  # multiplications of a layer up to which numpy outruns torch: beyond, its BLAS starts threads


def exploration(exploration_fraction: float = 0.2, final_epsilon: float = 0.05) -> dict[str, Any]:
    """From always to rarely, over the first part of training."""
    if exploration_fraction == 0:
        return {"kind": "constant", "start": final_epsilon}
    duration = f"{100 * exploration_fraction:g}%"
    return {"kind": "linear", "start": 1.0, "end": final_epsilon, "duration": duration}


@dataclass(frozen=True)
class DQNHyperparameters(ReplayHyperparameters):
    hidden_sizes: tuple[int, ...] = setting((64, 64), "hidden layer sizes; unused for a single image", low=1)
    buffer_capacity: int = setting(100_000, CAPACITY, low=1)
    batch_size: int = setting(128, "batch size: transitions per gradient step", low=1, atari=32)
    learning_starts: int = setting(1_000, "env steps with uniformly random actions before learning starts", low=0)
    double: bool = setting(True, "double DQN: the online network selects, the target network evaluates", atari=False)
    dueling: bool = setting(False, "dueling network: separate value and advantage streams")
    prioritized: bool = setting(False, "prioritized experience replay (PER): sample transitions by their last TD error")
    exploration_fraction: float = setting(
        0.2, "fraction of training in which epsilon decays", low=0.0, high=1.0, atari=0.1
    )
    final_epsilon: float = setting(0.05, "final value of epsilon", low=0.0, high=1.0)
    eval_epsilon: float = setting(
        0.0, "probability of a random action in evaluation; greedy Atari agents may get stuck", low=0.0, high=1.0
    )
    learning_rate: float = scalar(1e-3, "learning rate of the optimizer", atari=1e-4)
    tau: float = scalar(1.0, "soft update (Polyak) coefficient of the target network; 1: copy the weights", high=1.0)
    utd_ratio: float = scalar(
        0.5, "update-to-data ratio: gradient steps per env step, counted over all environments", atari=0.25
    )
    train_frequency: int = scalar(4, "env steps between updates of utd_ratio * train_frequency gradient steps", low=1)
    target_update_interval: int = scalar(250, "env steps between target network updates", low=1, atari=10_000)
    epsilon: float = scalar(1.0, "probability of a random action (epsilon-greedy)", high=1.0, schedule=exploration)
    priority_exponent: float = scalar(0.6, "PER alpha; 0: uniform sampling", high=1.0, needs=("prioritized", True))
    n_step: int = scalar(3, "n-step returns: rewards summed before bootstrapping", low=1, atari=1)
    beta: float = scalar(
        0.4, "PER beta (importance sampling); 1: unbiased", high=1.0, schedule=annealing, needs=("prioritized", True)
    )
    max_grad_norm: float | None = scalar(10.0, "gradient clipping norm; None: no clipping")


class DQN(ReplayAlgorithm):
    Hyperparameters = DQNHyperparameters
    hp: DQNHyperparameters
    PRIORITY_FLOOR = 1e-6  # so that no transition is lost for good

    def __init__(
        self,
        model: QNetwork,
        spaces: Spaces,
        hp: DQNHyperparameters,
        *,
        rng: np.random.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(spaces, hp, rng=rng, device=device)
        self.model, self.target_model = model.to(self.device), deepcopy(model).to(self.device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = Adam(FlatParameters(self.model.parameters()), eps=1e-8)
        self.target = FlatParameters(self.target_model.parameters())
        self.target_model.requires_grad_(False)
        self.forward = make_forward(self.model.encoder, self.model.head)
        self.network: NumpyMLP | None = None
        if isinstance(self.forward, NumpyForward) and hp.batch_size * max(hp.hidden_sizes, default=1) ** 2 <= SMALL:
            heads = cast(nn.Sequential, self.model.head), cast(nn.Sequential, self.target_model.head)
            self.network, self.target_network = map(NumpyMLP, heads)

    @classmethod
    def build(cls, spaces: Spaces, hp: DQNHyperparameters, *, rng: np.random.Generator, device: torch.device) -> Self:
        model = QNetwork(spaces, hp.hidden_sizes, hp.activation, dueling=hp.dueling)
        return cls(model, spaces, hp, rng=rng, device=device)

    @property
    def prioritized(self) -> bool:  # type: ignore[override]
        return bool(self.hp.prioritized)

    def act(self, obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        """Epsilon-greedy, with a coin for each environment, which also says which action where it falls so."""
        (q,) = self.forward(obs)
        action = q.argmax(-1)
        epsilon = self.hp.epsilon if explore else self.hp.eval_epsilon
        if epsilon > 0:
            coin = rng.random(len(q))
            heads = coin < epsilon
            action[heads] = coin[heads] * (q.shape[-1] / epsilon)
        return Decision(action, memory, {})

    def learn(self, replay: Replay) -> dict[str, list[Tensor]]:
        if self.target_is_due(replay):
            self.move_target()
        return super().learn(replay)

    def move_target(self) -> None:
        self.target.vector.lerp_(self.optimizer.parameters.vector, self.hp.tau)

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        hp = self.hp
        priorities = {"beta": hp.beta, "exponent": hp.priority_exponent} if hp.prioritized else {}
        batch = self.sample(replay, n_step=hp.n_step, **priorities)
        report, error = self.update(batch)
        if self.hp.prioritized:
            replay.set_priorities(batch["index"].numpy(), error.abs().cpu().double().numpy() + self.PRIORITY_FLOOR)
        return report

    def update(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """One gradient step; returns what to report, and the errors Q - target [B]."""
        loss, q, error = self.gradient(batch) if self.network is None else self.gradient_in_numpy(batch)
        norm = clipped_step(self.optimizer, lr=self.hp.learning_rate, max_grad_norm=self.hp.max_grad_norm)
        return {"loss": loss, "q_value": q.mean(), "grad_norm": norm}, error

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Leave the loss's gradient with the optimizer; returns the loss, Q [B] and Q - target [B]."""
        target = self.targets(batch)
        q = self.model(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = huber(q, target, batch.get("weight"))
        backward(self.optimizer, loss)
        return loss.detach(), q.detach(), q.detach() - target

    def gradient_in_numpy(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """`gradient` by hand, for small networks: the slope of Huber's loss is the error, at most one."""
        assert self.network is not None
        arrays = {key: value.numpy() for key, value in batch.items()}
        obs, next_obs, rows = flat(arrays["obs"]), flat(arrays["next_obs"]), np.arange(len(arrays["reward"]))
        next_q = self.target_network(next_obs)
        value = next_q[rows, self.network(next_obs).argmax(1)] if self.hp.double else next_q.max(1)
        q_of_all = self.network(obs)
        q = q_of_all[rows, arrays["action"]]
        error = q - (arrays["reward"] + arrays["discount"] * value)
        slope = error.clip(-1, 1)
        weight = arrays.get("weight", np.float32(1))
        gradient = np.zeros_like(q_of_all)
        gradient[rows, arrays["action"]] = slope * weight / np.float32(len(rows))
        self.network.backward(obs, gradient)
        loss = (slope * (error - 0.5 * slope) * weight).mean()  # e^2 / 2 up to one, |e| - 1/2 beyond
        return torch.as_tensor(loss), torch.from_numpy(q), torch.from_numpy(error)

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """[B] reward + discount * max_a Q'(next_obs, a); double: Q' of the action that is best by Q."""
        next_q = self.target_model(batch["next_obs"])
        if self.hp.double:
            best = self.model(batch["next_obs"]).argmax(1, keepdim=True)
            value = next_q.gather(1, best).squeeze(1)
        else:
            value = next_q.amax(1)
        return cast(Tensor, batch["reward"] + batch["discount"] * value)

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


def huber(q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Half the squared error up to one, linear beyond: the mean over the batch, or of the weighted errors."""
    if weight is None:
        return F.smooth_l1_loss(q, target)
    return (weight * F.smooth_l1_loss(q, target, reduction="none")).mean()
