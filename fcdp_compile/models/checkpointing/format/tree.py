"""Values of any structure as JSON and named tensors, and back, bit by bit.

    {"lr": 0.1, (1, 2): nan, "sum": tensor}
    -> {"$": "dict", "items": [["lr", 0.1], [{"$": "tuple", …}, {"$": "float", "bits": "7ff8…"}], …]}

JSON has no tuples, no keys other than strings, no nan and no tensors; an object with the key "$"
replaces them.  Types that `encode` does not list are refused, because they would need a pickle.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.models.files.safetensors_file import DTYPES, as_bytes

_MARK = "$"
_EXACT_INT = 2**53  # smaller ones are read exactly by every JSON reader
_MAX_INT_BITS = 2**12
_MAX_DEPTH = 100
_DICTS: dict[str, type] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}

TensorReader = Callable[[str, torch.dtype, tuple[int, ...]], Tensor]
"""Returns the tensor with a name; its dtype and shape in the file must be the given ones."""


@dataclass(frozen=True, slots=True)
class TensorReference:
    """In a tree, the place of a tensor that the checkpoint has cut over ranks."""

    name: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as JSON, and its tensors by their names in the JSON."""

    tree: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a digest that is equal for values that are equal bit by bit."""
        digest = hashlib.sha256(json.dumps(self.tree).encode())
        for tensor in self.tensors.values():
            digest.update(as_bytes(tensor).cpu().numpy().data)
        return digest.hexdigest()


def encode(value: object, name: str, *, copy: bool) -> Encoded:
    """Turn a value into JSON and tensors.

    Takes None, bool, int, float, str, list, tuple, dict, OrderedDict, Counter, tensors, arrays and numbers of
    numpy; an object with `state_dict` and `load_state_dict` is replaced by its `state_dict()`.

    name: of the value, in messages and in the names of tensors.
    copy: whether tensors are copied to host memory now, so that later changes to them have no effect here.

    Raises: CheckpointError for anything else, naming where it is.
    """
    encoder = _Encoder(copy)
    return Encoded(encoder.encode(value, name, 0), encoder.tensors)


def decode(tree: Any, read: TensorReader, name: str) -> Any:
    """Return the value that `encode` was given; an object with a state comes back as its state.

    Raises: CheckpointError if the tree is not one of `encode`'s.
    """
    try:
        return _decode(tree, read)
    except CheckpointError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        struct.error,
    ) as error:
        raise CheckpointError(f"value {name!r} is not one that fcdp_compile.save writes") from error


def has_state(value: object) -> bool:
    """Whether a value has both `state_dict` and `load_state_dict`."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _refuse(path: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{path} {problem}")


