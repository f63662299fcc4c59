"""Try each supported torch on each supported Python: `make versions`, python -m benchmarks.versions --help.

Each part's result is written to docs/versions/results.json at once; a part with a result does not run again.
After every part, docs/versions.md is written from that file and docs/versions/notes.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.versions.environments import ROOT, PythonAndTorch, make
from benchmarks.versions.parts import PARTS, run
from benchmarks.versions.report import write_report
from benchmarks.versions.results import add, numbers, read

TORCHES = ("2.15.0", "2.11.0", "2.14.1", "2.12.1", "2.13.0")  # the ends of the range first
PYTHONS = ("3.12", "3.11", "3.13")
_RESULTS = ROOT / "docs" / "versions" / "results.json"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parts = [part.name for part in PARTS]
    parser.add_argument(
        "--torch", nargs="+", default=TORCHES, metavar="VERSION", help="such as 2.15.0"
    )
    parser.add_argument(
        "--python", nargs="+", default=PYTHONS, choices=PYTHONS, help="found on the PATH"
    )
    parser.add_argument("--part", nargs="+", default=parts, choices=parts)
    parser.add_argument("--again", action="store_true", help="also run pairs that have a result")
    parser.add_argument("--report", action="store_true", help="only write docs/versions.md")
    parser.add_argument(
        "--keep", action="store_true", help="leave environments after their last part"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / "build" / "versions",
        help="a folder for them: about 5 GB, and 2 GB for each that is kept",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run all parts that have no result; returns 1 if a part failed or a Python was not found."""
    args = parse(arguments)
    folder = args.environments.resolve()
    fine = True
    for torch in () if args.report else args.torch:
        for minor in args.python:
            done = {} if args.again else read(_RESULTS)
            todo = [p for p in PARTS if p.name in args.part and (minor, torch, p.name) not in done]
            if not todo:
                continue
            cell = PythonAndTorch(python=f"python{minor}", torch=torch)
            if not _runs(cell.python):
                print(f"{cell.python} is not on the PATH", file=sys.stderr)
                fine = False
                continue
            try:
                python = make(cell, max(args.torch, key=numbers), folder)
            except subprocess.CalledProcessError as error:
                print(f"{cell.name}: {error}", file=sys.stderr)
                fine = False
                continue
            for part in todo:
                result = run(part, python, folder / "logs" / cell.name)
                add(_RESULTS, result)
                write_report(ROOT / "docs" / "versions.md", read(_RESULTS), TORCHES, PYTHONS)
                fine &= not result.failures
                print(f"{cell.name} {part.name}: {result}", flush=True)
            if not args.keep:
                shutil.rmtree(folder / cell.name)
    write_report(ROOT / "docs" / "versions.md", read(_RESULTS), TORCHES, PYTHONS)
    return 0 if fine else 1


def _runs(python: str) -> bool:
    try:
        return subprocess.run([python, "-V"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
