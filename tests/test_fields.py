"""A step holds what was declared: no entry is dropped, none is missing, and its bytes are known beforehand."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from build import build
from conftest import TINY
from naive_replay import stream
from rl_training import ALGORITHMS
from rl_training.data.fields import fields_of
from rl_training.data.replay import Replay
from rl_training.data.rollout import Rollout
from rl_training.data.state_check import StateMismatch
from rl_training.errors import InputError
from rl_training.runtime import off_policy
from rl_training.types import Field, Spaces, Step

NUM_ENVS = 3


def steps(count: int = 3) -> list[Step]:
    return [{key: np.array(value) for key, value in step.items()} for step in islice(stream(2), count)]


def holders(first: Step | None = None) -> list[Any]:
    """A rollout and a replay, whose fields are those of `first`."""
    fields = fields_of(first or steps(1)[0])
    return [Rollout(8, 2, fields), Replay(8, 2, fields)]


@pytest.mark.parametrize("kind", [0, 1], ids=["rollout", "replay"])
def test_an_extra_that_comes_later_is_an_error(kind: int) -> None:
    first, second, _ = steps()
    holder = holders(first)[kind]
    holder.add(first)
    with pytest.raises(InputError, match="'advice', not declared"):
        holder.add(second | {"advice": np.zeros(2, np.float32)})


@pytest.mark.parametrize("kind", [0, 1], ids=["rollout", "replay"])
def test_an_extra_that_is_missing_is_an_error(kind: int) -> None:
    first, second, _ = steps()
    holder = holders(first)[kind]
    holder.add(first)
    del second["logprob"]
    with pytest.raises(InputError, match="lacks 'logprob'"):
        holder.add(second)


@pytest.mark.parametrize("kind", [0, 1], ids=["rollout", "replay"])
def test_an_entry_missing_from_the_very_first_step_is_an_error(kind: int) -> None:
    first, second, _ = steps()
    holder = holders(first | {"value": np.zeros(2, np.float32)})[kind]
    with pytest.raises(InputError, match="lacks 'value'"):
        holder.add(second)


@pytest.mark.parametrize("kind", [0, 1], ids=["rollout", "replay"])
def test_a_wrong_shape_is_an_error(kind: int) -> None:
    first, second, _ = steps()
    holder = holders(first)[kind]
    with pytest.raises(InputError, match=r"'logprob' has shape \(2, 1\), declared is \(2,\)"):
        holder.add(second | {"logprob": np.zeros((2, 1), np.float32)})


def test_a_saved_replay_of_other_entries_is_an_error() -> None:
    first, *_ = steps()
    replay = Replay(8, 2, fields_of(first))
    replay.add(first)
    other = Replay(8, 2, fields_of(first) | {"value": Field((), np.dtype(np.float32))})
    with pytest.raises(StateMismatch, match=r"replay\.columns\.value is missing"):
        other.load_state_dict(replay.state_dict())


VECTOR, IMAGES = Box(-1, 1, (5,), np.float32), Box(0, 255, (4, 36, 36), np.uint8)
MASKED = Dict({"observation": VECTOR, "action_mask": MultiBinary(3)})
CONTINUOUS = Box(-1, 1, (2,), np.float32)
CASES: dict[str, tuple[str, Spaces, dict[str, Any]]] = {
    "dqn": ("dqn", Spaces(VECTOR, Discrete(3)), {"prioritized": False}),
    "dqn, prioritized, frames": ("dqn", Spaces(IMAGES, Discrete(3), frame_stack=4), {"prioritized": True}),
    "sac": ("sac", Spaces(VECTOR, CONTINUOUS), {}),
    "muzero": ("muzero", Spaces(MASKED, Discrete(3)), {}),
    "muzero, continuous": ("muzero", Spaces(VECTOR, CONTINUOUS), {"num_sampled_actions": 20}),
    "gumbel_muzero, frames": ("gumbel_muzero", Spaces(IMAGES, Discrete(3), frame_stack=4), {}),
}


def run_of(case: str, **changes: Any) -> Any:
    """As much of a run as its replay is made of."""
    algo, spaces, options = CASES[case]
    recipe = ALGORITHMS[algo].recipe
    hp = recipe.hyperparameters(**{**TINY[algo], **options, **changes})
    source = SimpleNamespace(spaces=[spaces], normalizers=[None])
    config, fields = SimpleNamespace(num_envs=NUM_ENVS), [recipe.fields(spaces, hp)]
    return SimpleNamespace(learner=build(algo, spaces, hp), source=source, config=config, fields=fields)


def played(actor: Any) -> Step:
    """One step of random observations, with what `act` says of them."""
    space = actor.spaces.observation
    parts = space.spaces if isinstance(space, Dict) else {"": space}
    arrays = {key: np.stack([part.sample() for _ in range(NUM_ENVS)]) for key, part in parts.items()}
    if "action_mask" in arrays:
        arrays["action_mask"][:] = 1
    obs = arrays if isinstance(space, Dict) else arrays[""]
    decision = actor.act(obs, {}, explore=True, rng=np.random.default_rng(0))
    flags = {key: np.zeros(NUM_ENVS, bool) for key in ("terminated", "truncated")}
    reward = np.zeros(NUM_ENVS, np.float32)
    first = np.ones(NUM_ENVS, bool)
    return {"obs": obs, "next_obs": obs, "first": first, "action": decision.action, "reward": reward} | (
        flags | decision.extras
    )


def allocated(replay: Replay) -> int:
    """Bytes of every array with a row for each place."""
    held = [*replay.columns.values(), replay.valid]
    held += list(replay.obs.values()) if isinstance(replay.obs, dict) else [replay.obs]
    if replay.priorities:
        held += [replay.priorities.tree, replay.priorities.priority]
    return sum(array.nbytes for array in held)


@pytest.mark.parametrize("case", CASES)
def test_the_guard_on_memory_knows_what_will_be_allocated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(case, buffer_capacity=1000)
    replay = off_policy.make_replay(run)
    replay.add(played(run.learner.actor))
    monkeypatch.setattr(off_policy, "usable_bytes", lambda: allocated(replay))
    off_policy.make_replay(run)
    monkeypatch.setattr(off_policy, "usable_bytes", lambda: allocated(replay) - 1)
    with pytest.raises(InputError, match="1,000 steps take"):
        off_policy.make_replay(run)


@pytest.mark.parametrize("algo", ["ppo", "a2c", "trpo"])
@pytest.mark.parametrize("action", [Discrete(3), CONTINUOUS, MultiBinary(2), gym.spaces.MultiDiscrete([2, 3])], ids=str)
def test_what_an_actor_critic_declares_is_what_it_gives(algo: str, action: gym.Space) -> None:
    recipe, spaces = ALGORITHMS[algo].recipe, Spaces(VECTOR, action)
    hp = recipe.hyperparameters()
    fields = recipe.fields(spaces, hp)
    assert fields == fields_of(played(build(algo, spaces, hp).actor))
    assert fields["value"] == Field((), np.dtype(np.float32))
