"""Plan what one rank loads: compare the checkpoint with the job and find the reads; nothing is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.checkpointing.comparing import Comparison, WantedRows, restores
from fcdp_compile.checkpointing.contents import JobObjects, parameter_name
from fcdp_compile.checkpointing.format.blocks import DataFiles, FileBlock
from fcdp_compile.checkpointing.format.boxes import Slab, slabs
from fcdp_compile.checkpointing.format.record import TORCH_DTYPES, CheckpointRecord, read_record
from fcdp_compile.checkpointing.format.tree import decode
from fcdp_compile.files.safetensors_header import Stored
from fcdp_compile.runtime.model import ShardedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRead:
    """A slab of a part in a file, and the name of its tensor."""

    name: str
    file: int
    stored: Stored
    slab: Slab

    @property
    def start(self) -> int:
        """The slab's first byte in the file."""
        return self.stored.start + self.slab.first * self.stored.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the slab."""
        return torch.Size(self.slab.shape).numel() * self.stored.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The reads of one rank, and the objects that receive them.

    values: the decoded values, by name.  differing: the names of values that differed between ranks and that
    this rank takes from rank 0.  targets: the cut tensors.  restores: the objects of `extra` that take a
    state, each with its state.  reads: rows of the targets, in the order of the files.  blocks: the blocks
    that contain these rows; they are verified first.
    """

    folder: Path
    root: nn.Module
    state: ShardedModel
    job: JobObjects
    record: CheckpointRecord
    files: DataFiles
    comparison: Comparison
    values: dict[str, Any]
    differing: list[str]
    targets: list[WantedRows]
    restores: list[tuple[Any, Any]]
    reads: list[SlabRead]
    blocks: list[FileBlock]

    @property
    def digest(self) -> str:
        """Equal on ranks that are about to load the same checkpoint into the same kinds of objects."""
        job = self.job
        given = [v is not None for v in (job.optimizer, job.scheduler, job.scaler)]
        return hashlib.sha256(f"load {self.record.checksum} {given}".encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes that are read, first to verify blocks and then to load."""
        verified = sum(self.files.size_of(block) for block in self.blocks)
        return verified + sum(read.size_bytes for read in self.reads)

    @property
    def written_keys(self) -> list[str]:
        """The keys of the parameters whose values are in the checkpoint."""
        names = {target.name for target in self.targets}
        records = self.state.records.items()
        return [key for key, r in records if parameter_name(r.spec.name) in names]


def look(folder: Path, root: nn.Module, state: ShardedModel, job: JobObjects) -> LoadPlan:
    """Compare the checkpoint in a folder with a job.

    Raises: CheckpointError, naming the folder or the file and what is wrong.
    """
    record = read_record(folder)
    files = DataFiles(folder, record)
    comparison = Comparison(folder, record, root, state, job)
    rank, differing = state.topology.number, []
    if not comparison.is_same_layout:
        rank, differing = 0, [v.name for v in record.values if v.rank == 0]
    saved = {v.name: v for v in record.values if v.rank in (None, rank)}
    comparison.check_names(saved)
    values = {
        name: decode(value.tree, _reader(files, value.rank or 0), name)
        for name, value in saved.items()
        if _is_wanted(name, job)
    }
    targets = comparison.targets(values, differing)
    reads = [read for target in targets for read in _reads_of(target, files)]
    reads.sort(key=lambda read: (read.file, read.start))
    runs = [(read.file, read.start, read.start + read.size_bytes) for read in reads]
    return LoadPlan(
        folder=folder,
        root=root,
        state=state,
        job=job,
        record=record,
        files=files,
        comparison=comparison,
        values=values,
        differing=differing,
        targets=targets,
        restores=list(restores(job.extra, values["extra"], "extra")),
        reads=reads,
        blocks=files.blocks(runs),
    )


def _is_wanted(name: str, job: JobObjects) -> bool:
    owner, _, _ = name.partition(".")
    return owner not in ("optimizer", "scheduler", "scaler") or getattr(job, owner) is not None


def _reader(files: DataFiles, file: int) -> Any:
    def read(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return files.read(file, files.find(file, name, dtype, shape))

    return read


def _reads_of(target: WantedRows, files: DataFiles) -> Iterator[SlabRead]:
    dtype = TORCH_DTYPES[target.dtype]
    for file, shape, held in (part for tensor in target.tensors for part in tensor.held):
        if found := slabs(shape, held, target.boxes, dtype.itemsize):
            stored = files.find(file, target.name, dtype, shape)
            yield from (
                SlabRead(name=target.name, file=file, stored=stored, slab=slab) for slab in found
            )
