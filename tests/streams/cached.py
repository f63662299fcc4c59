"""A cache that is asked for what is still on its way, on a device that checks its streams.

Programs wait for what they store before anybody loads it again; the cache itself may count on nothing of the
kind, as a step may fail between.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fcdp_compile.devices import CheckedDevice
from fcdp_compile.params.spec import Home
from fcdp_compile.plan import Bucket, Lane, Tier
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.pending import Pending
from tests.builders_plan import make_bucket
from tests.runtime.simulated_device import SimulatedDevice

HOST = make_bucket(0, [("w", (4, 4))], dtype=("float32", 4))
GPU, FULL = (replace(HOST, tier=tier) for tier in (Tier.GPU, Tier.GPU_FULL))
HOME = Home(nodes=2, ranks_per_node=2, node=0, place=1)


class OnTheWay:
    """A cache of a checked device, and gathers that nobody has waited for."""

    def __init__(self) -> None:
        self.device = CheckedDevice(SimulatedDevice(0))
        self._lanes = Lanes(self.device, is_blocking=False)
        pool = PinnedPool(self.device)
        self.cache = NodeShardCache(Counters(), pool, self._lanes)
        self.used_bytes = 0
        self.cache.memory = DeviceMemory(
            capacity_bytes=10, threshold=0.5, used_bytes=lambda: self.used_bytes, serves=1
        )

    def gather(self, lane: Lane, sent: Tensor) -> Pending:
        """A collective that has been started."""
        out = torch.empty_like(sent)
        return self._lanes.start(
            lane, partial(out.copy_, sent), out=out, reads=[sent], name="gather"
        )

    def node_shard(self) -> Pending:
        """What came from other nodes."""
        return self.gather(Lane.INTER, torch.ones(8))

    def full(self, bucket: Bucket) -> None:
        """Keep a whole bucket."""
        self.cache.agree_in_full(bucket, HOME, agreed=True)
        self.cache.store(bucket, self.node_shard(), 1)
        self.cache.keep_full(
            bucket, 1, self.gather(Lane.INTRA, torch.cat([torch.ones(8), torch.ones(8)]))
        )


def read(pending: Pending) -> None:
    """Compute reads it."""
    pending.wait().clone()


def store_and_use(at: OnTheWay, bucket: Bucket) -> None:
    stored = at.cache.store(bucket, at.node_shard(), 1)
    if bucket is not HOST:  # where compute does not read
        read(stored)


def store_and_load(at: OnTheWay, bucket: Bucket) -> None:
    at.cache.store(bucket, at.node_shard(), 1)
    read(at.cache.load(bucket, 1))


def copy_to_the_python_thread(at: OnTheWay, bucket: Bucket) -> None:
    at.cache.store(bucket, at.node_shard(), 1)
    found = at.cache.host_copy(bucket.id, 1)
    assert (found is None) == (bucket is not HOST)
    if found is not None:
        at.device.note([found], [], "the Python thread")


def fall_back_as_it_is_loaded(at: OnTheWay, bucket: Bucket) -> None:
    at.cache.store(bucket, at.node_shard(), 1)
    at.used_bytes = 6
    read(at.cache.load(bucket, 1))
    read(at.cache.load(bucket, 1))


def load_in_full(at: OnTheWay, bucket: Bucket) -> None:
    at.full(bucket)
    read(at.cache.load(bucket, 1))


def give_up_in_full(at: OnTheWay, bucket: Bucket) -> None:
    at.full(bucket)
    at.cache.agree_in_full(bucket, HOME, agreed=False)
    read(at.cache.load(bucket, 1))


def let_go_of_what_is_given_up(at: OnTheWay, bucket: Bucket) -> None:
    load_in_full(at, bucket)
    before = at.device.alive_bytes()
    at.cache.agree_in_full(bucket, HOME, agreed=False)
    assert at.device.alive_bytes() < before, "the whole bucket is still held"


USES = (
    store_and_use,
    store_and_load,
    copy_to_the_python_thread,
    fall_back_as_it_is_loaded,
    load_in_full,
    give_up_in_full,
    let_go_of_what_is_given_up,
)


def use_on_the_way() -> None:
    """Use a cache in each way with each tier.

    Raises: StreamError, AssertionError.
    """
    for use in USES:
        for bucket in (HOST, GPU, FULL):
            at = OnTheWay()
            with at.device.watching("a cache"):
                use(at, bucket)
