"""What a stream's receiver has, so that the next stream sends only the elements that have changed.

a whole tensor ── compared, bit by bit, with the copy on the host ──▶ its changes, or itself if smaller
               ── what has changed ─────────────────────────────────▶ the copy
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.model import ShardedModel

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes: as integers, equal bits are equal, also of NaN, and -0.0 differs from 0.0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorChanges:
    """The elements of a tensor that differ, in any bit, from those that the receiver has.

        tensor.view(-1)[changes.indices] = changes.values

    indices: positions in the flattened tensor, ascending; int32, for 2**31 elements or more int64.
    values: the new elements, in the tensor's dtype.
    """

    indices: Tensor
    values: Tensor


def changes_of(tensor: Tensor, before: Tensor) -> TensorChanges | None:
    """Return what makes `before` equal to `tensor`, or None if that has no fewer bytes than the tensor.

    Both have the same shape, dtype and device.
    """
    bits = _bits(tensor)
    differs = (bits != _bits(before)).any(1)
    index = torch.int32 if tensor.numel() < 2**31 else torch.int64
    # Counted first, because torch's indices have 8 bytes each.
    if int(differs.sum()) * (index.itemsize + tensor.itemsize) >= tensor.nbytes:
        return None
    indices = differs.nonzero().view(-1)
    values = bits[indices].view(tensor.dtype).view(-1)
    return TensorChanges(indices=indices.to(index), values=values)


def _bits(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's elements as rows of integers."""
    word = min(tensor.itemsize, 8)
    return tensor.view(-1).view(_WORDS[word]).view(-1, tensor.itemsize // word)


class ReceiverCopy:
    """A copy on this rank's host of the tensors that a stream has sent, by name.

    It is the next stream's base if the stream was acknowledged.  `begin` takes the tensors of the last base:
    there is one copy for a model, and a stream that does not end leaves no base.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._is_whole = self._is_acknowledged = False

    def begin(self, state: ShardedModel) -> None:
        """Take what the receiver of the model's last stream has, if that is known."""
        last = _newest.get(state)
        if last is not None:
            if last._is_acknowledged:
                self._before = last._tensors
            last._tensors = {}
        _newest[state] = self

    @torch.inference_mode(False)  # the next stream may be outside of it, and changes the copy
    def update(self, name: str, tensor: Tensor) -> Tensor | TensorChanges:
        """Return what the receiver needs of a contiguous tensor, and assume that it will get it."""
        copy = self._before.pop(name, None)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            self._tensors[name] = tensor.to("cpu", copy=True)
            return tensor
        self._tensors[name] = copy
        changes = changes_of(tensor, copy.to(tensor.device))
        if changes is None:
            copy.copy_(tensor)
            return tensor
        _bits(copy)[changes.indices.to("cpu", torch.int64)] = _bits(changes.values.to("cpu"))
        return changes

    def end(self) -> None:
        """Note that the stream has been read to its end."""
        self._before = {}
        self._is_whole = True

    def acknowledge(self, state: ShardedModel) -> None:
        """Make this copy the base of the next stream.

        Raises: FcdpError.
        """
        if not self._is_whole or _newest.get(state) is not self:
            raise FcdpError(
                "acknowledge() is for the last stream_state(…, changes=True) of a model, after all of its "
                "buckets; call it once the receiver has them and before the next such stream"
            )
        self._is_acknowledged = True


_newest: weakref.WeakKeyDictionary[ShardedModel, ReceiverCopy] = weakref.WeakKeyDictionary()
"""By model, of the stream that was begun last; an entry goes with its model."""
