"""What ScaleZero learns from, against lists and loops in Python; its gradient step against torch's; stages and rest."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from build import build
from rl_training.acting.planning import Planner, plan_by_visits
from rl_training.algorithms.optim import soft_update
from rl_training.algorithms.scalezero import ScaleZeroHyperparameters
from rl_training.data.batch import to_tensors
from rl_training.data.fields import fields_of
from rl_training.data.recurrent import reset_rows
from rl_training.data.replay import Replay
from rl_training.errors import InputError
from rl_training.types import Spaces

TASKS = [Spaces(Box(-3, 3, (3,), np.float32), Discrete(2)), Spaces(Box(-3, 3, (2,), np.float32), Discrete(3))]
NAMES = ["Left-v0", "Right-v0"]
ENVS, LONGEST = 2, 7
SMALL = {
    "hidden_sizes": (6,),
    "width": 8,
    "layers": 2,
    "heads": 2,
    "num_experts": 2,
    "expert_size": 6,
    "adapter_rank": 2,
    "num_adapters": 2,
    "value_limit": 4,
    "reward_limit": 3,
    "unroll_steps": 3,
    "n_step": 2,
    "batch_size": 40,
    "num_simulations": 4,
    "gamma": 0.9,
}


def make(tasks=TASKS, **changes):
    """With noise on every parameter, the target's too: zeros agree with anything."""
    torch.manual_seed(0)
    hp = ScaleZeroHyperparameters(**{**SMALL, **changes})
    learner = build("scalezero", tasks, hp, names=NAMES[: len(tasks)])
    for model in (learner.model, learner.target_model):
        stir(model)
    refresh(learner)
    return learner


def refresh(learner):
    learner.actor.refresh()
    for planner in learner.target_planners:
        planner.refresh()


@torch.no_grad()
def stir(model):
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))


class History:
    """Episodes of one task as lists, and the same in a replay: ended one way or the other, or not yet."""

    def __init__(self, spaces, seed, steps=30):
        self.rng, self.spaces = np.random.default_rng(seed), spaces
        self.episodes = [[self.begin()] for _ in range(ENVS)]
        taken = [self.step() for _ in range(steps)]
        self.replay = Replay(1000, ENVS, fields_of(taken[0]), prioritized=True)
        for step in taken:
            self.replay.add(step)

    def begin(self):
        ending = self.rng.choice(["terminated", "truncated"])
        return {
            "obs": [self.draw()],
            "steps": [],
            "ending": ending,
            "length": self.rng.integers(1, LONGEST),
            "ended": "",
        }

    def draw(self):
        return self.rng.standard_normal(self.spaces.observation.shape).astype(np.float32)

    def step(self):
        rows = []
        for episodes in self.episodes:
            if episodes[-1]["ended"]:
                episodes.append(self.begin())
            episode = episodes[-1]
            actions = int(self.spaces.action.n)
            taken = {
                "action": int(self.rng.integers(actions)),
                "reward": np.float32(self.rng.normal()),
                "policy": self.rng.dirichlet(np.ones(actions)).astype(np.float32),
                "root_value": np.float32(self.rng.normal()),
            }
            episode["steps"].append(taken)
            episode["obs"].append(self.draw())
            last = len(episode["steps"]) == episode["length"]
            episode["ended"] = episode["ending"] if last else ""
            ends = {flag: episode["ended"] == flag for flag in ("terminated", "truncated")}
            first = len(episode["steps"]) == 1
            rows.append({"obs": episode["obs"][-2], "next_obs": episode["obs"][-1], "first": first, **taken, **ends})
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def find(self, place):
        """The episode and the number of the step that stand at a place."""
        obs = self.replay.observations(np.array([place]))[0]
        for episode in (episode for episodes in self.episodes for episode in episodes):
            for t in range(len(episode["steps"])):
                if np.array_equal(episode["obs"][t], obs):
                    return episode, t
        raise AssertionError(place)


def steps_before(learner, episode, t):
    """The observations and actions of the steps before observation t that a policy remembers, oldest first."""
    begin = max(0, t - (learner.hp.context - 1))
    return episode["obs"][begin:t], [taken["action"] for taken in episode["steps"][begin:t]]


