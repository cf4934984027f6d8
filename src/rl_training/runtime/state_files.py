"""Nested states as JSON and safetensors, the content of a checkpoint's files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {  # safetensors name -> torch dtype, and numpy's where it has one
    "BOOL": (torch.bool, "bool"),
    "U8": (torch.uint8, "uint8"),
    "I8": (torch.int8, "int8"),
    "U16": (torch.uint16, "uint16"),
    "I16": (torch.int16, "int16"),
    "U32": (torch.uint32, "uint32"),
    "I32": (torch.int32, "int32"),
    "U64": (torch.uint64, "uint64"),
    "I64": (torch.int64, "int64"),
    "F16": (torch.float16, "float16"),
    "BF16": (torch.bfloat16, None),
    "F32": (torch.float32, "float32"),
    "F64": (torch.float64, "float64"),
    "C64": (torch.complex64, "complex64"),
}
TORCH_NAMES = {torch_dtype: name for name, (torch_dtype, _) in DTYPES.items()}
NUMPY_NAMES = {np.dtype(dtype): name for name, (_, dtype) in DTYPES.items() if dtype}


def encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor | np.ndarray] | None) -> Any:
    """JSON for a nested state. Tensors and arrays go to `tensors` (None: not allowed); the JSON holds their names.

    A value that JSON cannot express becomes a mapping with one key that begins with "$".
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{'.'.join(path)}: key {key!r} is a {type(key).__name__}, not a str or an int")
        entries = [(key, encode(item, (*path, str(key)), tensors)) for key, item in value.items()]
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(entries) if plain else {"$dict": [list(entry) for entry in entries]}
    if isinstance(value, list | tuple):
        return [encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
    if tensors is None and isinstance(value, np.generic):
        return encode(value.item(), path, None)
    if tensors is not None and isinstance(value, Tensor | np.ndarray | np.generic):
        tag = "$tensor" if isinstance(value, Tensor) else "$array" if isinstance(value, np.ndarray) else "$scalar"
        array = value if isinstance(value, Tensor) else np.asarray(value)
        dtype_name(array, path, masked=isinstance(value, np.ma.MaskedArray))
        name = ".".join(path[1:]) or "value"
        while name in tensors or name == "__metadata__":  # {"a.b": x} beside {"a": {"b": y}}
            name += "'"
        tensors[name] = array
        return {tag: name}
    allowed = "numbers, text, lists and dicts" if tensors is None else "tensors, arrays, numbers, text, lists and dicts"
    raise TypeError(f"{'.'.join(path)}: a {kind.__name__} cannot be saved in a checkpoint, which takes {allowed}")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, tensors) for key, item in value.items()}
    ((tag, content),) = value.items()
    if tag == "$int":
        return int(content, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "$dict":
        return {key: decode(item, tensors) for key, item in content}
    if tag == "$tensor":
        return tensors[content]
    if tag == "$array":
        return tensors[content].numpy()
    if tag == "$scalar":
        return tensors[content].numpy()[()]
    raise ValueError(f"unknown entry {tag!r}")


def dtype_name(array: Tensor | np.ndarray, path: tuple[str, ...] = (), *, masked: bool = False) -> str:
    if isinstance(array, Tensor):
        name = TORCH_NAMES.get(array.dtype) if array.layout == torch.strided and not array.is_meta else None
    else:
        name = NUMPY_NAMES.get(array.dtype) if not masked else None
    if name is None:
        raise TypeError(f"{'.'.join(path)}: a {type(array).__name__} of {array.dtype} cannot be saved in a checkpoint")
    return name


def safetensors_blocks(tensors: dict[str, Tensor | np.ndarray]) -> Iterator[bytes | memoryview]:
    """A safetensors file in blocks; the library's own writer would first copy everything, also a large replay.

    Wide types come first, so that each entry is aligned to its width without the gaps that the format forbids.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header, offset = {}, 0
    for name in order:
        array = tensors[name]
        end = offset + math.prod(array.shape) * array.itemsize
        header[name] = {"dtype": dtype_name(array), "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield _raw_bytes(tensors[name])


def _raw_bytes(array: Tensor | np.ndarray) -> memoryview:
    if 0 in array.shape:  # an empty tensor may have stride 0, which torch does not view as bytes
        return memoryview(b"")
    if isinstance(array, Tensor):
        flat = array.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().cpu()
        return flat.view(torch.uint8).numpy().data
    return np.ascontiguousarray(array.reshape(-1)).view(np.uint8).data
