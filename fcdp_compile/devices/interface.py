"""What the runtime asks of any device."""

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
        """Whether the device has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one; both must be past and have been made to be timed."""


class Stream(Protocol):
    """Work that the device does in order."""

    def wait_event(self, event: Any) -> None:
        """Let what is given to the stream from now on come after an event."""

    def __hash__(self) -> int:
        """The same for every object that stands for one stream."""


class Device(ABC):
    """One device of this process.

    has_streams: whether work is given to streams and done later; else it is done when a call returns.
    backends: what `torch.distributed.init_process_group` is asked for.
    is_checked: whether it checks what streams do.
    timeout: how long its collectives wait unless they are told; None: as long as torch says.
    """

    has_streams: ClassVar[bool]
    is_checked: ClassVar[bool] = False
    backends: ClassVar[str]
    timeout: ClassVar[timedelta | None] = None

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

    # --- what runs, for a device that checks it (`checked`) -----------------------------------------------

    def watching(self, what: str) -> AbstractContextManager[Any]:
        """Within, this thread runs what the name says."""
        return nullcontext()

    def launch(self, segment: Callable[[list[Any]], Any], args: list[Any], what: str) -> Any:
        """Call a compiled segment on its arguments, which it may empty."""
        return segment(args)

    def note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:  # noqa: B027
        """Say what something has touched on this thread's current stream that is not watched itself."""

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

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """A buffer of the host that copies to and from the device are fast with.

        It may go as soon as the last copy was given to a stream.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

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

    def identity(self) -> str | None:
        """What tells this card from all others, also of other machines; None if the device is the host."""
        return None
