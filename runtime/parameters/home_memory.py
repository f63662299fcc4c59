"""Parameters whose home shards live in pinned host memory: `shard(…, offload_params=True)`.

Source: ZeRO-Offload (Ren et al., 2021), section 4: states and fp32 parameters on the host, stepped there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fcdp_compile.buckets import may_leave
from fcdp_compile.devices import Device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.collectives import Collectives


def offloaded(
    specs: Mapping[nn.Parameter, ParamSpec], device: torch.device
) -> dict[nn.Parameter, ParamSpec]:
    """The specs with home shards in host memory.

    Frozen shards that leave the device anyway, once the cache has their values, stay as they are.

    device: for computation.

    Raises: ArgumentError if a rank has a whole parameter.
    """
    found = {}
    for p, spec in specs.items():
        if spec.layout.ranks == 1:
            raise ArgumentError(
                f"offload_params=True needs parameters that are cut over ranks, but every rank has all of "
                f"{spec.name!r} (strategy {spec.strategy.name!r}); use another strategy, more ranks, or "
                "fcdp_compile.offload(optimizer)"
            )
        leaves = may_leave(spec, is_frozen=not p.requires_grad)
        found[p] = spec if leaves else replace(spec, computes_on=device)
    return found


def book(
    specs: Iterable[ParamSpec],
    memory: HostMemory,
    collectives: Collectives,
    pool: PinnedPool,
    device: Device,
) -> None:
    """Take host memory for home shards, and as much for their gradients; all ranks of the mesh must call it.

    Raises: FcdpError on every rank if any rank has no room.
    """
    on_host = [spec for spec in specs if spec.computes_on is not None]
    if not on_host:
        return
    size = sum(_taken_bytes(spec.home_bytes, device) for spec in on_host)
    what = "home shards and gradients of offloaded parameters"
    memory.book(what, 2 * size, collectives, pool, is_pinned=device.registers)
    memory.home_bytes = size


def empty_home(spec: ParamSpec, device: Device) -> Tensor:
    """Memory on the host for a home shard; its values are undefined.

    No slab of a PinnedPool: the seals need storages that tell whether numpy has seen them (`params.seal`).
    """
    return device.pinned_like(torch.empty(spec.local_shape, dtype=spec.home_dtype, device="meta"))


def _taken_bytes(size: int, device: Device) -> int:
    """Bytes that memory for `size` bytes takes: torch's pinned allocator rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if device.registers and size else size
