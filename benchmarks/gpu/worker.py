"""One process of one part; the driver starts it: worker PART --device cuda|cpu --out FILE --seconds S."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.driver import EXIT_NOT_RUN, STACKS
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Found, write_found
from benchmarks.gpu.workers.setting import NotRunError, Setting

_BY_NAME = {part.name: part for part in PARTS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part; rank 0 writes the findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(_BY_NAME))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    until_s = time.monotonic() + args.seconds
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
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
        part = _BY_NAME[args.part]
        module, _, function = part.runs.partition(".")
        run = getattr(importlib.import_module(f"benchmarks.gpu.workers.{module}"), function)
        write(run(*part.arguments, setting))
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
