"""Parameters whose home shards live in pinned host memory: `shard(…, offload_params=True)`.

Source: ZeRO-Offload (Ren et al., 2021), section 4: states and fp32 parameters on the host, stepped there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.devices import Device
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.collectives import Collectives


def book(
    specs: Mapping[ParamSpec, bool],
    memory: HostMemory,
    collectives: Collectives,
    pool: PinnedPool,
    device: Device,
) -> None:
    """Take host memory for home shards and their gradients; all ranks of the mesh must call it.

    specs: whether each parameter is trainable.

    Raises: FcdpError on every rank if any rank has no room.
    """
    on_host = [spec for spec in specs if spec.computes_on is not None]
    if not on_host:
        return
    taken = {spec: _taken_bytes(spec.home_bytes, device) for spec in on_host}
    homes, grads = sum(taken.values()), sum(taken[spec] for spec in on_host if specs[spec])
    what = "home shards and gradients of offloaded parameters"
    memory.book(what, homes + grads, collectives, pool, is_pinned=device.registers)
    memory.home_bytes = homes


def empty_home(spec: ParamSpec, device: Device) -> Tensor:
    """Memory on the host for a home shard; its values are undefined.

    No slab of a PinnedPool: seals need storages that tell whether numpy has seen them
    (`core.params.seals`).
    """
    return device.pinned_like(torch.empty(spec.local_shape, dtype=spec.home_dtype, device="meta"))


def _taken_bytes(size: int, device: Device) -> int:
    """Bytes that memory for `size` bytes takes: torch's pinned allocator rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if device.registers and size else size
