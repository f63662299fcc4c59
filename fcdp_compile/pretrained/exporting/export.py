"""`save_pretrained`: write a sharded model as Transformers and PEFT write theirs, tensor by tensor.

what the files will hold (`contents`) ── whole values, one at a time ──▶ files aside ──▶ the folder
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]  # ships no type hints

from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.files.safetensors_writer import TensorFileWriter
from fcdp_compile.params.mesh import Topology, process_count, topology_of
from fcdp_compile.pretrained.exporting.adapter_contents import (
    adapter_contents,
    attached_adapter_contents,
)
from fcdp_compile.pretrained.exporting.contents import Contents, Leaves, Source, plain_contents
from fcdp_compile.pretrained.exporting.merged_contents import merged_contents
from fcdp_compile.pretrained.exporting.replace_files import Aside
from fcdp_compile.pretrained.exporting.shard_files import TensorFile
from fcdp_compile.pretrained.exporting.tape import Evaluation, metas_of
from fcdp_compile.pretrained.exporting.transformers_contents import transformers_contents
from fcdp_compile.pretrained.exporting.whole_values import WholeValues
from fcdp_compile.pretrained.huggingface import (
    base_of,
    has_attached_adapters,
    is_transformers_model,
)
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.sharding.shard import model_of, state_of
from fcdp_compile.sharding.sharded_class import STATE


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    merge: bool = False,
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> None:
    """Write what `from_pretrained` reads, with the files and names that Transformers and PEFT would write.

    A Transformers model gives its weights, configuration and generation configuration; a PEFT model its
    adapters; any other module a model.safetensors with the names of its state dict.  Every rank must call it;
    the rank at place 0 of node 0 writes, and has one whole parameter at a time in host memory; where
    Transformers takes it apart (experts) half of it besides, and to merge, the parameters of one layer and
    what PEFT computes of them.  Parameters are written in the dtype of their home shards.

    model: sharded, compiled or not; in a single process also one that is not sharded.
    folder: need not exist; other files in it stay, those of an earlier export are replaced.
    merge: of a PEFT model, write the base model with the active adapters merged into it.  The model itself
    stays as it is.
    tokenizer: or a processor; its save_pretrained is called, too.
    max_shard_bytes: weights that are larger are written to several files, with an index.
    progress: show a bar on the rank that writes.

    Raises: ArgumentError if folder and model are swapped.
    FcdpError on every rank, and the folder is as it was: where it cannot be written, where ranks ask
    for different exports, for values that have never been loaded, for adapters that cannot be merged, and
    for a whole Transformers model where an adapter is, which `from_pretrained` would add to it.
    ValueError for a max_shard_bytes that is not positive, and in several processes for a model that is not
    sharded.
    """
    if (
        isinstance(max_shard_bytes, bool)
        or not isinstance(max_shard_bytes, int)
        or max_shard_bytes < 1
    ):
        raise ArgumentError(
            f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}"
        )
    refuse_swapped(folder, model, "save_pretrained(model, folder)")
    path = Path(folder).absolute()
    root = model_of(model)
    # Of a model that is not sharded, several processes would all write one.
    state = state_of(root) if STATE in vars(root) or process_count() > 1 else None
    topology = topology_of(None) if state is None else state.topology
    if state is not None:
        same_act(state.collectives, "calls save_pretrained")
        state.unset.refuse("save_pretrained")

    def prepare() -> Contents:
        refuse_nameless(folder)
        return _contents_of(root, state, path, merge, max_shard_bytes)

    contents = _agreed(topology, prepare)
    values = WholeValues(topology)
    aside = Aside(path)
    meet = partial(_meet, topology, values)

    def begin() -> None:
        if merge or is_transformers_model(root):
            _refuse_beside_adapter(path, contents)
        aside.make()

    try:
        meet(begin)
        evaluation = Evaluation(contents.tape, lambda source: source.whole(values))
        size = sum(t.nbytes for file in contents.files for t in file.tensors.values())
        shown = progress and values.is_writer
        with tqdm(total=size, unit="B", unit_scale=True, desc="saving", disable=not shown) as bar:
            for file in contents.files:
                _write(file, aside.path, values, evaluation, bar.update)
                meet(None)
        meet(partial(_finish, contents, tokenizer, aside))
    except BaseException:
        if values.is_writer:
            aside.discard()
        raise


def _contents_of(
    root: nn.Module, state: ShardedModel | None, folder: Path, merge: bool, max_shard_bytes: int
) -> Contents:
    leaves = Leaves([] if state is None else list(state.records.values()))
    wrapped = base_of(root) is not root
    if merge:
        if not wrapped:
            raise FcdpError(
                f"merge=True merges adapters into their base, and {type(root).__name__} is no PEFT model; "
                "leave it out"
            )
        return merged_contents(root, leaves, max_shard_bytes)
    if wrapped:
        return adapter_contents(root, leaves, folder)
    if not is_transformers_model(root):
        return plain_contents(root, leaves.tape, leaves.of_state_dict(root), max_shard_bytes)
    if has_attached_adapters(root):
        return attached_adapter_contents(root, leaves)
    return transformers_contents(root, leaves.tape, leaves.of_state_dict(root), max_shard_bytes)


def _agreed(topology: Topology, prepare: Callable[[], Contents]) -> Contents:
    """Prepare on every rank, and make sure that all have prepared the same."""
    made: list[Contents] = []

    def act() -> str:
        made.append(prepare())
        return _digest(made[0])

    digests = together(topology.control, act)
    if other := next((rank for rank, d in enumerate(digests) if d != digests[0]), None):
        raise FcdpError(
            f"ranks 0 and {other} are about to export different tensors; call save_pretrained with the same "
            "model and arguments on every rank"
        )
    return made[0]


def _refuse_beside_adapter(folder: Path, contents: Contents) -> None:
    """Refuse a whole model where an adapter is: `from_pretrained` would put that on top of it."""
    is_adapter = any(file.name.startswith("adapter_") for file in contents.files)
    if not is_adapter and (folder / "adapter_config.json").exists():
        raise FcdpError(
            f"{folder} has an adapter (adapter_config.json), which from_pretrained would add to the model "
            "that is to be written there; choose another folder, or remove the adapter"
        )


def _digest(contents: Contents) -> str:
    text = "\n".join(
        f"{file.name} {name} {t.dtype} {tuple(t.shape)} {len(contents.tape.needs(t))}"
        for file in contents.files
        for name, t in file.tensors.items()
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _meet(topology: Topology, values: WholeValues, act: Callable[[], None] | None) -> None:
    """Let the writer do something; every rank hears whether anything has failed anywhere so far."""

    def check() -> None:
        if act is not None and values.is_writer:
            values.attempt(act)
        values.check()

    together(topology.control, check)


def _write(
    file: TensorFile,
    folder: Path,
    values: WholeValues,
    evaluation: Evaluation[Source],
    wrote: Callable[[int], object],
) -> None:
    """Write one file; what fails is remembered ([Note: no early way out])."""
    with ExitStack() as until_written:
        opened: list[TensorFileWriter] = []

        def begin() -> None:
            path = folder / file.name
            path.parent.mkdir(exist_ok=True)
            writer = TensorFileWriter(path, metas_of(file.tensors), {"format": "pt"})
            opened.append(until_written.enter_context(writer))

        def write(name: str, tensor: Tensor) -> None:
            opened[0].write(name, evaluation.value(tensor))
            wrote(tensor.nbytes)

        if values.is_writer:
            values.attempt(begin)
        for name, tensor in file.tensors.items():
            evaluation.fetch(tensor)
            if values.is_writer:
                values.attempt(partial(write, name, tensor))
        if values.error is None:
            values.attempt(until_written.pop_all().close)
        else:
            # An incomplete file is closed as one.
            until_written.pop_all().__exit__(type(values.error), values.error, None)


def _finish(contents: Contents, tokenizer: Any, aside: Aside) -> None:
    contents.describe(aside.path)
    if tokenizer is not None:
        tokenizer.save_pretrained(aside.path)
    aside.publish()
