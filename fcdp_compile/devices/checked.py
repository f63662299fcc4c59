"""A device that checks what its streams do: every access to memory comes after those that it depends on.

Streams run in any order that events and synchronisation leave open, so one run on a card proves little: what
was right by luck may be wrong tomorrow.  This check does not go by what has happened, but by what must have
(`clocks`).  An event carries the clock of its stream, and who waits for the event takes the clock over.

    read     of what is not surely written yet
    write    to what somebody may still read or write
    free     of memory that another stream may still use: the next kernel of its owner may get it
    host     reads or writes registered memory that a stream may still use

Each is a `StreamError` that names the step, the operator, the line, and the access that it conflicts with.

Checked is what runs within `watching`: the runtime's programs, and the tasks of its lanes.  A dispatch mode
sees the operators there, so that nothing is believed that the runtime says of itself.  Compiled segments
launch kernels past the mode; they count as reading their arguments and writing their results (`launch`).

Memory is told apart by storage: two halves of a tensor are one.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fcdp_compile.devices.clocks import Access, Clock, Clocks, Memory, Party
from fcdp_compile.devices.interface import Device, Event, Stream
from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat import DispatchMode, OpOverload, storage_id, tree_leaves

_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operators of aten whose results have memory and no values."""

_COPIES = ("copy_", "_to_copy")
"""Operators of aten that may cross between the host and the device."""

_FROM_PYTHON = "lift_fresh"
"""The operator of aten through which `torch.tensor` passes what it has made."""

_ITEM = "_local_scalar_dense"
"""The operator of aten by which the host reads a number of the device."""

_HOST = ("host", None)
"""Whom registered memory belongs to."""


class StreamError(FcdpError):
    """Two accesses to memory that no event or wait puts in order; a fault of fcdp."""


