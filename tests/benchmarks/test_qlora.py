"""The table of the comparison of QLoRA, from rows."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.qlora.__main__ import table
from builders_bench import LOSSES, make_row


def test_a_line_shows_bytes_seconds_and_the_difference_from_ddp() -> None:
    losses = [LOSSES[1][0], *(x * 1.25 for x in LOSSES[1][1:])]
    rows = [
        make_row("ddp", "qlora", network="unlimited", step_s=[0.5]),
        make_row("ddp", "qlora", sent_bytes=50_000_000),
        make_row("fcdp", "qlora", losses=losses, number=0),
        make_row("fcdp", "qlora", losses=losses, number=1, step_s=[9.0]),
    ]
    rows = [replace(row, first_sent_bytes=[2_000_000, 4_000_000]) for row in rows]
    _, _, *lines, sizes = table(rows).splitlines()
    ddp, fcdp = ([cell.strip() for cell in line.split("|")][1:-1] for line in lines)
    assert ddp == [
        *("DDP", "no ranks", "3.00", "75.00"),
        *("0.50 (0.50 – 0.50, n=1)", "2.00 (1.00 – 3.00, n=3)", "3", "1", "0.0e+00"),
    ]
    assert fcdp == [
        *("fcdp", "all ranks", "3.00", "100.00"),
        *("", "2.50 (1.00 – 9.00, n=4)", "3", "1", "2.5e-01"),
    ]
    assert sizes.startswith("weights ")