class _Encoder:
    def __init__(self, copy: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copy = copy

    def encode(self, value: object, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            _refuse(path, f"is nested deeper than {_MAX_DEPTH}, or holds itself")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if isinstance(value, int) and kind is int:
            return self._int(value, path)
        if isinstance(value, float) and kind is float:
            bits = struct.pack(">d", value).hex()
            return value if math.isfinite(value) else {_MARK: "float", "bits": bits}
        if isinstance(value, list | tuple) and kind in (list, tuple):
            items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            return items if kind is list else {_MARK: "tuple", "items": items}
        if isinstance(value, dict) and kind in _DICTS.values():
            return self._dict(value, path, depth)
        if isinstance(value, TensorReference):
            return {_MARK: "sharded", "name": value.name}
        return self._other(value, path, depth)

    def _other(self, value: object, path: str, depth: int) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
            dtype = value.dtype.str
            if isinstance(value, np.generic):
                return {_MARK: "number", "dtype": dtype, "bytes": value.tobytes().hex()}
            raw = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)
            name = self._add(raw[: value.nbytes], path)
            size = [value.nbytes]
            shape = list(value.shape)
            return {_MARK: "array", "name": name, "bytes": size, "dtype": dtype, "shape": shape}
        if has_state(value):
            state = value.state_dict()  # type: ignore[attr-defined]  # has_state has looked
            return {_MARK: "state", "value": self.encode(state, path, depth + 1)}
        _refuse(
            path,
            f"is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold; "
            "give numbers, strings, lists, tuples, dicts, tensors, or an object with state_dict and "
            "load_state_dict",
        )

    def _int(self, value: int, path: str) -> Any:
        if value.bit_length() > _MAX_INT_BITS:
            _refuse(path, f"is a whole number of more than {_MAX_INT_BITS} bits")
        return value if abs(value) < _EXACT_INT else {_MARK: "int", "digits": str(value)}

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if type(value) is dict and all(type(k) is str for k in value) and _MARK not in value:
            return {k: self.encode(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()}
        items = []
        for key, item in value.items():
            where = f"{path}[{key!r}]"
            if isinstance(key, Tensor | np.ndarray):
                _refuse(where, "is in a dict under a tensor, which cannot be a key")
            items.append([self.encode(k, where, depth + 1) for k in (key, item)])
        return {_MARK: type(value).__name__, "items": items}

    def _tensor(self, value: Tensor, path: str) -> Any:
        if isinstance(value, DTensor):
            _refuse(path, "is a DTensor; give its full_tensor(), or this rank's part by to_local()")
        if type(value) not in (Tensor, nn.Parameter):
            _refuse(path, f"is a {type(value).__name__}, not a plain tensor")
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            _refuse(path, "is a sparse, quantised or meta tensor, which a checkpoint does not hold")
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        plain = value.detach().resolve_conj().resolve_neg()
        name = self._add(plain if value.dtype in DTYPES else as_bytes(plain), path)
        return {_MARK: "tensor", "name": name, "dtype": dtype, "shape": shape}

    def _add(self, tensor: Tensor, path: str) -> str:
        name = path if path not in self.tensors else f"{path} {len(self.tensors)}"
        self.tensors[name] = tensor.to("cpu", copy=True) if self._copy else tensor
        return name


def _decode(tree: Any, read: TensorReader) -> Any:
    if isinstance(tree, list):
        return [_decode(item, read) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {key: _decode(item, read) for key, item in tree.items()}
    return _decode_marked(tree, tree[_MARK], read)


def _decode_marked(tree: Mapping[str, Any], mark: str, read: TensorReader) -> Any:
    match mark:
        case "tuple":
            return tuple(_decode(item, read) for item in tree["items"])
        case "int":
            return int(tree["digits"])
        case "float":
            return struct.unpack(">d", bytes.fromhex(tree["bits"]))[0]
        case "dict" | "OrderedDict" | "Counter":
            made = _DICTS[mark]()
            for key, item in tree["items"]:
                made[_decode(key, read)] = _decode(item, read)
            return made
        case "sharded":
            return TensorReference(tree["name"])
        case "state":
            return _decode(tree["value"], read)
        case "tensor":
            return _read_tensor(tree, read)
        case "number":
            return np.frombuffer(bytes.fromhex(tree["bytes"]), _numeric(tree["dtype"]))[0]
        case "array":
            raw = read(tree["name"], torch.uint8, tuple(tree["bytes"])).numpy()
            return (
                np.frombuffer(raw.tobytes(), _numeric(tree["dtype"])).reshape(tree["shape"]).copy()
            )
    raise ArgumentError(mark)


def _numeric(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ArgumentError(name)
    return dtype


def _read_tensor(tree: Mapping[str, Any], read: TensorReader) -> Tensor:
    dtype, shape = getattr(torch, tree["dtype"]), tuple(tree["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(tree["dtype"])
    if dtype in DTYPES:
        return read(tree["name"], dtype, shape)
    size = math.prod(shape) * dtype.itemsize
    return read(tree["name"], torch.uint8, (size,)).view(dtype).reshape(shape)
