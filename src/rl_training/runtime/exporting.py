"""Policies as files that run without this package: ONNX, and torch.export's .pt2. A file is written only after what it
decides has been compared with the policy it was made from."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.export.graph_signature import InputKind

from rl_training.acting.exportable import Exportable
from rl_training.acting.policy_graph import AFTER, PolicyGraph, graph_inputs
from rl_training.data.history import num_rows
from rl_training.data.sampled import sampled_observations
from rl_training.envs.space_json import space_to_json
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.atomic_files import write_atomic
from rl_training.runtime.metadata import package_version
from rl_training.runtime.policy import Policy
from rl_training.runtime.workflows import Opened, open_policy
from rl_training.types import Array, Observation

TOLERANCE = 1e-5  # of actions and scores, relative where the largest of them is above 1
MEMORY_TOLERANCE = 1e-4  # of a recurrent cell, which sums large numbers in another order than the policy's does
ROWS, STEPS = 32, 8  # the 256 observations that are compared: of 32 environments for 8 steps
OPSET = 18  # of ONNX, of 2022
KEY = "rl_training"  # of the facts in an ONNX file's metadata
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Run: TypeAlias = Callable[[dict[str, Array]], dict[str, Array]]  # named inputs to named outputs


class Exported(NamedTuple):
    """The description of what was written."""

    files: list[Path]
    inputs: dict[str, str]  # `float32[N, 4]` by name
    outputs: dict[str, str]
    compared: int  # observations
    difference: float  # the largest, of actions and scores
    leaves_out: str  # what the policy does beyond the file, "" if nothing


def export_policy(
    checkpoint: str | Path,
    *,
    onnx: str | Path | None = None,
    pt2: str | Path | None = None,
    best: bool = False,
    task: str | None = None,
) -> Exported:
    """Write the policy of a checkpoint, or the newest of a run folder, to a file of ONNX, of torch.export, or to both.

    It takes the environment's observations and gives its actions, without randomness. Of several tasks, name one.
    """
    targets = {kind: Path(path) for kind, path in (("onnx", onnx), ("pt2", pt2)) if path is not None}
    check_targets(targets)
    opened = open_policy(checkpoint, task=task, best=best, device="cpu")
    exportable = exportable_of(opened)
    inputs = first_inputs(opened, exportable)
    program = traced(make_graph(opened, exportable), inputs)
    facts = facts_of(opened, exportable, inputs)
    contents, largest = {}, 0.0
    for kind in targets:
        contents[kind], run = FORMATS[kind](program, inputs, facts)
        largest = max(largest, compare(run, opened, exportable, str(targets[kind])))
    for kind, target in targets.items():
        write(target, contents[kind])
    outputs = run({name: np.asarray(x) for name, x in inputs.items()})
    return Exported(
        files=list(targets.values()),
        inputs={name: form_of(x) for name, x in inputs.items()},
        outputs={name: form_of(x) for name, x in outputs.items()},
        compared=ROWS * STEPS,
        difference=largest,
        leaves_out=exportable.leaves_out,
    )


def describe_export(exported: Exported) -> str:
    lines = [
        *(f"input    {name}: {form}" for name, form in exported.inputs.items()),
        *(f"output   {name}: {form}" for name, form in exported.outputs.items()),
        f"compared with the policy on {exported.compared} observations: largest difference {exported.difference:.1e}",
        *([f"without  {exported.leaves_out}"] if exported.leaves_out else []),
        *(f"wrote    {path}" for path in exported.files),
    ]
    return "\n".join(lines)


def check_targets(targets: Mapping[str, Path]) -> None:
    if not targets:
        raise InputError("there is nothing to write: give onnx, pt2 or both (--onnx FILE, --pt2 FILE)")
    for path in targets.values():
        if path.is_dir():
            raise InputError(f"{path} is a folder: give the file to write")
    if len(set(targets.values())) < len(targets):
        raise InputError(f"{targets['onnx']} cannot be both files: give each its own name")
    missing = [name for name in ONNX_PACKAGES if "onnx" in targets and find_spec(name) is None]
    if missing:
        raise MissingPackage(f'ONNX needs {", ".join(missing)}: pip install "rl-training[onnx]"')


def exportable_of(opened: Opened) -> Exportable:
    actor = opened.policy.actor
    if not hasattr(actor, "exportable"):
        raise InputError(
            f"{opened.config.algo} cannot be exported: its {type(actor).__name__} has no method `exportable`; use "
            "load_policy, or give it one (rl_training/acting/exportable.py)"
        )
    exportable: Exportable = actor.exportable()
    exportable.network.eval()
    return exportable


def make_graph(opened: Opened, exportable: Exportable) -> PolicyGraph:
    policy = opened.policy
    graph = PolicyGraph(exportable, policy.layout, opened.spaces.env_action, opened.box_actions, policy.normalizer)
    return graph.eval()


def first_inputs(opened: Opened, exportable: Exportable) -> dict[str, Tensor]:
    """Two observations at the beginning of episodes."""
    layout, memory = opened.policy.layout, empty_memory(exportable, 2)
    return {name: torch.from_numpy(x) for name, x in graph_inputs(layout, layout.empty(2), memory).items()}


def empty_memory(exportable: Exportable, rows: int) -> dict[str, Array]:
    return {name: np.zeros((rows, *field.shape), field.dtype) for name, field in exportable.memory.items()}


def traced(graph: PolicyGraph, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    """The operations of the graph, for any number of environments."""
    rows = torch.export.Dim("N", min=1, max=1 << 20)
    shapes = ({name: {0: rows} for name in inputs},)
    with torch.no_grad(), quiet():
        graph(inputs)  # fills caches with tensors, which while tracing would be filled with symbols
        program = torch.export.export(graph, (inputs,), dynamic_shapes=shapes)
        return reduced(program)


def reduced(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Without what the outputs do not depend on, such as a critic or a planner's model, and without the places in this
    machine's source files that the operations come from."""
    specs, graph = program.graph_signature.input_specs, program.graph_module.graph
    graph.eliminate_dead_code()
    for node in [node for node in graph.nodes if node.op == "placeholder" and not node.users]:
        (spec,) = (spec for spec in specs if spec.arg.name == node.name)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            specs.remove(spec)
            program.state_dict.pop(spec.target, None)
            graph.erase_node(node)
    for node in graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
            node.meta.pop(name, None)
    for name, weight in program.state_dict.items():  # which are parts of one vector with all weights
        own = weight.detach().clone()
        program.state_dict[name] = torch.nn.Parameter(own) if isinstance(weight, torch.nn.Parameter) else own
    program.graph_module.recompile()
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch's exporters about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def to_onnx(program: torch.export.ExportedProgram, inputs: Mapping[str, Any], facts: Any) -> tuple[bytes, Run]:
    import onnxruntime

    names = output_names(facts)
    with quiet():
        converted = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, input_names=list(inputs), output_names=names, verbose=False
        )
    assert converted is not None
    model = converted.model_proto
    tidy(model)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, json.dumps(facts, allow_nan=False)
    content: bytes = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(given: dict[str, Array]) -> dict[str, Array]:
        return dict(zip(names, session.run(names, given), strict=True))

    return content, run


