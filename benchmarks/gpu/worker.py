"""One process of one part; the driver starts it: worker PART --device cuda|cpu --out FILE --seconds S."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.results import Found, write_found
from benchmarks.gpu.workers.copies import copies
from benchmarks.gpu.workers.cuda_tests import cuda_tests
from benchmarks.gpu.workers.lane_runs import lane_runs
from benchmarks.gpu.workers.parity import parity
from benchmarks.gpu.workers.setting import NotRunError, Setting
from benchmarks.gpu.workers.training import train
from benchmarks.gpu.workers.watched import sanitizer, streams

EXIT_NOT_RUN = 77

RUN: dict[str, Callable[[Setting], Found]] = {
    "copies": copies,
    "lanes": lane_runs,
    "parity": parity,
    "tests": cuda_tests,
    "sanitizer": sanitizer,
    "streams": streams,
    "fcdp-full": partial(train, "fcdp", "full"),
    "fcdp-lora": partial(train, "fcdp", "lora"),
    "segments-full": partial(train, "segments", "full"),
    "plain-full": partial(train, "plain", "full"),
    "plain-lora": partial(train, "plain", "lora"),
    "fsdp2-full": partial(train, "fsdp2", "full"),
    "megatron-full": partial(train, "megatron", "full"),
}
"""The function that runs each part, by the part's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part; rank 0 writes the findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(RUN))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    until_s = time.monotonic() + args.seconds
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(0)
    is_first = int(os.environ.get("RANK", "0")) == 0
    write = partial(write_found, args.out) if is_first else _forget
    setting = Setting(
        device=torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu"),
        is_quick=args.quick,
        until_s=until_s,
        folder=args.out.parent,
        write=write,
    )
    try:
        write(RUN[args.part](setting))
    except NotRunError as reason:
        print(reason, file=sys.stderr)
        return EXIT_NOT_RUN
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _forget(found: Found) -> None:
    """Drop the findings of a rank other than 0: rank 0 has equal findings."""


if __name__ == "__main__":
    sys.exit(main())
