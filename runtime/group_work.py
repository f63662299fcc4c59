"""What collectives of any kind need on a lane: work in two parts, and staging for Gloo."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fcdp_compile.runtime.tasks import Begun


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
    return torch.empty(elements, dtype=like.dtype, pin_memory=True)
