"""The arithmetic of shards, compared with torch.chunk and with DTensor's own rule."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Shard

from builders_plan import ranks, shapes
from fcdp_compile.core.params.layout import ParamLayout, choose_dim, chunk_rows
from fcdp_compile.core.params.packing import rows_of

rows_and_chunks = st.tuples(st.integers(0, 300), st.integers(1, 40))


def cut(tensor: torch.Tensor, dim: int, chunks: int) -> list[torch.Tensor]:
    """Like torch.chunk, filled up with empty pieces, as DTensor's Shard does."""
    pieces = list(torch.chunk(tensor, chunks, dim=dim))
    return pieces + [tensor.narrow(dim, 0, 0)] * (chunks - len(pieces))


@given(rows_and_chunks)
def test_chunk_rows_cuts_as_torch_chunk(given_sizes: tuple[int, int]) -> None:
    rows, chunks = given_sizes
    expected = [len(piece) for piece in torch.arange(rows).chunk(chunks)]
    assert chunk_rows(rows, chunks) == (expected + [0] * chunks)[:chunks]


@given(rows_and_chunks)
def test_chunk_rows_cuts_as_dtensor(given_sizes: tuple[int, int]) -> None:
    rows, chunks = given_sizes
    expected = [Shard(0).local_shard_size_and_offset(rows, chunks, i)[0] for i in range(chunks)]
    assert chunk_rows(rows, chunks) == expected


@given(shapes, ranks)
def test_home_shards_are_nested_chunks_intra_before_inter(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    nodes, ranks_per_node = size
    layout = ParamLayout.of(shape, nodes, ranks_per_node)
    if layout.dim is None:
        assert shape == ()
        return
    full = torch.arange(math.prod(shape)).reshape(shape)
    for place, piece in enumerate(cut(full, layout.dim, ranks_per_node)):
        for node, home in enumerate(cut(piece, layout.dim, nodes)):
            start = layout.local_start(node, place)
            mine = full.narrow(layout.dim, start, home.shape[layout.dim])
            assert layout.local_shape(node, place) == tuple(home.shape)
            assert torch.equal(mine, home)


@given(shapes, ranks)
def test_gathering_by_node_then_by_place_gives_the_parameter(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    nodes, ranks_per_node = size
    layout = ParamLayout.of(shape, nodes, ranks_per_node)
    if layout.dim is None:
        return
    full = torch.arange(math.prod(shape)).reshape(shape)

    def home(node: int, place: int) -> torch.Tensor:
        rows = layout.rows[layout.chunk(node, place)]
        return full.narrow(layout.dim or 0, layout.local_start(node, place), rows)

    pieces = [
        torch.cat([home(node, place) for node in range(nodes)], layout.dim)
        for place in range(ranks_per_node)
    ]
    assert torch.equal(torch.cat(pieces, layout.dim), full)


@given(shapes, ranks)
def test_every_shard_fits_its_slot_and_one_fills_it(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    layout = ParamLayout.of(shape, *size)
    places = [(n, p) for n in range(size[0]) for p in range(size[1])]
    elements = [math.prod(layout.local_shape(node, place)) for node, place in places]
    assert max(elements) == layout.slot_elements
    assert layout.slot_rows == max(layout.rows)
    assert sorted(layout.chunk(*place) for place in places) == list(range(layout.ranks))
    if shape:
        assert sum(elements) == math.prod(shape)
        assert layout.is_even == (sum(layout.rows) == layout.slot_rows * layout.ranks)


@given(shapes.filter(bool), ranks)
def test_chosen_dim_has_the_least_padding_and_is_the_first_such(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    def travels(dim: int) -> int:
        layout = ParamLayout(shape=shape, dim=dim, nodes=size[0], ranks_per_node=size[1])
        return layout.slot_elements * layout.ranks

    traffic = [travels(dim) for dim in range(len(shape))]
    assert choose_dim(shape, *size) == traffic.index(min(traffic))


@given(shapes.filter(bool), ranks)
def test_home_shards_in_chunk_order_are_the_parameter(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    layout = ParamLayout.of(shape, *size)
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = [rows_of(whole, layout, n, place) for place in range(size[1]) for n in range(size[0])]
    assert layout.dim is not None
    assert torch.equal(torch.cat(parts, layout.dim), whole)
    places = [(n, place) for place in range(size[1]) for n in range(size[0])]
    assert [tuple(p.shape) for p in parts] == [layout.local_shape(*where) for where in places]


@pytest.mark.parametrize("shape", [(4, 4096), (4096, 4)])
def test_a_rank_4_adapter_on_8_ranks_is_not_padded(shape: tuple[int, int]) -> None:
    layout = ParamLayout.of(shape, 2, 4)
    assert layout.dim == shape.index(4096)
    assert layout.is_even
    assert layout.slot_elements * layout.ranks == 4 * 4096


def test_a_scalar_is_whole_on_every_rank() -> None:
    layout = ParamLayout.of((), 3, 2)
    assert layout.dim is None
    assert layout.slot_elements == 1
    assert not layout.is_even
    assert {layout.local_shape(n, p) for n in range(3) for p in range(2)} == {()}
    assert {layout.local_start(n, p) for n in range(3) for p in range(2)} == {0}


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0)])
def test_an_empty_parameter_sends_nothing(shape: tuple[int, ...]) -> None:
    layout = ParamLayout.of(shape, 2, 3)
    assert layout.slot_elements == 0
    assert all(math.prod(layout.local_shape(n, p)) == 0 for n in range(2) for p in range(3))


def test_a_bias_of_3_on_4_ranks_leaves_one_rank_empty() -> None:
    layout = ParamLayout.of((3,), 2, 2)
    assert layout.slot_elements == 1
    assert layout.rows == (1, 1, 1, 0)


def test_an_embedding_of_50257_rows_is_cut_along_its_even_dimension() -> None:
    assert ParamLayout.of((50257, 768), 2, 2).dim == 1
    odd = ParamLayout.of((50257, 767), 2, 2)
    assert odd.dim == 0
    assert sum(odd.rows) == 50257
    assert odd.slot_elements * odd.ranks - 50257 * 767 < 4 * 767


def test_a_slot_costs_nothing_to_compute_on_a_million_ranks() -> None:
    assert ParamLayout.of((2**40, 3), 2**20, 2**40).slot_rows == 1


@pytest.mark.parametrize(
    ("dim", "nodes", "ranks_per_node"), [(2, 1, 1), (-1, 1, 1), (None, 1, 1), (0, 0, 1), (0, 1, 0)]
)
def test_nonsense_is_refused(dim: int | None, nodes: int, ranks_per_node: int) -> None:
    with pytest.raises(ValueError, match=r"layout|dimension"):
        ParamLayout(shape=(4, 4), dim=dim, nodes=nodes, ranks_per_node=ranks_per_node)


def test_a_scalar_has_no_dimension_to_cut() -> None:
    with pytest.raises(ValueError, match="dimension 0"):
        ParamLayout(shape=(), dim=0, nodes=1, ranks_per_node=1)
