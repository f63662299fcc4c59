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

[Note: fingerprints]
A fingerprint is a 64-bit hash of the bits of tensors.  The bits are laid out as a table of 64-bit words.  A
row's hash is a weighted sum of its words (one matrix-vector product) plus a weighted sum of the words' high
halves.  The first sum alone is not enough: it is modulo 2**64, so two changed sign bits cancel.  Any one
changed bit changes the hash of its row (the weights are odd) and so the result (`mixed` is a bijection).
Weights differ between the words of a row, and steps between rows, so swapped words or rows change the result
too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from fcdp_compile.devices import is_capturing
from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat.autograd import without_modes
from fcdp_compile.torch_compat.tensors import storage_id, storage_uses

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
            "part, such as optimizer.step(), outside of torch.cuda.graph"
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
    try:
        return held._version
    except RuntimeError:  # a tensor of inference mode has none
        return 0


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


_WORDS = 256  # in a row of the table
_ROW_BYTES = 8 * _WORDS
_TOGETHER_BYTES = 32 << 20
"""Groups of tensors are copied into one table up to this size; a larger group is read where it is."""


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """The hash of these tensors, taken one after the other; an int64 scalar on their device."""
    return fingerprints([tensors])[0]


def fingerprints(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """The hash of each group of tensors; int64 [len(groups)] on the device of the first group.

    Launches a few kernels for each 32 MiB of small groups, however many they are, and for each larger group.
    """
    devices = dict.fromkeys(group[0].device for group in groups)
    if len(devices) > 1:  # some home shards are in host memory
        result = torch.empty(len(groups), dtype=torch.int64, device=groups[0][0].device)
        for device in devices:
            mine = [i for i, group in enumerate(groups) if group[0].device == device]
            result[mine] = fingerprints([groups[i] for i in mine]).to(result.device)
        return result
    flats = [[_flat(t.detach()).view(torch.uint8) for t in g if t.numel()] for g in groups]
    found: list[Tensor] = []
    together: list[list[Tensor]] = []
    size = 0
    for flat in flats:
        own = sum(_padded(t.numel()) for t in flat)
        if together and size + own > _TOGETHER_BYTES:
            found.append(_hashes(together, groups[0][0].device))
            together, size = [], 0
        together.append(flat)
        size += own
    found.append(_hashes(together, groups[0][0].device))
    return torch.cat(found) if len(found) > 1 else found[0]


def _flat(tensor: Tensor) -> Tensor:
    # A contiguous tensor of one element may have any stride, with which it has no view as bytes.
    flat = tensor.contiguous().view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def fingerprints_of_zeros(tensors: Sequence[Tensor]) -> Tensor:
    """The hash that `fingerprints` gives each of these tensors if all its bits are zero; on their device."""
    device = tensors[0].device
    counts = tuple(_padded(t.numel() * t.itemsize) // _ROW_BYTES for t in tensors)
    group_of_row, steps = _positions(counts, device)
    hashes = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    return hashes.index_add_(0, group_of_row, mixed(steps))


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ROW_BYTES) * _ROW_BYTES


def _hashes(groups: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The hash of each group of flat tensors of bytes."""
    sizes = [sum(t.numel() for t in group) for group in groups]
    counts = tuple(_padded(size) // _ROW_BYTES for size in sizes)
    hashes = torch.zeros(len(groups), dtype=torch.int64, device=device)
    if not sum(counts):
        return hashes
    if len(groups) == 1:
        (group,) = groups
        rows = _rows_of_one(torch.cat(list(group)) if len(group) > 1 else group[0])
        steps = _STEP * torch.arange(1, 1 + len(rows), device=device)
        return mixed(rows + steps).sum().view(1)
    padding = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=device)
    parts: list[Tensor] = []
    for group, size in zip(groups, sizes, strict=True):
        parts += [*group, padding[: _padded(size) - size]]
    rows = _row_hashes(torch.cat(parts).view(torch.int64).view(-1, _WORDS))
    group_of_row, steps = _positions(counts, device)
    return hashes.index_add_(0, group_of_row, mixed(rows + steps))


def _rows_of_one(flat: Tensor) -> Tensor:
    """The hashes of the rows of one flat tensor, without a copy of the tensor if its words are aligned."""
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // _ROW_BYTES * _ROW_BYTES
    hashes = [_row_hashes(flat[:whole].view(torch.int64).view(-1, _WORDS))] if whole else []
    if whole < flat.numel():
        rest = flat.new_zeros(_ROW_BYTES)
        rest[: flat.numel() - whole] = flat[whole:]
        hashes.append(_row_hashes(rest.view(torch.int64).view(1, _WORDS)))
    return torch.cat(hashes) if len(hashes) > 1 else hashes[0]


def _row_hashes(table: Tensor) -> Tensor:
    """One hash for each row of `_WORDS` words."""
    on_cpu = table.device.type == "cpu"
    weights = _weights(0, table.device)
    high_weights = _weights(_WORDS, table.device)
    hashes = []
    # On a CPU a block stays in a core's cache for its second reading; a GPU needs few launches instead, with
    # blocks of 16 MiB, because the results of some of the kernels are as large.
    blocks = table.split(1 << 8 if on_cpu else 1 << 13)
    halves = torch.empty_like(blocks[0])
    for block in blocks:
        high = torch.bitwise_right_shift(block, 32, out=halves[: len(block)])
        if on_cpu:
            hashes.append(block @ weights + high @ high_weights)
        else:  # CUDA has no matrix product of integers
            hashes.append((block * weights).sum(1) + (high * high_weights).sum(1))
    return torch.cat(hashes) if len(hashes) > 1 else hashes[0]


@functools.lru_cache(maxsize=64)
def _positions(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of the table: the index of its group, and the step for its place within the group.

    counts: the rows of each group.  Cached, because copying these tensors to a device makes the host wait.
    """
    with torch.inference_mode(False):
        sizes = torch.tensor(counts, device="cpu")
        groups = torch.arange(len(counts), device="cpu").repeat_interleave(sizes)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        places = torch.arange(len(groups), device="cpu") - starts
        return groups.to(device), ((places + 1) * _STEP).to(device)


_STEP = -7046029254386353131
"""The golden ratio times 2**64: splitmix64's increment."""


@functools.cache
def _weights(start: int, device: torch.device) -> Tensor:
    """Random-looking odd weights for the words of a row."""
    with torch.inference_mode(False):
        steps = torch.arange(1 + start, 1 + start + _WORDS, dtype=torch.int64, device=device)
        return mixed(steps * _STEP) | 1


def mixed(words: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    words = (words ^ _shifted(words, 30)) * -4658895280553007687
    words = (words ^ _shifted(words, 27)) * -7723592293110705685
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)  # logical: int64's own shift copies the sign