def value_of(learner, task, episode, t):
    """The target network's of observation t: the last of a sequence that begins with what is remembered."""
    obs, actions = steps_before(learner, episode, t)
    seen = torch.from_numpy(np.stack([*obs, episode["obs"][t]]))[None]
    model, played = learner.target_model, torch.tensor(actions, dtype=torch.int64)[None]
    with torch.no_grad():
        return float(model.value_support.to_scalar(model.unroll(task, seen, played).value[0, -1]))


def naive_targets(learner, task, episode, t):
    """One entry for each of H + 1 steps: observation, and of what is known policy, value, reward."""
    hp, bootstrap = learner.hp, learner.hp.bootstrap
    length, over = len(episode["steps"]), episode["ended"] == "terminated"
    rows = []
    for s in range(t, t + hp.unroll_steps + 1):
        row = {"obs": episode["obs"][min(s, length)], "policy": None, "value": None, "reward": None}
        if s < length:
            until = min(s + hp.n_step, length)
            value = sum(hp.gamma ** (i - s) * float(episode["steps"][i]["reward"]) for i in range(s, until))
            if until < length and bootstrap == "search":
                value += hp.gamma ** (until - s) * float(episode["steps"][until]["root_value"])
            elif until < length or not over:  # nobody has searched the observation that came last
                value += hp.gamma ** (until - s) * value_of(learner, task, episode, until)
            row |= {"policy": episode["steps"][s]["policy"], "value": value, "reward": episode["steps"][s]["reward"]}
        elif over:
            row |= {"value": 0.0, "reward": 0.0}
        rows.append(row)
    return rows


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize(("n_step", "bootstrap"), [(1, "target"), (2, "target"), (5, "target"), (2, "search")])
def test_targets_are_those_of_the_episodes(task, n_step, bootstrap):
    learner, history = make(n_step=n_step, bootstrap=bootstrap), History(TASKS[task], seed=task)
    index = np.flatnonzero(history.replay.valid)
    batch = learner.targets(task, history.replay, index)
    kinds = set()
    for b, place in enumerate(index):
        episode, t = history.find(place)
        rows = naive_targets(learner, task, episode, t)
        kinds.add((episode["ended"], len(episode["steps"]) - t > learner.hp.unroll_steps))
        played = [taken["action"] for taken in episode["steps"][t : t + learner.hp.unroll_steps]]
        assert batch["action"][b, : len(played)].tolist() == played
        assert (batch["action"][b] < TASKS[task].action.n).all()
        for k, row in enumerate(rows):
            assert np.array_equal(batch["obs"][b, k], row["obs"])
            assert batch["value_mask"][b, k] == (row["value"] is not None)
            assert batch["policy_mask"][b, k] == (row["policy"] is not None)
            if row["value"] is not None:
                assert batch["value"][b, k] == pytest.approx(row["value"], abs=1e-5)
            if row["policy"] is not None:
                assert np.array_equal(batch["policy"][b, k], row["policy"])
            if k < len(rows) - 1:
                assert batch["reward_mask"][b, k] == (row["reward"] is not None)
                assert batch["reward"][b, k] == pytest.approx(row["reward"] or 0.0)
    assert {ended for ended, _ in kinds} == {"terminated", "truncated", ""}


def two_hot(x, limit):
    """MuZero's transform and the two atoms beside it, one number at a time."""
    y = math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 0.001 * x
    y = min(max(y, -limit), limit)
    probs = [0.0] * (2 * limit + 1)
    low = math.floor(y)
    probs[low + limit] += 1 - (y - low)
    if y > low:
        probs[low + limit + 1] += y - low
    return probs


def cross_entropy(probs, logits):
    logits = np.asarray(logits, np.float64)
    log_sum = math.log(sum(math.exp(x) for x in logits))
    return -sum(p * (x - log_sum) for p, x in zip(probs, logits, strict=True))


