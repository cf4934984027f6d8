"""IMPALA with memory: sequences that are replayed give what acting stored, and the gradient of single steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training import ALGORITHMS
from rl_training.data.rollout import Rollout
from rl_training.runtime.run import TrainingRun

T, N = 24, 3
RECURRENT = {"recurrent": True, "recurrent_size": 8, "num_steps": T, "learning_rate": 0.0, "max_grad_norm": None}


def one_by_one(learner: Any, rollout: Rollout) -> Tensor:
    """The gradient of a rollout that the current weights acted in, one step of one environment at a time."""
    model, hp, data = learner.model, learner.hp, rollout.batch
    times, envs, after = rollout.ends()
    ends = {(int(t), int(n)): after["obs"][i] for i, (t, n) in enumerate(zip(times, envs, strict=True))}
    loss = torch.zeros(())
    for n in range(N):
        memory = {key: value[n : n + 1] for key, value in rollout.start_memory.items()}
        log_probs, entropies, values, bootstraps = [], [], [], {}
        for t in range(T):
            if data["first"][t, n]:
                memory = {key: torch.zeros_like(value) for key, value in memory.items()}
            logits, value, memory = model.step(data["obs"][t, n : n + 1], memory)
            log_p = torch.log_softmax(logits[0], -1)
            log_probs.append(log_p[int(data["action"][t, n])])
            entropies.append(-(log_p.exp() * log_p).sum())
            values.append(value[0])
            if (t, n) in ends:
                bootstraps[t] = model.step(ends[t, n].unsqueeze(0), memory)[1].item()
        target = 0.0
        for t in reversed(range(T)):
            target = 0.0 if data["terminated"][t, n] else bootstraps.get(t, target)
            target = data["reward"][t, n].item() + hp.gamma * target
            loss = loss - log_probs[t] * (target - values[t].item()) - hp.ent_coef * entropies[t]
            loss = loss + hp.vf_coef * (values[t] - target) ** 2
    learner.optimizers["model"].gradient.zero_()
    (loss / (T * N)).backward()
    return learner.optimizers["model"].gradient.clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("critic_memory", ["separate", "shared", "none"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_gradient_is_that_of_single_steps(cell: str, critic_memory: str, tiny_config: Any) -> None:
    """The second rollout begins within episodes, with the memory of the first, and has ends in it."""
    config = tiny_config("impala", {"num_envs": N}, cell=cell, critic_memory=critic_memory, **RECURRENT)
    with TrainingRun(config, ALGORITHMS["impala"].recipe, progress="silent") as run:
        for _ in range(2):
            rollout = run.source.collect(run.show_steps)
            run.advance(run.source.env_steps)
            metrics = run.learner.update(rollout)
            assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)  # replayed, the actor's log-probabilities
        assert all(value.abs().max() > 0.01 for value in rollout.start_memory.values())
        assert int(rollout.batch["first"][1:].sum()) > 0
        found = run.learner.optimizers["model"].gradient.clone()
        torch.testing.assert_close(found, one_by_one(run.learner, rollout), atol=1e-5, rtol=1e-4)


def test_minibatches_keep_their_memory(tiny_config: Any) -> None:
    """A ratio other than 1 would show a sequence with the memory or the resets of another."""
    config = tiny_config("impala", {"num_envs": N}, num_minibatches=N, **RECURRENT)
    with TrainingRun(config, ALGORITHMS["impala"].recipe, progress="silent") as run:
        for _ in range(2):
            metrics = run.learner.update(run.source.collect(run.show_steps))
            assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
