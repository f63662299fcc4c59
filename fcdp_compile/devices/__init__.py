"""What a device offers: streams and events, memory, memory that it copies from the host, collectives.

    Device           what the runtime asks of any device
      Cpu            no streams: what runs beside compute runs on threads
      Cuda           NVIDIA's cards, and AMD's, for which torch has the same API
      CheckedDevice  any of them that has streams, and checks what they do (FCDP_CHECK_STREAMS=1)

No module but `cuda` names a kind of card.  Support for another accelerator is one more class here.  The tests
have a simulated device (tests/runtime/simulated_device.py).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from fcdp_compile.devices.checked import CheckedDevice
from fcdp_compile.devices.cpu import Cpu
from fcdp_compile.devices.cuda import Cuda, choose_card, has_nccl
from fcdp_compile.devices.interface import Device, Event, Stream

__all__ = [
    "CheckedDevice",
    "Cpu",
    "Cuda",
    "Device",
    "Event",
    "Stream",
    "are_on_stream",
    "choose_device",
    "current_device",
    "device_of",
    "is_capturing",
]


def device_of(torch_device: torch.device) -> Device:
    """What a device of torch offers."""
    if torch_device.type != "cuda":
        return Cpu()
    card = Cuda(torch_device)
    return CheckedDevice(card) if os.environ.get("FCDP_CHECK_STREAMS") == "1" else card


def choose_device(local_rank: int | None) -> Device:
    """The device for a rank of this machine, from now on this process's current one.

    local_rank: its number among those of the machine; None leaves the current device.
    """
    if local_rank is not None and torch.cuda.is_available():
        choose_card(local_rank)
    return current_device()


def is_capturing() -> bool:
    """Whether this thread's current stream is being captured into a graph that may be replayed later."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def are_on_stream(kind: str, group: dist.ProcessGroup | None) -> bool:
    """Whether a group's collectives on devices of a kind run on streams; others block their caller."""
    return kind == "cuda" and has_nccl(group)


def current_device(kind: str | None = None) -> Device:
    """The device of a kind ("cuda", "cpu") that this process uses.

    kind: of a mesh; by default the card, or the CPU where there is none.
    """
    if torch.cuda.is_available() if kind is None else kind == "cuda":
        return device_of(torch.device("cuda", torch.cuda.current_device()))
    return Cpu()
