"""What collectives of any kind need on a lane: waiting for blocking ones, and staging for Gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.runtime.tasks import Begun

_LOOK = timedelta(seconds=0.25)
"""How often a blocked collective looks whether the interpreter ends."""


def finish(work: dist.Work, exiting: Event) -> None:
    """Wait for a collective that blocks; until the interpreter ends, for which see `thread_lane`."""
    while not work.is_completed():
        try:
            work.wait(_LOOK)
        except RuntimeError:
            # Either it took longer, or failed, or was done right after: only the work itself can tell.
            if exiting.is_set():
                raise
    work.wait()


def now_or_later(last: Callable[[], None], left: Begun | None) -> Begun | None:
    """Do `last` after what is left: now, if that is nothing."""
    if left is None:
        last()
        return None

    def both() -> None:
        left.finish()
        last()

    return Begun(both)


def on_host(tensor: Tensor) -> Tensor:
    """A pinned copy of a flat CUDA tensor, complete."""
    host = pinned(tensor, tensor.numel())
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # this thread's own stream, off the Python main thread
    return host


def to_device(out: Tensor, host: Tensor) -> None:
    """Start to copy a pinned tensor to the device."""
    out.copy_(host, non_blocking=True)
    # The allocator of pinned memory notes which stream reads it, so `host` may go.


def pinned(like: Tensor, elements: int) -> Tensor:
    """A pinned buffer."""
    return torch.empty(elements, dtype=like.dtype, device="cpu", pin_memory=True)
