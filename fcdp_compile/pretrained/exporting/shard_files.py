"""How tensors are divided over files, and the index that says which has which, as Transformers does it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorFile:
    """One file to be: its name in the folder, and its tensors, without values, in their order."""

    name: str
    tensors: Mapping[str, Tensor]


def split(
    stem: str, tensors: Mapping[str, Tensor], max_shard_bytes: int | None
) -> list[TensorFile]:
    """Files of at most so many bytes of tensors, in their order; a larger tensor gets one of its own.

    stem: "model" gives model.safetensors, or model-00001-of-00002.safetensors and so on.
    """
    shards: list[dict[str, Tensor]] = []
    current: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if max_shard_bytes is not None and tensor.nbytes > max_shard_bytes:
            shards.append({name: tensor})
            continue
        if max_shard_bytes is not None and size + tensor.nbytes > max_shard_bytes:
            shards.append(current)
            current, size = {}, 0
        current[name] = tensor
        size += tensor.nbytes
    if current or not shards:
        shards.append(current)
    if len(shards) == 1:
        return [TensorFile(name=f"{stem}.safetensors", tensors=shards[0])]
    return [
        TensorFile(name=f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors", tensors=shard)
        for i, shard in enumerate(shards, 1)
    ]


def write_index(folder: Path, stem: str, files: list[TensorFile], parameters: int) -> None:
    """Write the index of several files; parameters: how many elements the model's parameters have."""
    held = {name: file.name for file in files for name in file.tensors}
    size = sum(tensor.nbytes for file in files for tensor in file.tensors.values())
    index = {
        "metadata": {"total_parameters": parameters, "total_size": size},
        "weight_map": held,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
