"""The targets of planning algorithms, from sequences of a replay (MuZero, arXiv:1911.08265)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import gymnasium as gym
import numpy as np

from rl_training.acting.planning import Plan, signed_discount
from rl_training.data.replay import Replay
from rl_training.types import Array, Spaces


def sequence_targets(
    replay: Replay,
    index: Array,
    hp: Any,
    *,
    n: int | Array,
    spaces: Spaces,
    values_at: Callable[[Array], Array],
    plan_at: Callable[[Array], Plan],
    rng: np.random.Generator,
) -> tuple[dict[str, Any], dict[str, Array]]:
    """(targets for K + 1 steps of the sequences that begin at places [B], the sequences).

    The targets are action [B, K, ...], reward [B, K], value and policy [B, K + 1, ...], and their masks. After the end
    of an episode only the reward, 0, is known. n: of the n-step values, one number or [B]. values_at, plan_at: values
    and searches of the target network for the observations at places [M].
    """
    count = hp.unroll_steps + 1
    sequence = replay.sequences(index, count + hp.n_step)
    steps, terminated, place = sequence["steps"], sequence["terminated"], sequence["place"]
    known = np.arange(count) < steps[:, None]
    discount = signed_discount(hp.gamma, spaces.num_players == 2)
    value = value_targets(sequence, n, count, discount, values_at, only_values=hp.bootstrap == "target")
    stored: tuple[str, ...] = ("policy", "candidates")
    policy = {name: sequence[name][:, :count] for name in stored if name in sequence}
    # Their number hardly varies: on a GPU each batch size of a search has its own graph.
    renewed = rng.permutation(len(index))[: int(hp.reanalyse_ratio * len(index) + rng.random())]
    if len(renewed):
        renew_policies(policy, place[:, :count], known, renewed, plan_at)
    over = terminated[:, None] & ~known
    known_reward = known[:, :-1]
    targets = policy | {
        "action": with_random_actions(sequence["action"][:, : count - 1], known_reward, spaces.action, rng),
        "reward": np.where(known_reward, sequence["reward"][:, : count - 1], np.float32(0)),
        "value": np.where(known, value, np.float32(0)),
        "policy_mask": known.astype(np.float32),
        "value_mask": (known | over).astype(np.float32),
        "reward_mask": (known | over)[:, :-1].astype(np.float32),
    }
    return targets, sequence


def value_targets(
    sequence: dict[str, Array],
    n: int | Array,
    count: int,
    discount: float,
    values_at: Callable[[Array], Array],
    *,
    only_values: bool,
) -> Array:
    """[B, count] Sums of up to n rewards, and the discounted value of the state after them.

    The state after a terminated episode has value 0. Otherwise the row after the last known step holds the next
    observation, whether the episode was truncated or still runs. There was no search from it: its value is the target
    network's. With `only_values` all values are, else the other ones are those of the searches.
    """
    steps, terminated = sequence["steps"][:, None], sequence["terminated"][:, None]
    after = bootstrap_after(sequence["steps"], n, count)
    rows, at = np.arange(len(after))[:, None], np.arange(count) + after
    beyond = at >= steps
    value = sequence["root_value"][rows, at]
    if only_values or (beyond & ~terminated).any():
        # For all states, even if searches replace most: on a GPU each batch size has its own graph.
        place = sequence["place"][rows, at]
        predicted = values_at(place.reshape(-1)).reshape(place.shape)
        value = predicted if only_values else np.where(beyond, predicted, value)
    bootstrap = np.where(beyond & terminated, np.float32(0), np.float32(discount) ** after * value)
    return cast(Array, (n_step_sum(sequence["reward"], after, discount) + bootstrap).astype(np.float32))


def bootstrap_after(steps: Array, n: int | Array, count: int) -> Array:
    """[B, count] The number of rewards in the n-step targets of the first `count` steps of sequences.

    The sequences have steps [B] known rewards. Where fewer than n are left, the target sums these and bootstraps from
    the state after the last step.
    """
    left = steps[:, None] - np.arange(count)
    return cast(Array, np.clip(np.minimum(left, np.asarray(n).reshape(-1, 1)), 0, None))


def n_step_sum(reward: Array, after: Array, discount: float) -> Array:
    """[B, count] Sums over i < after[b, k] of discount^i reward[b, k + i], for rewards [B, L].

    The discount is negative where two players alternate.
    """
    total = np.zeros(after.shape, np.float32)
    for i in range(int(after.max())):
        total += np.where(i < after, np.float32(discount**i) * reward[:, i : i + after.shape[1]], np.float32(0))
    return total


def renew_policies(
    policy: dict[str, Array], place: Array, known: Array, renewed: Array, plan_at: Callable[[Array], Plan]
) -> None:
    """Replace the policies of sequences number `renewed` by those of new searches, at all known steps [B, K + 1].

    The replay keeps the policies of acting: with renewed ones stored, results on CartPole were worse.
    """
    known = known[renewed]
    place = np.where(known, place[renewed], place[renewed, :1])  # unknown steps are searched too, and not used
    plan = plan_at(place.reshape(-1))
    rows, steps = renewed[np.nonzero(known)[0]], np.nonzero(known)[1]
    policy["policy"][rows, steps] = plan.policy.reshape(*known.shape, -1)[known]
    if plan.candidates is not None:
        policy["candidates"][rows, steps] = plan.candidates.reshape(*known.shape, *plan.candidates.shape[1:])[known]


def with_random_actions(action: Array, known: Array, space: gym.Space, rng: np.random.Generator) -> Array:
    """[B, K, ...] The stored actions, and random ones after the end, where the model must learn to ignore them."""
    if isinstance(space, gym.spaces.Discrete):
        return np.where(known, action, rng.integers(space.n, size=action.shape))
    random = rng.uniform(-1, 1, action.shape).astype(np.float32)
    return np.where(known.reshape(*known.shape, *[1] * (action.ndim - 2)), action, random)
