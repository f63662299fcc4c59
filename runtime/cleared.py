"""Notice that somebody cleared or changed gradients while others of their parameters wait.

[Note: cleared gradients]
What `no_sync` accumulates belongs to `.grad`, and whoever clears that means it too.  An accumulating backward
gives autograd negative zeros, which change no bit of a gradient that is there; one of positive zeros alone
is made negative, which adds as little.  So a `.grad` that is gone by the next backward or optimizer step, or
all positive zeros, was cleared by `zero_grad`, and what waits for that parameter is forgotten.  One that
differs in any other way cannot be made right and is refused.  Ranks tell each other what they see: one whose
shard of a parameter is empty sees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.agreement import packed, raised_by_any
from fcdp_compile.runtime.collectives import Collectives
from fcdp_compile.runtime.record import ParamRecord
from fcdp_compile.runtime.validity import fingerprint


@dataclass(frozen=True, slots=True)
class Grad:
    """A `.grad` at some time: whoever adds to it counts its version up, or puts another in its place."""

    tensor: Tensor | None
    version: int

    def is_still(self, other: Grad) -> bool:
        """Whether it is this one, and nobody wrote to it since."""
        return self.tensor is other.tensor and self.version == other.version


class GradientMarks:
    """Fingerprints that this rank's shards of some gradients must have, and gradients that were lost.

    records: of the model's parameters, by name.  Those without any element have no marks.
    """

    def __init__(self, records: Mapping[str, ParamRecord]) -> None:
        self._records = records
        self._marks: dict[str, int | None] = {}  # None: of an empty shard
        self._lost: dict[str, None] = {}

    def names(self) -> list[str]:
        """The parameters with a mark, and those whose gradients were lost."""
        return [*self._marks, *self._lost]

    def expect(self, names: Iterable[str]) -> None:
        """Expect of these gradients that they stay as they are now."""
        shards = {n: s for n in self._of_size(names) if (s := self.shard(n)) is not None}
        for shard, is_zeroed in zip(shards.values(), _are_zeroed(shards.values()), strict=True):
            if is_zeroed:
                shard.fill_(-0.0)
        self._marks |= _fingerprints(shards)

    def lose(self, names: Iterable[str]) -> None:
        """Expect of these gradients that they be cleared."""
        lost = self._of_size(names)
        self.drop(lost)
        self._lost |= dict.fromkeys(lost)

    def drop(self, names: Iterable[str]) -> None:
        """Expect nothing any more."""
        for name in names:
            self._marks.pop(name, None)
            self._lost.pop(name, None)

    def cleared(self, collectives: Collectives) -> set[str]:
        """The parameters whose gradients any rank sees cleared; all must ask.

        Raises: FcdpError on every rank if one was changed in another way, or lost and not cleared.
        """
        names = self.names()
        shards = {n: s for n in names if (s := self.shard(n)) is not None}
        zeroed = dict(zip(shards, _are_zeroed(shards.values()), strict=True))
        now = _fingerprints(shards)
        gone = [zeroed.get(n, True) for n in names]
        marked = enumerate(self._marks)
        changed = [i for i, n in marked if not gone[i] and now[n] != self._marks[n]]
        cleared, changed = _agreed(collectives, gone, changed)
        if changed:
            raise FcdpError(
                f"the gradient of parameter {names[changed[0]]!r} was changed while gradients of earlier "
                "micro-batches wait for the one that synchronises; clip or scale gradients after the "
                "backward outside of no_sync"
            )
        found = {n for n, is_cleared in zip(names, cleared, strict=True) if is_cleared}
        if left := [n for n in self._lost if n not in found]:
            raise FcdpError(
                f"a backward failed when it had taken up gradients of parameter {left[0]!r} (one of "
                f"{len(left)}) that accumulate; clear all gradients (optimizer.zero_grad()) and begin again "
                "with the first micro-batch"
            )
        return found

    def grad(self, name: str) -> Grad:
        """The `.grad` of a parameter as it is now."""
        parameter = self._records[name].living()
        grad = None if parameter is None else parameter.grad
        return Grad(grad, 0 if grad is None else grad._version)

    def shard(self, name: str) -> Tensor | None:
        """This rank's shard of a gradient; writing to it writes to `.grad`."""
        grad = self.grad(name).tensor
        return grad.to_local().detach() if isinstance(grad, DTensor) else grad

    def _of_size(self, names: Iterable[str]) -> list[str]:
        return [n for n in names if math.prod(self._records[n].spec.layout.shape)]


def _agreed(
    collectives: Collectives, cleared: list[bool], changed: list[int]
) -> tuple[list[bool], list[int]]:
    """What any rank sees cleared, and the first that one sees changed, if any."""
    words = [changed[0] if changed else -1, *packed(cleared)]
    rows = collectives.agree(words, "the agreement on gradients that were cleared")
    seen = [row[0] for row in rows if row[0] >= 0]
    return raised_by_any([row[1:] for row in rows], len(cleared)), seen[:1]


def _fingerprints(shards: Mapping[str, Tensor]) -> dict[str, int | None]:
    marks: dict[str, int | None] = dict.fromkeys(shards)
    present = {n: s for n, s in shards.items() if s.numel()}
    if present:
        values = torch.stack([fingerprint([s]) for s in present.values()]).tolist()
        marks |= dict(zip(present, values, strict=True))
    return marks


def _are_zeroed(shards: Iterable[Tensor]) -> list[bool]:
    """Whether each has elements, and they are positive zeros all."""
    bits = [s.contiguous().view(-1).view(torch.uint8) for s in shards]
    if not bits:
        return []
    return [
        not is_any and b.numel() > 0
        for is_any, b in zip(torch.stack([b.any() for b in bits]).tolist(), bits, strict=True)
    ]
