from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reporting.plots import draw
from benchmarks.reporting.record import read_record, write_record
from benchmarks.reporting.report import write_report
from benchmarks.reporting.rows import Cell, Failure, ResultRow, read_rows, write_records
from benchmarks.running.matrix import Skipped
from builders_bench import make_record, make_row


def report(rows: list[ResultRow], notes: str = "", **changes: object) -> str:
    return write_report(rows, make_record(**changes), plots=[], notes=notes)


def line_of(page: str, start: str, section: str = "# Benchmark") -> str:
    """The first line of a section's tables that begins with this cell."""
    rest = page[page.index(section) :]
    return next(line for line in rest.splitlines() if line.startswith(f"| {start} "))


def test_a_row_shows_what_was_measured() -> None:
    rows = [
        make_row("ddp", step_s=[2.0, 1.0, 6.0], sent_bytes=150_000_000),
        make_row("ddp", network="unlimited", step_s=[0.5], sent_bytes=150_000_000),
    ]
    line = line_of(report(rows), "DDP", "### Full")
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "DDP",
        "no ranks",
        "150.00",
        "1.5000",
        "0.50 (n=1)",
        "2.00 (1.00 – 6.00, n=3)",
        "9.0",
        "3",
        "1",
        "7.3000 after 3",
    ]


def test_wrong_losses_are_said_and_keep_a_system_out_of_the_advice() -> None:
    page = report([make_row("ddp"), make_row("fsdp2", step_s=[0.1], losses=[7.5, 7.5, 7.5])])
    assert "**WRONG**: loss 7.50000 after step 2" in line_of(page, "FSDP2", "### Full")
    advice = page[page.index("## When") : page.index("## Results")]
    assert "**DDP** 2.00 s" in advice
    assert "FSDP2" not in advice


def test_unchecked_losses_are_said() -> None:
    assert "unchecked" in line_of(report([make_row("fcdp")]), "fcdp", "### Full")


def test_advice_ranks_by_where_the_state_fits() -> None:
    times = {"ddp": 1.0, "hsdp": 2.0, "fcdp": 3.0, "fsdp2": 4.0}
    page = report([make_row(name, "lora", step_s=[s]) for name, s in times.items()])
    cells = [cell.strip() for cell in line_of(page, "LoRA", "## When").strip("|").split("|")]
    assert cells[3:] == [
        "**DDP** 1.00 s, then HSDP 2.00 s",
        "**HSDP** 2.00 s, then fcdp 3.00 s",
        "**fcdp** 3.00 s, then FSDP2 4.00 s",
    ]


def test_what_was_not_measured_is_listed_with_the_reason() -> None:
    cell = Cell("fsdp2", "full", 8, "100mbit")
    page = report(
        [make_row("ddp")],
        skipped=[Skipped(cell=cell, step_s=217.4)],
        failures=[Failure(system="ds-hpz", mode="lora", why="no compiler")],
    )
    missing = page[page.index("## Not measured") :]
    assert "* DeepSpeed ZeRO-3 + hpZ, LoRA: no compiler" in missing
    assert "FSDP2, Full fine-tuning, accumulation 8, 100 Mbit/s: left out for time" in missing
    assert "about 217 s" in missing
    assert "## Not measured" not in report([make_row("ddp")])


def test_setting_and_notes_are_in_the_page() -> None:
    rows = [make_row("ddp", compute_s=1.0), make_row("ddp", compute_s=1.5, number=1)]
    page = report(rows, notes="## Why\n\nBecause.\n")
    assert "Measured on 2026-01-02" in page
    assert "Abacus, 2 cores, 1 GiB" in page
    assert "50 % longer in one launch" in page
    assert "## Why\n\nBecause.\n" in page


def test_without_rows_nothing_is_claimed() -> None:
    assert "| met " not in report([])
    rows = [make_row(name, step_s=[s]) for name, s in {"ddp": 1.0, "fcdp": 8.1}.items()]
    assert "| met " in report(rows), "the control: targets are judged"


def test_the_same_rows_give_the_same_plots(tmp_path: Path) -> None:
    rows = [make_row("ddp"), make_row("fcdp", step_s=[1.0]), make_row("ddp", "lora", 8, "1gbit")]
    files = draw(rows, tmp_path)
    assert [file.name for file in files] == ["lora.svg", "full.svg"]
    before = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in draw(rows, tmp_path)] == before
    draw([make_row("ddp"), make_row("fcdp", step_s=[1.5])], tmp_path)
    assert files[1].read_bytes() != before[1], "the control: other rows give another plot"


def test_rows_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert read_rows(path) == []
    rows = [make_row("ddp"), make_row("fcdp", "lora", 8, "unlimited")]
    write_records(path, rows)
    assert read_rows(path) == rows
    assert len(json.loads(path.read_text())) == 2
    write_records(path, [])
    assert read_rows(path) == []


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = make_record(
        skipped=[Skipped(cell=Cell("ddp", "full", 1, "1gbit"), step_s=1.5)],
        failures=[Failure(system="ds-hpz", mode="lora", why="no compiler")],
    )
    assert read_record(tmp_path / "run.json") is None
    write_record(tmp_path / "run.json", record)
    assert read_record(tmp_path / "run.json") == record


@pytest.mark.parametrize("text", ["{", '[{"system": "ddp"}]', "[1]"])
def test_foreign_files_are_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="delete it or pass another --out"):
        read_rows(path)
