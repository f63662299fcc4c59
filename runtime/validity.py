"""Which values a gathered copy belongs to: generations, and fingerprints that catch silent writes.

A parameter has a generation, a number that grows when its values change.  It changes when an optimizer that
owns it steps, on `load_state_dict`, and when its fingerprint differs from the last one seen, which catches
writes that leave no trace (`.data`, foreach and fused optimizers on DTensors).  A bucket's generation is
the largest of its parameters'.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WORDS = 256  # of a row of the fingerprint's table


class Generations:
    """Generations of a model's parameters; every rank makes the same calls and has the same numbers."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._clock = 0
        self._of = dict.fromkeys(keys, 0)

    def change(self, keys: Iterable[str]) -> None:
        """The values of these parameters are not what they were."""
        self._clock += 1
        for key in keys:
            self._of[key] = self._clock

    def of(self, keys: Iterable[str]) -> int:
        """The generation of a bucket of these parameters."""
        return max((self._of[key] for key in keys), default=0)


class Fingerprints:
    """The last fingerprint seen of each bucket on this rank."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def changed(self, shards: dict[int, Sequence[Tensor]]) -> list[int]:
        """The buckets whose shards differ from what was seen last; a first look is no change."""
        if not shards:
            return []
        now = torch.stack([fingerprint(s) for s in shards.values()]).tolist()
        changed = [
            bucket
            for bucket, value in zip(shards, now, strict=True)
            if self._seen.get(bucket, value) != value
        ]
        self._seen.update(zip(shards, now, strict=True))
        return changed


def fingerprint(shards: Sequence[Tensor]) -> Tensor:
    """A 64-bit hash of the bits of the shards; an int64 scalar on their device.

    The bits are laid out as a table of words of 64 bits.  A row's hash is a weighted sum of its words, which
    is one matrix-vector product, and of their high halves: in a sum modulo 2**64 alone the top bit of a word
    counts for one bit, and two changed signs cancel.  Any one changed bit changes its row's hash (odd
    weights) and so the result (`mixed` is a bijection); exchanged words and rows have other weights.
    """
    flats = [s.detach().contiguous().view(-1).view(torch.uint8) for s in shards if s.numel()]
    if not flats:
        return torch.zeros((), dtype=torch.int64, device=shards[0].device)
    flat = torch.cat(flats) if len(flats) > 1 or flats[0].storage_offset() % 8 else flats[0]
    whole = flat.numel() // (8 * _WORDS) * (8 * _WORDS)
    hashes = [_row_hashes(flat[:whole].view(torch.int64).view(-1, _WORDS))] if whole else []
    if whole < flat.numel():
        rest = flat.new_zeros(8 * _WORDS)
        rest[: flat.numel() - whole] = flat[whole:]
        hashes.append(_row_hashes(rest.view(torch.int64).view(1, _WORDS)))
    rows = torch.cat(hashes)
    return mixed(rows + _steps(0, rows.numel(), flat.device)).sum()


def _row_hashes(table: Tensor) -> Tensor:
    """One hash for each row of `_WORDS` words."""
    on_cpu = table.device.type == "cpu"
    weights = _weights(0, table.device)
    high_weights = _weights(_WORDS, table.device)
    hashes = []
    # Blocks that stay in a core's cache while they are read twice; on a GPU, few launches.
    blocks = table.split(1 << 8 if on_cpu else 1 << 16)
    halves = torch.empty_like(blocks[0])
    for block in blocks:
        high = torch.bitwise_right_shift(block, 32, out=halves[: len(block)])
        if on_cpu:
            hashes.append(block @ weights + high @ high_weights)
        else:  # CUDA has no matrix product of integers
            hashes.append((block * weights).sum(1) + (high * high_weights).sum(1))
    return torch.cat(hashes)


def _steps(start: int, count: int, device: torch.device) -> Tensor:
    # Multiples of the golden ratio times 2**64: splitmix64's increment.
    steps = torch.arange(1 + start, 1 + start + count, dtype=torch.int64, device=device)
    return steps * -7046029254386353131


@functools.cache
def _weights(start: int, device: torch.device) -> Tensor:
    """Random-looking odd weights for the words of a row."""
    return mixed(_steps(start, _WORDS, device)) | 1


def mixed(words: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    words = (words ^ _shifted(words, 30)) * -4658895280553007687
    words = (words ^ _shifted(words, 27)) * -7723592293110705685
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)  # logical: int64's own shift copies the sign
