"""Values come back from JSON unchanged, bit by bit, or are refused by name."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcdp_compile.errors import CheckpointError, FcdpError
from fcdp_compile.models.checkpointing.format.tree import Encoded, TensorReference, decode, encode

floats = st.floats(allow_nan=False) | st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]
)
keys = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.just("$")
leaves = st.none() | st.booleans() | st.integers() | floats | st.text(max_size=5)
trees: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    encoded = encode(value, "extra", copy=False)
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    return decode(tree, lambda name, dtype, shape: _given(encoded, name, dtype, shape), "extra")


def _given(encoded: Encoded, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = encoded.tensors[name]
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    return tensor.clone()


def same(a: Any, b: Any) -> bool:
    """Whether both have equal types and bits, recursively."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(max_examples=200)
@given(tree=trees)
def test_trees_come_back(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([math.nan, -0.0], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(3 + 4j),
        torch.tensor([2**31], dtype=torch.uint32),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
def test_tensors_come_back(tensor: Tensor) -> None:
    (found,) = round_trip((tensor,))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.nan_to_num(7) if found.is_floating_point() else found, _plain(tensor))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(7) if tensor.is_floating_point() else tensor


def test_what_optimizers_schedulers_and_generators_keep() -> None:
    assert same(round_trip(Counter({30: 1, 80: 2})), Counter({30: 1, 80: 2}))
    state = np.random.RandomState(3).get_state(legacy=False)
    found = round_trip(state)
    assert np.array_equal(found["state"]["key"], state["state"]["key"])
    assert found["state"]["key"].dtype == np.uint32
    number = round_trip([np.float32(0.1)])[0]
    assert type(number) is np.float32
    assert number == np.float32(0.1)
    assert round_trip([TensorReference("a")]) == [TensorReference("a")]


def test_an_object_with_a_state_is_its_state() -> None:
    generator = torch.nn.Linear(2, 1)
    found = round_trip({"module": generator})
    assert torch.equal(found["module"]["weight"], generator.weight)


class Strange:
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [0, Strange()]}, r"extra\['a'\]\[1\] is a .*Strange"),
        ({"a": {1, 2}}, r"extra\['a'\] is a builtins.set"),
        ({Strange(): 1}, "Strange"),
        ({"a": defaultdict(int)}, r"extra\['a'\] is a collections.defaultdict"),
        ({"a": lambda: 0}, r"extra\['a'\] is a builtins.function"),
        ({"a": torch.float32}, r"extra\['a'\] is a torch.dtype"),
        ({"a": 2**5000}, r"extra\['a'\] is a whole number"),
        ({"a": torch.zeros(2, device="meta")}, r"extra\['a'\] is a sparse, quantised or meta"),
        ({"a": torch.zeros(2).to_sparse()}, r"extra\['a'\] is a sparse, quantised or meta"),
        ({"a": np.array(["x"])}, r"extra\['a'\] is a numpy.ndarray"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_anything_else_is_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        encode(value, "extra", copy=False)


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="holds itself"):
        encode(tree, "extra", copy=False)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "eval", "code": "1"},
        {"$": "tuple"},
        {"$": "float", "bits": "7f"},
        {"$": "tensor", "name": "a", "dtype": "load", "shape": [1]},
        {"$": "array", "name": "a", "bytes": [1], "dtype": "O", "shape": [1]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": ["tuple"]},
    ],
    ids=str,
)
def test_a_tree_that_nobody_wrote_is_refused(tree: Any) -> None:
    def read(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    with pytest.raises(FcdpError, match="value 'extra'"):
        decode(tree, read, "extra")


def test_copies_do_not_change_with_what_they_are_of() -> None:
    tensor = torch.zeros(3)
    copied, shared = (encode(tensor, "extra", copy=c) for c in (True, False))
    tensor.fill_(1)
    assert copied.tensors["extra"].sum() == 0
    assert shared.tensors["extra"].sum() == 3
    assert copied.digest() != shared.digest()