def naive_losses(learner, task, history, place, action):
    """Of one sequence, cut where nothing is known any more; `action` also says what was drawn beyond the end."""
    hp, (episode, t) = learner.hp, history.find(place)
    rows = naive_targets(learner, task, episode, t)
    seen = sum(row["value"] is not None for row in rows)  # steps of which something is known
    steps = min(seen, hp.unroll_steps)
    obs = torch.from_numpy(np.stack([row["obs"] for row in rows]))
    earlier, played = steps_before(learner, episode, t)
    with torch.no_grad():
        whole = torch.from_numpy(np.stack([*earlier, *obs[: steps + 1].numpy()]))
        said = learner.model.unroll(task, whole[None], torch.tensor([*played, *action[:steps]])[None])
        said = said._make(x[:, len(played) :] for x in said)
        came = learner.target_model.encode(task, obs).double().numpy()
    total = dict.fromkeys(("latent", "policy", "value", "reward"), 0.0)
    for k in range(seen):
        if rows[k]["policy"] is not None:
            total["policy"] += cross_entropy(rows[k]["policy"], said.policy[0, k])
        total["value"] += cross_entropy(two_hot(rows[k]["value"], hp.value_limit), said.value[0, k])
    for k in range(steps):
        total["reward"] += cross_entropy(two_hot(rows[k]["reward"], hp.reward_limit), said.reward[0, k])
        total["latent"] += float(np.mean((said.latent[0, k].double().numpy() - came[k + 1]) ** 2))
    counts = {"policy": hp.unroll_steps + 1, "value": hp.unroll_steps + 1}
    first = learner.model.value_support.to_scalar(said.value[0, 0]).item() - rows[0]["value"]
    return {name: value / counts.get(name, hp.unroll_steps) for name, value in total.items()}, first


def drawn_batches(learner, histories, size=12):
    """Batches with weights of all tasks, and where they come from."""
    rng, batches, places = np.random.default_rng(5), {}, {}
    for task, history in enumerate(histories):
        places[task] = rng.choice(np.flatnonzero(history.replay.valid), size)
        batch = learner.targets(task, history.replay, places[task])
        batches[task] = batch | {"weight": rng.random(size).astype(np.float32)}
    return batches, places


def histories_of(tasks=TASKS):
    return [History(spaces, seed=task) for task, spaces in enumerate(tasks)]


def test_the_loss_is_that_of_one_sequence_after_the_other():
    coefficients = {"latent_coef": 7.0, "policy_coef": 0.9, "value_coef": 0.4, "reward_coef": 1.3}
    learner, histories = make(**coefficients), histories_of()
    learner.scores = [2.0, -1.0]
    object.__setattr__(learner.hp, "rank_exponent", 1.0)
    batches, places = drawn_batches(learner, histories)
    each = {task: [] for task in batches}
    for task, batch in batches.items():
        for b, place in enumerate(places[task]):
            each[task].append(naive_losses(learner, task, histories[task], place, batch["action"][b]))
    expected = {}
    for task, found in each.items():
        totals = [sum(coefficients[f"{name}_coef"] * value for name, value in losses.items()) for losses, _ in found]
        expected[task] = np.mean([w * x for w, x in zip(batches[task]["weight"].tolist(), totals, strict=True)])
    report, errors = learner.update({task: to_tensors(batch, learner.device) for task, batch in batches.items()})
    for task, found in each.items():
        assert float(report[f"loss/{NAMES[task]}"]) == pytest.approx(expected[task], rel=1e-5)
        assert errors[task].tolist() == pytest.approx([error for _, error in found], abs=1e-5)
    assert float(report["loss"]) == pytest.approx((2 * expected[0] + expected[1]) / 3, rel=1e-5)
    for name in ("latent", "policy", "value", "reward"):
        mean = np.mean([np.mean([losses[name] for losses, _ in found]) for found in each.values()])
        assert float(report[f"{name}_loss"]) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(("max_grad_norm", "stage"), [(1e9, 0), (0.5, 0), (0.5, 1)])
def test_a_gradient_step_is_that_of_torch_and_the_target_follows(max_grad_norm, stage):
    """AdamW and its clipping, three times over, of what a stage trains."""
    learner = make(max_grad_norm=max_grad_norm, weight_decay=0.1, learning_rate=0.01, tau=0.3)
    learner.use_stage(stage)
    histories = histories_of()
    twin, target = copy.deepcopy(learner.model), copy.deepcopy(learner.target_model)
    optimizer = torch.optim.AdamW(twin.trainable_parameters(), lr=0.01, weight_decay=0.1, eps=1e-8)
    for _ in range(3):
        batches, _ = drawn_batches(learner, histories)
        tensors = {task: to_tensors(batch, learner.device) for task, batch in batches.items()}
        before, learner.model = learner.model, twin  # the loss itself has been checked above
        optimizer.zero_grad()
        losses = [loss_of(learner, task, batch) for task, batch in tensors.items()]
        learner.model = before
        (sum(losses) / 2).backward()
        torch.nn.utils.clip_grad_norm_(twin.trainable_parameters(), max_grad_norm)
        optimizer.step()
        learner.update(tensors)
        soft_update(learner.target_model, learner.model, learner.hp.tau)
        with torch.no_grad():
            for old, new in zip(target.parameters(), twin.parameters(), strict=True):
                old.mul_(0.7).add_(new, alpha=0.3)
    # A key's bias is no matter to a softmax: its gradient is rounding, which Adam makes into steps.
    felt = {id(p): optimizer.state[p]["exp_avg_sq"].sqrt() > 1e-6 for p in optimizer.state}
    known = [felt.get(id(p), torch.ones_like(p, dtype=torch.bool)) for p in twin.parameters()]
    assert sum(int(where.sum()) for where in known) > 0.9 * learner.num_parameters
    assert_near(learner.model, twin, known)
    assert_near(learner.target_model, target, known)


