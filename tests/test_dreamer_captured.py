"""DreamerV3 on a GPU, without one: a gradient step from recorded operations is the one that runs as it is."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import test_dreamer_paths as dreamer
from build import build
from recorded_capture import RecordedCapture, tensors
from rl_training.acting import dreamer_fused, paths
from rl_training.acting.dreamer_path import DreamerPath, StepsPath
from rl_training.acting.graphed import GraphedGradient
from rl_training.algorithms.dreamer import BEFORE, NUMBERS
from rl_training.data.batch import tree_map, upload
from rl_training.ops.dreamer_steps import PLAIN
from rl_training.types import Spaces

pytestmark = pytest.mark.filterwarnings("error:a gradient cannot be captured")
IMAGE = gym.spaces.Box(0, 255, (48, 48, 1), np.uint8)
MIXED = gym.spaces.Dict(
    {"view": IMAGE, "speed": dreamer.VECTORS, "card": gym.spaces.MultiDiscrete([2, 3]), "door": gym.spaces.Discrete(4)}
)
OBSERVATIONS = {"vector": dreamer.VECTORS, "image": IMAGE, "mixed": MIXED}
OTHER = {
    "learning_rate": 3e-3, "agc": 0.02, "horizon": 7.0, "gae_lambda": 0.5, "ent_coef": 0.5, "free_nats": 60.0,
    "dynamics_coef": 3.0, "representation_coef": 3.0, "reconstruction_coef": 3.0, "reward_coef": 3.0,
    "continuation_coef": 3.0, "policy_coef": 3.0, "value_coef": 3.0, "replay_value_coef": 3.0, "slow_value_coef": 0.3,
    "tau": 0.5, "return_rate": 0.5, "return_limit": 0.1,
}  # fmt: skip


def pair(action: str = "discrete", obs: str = "vector", **numbers: Any) -> tuple[Any, Any, RecordedCapture]:
    """Two learners, of which the first runs captured steps."""
    space, numbers = OBSERVATIONS[obs], {"learning_rate": 1e-3, "return_limit": 0.01, **numbers}
    captured, direct = (dreamer.make(action, "written out", obs=space, **numbers) for _ in range(2))
    capture = RecordedCapture()
    captured.fast_step = GraphedGradient(captured.gradient_step, capture=capture)
    return captured, direct, capture


def update_both(captured: Any, direct: Any, seed: int, obs: str = "vector") -> tuple[Any, Any]:
    """One gradient step of both on a batch, which is returned with its noise. After it all is equal to the bit."""
    batch = dreamer.some_batch(direct, seed, obs=OBSERVATIONS[obs])
    noise = direct.noise(batch)
    (report, latent), (expected, plain_latent) = (each.update(batch, noise) for each in (captured, direct))
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(report[name], value), name
    assert all(map(torch.equal, latent, plain_latent))
    for name, parameter in captured.model.named_parameters():  # those of the slow critic too
        assert torch.equal(parameter, direct.model.get_parameter(name)), name
    states = [each.optimizers["model"].state_dict() | each.return_scale.state_dict() for each in (captured, direct)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    captured.gradient_steps += 1
    direct.gradient_steps += 1
    return batch, noise


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("action", "obs"), [("discrete", "vector"), ("multidiscrete", "image"), ("box", "mixed"), ("box", "vector")]
)
def test_a_captured_step_is_the_step(action: str, obs: str, precision: str) -> None:
    """While weights, averages and the learning rate move, and each batch has noise of its own."""
    captured, direct, capture = pair(action, obs, precision=precision, warmup_updates=20)
    for seed in range(GraphedGradient.WARM_UP + 3):
        update_both(captured, direct, seed, obs)
    assert capture.runs == GraphedGradient.WARM_UP
    assert [made.replays for made in capture.made] == [3]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_capture_reads_each_number_as_it_is_now(name: str) -> None:
    """A schedule moves them between steps: none of them is a constant of the graph, and none needs another capture."""
    (captured, direct, capture), (_, still, _) = pair(), pair()
    for seed in range(GraphedGradient.WARM_UP + 2):
        if seed > GraphedGradient.WARM_UP:
            assert len(capture.made) == 1
            captured.hp = direct.hp = dataclasses.replace(direct.hp, **{name: OTHER[name]})
        still.update(*update_both(captured, direct, seed))
        still.gradient_steps += 1
        same = all(map(torch.equal, direct.model.parameters(), still.model.parameters()))
        assert same == (seed <= GraphedGradient.WARM_UP)  # the number has an effect
    assert len(capture.made) == 1


def test_the_numbers_are_all_scalars_that_a_step_reads() -> None:
    assert set(NUMBERS) == set(OTHER)
    assert set(BEFORE) == {"train_ratio", "warmup_updates", "imagination_length"}


def test_a_longer_imagination_is_another_capture() -> None:
    captured, direct, capture = pair()
    for captures, steps in enumerate((4, 2, 5), 1):
        captured.hp = direct.hp = dataclasses.replace(direct.hp, imagination_length=steps)
        for seed in range(GraphedGradient.WARM_UP + 2):
            update_both(captured, direct, seed)
        assert len(capture.made) == captures


def test_a_long_schedule_of_lengths_is_captured_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """More captures are due the longer it runs."""
    monkeypatch.setattr(GraphedGradient, "MAX_CAPTURES", 1)
    monkeypatch.setattr(GraphedGradient, "RUNS_OF_A_CAPTURE", 12)
    captured, direct, capture = pair()
    for length in (2, 3, 2, 3):
        captured.hp = direct.hp = dataclasses.replace(direct.hp, imagination_length=length)
        for seed in range(6):
            update_both(captured, direct, seed)
    assert len(capture.made) == 3  # in runs 5, 12 and 24


def test_the_path_and_the_capture_are_chosen_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dreamer.make().model
    monkeypatch.setattr(
        paths, "fused_path", functools.partial(dreamer_fused.fused_path, compile=lambda f, **options: f)
    )
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for precision, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        chosen = paths.make_dreamer_path(model, precision, gpu, rows=4)
        assert type(chosen) is StepsPath
        assert chosen.dtype == dtype
    monkeypatch.setattr(paths, "has_bfloat16", lambda: False)
    assert paths.make_dreamer_path(model, "auto", cpu, rows=4).dtype == torch.float32
    monkeypatch.setattr(paths, "has_bfloat16", lambda: True)
    assert paths.make_dreamer_path(model, "auto", cpu, rows=4).dtype == torch.bfloat16
    with paths.plain_paths():
        assert type(paths.make_dreamer_path(model, "auto", gpu, rows=4)) is DreamerPath


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("action", "obs"), [("discrete", "vector"), ("box", "mixed")])
def test_steps_on_a_gpu_are_close_to_the_plain_ones(action: str, obs: str, precision: str) -> None:
    """With real captures and compiled kernels. The weights are made equal after each step."""
    options: dict[str, Any] = {"obs": OBSERVATIONS[obs], "precision": precision, "device": "cuda"}
    fast, plain = (dreamer.make(action, path, **options) for path in ("compiled", "plain"))
    assert type(fast.path) is StepsPath
    assert type(plain.path) is DreamerPath
    for seed in range(GraphedGradient.WARM_UP + 3):
        batch = upload(dreamer.some_batch(plain, seed, obs=OBSERVATIONS[obs]), plain.device)
        noise = plain.noise(batch)
        report, expected = (each.update(batch, noise)[0] for each in (fast, plain))
        for name in ("reconstruction_loss", "dynamics_loss", "reward_loss", "continuation_loss", "value_loss"):
            torch.testing.assert_close(report[name], expected[name], rtol=0.05, atol=0.05, msg=f"{name} at {seed}")
        ours, theirs = (each.optimizers["model"].square.sqrt() for each in (fast, plain))  # of all gradients so far
        assert torch.nn.functional.cosine_similarity(ours, theirs, 0) > 0.97
        fast.model.load_state_dict(plain.model.state_dict())
    assert fast.fast_step.graph is not None


class AllOnDevice(TorchDispatchMode):
    """Refuses operations that make, take or return a tensor elsewhere than on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.operations = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        where = {tensor.device for tensor in tensors((args, kwargs, output))}
        assert where <= {self.device}, f"{func} on {where}"
        self.operations += bool(where)
        return output


