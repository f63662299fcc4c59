"""NUMA nodes: which one a GPU is attached to, its cores, and memory on it.

Everything here is a hint for speed.  Where there is one NUMA node, or nothing is known, or the kernel
refuses, it does nothing and says so at DEBUG level.  "Node" means NUMA node in this file alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

from fcdp_compile.devices import Device

log = logging.getLogger(__name__)

_SYS = Path("/sys")
_TASKS = Path("/proc/self/task")

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call by machine; libc has no function for it and libnuma may be missing."""

# Not MPOL_BIND (2): on a full node that gets the process killed, while this takes memory from elsewhere.
_MPOL_PREFERRED = 1
_MASK_BITS = 1024  # the most nodes that a Linux kernel is built with


def node_of(device: Device, *, sys_root: Path = _SYS) -> int | None:
    """The node that a device is attached to, None if it is no card or nothing is known."""
    address = device.pci_address()
    return None if address is None else node_of_pci(address, sys_root=sys_root)


def node_of_pci(address: str, *, sys_root: Path = _SYS) -> int | None:
    """The node of the device at a PCI address such as "0000:3b:00.0"; None if unknown or the only one."""
    text = _read(sys_root / "bus/pci/devices" / address.lower() / "numa_node")
    known = _nodes(sys_root)
    if text is None or len(known) < 2:
        return None
    node = int(text)  # -1 where the firmware does not say
    return node if node in known else None


def cores_of(node: int, *, sys_root: Path = _SYS) -> frozenset[int]:
    """The cores of a node, none if it has none or does not exist."""
    text = _read(sys_root / f"devices/system/node/node{node}/cpulist")
    return parse_list(text or "")


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a kernel list such as "0-3,8,10-11"."""
    ranges = [part.partition("-")[::2] for part in text.split(",") if part]
    return frozenset(i for first, last in ranges for i in range(int(first), int(last or first) + 1))


def bind_process(node: int | None, *, sys_root: Path = _SYS, tasks: Path = _TASKS) -> bool:
    """Let every thread of this process run on a node's cores alone; returns whether that was done.

    Threads and processes started later inherit it.  A process that somebody bound before (a launcher,
    taskset, a cpuset) is left as it is.
    """
    if node is None or len(_nodes(sys_root)) < 2:
        return False
    cores = cores_of(node, sys_root=sys_root)
    every = parse_list(_read(sys_root / "devices/system/cpu/online") or "")
    if not cores or os.sched_getaffinity(0) != every:
        log.debug("not bound to NUMA node %d: no cores, or bound already", node)
        return False
    for thread in sorted(int(task.name) for task in tasks.iterdir()):
        try:
            if os.sched_getaffinity(thread) == every:
                os.sched_setaffinity(thread, cores)
        except OSError as error:  # the thread has ended, or the system forbids it
            log.debug("thread %d not bound to NUMA node %d: %s", thread, node, error)
    return os.sched_getaffinity(0) == cores


def bind_memory(address: int, size_bytes: int, node: int) -> bool:
    """Take the pages of untouched memory from a node while it has any; returns whether that was done.

    address: a multiple of the page size.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word_bits))()
    mask[node // word_bits] = 1 << node % word_bits
    failed: int = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),  # the kernel looks at one bit less
        ctypes.c_uint(0),
    )
    if failed:
        log.debug("mbind to NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    return not failed


def _nodes(sys_root: Path) -> frozenset[int]:
    return parse_list(_read(sys_root / "devices/system/node/online") or "")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
