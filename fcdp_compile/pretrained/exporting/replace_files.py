"""Files of an export appear in their folder all at once or not at all, as far as file systems can do that.

[Note: exchange] They are written aside, on the same file system, and given to the disk.  A folder that was
not there before is then one rename.  In one that was, the last rename or removal is what makes readers take
the new tensors: of the index, of a single file, or the removal of a single file that an index replaces.  An
old index is made to name its shards by other names first, so that it has them until then.

    model-1.safetensors ◀─ index     model-1 (new)   .old-model-1 ◀─ index     model-1 (new) ◀─ index (new)

A description that changes (config.json) cannot change together with the tensors.  Then the old tensors go
first: whoever stops the process at that moment leaves a folder that is refused, and never old tensors with
a new description.  So does an old index whose shards cannot be kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

INDEX = ".index.json"
_ENTRY = re.compile(r"(adapter_)?model\.safetensors(\.index\.json)?")
_SHARD = re.compile(r"(adapter_)?model-\d{5}-of-\d{5}\.safetensors")
_DESCRIPTIONS = ("config.json", "adapter_config.json")
_OLD = ".old-"


class Aside:
    """A folder beside the one that its files are for; used by one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        name = f".{folder.name}.fcdp-aside"
        self.path = folder / name if folder.is_dir() else folder.parent / name

    def make(self) -> None:
        """Make it, empty, whatever an export that was killed left in it.

        Raises: OSError where that cannot be done.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(
                f"{self.folder} is a file, and a folder is to be written there"
            )
        self.discard()
        self.path.mkdir(parents=True)

    def discard(self) -> None:
        """Remove it and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self) -> None:
        """Give its files to the disk and to their folder ([Note: exchange])."""
        folders = sorted(p for p in self.path.rglob("*") if p.is_dir())
        for path in sorted(p for p in self.path.rglob("*") if p.is_file()):
            sync(path)
        for path in [*folders, self.path]:
            sync(path)
        if self.path.parent != self.folder:
            self.path.rename(self.folder)
            sync(self.folder.parent)
            return
        for path in [*folders, self.path]:
            target = self.folder / path.relative_to(self.path)
            target.mkdir(exist_ok=True)
            _exchange([p for p in path.iterdir() if p.is_file()], target)
        self.discard()


def sync(path: Path) -> None:
    """Give a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(files: Iterable[Path], folder: Path) -> None:
    new = {path.name: path for path in files}
    entries = [name for name in new if _ENTRY.fullmatch(name)]
    shards = [name for name in new if _SHARD.fullmatch(name)]
    others = [name for name in new if name not in entries and name not in shards]
    before = {p.name for p in folder.iterdir() if p.is_file()} if entries else set()
    old_entries = [name for name in before if _ENTRY.fullmatch(name) and _of_one(name, entries)]
    changed = [n for n in others if n in before and n in _DESCRIPTIONS]
    if any(new[n].read_bytes() != (folder / n).read_bytes() for n in changed):
        for name in old_entries:
            (folder / name).unlink()
        sync(folder)
        old_entries = []
    for name in [n for n in old_entries if n.endswith(INDEX) and shards]:
        try:
            _keep_shards(folder / name)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            # It is no index, a shard is missing, or the disk has no links: then without it meanwhile.
            (folder / name).unlink()
            sync(folder)
            old_entries.remove(name)
    for name in [*others, *shards, *entries]:
        if name in entries:
            sync(folder)
        new[name].rename(folder / name)
    sync(folder)
    # First what readers take before an index, which is what makes them take the new one.
    for name in sorted(old_entries):
        if name not in entries:
            (folder / name).unlink()
            sync(folder)
    stale = [
        p
        for p in folder.iterdir()
        if _SHARD.fullmatch(p.name.removeprefix(_OLD))
        and _of_one(p.name.removeprefix(_OLD), entries)
    ]
    for path in stale:
        if path.name not in shards:
            path.unlink()


def _of_one(name: str, entries: list[str]) -> bool:
    """Whether a file belongs to the tensors that some entry begins: the model's, or the adapter's."""
    return any(name.startswith("adapter_") == entry.startswith("adapter_") for entry in entries)


def _keep_shards(index: Path) -> None:
    """Let an index name its shards by names that nobody else uses."""
    read = json.loads(index.read_text(encoding="utf-8"))
    folder = index.parent
    for shard in sorted(set(read["weight_map"].values())):
        if _SHARD.fullmatch(shard):
            (folder / (_OLD + shard)).unlink(missing_ok=True)
            os.link(folder / shard, folder / (_OLD + shard))
    read["weight_map"] = {
        name: _OLD + shard if _SHARD.fullmatch(shard) else shard
        for name, shard in read["weight_map"].items()
    }
    aside = index.with_name(f".{index.name}.fcdp-aside")
    aside.write_text(json.dumps(read, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(aside)
    aside.rename(index)
    sync(folder)
