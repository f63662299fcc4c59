"""A cache that is asked for values that are still on their way, on a device that checks its streams.

Programs wait for a store before they load the stored values; the cache must not rely on that, as a step may
fail in between.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.core.params.spec import Home
from fcdp_compile.plan import Lane, Tier
from fcdp_compile.runtime.buckets.bucket_cache import BucketCache
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from tests.builders_plan import make_bucket
from tests.device.checked import CheckedDevice
from tests.runtime.simulated_device import SimulatedDevice

BUCKET = make_bucket(0, [("w", (4, 4))], dtype=("float32", 4))
HOME = Home(nodes=2, ranks_per_node=2, node=0, place=1)


class OnTheWay:
    """A cache of a checked device that keeps BUCKET in a tier, with gathers that are not waited for."""

    def __init__(self, tier: Tier) -> None:
        self.is_on_host = tier is Tier.HOST
        self.device = CheckedDevice(SimulatedDevice(0))
        self._lanes = Lanes(self.device, is_blocking=False)
        self.tier = tier
        self.used_bytes = 0
        transport: Any = SimpleNamespace(
            counters=Counters(),
            pool=PinnedPool(self.device),
            lanes=self._lanes,
            device_memory=DeviceMemory(
                capacity_bytes=10, threshold=0.5, used_bytes=lambda: self.used_bytes, serves=1
            ),
        )
        self.cache = BucketCache(BUCKET, transport)

    def gather(self, lane: Lane, sent: Tensor) -> Pending:
        """A collective that has been started."""
        out = torch.empty_like(sent)
        return self._lanes.start(
            lane, partial(out.copy_, sent), out=out, reads=[sent], name="gather"
        )

    def node_shard(self) -> Pending:
        """The node shard, gathered from other nodes."""
        return self.gather(Lane.INTER, torch.ones(8))

    def full(self) -> None:
        """Keep a whole bucket."""
        self.cache.agree_in_full(self.tier, HOME, agreed=True)
        self.cache.store(self.tier, self.node_shard(), 1)
        full = self.gather(Lane.INTRA, torch.cat([torch.ones(8), torch.ones(8)]))
        self.cache.keep_full(full, 1)


def read(pending: Pending) -> None:
    """Make compute read the result."""
    pending.wait().clone()


def store_and_use(at: OnTheWay) -> None:
    stored = at.cache.store(at.tier, at.node_shard(), 1)
    if not at.is_on_host:  # compute cannot read host memory
        read(stored)


def store_and_load(at: OnTheWay) -> None:
    at.cache.store(at.tier, at.node_shard(), 1)
    read(at.cache.load(1))


def copy_to_the_python_thread(at: OnTheWay) -> None:
    at.cache.store(at.tier, at.node_shard(), 1)
    found = at.cache.node_shard(1, HOME)
    assert found is not None
    if at.is_on_host:
        at.device.check.note([found], [], "the Python thread")


def fall_back_as_it_is_loaded(at: OnTheWay) -> None:
    at.cache.store(at.tier, at.node_shard(), 1)
    at.used_bytes = 6
    at.cache.make_room()
    read(at.cache.load(1))
    read(at.cache.load(1))


def load_in_full(at: OnTheWay) -> None:
    at.full()
    read(at.cache.load(1))


def give_up_in_full(at: OnTheWay) -> None:
    at.full()
    at.cache.agree_in_full(at.tier, HOME, agreed=False)
    read(at.cache.load(1))


def let_go_of_what_is_given_up(at: OnTheWay) -> None:
    load_in_full(at)
    before = at.device.check.alive_bytes()
    at.cache.agree_in_full(at.tier, HOME, agreed=False)
    assert at.device.check.alive_bytes() < before, "the whole bucket is still held"


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
    """Use the cache in every way, with each tier.

    Raises: StreamError, AssertionError.
    """
    for use in USES:
        for tier in (Tier.HOST, Tier.GPU, Tier.GPU_FULL):
            at = OnTheWay(tier)
            with at.device.watching("a cache"):
                use(at)
