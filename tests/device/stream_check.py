"""Check that the streams' accesses to memory are ordered by events or waits.

Streams run in any order that events and synchronisation allow, so one correct run on a GPU proves little:
its order may have been luck.  This check uses not the order that happened but the guaranteed order
(`clocks`).  An event carries its stream's clock, and a party that waits for it merges the clock into its own.

    read     of memory whose last write may not be done yet
    write    to memory that a party may still read or write
    free     of memory that another stream may still use: the next kernel of its owner may get the memory
    host     reads or writes registered memory that a stream may still use

Each of these is a `StreamError` that names the step, the operator, the line, and the conflicting access.

The check covers work within `watching`: the runtime's programs, and the tasks of its lanes.  A dispatch mode
observes the operators there, so the check does not rely on reports of the runtime.  Compiled segments launch
kernels that the mode does not see; they count as reading their arguments and writing their results.

The check distinguishes memory by storage: two halves of a tensor count as one piece.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat import DispatchMode, OpOverload, is_wrapper_subclass, tree_leaves
from fcdp_compile.torch_compat.tensors import storage_id
from tests.device.clocks import Access, CheckedMemory, Clock, Clocks, Party

_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operators of aten whose results have memory but no values."""

_COPIES = ("copy_", "_to_copy")
"""Operators of aten that may cross between the host and the device."""

_FROM_PYTHON = "lift_fresh"
"""The operator of aten through which `torch.tensor` passes its result."""

_ITEM = "_local_scalar_dense"
"""The operator of aten by which the host reads a number from the device."""

_HOST = ("host", None)
"""The owner of registered memory."""

_HERE = Path(__file__).parent


class StreamError(FcdpError):
    """No event or wait orders two accesses to memory; a bug of fcdp."""


class StreamCheck:
    """The clocks of a device's streams, and the memory that operators have touched within `watching`.

    current: returns the calling thread's current stream.
    """

    def __init__(self, device: torch.device, current: Callable[[], Party]) -> None:
        self._device = device
        self._current = current
        self._clocks = Clocks()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._compute = current()  # owns memory that no task of another stream made
        self._alive: dict[int, tuple[StorageWeakRef, CheckedMemory]] = {}
        self._registered: dict[int, CheckedMemory] = {}  # by address

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Check the operators of this thread within a block.  what: a name for them in errors."""
        before = getattr(self._local, "what", None)
        self._local.what = what
        try:
            with _OperatorWatch(self) if before is None else nullcontext():
                yield
        finally:
            self._local.what = before

    # --- order --------------------------------------------------------------------------------------------

    def record(self, make: Callable[[], Any]) -> tuple[Any, Clock]:
        """Make an event of this thread's current stream; returns the event and its clock.

        What this thread itself has done by now comes before the event, too.
        """
        with self._swept():
            party = self._current()
            made, clock = make(), dict(self._clocks.now(_host(party)))
            for other, time in self._clocks.now(party).items():
                clock[other] = max(time, clock.get(other, 0))
            return made, clock

    def order(self, stream: Party, clock: Clock, wait: Callable[[], Any]) -> None:
        """Let a stream wait for an event, which has this clock."""
        with self._swept():
            wait()
            self._clocks.wait(stream, clock)

    def waited_for(self, clock: Clock | None = None) -> None:
        """Note that the Python thread has waited for an event with this clock, or for its current stream."""
        with self._lock:
            party = self._current()
            self._clocks.wait(_host(party), self._clocks.now(party) if clock is None else clock)

    # --- accesses -----------------------------------------------------------------------------------------

    def note(
        self,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        what: str,
        made: Sequence[Tensor] = (),
    ) -> None:
        """Check an operator of this thread's current stream, or of the host, and note its accesses.

        made: results that have their own memory.

        Raises: StreamError.
        """
        with self._swept():
            party = stream = self._current()
            given = [self._memory(t, self._compute) for t in (*reads, *writes)]
            if given and all(m.is_of_host for m in given):
                party = _host(stream)
            results = [self._memory(t, party) for t in made]
            self._clocks.wait(party, self._clocks.now(_host(stream)))
            access = Access(party, self._clocks.work(party), f"{what} in {self._where()}")
            for memory in given[: len(reads)]:
                if conflict := self._clocks.read(memory, access):
                    raise _error("reads memory that may not be written yet", access, conflict)
            for memory in (*given[len(reads) :], *results):
                if conflict := self._clocks.write(memory, access):
                    raise _error("writes to memory that may still be in use", access, conflict)

    def allocated(self, made: Sequence[Tensor]) -> None:
        """Note new memory without values, which belongs to this thread's current stream."""
        with self._swept():
            for tensor in made:
                self._memory(tensor, self._current())

    # --- memory -------------------------------------------------------------------------------------------

    def pinned(self, tensor: Tensor) -> None:
        """Note that a tensor is in host memory."""
        storage = tensor.untyped_storage()
        memory = CheckedMemory(_HOST, storage.nbytes(), is_of_host=True)
        # The mode has already noted this tensor; if the device is a CPU, as memory of the device.
        with self._lock:
            self._alive[storage._cdata] = StorageWeakRef(storage), memory

    def registered(self, address: int, size_bytes: int) -> None:
        """Note that host memory was registered."""
        with self._lock:
            self._registered[address] = CheckedMemory(_HOST, size_bytes, is_of_host=True)

    def unregistered(self, address: int) -> None:
        """Note that host memory is no longer registered."""
        with self._lock:
            del self._registered[address]

    def is_of_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory of the host."""
        with self._lock:
            return self._memory(tensor, self._compute).is_of_host

    def alive_bytes(self) -> int:
        """Bytes of the device's memory that operators have touched and that is not freed."""
        with self._swept():
            return sum(m.bytes for _, m in self._alive.values() if not m.is_of_host)

    def _memory(self, tensor: Tensor, maker: Party) -> CheckedMemory:
        storage = tensor.untyped_storage()
        if (slab := self._registered.get(storage.data_ptr())) is not None:
            return slab
        key = storage._cdata
        if key not in self._alive:
            is_of_host = tensor.device != self._device or isinstance(maker, tuple)
            memory = CheckedMemory(maker, storage.nbytes(), is_of_host=is_of_host)
            self._alive[key] = StorageWeakRef(storage), memory
        return self._alive[key][1]

    @contextmanager
    def _swept(self) -> Iterator[None]:
        """Hold the lock, and first check the memory that was freed since the last check.

        Raises: StreamError if a stream other than the owner may still use freed memory.
        """
        with self._lock:
            gone = [key for key, (reference, _) in self._alive.items() if reference.expired()]
            for key in gone:
                memory = self._alive.pop(key)[1]
                if memory.is_of_host:  # torch itself keeps pinned memory until copies are done
                    continue
                if conflict := self._clocks.unfinished(memory, memory.owner):
                    raise StreamError(
                        f"memory of {memory.bytes} bytes was freed while {_told(conflict)} may still use it; "
                        "this is a bug in fcdp"
                    )
            yield

    def _where(self) -> str:
        frames = traceback.extract_stack(limit=24)
        ours = [f for f in frames if "torch" not in f.filename and Path(f.filename).parent != _HERE]
        line = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "unknown"
        return f"{getattr(self._local, 'what', None) or 'no program'} ({line})"


