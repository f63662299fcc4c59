"""The files of a checkpoint: one, or several with an index that says which file has which tensor."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.files.safetensors_file import Stored, parse_json, stored_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_SHOWN = 20
_MOST_INDEX_BYTES = 100_000_000
_SAMPLED_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint, or of one of its files, by name.

    digest: of the sizes and headers of its files, of a little of each tensor, and of the index.
    """

    path: Path
    tensors: dict[str, Stored]
    digest: str


def refuse(path: Path, problems: Iterable[str]) -> None:
    """Raise one CheckpointError if there are problems; it lists the first 20 and counts the others."""
    if found := list(dict.fromkeys(problems)):
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise CheckpointError(
            f"{path} cannot be loaded (the model is unchanged): " + "; ".join(found[:_SHOWN] + more)
        )


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint's files, and check that they agree with the index and are complete.

    path: a folder, a safetensors file, or an index.

    Raises: CheckpointError with the problems of all files (`refuse`); for pickles with the reason.
    """
    where = Path(path)
    try:
        index = _index_of(where)
        files = _indexed(index) if index else {_single_of(where): None}
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    headers, problems = _headers(files, f", which {index.name} names," if index else "")
    tensors: dict[str, Stored] = {}
    for header in headers:
        for name, stored in header.tensors.items():
            if (first := tensors.setdefault(name, stored)) is not stored:
                problems.append(
                    f"tensor {name!r} is in two files, {first.file.name} and {header.path.name}"
                )
        problems += _disagreements(header, files[header.path])
    refuse(where, problems)
    said = [f"{h.path.name} {h.digest}" for h in headers]
    if index:
        said.append(hashlib.sha256(index.read_bytes()).hexdigest())
    digest = hashlib.sha256("\n".join(said).encode()).hexdigest()
    return Checkpoint(path=where, tensors=tensors, digest=digest)


def _headers(files: Iterable[Path], why: str) -> tuple[list[Checkpoint], list[str]]:
    headers, problems = [], []
    for file in files:
        try:
            headers.append(read_header(file))
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{file}{why} cannot be read: {error.strerror or error}")
    return headers, problems


def _disagreements(header: Checkpoint, indexed: set[str] | None) -> list[str]:
    if indexed is None:
        return []
    file, names = header.path.name, header.tensors.keys()
    lacking = [f"{INDEX} says {n!r} is in {file}, which lacks it" for n in sorted(indexed - names)]
    more = [f"{file} has {n!r}, which {INDEX} does not list" for n in names if n not in indexed]
    return lacking + more


def _index_of(where: Path) -> Path | None:
    if where.suffix == ".json":
        return where
    if where.is_dir() and not (where / SINGLE).exists() and (where / INDEX).exists():
        return where / INDEX
    return None


def _hub(where: Path) -> str:
    """What to do about a path that may be a model's name on the Hugging Face Hub."""
    if where.is_absolute() or len(where.parts) != 2 or where.suffix == ".safetensors":
        return ""
    return f"; to load a model of the Hub, give huggingface_hub.snapshot_download({str(where)!r})"


def _single_of(where: Path) -> Path:
    if where.suffix in PICKLES and not where.is_dir():
        raise CheckpointError(_refusal(where))
    if not where.is_dir():
        if not where.exists():
            raise CheckpointError(
                f"{where} does not exist; expected a folder with {SINGLE} or {INDEX}{_hub(where)}"
            )
        return where
    if (where / SINGLE).exists():
        return where / SINGLE
    names = sorted(entry.name for entry in where.iterdir())
    pickles = [name for name in names if name.endswith((*PICKLES, ".bin.index.json"))]
    if pickles:
        raise CheckpointError(_refusal(where / pickles[0]))
    others = [name for name in names if name.endswith(".safetensors")]
    hint = f"; name one of its files to load that: {', '.join(others[:5])}" if others else ""
    raise CheckpointError(f"{where} has neither {SINGLE} nor {INDEX}{hint}")


def _refusal(file: Path) -> str:
    return (
        f"{file} is a pickle: reading it would run any code that it holds, and it cannot be read in parts; "
        "load it once with from_pretrained where you trust it and write it with "
        "save_pretrained(folder, safe_serialization=True)"
    )


def _indexed(index: Path) -> dict[Path, set[str] | None]:
    """Return the names of tensors by the file in which the index places them."""
    status = index.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_INDEX_BYTES:
        raise CheckpointError(
            f"{index} is not an index of a checkpoint: it is not a file, or too large"
        )
    told = parse_json(index, index.read_bytes())
    places = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise CheckpointError(
            f"{index} is damaged: it has no weight_map from names of tensors to names of files"
        )
    names: dict[str, set[str]] = {}
    for tensor, file in places.items():
        names.setdefault(file, set()).add(tensor)
    refuse(index, filter(None, map(_wrong_name, names)))
    return {index.parent / file: tensors for file, tensors in sorted(names.items())}


def _wrong_name(file: str) -> str:
    """Return why an index may not name this file; empty if it may."""
    if file.endswith(PICKLES):
        return _refusal(Path(file))
    parts = {*PurePosixPath(file).parts, *PureWindowsPath(file).parts}
    is_outside = file.startswith(("/", "\\")) or ":" in file or "\0" in file or ".." in parts
    if is_outside or not file.endswith(".safetensors"):
        return f"it names {file[:200]!r}, which is not a safetensors file within its folder"
    return ""


def read_header(path: Path) -> Checkpoint:
    """Read the header of a file; never more bytes than the file has.

    Raises: CheckpointError for anything but a whole safetensors file, OSError if it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a file")  # a pipe would wait for a writer
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        number = file.fileno()
        tensors, raw = stored_tensors(path, size, lambda a, b: os.pread(number, b - a, a))
        digest = hashlib.sha256(size.to_bytes(8, "little") + raw)
        for stored in tensors.values():
            digest.update(_sample(number, stored))
    return Checkpoint(path=path, tensors=tensors, digest=digest.hexdigest())


def _sample(file: int, stored: Stored) -> bytes:
    """Return a few bytes from the middle of a tensor: two versions of a checkpoint may have equal headers."""
    return os.pread(
        file, min(_SAMPLED_BYTES, stored.size_bytes), stored.start + stored.size_bytes // 2
    )
