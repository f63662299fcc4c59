"""Whether anybody can have written to a tensor since it was looked at, known without asking the device.

[Note: seals]
The memory of a home shard or a gradient is reached through its HomeTensor alone.  Every op that writes to it
or gives a view of it, and every other way to the memory, breaks the seal on it first.  While the seal is
intact, the values are what they were when it was put on.  As a seal breaks it takes a fingerprint, which
stays on the device; who wants to know whether the values have changed compares that with one of today, and
only then waits for the device.

Others may have a view from before the seal is put on, by which they write unseen.  Storages count their
tensors: where there is another one, the seal is put on broken.  Dynamo's guards look at raw tensors in every
call of a model, so nothing breaks then; who writes to such a tensor counts its version up.

A CUDA graph writes unseen when it is replayed.  So no seal breaks while a stream is captured: that raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock

from torch import Tensor

from fcdp_compile.devices import is_capturing
from fcdp_compile.errors import FcdpError
from fcdp_compile.params.fingerprint import fingerprint
from fcdp_compile.torch_compat import storage_id, storage_uses, without_modes

_lock = Lock()


class Seal:
    """The seal on one tensor.

    mark: the fingerprint of the values that it was put on, from when it broke; None before.
    """

    __slots__ = ("_version", "mark")

    def __init__(self, held: Tensor) -> None:
        self._version = _version(held)
        self.mark: Tensor | None = None

    def is_intact(self, held: Tensor) -> bool:
        """Whether nobody can have written to the tensor."""
        return self.mark is None and self._version == _version(held)

    def break_for(self, held: Tensor) -> None:
        """Somebody is about to get hold of the tensor, whose values are still as they were.

        Raises: FcdpError while a CUDA graph is captured.
        """
        if self.is_intact(held):
            refuse_capture()
            # The first mark counts: another thread may have written since.
            with _lock, without_modes():
                if self.mark is None:
                    self.prepare(held)
                    self.mark = fingerprint([held])

    def prepare(self, held: Tensor) -> None:
        """Change the tensor before it is marked, in a way that does not matter to its users."""


def refuse_capture() -> None:
    """Refuse that a CUDA graph is captured which may write to sharded parameters or their gradients.

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
    """For each tensor, whether any other can reach its memory.

    are_apart: these tensors may be parts of one storage, none of which reaches another's.
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
