"""What a device offers: streams and events, memory, memory that it copies from the host, collectives.

    Device        what the runtime asks of any device
      Cpu         no streams: what runs beside compute runs on threads
      Cuda        NVIDIA's cards, and AMD's, for which torch has the same API

No other module names a kind of device.  Support for another accelerator is one more class here.  The tests
have a simulated device (tests/runtime/simulated_device.py).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context, as what torch pins


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one; both must be past and have been made to be timed."""


class Stream(Protocol):
    """Work that the device does in order."""

    def wait_event(self, event: Any) -> None:
        """Let what is given to the stream from now on come after an event."""


class Device(ABC):
    """One device of this process.

    has_streams: whether work is given to streams and done later; else it is done when a call returns.
    backends: what `torch.distributed.init_process_group` is asked for.
    """

    has_streams: ClassVar[bool]
    backends: ClassVar[str]

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device

    # --- streams ------------------------------------------------------------------------------------------

    @abstractmethod
    def new_stream(self, *, is_urgent: bool) -> Stream:
        """A stream; the device starts the work of an urgent one first."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that gets what this thread gives to the device."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within, the stream is this thread's current one."""

    @abstractmethod
    def record(self, *, is_timed: bool = False) -> Event:
        """An event behind what this thread's current stream has been given."""

    def synchronize(self) -> None:  # noqa: B027  # nothing to do on the host
        """Let the Python thread wait for its current stream."""

    # --- memory -------------------------------------------------------------------------------------------

    @abstractmethod
    def total_bytes(self) -> int | None:
        """The memory of the device; None if the device is the host."""

    def free_bytes(self) -> int | None:
        """The memory that no process uses; None if the device is the host."""
        return None

    def allocated_bytes(self) -> int:
        """The memory of this process's tensors; 0 where nobody counts it."""
        return 0

    def peak_bytes(self) -> int | None:
        """The most memory that tensors of this process ever had; None where nobody counts it."""
        return None

    # --- memory of the host -------------------------------------------------------------------------------

    @property
    def registers(self) -> bool:
        """Whether memory of the host must be registered for copies to be fast."""
        return False

    def register(self, address: int, size_bytes: int) -> str:
        """Register memory of the host; returns why that is not possible, or nothing."""
        return ""

    def unregister(self, address: int) -> None:  # noqa: B027  # nothing to do on the host
        """Take back `register`, once no copy that was started reads or writes the memory any longer."""

    # --- collectives --------------------------------------------------------------------------------------

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        """Whether collectives of a group are given to the current stream; others block their caller.

        group: the default group if it is None.
        """
        return False

    # --- random numbers -----------------------------------------------------------------------------------

    def rng_state(self) -> Tensor | None:
        """The state of the generator that belongs to the device; None if that is the host's."""
        return None

    def set_rng_state(self, state: Tensor) -> None:  # noqa: B027  # nothing to do on the host
        """Continue as `rng_state` was."""

    # --- who it is ----------------------------------------------------------------------------------------

    def name(self) -> str:
        """The name of the model of the card, or "cpu"."""
        return "cpu"

    def pci_address(self) -> str | None:
        """The address of a card, such as "0000:3b:00.0"."""
        return None

    def identity(self) -> str | None:
        """What tells this card from all others, also of other machines; None if the device is the host."""
        return None


class Cpu(Device):
    """The host itself."""

    has_streams = False
    backends = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def new_stream(self, *, is_urgent: bool) -> Stream:
        raise NotImplementedError("a CPU has no streams")

    def current_stream(self) -> Stream:
        raise NotImplementedError("a CPU has no streams")

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, *, is_timed: bool = False) -> Event:
        raise NotImplementedError("a CPU has no events")

    def total_bytes(self) -> int | None:
        return None


class Cuda(Device):
    """A card that torch drives by `torch.cuda`: NVIDIA's, or AMD's with ROCm."""

    has_streams = True
    backends = "cpu:gloo,cuda:nccl"

    def new_stream(self, *, is_urgent: bool) -> Stream:
        stream: Stream = torch.cuda.Stream(self.torch, priority=-1 if is_urgent else 0)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self.torch)
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        within: AbstractContextManager[Any] = torch.cuda.stream(stream)  # type: ignore[arg-type]
        return within

    def record(self, *, is_timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch).synchronize()

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def allocated_bytes(self) -> int:
        # `torch.cuda.memory_allocated` flattens and sorts some 200 figures to look one up (112 us).
        found = torch.cuda.memory_stats_as_nested_dict(self.torch)
        return int(found["allocated_bytes"]["all"]["current"]) if found else 0

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch))

    @property
    def registers(self) -> bool:
        return True

    def register(self, address: int, size_bytes: int) -> str:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.torch):
            code = cudart.cudaHostRegister(address, size_bytes, _PORTABLE)
            if int(code) == 0:
                return ""
            self._forget_error()
            return str(cudart.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.torch):
            torch.cuda.synchronize(self.torch)
            torch.cuda.cudart().cudaHostUnregister(address)

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        # Such as "cpu:gloo,cuda:nccl"; `get_backend` knows no groups of several backends.
        pairs = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
        return dict(pairs).get(self.torch.type) == "nccl"

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch)

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def pci_address(self) -> str:
        # torch's stubs lack what torch.numa reads, too.
        p: Any = torch.cuda.get_device_properties(self.torch)
        return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch).uuid)

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next launch of anybody's kernel would report as its own."""
        # torch (2.11 to 2.15) has no cudaGetLastError, but a launch reads and clears it.
        try:
            torch.ones(1, device=self.torch).add_(1)
        except RuntimeError as error:
            log.debug("cleared the error of cudaHostRegister: %s", error)


def device_of(torch_device: torch.device) -> Device:
    """What a device of torch offers."""
    return Cuda(torch_device) if torch_device.type == "cuda" else Cpu()


def current_device(kind: str | None = None) -> Device:
    """The device of a kind ("cuda", "cpu") that this process uses.

    kind: of a mesh; by default the card, or the CPU where there is none.
    """
    if torch.cuda.is_available() if kind is None else kind == "cuda":
        return Cuda(torch.device("cuda", torch.cuda.current_device()))
    return Cpu()
