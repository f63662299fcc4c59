"""The devices that the runtime supports: their streams and events, memory, pinned host memory, collectives.

    Device             the interface that the runtime uses
      Cpu              no streams: work beside compute runs on threads
      StreamDevice     adds streams and events
        Cuda           GPUs of NVIDIA, and of AMD, for which torch has the same API
        CheckedDevice  wraps a device with streams and checks their order (FCDP_CHECK_STREAMS=1)

Only `cuda` names a kind of GPU.  To support another accelerator, add a class here.  The tests have a
simulated device (tests/runtime/simulated_device.py).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from fcdp_compile.devices.checked import CheckedDevice
from fcdp_compile.devices.cpu import Cpu
from fcdp_compile.devices.cuda import Cuda, choose_card, has_nccl
from fcdp_compile.devices.interface import Device, Event, Stream, StreamDevice

__all__ = [
    "CheckedDevice",
    "Cpu",
    "Cuda",
    "Device",
    "Event",
    "Stream",
    "StreamDevice",
    "are_on_stream",
    "choose_device",
    "current_device",
    "device_of",
    "is_capturing",
]


def device_of(torch_device: torch.device) -> Device:
    """The Device for a device of torch."""
    if torch_device.type != "cuda":
        return Cpu()
    card = Cuda(torch_device)
    return CheckedDevice(card) if os.environ.get("FCDP_CHECK_STREAMS") == "1" else card


def choose_device(local_rank: int | None) -> Device:
    """Choose the device for a rank of this machine and make it this process's current device.

    local_rank: the rank's number on its machine; None leaves the current device.
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

    kind: a mesh's device type; by default the GPU, or the CPU if there is no GPU.
    """
    if torch.cuda.is_available() if kind is None else kind == "cuda":
        return device_of(torch.device("cuda", torch.cuda.current_device()))
    return Cpu()