def tidy(model: Any) -> None:
    """Name the first axis N, and leave out the exporter's notes, which name source files of this machine."""
    del model.graph.value_info[:]
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for value in (*model.graph.input, *model.graph.output):
        value.ClearField("metadata_props")
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = "N"


def to_pt2(program: torch.export.ExportedProgram, inputs: Mapping[str, Any], facts: Any) -> tuple[bytes, Run]:
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file, extra_files={f"{KEY}.json": json.dumps(facts, allow_nan=False)})
        content = file.getvalue()
        module = torch.export.load(io.BytesIO(content)).module()

    def run(given: dict[str, Array]) -> dict[str, Array]:
        with torch.no_grad():
            outputs = module({name: torch.from_numpy(x) for name, x in given.items()})
        return {name: x.numpy() for name, x in outputs.items()}

    return content, run


FORMATS = {"onnx": to_onnx, "pt2": to_pt2}


def output_names(facts: Any) -> list[str]:
    return ["action", "scores", *(AFTER + name for name in facts["memory"])]


def facts_of(opened: Opened, exportable: Exportable, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader of the file may want to know. It is in the file as JSON."""
    return {
        "version": package_version() or "unknown",
        "algo": opened.config.algo,
        "env_id": opened.env_id,
        "global_step": opened.checkpoint.step,
        "deterministic": True,
        "leaves_out": exportable.leaves_out,
        "memory": list(exportable.memory),
        "inputs": {name: form_of(x) for name, x in inputs.items()},
        "observation_space": without_infinity(space_to_json(opened.spaces.env_observation)),
        "action_space": without_infinity(space_to_json(opened.spaces.env_action)),
    }


def without_infinity(value: Any) -> Any:
    """null for a bound that is infinite: JSON has no such number."""
    if isinstance(value, dict):
        return {key: without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def form_of(array: Any) -> str:
    """`float32[N, 4]`"""
    return f"{np.asarray(array).dtype}[{', '.join(['N', *map(str, array.shape[1:])])}]"


def compare(run: Run, opened: Opened, exportable: Exportable, target: str) -> float:
    """The largest difference between a file and its policy, on sampled observations and on a single one.

    An InputError if one is too large.
    """
    policy, rng = opened.policy, np.random.default_rng(0)
    reference = Policy(exportable.actor, policy.layout, policy.to_env, policy.normalizer, 0)
    largest = 0.0
    for rows, steps in ((ROWS, STEPS), (1, 2)):
        reference.reset()
        for _ in range(steps):
            obs = sampled_observations(policy.layout.space, rows, policy.normalizer, rng)
            before = {name: np.asarray(reference.memory[name]) for name in exportable.memory if reference.memory}
            seen = obs if policy.normalizer is None else policy.normalizer.observation(obs)
            scores = exportable.scores(seen, reference.memory)
            expected = {"scores": scores, "action": act_on(reference, obs)}
            expected |= {AFTER + name: np.asarray(reference.memory[name]) for name in exportable.memory}
            found = run(graph_inputs(policy.layout, obs, before or empty_memory(exportable, rows)))
            largest = max(largest, difference(found, expected, opened.spaces.env_action, target))
    return largest


def act_on(policy: Policy, obs: Observation) -> Array:
    """As `policy.act`, for observations that are already in the arrays of the model."""
    seen = obs if policy.normalizer is None else policy.normalizer.observation(obs)
    decision = policy.actor.act(seen, policy.memory, explore=False, rng=policy.rng)
    policy.memory = decision.memory
    return policy.to_env(decision.action)


def difference(found: Mapping[str, Array], expected: Mapping[str, Array], space: Any, target: str) -> float:
    """The largest difference of all outputs. Choices may differ only where their scores are as good as equal."""
    if found.keys() != expected.keys():
        raise InputError(f"{target} is not written: it gives {sorted(found)}, the policy {sorted(expected)}")
    same = np.ones(num_rows(expected["scores"]), bool)
    if not isinstance(space, spaces.Box):
        same = (found["action"] == expected["action"]).reshape(len(same), -1).all(1)
        if not same.all() and not ties(expected["scores"][~same], space):
            raise InputError(f"{target} is not written: it would choose other actions than the policy")
    largest = 0.0
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise InputError(f"{target} is not written: {name} has shape {found[name].shape}, not {value.shape}")
        one, other = found[name][same].astype(np.float64), value[same].astype(np.float64)
        gap = float(np.abs(one - other).max(initial=0.0)) / max(1.0, float(np.abs(other).max(initial=0.0)))
        if not gap <= (MEMORY_TOLERANCE if name.startswith(AFTER) else TOLERANCE):
            raise InputError(f"{target} is not written: its {name} differs by {gap:.2g} from the policy's")
        largest = max(largest, gap)
    return largest


def ties(scores: Array, space: Any) -> bool:
    """Whether in each row of scores [R, ...] two choices are equally good, to rounding."""
    near = 2 * TOLERANCE * max(1.0, float(np.abs(scores).max()))
    if isinstance(space, spaces.MultiBinary):
        return bool((np.abs(scores).reshape(len(scores), -1).min(1) <= near).all())
    sizes = space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else [scores.shape[-1]]
    parts = np.split(scores, np.cumsum(sizes)[:-1], -1)
    gaps = [np.diff(np.sort(part, -1)[:, -2:], axis=-1).min(-1) for part in parts if part.shape[-1] > 1]
    return bool((np.min(gaps, 0) <= near).all())


def write(target: Path, content: bytes) -> None:
    try:
        write_atomic(target, lambda file: file.write(content))
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