class _OperatorWatch(DispatchMode):
    """Notes every operator of a thread."""

    def __init__(self, check: StreamCheck) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # a higher-order operator
            return func(*args, **kwargs)
        reads, writes = _given(func, args, kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        known = {storage_id(t) for t in (*reads, *writes)}
        found = _with_memory(result)
        made = [t for t in found if storage_id(t) not in known]
        if name in _UNWRITTEN or name == _FROM_PYTHON:
            self._check.allocated(found)
            return result
        if not made and not writes and name != _ITEM:  # a view
            return result
        self._check.note(reads, writes, name, made)
        if name == _ITEM or (
            name in _COPIES and self._waits(func, args, kwargs, [*reads, *writes, *made])
        ):
            self._check.waited_for()
        return result

    def _waits(self, func: Any, args: Any, kwargs: Any, touched: list[Tensor]) -> bool:
        """Whether a copy makes the Python thread wait: a blocking copy between the host and the device."""
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        kinds = {self._check.is_of_host(t) for t in touched}
        return len(kinds) > 1 and not given.get("non_blocking", False)


def _with_memory(value: Any) -> list[Tensor]:
    """The tensors in a value; a subclass that wraps other tensors has no memory of its own."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and not is_wrapper_subclass(t)]


def _given(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes to."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_collective = func.namespace == "c10d"  # its schemas do not mark what is written to
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = _with_memory(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (is_collective and not argument.name.startswith("input")):
            writes += tensors
        else:
            reads += tensors
    return reads, writes


def _host(party: Party) -> Party:
    """The Python thread that gives a stream its work."""
    return ("host", party)


def _told(access: Access) -> str:
    party = access.party
    return (
        access.what if not isinstance(party, tuple) else f"the Python thread, with {access.what},"
    )


def _error(what: str, access: Access, conflict: Access) -> StreamError:
    return StreamError(
        f"{_told(access)} {what}: no event orders it after {_told(conflict)}; this is a bug in fcdp"
    )
