"""`save_pretrained`: writes a sharded model as Transformers and PEFT write a whole one.

    home shards ── one whole tensor after the other ──▶ a twin of the model on the writer's host
    the twin    ── the library's own save_pretrained ──▶ files aside ──▶ the folder

A state dict alone is not enough: the libraries' methods also read the model's own parameters, to find ties,
compute prompts and merge adapters.

`model.save_pretrained(folder)`, as Transformers and PEFT have it, would take home shards for whole values, on
one rank alone:

    no home shard in it (one process, or within `gathered`)  -> the library's own method
    Transformers' and PEFT's                                 -> fcdp_compile.save_pretrained
    any other library's                                      -> refused

[Note: files aside] The files are first written to a hidden folder.  If the folder exists, the hidden
folder is in it.  The old weights are then removed before the new files are moved, and the file that a
reader opens first (a single file, or an index) is moved last.  If not, the hidden folder is next to it and
becomes the new folder in one rename.  A process that is killed in between leaves a folder that readers
refuse, and the new files aside; never old weights with a new configuration, or shards of two exports.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]  # ships no type hints

from fcdp_compile.cluster.free_memory import available_bytes, cgroup_bytes
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.params.mesh import Topology, everyone_ranks, process_count, topology_of
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.core.sharding.sharded_class import STATE
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.models.files.aside import sync
from fcdp_compile.models.pretrained.exporting.copies import ModelTensors, WholeValues
from fcdp_compile.models.pretrained.exporting.kinds import Saver, kind_of
from fcdp_compile.models.pretrained.huggingface import is_library_save, is_transformers_model
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.model import ShardedModel


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    merge: bool = False,
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> None:
    """Write files for `from_pretrained`, by the `save_pretrained` of Transformers and PEFT.

    For a Transformers model: weights, configuration and generation configuration; for a PEFT model: its
    adapters; for any other module: a model.safetensors with the names of its state dict.  Every rank must
    call it.  The first rank of node 0 writes, in the dtype of the home shards.  It needs host memory for
    all that is written: the whole model (more if Transformers takes experts apart), or the adapters.  The
    other ranks wait until it has written, at most for the timeout of `make_mesh`.

    model: sharded, compiled or not; in a single process also one that is not sharded.
    folder: need not exist; other files in it stay, files of an earlier export are replaced.
    merge: for a PEFT model, write the base model with the active adapters merged into it; the model stays as
    it is.  A quantised base is dequantised for it.
    tokenizer: or a processor; its save_pretrained is called, too.
    max_shard_bytes: larger weights are written to several files, with an index.
    progress: show a bar on the rank that writes, while tensors are gathered.

    Raises: ArgumentError if folder and model are swapped.
    FcdpError on every rank, with the folder unchanged: if the folder cannot be written, ranks ask
    for different exports, values were never loaded, adapters cannot be merged, or a whole Transformers
    model would be written beside an adapter, which `from_pretrained` would add to it.
    ValueError for a max_shard_bytes that is not positive, and in several processes for a model that is not
    sharded.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ArgumentError(
            f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}"
        )
    refuse_swapped(folder, model, "save_pretrained(model, folder)")
    root = model_of(model)
    # Several processes would all write a model that is not sharded, so that case raises.
    state = state_of(root) if STATE in vars(root) or process_count() > 1 else None
    export(
        root,
        state,
        folder,
        merge=merge,
        tokenizer=tokenizer,
        max_shard_size=max_shard_bytes,
        progress=progress,
    )


def export(
    root: nn.Module,
    state: ShardedModel | None,
    folder: str | os.PathLike[str],
    *,
    merge: bool,
    tokenizer: Any,
    max_shard_size: int | str,
    progress: bool,
) -> None:
    """Do the work of `save_pretrained`.

    max_shard_size: in bytes; for a Transformers model also a text that the model's own method takes.
    """
    path = Path(folder).absolute()
    topology = topology_of(None) if state is None else state.topology
    if state is not None:
        same_act(state.collectives, "calls save_pretrained")
        state.unset.refuse("save_pretrained")
    prepared: list[tuple[Saver, ModelTensors, list[str]]] = []

    def prepare() -> str:
        refuse_nameless(folder)
        kind = kind_of(root, path, merge=merge, max_shard_size=max_shard_size)
        copies = ModelTensors(root, state)
        names = copies.names(of_adapters=kind.adapters is not None)
        prepared.append((kind, copies, names))
        text = f"{kind.name} {max_shard_size}\n{copies.describe(names)}"
        return hashlib.sha256(text.encode()).hexdigest()

    if other := first_other(together(topology.everyone, prepare)):
        raise FcdpError(
            f"ranks 0 and {other} are about to export different tensors; call save_pretrained with the same "
            "model and arguments on every rank"
        )
    (kind, copies, names), values, aside = prepared[0], WholeValues(topology), Aside(path)

    def begin() -> None:
        if kind.adapters is None and (merge or is_transformers_model(root)):
            _refuse_beside_adapter(path)
        _refuse_without_room(copies.size_bytes(names) + kind.more_bytes)
        aside.make()

    def finish(twin: nn.Module) -> None:
        kind.write(twin, aside.path)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside.path)
        aside.publish()

    try:
        _by_writer(topology, values, begin)
        twins = _whole_twin(kind, copies, names, topology, values, shown=progress and values.keeps)
        _by_writer(topology, values, lambda: finish(*twins))
    except BaseException:
        if values.keeps:
            aside.discard()
        raise


