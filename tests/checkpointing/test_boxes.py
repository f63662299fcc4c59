"""Rows written by one layout and read by another: every rank gets its rows, for any N, g, strategy, shape."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcdp_compile.checkpointing.format import boxes
from fcdp_compile.checkpointing.format.boxes import Cut, slabs
from fcdp_compile.checkpointing.format.cuts import cut
from fcdp_compile.checkpointing.format.record import CutTensor
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.params.spec import Home, fit_strategy, param_spec
from fcdp_compile.strategy import Strategy

meshes = st.tuples(st.integers(1, 4), st.integers(1, 4))
strategies = st.sampled_from(["zero3", "fcdp", "mics", "ddp"])
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 12]), max_size=3)


def spec_at(shape: list[int], strategy: str, here: Home) -> ParamSpec:
    if strategy == "mics" and here.nodes == 1:
        strategy = "zero3"  # the strategy is refused there; zero3 has equal shards
    fitting = fit_strategy(Strategy.parse(strategy), here)
    return param_spec(
        "k", "p", shape=tuple(shape), dtype=torch.float32, strategy=fitting, mesh=here
    )


def places(nodes: int, ranks_per_node: int) -> list[Home]:
    return [
        Home(nodes=nodes, ranks_per_node=ranks_per_node, node=n, place=p)
        for n, p in product(range(nodes), range(ranks_per_node))
    ]


def home_shard(whole: Tensor, spec: ParamSpec, here: Home) -> Tensor:
    dim, home = spec.layout.dim, here.of(spec.strategy.home)
    if dim is None:
        return whole
    start = spec.layout.local_start(home.node, home.place)
    return whole.narrow(dim, start, spec.local_shape[dim])


def written(
    whole: Tensor, strategy: str, mesh: tuple[int, int]
) -> tuple[CutTensor, dict[int, Tensor]]:
    """The parts of a tensor that ranks write: the split that they agree on, and the part in each file."""
    cuts, parts = [], {}
    for rank, here in enumerate(places(*mesh)):
        spec = spec_at(list(whole.shape), strategy, here)
        cuts.append(cut("p", "float32", spec, here, index=5))
        if rank in cuts[-1].files:
            parts[rank] = home_shard(whole, spec, here).contiguous()
    assert len(set(cuts)) == 1, "ranks agree"
    return cuts[0], parts


@settings(max_examples=300)
@given(
    shape=shapes,
    old=strategies,
    new=strategies,
    before=meshes,
    after=meshes,
    slab=st.integers(1, 64),
)
def test_every_rank_gets_its_rows(
    shape: list[int],
    old: str,
    new: str,
    before: tuple[int, int],
    after: tuple[int, int],
    slab: int,
) -> None:
    whole = torch.rand(shape)
    saved, parts = written(whole, old, before)
    assert sum(p.numel() for p in parts.values()) == whole.numel(), "each element once"
    patch = pytest.MonkeyPatch()
    patch.setattr(boxes, "SLAB_BYTES", slab)
    for here in places(*after):
        spec = spec_at(shape, new, here)
        wanted = home_shard(whole, spec, here)
        found = torch.full(spec.local_shape, torch.nan)
        home = here.of(spec.strategy.home)
        first = spec.layout.local_start(home.node, home.place)
        dim = spec.layout.dim
        want = Cut(dim=dim, start=first, stop=first + (0 if dim is None else wanted.shape[dim]))
        start = 0
        for rows, file in zip(saved.rows, saved.files, strict=True):
            part = Cut(dim=saved.dim, start=start, stop=start + rows)
            start += rows
            assert parts[file].shape == tuple(b - a for a, b in part.bounds(shape))
            for piece in slabs(shape, part, want, 4):
                run = parts[file].view(-1)[piece.first :][: torch.Size(piece.shape).numel()]
                run, to = run.view(piece.shape), found
                for i, ((a, b), at) in enumerate(zip(piece.keep, piece.to, strict=True)):
                    run, to = run.narrow(i, a, b - a), to.narrow(i, at, b - a)
                assert to.isnan().all(), "nothing is written twice"
                to.copy_(run)
        assert torch.equal(found, wanted)
    patch.undo()


def test_only_the_rows_that_are_needed_are_read() -> None:
    part, want = Cut(dim=0, start=4, stop=8), Cut(dim=0, start=6, stop=12)
    (found,) = slabs((16, 3), part, want, 4)
    assert (found.first, found.shape) == (6, (2, 3))
    assert not list(slabs((16, 3), part, Cut(dim=0, start=8, stop=12), 4))


def test_copies_are_written_by_all_in_turn() -> None:
    """All of 2 x 2 ranks have 8 tensors, and each rank writes two."""
    here = places(2, 2)[0]
    spec = spec_at([4, 4], "ddp", here)
    files = [cut("p", "float32", spec, here, i).files for i in range(8)]
    assert sorted(f for (f,) in files) == [0, 0, 1, 1, 2, 2, 3, 3]
