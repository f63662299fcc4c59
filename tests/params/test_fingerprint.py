"""Fingerprints notice every change, and take few kernels."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fcdp_compile.core.params.seals import (
    fingerprint,
    fingerprints,
    fingerprints_of_zeros,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool]
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def of(*shards: Tensor) -> int:
    return int(fingerprint(shards))


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def flipped(tensor: Tensor, byte: int, bit: int) -> Tensor:
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return changed


@pytest.mark.parametrize("count", [1, 7, 8, 2047, 2048, 2049, 4096, 10_000])
def test_every_single_bit_counts(count: int) -> None:
    data = random_bytes(count)
    before = of(data)
    generator = random.Random(count)
    positions = generator.sample(range(count), min(count, 64))
    missed = [
        (byte, bit)
        for byte in positions
        for bit in range(8)
        if of(flipped(data, byte, bit)) == before
    ]
    assert not missed


def test_the_sign_of_every_number_counts() -> None:
    numbers = torch.randn(1024)
    before = of(numbers)
    for i in range(1024):
        changed = numbers.clone()
        changed[i] = -changed[i]
        assert of(changed) != before


@quick
@given(st.integers(2, 6000), st.data())
def test_exchanged_elements_count(count: int, data: st.DataObject) -> None:
    numbers = torch.arange(count, dtype=torch.float32) - count / 3
    i, j = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    changed = numbers.clone()
    changed[i], changed[j] = numbers[j], numbers[i]
    assert of(changed) != of(numbers)


@quick
@given(st.integers(2, 6000), st.data())
def test_exchanged_signs_count(count: int, data: st.DataObject) -> None:
    """Swapped numbers that differ only in the top bit: a plain sum of words would not notice."""
    i, j = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    numbers = torch.ones(count)
    numbers[i] = -1
    changed = torch.ones(count)
    changed[j] = -1
    assert of(changed) != of(numbers)


@pytest.mark.parametrize("count", [3, 17, 200, 3000])
def test_permutations_count(count: int) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(1))
    seen = {of(numbers[torch.randperm(count)]) for _ in range(50)}
    distinct = 6 if count == 3 else 50
    assert len(seen) == distinct if count > 3 else len(seen) <= distinct


def test_permutations_of_few_values_count() -> None:
    """Equal sums and equal weighted sums: 0 1 1 0 and 1 0 0 1, in bytes, words, rows and columns."""
    for size, shape in [(1, (-1,)), (8, (-1,)), (2048, (-1,)), (4096, (-1,))]:
        patterns = [[1, 2, 2, 1], [2, 1, 1, 2], [1, 1, 2, 2], [2, 2, 1, 1], [1, 2, 1, 2]]
        tensors = [
            torch.tensor(p, dtype=torch.uint8).repeat_interleave(size).reshape(shape)
            for p in patterns
        ]
        assert len({of(t) for t in tensors}) == len(patterns), size


def test_exchanged_rows_and_columns_count() -> None:
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    rows, columns = table.clone(), table.clone()
    rows[[3, 4]] = table[[4, 3]]
    columns[:, [3, 4]] = table[:, [4, 3]]
    assert len({of(table), of(rows), of(columns), of(table.T.contiguous())}) == 4


def test_exchanged_blocks_count() -> None:
    data = torch.randn(8, 512)  # a row is two rows of the fingerprint's table
    order = [1, 0, *range(2, 8)]
    assert of(data) != of(data[order])


@quick
@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(-5, 5))
def test_scaled_and_shifted_values_count(count: int, seed: int, power: int) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    assert of(numbers) != of(numbers * 2.0 ** (power or 1))
    assert of(numbers) != of(-numbers)
    assert of(numbers) != of(torch.zeros(count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3,), (40, 70)])
def test_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    assert of(tensor) == of(tensor.clone())
    if tensor.numel():
        changed = tensor.clone()
        changed.view(-1)[-1] = 1
        assert of(changed) != of(tensor)


def test_empty_shards_have_one_too() -> None:
    assert of(torch.zeros(0), torch.zeros(0, 3)) == of(torch.zeros(0))
    assert fingerprint([torch.zeros(0)]).dtype == torch.int64
    assert of(torch.zeros(0), torch.ones(2)) == of(torch.ones(2))


def test_memory_layout_does_not_matter() -> None:
    table = torch.randn(60, 70)
    strided = torch.zeros(60, 140)[:, ::2].copy_(table)
    offset = torch.zeros(1 + table.numel())[1:].view(60, 70).copy_(table)
    assert not strided.is_contiguous()
    assert offset.storage_offset() % 2 == 1
    one = table[:1, :1].as_strided((1,), (70,))
    assert of(one) == of(table[0, :1])
    assert of(table) == of(strided) == of(offset) == of(table.T.contiguous().T)
    images = torch.randn(2, 3, 20, 20)
    assert of(images) == of(images.to(memory_format=torch.channels_last))


def test_it_is_of_values_not_of_the_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert of(parameter) == of(torch.ones(3))
    assert not fingerprint([parameter]).requires_grad


def test_groups_have_the_hashes_that_each_has_by_itself() -> None:
    tensors = [torch.randn(n) for n in (1, 5000, 0, 513, 7, 100_000)]
    groups = [[t] for t in tensors] + [tensors, tensors[::-1]]
    assert fingerprints(groups).tolist() == [of(*group) for group in groups]
    assert len({of(*group) for group in groups}) == len(groups)


def test_large_groups_are_hashed_beside_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(n) for n in (600, 5000, 3, 700, 9000, 0)]
    expected = [of(t) for t in tensors]
    monkeypatch.setattr("fcdp_compile.core.params.seals._TOGETHER_BYTES", 8192)
    assert fingerprints([[t] for t in tensors]).tolist() == expected


def test_zeros() -> None:
    tensors = [torch.zeros(n) for n in (1, 5000, 0, 600)]
    zeros = fingerprints_of_zeros(tensors).tolist()
    assert zeros == fingerprints([[t] for t in tensors]).tolist()
    assert zeros != fingerprints([[-t] for t in tensors]).tolist()


class _Kernels(TorchDispatchMode):
    """Counts the kernels that a device would launch, and finds the largest tensor that they make."""

    _VIEWS = (
        "view",
        "detach",
        "slice",
        "split",
        "alias",
        "empty",
        "select",
        "unbind",
        "_unsafe_view",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        is_new = "empty" in name or not name.startswith(self._VIEWS)
        self.count += is_new and "empty" not in name
        made = func(*args, **(kwargs or {}))
        if is_new:
            self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return made


@pytest.mark.parametrize("tensors", [1, 30, 300])
def test_how_many_kernels(tensors: int) -> None:
    """On a device other than a CPU."""
    shards = [[torch.empty(5000 + i, device="meta")] for i in range(tensors)]
    fingerprints(shards)  # positions and weights are made once
    with _Kernels() as kernels:
        fingerprints(shards)
    assert kernels.count < 40


def test_a_large_tensor_needs_little_memory_besides_its_own() -> None:
    shards = [[torch.empty(1 << 28, dtype=torch.uint8, device="meta")]]
    with _Kernels() as kernels:
        fingerprints(shards)
    assert kernels.largest_bytes <= 16 << 20
