"""`load_pretrained(model, folder)`: the weights of a Hugging Face checkpoint, straight into home shards.

    headers ─ checked ─ matched ─▶ sources ─ every rank its own rows ─▶ home shards

Nothing is written before every rank has checked the files, and found the same files as the others.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]  # ships no type hints

from fcdp_compile.core.ranks.differences import first_other
from fcdp_compile.core.ranks.messages import together
from fcdp_compile.core.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import CheckpointError, FcdpError
from fcdp_compile.models.pretrained.destination import Destinations, Part, QuantisedPart
from fcdp_compile.models.pretrained.folder import open_checkpoint, refuse
from fcdp_compile.models.pretrained.match import Held, Match
from fcdp_compile.models.pretrained.source import Files, Source, is_local
from fcdp_compile.runtime.model import ShardedModel

log = logging.getLogger(__name__)

_COMPARED_BYTES = 2**24


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    head: bool = True,
    progress: bool = False,
) -> None:
    """Load a Hugging Face checkpoint into a sharded model; each rank reads the rows of its home shards.

    All ranks call it, each with a path to the same files.  Names, conversions, casts to the parameters'
    dtypes, tied weights and the tensors that may be missing are as with `from_pretrained`, except that
    nothing is initialised silently.  In a model that PEFT has wrapped, the base gets the values; adapters
    stay as they are, or without values if the model was built on meta.  If the checkpoint has a tied weight
    under several names, they must have equal values.  Values that PEFT computes from the base's weights
    (DoRA's magnitudes, PiSSA's factors) are not computed again: add such adapters after loading.
    Weights of layers that bitsandbytes quantises are quantised while they are read, or read as they are if
    the checkpoint has them quantised in the same way.

    folder: a folder with model.safetensors, or with model.safetensors.index.json and its files; or one
    safetensors file, or an index.  head: whether the checkpoint has this model's head; with False, tensors
    outside of the base model (`base_model_prefix`) may be missing and then stay as they are, and another head
    is ignored.
    progress: show a bar on rank 0.

    Raises: ArgumentError if folder and model are swapped.
    ValueError if the model is not sharded; CheckpointError on every rank, with the model unchanged,
    for a checkpoint that is damaged, lacks tensors, has extra tensors or other shapes, is a pickle, or
    is not the same for all ranks; FcdpError if reading fails midway, which leaves the model half loaded.
    """
    refuse_swapped(folder, model, "load_pretrained(model, folder)")
    root, state = model_of(model), state_of(model)
    path = Path(folder)
    destinations = Destinations(root, state)
    matched, is_on_disk = _found(root, state, folder, destinations, head=head)
    order = matched.assigned
    is_first = state.topology.number == 0
    with Files() as files:
        _fill(path, state, order, destinations, files, shows=progress and is_first)
    destinations.arrived(order)
    for weight, recipe in matched.recipes.items():
        weight.recipe = recipe
    if is_on_disk:
        # The first gather of frozen parameters then reads other nodes' rows from this node's own disk.
        rows = destinations.rows(order)
        state.transport.row_sources.offer(rows.keys, rows)
    matched.renaming.note_used()
    if matched.kept_copies and is_first:
        log.warning(
            "%s keeps its values: PEFT trains this copy (modules_to_save) instead of the tensor in %s "
            "(%d tensors in all); to start with the checkpoint's values, build on meta, or add "
            "adapters to a model that has its weights",
            matched.kept_copies[0],
            path,
            len(matched.kept_copies),
        )
    log.info("%s: %d tensors, this rank read %d bytes", path, len(order), files.read_bytes)


def _found(
    root: nn.Module,
    state: ShardedModel,
    folder: str | os.PathLike[str],
    destinations: Destinations,
    *,
    head: bool,
) -> tuple[Match, bool]:
    """Match the checkpoint with the model; also return whether each rank has it on a disk of its own node."""
    path = Path(folder)
    found: list[Match] = []

    def check() -> tuple[str, bool]:
        refuse_nameless(folder)
        if state.whole:
            refuse(
                path, ["its parameters are whole: leave the block of fcdp_compile.gathered first"]
            )
        checkpoint = open_checkpoint(path)
        matched = Match(root, checkpoint.tensors, destinations.is_unset)
        refuse(path, matched.messages(head=head))
        found.append(matched)
        files = {stored.file for stored in checkpoint.tensors.values()}
        return checkpoint.digest, all(map(is_local, files))

    verdicts = together(state.topology.everyone, check, CheckpointError)
    if other := first_other([digest for digest, _ in verdicts]):
        raise CheckpointError(
            f"{path} is not the same for all ranks: rank {other} finds other files than rank 0; copy the "
            "checkpoint to every node again"
        )
    return found[0], all(is_on_disk for _, is_on_disk in verdicts)


def _check_tied(
    path: Path, order: Sequence[Held], destinations: Destinations, files: Files
) -> None:
    """Refuse a checkpoint that has different values for one parameter."""
    problems = []
    for held in order:
        first, *others = held.sources
        for other in others:
            part = destinations.part(held)
            if not isinstance(part, Part):
                problems.append(
                    f"{held.name!r} is quantised, and two tensors are its values here; remove one"
                )
            elif not _are_equal(first, other, part, files):
                names = [s.leaves[0].name for s in (first, other)]
                problems.append(
                    f"{names[0]!r} and {names[1]!r} are one parameter of the model and differ here; "
                    "untie them (tie_word_embeddings=False in the config) before fcdp_compile.shard"
                )
    refuse(path, problems)


def _are_equal(one: Source, other: Source, part: Part, files: Files) -> bool:
    """Whether two sources hold the same bits for a part, compared some rows at a time."""
    for box in part.boxes:
        rows, *others = box.shape or (1,)
        row_bytes = part.values.itemsize * math.prod(others)
        step = max(1, _COMPARED_BYTES // max(1, row_bytes))
        for begin in range(0, rows, step):
            shape = (min(step, rows - begin), *others)[: len(box.shape)]
            at = (box.at[0] + begin, *box.at[1:]) if box.at else ()
            ours, theirs = (
                torch.empty(shape, dtype=part.values.dtype, device="cpu") for _ in range(2)
            )
            one.fill(ours, at, files)
            other.fill(theirs, at, files)
            if not torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)):
                return False
    return True


def _fill(
    path: Path,
    state: ShardedModel,
    order: Sequence[Held],
    destinations: Destinations,
    files: Files,
    *,
    shows: bool,
) -> None:
    everyone = state.topology.everyone
    together(everyone, lambda: _check_tied(path, order, destinations, files), CheckpointError)
    try:
        together(everyone, lambda: _read(order, destinations, files, shows=shows))
        failed = _finish(map(destinations.part, order))
        together(everyone, lambda: _raise_first(failed))
    except FcdpError as error:
        state.validity.values_changed()
        raise FcdpError(
            f"{path} was read only in part, so the model is half loaded: {error}"
        ) from error


@torch.no_grad()
def _finish(parts: Iterable[Part | QuantisedPart]) -> list[Exception]:
    """Compute what depends on all ranks' blocks; a rank that fails gathers on with the others."""
    failed: list[Exception] = []
    for part in parts:
        if isinstance(part, Part):
            continue
        whole = part.gather()
        try:
            part.finish(whole)
        except Exception as error:
            # The other ranks must learn of any exception.
            failed.append(error)
    return failed


def _raise_first(failed: Sequence[Exception]) -> None:
    if failed:
        raise failed[0]


def _read(order: Sequence[Held], destinations: Destinations, files: Files, *, shows: bool) -> None:
    parts = [destinations.part(held) for held in order]
    total = sum(part.nbytes for part in parts)
    bar = tqdm(total=total, desc="load_pretrained", unit="B", unit_scale=True, disable=not shows)
    with torch.no_grad(), bar:
        for held, part in zip(order, parts, strict=True):
            part.fill(held.sources[0], files)
            bar.update(part.nbytes)
