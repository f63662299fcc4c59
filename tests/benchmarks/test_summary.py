from __future__ import annotations

import math

import pytest

from benchmarks.reporting.rows import Cell
from benchmarks.reporting.summary import LOSS_TOLERANCE, summarise
from builders_bench import LOSSES, make_row


def test_rounds_of_a_cell_are_taken_together() -> None:
    rows = [
        make_row("ddp", step_s=[1.0, 5.0], sent_bytes=10, number=0),
        make_row("ddp", step_s=[2.0], sent_bytes=40, number=1),
    ]
    (summary,) = summarise(rows).values()
    assert (summary.n, summary.step_s, summary.least_s, summary.most_s) == (3, 2.0, 1.0, 5.0)
    assert summary.sent_bytes == 20
    assert (summary.heap_bytes, summary.host_bytes) == (3 * 2**20, 2**20)
    assert summary.losses == 3


def test_the_network_needs_bytes_over_bandwidth() -> None:
    rows = [make_row("ddp", network=n, sent_bytes=12_500_000) for n in ("100mbit", "unlimited")]
    capped, uncapped = summarise(rows).values()
    assert capped.transfer_s == pytest.approx(1.0)
    assert uncapped.transfer_s == 0


@pytest.mark.parametrize(
    ("losses", "is_right"),
    [
        (LOSSES[1], True),
        ([x * (1 + LOSS_TOLERANCE / 2) for x in LOSSES[1]], True),
        ([*LOSSES[1][:2], LOSSES[1][2] * (1 + 2 * LOSS_TOLERANCE)], False),
        ([math.nan, *LOSSES[1][1:]], False),
        (LOSSES[1][:2], False),
    ],
)
def test_losses_are_held_against_ddp(losses: list[float], is_right: bool) -> None:
    cells = summarise([make_row("fcdp", losses=losses), make_row("ddp", network="1gbit")])
    summary = cells[Cell("fcdp", "full", 1, "100mbit")]
    assert summary.is_right == is_right
    assert (summary.wrong is None) == is_right


def test_one_wrong_round_spoils_the_cell() -> None:
    rows = [make_row("ddp"), make_row("fcdp"), make_row("fcdp", losses=[7.5, 7.5, 7.5], number=1)]
    wrong = summarise(rows)[Cell("fcdp", "full", 1, "100mbit")].wrong
    assert wrong == "loss 7.50000 after step 2, ddp has 7.40000"


def test_without_ddp_of_the_same_kind_nothing_is_right() -> None:
    rows = [make_row("fcdp"), make_row("ddp", mode="lora"), make_row("ddp", accumulation=8)]
    assert not summarise(rows)[Cell("fcdp", "full", 1, "100mbit")].is_right
