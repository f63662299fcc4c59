"""The cache on the device: node shards and whole buckets, while there is room."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.tasks import Pending
from tests.runtime.cached import (
    FULL,
    GPU,
    HOST,
    OTHER,
    SHARD_BYTES,
    Cache,
    make,
    shard,
    until_backward,
)

_memory = partial(DeviceMemory, serves=1)


class TestWhenTheDeviceIsFull:
    """Buckets planned for the device go to the host, and the cache reports their real tier."""

    @staticmethod
    def cache(used: list[int]) -> tuple[Cache, Counters]:
        cache, counters = make()
        cache.transport.device_memory = _memory(
            capacity_bytes=100, threshold=0.5, used_bytes=lambda: used[0]
        )
        return cache, counters

    def test_a_full_device_sends_it_to_the_host(self) -> None:
        used = [51]
        cache, counters = self.cache(used)
        kept = shard(1)
        cache.store(GPU, kept, 1).wait()
        loaded = cache.load(GPU, 1).wait()
        assert loaded is not kept
        assert torch.equal(loaded, kept)
        assert counters.sent == {Kind.STORE.value: SHARD_BYTES, Kind.LOAD.value: SHARD_BYTES}
        assert (cache.host_bytes(), cache.fallen_back) == (SHARD_BYTES, 1)
        found = cache.of(HOST).node_shard(1, TestInFull.TOPOLOGY)
        assert found is not None
        assert torch.equal(found, kept)

    def test_it_stays_there_once_it_fell_back(self) -> None:
        used = [51]
        cache, _ = self.cache(used)
        slab = cache.store(GPU, shard(1), 1).wait().data_ptr()
        used[0] = 0
        assert cache.store(GPU, shard(2), 2).wait().data_ptr() == slab
        cache.of(HOST).drop()
        kept = shard(3)
        cache.store(GPU, kept, 3).wait()
        assert cache.load(GPU, 3).wait() is kept
        assert cache.fallen_back == 0

    def test_at_the_threshold_there_is_room(self) -> None:
        used = [50]
        cache, counters = self.cache(used)
        cache.store(GPU, shard(1), 1).wait()
        used[0] = 51
        cache.store(HOST, shard(2), 2).wait()  # not planned for the device: no fall
        assert (cache.fallen_back, cache.host_bytes()) == (0, SHARD_BYTES)
        assert counters.sent == {Kind.STORE.value: SHARD_BYTES}

    def test_an_entry_moves_and_keeps_its_uses(self) -> None:
        used = [0]
        brief = until_backward(GPU)
        cache, _ = make()
        cache.transport.device_memory = _memory(
            capacity_bytes=100, threshold=0.5, used_bytes=lambda: used[0]
        )
        cache.store(brief, shard(1), 1).wait()
        used[0] = 51
        cache.store(brief, shard(1), 1).wait()
        for _ in range(2):
            assert torch.equal(cache.load(brief, 1).wait(), shard(1))
        assert cache.of(HOST).generation is None
        assert cache.host_bytes() == 0


class TestInFull:
    """Whole buckets: kept only where all ranks agreed, and given up without moving anything."""

    TOPOLOGY = Topology(
        nodes=2,
        ranks_per_node=2,
        node=0,
        place=1,
        device_type="cpu",
        home_mesh=None,
        inter=None,
        intra=None,
        control=None,
    )

    def kept(self, *, memory: DeviceMemory | None = None) -> tuple[Cache, Counters]:
        cache, counters = make()
        cache.transport.device_memory = memory
        cache.agree_in_full(FULL, self.TOPOLOGY, agreed=True)
        cache.store(FULL, shard(1), 3).wait()
        cache.of(FULL).keep_full(Pending(self.full()), 3)
        return cache, counters

    @staticmethod
    def full() -> torch.Tensor:
        return torch.cat([shard(1), shard(2)])

    def test_the_whole_bucket_takes_the_place_of_its_node_shard(self) -> None:
        cache, counters = make()
        cache.agree_in_full(FULL, self.TOPOLOGY, agreed=True)
        given_shard = shard(1)
        alive = weakref.ref(given_shard)
        cache.store(FULL, given_shard, 3).wait()
        del given_shard
        assert not cache.load(FULL, 3).is_full
        cache.of(FULL).keep_full(Pending(self.full()), 3)
        assert alive() is None
        for _ in range(2):
            loaded = cache.load(FULL, 3)
            assert loaded.is_full
            assert torch.equal(loaded.wait(), self.full())
        assert counters.sent == {Kind.STORE.value: 0, Kind.LOAD.value: 0}
        found = cache.of(HOST).node_shard(3, self.TOPOLOGY)
        assert found is not None
        assert torch.equal(found, shard(2)), "this rank's part"

    def test_it_is_not_kept_unless_agreed_or_of_another_generation(self) -> None:
        cache, _ = make()
        cache.store(FULL, shard(1), 3).wait()
        cache.of(FULL).keep_full(Pending(self.full()), 3)
        assert not cache.load(FULL, 3).is_full
        cache.agree_in_full(FULL, self.TOPOLOGY, agreed=True)
        cache.of(FULL).keep_full(Pending(self.full()), 2)
        cache.of(OTHER).keep_full(Pending(self.full()), 3)
        assert not cache.load(FULL, 3).is_full

    @pytest.mark.parametrize("bucket", [HOST, GPU])
    def test_another_plan_may_give_it_up(self, bucket) -> None:
        cache, _ = self.kept()
        cache.agree_in_full(bucket, self.TOPOLOGY, agreed=False)
        loaded = cache.load(bucket, 3)
        assert not loaded.is_full
        assert torch.equal(loaded.wait(), shard(2)), "this rank's part"
        assert loaded.tensor.untyped_storage().nbytes() == SHARD_BYTES

    def test_a_short_memory_is_told_first_and_given_up_when_all_know(self) -> None:
        memory = _memory(capacity_bytes=10, threshold=0.5, used_bytes=lambda: 6)
        cache, _ = self.kept(memory=memory)
        assert cache.load(FULL, 3).is_full, "the others count on it"
        assert not cache.wants_in_full(FULL)
        assert cache.fallen_back == 1
        cache.agree_in_full(FULL, self.TOPOLOGY, agreed=False)
        assert torch.equal(cache.load(FULL, 3).wait(), shard(2))
        assert cache.host_bytes() == SHARD_BYTES

    def test_what_comes_from_the_host_gives_its_slab_back(self) -> None:
        cache, _ = make()
        cache.store(HOST, shard(1), 3).wait()
        cache.agree_in_full(FULL, self.TOPOLOGY, agreed=True)
        assert torch.equal(cache.load(FULL, 3).wait(), shard(1))
        cache.of(FULL).keep_full(Pending(self.full()), 3)
        assert cache.host_bytes() == 0
        assert cache.load(FULL, 3).is_full
        cache.of(HOST).drop()
        assert cache.of(HOST).generation is None


class TestMemoryThatBecomesShort:
    """Memory runs short after a bucket was stored, as frozen buckets are before the first forward."""

    @pytest.mark.parametrize("bucket", [GPU, FULL])
    def test_a_node_shard_falls_back_when_room_is_made(self, bucket) -> None:
        cache, _ = make()
        used = 0
        cache.transport.device_memory = _memory(
            capacity_bytes=10, threshold=0.5, used_bytes=lambda: used
        )
        cache.store(bucket, shard(1), 1).wait()
        cache.make_room(bucket)
        used = 6
        assert torch.equal(cache.load(bucket, 1).wait(), shard(1))
        assert (cache.host_bytes(), cache.fallen_back) == (0, 0), "a load moves nothing"
        for _ in range(2):
            cache.make_room(bucket)
            assert torch.equal(cache.load(bucket, 1).wait(), shard(1))
            assert (cache.host_bytes(), cache.fallen_back) == (SHARD_BYTES, 1)

    def test_a_whole_bucket_is_given_up_by_all_at_once(self) -> None:
        used = 0
        memory = _memory(capacity_bytes=10, threshold=0.5, used_bytes=lambda: used)
        cache, _ = TestInFull().kept(memory=memory)
        assert cache.wants_in_full(FULL)
        used = 6
        cache.make_room(FULL)
        assert cache.load(FULL, 3).is_full
        assert not cache.wants_in_full(FULL)

    def test_what_is_loaded_for_the_last_time_is_let_go(self) -> None:
        brief = until_backward(GPU)
        cache, _ = make()
        cache.transport.device_memory = _memory(
            capacity_bytes=10, threshold=0.5, used_bytes=lambda: 0
        )
        cache.store(brief, shard(1), 1).wait()
        cache.transport.device_memory = _memory(
            capacity_bytes=10, threshold=0.5, used_bytes=lambda: 6
        )
        assert torch.equal(cache.load(brief, 1).wait(), shard(1))
        cache.make_room(brief)
        assert (cache.host_bytes(), cache.of(HOST).generation) == (0, None)
