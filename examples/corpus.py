"""Real text that every machine with Python and torch has, as batches of token windows.

    folders -> text files -> text -> tokens -> windows -> this rank's batch of a step

Everything is a function of the folders and a seed, so every rank sees the same windows in the
same order and takes its own part of them without communication.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

Encoder = Callable[[list[str]], list[list[int]]]
"""Turns texts into token ids, one list a text."""

BYTE_VOCABULARY = 256
MIB = 1 << 20
SOURCE_SUFFIXES = (".py",)
HEADER_SUFFIXES = (".h", ".hpp", ".cuh")
PROSE_SUFFIXES = (".rst", ".txt", ".md", "METADATA")
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3")


class CorpusError(Exception):
    """There is too little text; the message says where, and how to give more."""


def base_text(*, seed: int, limit_bytes: int) -> str:
    """Return source files of the running Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = text_files(folder, SOURCE_SUFFIXES, skipped=SKIPPED_FOLDERS)
    return read_text(shuffled(files, seed=seed), limit_bytes=limit_bytes, where=str(folder))


def lora_text(*, seed: int, limit_bytes: int) -> str:
    """Return C and C++ headers: Python's, then torch's; then the prose of packages.

    Python's headers may be missing (Linux distributions package them separately), torch's may not; in this
    order the most uniform text comes first.
    """
    paths = sysconfig.get_paths()
    torch_headers = Path(torch.__file__).parent / "include"
    sources = (
        (Path(paths["include"]), HEADER_SUFFIXES, ()),
        (torch_headers / "c10", HEADER_SUFFIXES, ()),
        (torch_headers / "torch", HEADER_SUFFIXES, ()),
        (Path(paths["stdlib"]), PROSE_SUFFIXES, SKIPPED_FOLDERS),
        (Path(paths["purelib"]), PROSE_SUFFIXES, ()),
    )
    files = (
        file
        for folder, suffixes, skipped in sources
        for file in shuffled(text_files(folder, suffixes, skipped=skipped), seed=seed)
    )
    return read_text(files, limit_bytes=limit_bytes, where="the headers of Python and torch")


def folder_text(folder: Path, *, seed: int, limit_bytes: int) -> str:
    """Return the text files of a user's folder, whatever their names."""
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder; name one that holds text files")
    files = shuffled(text_files(folder, ("",)), seed=seed)
    return read_text(files, limit_bytes=limit_bytes, where=str(folder))


def text_files(
    folder: Path, suffixes: tuple[str, ...], *, skipped: tuple[str, ...] = ()
) -> list[Path]:
    """List the files below a folder that have one of the suffixes, without hidden files, in a fixed order."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        found += [
            Path(parent, name)
            for name in sorted(names)
            if name.endswith(suffixes) and not name.startswith(".")
        ]
    return found


def shuffled(files: list[Path], *, seed: int) -> list[Path]:
    """Return the files in a seeded order, so that a bounded read sees all letters of the alphabet."""
    return random.Random(seed).sample(files, len(files))


def read_text(files: Iterable[Path], *, limit_bytes: int, where: str) -> str:
    """Join files up to the limit; files that cannot be read or are not UTF-8 text are left out.

    Raises: CorpusError if nothing is left.
    """
    parts: list[str] = []
    room_bytes = limit_bytes
    for file in files:
        if room_bytes <= 0:
            break
        text = _decoded(file, room_bytes)
        if text:
            parts.append(text)
            room_bytes -= len(text.encode())
    if not parts:
        raise CorpusError(f"no text files in {where}; name a folder of UTF-8 text with --data")
    return "\n".join(parts)


def _decoded(file: Path, limit_bytes: int) -> str:
    try:
        if not file.is_file():  # a pipe or a socket would block the read
            return ""
        with file.open("rb") as stream:
            raw = stream.read(limit_bytes)
        # A character cut in two by the limit is no reason to refuse the file.
        text = raw.decode(errors="ignore" if len(raw) == limit_bytes else "strict")
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else text


def encode_bytes(parts: list[str]) -> list[list[int]]:
    """Return UTF-8 bytes as tokens: there are 256 of them, and no tokenizer to train or share."""
    return [list(part.encode()) for part in parts]


def pieces(text: str, *, size: int = 1 << 14) -> Iterator[str]:
    """Cut text into pieces that a tokenizer can process in parallel."""
    return (text[start : start + size] for start in range(0, len(text), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Token windows of equal length, distributed to the ranks.

    tokens: int64 [windows, length].
    """

    tokens: torch.Tensor

    @staticmethod
    def cut(text: str, encode: Encoder, *, length: int) -> Windows:
        """Tokenise a text and cut it into windows.

        Raises: CorpusError if the text is shorter than one window.
        """
        ids = [i for piece in encode(list(pieces(text))) for i in piece]
        count = len(ids) // length
        if not count:
            raise CorpusError(
                f"the text has {len(ids)} tokens and one window needs {length}; "
                f"give more text with --data or a smaller --seq-len"
            )
        return Windows(tokens=torch.tensor(ids[: count * length]).view(count, length))

    def batch(self, step: int, *, size: int, rank: int, world_size: int, seed: int) -> torch.Tensor:
        """Return this rank's windows of a step, [size, length].

        The windows are distributed in a seeded order, a new one each epoch; within an epoch no window is used
        twice, on any rank or in any step.
        """
        count = len(self.tokens)
        first = (step * world_size + rank) * size
        places = range(first, first + size)
        orders = {epoch: self._order(epoch, seed) for epoch in {p // count for p in places}}
        return self.tokens[torch.stack([orders[p // count][p % count] for p in places])]

    def _order(self, epoch: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(len(self.tokens), generator=generator)
