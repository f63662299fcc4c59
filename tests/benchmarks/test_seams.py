"""The tables of graph breaks and of starts, and the places of breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from benchmarks.seams import starts_table, steps_table
from benchmarks.systems.train_fcdp import breaks_after
from builders_bench import make_row


def test_seconds_are_compared_with_the_first_system() -> None:
    rows = [
        replace(make_row(system, "full", step_s=[s], sent_bytes=10**7), first_step_s=first)
        for system, s, first in (("fcdp", 2.0, 9.0), ("fcdp-layers", 3.0, 4.0))
    ]
    _, _, *lines = steps_table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")][1:-1] for line in lines]
    loss = f"{rows[0].check_losses[-1]:.5f}"
    assert cells == [
        ["fcdp", "10.00", "3", "1", loss, "2.00 (1.00)", "9.0"],
        ["fcdp, layers by themselves", "10.00", "3", "1", loss, "3.00 (1.50)", "4.0"],
    ]


def test_starts_are_compared_with_the_fewest_layers() -> None:
    line = starts_table({"fcdp-layers": {4: 2.0, 24: 3.0}}).splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")][2:-1] == ["2.0 (1.00)", "3.0 (1.50)"]


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("fcdp", []),
        ("fcdp-break-1", [3]),
        ("fcdp-break-3", [1, 3, 5]),
        ("fcdp-break-all", list(range(8))),
    ],
)
def test_breaks_lie_evenly(name: str, after: list[int]) -> None:
    blocks = [nn.Identity() for _ in range(8)]
    assert [blocks.index(block) for block in breaks_after(name, blocks)] == after