def _refuse_beside_adapter(folder: Path) -> None:
    """Refuse a whole model beside an adapter: `from_pretrained` would add the adapter to it."""
    if (folder / "adapter_config.json").exists():
        raise FcdpError(
            f"{folder} has an adapter (adapter_config.json), which from_pretrained would add to the model "
            "that save_pretrained is about to write; choose another folder, or remove the adapter"
        )


def _refuse_without_room(size_bytes: int) -> None:
    """Refuse an export that does not fit into host memory, as the system would kill the process."""
    known = [free for free in (available_bytes(), cgroup_bytes()) if free is not None]
    if known and size_bytes > min(known):
        raise FcdpError(
            f"this export needs {size_bytes} bytes of host memory on the rank that writes, and {min(known)} "
            "are free; lower options={'host_memory': …}, or write a checkpoint with fcdp_compile.save"
        )


def _by_writer(topology: Topology, values: WholeValues, act: Callable[[], None]) -> None:
    """Run `act` on the writer; raise on every rank if any rank has failed so far."""

    def check() -> None:
        if values.keeps:
            values.attempt(act)
        values.check()

    together(topology.everyone, check)


def _whole_twin(
    kind: Saver,
    copies: ModelTensors,
    wanted: list[str],
    topology: Topology,
    values: WholeValues,
    *,
    shown: bool,
) -> list[nn.Module]:
    """Return, on the writer, a twin of the model with values for everything that is written.

    wanted: the names of the tensors that are certainly written.  shown: whether to show a bar.
    """
    twins: list[nn.Module] = []

    def ask() -> list[str]:
        values.check()
        if not values.keeps:
            return []
        twins[:] = [copies.twin()]
        return [] if kind.adapters is None else copies.lacking(kind.adapters(twins[0]))

    with tqdm(unit="B", unit_scale=True, desc="gathering", disable=not shown) as bar:
        while True:
            bar.total = bar.n + copies.size_bytes(wanted)
            for name in wanted:
                copies.fetch(name, values)
                bar.update(copies.size_bytes([name]))
            wanted = together(topology.everyone, ask)[everyone_ranks(topology)[0, 0, 0]]
            if not wanted:
                return twins


def save_own(
    module: nn.Module,
    state: ShardedModel,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Do as `module.save_pretrained(*args, **kwargs)`; all ranks must call it.

    method: the library's own, as a function.

    Raises: FcdpError, before any communication, for a method that is not Transformers' or PEFT's and for
    arguments other than the folder, max_shard_size and is_main_process; else the errors of
    fcdp_compile.save_pretrained.
    """
    if not any(isinstance(p, HomeShard) for p in module.parameters()):
        state.unset.refuse("save_pretrained")
        return method(module, *args, **kwargs)
    if not is_library_save(method):
        raise FcdpError(
            f"{type(module).__name__} has a save_pretrained of its own, which needs whole values; call it "
            "within a block of fcdp_compile.gathered(model), or fcdp_compile.save_pretrained(model, folder) "
            "in its place"
        )
    folder, size = _understood(inspect.signature(method).bind(module, *args, **kwargs))
    export(module, state, folder, merge=False, tokenizer=None, max_shard_size=size, progress=False)


def _understood(bound: inspect.BoundArguments) -> tuple[Any, int | str]:
    """Return the folder and max_shard_size."""
    parameters = bound.signature.parameters
    _, (_, folder), *more = bound.arguments.items()
    given: dict[str, Any] = {}
    for name, value in more:
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= {n: v for n, v in value.items() if v is not None}
        elif value is not parameters[name].default and value != parameters[name].default:
            given[name] = value
    given.pop("is_main_process", None)  # fcdp knows which rank writes
    size = given.pop("max_shard_size", 5 * 10**9)
    if given.get("safe_serialization") is True:
        del given["safe_serialization"]
    if given:
        raise FcdpError(
            f"save_pretrained of a sharded model takes a folder, max_shard_size and is_main_process, not "
            f"{' or '.join(given)}; leave that out, or see fcdp_compile.save_pretrained(model, folder)"
        )
    return folder, size


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
            sync(path)
        for path in folders:
            sync(path)
        if self.path.parent != self.folder:
            self.path.rename(self.folder)
            sync(self.folder.parent)
            return
        for path in folders:
            _move(
                [p for p in path.iterdir() if p.is_file()],
                self.folder / path.relative_to(self.path),
            )
        self.discard()


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
        sync(folder)
    for path in sorted(files, key=lambda p: p in entries):
        if path in entries:
            sync(folder)
        path.rename(folder / path.name)
    sync(folder)
