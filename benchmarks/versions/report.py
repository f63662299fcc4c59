"""Write docs/versions.md from the results and from the notes in docs/versions/notes.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tabulate import tabulate

from benchmarks.versions.parts import PARTS
from benchmarks.versions.results import Result, numbers

_HEAD = """\
# Versions of torch and Python

<!-- Written by `make versions` from versions/results.json and versions/notes.md. -->

fcdp uses internals of torch (`fcdp_compile/torch_compat/`). So `make versions` tries each release of
torch in the supported range, on a machine without a GPU. CUDA builds of torch run there, too.

    make versions                                                        # everything that has no result
    make versions VERSIONS_ARGS="--torch 2.15.0 --python 3.12 --again"   # one pair again

The command needs `python3.11`, `python3.12` and `python3.13` on the PATH, about 5 GB in `build/versions`,
and 2 GB for the current environment. It removes this environment afterwards (`--keep` keeps it). It
writes each result at once, so you can stop it and start it again. It is not part of CI.
"""


def write_report(
    page: Path,
    results: Mapping[tuple[str, str, str], Result],
    torches: Iterable[str],
    pythons: Iterable[str],
) -> None:
    """Write the page: a row for each pair, a column for each part."""
    rows = [
        [torch, python, *(_cell(results.get((python, torch, part.name))) for part in PARTS)]
        for torch in sorted(torches, key=numbers)
        for python in sorted(pythons, key=numbers)
    ]
    heads = ["torch", "Python", *(part.name for part in PARTS)]
    about = "\n".join(f"* **{part.name}**: {part.about}" for part in PARTS)
    notes = page.with_suffix("") / "notes.md"
    parts = [
        _HEAD,
        "## What passed\n",
        f"{about}\n",
        "A number counts the tests that passed. Failed tests are listed below.\n",
        f"{tabulate(rows, heads, tablefmt='pipe')}\n",
        f"{_builds(results.values())}\n",
        *_failures(results.values()),
        notes.read_text(encoding="utf-8") if notes.exists() else "",
    ]
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _cell(result: Result | None) -> str:
    if result is None:
        return "not run"
    if result.failures:
        return f"**{len(result.failures)} failed**, {result.passed}"
    return "passed" if result.part == "demo" else str(result.passed)


def _builds(results: Iterable[Result]) -> str:
    found = list(results)
    builds = sorted({r.torch for r in found}, key=lambda b: numbers(b.partition("+")[0]))
    commits = ", ".join(sorted({r.commit for r in found}))
    pythons = ", ".join(sorted({r.python for r in found}))
    return f"Builds: {', '.join(builds)}. Python {pythons}. fcdp at {commits}."


def _failures(results: Iterable[Result]) -> list[str]:
    lines = [
        f"* {r.torch}, Python {r.python}, {r.part}: `{name}`"
        for r in results
        for name in r.failures
    ]
    return ["## What failed\n", "\n".join(lines) + "\n"] if lines else []
