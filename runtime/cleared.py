"""Notice that somebody cleared or changed gradients while others of their parameters wait.

[Note: cleared gradients]
What `no_sync` accumulates belongs to `.grad`, and whoever clears that means it too.  An accumulating backward
gives autograd negative zeros, which change no bit of a gradient that is there.  So a `.grad` that is gone by
the next backward or optimizer step, or all positive zeros where it was not, was cleared by `zero_grad`, and
what waits for that parameter is forgotten.  One that differs in any other way cannot be made right and is
refused.  A rank whose shard of a parameter is empty cannot see it cleared; it follows the other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.record import ParamRecord
from fcdp_compile.runtime.validity import fingerprint


class GradientMarks:
    """Fingerprints that this rank's shards of some gradients must have.

    records: of the model's parameters, by name.
    """

    def __init__(self, records: Mapping[str, ParamRecord]) -> None:
        self._records = records
        self._marks: dict[str, int | None] = {}  # None: of an empty shard

    def set(self, names: Iterable[str]) -> None:
        """Expect what the `.grad`s will be once negative zeros are added to them."""
        new = [n for n in names if n not in self._marks]
        grads = {n: self._grad(n) for n in new}
        self._marks |= _fingerprints(
            {n: self._negative_zeros(n) if g is None else g for n, g in grads.items()}
        )

    def drop(self, names: Iterable[str]) -> None:
        """Expect nothing any more."""
        for name in names:
            self._marks.pop(name, None)

    def cleared(self) -> list[str]:
        """The parameters whose gradients were cleared since `set`, in the order of that.

        Raises: FcdpError if one was changed in another way.
        """
        grads = {n: self._grad(n) for n in self._marks}
        now = _fingerprints({n: g for n, g in grads.items() if g is not None})
        cleared = {n for n, g in grads.items() if g is None}
        for name, mark in now.items():
            if mark == self._marks[name]:
                continue
            if not _is_zeroed(grads[name]):
                raise FcdpError(
                    f"the gradient of parameter {name!r} was changed while gradients of earlier "
                    "micro-batches wait for the one that synchronises; clip or scale gradients after the "
                    "backward outside of no_sync"
                )
            cleared.add(name)
        empty = {n for n, mark in now.items() if mark is None}
        if cleared and len(cleared) + len(empty) == len(grads):
            cleared |= empty
        return [n for n in self._marks if n in cleared]

    def _grad(self, name: str) -> Tensor | None:
        parameter = self._records[name].living()
        grad = None if parameter is None else parameter.grad
        return grad.to_local().detach() if isinstance(grad, DTensor) else grad

    def _negative_zeros(self, name: str) -> Tensor:
        shard = self._records[name].local()
        return torch.full_like(shard, -0.0)


def _fingerprints(shards: Mapping[str, Tensor]) -> dict[str, int | None]:
    marks: dict[str, int | None] = dict.fromkeys(shards)
    present = {n: s for n, s in shards.items() if s.numel()}
    if present:
        values = torch.stack([fingerprint([s]) for s in present.values()]).tolist()
        marks |= dict(zip(present, values, strict=True))
    return marks


def _is_zeroed(grad: Tensor | None) -> bool:
    return grad is not None and not bool(grad.contiguous().view(-1).view(torch.uint8).any())
