"""Exported policies: what a file decides is what the policy decides, with nothing of this package at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.functional import one_hot

import rl_training.runtime.exporting as exporting
from conftest import ENVS
from rl_training import ALGORITHMS, export_policy, load_policy, train
from rl_training.acting import exportable, policy_graph
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.checkpoints import open_checkpoint, save_checkpoint
from test_cli import cli

onnxruntime = pytest.importorskip("onnxruntime")
ALGOS = sorted(ALGORITHMS)
PLANNERS = {"muzero", "gumbel_muzero", "efficientzero", "scalezero"}

OBSERVATIONS = {
    "vector": spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
    "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "stack": spaces.Box(0, 255, (2, 36, 36), np.uint8),
    "number": spaces.Discrete(5, start=-2),
    "numbers": spaces.MultiDiscrete([3, 4], start=[1, 2]),
    "bits": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (36, 36, 1), np.uint8),
            "parts": spaces.Tuple((spaces.Discrete(4, start=3), spaces.Box(-50, 50, (2,), np.float64))),
            "small": spaces.Box(0, 255, (2,), np.uint8),
        }
    ),
    "board": spaces.Dict({"board": spaces.Box(0, 1, (2, 3, 3), np.float32), "action_mask": spaces.MultiBinary(4)}),
}
ACTIONS = {
    "choice": spaces.Discrete(4),
    "shifted": spaces.Discrete(4, start=-3),
    "choices": spaces.MultiDiscrete([2, 3, 4], start=[0, 1, -1]),
    "bits": spaces.MultiBinary([2, 2]),
    "box": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([1.0, 30.0], np.float32)),
    "plane": spaces.Box(-0.01, 0.01, (2, 2), np.float64),
}


class AnySpaces(gym.Env):
    """Random observations of a space, 30 to an episode."""

    def __init__(self, sees: str = "vector", acts: str = "choice") -> None:
        self.observation_space, self.action_space = OBSERVATIONS[sees], ACTIONS[acts]

    def _obs(self) -> Any:
        return drawn(self.observation_space, self.np_random)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._obs(), float(np.sum(action)), self.t == 30, False, {}


def drawn(space: gym.Space, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        obs = {key: drawn(part, rng) for key, part in space.spaces.items()}
        if "action_mask" in obs:
            obs["action_mask"][rng.integers(4)] = 1
        return obs
    if isinstance(space, spaces.Tuple):
        return tuple(drawn(part, rng) for part in space.spaces)
    if isinstance(space, spaces.Box) and not space.is_bounded():
        return 5 + 3 * rng.standard_normal(space.shape)
    space.seed(int(rng.integers(1 << 30)))
    sample = space.sample()
    return (sample * rng.random()).astype(np.uint8) if getattr(sample, "dtype", None) == np.uint8 else sample


if "AnySpacesForTests-v0" not in gym.registry:
    gym.register("AnySpacesForTests-v0", AnySpaces)


RUNS: dict[Any, Any] = {}
# Norms and blocks of weights leave less of what is added; gates make more of it, and of rounding.
SHAKEN = {"dreamer": 6.0, "recurrent_ppo": 0.7}


def run_of(tiny_config, algo, config=None, **kwargs):
    """A checkpoint with larger random weights than a short training gives: its actions differ from state to state."""
    key = algo, json.dumps([config, kwargs])
    if key not in RUNS:
        made = tiny_config(algo, {"total_timesteps": 64, "eval_episodes": 1} | (config or {}), **kwargs)
        run_dir = train(made, progress="silent").run_dir
        checkpoint = open_checkpoint(run_dir)
        rng = np.random.default_rng(0)
        for name, weight in checkpoint.state["actor"]["model"].items():
            if weight.is_floating_point() and "running" not in name:
                scale = SHAKEN.get(algo, 1.5) / np.sqrt(max(1, weight[0].numel() if weight.ndim > 1 else 4))
                weight += torch.from_numpy(scale * rng.standard_normal(tuple(weight.shape))).to(weight.dtype)
        path = run_dir / "shaken" / "step_64"
        RUNS[key] = save_checkpoint(path, state=checkpoint.state, config=checkpoint.config, info=checkpoint.info)
    return RUNS[key]


def flat(obs: Any, prefix: str = "obs") -> dict[str, Any]:
    """The inputs of a file, as its reader would name them by the environment's space."""
    if isinstance(obs, dict | tuple):
        items = obs.items() if isinstance(obs, dict) else enumerate(obs)
        return {name: x for key, part in items for name, x in flat(part, f"{prefix}.{key}").items()}
    return {prefix: np.asarray(obs)}