@pytest.mark.parametrize("dtype", dreamer.TYPES, ids=str)
@pytest.mark.parametrize(("action", "obs"), [("discrete", "image"), ("multidiscrete", "mixed"), ("box", "vector")])
def test_a_step_stays_on_its_device(obs: str, action: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device "meta", whose tensors have no numbers: reading one back is an error, as it is in a capture."""
    meta = torch.device("meta")
    learner = dreamer.make(action, obs=OBSERVATIONS[obs])
    batch = dreamer.some_batch(learner, obs=OBSERVATIONS[obs])
    noise = learner.noise(batch)
    inputs = tree_map(lambda x: x.to(meta), {"batch": batch, "noise": noise._asdict(), "numbers": learner.numbers()})
    with monkeypatch.context() as patched:
        patched.setattr(torch, "Generator", lambda device: None)  # there is none for this device
        moved: Any = build("dreamer", Spaces(OBSERVATIONS[obs], dreamer.ACTIONS[action]), learner.hp, device=meta)
    moved.path = StepsPath(moved.model, dtype, PLAIN)
    moved.path.products = nullcontext  # there is no autocast for it
    with AllOnDevice(meta) as mode:
        report = moved.gradient_step(inputs)
    assert {value.device for value in report.values()} == {meta}
    assert mode.operations > 1_000


# --- compiled steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dreamer.TYPES, ids=str)
def test_every_step_can_be_compiled_as_a_whole(dtype: torch.dtype, recwarn: pytest.WarningsRecorder) -> None:
    """Without breaks, from which the compiler would return to Python. The compiler's last stage is left out."""

    def traced(function: Any, **options: Any) -> Any:
        return torch.compile(function, backend="aot_eager", fullgraph=True, **options)

    model = dreamer.make().model
    path = dreamer_fused.fused_path(model, dtype, 3, traced)
    assert path.steps is not PLAIN
    assert not [w for w in recwarn if "does not work here" in str(w.message)]
    named = {name for name, _ in dreamer_fused.examples(model.size, dtype, 3, torch.device("cpu"))}
    assert named == set(PLAIN._fields)


def test_every_layer_has_compiled_steps_of_its_own() -> None:
    """However many there are: one compiled function for all would run uncompiled after eight of them."""
    graphs: list[str] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph))
        return graph

    def counted(function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=count, fullgraph=True, **options)

    paths = []
    for precision in ("float32", "bfloat16"):
        for width in (12, 16):
            learner = dreamer.make("box", obs=MIXED, precision=precision, hidden=width)
            learner.path = dreamer_fused.fused_path(learner.model, learner.path.dtype, dreamer.B, counted)
            batch = dreamer.some_batch(learner, obs=MIXED)
            for _ in range(2):
                learner.update(batch, learner.noise(batch))
            paths.append(learner.path)
    made = [combinations(path) for path in paths]
    assert max(sum(len(each.made) for each in all_made) for all_made in made) > 20
    assert len(graphs) == sum(len(each.made) for all_made in made for each in all_made)
    assert all(run is not each.function for all_made in made for each in all_made for run in each.made.values())


