"""The bytes of an optimizer's states that wait in host memory, as a formula.

    host       the slabs of all buckets, in whole pages
    in flight  device memory that the states take during a step: two buckets that follow each other
    moved      every bucket crosses the bus once in each direction

Steps on the host move gradients and parameters in the states' place, and keep both there beside the states.

With S state elements for each element of a parameter, a bucket has S times the bytes of its home shards,
each state rounded up to 16 bytes.  Source: ZeRO-Offload (Ren et al., 2021), section 4, for steps on the
host.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGNMENT = 16
"""Bytes; the widest load of a GPU's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one rank.

    host: of host memory or of files.  in_flight: the most of device memory at a time during a step.
    to_device, to_host: that cross the bus in a step in the steady state.
    """

    host: int
    in_flight: int
    to_device: int
    to_host: int


def state_bytes(buckets: Sequence[Sequence[int]], states: int) -> StateBytes:
    """The bytes of states that the device steps.

    buckets: for each bucket, the bytes of each home shard in the dtype of the states.  states: S.
    """
    sizes = [states * sum(map(aligned, shards)) for shards in buckets]
    moved = [size for size in sizes if size]
    return StateBytes(
        host=sum(map(in_pages, moved)),
        in_flight=max((a + b for a, b in pairwise([0, *moved])), default=0),
        to_device=sum(moved),
        to_host=sum(moved),
    )


def bytes_of_host_steps(buckets: Sequence[Sequence[int]], states: int) -> StateBytes:
    """The bytes of states that the host steps; gradients and states have the dtype of the parameters.

    buckets, states: as in `state_bytes`.
    """
    sizes = [(states + 2) * sum(map(aligned, shards)) for shards in buckets]
    moved = sum(sum(shards) for shards in buckets)
    return StateBytes(
        host=sum(in_pages(size) for size in sizes if size),
        in_flight=0,
        to_device=moved,
        to_host=moved,
    )


def aligned(size_bytes: int) -> int:
    """Bytes of a state in a bucket."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def in_pages(size_bytes: int) -> int:
    """Bytes of a slab, which has whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
