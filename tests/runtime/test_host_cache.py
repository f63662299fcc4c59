"""Node shards between their uses: tiers, lives, generations, and copies that are still on their way."""

from __future__ import annotations

import mmap
from dataclasses import replace
from threading import Event

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fcdp_compile.devices import Cpu
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.strategy import Life
from tests.runtime.cached import GPU, HOST, OTHER, SHARD_BYTES, Cache, make, shard, until_backward


@pytest.mark.parametrize("bucket", [HOST, GPU])
def test_what_was_stored_is_loaded(bucket) -> None:
    cache, _ = make()
    assert cache.of(HOST).generation is None
    assert torch.equal(cache.store(bucket, shard(1), 3).wait(), shard(1))
    assert cache.of(HOST).generation == 3
    for _ in range(3):
        assert torch.equal(cache.load(bucket, 3).wait(), shard(1))


def test_the_host_keeps_a_copy_and_hands_out_copies() -> None:
    cache, _ = make()
    given_shard = shard(1)
    cache.store(HOST, given_shard, 1).wait()
    given_shard.fill_(7)
    loaded = cache.load(HOST, 1).wait()
    assert torch.equal(loaded, shard(1))
    loaded.fill_(9)
    assert torch.equal(cache.load(HOST, 1).wait(), shard(1))


def test_the_gpu_keeps_the_very_tensor() -> None:
    cache, _ = make()
    kept = shard(1)
    cache.store(GPU, kept, 1).wait()
    assert cache.load(GPU, 1).wait() is kept


def test_a_slab_is_written_again_and_not_allocated_again() -> None:
    cache, _ = make()
    first = cache.store(HOST, shard(1), 1).wait().data_ptr()
    assert cache.store(HOST, shard(2), 2).wait().data_ptr() == first
    assert torch.equal(cache.load(HOST, 2).wait(), shard(2))
    assert cache.host_bytes() == SHARD_BYTES


def test_only_what_is_on_the_host_counts_as_host_memory() -> None:
    """On a CPU device a node shard "on the GPU" is in host memory, too, but does not count."""
    cache, _ = make()
    cache.store(GPU, shard(1), 1).wait()
    assert cache.host_bytes() == 0
    cache.store(replace(HOST, id=2), shard(1), 1).wait()
    assert cache.host_bytes() == SHARD_BYTES


@pytest.mark.parametrize("life", Life)
def test_a_slab_serves_all_copies_of_its_bucket_until_it_is_dropped(life: Life) -> None:
    """Also when no copy is left after the last load: a new slab for each step would be registered in each."""
    pool = PinnedPool(Cpu())
    cache = Cache(Counters(), pool, Lanes(Cpu(), is_blocking=True))
    mine = until_backward(HOST) if life is Life.UNTIL_BACKWARD else HOST
    addresses = set()
    for generation in (1, 2):
        stored = cache.store(mine, shard(generation), generation).wait()
        addresses.add(stored.data_ptr())
        loaded = cache.load(mine, generation).wait()
        assert torch.equal(loaded, shard(generation))
    assert len(addresses) == 1
    cache.store(OTHER, shard(1)[:4], 1).wait()
    assert pool.slab_bytes == 2 * mmap.PAGESIZE
    cache.of(HOST).drop()
    assert pool.slab_bytes == mmap.PAGESIZE
    cache.of(OTHER).drop()
    assert pool.slab_bytes == cache.host_bytes() == 0
    assert torch.equal(loaded, shard(2))


@pytest.mark.parametrize("bucket", [HOST, GPU])
@pytest.mark.parametrize("generation", [0, 2])
def test_another_generation_is_refused(bucket, generation: int) -> None:
    cache, _ = make()
    cache.store(bucket, shard(1), 1).wait()
    with pytest.raises(StaleParameterError, match=r"bucket 0 \(w, …\)"):
        cache.load(bucket, generation)
    assert torch.equal(cache.load(bucket, 1).wait(), shard(1))


def test_what_was_never_stored_or_was_dropped_is_refused() -> None:
    cache, _ = make()
    with pytest.raises(StaleParameterError):
        cache.load(HOST, 0)
    cache.store(HOST, shard(1), 1).wait()
    cache.store(OTHER, torch.ones(4), 1).wait()
    cache.of(HOST).drop()
    cache.of(replace(HOST, id=5)).drop()  # never there
    assert cache.of(HOST).generation is None
    with pytest.raises(StaleParameterError):
        cache.load(HOST, 1)
    assert torch.equal(cache.load(OTHER, 1).wait(), torch.ones(4))


def test_bytes_are_counted_by_tier() -> None:
    cache, counters = make()
    cache.store(HOST, shard(1), 1)
    cache.load(HOST, 1)
    cache.load(HOST, 1)
    assert counters.sent == {Kind.STORE.value: SHARD_BYTES, Kind.LOAD.value: 2 * SHARD_BYTES}
    cache, counters = make()
    cache.store(GPU, shard(1), 1)
    cache.load(GPU, 1)
    assert counters.sent == {Kind.STORE.value: 0, Kind.LOAD.value: 0}
    assert counters.calls == {Kind.STORE.value: 1, Kind.LOAD.value: 1}


BRIEF = [until_backward(HOST), until_backward(GPU)]