def stacked(observations: list[Any]) -> Any:
    first = observations[0]
    if isinstance(first, dict):
        return {key: stacked([obs[key] for obs in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([obs[i] for obs in observations]) for i in range(len(first)))
    return np.stack(observations)


DTYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64, "tensor(int8)": np.int8}


class File:
    """An ONNX file, called as its metadata say."""

    def __init__(self, path: Any) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = {x.name: x for x in self.session.get_inputs()}
        self.outputs = [x.name for x in self.session.get_outputs()]
        self.memory: dict[str, np.ndarray] = {}

    def __call__(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = len(next(iter(obs.values())))
        given = dict(obs)
        for name in self.inputs.keys() - obs.keys():
            given[name] = self.memory.get(name, np.zeros((rows, *self.inputs[name].shape[1:]), np.float32))
        given = {name: x.astype(DTYPES[self.inputs[name].type]) for name, x in given.items()}
        assert given.keys() == self.inputs.keys()
        found = dict(zip(self.outputs, self.session.run(None, given), strict=True))
        self.memory = {name.removeprefix("next_"): x for name, x in found.items() if name.startswith("next_memory.")}
        return found


def expected_actions(algo: str, checkpoint: Any, observations: list[Any]) -> list[np.ndarray]:
    """Those of `load_policy`; of a planner those of the root of its search, before any simulation."""
    policy = load_policy(checkpoint)
    policy.actor.hp = deterministic(policy.actor.hp)
    if algo == "dreamer":  # the most probable latents in place of samples
        policy.actor.model.dynamics.sample = lambda logits, noise: one_hot(logits.argmax(-1), logits.shape[-1]).float()
    if algo not in PLANNERS:
        return [policy.act(obs) for obs in observations]
    assert algo != "scalezero"
    actions = []
    for obs in observations:
        batch, _ = policy._batch(obs)
        root = policy.actor.planner.evaluate_root(batch, num_simulations=0, rng=np.random.default_rng(0))
        if policy.actor.planner.action_shape is None:
            legal = np.ones_like(root.logits, bool) if root.legal is None else root.legal
            actions.append(policy.to_env(np.where(legal, root.logits, -1e9).argmax(1)))
        else:
            size = root.candidates.shape[-1]
            mean = policy.actor.planner.inference.initial(batch, 0)[:, :size].reshape(
                -1, *policy.actor.spaces.action.shape
            )
            actions.append(policy.to_env(np.tanh(mean).clip(-0.999, 0.999)))
    return actions


def deterministic(hp: Any) -> Any:
    values = {"deterministic_eval": True, "eval_epsilon": 0.0}
    return type(hp)(**(vars(hp) | {name: value for name, value in values.items() if hasattr(hp, name)}))


def env_observations(space: gym.Space, steps: int, rows: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [stacked([drawn(space, rng) for _ in range(rows)]) for _ in range(steps)]


CASES = [
    ("ppo", "vector", "shifted", {}),
    ("ppo", "image", "box", {}),
    ("ppo", "number", "choices", {}),
    ("ppo", "bits", "bits", {}),
    ("a2c", "dict", "plane", {}),
    ("ppg", "image", "choice", {"architecture": "dual"}),
    ("recurrent_ppo", "dict", "choices", {"cell": "gru"}),
    ("recurrent_ppo", "vector", "box", {"cell": "lstm", "critic_memory": "none"}),
    ("dqn", "dict", "shifted", {"dueling": True}),
    ("dqn", "stack", "choice", {"eval_epsilon": 0.5}),
    ("sac", "dict", "plane", {}),
    ("sac", "vector", "box", {"deterministic_eval": False}),
    ("muzero", "board", "choice", {}),
    ("muzero", "stack", "shifted", {}),
    ("muzero", "numbers", "plane", {}),
    ("dreamer", "dict", "choices", {}),
    ("dreamer", "stack", "box", {}),
]


@pytest.mark.parametrize(("algo", "sees", "acts", "kwargs"), CASES)
def test_a_file_decides_as_the_policy_in_every_space(algo, sees, acts, kwargs, tiny_config, tmp_path):
    wrappers = {"normalize_observation": True}
    config = {"env_id": "AnySpacesForTests-v0", "env_kwargs": {"sees": sees, "acts": acts, "wrappers": wrappers}}
    checkpoint = run_of(tiny_config, algo, config, **kwargs)
    exported = export_policy(checkpoint, onnx=tmp_path / "policy.onnx")
    assert exported.difference <= 1e-5
    observations = env_observations(OBSERVATIONS[sees], steps=4, rows=16)
    file = File(tmp_path / "policy.onnx")
    outputs = [file(flat(obs)) for obs in observations]
    found, scores = ([output[name] for output in outputs] for name in ("action", "scores"))
    expected = expected_actions(algo, checkpoint, observations)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert all(ACTIONS[acts].contains(action) for action in one)
    assert np.std(np.concatenate(scores), 0).min() > 1e-2, "the same decision in every state would prove nothing"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """For each algorithm an exported file, with the observations and actions of its policy beside it."""
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("algo", ALGOS)
def test_every_algorithm_is_exported(algo, tiny_config, files):
    checkpoint = run_of(tiny_config, algo, {"env_kwargs": {"wrappers": {"normalize_observation": True}}})
    exported = export_policy(checkpoint, onnx=files / f"{algo}.onnx", pt2=files / f"{algo}.pt2")
    assert exported.difference <= 1e-5
    assert exported.compared == 256
    assert bool(exported.leaves_out) == (algo in PLANNERS | {"dreamer"})
    assert ("memory." in str(exported.inputs)) == (algo in ("recurrent_ppo", "scalezero", "dreamer"))
    env = gym.make(ENVS[algo])
    rng = np.random.default_rng(3)
    observations = rng.standard_normal((6, 8, *env.observation_space.shape)).astype(np.float32)
    if algo == "scalezero":
        actions = [act_by_prior_of_scalezero(checkpoint, observations[: t + 1]) for t in range(6)]
    else:
        actions = expected_actions(algo, checkpoint, list(observations))
    np.savez(files / f"{algo}.npz", observations=observations, actions=np.stack(actions))
    program = torch.export.load(files / f"{algo}.pt2").module()
    file = File(files / f"{algo}.onnx")
    memory = {name: np.zeros((8, *x.shape[1:]), DTYPES[x.type]) for name, x in file.inputs.items() if name != "obs"}
    for obs, expected in zip(observations, actions, strict=True):
        inputs = {"obs": torch.from_numpy(obs), **{name: torch.from_numpy(x) for name, x in memory.items()}}
        found = {name: x.detach().numpy() for name, x in program(inputs).items()}
        np.testing.assert_allclose(found["action"], expected, rtol=1e-5, atol=1e-5)
        memory = {name: found[f"next_{name}"] for name in memory}


def act_by_prior_of_scalezero(checkpoint: Any, observations: np.ndarray) -> np.ndarray:
    """The prior's actions after a sequence of observations [T, N, ...], each step from the whole sequence before it."""
    actor = load_policy(checkpoint).actor
    model, count = actor.owner.model.for_task(0), actor.history_length
    seen, chosen = [], []
    for obs in torch.from_numpy(observations):
        past, acts = seen[-count:], chosen[-count:]
        padding = count - len(past)
        history = {
            "obs": torch.stack([torch.zeros_like(obs)] * padding + past, 1),
            "action": torch.stack([torch.zeros(len(obs), dtype=torch.int64)] * padding + acts, 1),
            "length": torch.full((len(obs),), len(past)),
        }
        with torch.no_grad():
            chosen.append(model.predict(model.recall(obs, history))[0].argmax(1))
        seen.append(obs)
    return chosen[-1].numpy()


READER = """
import sys
sys.modules.update({name: None for name in ("rl_training", "torch", "gymnasium")})  # importing them is an error
import json, numpy as np, onnxruntime
for name in sys.argv[2:]:
    session = onnxruntime.InferenceSession(f"{sys.argv[1]}/{name}.onnx", providers=["CPUExecutionProvider"])
    facts = json.loads(session.get_modelmeta().custom_metadata_map["rl_training"])
    assert facts["algo"] == name and facts["deterministic"], facts
    data = np.load(f"{sys.argv[1]}/{name}.npz", allow_pickle=False)
    dtypes = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    memory = {x.name: np.zeros((8, *x.shape[1:]), dtypes[x.type]) for x in session.get_inputs() if x.name != "obs"}
    for obs, expected in zip(data["observations"], data["actions"]):
        names = [x.name for x in session.get_outputs()]
        found = dict(zip(names, session.run(None, {"obs": obs, **memory})))
        assert np.allclose(found["action"], expected, rtol=1e-5, atol=1e-5), name
        memory = {key: found[f"next_{key}"] for key in memory}
    print(name, "ok")
"""


def test_the_files_run_where_neither_this_package_nor_torch_can_be_imported(files):
    names = sorted(path.stem for path in files.glob("*.npz"))
    if not names:
        pytest.skip("the test before has made no files")
    done = subprocess.run(
        [sys.executable, "-I", "-c", READER, str(files), *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for name in names for word in (name, "ok")]


def test_impala_with_an_lstm(tiny_config, tmp_path):
    checkpoint = run_of(tiny_config, "impala", recurrent=True, cell="lstm", recurrent_size=8)
    exported = export_policy(checkpoint, onnx=tmp_path / "policy.onnx")
    assert exported.inputs == {"obs": "float32[N, 4]", "memory.policy": "float32[N, 2, 8]"}
    assert exported.outputs.keys() == {"action", "scores", "next_memory.policy"}
    observations = list(np.random.default_rng(0).standard_normal((8, 5, 4)).astype(np.float32))
    file = File(tmp_path / "policy.onnx")
    found = [file(flat(obs))["action"] for obs in observations]
    np.testing.assert_array_equal(found, expected_actions("impala", checkpoint, observations))


def test_one_observation_and_many_are_the_same_to_a_file(tiny_config, tmp_path):
    checkpoint = run_of(tiny_config, "ppo", {"env_kwargs": {"wrappers": {"normalize_observation": True}}})
    export_policy(checkpoint, onnx=tmp_path / "policy.onnx")
    file, obs = File(tmp_path / "policy.onnx"), np.random.default_rng(0).standard_normal((500, 4)).astype(np.float32)
    alone = np.concatenate([file({"obs": row[None]})["scores"] for row in obs])
    np.testing.assert_allclose(alone, file({"obs": obs})["scores"], atol=1e-6)


def test_the_facts_in_a_file_are_json_and_null_is_no_bound(tiny_config, tmp_path):
    export_policy(run_of(tiny_config, "ppo"), onnx=tmp_path / "policy.onnx", pt2=tmp_path / "policy.pt2")
    extra = {"rl_training.json": ""}
    torch.export.load(tmp_path / "policy.pt2", extra_files=extra)
    session = File(tmp_path / "policy.onnx").session
    for text in (session.get_modelmeta().custom_metadata_map["rl_training"], extra["rl_training.json"]):
        facts = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert facts["observation_space"]["high"][1] is None
        assert facts["observation_space"]["low"][0] == pytest.approx(-4.8)
        assert facts["inputs"] == {"obs": "float32[N, 4]"}


def test_scores_are_what_a_reader_may_sample_from(tiny_config, tmp_path):
    checkpoint = run_of(tiny_config, "ppo", {"env_kwargs": {"wrappers": {"normalize_observation": True}}})
    export_policy(checkpoint, onnx=tmp_path / "policy.onnx")
    obs = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    found = File(tmp_path / "policy.onnx")({"obs": obs})
    policy = load_policy(checkpoint)
    with torch.no_grad():
        distribution = policy.actor.model.policy(torch.from_numpy(policy.normalizer.observation(obs)))
    np.testing.assert_allclose(
        torch.log_softmax(torch.from_numpy(found["scores"]), -1), distribution.log_probs, atol=1e-5
    )
    np.testing.assert_array_equal(found["action"], found["scores"].argmax(1))


def wrong_normaliser(monkeypatch):
    monkeypatch.setattr(policy_graph.ToModel, "forward", lambda self, value: value)


def wrong_memory(monkeypatch):
    def forward(self, obs, memory):
        latent, _ = self.core.step(self.model.encoder(obs), memory["policy"])
        output = self.model.heads.policy_output(latent)
        return exportable.Choice(exportable.mode(self.model.heads, output), output, memory)

    monkeypatch.setattr(exportable.ExportedRecurrent, "forward", forward)


def wrong_bounds(monkeypatch):
    monkeypatch.setattr(policy_graph.Bounded, "forward", lambda self, action: action)


def wrong_choice(monkeypatch):
    def forward(self, obs, memory):
        q = self.model(obs)
        return exportable.Choice(q.argmin(-1), q, {})

    monkeypatch.setattr(exportable.ExportedQNetwork, "forward", forward)


@pytest.mark.parametrize(
    ("algo", "broken", "what"),
    [
        ("ppo", wrong_normaliser, "it would choose other actions"),
        ("recurrent_ppo", wrong_memory, "its next_memory.policy differs"),
        ("sac", wrong_bounds, "its action differs"),
        ("dqn", wrong_choice, "it would choose other actions"),
    ],
)
def test_a_file_that_would_decide_otherwise_is_not_written(algo, broken, what, tiny_config, tmp_path, monkeypatch):
    checkpoint = run_of(tiny_config, algo, {"env_kwargs": {"wrappers": {"normalize_observation": True}}})
    broken(monkeypatch)
    (tmp_path / "policy.onnx").write_text("before")
    with pytest.raises(InputError, match=rf"policy.onnx is not written: {what}"):
        export_policy(checkpoint, onnx=tmp_path / "policy.onnx", pt2=tmp_path / "policy.pt2")
    assert [path.name for path in tmp_path.glob("*policy*")] == ["policy.onnx"]
    assert (tmp_path / "policy.onnx").read_text() == "before"


def test_choices_may_differ_only_where_their_scores_are_equal():
    discrete, several, bits = spaces.Discrete(3), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)
    assert exporting.ties(np.array([[1.0, 1.0 + 1e-6, 0.0]]), discrete)
    assert not exporting.ties(np.array([[1.0, 1.0 + 1e-6, 0.0], [1.0, 1.1, 0.0]]), discrete)
    assert exporting.ties(np.array([[5.0, 0.0, 1.0, 1.0]]), several)
    assert not exporting.ties(np.array([[5.0, 0.0, 0.0, 5.0]]), several)
    assert exporting.ties(np.array([[1e-7, 4.0]]), bits)
    assert not exporting.ties(np.array([[0.1, 4.0]]), bits)


def test_a_file_holds_only_the_weights_it_reads_and_no_path_of_this_machine(tiny_config, tmp_path):
    checkpoint = run_of(tiny_config, "muzero")
    export_policy(checkpoint, onnx=tmp_path / "policy.onnx", pt2=tmp_path / "policy.pt2")
    program = torch.export.load(tmp_path / "policy.pt2")
    assert not [name for name in program.state_dict if "dynamics" in name or "reward" in name or "value" in name]
    for path in tmp_path.glob("policy.*"):
        content = path.read_bytes()
        assert b".py" not in content
        assert len(content) < 60_000


def test_the_export_command(tiny_config, tmp_path):
    checkpoint = run_of(tiny_config, "muzero")
    text = cli("export", checkpoint, "--onnx", tmp_path / "new" / "policy.onnx")
    assert "input    obs: float32[N, 4]" in text
    assert "output   action: int64[N]" in text
    assert "256 observations" in text
    assert "without  the search of 3 simulations: this is the policy prior" in text
    assert f"wrote    {tmp_path / 'new' / 'policy.onnx'}" in text
    assert "give onnx, pt2 or both" in cli("export", checkpoint, code=2)
    assert "is a folder" in cli("export", checkpoint, "--onnx", tmp_path, code=2)
    same = tmp_path / "same"
    assert "each its own name" in cli("export", checkpoint, "--onnx", same, "--pt2", same, code=2)


def test_what_is_missing_is_named(tiny_config, tmp_path, monkeypatch):
    checkpoint = run_of(tiny_config, "muzero")
    monkeypatch.delattr("rl_training.acting.planning.PlanningActor.exportable")
    with pytest.raises(InputError, match="muzero cannot be exported: its PlanningActor has no method `exportable`"):
        export_policy(checkpoint, onnx=tmp_path / "policy.onnx")
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r'pip install "rl-training\[onnx\]"'):
        export_policy(checkpoint, onnx=tmp_path / "policy.onnx")
    assert not list(tmp_path.glob("*policy*"))
