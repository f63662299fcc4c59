"""Run a job on nodes that live on this machine: `python -m benchmarks.cluster --nodes 2 -- script.py`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from benchmarks.cluster.arguments import PROGRAM, parse
from benchmarks.cluster.errors import ClusterError
from benchmarks.cluster.job import run
from benchmarks.cluster.nodes import Nodes


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks; returns the exit code."""
    request = parse(argv)
    try:
        with Nodes(request.nodes, bits_per_s=request.bits_per_s) as nodes:
            report = run(request, nodes)
    except ClusterError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report.to_json() if request.as_json else report.to_table(), flush=True)
    return report.exit_code


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # SIGTERM and a closed terminal unwind the stack like a Ctrl-C, so that the nodes are removed.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _end)
    sys.exit(main())
