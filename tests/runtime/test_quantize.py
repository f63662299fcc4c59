"""Quantised rows: sizes, bounds of the error, and values that must survive exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import NormalDist
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
from fcdp_compile.strategy.formats import CODINGS, Format, blocks_of, row_bytes
from tests.marks import quick

CPU = torch.device("cpu")
QUANTISED = list(CODINGS)
BLOCK = 256  # a whole number of blocks of each format
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def levels_of(wire: Format) -> list[float]:
    """The levels of a format, as multiples of a scale, from the lowest to the highest."""
    coding = CODINGS[wire]
    whole = range(-coding.steps, coding.steps + 1)
    curved = [k * (abs(k) + coding.steps) / (2 * coding.steps**2) for k in whole]
    return list(coding.book or (curved if coding.is_curved else whole))


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
    coding = CODINGS[wire]
    gap = max(b - a for a, b in itertools.pairwise(levels_of(wire)))
    part = gap / 2 / coding.largest + coding.is_curved / (8 * coding.steps**2)
    part *= 1 + (1e-6 if coding.scale_bytes == 4 else 2.0**-8)
    assert part < {Format.INT8: 0.004, Format.INT4: 0.108, Format.NF4: 0.153}[wire]
    unit = torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
    for row, back in zip(values.double(), found.double(), strict=True):
        for slot, other in zip(row.split(slots), back.split(slots), strict=True):
            for block, far in zip(*(x.split(coding.block) for x in (slot, other)), strict=True):
                if block.numel():
                    largest = block.abs().max()
                    bound = largest * part + unit * largest
                    assert ((block - far).abs() <= bound + 2.0**-126).all()


@pytest.mark.parametrize("wire", QUANTISED)
@pytest.mark.parametrize("slots", [[2 * BLOCK], [BLOCK - 1, BLOCK + 1]])
def test_what_is_exact(wire: Format, slots: list[int]) -> None:
    """Zeros, and values on the quantisation levels, also in a block with large values."""
    levels = torch.tensor(levels_of(wire), dtype=torch.float32)
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
    torch.testing.assert_close(there_and_back(values, wire, [3]), values, rtol=2.0**-6, atol=0)


@given(st.floats(-1, 1, width=32))
def test_int4_takes_the_nearest_level(value: float) -> None:
    """Of the levels that the denser ones near zero are; next to a border, either of two."""
    values = torch.zeros(1, 64)
    values[0, :2] = torch.tensor([1.0, value])
    found = there_and_back(values, Format.INT4, [64])[0, 1].item()
    errors = [abs(value - level) for level in levels_of(Format.INT4)]
    assert abs(value - found) == pytest.approx(min(errors), abs=2 / (8 * 7**2) + 1e-6)


def test_the_code_book_of_nf4_has_quantiles_of_a_normal_distribution() -> None:
    """QLoRA's construction: 8 levels of the upper half, 7 of the lower one, and zero."""
    tail = (1 / 32 + 1 / 30) / 2
    halves = [
        [-NormalDist().inv_cdf(tail + i * (0.5 - tail) / n) for i in range(n)] for n in (8, 7)
    ]
    upper, lower = ([x / halves[0][0] for x in half] for half in halves)
    expected = [*(-x for x in lower), 0.0, *reversed(upper)]
    assert CODINGS[Format.NF4].book == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nf4_of_nf4_is_the_same(dtype: torch.dtype) -> None:
    """What another rank has decoded, it would send with the same bits."""
    once = there_and_back(torch.randn(2, 1000).to(dtype), Format.NF4, [300, 700])
    assert torch.equal(there_and_back(once, Format.NF4, [300, 700]), once)


def test_nf4_has_the_values_of_bitsandbytes() -> None:
    """Bitwise in bf16, whose scales bf16 holds exactly."""
    functional = pytest.importorskip("bitsandbytes").functional
    values = torch.randn(1, 1 << 14).bfloat16()
    packed, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    expected = functional.dequantize_4bit(packed, state)
    assert torch.equal(there_and_back(values, Format.NF4, [1 << 14]), expected)


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
        (Format.INT4, [11], 2 + 6),
        (Format.INT8, [256], 4 + 256),
        (Format.INT4, [257], 10 + 129),
        (Format.INT8, [100, 256, 3], 12 + 359),
        (Format.INT4, [1, 0, 2], 4 + 2),
        (Format.INT8, [0], 0),
        (Format.NF4, [64 * 32], 17 * 64),
        (Format.NF4, [65, 3], 6 + 34),
    ],
)
def test_bytes_of_a_row(wire: Format, slots: list[int], expected: int) -> None:
    assert row_bytes(slots, wire, 2) == expected
    if wire is not Format.FULL:
        assert sum(blocks_of(slots, wire)) == sum(slots)


@pytest.mark.parametrize("wire", QUANTISED)
@pytest.mark.parametrize("dtype", quick([torch.float32, torch.bfloat16], torch.bfloat16))
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
        block = CODINGS[wire].block
        assert not found[0, :block].isfinite().any()
        assert found[0, block:].isfinite().all()


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