def loss_of(learner, task, batch):
    losses, _ = learner.losses(task, batch)
    return (batch["weight"] * sum(learner.coefficients()[name] * value for name, value in losses.items())).mean()


def assert_near(model, twin, known):
    for (name, actual), expected, where in zip(model.named_parameters(), twin.parameters(), known, strict=True):
        torch.testing.assert_close(actual[where].detach(), expected[where].detach(), atol=2e-5, rtol=1e-4, msg=name)


def test_priorities_are_the_errors_of_the_values():
    learner, histories = make(priority_exponent=1.0, batch_size=400), histories_of()
    kept = {}
    original = learner.update

    def update(batches):
        report, errors = original(batches)
        kept.update({task: (batches[task], error) for task, error in errors.items()})
        return report, errors

    learner.update = update
    learner.one_step([history.replay for history in histories])
    for task, history in enumerate(histories):
        batch, error = kept[task]
        priorities = history.replay.priorities.priority
        assert priorities[history.replay.valid] == pytest.approx(priorities[priorities > 0])
        assert batch["weight"].max() == 1.0
        # Sets, but to 1e-5: a sequence drawn twice may differ in its last bits by its place in the batch.
        apart = np.abs(priorities[priorities > 0][:, None] - (error.abs().double().numpy() + 1e-6))
        assert max(apart.min(0).max(), apart.min(1).max()) < 1e-5


def inputs_at(learner, replay, place):
    """What a search takes from the places of a replay."""
    return {"obs": replay.observations(place), **learner.history_at(replay, place)}


def roots_at(learner, history, places, model):
    """What a model says of the roots at places, one at a time, from the lists: (policies, values)."""
    policies, values = [], []
    for place in places:
        episode, t = history.find(place)
        obs, actions = steps_before(learner, episode, t)
        seen = torch.from_numpy(np.stack([*obs, episode["obs"][t]]))[None]
        with torch.no_grad():
            said = model.unroll(1, seen, torch.tensor(actions, dtype=torch.int64)[None])
        policies.append(said.policy[0, -1].numpy())
        values.append(float(model.value_support.to_scalar(said.value[0, -1])))
    return np.stack(policies), np.array(values)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_roots_bootstraps_and_training_positions_agree(context):
    """Each sees the same steps before the same observation, wherever in its episode."""
    learner, history = make(context=context), History(TASKS[1], seed=3)
    place = np.flatnonzero(history.replay.valid)
    found = {}
    assert {history.find(p)[1] for p in place} >= set(range(5))
    values = learner.target_values(1, history.replay, place[:12])
    np.testing.assert_allclose(values, roots_at(learner, history, place[:12], learner.target_model)[1], atol=1e-5)
    ours, targets = learner.actor.for_task(1).planner, learner.target_planners[1]
    inputs = inputs_at(learner, history.replay, place)
    for planner, model in ((ours, learner.model), (targets, learner.target_model)):
        root = planner.evaluate_root(**inputs, num_simulations=1, rng=learner.rng)
        policies, found[planner] = roots_at(learner, history, place, model)
        np.testing.assert_allclose(root.logits, policies, atol=1e-5)
        np.testing.assert_allclose(root.value, found[planner], atol=1e-5)
    batch = to_tensors(learner.targets(1, history.replay, place), learner.device)
    with torch.no_grad():
        said = learner.model.unroll(1, batch["obs"], batch["action"], batch.get("history"))
    first = learner.model.value_support.to_scalar(said.value[:, 0]).numpy()
    np.testing.assert_allclose(first, found[ours], atol=1e-5)
    assert np.abs(found[ours] - found[targets]).min() > 1e-4


