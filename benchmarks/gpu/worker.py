"""One process of one part; the driver starts it: worker PART --device KIND --out FILE --seconds S."""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.driver import EXIT_NOT_RUN, FLIGHTS, STACKS
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Found, write_found
from benchmarks.gpu.workers.setting import NotRunError, Setting
from fcdp_compile.torch_compat.distributed import last_collectives

_BY_NAME = {part.name: part for part in PARTS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part; rank 0 writes the findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(_BY_NAME))
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args(argv)
    until_s = time.monotonic() + args.seconds
    part = _BY_NAME[args.part]
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    rank = int(os.environ.get("RANK", "0"))
    _write_flights_on_signal(args.out.parent / f"{args.part}-flight-{rank}.json.gz")
    torch.set_num_threads(1)
    write = partial(write_found, args.out) if rank == 0 else _forget
    setting = Setting(
        device=_device(args.device, rank if part.cards > 1 else 0),
        is_quick=args.quick,
        is_plain=args.plain,
        until_s=until_s,
        folder=args.out.parent,
        write=write,
    )
    try:
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


def _device(kind: str, card: int) -> torch.device:
    if kind == "sim":
        importlib.import_module("tests.device.sim").use()
        return torch.device(kind, 0)
    if kind == "cuda":
        torch.cuda.set_device(card)
        return torch.device(kind, card)
    return torch.device(kind)


def _write_flights_on_signal(file: Path) -> None:
    """Let a thread wait for the signal: the main thread may be stuck in a collective.

    Whichever thread gets the signal, its C handler tells the waiting thread.
    """
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach())
    signal.signal(FLIGHTS, lambda number, frame: None)

    def write() -> None:
        while told.recv(1) != bytes([FLIGHTS]):
            pass
        file.write_bytes(gzip.compress(last_collectives()))

    threading.Thread(target=write, name="flights", daemon=True).start()


def _forget(found: Found) -> None:
    """Drop the findings of a rank other than 0: rank 0 has equal findings."""


if __name__ == "__main__":
    sys.exit(main())
