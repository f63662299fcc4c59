"""The peak of a process's heap: the bytes that malloc has handed out, torch's CPU tensors among them (glibc).

The resident set is not used: it includes freed memory and modules that compilers loaded, three times the
tensors of a small model.  Memory mapped without malloc, such as the slabs of fcdp's host cache, is left out.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from types import TracebackType

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_INTERVAL_S = 0.001


class _Mallinfo2(ctypes.Structure):
    """The struct of mallinfo(3): uordblks are bytes in use, hblkhd the bytes of blocks mapped one by one."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2]:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError as error:
        raise RuntimeError(
            "memory is measured with mallinfo2; it needs glibc 2.33 or newer"
        ) from error
    function.restype = _Mallinfo2
    found: Callable[[], _Mallinfo2] = function
    return found


def heap_bytes() -> int:
    """Return the bytes that malloc has handed out and not got back, over all threads."""
    info = _mallinfo2()()
    return int(info.uordblks + info.hblkhd)


class HeapPeak:
    """The largest `heap_bytes` within a `with` block; a thread of its own looks every millisecond.

    The thread slows down the block a little, so no block is timed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HeapPeak:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, heap_bytes())
            time.sleep(_INTERVAL_S)