def test_reanalysed_policies_are_those_of_the_target_network():
    learner = make(reanalyse_ratio=1.0, num_simulations=12, root_exploration_fraction=0.0)
    history = History(TASKS[1], seed=3)
    index = np.flatnonzero(history.replay.valid)
    batch = learner.targets(1, history.replay, index)
    known = batch["policy_mask"].astype(bool)
    place = history.replay.sequences(index, learner.hp.unroll_steps + 1)["place"][known]
    policies = []
    for model, remembers in (
        (learner.target_model, True),
        (learner.model, True),
        (learner.target_model, False),
    ):
        planner = Planner(model.for_task(1), TASKS[1], num_candidates=0)
        numbers = {"temperature": 0.0, "num_simulations": 12, "rng": np.random.default_rng(0)}
        inputs = inputs_at(learner, history.replay, place)
        if not remembers:
            del inputs["history"]
        policies.append(plan_by_visits(planner, hp=learner.hp, **inputs, **numbers).policy)
    alike = [(batch["policy"][known] == policy).all(1).mean() for policy in policies]
    assert alike[0] > 0.98  # rounding may turn a choice between equals
    assert alike[1] < 0.9
    assert alike[2] < 0.9


def steps_of_play(spaces, num_envs, count, seed=0):
    """Observations [count, N, ...], and where episodes begin: env 0 never again, the others now and then."""
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((count, num_envs, *spaces.observation.shape)).astype(np.float32)
    begins = rng.random((count, num_envs)) < 0.3
    begins[:, 0] = False
    return obs, begins


@pytest.mark.parametrize("context", [2, 4])
def test_acting_step_by_step_is_planning_from_the_whole_history(context):
    """Environments that begin an episode forget, each alone; and what is remembered is seen by the weights of now."""
    learner = make(context=context)
    obs, begins = steps_of_play(TASKS[1], 3, 12)
    memory, episodes = {}, [([], []) for _ in range(3)]
    for now, first in zip(obs, begins, strict=True):
        stir(learner.model)
        refresh(learner)
        if memory and first.any():
            memory = reset_rows(memory, first)
        for env in np.flatnonzero(first):
            episodes[env] = ([], [])
        before = copy.deepcopy(memory)
        decision = learner.actor.for_task(1).act(now, memory, explore=False, rng=np.random.default_rng(0))
        assert str(memory) == str(before)  # the caller's stays
        memory = decision.memory
        for env, (seen, played) in enumerate(episodes):
            last = slice(max(0, len(played) - (context - 1)), None)
            history = None
            if played[last]:
                count = len(played[last])
                history = {"obs": np.stack(seen[last])[None], "action": np.array([played[last]])}
                history |= {"length": np.array([count])}
            numbers = {"temperature": 0.0, "num_simulations": 4, "rng": np.random.default_rng(0)}
            alone = learner.actor.for_task(1).plan(now[env : env + 1], history=history, **numbers)
            np.testing.assert_allclose(decision.extras["root_value"][env], alone.value[0], atol=1e-5)
            np.testing.assert_array_equal(decision.extras["policy"][env], alone.policy[0])
            seen.append(now[env])
            played.append(int(decision.action[env]))


def test_the_same_observation_after_other_steps_is_another_plan():
    learner, rng = make(num_simulations=12), np.random.default_rng(0)
    now, memories = rng.standard_normal((60, 2)).astype(np.float32), [{}, {}]
    for _ in range(2):
        for i, memory in enumerate(memories):
            earlier = 3 * rng.standard_normal((60, 2)).astype(np.float32)
            memories[i] = learner.actor.for_task(1).act(earlier, memory, explore=False, rng=rng).memory
    one, other, fresh = (
        learner.actor.for_task(1).act(now, memory, explore=False, rng=rng).extras for memory in (*memories, {})
    )
    for plan in (other, fresh):
        assert np.abs(one["root_value"] - plan["root_value"]).min() > 1e-5
        assert (np.abs(one["policy"] - plan["policy"]).max(1) > 0).mean() > 0.1


def test_memory_of_other_environments_is_an_error():
    learner = make()
    memory = learner.actor.for_task(1).act(np.zeros((2, 2), np.float32), {}, explore=False, rng=learner.rng).memory
    with pytest.raises(InputError, match=r"3 observations, but the memory is that of 2 environments.*reset"):
        learner.actor.for_task(1).act(np.zeros((3, 2), np.float32), memory, explore=False, rng=learner.rng)


