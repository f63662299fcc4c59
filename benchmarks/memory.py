"""A process's resident memory: now, and its peak since the last reset (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size


def resident_bytes() -> int:
    """Resident set size."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The largest resident set size since `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Give unused memory back to the system and start a new peak from what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which would count as used
    _CLEAR_REFS.write_text(_RESET_PEAK)


def _field(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {name}; the benchmark needs Linux")
    return 1024 * int(found[1])
