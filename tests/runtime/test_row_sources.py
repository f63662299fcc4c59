"""Rows read in place of a gather: taken if they equal the gathered rows, else refused on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders_plan import make_bucket
from fcdp_compile.core.params.packing import pack_home
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.params.spec import Home, param_spec
from fcdp_compile.runtime.cache.row_sources import RowSources
from fcdp_compile.strategy import Strategy

MESH = Home(nodes=2, ranks_per_node=2, node=1, place=0)
SHAPES = {"w": (5, 3), "v": (7,), "s": ()}
BUCKET = replace(
    make_bucket(0, list(SHAPES.items()), dtype=("float32", 4), nodes=2, ranks_per_node=2),
    frozen=True,
)
WHOLE = {name: torch.randn(shape) for name, shape in SHAPES.items()}


def _spec(name: str) -> ParamSpec:
    return param_spec(
        name, name, shape=SHAPES[name], dtype=torch.float32, strategy=Strategy.parse("fcdp"),
        mesh=MESH, param_dtype=None, reduce_dtype=None,
    )  # fmt: skip


SPECS = [_spec(name) for name in SHAPES]


def _shard(whole: Tensor, spec: ParamSpec, node: int, place: int) -> Tensor:
    layout = spec.layout
    if layout.dim is None:
        return whole.clone()
    rows = layout.local_shape(node, place)[layout.dim]
    return whole.narrow(layout.dim, layout.local_start(node, place), rows)


def _home(node: int) -> Tensor:
    shards = [_shard(WHOLE[s.name], s, node, MESH.place) for s in SPECS]
    return pack_home(shards, [s.layout for s in SPECS], torch.float32, node)


class FromMemory:
    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.closed = 0

    def read(self, key: str, node: int, place: int) -> Tensor:
        return _shard(self.values[key], _spec(key), node, place)

    def close(self) -> None:
        self.closed += 1


class FakeCollectives:
    """Two nodes of two ranks; a test sets what the other ranks find."""

    def __init__(self, other_node: int | None, other_place: int = 7) -> None:
        self.other_node, self.other_place = other_node, other_place
        self.asked: list[list[int]] = []

    def agree(self, words: list[int], what: str = "") -> list[list[int]]:
        self.asked.append(words)
        mark = words[2] if self.other_node is None else self.other_node
        neighbours = [[1, 1, self.other_place], [1, 1, self.other_place]]
        return [[1, 0, mark], words, *neighbours]


def _ask(sources: RowSources, collectives: FakeCollectives, bucket: Any = BUCKET) -> Tensor | None:
    fake: Any = collectives
    return sources.node_shard(bucket, SPECS, _home(MESH.node), MESH, fake)


def test_what_is_read_is_the_node_shard() -> None:
    rows, sources, collectives = FromMemory(WHOLE), RowSources(), FakeCollectives(None)
    sources.offer(SHAPES, rows)
    expected = torch.cat([_home(0), _home(1)])
    for again in (1, 2):
        found = _ask(sources, collectives)
        assert found is not None
        assert torch.equal(found, expected)
        assert rows.closed == again
    assert collectives.asked[0] == [1, 0, int(fingerprint([expected]))]


def test_nobody_is_asked_without_all_rows_or_for_what_is_trained() -> None:
    sources, collectives = RowSources(), FakeCollectives(None)
    assert _ask(sources, collectives) is None
    sources.offer(["w", "v"], FromMemory(WHOLE))
    assert _ask(sources, collectives) is None
    sources.offer(["s"], FromMemory(WHOLE))
    assert _ask(sources, collectives, replace(BUCKET, frozen=False)) is None
    assert collectives.asked == []
    assert _ask(sources, collectives) is not None


def _broken(node: int) -> FromMemory:
    """Rows that have changed on one node; or a reader that fails."""
    if node < 0:
        return FromMemory({})
    values = {name: value.clone() for name, value in WHOLE.items()}
    _shard(values["w"], _spec("w"), node, MESH.place).view(torch.uint8)[0, 0] ^= 1
    return FromMemory(values)


@pytest.mark.parametrize("node", [-1, 1])
def test_other_rows_than_the_own_are_refused(node: int) -> None:
    sources, collectives = RowSources(), FakeCollectives(None)
    rows = _broken(node)
    sources.offer(SHAPES, rows)
    assert _ask(sources, collectives) is None
    assert collectives.asked == [[0, 0, 0]]
    assert rows.closed == 1
    assert _ask(sources, collectives) is None  # and no rank is asked again
    assert len(collectives.asked) == 1


def test_nodes_that_read_different_rows_refuse_them() -> None:
    sources = RowSources()
    sources.offer(SHAPES, _broken(0))  # this rank alone cannot see the difference
    collectives = FakeCollectives(int(fingerprint([torch.cat([_home(0), _home(1)])])))
    assert _ask(sources, collectives) is None
    assert collectives.asked[0][0] == 1