@pytest.mark.parametrize(
    ("stage", "since", "solved", "before", "adapters", "over"),
    [
        (0, 99, 4, 0, 2, False),  # the first stage lasts its time, whatever is solved
        (0, 100, 0, 0, 2, False),
        (0, 100, 2, 0, 2, True),  # 2 new, 4 unsolved, 2 adapters left: two for each
        (0, 100, 1, 0, 2, False),
        (0, 150, 0, 0, 2, True),  # or after long enough
        (1, 10, 3, 2, 2, False),  # 1 new, 3 unsolved, 1 left
        (1, 10, 4, 2, 2, True),  # 2 new, 2 unsolved, 1 left
        (1, 149, 2, 2, 2, False),
        (1, 150, 2, 2, 2, True),
        (2, 999, 5, 0, 2, False),  # no adapter is left
        (0, 999, 3, 0, 0, False),
        (0, 100, 2, 0, 3, True),  # 4 unsolved among 3: rounded up
        (0, 100, 1, 0, 3, False),
    ],
)
def test_when_a_stage_is_over(stage, since, solved, before, adapters, over):
    tasks = [TASKS[0]] * 6
    stages = {"num_adapters": adapters, "base_stage_steps": 100, "stage_steps": 150}
    learner = build("scalezero", tasks, ScaleZeroHyperparameters(**{**SMALL, **stages}))
    learner.stage, learner.solved, learner.solved_before = stage, list(range(solved)), before
    learner.gradient_steps, learner.stage_began = 1000 + since, 1000
    assert learner.stage_is_over() is over


def test_a_new_stage_changes_no_answer_and_then_trains_its_adapter_alone():
    learner, histories = make(base_stage_steps=2, stage_steps=2, reanalyse_ratio=1.0), histories_of()
    for model in (learner.model, learner.target_model):
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in ("up1", "up2", "scale_logit"):
                torch.nn.init.zeros_(parameter)  # as they begin
    replays = [history.replay for history in histories]
    for step in range(2):
        assert float(learner.one_step(replays)["stage"]) == 0
        learner.gradient_steps = step + 1
    assert learner.stage_is_over()
    obs = replays[0].observations(np.flatnonzero(replays[0].valid)[:4])
    numbers = {"temperature": 0.0, "num_simulations": 9, "rng": np.random.default_rng(0)}
    before = learner.actor.for_task(0).plan(obs, **numbers)
    weights = copy.deepcopy(learner.model.state_dict())
    learner.next_stage()
    after = learner.actor.for_task(0).plan(obs, **numbers)
    np.testing.assert_allclose(after.value, before.value, atol=1e-6)
    assert np.array_equal(after.visits, before.visits)
    assert int(learner.model.stage) == int(learner.target_model.stage) == learner.stage == 1
    assert not any(parameter.requires_grad for parameter in learner.target_model.parameters())
    assert float(learner.one_step(replays)["stage"]) == 1
    changed = {name for name, value in learner.model.state_dict().items() if not torch.equal(value, weights[name])}
    inside = {name for name in changed if name.startswith("transformer")}
    # The scale of a frozen weight learns at once, A only when its B is no longer zero.
    assert {name.rpartition(".")[2] for name in inside} <= {"down1", "up1", "scale_logit"}
    assert {name.rpartition(".")[2] for name in inside} >= {"up1", "scale_logit"}
    assert {name.split(".")[0] for name in changed} == {"transformer", "encoders", "heads", "task_embedding", "stage"}
    assert (learner.stage_began, learner.solved_before) == (2, 0)
    assert learner.actor.for_task(0).plan(obs, **numbers).value.tolist() != after.value.tolist()


