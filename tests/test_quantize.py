"""Quantised rows: sizes, bounds of the error, and values that must survive exactly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from fcdp_compile.backend import codec_kernels
from fcdp_compile.backend.codec_kernels import compile_codec
from fcdp_compile.backend.compute import Compute
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.strategy.formats import BLOCK, LEVELS, Format, blocks_of, row_bytes

CPU = torch.device("cpu")
QUANTISED = [Format.INT8, Format.INT4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def there_and_back(values: Tensor, wire: Format, slots: list[int]) -> Tensor:
    codec = Codec(wire, slots)
    sent = codec.encode(values)
    assert (sent.dtype, sent.shape) == (torch.uint8, (len(values), codec.bytes))
    found = codec.decode(sent, values.dtype)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    return found


@pytest.mark.parametrize("wire", QUANTISED)
@given(
    rows=st.integers(1, 3),
    slots=st.lists(st.integers(0, 3 * BLOCK + 1), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1e-30, 1e-4, 1.0, 6e4]),
    seed=st.integers(0, 2**31),
)
def test_the_error_is_within_the_documented_bound(
    wire: Format, rows: int, slots: list[int], dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    """In each block; no block spans two parameters."""
    made = torch.Generator().manual_seed(seed)
    values = ((torch.rand(rows, sum(slots), generator=made) * 2 - 1) * magnitude).to(dtype)
    found = there_and_back(values, wire, slots)
    unit = torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
    for row, back in zip(values.double(), found.double(), strict=True):
        for slot, other in zip(row.split(slots), back.split(slots), strict=True):
            for block, far in zip(slot.split(BLOCK), other.split(BLOCK), strict=True):
                if block.numel():
                    largest = block.abs().max()
                    bound = largest / (2 * LEVELS[wire]) * (1 + 1e-6) + unit * largest
                    assert ((block - far).abs() <= bound + 2.0**-126).all()


@pytest.mark.parametrize("wire", QUANTISED)
@pytest.mark.parametrize("slots", [[2 * BLOCK], [BLOCK - 1, BLOCK + 1]])
def test_what_is_exact(wire: Format, slots: list[int]) -> None:
    """Zeros, and values on the quantisation levels, also in a block with large values."""
    levels = torch.arange(-LEVELS[wire], LEVELS[wire] + 1, dtype=torch.float32)
    values = torch.zeros(2, 2 * BLOCK)
    values[0, : len(levels)] = levels * 0.5
    values[1, slots[0] % (2 * BLOCK) :][: len(levels)] = levels * 2.0**100
    assert torch.equal(there_and_back(values, wire, slots), values)


@pytest.mark.parametrize("wire", QUANTISED)
@pytest.mark.parametrize("slots", [[2 * BLOCK], [3, 2 * BLOCK - 3]])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_visible_and_alone(
    wire: Format, slots: list[int], bad: float
) -> None:
    values = torch.ones(1, 2 * BLOCK)
    values[0, 3] = bad
    found = there_and_back(values, wire, slots)
    assert not found[0, 3].isfinite()
    assert torch.equal(found[0, BLOCK + 3 :], values[0, BLOCK + 3 :])


@pytest.mark.parametrize("wire", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_stay_finite(wire: Format, dtype: torch.dtype) -> None:
    """Masks contain such numbers: a scale that is rounded up must not make them infinite."""
    largest = torch.finfo(dtype).max
    values = torch.tensor([[largest, -largest, 0.0]], dtype=dtype)
    torch.testing.assert_close(there_and_back(values, wire, [3]), values)


@pytest.mark.parametrize("wire", QUANTISED)
def test_rows_and_parameters_are_independent(wire: Format) -> None:
    values = torch.randn(3, 300) * torch.tensor([[1.0], [100.0], [1e-3]])
    codec = Codec(wire, [300])
    assert torch.equal(codec.encode(values), torch.cat([codec.encode(r[None]) for r in values]))
    slots = [100, 200]
    together = there_and_back(values, wire, slots)
    apart = [there_and_back(v, wire, [v.shape[1]]) for v in values.split(slots, 1)]
    assert torch.equal(together, torch.cat(apart, 1))


@pytest.mark.parametrize(
    ("wire", "slots", "expected"),
    [
        (Format.FULL, [10], 20),
        (Format.INT8, [10], 4 + 10),
        (Format.INT4, [11], 4 + 6),
        (Format.INT8, [256], 4 + 256),
        (Format.INT4, [257], 8 + 129),
        (Format.INT8, [100, 256, 3], 12 + 359),
        (Format.INT4, [1, 0, 2], 8 + 2),
        (Format.INT8, [0], 0),
    ],
)
def test_bytes_of_a_row(wire: Format, slots: list[int], expected: int) -> None:
    assert row_bytes(slots, wire, 2) == expected
    assert sum(blocks_of(slots)) == sum(slots)


@pytest.mark.parametrize("wire", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_give_the_same_bits(wire: Format, dtype: torch.dtype) -> None:
    """Inductor's kernels, for whole blocks and for a last block that is not whole."""
    plain, compiled = Codec(wire, [BLOCK + 44]), Codec(wire, [BLOCK + 44])
    compute = Compute("inductor")
    drawn = torch.get_rng_state()
    for encodes in (True, False):
        compile_codec(compiled, compute, CPU, encodes=encodes, rows=2, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), drawn), "a backward that compiles draws nothing"
    assert compiled.encoders.keys() == compiled.decoders.keys() == {(2, dtype)}
    values = torch.randn(2, BLOCK + 44).to(dtype)
    sent = plain.encode(values)
    assert torch.equal(compiled.encode(values), sent)
    assert torch.equal(compiled.decode(sent, dtype), plain.decode(sent, dtype))
    for bad in (float("inf"), float("nan")):
        values[0, 3] = bad
        found = compiled.decode(compiled.encode(values), dtype)
        assert not found[0, :BLOCK].isfinite().any()
        assert found[0, BLOCK:].isfinite().all()


def test_a_kernel_that_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    codec_kernels._warn_once.cache_clear()
    codec = Codec(Format.INT8, [BLOCK])
    wrong: Any = SimpleNamespace(
        is_inductor=True, decompositions=lambda: None, compile=lambda gm: _half_of(gm)
    )
    for encodes in (True, False):
        compile_codec(codec, wrong, CPU, encodes=encodes, rows=1, dtype=torch.float32)
    assert not codec.encoders
    assert not codec.decoders
    assert caplog.text.count("quantisation kernels wrongly for cpu") == 1


def _half_of(gm: GraphModule) -> Callable[[list[Any]], list[Tensor]]:
    def call(args: list[Any]) -> list[Tensor]:
        found = [t.clone() for t in gm(*args)]
        found[-1].flatten()[BLOCK // 2 :] = 0
        return found

    return call
