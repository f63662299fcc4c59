"""Which values a gathered copy belongs to: generations, and fingerprints that catch silent writes.

A parameter has a generation, a number that grows when its values change.  It changes when an optimizer that
owns it steps, on `load_state_dict`, and when its fingerprint differs from the last one seen, which catches
writes that leave no trace (`.data`, foreach and fused optimizers on DTensors).  A bucket's generation is
the largest of its parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_BLOCK = 256  # words in a row of the fingerprint's table


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
    """A 64-bit sum over the bits of the shards; an int64 scalar on their device.

    The bits are laid out as a table of words; each row's and each column's sum enters with an odd weight of
    its own, so exchanged rows, columns and elements show as well as changed ones.
    """
    flats = [s.detach().contiguous().view(-1).view(torch.uint8) for s in shards if s.numel()]
    if not flats:
        return torch.zeros((), dtype=torch.int64, device=shards[0].device)
    flat = torch.cat(flats) if len(flats) > 1 or flats[0].storage_offset() % 8 else flats[0]
    whole = flat.numel() // (8 * _BLOCK) * (8 * _BLOCK)
    rest = flat[whole:].to(torch.int64)
    total = (rest * _weights(rest.numel(), 3, flat.device)).sum()
    if whole:
        # Words of 8 bytes: summing them needs no conversion, which is ten times as fast as 4-byte words.
        table = flat[:whole].view(torch.int64).view(-1, _BLOCK)
        rows, columns = table.sum(1), table.sum(0)
        total = total + (rows * _weights(rows.numel(), 5, flat.device)).sum()
        total = total + (columns * _weights(_BLOCK, 7, flat.device)).sum()
    return total


def _weights(count: int, seed: int, device: torch.device) -> Tensor:
    # Multiples of a large odd constant (the golden ratio's, of Knuth's multiplicative hashing), made odd.
    steps = torch.arange(seed, seed + count, dtype=torch.int64, device=device)
    return (steps * -7046029254386353131) | 1