def test_dropout_is_drawn_anew_each_time_and_decided_by_the_seed():
    histories, found = histories_of(), []
    for torch_seed in (1, 2):
        learner = make(adapter_dropout=0.5, learning_rate=0.0)
        learner.use_stage(1)
        batches = {0: to_tensors(drawn_batches(learner, histories)[0][0], learner.device)}
        torch.manual_seed(torch_seed)
        before = torch.random.get_rng_state()
        found.append([float(learner.update(batches)[0]["loss"]) for _ in range(3)])
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_what_a_solved_task_alone_uses_stays_as_it_is():
    target_returns = {"Left-v0": 10.0, "Right-v0": 20.0}
    learner, histories = make(target_returns=target_returns, weight_decay=0.1), histories_of()
    replays = [history.replay for history in histories]
    for _ in range(3):
        learner.one_step(replays)
    learner.note_scores({0: 10.0, 1: 19.9})
    assert [learner.active(task) for task in (0, 1)] == [False, True]
    before = copy.deepcopy(learner.model.state_dict())
    for _ in range(3):
        report = learner.one_step(replays)
    assert float(report["active_tasks"]) == 1
    assert "loss/Left-v0" not in report
    after = learner.model.state_dict()
    for name in (name for name in after if name.startswith(("encoders.0", "heads.0"))):
        assert torch.equal(after[name], before[name]), name
    assert torch.equal(after["task_embedding"][0], before["task_embedding"][0])
    assert not torch.equal(after["task_embedding"][1], before["task_embedding"][1])
    for name in ("heads.1.policy.0.weight", "encoders.1.network.0.weight", "transformer.norm.weight"):
        assert not torch.equal(after[name], before[name])
    learner.note_scores({0: -100.0, 1: 20.0})  # a task that was solved stays so
    assert learner.solved == [0, 1]


def test_without_target_returns_no_task_is_ever_solved():
    learner = make()
    learner.note_scores({0: 1e9, 1: 1e9})
    assert learner.solved == []


@pytest.mark.parametrize(
    ("exponent", "scores", "expected"),
    [
        (0.0, [5.0, -7.0, 3.0], [1 / 3, 1 / 3, 1 / 3]),
        (1.0, [5.0, -7.0, 3.0], [3 / 6, 1 / 6, 2 / 6]),
        (2.0, [5.0, -7.0, 3.0], [9 / 14, 1 / 14, 4 / 14]),
        (1.0, [5.0, None, 3.0], [1 / 3, 1 / 3, 1 / 3]),  # not before all were evaluated
    ],
)
def test_tasks_weigh_by_the_rank_of_their_returns(exponent, scores, expected):
    learner = make([TASKS[0]] * 2 + [TASKS[1]] * 2, rank_exponent=exponent)
    learner.scores = [scores[0], 99.0, *scores[1:]]
    assert learner.task_weights([0, 2, 3]) == pytest.approx(dict(zip((0, 2, 3), expected, strict=True)))


def test_returns_of_no_task_are_an_error():
    with pytest.raises(InputError, match="'Lift-v0' is none of the tasks; did you mean 'Left-v0'"):
        make(target_returns={"Lift-v0": 3.0})


def state_of(learner):
    return learner.actor.state_dict() | learner.state_dict()


def test_planning_takes_its_numbers_from_the_call_and_changes_nothing():
    learner, history = make(), History(TASKS[1], seed=0)
    obs = history.replay.observations(np.arange(5))
    before, hp = copy.deepcopy(state_of(learner)), learner.hp
    actor = learner.actor.for_task(1)
    visits = [
        actor.plan(obs, temperature=1.0, num_simulations=n, rng=np.random.default_rng(0)).visits.sum(1) for n in (3, 11)
    ]
    assert [set(v.tolist()) for v in visits] == [{3}, {11}]
    plans = [
        actor.plan(
            obs,
            temperature=0.0,
            num_simulations=16,
            root_exploration_fraction=fraction,
            rng=np.random.default_rng(seed),
        ).visits
        for fraction, seed in ((0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1))
    ]
    assert np.array_equal(plans[0], plans[1])
    assert not np.array_equal(plans[2], plans[3])
    assert learner.hp is hp
    assert actor.hp is hp
    assert str(before) == str(state_of(learner))


def test_evaluation_searches_as_its_settings_say():
    learner = make(eval_num_simulations=9, eval_temperature=0.0, num_simulations=3)
    seen = []
    actor = learner.actor.for_task(1)
    original = actor.plan
    actor.plan = lambda obs, **numbers: seen.append(numbers) or original(obs, **numbers)
    obs = np.zeros((4, 2), np.float32)
    for explore in (True, False):
        decision = actor.act(obs, {}, explore=explore, rng=np.random.default_rng(0))
        assert decision.extras["policy"].shape == (4, 3)
        assert decision.extras["root_value"].shape == (4,)
    names = ("temperature", "num_simulations", "root_exploration_fraction")
    assert [tuple(numbers[name] for name in names) for numbers in seen] == [(1.0, 3, 0.25), (0.0, 9, 0.0)]
