"""Write the files of an export to a hidden folder first, and move them to their folder at the end.

If the folder exists, the hidden folder is in it.  The old weights are then removed before the new files are
moved, and the file that a reader opens first (a single file, or an index) is moved last.  If not, the hidden
folder is next to it and becomes the new folder in one rename.  A process that is killed in between
leaves a folder that readers refuse, and the new files aside; never old weights with a new configuration, or
shards of two exports.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_ENTRY = re.compile(r"(adapter_)?model\.safetensors(\.index\.json)?")
_SHARD = re.compile(r"(adapter_)?model-\d{5}-of-\d{5}\.safetensors")


class Aside:
    """A temporary, hidden folder for files of `folder`; used by one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        name = f".{folder.name}.fcdp-aside"
        self.path = folder / name if folder.is_dir() else folder.parent / name

    def make(self) -> None:
        """Make the temporary folder, empty even if a killed export left files in it.

        Raises: OSError if that fails.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(
                f"{self.folder} is a file, but the export writes a folder; choose another path"
            )
        self.discard()
        self.path.mkdir(parents=True)

    def discard(self) -> None:
        """Remove the temporary folder and its files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self) -> None:
        """Sync the files and move them to their folder."""
        folders = [*sorted(p for p in self.path.rglob("*") if p.is_dir()), self.path]
        for path in sorted(p for p in self.path.rglob("*") if p.is_file()):
            _sync(path)
        for path in folders:
            _sync(path)
        if self.path.parent != self.folder:
            self.path.rename(self.folder)
            _sync(self.folder.parent)
            return
        for path in folders:
            _move(
                [p for p in path.iterdir() if p.is_file()],
                self.folder / path.relative_to(self.path),
            )
        self.discard()


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(files: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    entries = [path for path in files if _ENTRY.fullmatch(path.name)]
    # Weights of a model replace only a model's, weights of an adapter only an adapter's.
    kinds = {path.name.startswith("adapter_") for path in entries}
    before = [p for p in folder.iterdir() if p.name.startswith("adapter_") in kinds]
    for pattern in (_ENTRY, _SHARD):
        for path in before:
            if pattern.fullmatch(path.name):
                path.unlink()
        _sync(folder)
    for path in sorted(files, key=lambda p: p in entries):
        if path in entries:
            _sync(folder)
        path.rename(folder / path.name)
    _sync(folder)
