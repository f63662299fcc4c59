"""Exact differences: every value arrives with its bits, in as many bytes as the code says."""

from __future__ import annotations

import itertools
import math
import struct
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fcdp_compile.runtime.collectives.difference import Code, counts

DTYPES = (torch.bfloat16, torch.float16)

# Values near each other, values anywhere, and zeros, infinities, NaN and denormals of both dtypes.
_SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7C00, 0xFC00, 0x7E01, 0x0001, 0x8001, 0x03FF]
_BITS = st.integers(0, 0xFFFF) | st.sampled_from(_SPECIAL) | st.integers(0x3F80, 0x3F84)
_PAIRS = st.lists(st.tuples(_BITS, _BITS) | _BITS.map(lambda b: (b, b)), min_size=1, max_size=80)


def tensor(bits: list[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"{len(bits)}H", *bits)), dtype=dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def z_of(new: int, old: int) -> int:
    """The module's z, by the number line: signed 16-bit distance, negative ones between the others."""

    def place(bits: int) -> int:
        return bits if bits < 0x8000 else -(bits - 0x8000) - 1

    distance = (place(new) - place(old) + 0x8000) % 0x10000 - 0x8000
    return 2 * distance if distance >= 0 else -2 * distance - 1


STAGES = (1, 2, 4, 8, 16)


def rooms(zs: list[int]) -> list[int]:
    """How many values each stage has: what the stages before it cannot say."""
    said = itertools.accumulate((2**bits - 1 for bits in STAGES[:-1]), initial=0)
    return [sum(z >= least for z in zs) for least in said]


@given(_PAIRS, st.sampled_from(DTYPES), st.integers(0, 3))
def test_every_bit_arrives(pairs: list[tuple[int, int]], dtype: torch.dtype, more: int) -> None:
    new, old = (tensor(list(bits), dtype) for bits in zip(*pairs, strict=True))
    zs = [z_of(*pair) for pair in pairs]
    # Other ranks may have more values in a stage.
    code = Code(tuple(min(n + more, len(zs)) for n in rooms(zs)))
    sent = code.encode(new, old)
    assert sent.dtype is torch.uint8
    assert sent.numel() == code.bytes
    stages = zip(code.rooms, STAGES, strict=True)
    assert code.bytes == sum(math.ceil(n * b / 8) for n, b in stages) + 8
    found, is_wrong = code.decode(sent, old)
    assert same(found, new)
    assert not is_wrong


@given(_PAIRS, st.randoms())
def test_another_base_is_noticed(pairs: list[tuple[int, int]], random: Random) -> None:
    """One value, or two that are exchanged, differ from those that the difference was taken of."""
    new, old = (tensor(list(bits)) for bits in zip(*pairs, strict=True))
    code = Code((len(pairs),) * len(STAGES))
    sent = code.encode(new, old)
    place, shift = random.randrange(len(pairs)), random.randrange(1, 2**16)
    changed = old.clone()
    changed.view(torch.int16)[place] += shift
    exchanged = old.roll(1)
    for other in (changed, exchanged):
        assert code.decode(sent, other)[1] == (not same(other, old))


@given(_PAIRS, st.integers(0, 5))
def test_too_little_room_is_no_error(pairs: list[tuple[int, int]], fits: int) -> None:
    """One rank may find out first that values have changed since ranks agreed; all drop the result."""
    new, old = (tensor(list(bits)) for bits in zip(*pairs, strict=True))
    code = Code((len(pairs), *sorted((fits, fits, fits // 2, 0), reverse=True)))
    sent = code.encode(new, old)
    assert sent.numel() == code.bytes
    found, is_wrong = code.decode(sent, old)
    assert found.shape == new.shape
    assert is_wrong == (not same(found, new))


@given(_PAIRS)
def test_counts_are_those_of_the_number_line(pairs: list[tuple[int, int]]) -> None:
    new, old = (tensor(list(bits)) for bits in zip(*pairs, strict=True))
    zs = [z_of(*pair) for pair in pairs]
    assert counts(new, old).tolist() == rooms(zs)[1:]


@given(_PAIRS)
def test_every_bit_arrives_of_fewer_values(pairs: list[tuple[int, int]]) -> None:
    """Other nodes may have more rows of matrices."""
    new, old = (tensor(list(bits)) for bits in zip(*pairs, strict=True))
    code = Code((len(pairs) + 5, *(n + 2 for n in rooms([z_of(*pair) for pair in pairs])[1:])))
    sent = code.encode(new, old)
    assert sent.numel() == code.bytes
    found, is_wrong = code.decode(sent, old)
    assert same(found, new)
    assert not is_wrong


@pytest.mark.parametrize(("changed", "bits"), [(0.0, 1.0), (0.1, 1.3), (1.0, 3.0)])
def test_bits_of_a_value(changed: float, bits: float) -> None:
    """Nothing changes, a tenth, or all values move to a neighbour."""
    old = torch.linspace(1, 2, 8000).bfloat16()
    moves = torch.arange(8000) < changed * 8000
    new = (old.view(torch.int16) + moves.to(torch.int16)).view(torch.bfloat16)
    code = Code((8000, *counts(new, old).tolist()))
    assert 8 * code.bytes / 8000 == pytest.approx(bits, abs=0.15)
