"""Reading a part of a source gives the same part of the tensor that the source describes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fcdp_compile.models.pretrained.folder import read_header
from fcdp_compile.models.pretrained.source import (
    Files,
    Source,
    in_file,
    joined,
    rearranged,
    rows_of,
    stacked,
    transposed,
)

Pair = tuple[Source, Tensor]
Step = Callable[[st.DataObject, list[Pair]], Pair]


@pytest.fixture(scope="module")
def leaves(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    tensors = {f"t{i}": torch.randn(4, 3, 5, dtype=torch.float64) for i in range(4)}
    path = tmp_path_factory.mktemp("sources") / "some.safetensors"
    save_file(tensors, path)
    header = read_header(path)
    return [(in_file(header.tensors[name]), tensors[name]) for name in tensors]


def _dim(data: st.DataObject, rank: int) -> int:
    return data.draw(st.integers(0, rank - 1))


def _joined(data: st.DataObject, pairs: list[Pair]) -> Pair:
    dim = _dim(data, pairs[0][1].ndim)
    return joined([s for s, _ in pairs], dim), torch.cat([t for _, t in pairs], dim)


def _stacked(data: st.DataObject, pairs: list[Pair]) -> Pair:
    dim = _dim(data, pairs[0][1].ndim + 1)
    return stacked([s for s, _ in pairs], dim), torch.stack([t for _, t in pairs], dim)


def _rows(data: st.DataObject, pairs: list[Pair]) -> Pair:
    (source, tensor), *_ = pairs
    dim = _dim(data, tensor.ndim)
    start = data.draw(st.integers(0, tensor.shape[dim] - 1))
    rows = data.draw(st.integers(1, tensor.shape[dim] - start))
    return rows_of(source, dim, start, rows), tensor.narrow(dim, start, rows)


def _transposed(data: st.DataObject, pairs: list[Pair]) -> Pair:
    (source, tensor), *_ = pairs
    dims = _dim(data, tensor.ndim), _dim(data, tensor.ndim)
    return transposed(source, *dims), tensor.transpose(*dims)


def _rearranged(data: st.DataObject, pairs: list[Pair]) -> Pair:
    (source, tensor), *_ = pairs
    flipped = tensor.flatten().flip(0)
    return rearranged(source, lambda t: t.flatten().flip(0), tuple(flipped.shape)), flipped


STEPS: list[Step] = [_joined, _stacked, _rows, _transposed, _rearranged]


@given(data=st.data())
@settings(max_examples=150)
def test_a_part_is_the_part_of_the_whole(leaves: list[Pair], data: st.DataObject) -> None:
    pairs = leaves
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=3)):
        pairs = [step(data, pairs)]
        pairs = pairs * data.draw(st.integers(1, 2))
    source, tensor = pairs[0]
    assert source.shape == tuple(tensor.shape)
    at, sizes = [], []
    for size in tensor.shape:
        at.append(data.draw(st.integers(0, size)))
        sizes.append(data.draw(st.integers(0, size - at[-1])))
    part = tensor[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))]
    dtype = data.draw(st.sampled_from([torch.float64, torch.bfloat16]))
    out = torch.full(part.shape, torch.nan, dtype=dtype)
    with Files() as files:
        source.fill(out, at, files)
    assert torch.equal(out, part.to(dtype))


def test_no_more_is_read_than_was_asked_for(leaves: list[Pair]) -> None:
    out = torch.empty(2, 3, 5, dtype=torch.float64)
    with Files() as files:
        leaves[0][0].fill(out, (1, 0, 0), files)
        assert files.read_bytes == out.nbytes


def test_a_file_that_was_exchanged_is_noticed(leaves: list[Pair], tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"t": torch.zeros(4)}, path)
    leaf = in_file(read_header(path).tensors["t"])
    save_file({"t": torch.zeros(4, dtype=torch.float64)}, path)
    with Files() as files, pytest.raises(Exception, match=r"some\.safetensors changed"):
        leaf.fill(torch.empty(4), (0,), files)