def combinations(path: StepsPath) -> list[Any]:
    return [step for step in path.steps if isinstance(step, dreamer_fused.Compiled)]


def wrong(function: Any, **options: Any) -> Any:
    return function if function.__name__ != "gru" else lambda *given: function(*given) + 1


def broken(function: Any, **options: Any) -> Any:
    def run(*given: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    return run


@pytest.mark.parametrize(("compiler", "cause"), [(broken, "Failed to find C compiler"), (wrong, "gru")])
def test_where_nothing_can_be_compiled_the_plain_steps_run(compiler: Any, cause: str) -> None:
    with pytest.warns(UserWarning, match=rf"torch.compile does not work here \({cause}.*trains without it") as warned:
        assert dreamer_fused.fused_path(dreamer.make().model, torch.float32, 3, compiler).steps is PLAIN
    assert len(warned) == 1


def test_a_compiler_that_fails_later_does_not_end_the_run() -> None:
    """At the shapes of imagination, which no gradient step has seen before."""
    learner, plain = dreamer.make(path="written out"), dreamer.make(path="written out")
    allowed = 0

    def failing(function: Any, **options: Any) -> Any:
        nonlocal allowed
        allowed -= 1
        return function if allowed >= 0 else broken(function)

    allowed = 12
    learner.path = dreamer_fused.fused_path(learner.model, torch.float32, dreamer.B, failing)
    assert allowed < 6
    batch = dreamer.some_batch(plain)
    noise = plain.noise(batch)
    with pytest.warns(UserWarning, match="Failed to find C compiler.*trains without it") as warned:
        report, _ = learner.update(batch, noise)
    assert len(warned) == 1
    for name, value in plain.update(batch, noise)[0].items():
        assert torch.equal(report[name], value), name


@pytest.mark.parametrize("classes", [5, 256])
def test_samples_next_to_a_boundary_may_differ(classes: int) -> None:
    """A compiled sum may be rounded otherwise. That is no reason to train uncompiled; other samples are."""
    sampled = PLAIN.mixed_sample

    def with_others(count: int) -> StepsPath:
        def other(logits: torch.Tensor, noise: torch.Tensor) -> Any:
            probs, sample = sampled(logits, noise)
            samples = sample.view(noise.numel(), -1)  # of 3 rows with 32 groups
            samples[:count] = samples[:count].roll(1, -1)
            return probs, sample

        compiler = lambda f, **options: other if f.__name__ == "mixed_sample" else f  # noqa: E731
        return dreamer_fused.fused_path(dreamer.make(classes=classes).model, torch.float32, 3, compiler)

    assert with_others(1).steps is not PLAIN
    with pytest.warns(UserWarning, match=r"does not work here \(mixed_sample\)"):
        assert with_others(4).steps is PLAIN
