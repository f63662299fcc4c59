"""Send files from the memory of one node to that of others: an all-to-all of all ranks for each piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.ranks.lost_ranks import Wait, finish
from fcdp_compile.core.ranks.messages import Attempts, together
from fcdp_compile.errors import CheckpointError

_PIECE_BYTES = 2**23
"""The most bytes that one rank sends to another at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A file that one rank reads in its node's memory and another rank writes in its own node's memory.

    path: within the memory, on both nodes.  source, target: ranks of the group.
    """

    path: Path
    size_bytes: int
    source: int
    target: int


def send_files(
    files: Sequence[Sent], memory: Path, group: dist.ProcessGroup | None, doing: str
) -> None:
    """Send files between ranks of a group; all ranks call it with the same list.

    memory: of this rank's node.

    Raises: CheckpointError on every rank if a file cannot be read or written, which leaves files on some
    nodes; LostRankError.
    """
    if group is None or not files:
        return
    me, ranks, attempts = dist.get_rank(group), dist.get_world_size(group), Attempts()
    pairs: dict[tuple[int, int], list[Sent]] = {}
    for file in files:
        pairs.setdefault((file.source, file.target), []).append(file)
    total = {pair: sum(f.size_bytes for f in of_one) for pair, of_one in pairs.items()}
    reads = {b: _Run(of, memory, "rb") for (a, b), of in pairs.items() if a == me}
    writes = {a: _Run(of, memory, "wb") for (a, b), of in pairs.items() if b == me}
    for begin in range(0, max(total.values()), _PIECE_BYTES):
        sizes = {pair: max(0, min(_PIECE_BYTES, n - begin)) for pair, n in total.items()}
        leaving = [sizes.get((me, rank), 0) for rank in range(ranks)]
        arriving = [sizes.get((rank, me), 0) for rank in range(ranks)]
        send, got = (
            torch.zeros(sum(counts), dtype=torch.uint8, device="cpu")
            for counts in (leaving, arriving)
        )
        for rank, part in enumerate(send.split(leaving)):
            if len(part):
                attempts.attempt(partial(reads[rank].read, part))
        work = dist.all_to_all_single(got, send, arriving, leaving, group=group, async_op=True)
        finish(work, group, Wait(lambda: doing))
        for rank, part in enumerate(got.split(arriving)):
            if len(part):
                attempts.attempt(partial(writes[rank].write, part))
    for stream in (*reads.values(), *writes.values()):
        stream.close()
    together(group, attempts.check, CheckpointError, doing)


class _Run:
    """Files that are read or written one after the other."""

    def __init__(self, files: Iterable[Sent], memory: Path, mode: str) -> None:
        self._files = deque((memory / file.path, file.size_bytes) for file in files)
        self._mode = mode
        self._open: FileIO | None = None
        self._left = 0

    def read(self, out: Tensor) -> None:
        """Fill a tensor of bytes with the next ones.

        Raises: CheckpointError if a file is too short; OSError.
        """
        rest = out.numpy().data
        while rest:
            file = self._file()
            if not (count := file.readinto(rest[: self._left])):
                raise CheckpointError(f"{file.name} has become shorter")
            self._left -= count
            rest = rest[count:]

    def write(self, values: Tensor) -> None:
        """Write the bytes of a tensor.

        Raises: OSError.
        """
        rest = values.numpy().data
        while rest:
            count = self._file().write(rest[: self._left])
            self._left -= count
            rest = rest[count:]

    def _file(self) -> FileIO:
        """The file that the next byte is in."""
        if self._open is None or not self._left:
            self.close()
            path, self._left = self._files.popleft()
            if self._mode == "wb":
                path.parent.mkdir(parents=True, exist_ok=True)
            self._open = FileIO(str(path), self._mode)
        return self._open

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None
