"""DreamerV3: a policy trained in the imagination of a learned world model (Hafner et al., Nature 2025).

The losses are in dreamer_losses.py. Where this leaves the published code:

- Stored latents are float16, which is finer, and not bfloat16. Actors compute in float32.
- Actors have the newest weights. The published ones run beside the learner, and are about one update late.
- Evaluation takes the most likely action, as that of the other algorithms does, unless `deterministic_eval` is False.
- A step is an action. The published code also counts the first observation of each episode.
- Learning begins after `learning_starts` steps, with the first complete window. The published code waits for as many
  windows as a batch has steps, and then takes a gradient step at once.
- The default size is 12m and not 200m, with a smaller replay and a train ratio of 512, as for the published curves of
  control tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.dreamer import DreamerActor
from rl_training.acting.paths import make_dreamer_path, make_gradient
from rl_training.algorithms.base import scalar, scalar_names, setting
from rl_training.algorithms.dreamer_losses import (
    Losses,
    Noise,
    behaviour_losses,
    critic_values,
    draw_noise,
    imagine,
    observe,
    replay_value_loss,
    world_model_losses,
)
from rl_training.algorithms.laprop import LaProp
from rl_training.algorithms.optim import backward, soft_update
from rl_training.algorithms.replay_based import CAPACITY, ReplayLearner
from rl_training.data.batch import tree_map, upload
from rl_training.data.replay import Replay
from rl_training.data.windows import NewWindows, draw_new_first
from rl_training.errors import InputError
from rl_training.models.rssm import Latent
from rl_training.ops.imagined_returns import PercentileScale, lambda_returns
from rl_training.types import Array, Batch, State

LATENT = ("deter", "stoch")  # columns of the replay
MICRO = 10**6  # the train ratio is counted in millionths of a replayed step, so that no fraction is lost


@dataclass(frozen=True)
class DreamerHyperparameters:
    size: Literal["1m", "12m", "25m", "50m", "100m", "200m", "400m"] = setting(
        "12m", "size of all networks: approximate number of parameters"
    )
    deter: int | None = setting(None, "size of the GRU's state, a multiple of 8; None: that of `size`", low=8)
    hidden: int | None = setting(None, "units of layers within the dynamics; None: that of `size`", low=1)
    classes: int | None = setting(None, "classes of each of the 32 latents; None: that of `size`", low=2, high=256)
    units: int | None = setting(None, "units of encoder, decoder and heads; None: that of `size`", low=1)
    depth: int | None = setting(None, "unit of the convolutions' channels, an even number; None: that of `size`", low=2)
    buffer_capacity: int = setting(1_000_000, CAPACITY, low=1)
    batch_size: int = setting(16, "batch size: sequences per gradient step", low=1)
    batch_length: int = setting(64, "steps of a sequence; a step before it gives the latent it begins with", low=2)
    learning_starts: int = setting(1_024, "env steps collected, with the policy, before learning starts", low=0)
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "type of matrix products in training; auto: bfloat16 on a GPU and on a CPU with instructions for it",
    )
    deterministic_eval: bool = setting(True, "evaluate with the most likely action; False: sample from the policy")
    train_ratio: float = scalar(512.0, "replayed steps per env step, counted over all environments")
    learning_rate: float = scalar(4e-5, "learning rate of the optimizer")
    warmup_updates: int = scalar(1_000, "gradient steps in which the learning rate rises from 0", low=0)
    agc: float = scalar(
        0.3, "adaptive gradient clipping: largest norm of a tensor's gradient, as a fraction of the tensor's norm"
    )
    horizon: float = scalar(333.0, "discount horizon in steps: the discount factor is 1 - 1 / horizon", low=1.0)
    gae_lambda: float = scalar(0.95, "lambda of the returns, as in GAE; 1: only the last state's value", high=1.0)
    imagination_length: int = scalar(15, "steps imagined from each replayed step", low=1)
    ent_coef: float = scalar(3e-4, "entropy bonus coefficient")
    free_nats: float = scalar(1.0, "KL divergence per step that is not penalised, in nats")
    dynamics_coef: float = scalar(1.0, "coefficient of the KL divergence that trains the prior")
    representation_coef: float = scalar(0.1, "coefficient of the KL divergence that trains the posterior")
    reconstruction_coef: float = scalar(1.0, "coefficient of the observations' prediction loss")
    reward_coef: float = scalar(1.0, "coefficient of the rewards' prediction loss")
    continuation_coef: float = scalar(1.0, "coefficient of the prediction loss of whether an episode goes on")
    policy_coef: float = scalar(1.0, "policy loss coefficient")
    value_coef: float = scalar(1.0, "coefficient of the value loss in imagination")
    replay_value_coef: float = scalar(0.3, "coefficient of the value loss on replayed steps")
    slow_value_coef: float = scalar(1.0, "part of both value losses that holds values near those of the slow critic")
    tau: float = scalar(0.02, "soft update (Polyak) coefficient of the slow critic, each gradient step", high=1.0)
    return_rate: float = scalar(0.01, "rate of the moving averages of the returns' percentiles", high=1.0)
    return_limit: float = scalar(1.0, "smallest number that advantages are divided by", low=1e-8)

    @property
    def gamma(self) -> float:
        return 1 - 1 / self.horizon


LOSSES = (
    "dynamics", "representation", "reconstruction", "reward", "continuation", "policy", "value", "replay_value"
)  # fmt: skip
BEFORE = ("train_ratio", "warmup_updates", "imagination_length")  # read before a gradient step: how many, how long
NUMBERS = tuple(name for name in scalar_names(DreamerHyperparameters) if name not in BEFORE)


class Dreamer(ReplayLearner[Replay]):
    Hyperparameters = DreamerHyperparameters
    hp: DreamerHyperparameters
    actor: DreamerActor
    device_columns = LATENT

    def __init__(self, actor: DreamerActor, hp: DreamerHyperparameters, *, rng: np.random.Generator) -> None:
        super().__init__(actor, hp, rng=rng)
        self.model = actor.model
        self.path = make_dreamer_path(self.model, hp.precision, self.device, rows=hp.batch_size)
        self.optimizers = {"model": LaProp(actor.parameters)}
        self.return_scale = PercentileScale(device=self.device)
        self.credit = 0  # replayed steps that are due, in millionths
        self.new_windows: NewWindows | None = None  # made for the first replay
        self.generator = torch.Generator(self.device)
        self.fast_step = make_gradient(self.gradient_step, self.device)

    def learn(self, replay: Replay) -> dict[str, list[Tensor]]:
        if self.new_windows is None:
            self.new_windows = self.make_windows(replay)
        if not self.new_windows.any_complete(replay.ring):
            self.env_steps_used = replay.added
        return super().learn(replay)

    def make_windows(self, replay: Replay) -> NewWindows:
        length = self.hp.batch_length + 1
        if replay.ring.rows < length:
            raise InputError(
                f"buffer_capacity: a sequence takes {length:,} rows (batch_length + 1), and the replay keeps "
                f"{replay.ring.rows:,} for each of {replay.num_envs:,} environments: raise it, or lower batch_length"
            )
        return NewWindows(replay.num_envs, length)

    def steps_due(self, added: int) -> int:
        """Gradient steps to take after `added` env steps: `train_ratio` replayed steps for each, without rounding."""
        hp = self.hp
        new = self.new_steps(added)
        self.env_steps_used = added
        self.credit += new * round(hp.train_ratio * MICRO)
        due, self.credit = divmod(self.credit, hp.batch_size * hp.batch_length * MICRO)
        return due

    def one_step(self, replay: Replay) -> dict[str, Tensor]:
        """One gradient step. The latents of its rows replace those in the replay."""
        assert self.new_windows is not None
        place = draw_new_first(replay, self.new_windows, self.hp.batch_size, self.rng)
        batch = upload(sequences(replay, place), self.device)
        batch["action"] = self.model.policy.vector(batch["action"]).flatten(2)
        batch["stoch"] = F.one_hot(batch["stoch"].long(), self.model.size.classes).float()
        batch["deter"] = batch["deter"].float()
        report, latent = self.update(batch, self.noise(batch))
        replay.put(place[:, 1:], **stored(latent))
        return report

    def noise(self, batch: Batch) -> Noise:
        self.generator.manual_seed(int(self.rng.integers(2**63)))  # so that only `rng` has a state to save
        return draw_noise(self.model, batch, int(self.hp.imagination_length), self.generator, self.device)

    def update(self, batch: Batch, noise: Noise) -> tuple[dict[str, Tensor], Latent]:
        """Take one gradient step. Returns (metrics, the latents of the batch)."""
        report = self.fast_step({"batch": batch, "noise": noise._asdict(), "numbers": self.numbers()})
        return report, Latent(*(report.pop(name) for name in Latent._fields))

    def numbers(self) -> Tensor:
        """[K] the hyperparameters that a gradient step reads, with the learning rate as it is in the warm-up."""
        hp = replace(self.hp, learning_rate=self.hp.learning_rate * self.warmup())
        values: Tensor = upload(torch.tensor([getattr(hp, name) for name in NUMBERS]), self.device)
        return values

    def gradient_step(self, inputs: Batch) -> dict[str, Tensor]:
        """`update` as a function of tensors, which a GPU captures. The metrics hold the latents as well."""
        numbers: dict[str, Any] = dict(zip(NUMBERS, inputs["numbers"].unbind(), strict=True))
        hp, optimizer = replace(self.hp, **numbers), self.optimizers["model"]
        report, latent = self.gradient(inputs["batch"], Noise(**inputs["noise"]), hp)
        assert isinstance(optimizer, LaProp)
        optimizer.clip = hp.agc
        optimizer.step(hp.learning_rate)
        soft_update(self.model.slow_value, self.model.value, hp.tau)
        return report | latent._asdict()

    def warmup(self) -> float:
        """The factor of the learning rate: the first gradient step changes nothing but the optimizer's averages."""
        steps = self.hp.warmup_updates
        return min(1.0, self.gradient_steps / steps) if steps else 1.0

    def gradient(
        self, batch: Batch, noise: Noise, hp: DreamerHyperparameters | None = None
    ) -> tuple[dict[str, Tensor], Latent]:
        """Write the gradient of the loss. Returns (metrics, the latents of the batch). hp: None is those in force."""
        hp = hp or self.hp
        with self.path.settings():
            with self.path.products():
                losses, metrics, latent = self.losses(batch, noise, hp)
            means = {name: value.mean() for name, value in losses.items()}
            loss = torch.stack([getattr(hp, f"{name}_coef") * means[name] for name in LOSSES]).sum()
            backward(self.optimizers["model"], loss)
        norm = torch.linalg.vector_norm(self.optimizers["model"].gradient)
        report = (
            {"loss": loss} | {f"{name}_loss": value for name, value in means.items()} | metrics | {"grad_norm": norm}
        )
        return {name: value.detach() for name, value in report.items()}, latent.detached()

    def losses(
        self, batch: Batch, noise: Noise, hp: DreamerHyperparameters | None = None
    ) -> tuple[Losses, dict[str, Tensor], Latent]:
        """(losses by name, metrics, latents [T, B, ...]). Also takes the returns into their running percentiles."""
        hp, model = hp or self.hp, self.model
        latent, posterior = observe(self.path, batch, noise.posterior)
        world = world_model_losses(model, batch, latent, posterior, free_nats=hp.free_nats, gamma=hp.gamma)

        dream = imagine(self.path, Latent(*(x.flatten(0, 1) for x in latent.detached())), noise)
        logits = model.value(dream.features[:-1])
        value = critic_values(model, dream, logits)
        returns = lambda_returns(dream.reward, dream.discount, value, hp.gae_lambda)
        self.return_scale.rate, self.return_scale.limit = hp.return_rate, hp.return_limit
        scale = self.return_scale.update(returns)
        behaviour, metrics = behaviour_losses(
            model, dream, logits, value[:-1], returns, scale, ent_coef=hp.ent_coef, slow_coef=hp.slow_value_coef
        )

        bootstrap = returns[0].view_as(batch["reward"])
        discounting = {"gamma": hp.gamma, "lam": hp.gae_lambda, "slow_coef": hp.slow_value_coef}
        replay_value = replay_value_loss(model, batch, latent, bootstrap, **discounting)
        return world | behaviour | {"replay_value": replay_value}, metrics | {"return_scale": scale}, latent

    def state_dict(self) -> State:
        windows = None if self.new_windows is None else self.new_windows.state_dict()
        own = {"credit": self.credit, "return_scale": self.return_scale.state_dict(), "new_windows": windows}
        return super().state_dict() | own

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.credit = state["credit"]
        self.return_scale.load_state_dict(state["return_scale"])
        if state["new_windows"] is not None:
            self.new_windows = NewWindows.of(state["new_windows"], self.hp.batch_length + 1)


def sequences(replay: Replay, place: Array) -> Batch:
    """The rows at places [B, T + 1] as a batch of sequences of T: see dreamer_losses.py.

    Actions and latents are as stored. The row before a sequence gives what led to its first row.
    """
    rows = replay.rows(place, without=(*LATENT, "truncated"))
    before, now = slice(None, -1), slice(1, None)
    batch = {name: rows[name][:, before] for name in ("action", "reward", "terminated")}
    batch |= {"obs": tree_map(lambda x: x[:, now], rows["obs"]), "first": rows["first"][:, now]}
    batch["last"] = ~rows["step"][:, now]
    time_first: Batch = tree_map(lambda x: x.swapaxes(0, 1), batch)
    return time_first | {name: replay.entries(name, place[:, 0]) for name in LATENT}


def stored(latent: Latent) -> dict[str, Tensor]:
    """Latents [T, B, ...] as the replay stores them, [B, T, ...]."""
    return {"deter": latent.deter.half().transpose(0, 1), "stoch": latent.stoch.argmax(-1).byte().transpose(0, 1)}