class TestUntilBackward:
    """A node shard lives until the last backward that needs it."""

    def test_one_backward_takes_it(self) -> None:
        cache, _ = make()
        cache.store(BRIEF[1], shard(1), 1).wait()
        cache.load(BRIEF[1], 1).wait()
        assert cache.of(HOST).generation is None
        with pytest.raises(StaleParameterError):
            cache.load(BRIEF[1], 1)

    @settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.booleans(), max_size=30), st.sampled_from(BRIEF))
    def test_each_forward_gives_one_backward_a_use(self, runs: list[bool], bucket) -> None:
        """Forwards (True) and backwards (False) of one generation in any order."""
        cache, _ = make()
        pending = 0
        for is_forward in runs:
            if is_forward:
                cache.store(bucket, shard(1), 1).wait()
                pending += 1
            elif pending:
                assert torch.equal(cache.load(bucket, 1).wait(), shard(1))
                pending -= 1
            else:
                with pytest.raises(StaleParameterError):
                    cache.load(bucket, 1)
            assert (cache.of(HOST).generation is None) == (pending == 0)

    @pytest.mark.parametrize("bucket", BRIEF)
    def test_a_new_generation_takes_the_place_of_the_old(self, bucket) -> None:
        cache, _ = make()
        cache.store(bucket, shard(1), 1).wait()  # of a forward whose backward never comes
        cache.store(bucket, shard(2), 2).wait()
        with pytest.raises(StaleParameterError):
            cache.load(bucket, 1)
        assert torch.equal(cache.load(bucket, 2).wait(), shard(2))
        assert cache.of(HOST).generation is None


@pytest.mark.parametrize("bucket", [HOST, GPU])
def test_what_evaluation_stored_training_may_load_and_write_again(bucket) -> None:
    cache, _ = make()
    with torch.inference_mode():
        cache.store(bucket, shard(1), 1).wait()
    assert torch.equal(cache.load(bucket, 1).wait(), shard(1))
    cache.store(bucket, shard(2), 2).wait()
    loaded = cache.load(bucket, 2).wait()
    weight = torch.ones(8, requires_grad=True)
    (weight * loaded).sum().backward()
    assert torch.equal(weight.grad, shard(2))


def test_training_then_evaluation_then_training() -> None:
    cache, _ = make()
    cache.store(HOST, shard(1), 1).wait()
    with torch.inference_mode():
        cache.store(HOST, shard(2), 2).wait()
        assert torch.equal(cache.load(HOST, 2).wait(), shard(2))
    cache.store(HOST, shard(3), 3).wait()
    assert torch.equal(cache.load(HOST, 3).wait(), shard(3))


class Gather:
    """A node shard that arrives when a test says so, on a lane of its own."""

    def __init__(self, value: float, error: Exception | None = None) -> None:
        self._lanes = Lanes(Cpu(), is_blocking=True)
        self._may_arrive = Event()
        self._value = value
        self._error = error
        self._out = torch.full((8,), float("nan"))
        self.pending = self._lanes.start(
            Lane.INTER, self._run, out=self._out, reads=[], name="gather"
        )

    def arrive(self) -> None:
        self._may_arrive.set()

    def _run(self) -> None:
        assert self._may_arrive.wait(300)
        if self._error is not None:
            raise self._error
        self._out.fill_(self._value)


@pytest.mark.parametrize("bucket", [HOST, GPU])
def test_a_shard_may_be_stored_and_loaded_while_it_is_on_its_way(bucket) -> None:
    cache, _ = make()
    gather = Gather(4)
    stored = cache.store(bucket, gather.pending, 1)
    loads = [cache.load(bucket, 1), cache.load(bucket, 1)]
    gather.arrive()
    for pending in [*loads, stored]:
        assert torch.equal(pending.wait(), shard(4))
    assert torch.equal(cache.load(bucket, 1).wait(), shard(4))


@pytest.mark.parametrize("bucket", [HOST, GPU])
def test_a_gather_that_failed_is_never_loaded(bucket) -> None:
    cache, _ = make()
    gather = Gather(4, RuntimeError("a peer is gone"))
    stored = cache.store(bucket, gather.pending, 1)
    gather.arrive()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            cache.load(bucket, 1).wait()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        stored.wait()


def test_the_gpu_tier_leaves_the_gather_to_those_who_wait_for_it() -> None:
    """Each reader gets a pending result of its own, as a result may be waited for only once."""
    cache, _ = make()
    gather = Gather(4)
    gather.arrive()
    results = [cache.store(GPU, gather.pending, 1), cache.load(GPU, 1), gather.pending]
    assert [p.wait() is gather.pending.tensor for p in results] == [True] * 3


def test_a_store_that_nobody_waited_for_is_loaded_whole() -> None:
    cache, _ = make()
    for generation in range(50):
        cache.store(HOST, shard(generation), generation)
        assert torch.equal(cache.load(HOST, generation).wait(), shard(generation))


@pytest.mark.parametrize("bucket", [HOST, GPU])
def test_results_without_a_task_are_taken_as_they_are(bucket) -> None:
    cache, _ = make()
    cache.store(bucket, Pending(shard(6)), 1).wait()
    assert torch.equal(cache.load(bucket, 1).wait(), shard(6))
