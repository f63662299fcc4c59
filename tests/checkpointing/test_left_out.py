"""Frozen parameters whose values a checkpoint leaves out, and their fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fcdp_compile
from checkpointing.small import Net, data_file
from fcdp_compile.core.params.layout import ParamLayout, boxes
from fcdp_compile.core.params.packing import rows_of
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.contents import mark_of, mark_of_all

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
OLD_MARKS = [7820990369907839592, 6157030672267642097, 2281759340554177430]


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    nodes=st.integers(1, 3),
    ranks_per_node=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_every_layout_gives_the_same_mark(
    shape: tuple[int, ...],
    nodes: int,
    ranks_per_node: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    whole = (torch.rand(shape) * 100).to(dtype)
    alone = ParamLayout.of(shape, nodes=1, ranks_per_node=1)
    layout = ParamLayout.of(shape, nodes=nodes, ranks_per_node=ranks_per_node)
    wanted = _mark(whole, alone, 0, 0)
    assert 0 <= wanted < 2**63
    if layout.dim is not None:
        parts = [_mark(whole, layout, n, p) for n in range(nodes) for p in range(ranks_per_node)]
        assert mark_of_all(parts) == wanted
    changed = whole.reshape(-1).clone()
    raw = changed.view(torch.uint8)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 if dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    assert _mark(changed.view(shape), alone, 0, 0) != wanted


def _mark(whole: torch.Tensor, layout: ParamLayout, node: int, place: int) -> int:
    """A rank's part of the mark."""
    found = boxes(layout.shape, layout.dim, layout.local_rows(node, place))
    return mark_of(rows_of(whole, layout, node, place), layout.shape, found)


def test_marks_of_older_checkpoints_stay() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    layout = ParamLayout(shape=(2, 3, 4), dim=1, nodes=3, ranks_per_node=1)
    assert [_mark(whole, layout, node, 0) for node in range(3)] == OLD_MARKS


def test_large_parameters_go_block_by_block() -> None:
    alone = ParamLayout.of((3, 2**18), nodes=1, ranks_per_node=1)
    layout = ParamLayout(shape=(3, 2**18), dim=0, nodes=3, ranks_per_node=1)
    values = torch.rand(3, 2**18)
    marks = [_mark(values, layout, node, 0) for node in range(3)]
    assert mark_of_all(marks) == _mark(values, alone, 0, 0)
    values[[0, 1]] = values[[1, 0]]
    assert _mark(values, alone, 0, 0) != mark_of_all(marks)


def adapted(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = fcdp_compile.shard(Net())
    model.first.requires_grad_(requires_grad=False)
    return model


def test_what_is_frozen_is_left_out_and_compared(tmp_path: Path) -> None:
    model, again = adapted(), adapted()
    with torch.no_grad():
        model.scale.fill_(7.0)
    fcdp_compile.save(tmp_path, model=model, frozen=False)
    assert b"first" not in data_file(tmp_path).read_bytes()
    fcdp_compile.load(tmp_path, model=again)
    assert again.scale.item() == 7.0
    assert torch.equal(again.first.weight, model.first.weight)
    # Frozen at the save, trained at the load: the values are equal, so the load works.
    again.first.requires_grad_()
    fcdp_compile.load(tmp_path, model=again)


def test_another_base_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, other = adapted(), adapted(1)
    fcdp_compile.save(tmp_path, model=model, frozen=False)
    with torch.no_grad():
        other.scale.fill_(7.0)
    with pytest.raises(
        CheckpointError,
        match=r"2 of the 2 frozen parameters .*: model.first.weight, model.first.bias;",
    ):
        fcdp_compile.load(tmp_path, model=other)
    assert other.scale.item() == 7.0
    wider = fcdp_compile.shard(Net(6))
    with pytest.raises(
        CheckpointError, match=r"model.first.weight is float32 \(5, 3\) in the checkpoint"
    ):
        fcdp_compile.load(tmp_path, model=wider)


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    fcdp_compile.save(tmp_path, model=adapted(), frozen=False)
    with torch.device("meta"):
        empty = Net()
    empty = fcdp_compile.shard(empty)
    with pytest.raises(CheckpointError, match=r"'first.weight' .one of 2. has no values yet"):
        fcdp_compile.load(tmp_path, model=empty)
