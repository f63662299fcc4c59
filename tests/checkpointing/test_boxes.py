"""Rows that one layout writes and another reads: every rank gets its rows, for any N, g, t, shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fcdp_compile.core.params.inner_cut import InnerCut
from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.packing import block_of, rows_of, take_boxes
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import Home, fit_strategy, param_spec
from fcdp_compile.models.checkpointing.contents import mark_of, mark_of_all
from fcdp_compile.models.checkpointing.format import record
from fcdp_compile.models.checkpointing.format.record import CutTensor, _are_one, cut, slabs
from fcdp_compile.strategy import Strategy

strategies = st.sampled_from(["zero3", "fcdp", "mics", "ddp"])
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 12]), max_size=3)


class Ranks(NamedTuple):
    """N, g and t, and how the t ranks that share a parameter cut it."""

    nodes: int
    ranks_per_node: int
    sharers: int
    placement: Placement
    strategy: str


ranks = st.builds(
    Ranks,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(
        [
            *(Replicate(), Shard(0), Shard(1), Shard(2)),
            *(_StridedShard(dim, split_factor=2) for dim in range(2)),
        ]
    ),
    strategies,
)


class Place(NamedTuple):
    """One rank: what it has of a parameter, and its number among all ranks."""

    spec: ParamSpec
    home: Home
    shard: Tensor
    number: int


def places(whole: Tensor, of: Ranks) -> list[Place]:
    """Every rank with its part, by the definition: cut over t ranks first, then over N x g."""
    found = []
    for n, p, t in product(range(of.nodes), range(of.ranks_per_node), range(of.sharers)):
        here = Home(nodes=of.nodes, ranks_per_node=of.ranks_per_node, node=n, place=p)
        name = "zero3" if of.strategy == "mics" and of.nodes == 1 else of.strategy
        inner, part = None, whole
        if of.sharers > 1:
            shape = tuple(whole.shape)
            inner = InnerCut(shape=shape, placement=of.placement, index=t, ranks=of.sharers)
            dim = getattr(of.placement, "dim", None)
            if (dim is not None and dim >= len(shape)) or inner.problem() is not None:
                inner = InnerCut(shape=shape, placement=Replicate(), index=t, ranks=of.sharers)
            elif dim is not None:
                matrices = whole.chunk(getattr(of.placement, "split_factor", 1), dim)
                cut_up = [chunked(m, of.sharers, dim)[t] for m in matrices]
                part = torch.cat(cut_up, dim)
        spec = param_spec(
            "k",
            "p",
            shape=tuple(part.shape),
            dtype=torch.float32,
            strategy=fit_strategy(Strategy.parse(name), here, shares_memory=False),
            mesh=here,
            inner=inner,
        )
        home = here.of(spec.strategy.home)
        shard = rows_of(part, spec.layout, home.node, home.place)
        found.append(Place(spec, home, shard.contiguous(), len(found)))
    return found


def chunked(matrix: Tensor, parts: int, dim: int) -> list[Tensor]:
    """As torch.chunk, but always so many; the last may be empty."""
    found = list(matrix.chunk(parts, dim))
    return found + [matrix.narrow(dim, 0, 0)] * (parts - len(found))


def written(
    whole: Tensor, of: Ranks, everyone: list[Place]
) -> tuple[tuple[CutTensor, ...], dict[int, Tensor]]:
    """The parts of a tensor that ranks write: the split that they agree on, and the part in each file."""
    cuts, parts = [], {}
    mesh = Home(nodes=of.nodes, ranks_per_node=of.ranks_per_node, node=0, place=0)
    for place in everyone:
        cuts.append(cut("p", "float32", place.spec, mesh, of.sharers, 5))
        if any(place.number in tensor.files for tensor in cuts[-1]):
            parts[place.number] = place.shard
    assert len(set(cuts)) == 1, "ranks agree"
    assert _are_one(list(cuts[0])), "a record may have it"
    return cuts[0], parts


@settings(max_examples=400)
@given(shape=shapes, before=ranks, after=ranks, slab=st.integers(1, 64))
def test_every_rank_gets_its_rows(shape: list[int], before: Ranks, after: Ranks, slab: int) -> None:
    whole = torch.rand(shape)
    saved, parts = written(whole, before, places(whole, before))
    assert sum(p.numel() for p in parts.values()) == whole.numel(), "each element once"
    patch = pytest.MonkeyPatch()
    patch.setattr(record, "SLAB_BYTES", slab)
    for here in places(whole, after):
        found = torch.full(here.spec.local_shape, torch.nan)
        wanted = here.spec.boxes(here.home.node, here.home.place)
        for file, own, held in (part for tensor in saved for part in tensor.held):
            assert parts[file].shape == own
            pieces = slabs(own, held, wanted, 4)
            read = sum(torch.Size(piece.shape).numel() for piece in pieces)
            assert read <= parts[file].numel(), "nothing is read twice"
            for piece in pieces:
                run = parts[file].view(-1)[piece.first :][: torch.Size(piece.shape).numel()]
                for box in piece.boxes:
                    to = block_of(found, box.inside, box.shape)
                    assert to.isnan().all(), "nothing is written twice"
                take_boxes(found, run.view(piece.shape), piece.boxes)
        assert torch.equal(found, here.shard)
        again = torch.full_like(found, torch.nan)
        take_boxes(again, whole, wanted)
        assert torch.equal(again, here.shard)
    patch.undo()


@given(shape=shapes, of=ranks)
def test_every_layout_has_the_same_mark(shape: list[int], of: Ranks) -> None:
    whole = torch.rand(shape)
    everyone = places(whole, of)
    cuts, _ = written(whole, of, everyone)
    writers = {file for tensor in cuts for file in tensor.files}
    found = [
        mark_of(p.shard, p.spec.whole_shape, p.spec.boxes(p.home.node, p.home.place))
        for p in everyone
        if p.number in writers
    ]
    all_of_it = [Box((0,) * whole.ndim, (0,) * whole.ndim, tuple(shape))]
    assert mark_of_all(found) == mark_of(whole, shape, all_of_it)


def test_only_the_rows_that_are_needed_are_read() -> None:
    held, want = Box((4, 0), (0, 0), (4, 3)), Box((6, 0), (0, 0), (6, 3))
    (found,) = slabs((4, 3), [held], [want], 4)
    assert (found.first, found.shape) == (6, (2, 3))
    assert not slabs((4, 3), [held], [Box((8, 0), (0, 0), (4, 3))], 4)


def test_parts_that_are_not_one_tensor() -> None:
    whole = torch.rand(8, 4)
    of = Ranks(1, 2, 2, Shard(0), "zero3")
    (one, two), _ = written(whole, of, places(whole, of))
    assert not _are_one([one])
    assert not _are_one([one, one])
    assert not _are_one([one, replace(two, dtype="int32")])
    assert not _are_one([one, replace(two, part_of=None)])
    assert not _are_one([one, replace(two, files=one.files)])
    assert two.part_of is not None
    assert not _are_one([one, replace(two, part_of=replace(two.part_of, first=(5,)))])