class CheckedDevice(Device):
    """A device with streams, and the clocks of these.

    counts: of the memory that operators have touched within `watching`, what is alive.
    """

    has_streams = True
    is_checked = True

    def __init__(self, device: Device) -> None:
        assert device.has_streams, "a device without streams has nothing to check"
        super().__init__(device.torch)
        self._device = device
        self._clocks = Clocks()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._compute = (
            device.current_stream()
        )  # memory is its own unless a task of another made it
        self._alive: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._registered: dict[int, Memory] = {}  # by address

    @property
    def backends(self) -> str:  # type: ignore[override]
        return self._device.backends

    # --- streams ------------------------------------------------------------------------------------------

    def new_stream(self, *, is_urgent: bool) -> Stream:
        return _Stream(self, self._device.new_stream(is_urgent=is_urgent))

    def current_stream(self) -> _Stream:
        return _Stream(self, self._device.current_stream())

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._device.on(stream.inner)

    def record(self, *, is_timed: bool = False) -> Event:
        with self._lock:
            self._sweep()
            return _Event(self._device.record(is_timed=is_timed), self._clocks.now(self._party()))

    def synchronize(self) -> None:
        self._device.synchronize()
        self.waited_for()

    def order(self, stream: _Stream, event: _Event) -> None:
        """Let a stream come after an event."""
        with self._lock:
            self._sweep()
            stream.inner.wait_event(event.inner)
            self._clocks.wait(stream.inner, event.clock)

    # --- what runs ----------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        before = getattr(self._local, "what", None)
        self._local.what = what
        try:
            if before is None:
                with _Watch(self):
                    yield
            else:
                yield
        finally:
            self._local.what = before

    def launch(self, segment: Callable[[list[Any]], Any], args: list[Any], what: str) -> Any:
        given = [a for a in args if isinstance(a, Tensor)]
        self.note(given, [], f"{what} on its arguments")
        del given
        results = segment(args)
        self.note([], [r for r in results if isinstance(r, Tensor)], f"{what} on its results")
        return results

    def note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        """Check an operator of this thread's current stream, or of the host, and note what it touches.

        Raises: StreamError.
        """
        self.note_operator(reads, writes, [], what)

    def note_operator(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], made: Sequence[Tensor], what: str
    ) -> None:
        """As `note`.

        made: results with memory of their own.
        """
        with self._lock:
            self._sweep()
            party = stream = self._party()
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
        """Memory without values that belongs to this thread's current stream from now on."""
        with self._lock:
            self._sweep()
            for tensor in made:
                self._memory(tensor, self._party())

    def waited_for(self) -> None:
        """The Python thread has waited for its current stream."""
        with self._lock:
            party = self._party()
            self._clocks.wait(_host(party), self._clocks.now(party))

    def is_of_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory of the host."""
        with self._lock:
            return self._memory(tensor, self._compute).is_of_host

    def alive_bytes(self) -> int:
        """Bytes of the device's memory that operators have touched and nobody has freed."""
        with self._lock:
            self._sweep()
            return sum(m.bytes for _, m in self._alive.values() if not m.is_of_host)

    # --- memory -------------------------------------------------------------------------------------------

    def total_bytes(self) -> int | None:
        return self._device.total_bytes()

    def free_bytes(self) -> int | None:
        return self._device.free_bytes()

    def allocated_bytes(self) -> int:
        return self._device.allocated_bytes()

    def peak_bytes(self) -> int | None:
        return self._device.peak_bytes()

    @property
    def registers(self) -> bool:
        return self._device.registers

    def pinned_like(self, tensor: Tensor) -> Tensor:
        made = self._device.pinned_like(tensor)
        storage = made.untyped_storage()
        memory = Memory(_HOST, storage.nbytes(), is_of_host=True)
        with (
            self._lock
        ):  # the mode has seen it made, and taken it for the device's where that is a CPU
            self._alive[storage._cdata] = StorageWeakRef(storage), memory
        return made

    def register(self, address: int, size_bytes: int) -> str:
        if not (why := self._device.register(address, size_bytes)):
            with self._lock:
                self._registered[address] = Memory(_HOST, size_bytes, is_of_host=True)
        return why

    def unregister(self, address: int) -> None:
        self._device.unregister(address)
        with self._lock:
            del self._registered[address]

    # --- the rest is the device's -------------------------------------------------------------------------

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        return self._device.runs_on_stream(group)

    def rng_state(self) -> Tensor | None:
        return self._device.rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        self._device.set_rng_state(state)

    def name(self) -> str:
        return self._device.name()

    def pci_address(self) -> str | None:
        return self._device.pci_address()

    def identity(self) -> str | None:
        return self._device.identity()

    # --- clocks -------------------------------------------------------------------------------------------

    def _party(self) -> Party:
        """This thread's current stream."""
        return self._device.current_stream()

    def _memory(self, tensor: Tensor, maker: Party) -> Memory:
        storage = tensor.untyped_storage()
        if (slab := self._registered.get(storage.data_ptr())) is not None:
            return slab
        key = storage._cdata
        if key not in self._alive:
            is_of_host = tensor.device != self.torch or isinstance(maker, tuple)
            memory = Memory(maker, storage.nbytes(), is_of_host=is_of_host)
            self._alive[key] = StorageWeakRef(storage), memory
        return self._alive[key][1]

    def _sweep(self) -> None:
        """Check what has been freed since the last look.

        Raises: StreamError if a stream may still use it that the memory does not belong to.
        """
        gone = [key for key, (reference, _) in self._alive.items() if reference.expired()]
        for key in gone:
            memory = self._alive.pop(key)[1]
            if memory.is_of_host:  # torch's own pinned memory looks after itself
                continue
            if conflict := self._clocks.unfinished(memory, memory.owner):
                raise StreamError(
                    f"memory of {memory.bytes} bytes was freed while {_told(conflict)} may still use it; "
                    "this is a fault of fcdp"
                )

    def _where(self) -> str:
        frames = traceback.extract_stack(limit=24)
        ours = [f for f in frames if "torch" not in f.filename and f.filename != __file__]
        line = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "unknown"
        return f"{getattr(self._local, 'what', None) or 'no program'} ({line})"


class _Stream:
    def __init__(self, device: CheckedDevice, inner: Any) -> None:
        self._device = device
        self.inner = inner

    def wait_event(self, event: Any) -> None:
        self._device.order(self, event)


class _Event:
    def __init__(self, inner: Any, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock

    def query(self) -> bool:
        return bool(self.inner.query())

    def elapsed_time(self, end: _Event) -> float:
        return float(self.inner.elapsed_time(end.inner))


class _Watch(DispatchMode):
    """Notes every operator of a thread."""

    def __init__(self, device: CheckedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # a higher-order operator
            return func(*args, **kwargs)
        reads, writes = _given(func, args, kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        known = {storage_id(t) for t in (*reads, *writes)}
        found = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        made = [t for t in found if storage_id(t) not in known]
        if name in _UNWRITTEN or name == _FROM_PYTHON:
            self._device.allocated(found)
            return result
        if not made and not writes and name != _ITEM:  # a view
            return result
        self._device.note_operator(reads, writes, made, name)
        if name == _ITEM or (
            name in _COPIES and self._waits(func, args, kwargs, [*reads, *writes, *made])
        ):
            self._device.waited_for()
        return result

    def _waits(self, func: Any, args: Any, kwargs: Any, touched: list[Tensor]) -> bool:
        """Whether a copy makes the Python thread wait: one between the host and the device, if not told."""
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        kinds = {self._device.is_of_host(t) for t in touched}
        return len(kinds) > 1 and not given.get("non_blocking", False)


def _given(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes to."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_collective = func.namespace == "c10d"  # whose schemas do not say what they write to
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
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
        f"{_told(access)} {what}: no event puts it after {_told(conflict)}; this is a fault of fcdp"
    )
