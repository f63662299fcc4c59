"""The devices that the runtime supports: their streams and events, memory, pinned host memory, collectives.

    Device             the interface that the runtime uses
      Cpu              no streams: work beside compute runs on threads
      StreamDevice     adds streams and events
        Cuda           GPUs that torch drives by `torch.cuda`

Another accelerator is one class that is given to `register`; nothing else names a kind of device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fcdp_compile.devices.cuda import Cuda as Cuda
from fcdp_compile.devices.interface import Cpu as Cpu
from fcdp_compile.devices.interface import Device as Device
from fcdp_compile.devices.interface import Event as Event
from fcdp_compile.devices.interface import Stream as Stream
from fcdp_compile.devices.interface import StreamDevice as StreamDevice

_classes: dict[str, type[Device]] = {}
"""The classes by the kind of device; of the available ones the last one is used."""


def register(device: type[Device]) -> type[Device]:
    """Let fcdp use a class of devices, before the others; usable as a decorator."""
    _classes[device.kind] = device
    return device


register(Cpu)
register(Cuda)


def device_of(torch_device: torch.device) -> Device:
    """The Device for a device of torch; the host for kinds that have no class, such as "meta"."""
    return _classes.get(torch_device.type, Cpu).of(torch_device)


def choose_device(local_rank: int | None) -> Device:
    """Choose the device for a rank of this machine and make it this process's current device.

    local_rank: the rank's number on its machine; None leaves the current device.
    """
    if local_rank is not None:
        _best().choose(local_rank)
    return current_device()


def is_capturing() -> bool:
    """Whether this thread's current stream is being captured into a graph that may be replayed later."""
    return _best().is_capturing()


def are_on_stream(kind: str, group: dist.ProcessGroup | None) -> bool:
    """Whether a group's collectives on devices of a kind run on streams; others block their caller."""
    return device_of(torch.device(kind)).runs_on_stream(group)


def current_device(kind: str | None = None) -> Device:
    """The device of a kind ("cuda", "cpu") that this process uses.

    kind: a mesh's device type; by default the accelerator, or the CPU if there is none.
    """
    found = _best() if kind is None else _classes.get(kind, Cpu)
    return device_of(found.current())


def _best() -> type[Device]:
    return next(c for c in reversed(_classes.values()) if c.is_available())
