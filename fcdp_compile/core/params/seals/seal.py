"""Find out, without waiting for the device, whether a tensor may have been written to since it was read.

[Note: seals]
The memory of a home shard or a gradient is accessed only through its HomeTensor.  Every op that writes to the
memory or gives a view of it, and every other access, first breaks the seal.  While the seal is intact, the
values are the same as when the seal was put on.  A seal that breaks takes a fingerprint of the values, which
stays on the device.  To find out whether the values have changed, compare this fingerprint with a new one;
only this comparison waits for the device.

Other code may hold a view from before the seal was put on, and write through the view unseen.  Storages
count their tensors: if there is another tensor, the seal is put on already broken.  Dynamo's guards read raw
tensors in every call of a model, so this breaks no seal; a write to a raw tensor increases its version.

A replayed CUDA graph writes unseen.  So a seal cannot break while a stream is captured: that raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from torch import Tensor

from fcdp_compile.core.params.seals.fingerprint import fingerprint, fingerprints
from fcdp_compile.devices import is_capturing
from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat import storage_id, storage_uses, without_modes

_lock = Lock()


class Seal:
    """The seal on one tensor.

    mark: the fingerprint of the values at the time when the seal was put on; None until the seal breaks.
    """

    __slots__ = ("_version", "mark")

    def __init__(self, held: Tensor) -> None:
        self._version = _version(held)
        self.mark: Tensor | None = None

    def is_intact(self, held: Tensor) -> bool:
        """Whether the tensor cannot have been written to."""
        return self.mark is None and self._version == _version(held)

    def break_for(self, held: Tensor) -> None:
        """Break the seal while the values are still unchanged, because a caller is about to get the tensor.

        Raises: FcdpError while a CUDA graph is captured.
        """
        if self.is_intact(held):
            refuse_capture()
            # Keep the first mark: another thread may have broken the seal and written since.
            with _lock, without_modes():
                if self.mark is None:
                    self.prepare(held)
                    self.mark = fingerprint([held])

    def prepare(self, held: Tensor) -> None:
        """Change the tensor before its fingerprint is taken, in a way that does not matter to its users."""


class Sealed(Protocol):
    """A tensor that may have a seal on its memory."""

    seal: Seal | None

    def present(self) -> Tensor:
        """The memory."""


def refuse_capture() -> None:
    """Refuse to capture a CUDA graph that may write to sharded parameters or their gradients.

    Raises: FcdpError.
    """
    if is_capturing():
        raise FcdpError(
            "a CUDA graph that uses sharded parameters or their gradients would write to them unnoticed "
            "when it is replayed, and the model would keep using copies of the old values; run this "
            "part, such as "
            "optimizer.step(), outside of torch.cuda.graph"
        )


def are_shared(tensors: Sequence[Tensor], *, are_apart: bool) -> list[bool]:
    """For each tensor, whether any other tensor may share its memory.

    are_apart: these tensors may be separate parts of one storage that do not overlap.
    """
    ours = Counter(storage_id(t) for t in tensors)
    return [
        t.numel() > 0
        and (
            t.is_inference()  # has no version
            or not t.untyped_storage().resizable()  # numpy has seen it
            or (t.device.type == "cpu" and t.is_shared())  # other processes may have it
            or storage_uses(t) > (ours[storage_id(t)] if are_apart else 1)
        )
        for t in tensors
    ]


def _version(held: Tensor) -> int:
    return 0 if held.is_inference() else held._version


def seal(tensors: Sequence[Sealed], kind: type[Seal] = Seal, *, are_apart: bool = False) -> None:
    """Put a new seal on each of these tensors.

    are_apart: the tensors may be parts of one storage, such as gradients that were reduced together.
    """
    with without_modes():
        held = [t.present() for t in tensors]
        opened: list[tuple[Seal, Tensor]] = []
        shared = are_shared(held, are_apart=are_apart)
        for tensor, own, is_shared in zip(tensors, held, shared, strict=True):
            tensor.seal = kind(own)
            if is_shared:
                tensor.seal.prepare(own)
                opened.append((tensor.seal, own))
        marks = fingerprints([[own] for _, own in opened]).unbind() if opened else ()
        for (broken, _), mark in zip(opened, marks, strict=True):
            broken.mark = mark
