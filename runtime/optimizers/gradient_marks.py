"""Notice gradients that were cleared or changed while others of their parameters wait.

[Note: cleared gradients]
Gradients that `no_sync` accumulates belong to `.grad`: code that clears `.grad` means to clear them, too.  An
accumulating backward gives autograd negative zeros, which change no bit of an existing gradient.  A gradient
of positive zeros alone is made negative zeros before anybody can read it, which changes no sum.  So if a
`.grad` is gone by the next backward or optimizer step, or is all positive zeros, `zero_grad` cleared it, and
the gradients that wait for that parameter are forgotten.  A `.grad` that differs in any other way cannot be
repaired and is refused.  Ranks tell each other what they see: a rank with an empty shard sees nothing.

Gradients are sealed (`seals`, [Note: seals]).  Only the values of gradients that others could reach are
looked at, all of them in a few kernels, and only then does the Python thread wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.seals import Seal, fingerprints, fingerprints_of_zeros, seal
from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.collectives.agreement import Question
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.reads import read
from fcdp_compile.runtime.parameters.record import ParamRecord


@dataclass(frozen=True, slots=True)
class Grad:
    """A `.grad` at some time: adding to it raises its version or replaces the tensor."""

    tensor: Tensor | None
    version: int

    def is_still(self, other: Grad) -> bool:
        """Whether `other` is the same tensor, and nobody wrote to it since."""
        return self.tensor is other.tensor and self.version == other.version


class _GradientSeal(Seal):
    """The seal on a gradient that must stay as it is."""

    __slots__ = ()

    def prepare(self, held: Tensor) -> None:
        if held.numel():
            is_zeroed = _bytes(held).any() == 0
            held.masked_fill_(is_zeroed, -0.0)


class GradientMarks:
    """Tells whether marked gradients of this rank stay as they are; knows which gradients were lost.

    records: of the model's parameters, by name.  Parameters without any element have no marks.
    """

    def __init__(self, records: Mapping[str, ParamRecord]) -> None:
        self._records = records
        # The seal on each gradient; a plain tensor cannot have one and gets a broken seal here.
        self._marks: dict[str, Seal] = {}
        self._lost: dict[str, None] = {}

    def names(self) -> list[str]:
        """The parameters with a mark, and those whose gradients were lost."""
        return [*self._marks, *self._lost]

    def expect(self, names: Iterable[str]) -> None:
        """Expect these gradients to stay as they are now."""
        grads = {n: self.grad(n).tensor for n in self._of_size(names)}
        unsealed = {n: g for n, g in grads.items() if not self._is_intact(n, g)}
        homes = {n: g for n, g in unsealed.items() if isinstance(g, HomeTensor)}
        seal(list(homes.values()), _GradientSeal, are_apart=True)
        for name, home in homes.items():
            assert home.seal is not None, name
            self._marks[name] = home.seal
        plain = [n for n in unsealed if n not in homes]
        shards = {n: s for n in plain if (s := self.shard(n)) is not None}
        for name, shard in shards.items():
            self._marks[name] = _GradientSeal(shard)
            self._marks[name].break_for(shard)

    def _is_intact(self, name: str, grad: Tensor | None) -> bool:
        """Whether a gradient is the marked tensor, and nobody can have written to it."""
        mark = self._marks.get(name)
        if mark is None or not isinstance(grad, HomeTensor) or grad.seal is not mark:
            return False
        return mark.is_intact(grad.present())

    def unseal(self, name: str) -> None:
        """Stop noticing changes to this gradient, such as when a backward adds to it."""
        if isinstance(grad := self.grad(name).tensor, HomeTensor):
            grad.seal = None

    def lose(self, names: Iterable[str]) -> None:
        """Expect these gradients to be cleared."""
        lost = self._of_size(names)
        self.drop(lost)
        self._lost |= dict.fromkeys(lost)

    def drop(self, names: Iterable[str]) -> None:
        """Expect nothing of these gradients any more."""
        for name in names:
            if self._marks.pop(name, None) is not None:
                self.unseal(name)
            self._lost.pop(name, None)

    def cleared(self, collectives: Collectives) -> set[str]:
        """The parameters whose gradients any rank sees cleared; all ranks must call it.

        Raises: FcdpError on every rank if a gradient was changed in another way, or lost and not cleared.
        """
        names = self.names()
        grads = {n: self.grad(n).tensor for n in names}
        zeroed, differing = self._look([n for n in names if not self._is_intact(n, grads[n])])
        gone = [grads[n] is None or n in zeroed for n in names]
        marked = differing & self._marks.keys()
        changed = [n in marked and not g for n, g in zip(names, gone, strict=True)]
        what = "the agreement on gradients that were cleared"
        act = "looks which gradients of micro-batches were cleared"
        by_any = Question(collectives, act, [*gone, *changed], what).agreed()
        cleared, changed = by_any[: len(names)], by_any[len(names) :]
        if any(changed):
            raise FcdpError(
                f"the gradient of parameter {names[changed.index(True)]!r} was changed while gradients of "
                "earlier micro-batches wait for the micro-batch that synchronises; clip or scale "
                "gradients after the "
                "backward outside of no_sync"
            )
        found = {n for n, is_cleared in zip(names, cleared, strict=True) if is_cleared}
        if left := [n for n in self._lost if n not in found]:
            raise FcdpError(
                f"a backward failed after it had taken gradients of parameter {left[0]!r} (one of "
                f"{len(left)}) that accumulate; clear all gradients (optimizer.zero_grad()) and begin again "
                "with the first micro-batch"
            )
        return found

    def _look(self, names: Iterable[str]) -> tuple[set[str], set[str]]:
        """Those of these gradients that are positive zeros, and that differ; waits for the device."""
        shards = {n: s for n in names if (s := self.shard(n)) is not None and s.numel()}
        if not shards:
            return set(), set()
        present = list(shards.values())
        now = fingerprints([[s] for s in present])
        seals = [self._marks.get(n) for n in shards]
        # A gradient whose seal broke unseen, or that was lost, has no mark: it counts as different.
        marks = [
            ~m if s is None or s.mark is None else s.mark.to(now.device)
            for s, m in zip(seals, now, strict=True)
        ]
        are_zeros = now == fingerprints_of_zeros(present)
        rows = read(torch.stack([are_zeros, now != torch.stack(marks)]))
        zeroed, differing = ({n for n, is_so in zip(shards, r, strict=True) if is_so} for r in rows)
        return zeroed, differing

    def grad(self, name: str) -> Grad:
        """The `.grad` of a parameter as it is now."""
        parameter = self._records[name].living()
        grad = None if parameter is None else parameter.grad
        return Grad(grad, 0 if grad is None else grad._version)

    def shard(self, name: str) -> Tensor | None:
        """This rank's shard of a gradient; writing to it writes to `.grad`."""
        grad = self.grad(name).tensor
        if isinstance(grad, HomeTensor):
            return grad.present().detach()
        return grad.to_local().detach() if isinstance(grad, DTensor) else grad

    def _of_size(self, names: Iterable[str]) -> list[str]:
        return [n for n in names if math.prod(self._records[n].spec.layout.shape)]


def _bytes(shard: Tensor) -> Tensor:
    return shard.contiguous().view(-1).view(torch.uint8)
