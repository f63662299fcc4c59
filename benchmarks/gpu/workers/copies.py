"""The speed of copies of our pinned pool's slabs, compared with a plain cudaMemcpy of equal size."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.results import Copies
from benchmarks.gpu.workers.setting import Setting
from fcdp_compile.devices import device_of
from fcdp_compile.runtime.cache.pinned import PinnedPool

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind
_REPEATS = 10
_COPIED_BYTES, _QUICK_BYTES = 512 * 2**20, 2**20


def copies(setting: Setting) -> Copies:
    """Time both kinds of copies on the device."""
    return measure_copies(setting.device, _QUICK_BYTES if setting.is_quick else _COPIED_BYTES)


def measure_copies(device: torch.device, copied_bytes: int) -> Copies:
    """Copy back and forth, all ways in turn; the first turn warms up and does not count.

    Where there is no CUDA, the plain copy is torch's: a trial of the code, no finding.
    """
    pool = PinnedPool(device_of(device))
    slab = pool.take(copied_bytes, torch.uint8).zero_()
    buffer = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
    plain = device_of(device).pinned_like(buffer).zero_()
    copy = _plain_copy(device)

    ways: dict[str, Callable[[], object]] = {
        "pool_h2d_s": lambda: buffer.copy_(slab, non_blocking=True),
        "plain_h2d_s": lambda: copy(buffer, plain, _HOST_TO_DEVICE),
        "pool_d2h_s": lambda: slab.copy_(buffer, non_blocking=True),
        "plain_d2h_s": lambda: copy(plain, buffer, _DEVICE_TO_HOST),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_REPEATS + 1):
        for name, run in ways.items():
            seconds[name].append(timed(run, device))
    kept = {name: found[1:] for name, found in seconds.items()}
    is_pinned = slab.is_pinned() if device_of(device).registers else None
    return Copies(copied_bytes=copied_bytes, is_pinned=is_pinned, **kept)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has finished `run`."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work; on a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _plain_copy(device: torch.device) -> Callable[[Tensor, Tensor, int], None]:
    if device.type != "cuda":

        def move(to: Tensor, source: Tensor, kind: int) -> None:
            to.copy_(source)

        return move
    cudart = ctypes.CDLL(_cudart_file())
    cudart.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def copy(to: Tensor, source: Tensor, kind: int) -> None:
        code = cudart.cudaMemcpy(to.data_ptr(), source.data_ptr(), to.nbytes, kind)
        if code:
            raise RuntimeError(f"cudaMemcpy of {to.nbytes} bytes failed with code {code}")

    return copy


def _cudart_file() -> str:
    """Return the path of the CUDA runtime that torch has loaded; torch's binding has no cudaMemcpy."""
    found = re.search(r"/\S*libcudart[^/\s]*\.so\S*", Path("/proc/self/maps").read_text())
    if found is None:
        raise RuntimeError(
            "torch has loaded no libcudart to compare with; use a CUDA build of torch"
        )
    return found[0]
