"""The interface between the runtime and a device, and the host as a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has reached this event."""

    def synchronize(self) -> None:
        """Make the Python thread wait until the device has reached this event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one; both must be reached and recorded with is_timed."""


class Stream(Protocol):
    """Work that the device does in order."""

    def wait_event(self, event: Any) -> None:
        """Make work that is given to the stream from now on wait for an event."""

    def __hash__(self) -> int:
        """Equal for all objects that represent the same stream."""


class Device(ABC):
    """One device of this process; unless it is a StreamDevice, its work is done when a call returns.

    kind: its type in torch.  backends: the backend argument for `torch.distributed.init_process_group`.
    is_checked: whether it checks that its streams access memory in a safe order, as one of the tests does.
    timeout: the default timeout of its collectives; None: torch's default.
    """

    kind: ClassVar[str]
    is_checked: ClassVar[bool] = False
    backends: ClassVar[str]
    timeout: ClassVar[timedelta | None] = None

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device

    # --- the devices of this kind -------------------------------------------------------------------------

    @classmethod
    def of(cls, torch_device: torch.device) -> Device:
        """The Device for a device of torch."""
        return cls(torch_device)

    @classmethod
    def is_available(cls) -> bool:
        """Whether this process can use a device of this kind."""
        return False

    @classmethod
    def current(cls) -> torch.device:
        """The device of this kind that this process uses now."""
        return torch.device(cls.kind)

    @classmethod  # noqa: B027  # there is one host
    def choose(cls, local_rank: int) -> None:
        """Make the device for a rank of this machine this process's current one."""

    @classmethod
    def is_capturing(cls) -> bool:
        """Whether this thread's current stream is being captured into a graph that may be replayed later."""
        return False

    def enter_thread(self) -> None:  # noqa: B027  # there is one host
        """Make the device the current one of this thread; each thread begins with the first device."""

    def synchronize(self) -> None:  # noqa: B027  # nothing to do on the host
        """Make the Python thread wait for its current stream."""

    # --- work, for a device of the tests that checks it ---------------------------------------------------

    def watching(self, what: str) -> AbstractContextManager[Any]:
        """Check this thread's operators within a block.  what: a name for them in errors."""
        return nullcontext()

    def launch(self, segment: Callable[[list[Any]], Any], args: list[Any], what: str) -> Any:
        """Call a compiled segment on its list of arguments, which the segment may empty."""
        return segment(args)

    def note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:  # noqa: B027
        """Report the tensors that unwatched work on this thread's current stream has read and written."""

    # --- memory -------------------------------------------------------------------------------------------

    @abstractmethod
    def total_bytes(self) -> int | None:
        """The memory of the device; None if the device is the host."""

    def free_bytes(self) -> int | None:
        """The memory that no process uses; None if the device is the host."""
        return None

    def used_bytes(self) -> int:
        """The memory that new tensors of this process cannot have; 0 if the device does not count it.

        Its tensors, and what libraries, the driver and other processes use; not what torch keeps for tensors.
        """
        return 0

    def peak_bytes(self) -> int | None:
        """The peak memory of this process's tensors; None if the device does not count it."""
        return None

    @property
    def shares_memory(self) -> bool:
        """Whether a device with memory of its own in torch has the host's memory in fact."""
        return False

    # --- memory of the host -------------------------------------------------------------------------------

    @property
    def registers(self) -> bool:
        """Whether memory of the host must be registered for copies to be fast."""
        return False

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """A host buffer like this tensor, for fast copies to and from the device.

        The caller may drop the buffer as soon as the last copy was given to a stream.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def register(self, address: int, size_bytes: int) -> str:
        """Register memory of the host; returns why that is not possible, or an empty string."""
        return ""

    def unregister(self, address: int) -> None:  # noqa: B027  # nothing to do on the host
        """Undo `register`, after waiting for copies that were started."""

    # --- collectives --------------------------------------------------------------------------------------

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        """Whether collectives of a group run on the current stream; other collectives block their caller.

        group: None: the default group.
        """
        return False

    # --- random numbers -----------------------------------------------------------------------------------

    def rng_state(self) -> Tensor | None:
        """The state of the device's own random generator; None if the device is the host."""
        return None

    def set_rng_state(self, state: Tensor) -> None:  # noqa: B027  # nothing to do on the host
        """Set the device's random generator to a state from `rng_state`."""

    # --- identity -----------------------------------------------------------------------------------------

    def name(self) -> str:
        """The GPU's model name, or "cpu"."""
        return "cpu"

    def identity(self) -> str | None:
        """A GPU's id, unique across machines; None if the device is the host."""
        return None


class StreamDevice(Device):
    """A device whose work is given to streams and done later."""

    @abstractmethod
    def new_stream(self, *, is_urgent: bool) -> Stream:
        """A new stream; the device starts the work of an urgent stream first."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that this thread's work for the device goes to."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make the stream this thread's current stream within a block."""

    @abstractmethod
    def record(self, *, is_timed: bool = False) -> Event:
        """Record an event after all work that this thread's current stream has been given so far."""


class Cpu(Device):
    """The host itself."""

    kind = "cpu"
    backends = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @classmethod
    def of(cls, torch_device: torch.device) -> Device:
        return cls()

    @classmethod
    def is_available(cls) -> bool:
        return True

    def total_bytes(self) -> int | None:
        return None
