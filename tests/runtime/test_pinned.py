"""Slabs: exact sizes, apart from each other, alive as long as a tensor uses them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import mmap
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fcdp_compile.devices import Cpu, Cuda
from fcdp_compile.runtime.cache import pinned
from fcdp_compile.runtime.cache.pinned import PinnedPool

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
)
def test_a_slab_is_a_flat_tensor_of_any_dtype(dtype: torch.dtype) -> None:
    pool = PinnedPool(Cpu())
    slab = pool.take(77, dtype)
    assert (slab.shape, slab.dtype, slab.device, slab.is_contiguous()) == ((77,), dtype, CPU, True)
    slab.view(torch.uint8).copy_(torch.arange(slab.nbytes).to(torch.uint8))
    assert torch.equal(slab.view(torch.uint8), torch.arange(slab.nbytes).to(torch.uint8))


@pytest.mark.parametrize(
    ("elements", "slab_bytes"), [(0, PAGE), (1, PAGE), (PAGE // 4, PAGE), (PAGE // 4 + 1, 2 * PAGE)]
)
def test_sizes_are_rounded_to_pages_and_no_further(elements: int, slab_bytes: int) -> None:
    pool = PinnedPool(Cpu())
    slab = pool.take(elements, torch.float32)
    assert slab.numel() == elements
    assert pool.slab_bytes == slab_bytes
    pool.give_back(slab)
    assert pool.slab_bytes == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.integers(0, 5 * PAGE), st.none()), max_size=25), st.randoms())
def test_slabs_never_overlap_and_bytes_add_up(takes: list[int | None], random: Any) -> None:
    """takes: bytes to take; None gives a slab back."""
    pool = PinnedPool(Cpu())
    held: list[torch.Tensor] = []
    for size in takes:
        if size is not None:
            held.append(pool.take(size, torch.uint8))
            held[-1].fill_(len(held))
        elif held:
            pool.give_back(held.pop(random.randrange(len(held))))
        spans = sorted((s.untyped_storage().data_ptr(), s.nbytes) for s in held)
        for (start, nbytes), (following, _) in itertools.pairwise(spans):
            assert start + nbytes <= following
        assert all(start % 64 == 0 for start, _ in spans)
        exact = sum(nbytes for _, nbytes in spans)
        assert exact <= pool.slab_bytes <= exact + len(held) * PAGE
        assert pool.slab_bytes % PAGE == 0


def test_a_slab_made_under_inference_mode_is_a_normal_tensor() -> None:
    with torch.inference_mode():
        slab = PinnedPool(Cpu()).take(4, torch.float32)
    assert not slab.is_inference()
    slab.fill_(3)
    weight = torch.ones(4, requires_grad=True)
    (weight * slab).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))


def test_a_tensor_outlives_its_slab_and_the_pool() -> None:
    pool = PinnedPool(Cpu())
    given_back, kept = pool.take(PAGE, torch.float32), pool.take(PAGE, torch.float32)
    part = kept[3:7]
    given_back.fill_(1)
    kept.fill_(2)
    pool.give_back(given_back)
    del pool, kept
    gc.collect()
    others = [PinnedPool(Cpu()).take(PAGE, torch.float32).zero_() for _ in range(4)]
    assert given_back.sum() == PAGE
    assert part.tolist() == [2.0] * 4
    assert len(others) == 4


def test_only_slabs_are_given_back_and_once() -> None:
    pool = PinnedPool(Cpu())
    slab = pool.take(4, torch.float32)
    pool.give_back(slab)
    for other in (slab, torch.empty(4), PinnedPool(Cpu()).take(4, torch.float32)):
        with pytest.raises(
            ValueError, match="is not a slab of this pool, or was given back before"
        ):
            pool.give_back(other)


class Cudart:
    """Records registered memory; refuses more than `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.forgotten = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert (address % PAGE, size % PAGE, flags) == (0, 0, 1)
        if sum(self.registered.values()) + size > self.limit:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """The part of a GPU's runtime that the pool uses."""
    made = Cudart(3 * PAGE)
    cuda = SimpleNamespace(
        cudart=lambda: made, device=contextlib.nullcontext, synchronize=lambda device: None
    )
    monkeypatch.setattr(torch, "cuda", cuda)

    def forget(device: Cuda) -> None:
        made.forgotten += 1

    monkeypatch.setattr(Cuda, "_forget_error", forget)
    return made


def test_a_slab_is_registered_once_and_until_the_last_tensor_on_it_dies(cudart: Cudart) -> None:
    pool = PinnedPool(Cuda(CUDA))
    slab = pool.take(PAGE, torch.bfloat16)
    part = slab[5:9]
    assert cudart.registered == {slab.data_ptr(): 2 * PAGE}
    pool.give_back(slab)
    del slab
    assert len(cudart.registered) == 1
    part.fill_(1)
    del part
    assert cudart.registered == {}


def test_a_pool_that_dies_unregisters_what_nobody_uses(cudart: Cudart) -> None:
    pool = PinnedPool(Cuda(CUDA))
    slab = pool.take(1, torch.float32)
    del pool
    gc.collect()
    assert len(cudart.registered) == 1
    slab.fill_(1)
    del slab
    assert cudart.registered == {}


def test_what_cannot_be_registered_is_plain_memory_with_one_warning(
    cudart: Cudart, caplog: pytest.LogCaptureFixture
) -> None:
    pool = PinnedPool(Cuda(CUDA))
    with caplog.at_level(logging.WARNING):
        slabs = [pool.take(2 * PAGE, torch.uint8) for _ in range(3)]
    assert len(cudart.registered) == 1
    assert cudart.forgotten == 2
    (record,) = caplog.records
    assert f"could not register {2 * PAGE} bytes" in record.getMessage()
    assert "(out of memory)" in record.getMessage()
    for i, slab in enumerate(slabs):
        assert slab.fill_(i).sum() == i * 2 * PAGE
    assert pool.slab_bytes == 6 * PAGE
    del slabs, slab
    assert cudart.registered == {}


def test_trying_leaves_nothing_registered(cudart: Cudart) -> None:
    pool = PinnedPool(Cuda(CUDA))
    assert pool.can_register(3 * PAGE)
    assert not pool.can_register(4 * PAGE)
    assert cudart.registered == {}
    assert pool.slab_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    """The same with the real runtime."""

    def test_a_slab_is_pinned_and_copied_both_ways(self) -> None:
        pool = PinnedPool(Cuda(CUDA))
        slab = pool.take(1 << 20, torch.float32)
        assert slab.is_pinned()
        there = torch.rand(1 << 20, device=CUDA)
        slab.copy_(there, non_blocking=True)
        back = torch.empty_like(there).copy_(slab, non_blocking=True)
        pool.give_back(slab)
        del slab
        assert torch.equal(back, there)

    def test_an_error_of_registering_is_forgotten(self) -> None:
        memory = pinned._Memory(PAGE)
        assert memory.register(Cuda(CUDA)) == ""
        assert memory.register(Cuda(CUDA)) != "", "a second time"
        assert torch.ones(3, device=CUDA).add(1).sum().item() == 6
