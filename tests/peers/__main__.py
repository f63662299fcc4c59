"""Run other projects' suites on 2 x 2 ranks: `make peers`, python -m tests.peers --help.

Outcomes go to docs/peers/outcomes.json after every case; docs/peers.md is written from that file.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.peers import fsdp_tests, serving, sources
from tests.peers.outcomes import Status, read, write
from tests.peers.report import write_report

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "docs" / "peers" / "outcomes.json"
SUITES = {
    "operators": "tests.peers.operators",
    "modules": "tests.peers.modules",
    "peft": "tests.peers.peft_models",
    "accelerate": "tests.peers.accelerate_scripts",
    "transformers": "tests.peers.transformers_fsdp",
    "fsdp": "tests.peers.fsdp_tests",
}
_FETCHED = {"peft": "peft", "transformers": "transformers"}
_AGAIN = (Status.FAILED, Status.REFUSED)
PAGE = ROOT / "docs" / "peers.md"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--suite", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument(
        "--again", action="store_true", help="also run cases that were equal or skipped"
    )
    parser.add_argument(
        "--torch-tests", type=Path, help="a folder with PyTorch's test_fully_shard_*.py, for fsdp"
    )
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the cases that have not been equal yet; returns 1 if one failed."""
    args = parse(arguments)
    if args.torch_tests:
        os.environ[fsdp_tests.FOLDER] = str(args.torch_tests.resolve())
    failed = False
    # The page also shows what was run before, beside the number of all cases.
    for suite in _FETCHED.keys() & {*args.suite, *read(args.outcomes)}:
        sources.fetch(_FETCHED[suite])
    for suite in args.suite:
        if suite == "fsdp" and not args.torch_tests:
            print("fsdp is left out: --torch-tests names a folder with PyTorch's tests of FSDP2")
            continue
        known = read(args.outcomes).get(suite, {})
        names = importlib.import_module(SUITES[suite]).cases()
        wanted = [
            case
            for case in names
            if args.only in case
            and (args.again or case not in known or known[case].status in _AGAIN)
        ]
        for case, outcome in serving.outcomes(SUITES[suite], wanted):
            print(f"{suite}: {case}: {outcome.status} {outcome.text}", flush=True)
            known[case] = outcome
            write(args.outcomes, read(args.outcomes) | {suite: known})
            failed |= outcome.status is Status.FAILED
    write_report(PAGE, read(args.outcomes), SUITES)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
