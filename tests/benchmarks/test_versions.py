"""The results and the page of `make versions`; its environments take gigabytes, so no test makes them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.running.machine import commit
from benchmarks.versions import __main__ as versions
from benchmarks.versions import parts
from benchmarks.versions.parts import PARTS, VersionsPart, run
from benchmarks.versions.report import write_report
from benchmarks.versions.results import Result, add, read

FINE = Result(
    python="3.12.1", torch="2.13.0+cpu", part="bytes", passed=17, skipped=0, failures=(),
    seconds=9.5, commit="abc",
)  # fmt: skip


def test_each_result_is_written_at_once_in_the_place_of_an_older_one(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.json"
    assert read(file) == {}
    other = replace(FINE, python="3.11.7")
    failed = replace(FINE, passed=15, failures=("test_a.py::test_b", "test_a.py::test_c"))
    for result in (FINE, other, failed):
        add(file, result)
    assert read(file) == {("3.11", "2.13.0", "bytes"): other, ("3.12", "2.13.0", "bytes"): failed}


def test_the_page_tells_passed_from_failed_from_not_run(tmp_path: Path) -> None:
    failed = replace(FINE, torch="2.11.0", part="parity", passed=5, failures=("test_a.py::test_b",))
    demo = replace(FINE, part="demo", passed=1)
    page = tmp_path / "versions.md"
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "notes.md").write_text("## By hand\n")
    results = {r.key: r for r in (FINE, failed, demo)}
    write_report(page, results, ("2.13.0", "2.11.0"), ("3.12",))
    text = page.read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    heads, _, first, second = rows
    assert dict(zip(heads, first, strict=True)) == {
        "torch": "2.11.0", "Python": "3.12", "parity": "**1 failed**, 5", "bytes": "not run",
        "staleness": "not run", "inductor": "not run", "demo": "not run", "fast": "not run",
    }  # fmt: skip
    assert (second[0], second[3], second[6]) == ("2.13.0", "17", "passed")
    assert "* 2.11.0, Python 3.12.1, parity: `test_a.py::test_b`" in text
    assert text.endswith("## By hand\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "passed", "skipped", "failures"),
    [
        ("def test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass", 1, 1, ()),
        ("def test_a(): pass\ndef test_b(): assert False", 1, 0, ("test_it.py::test_b",)),
        ("import nothing_of_this_name", 0, 0, ("test_it.py",)),
    ],
)
def test_what_pytest_says_is_read(
    body: str, passed: int, skipped: int, failures: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    (tmp_path / "test_it.py").write_text(f"import pytest\n{body}\n")
    pytest_in = (
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
        "test_it.py",
    )
    part = VersionsPart(name="it", about="", arguments=pytest_in, limit_s=300)
    found = run(part, Path(sys.executable), tmp_path / "logs")
    assert (found.passed, found.skipped, found.failures) == (passed, skipped, failures)
    assert found.commit == commit()


def test_a_part_that_fails_as_a_whole_says_how(tmp_path: Path) -> None:
    broken = VersionsPart(
        name="demo", about="", arguments=("-c", "raise SystemExit('no luck')"), limit_s=60
    )
    found = run(broken, Path(sys.executable), tmp_path)
    assert (found.passed, found.failures) == (0, ("exit 1: no luck",))


def test_the_command_knows_every_part() -> None:
    args = versions.parse(["--torch", "2.15.0", "--part", "parity", "demo"])
    assert (args.torch, args.part, args.python) == (
        ["2.15.0"],
        ["parity", "demo"],
        versions.PYTHONS,
    )
    assert versions.parse([]).part == [part.name for part in PARTS]
