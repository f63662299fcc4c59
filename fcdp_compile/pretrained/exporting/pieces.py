"""Which tensors of a model each tensor of an export is made of, and buckets of them.

    stacked experts [E, F, d] ─▶ E tensors [F, d]          one piece: they have a common source
    a weight, lora_A, lora_B  ─▶ the merged weight         one piece
    any other weight          ─▶ itself, perhaps renamed   one piece

A library makes the tensors of a twin on meta, and the operations that it calls are recorded.  So the bucket's
pieces can be made later from their sources alone, with all other tensors on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fcdp_compile.pretrained.exporting.copies import ModelTensors
from fcdp_compile.torch_compat import DispatchMode, OpOverload, storage_id, tree_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Tensors of an export that can be made together, without any other tensor of the model.

    sources: names of the model's tensors that they are made of.  names: their own.  size_bytes: of them all.
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]
    size_bytes: int


def in_buckets(
    copies: ModelTensors, read: Callable[[nn.Module], dict[str, Tensor]], bucket_bytes: int
) -> list[Pieces]:
    """Return the tensors of an export in buckets, in the export's order.

    read: returns the export's tensors of a twin.  bucket_bytes: a bucket is larger only if it is one piece.
    """
    twin = copies.twin()
    with _Sources(copies.names_on_meta()) as sources:
        tensors = read(twin)
    order = {name: i for i, name in enumerate(copies.names(of_adapters=False))}
    buckets: list[list[_Piece]] = []
    size = 0
    for piece in _pieces({name: sources.of(tensor) for name, tensor in tensors.items()}):
        more = sum(tensors[name].nbytes for name in piece.names)
        if not buckets or size + more > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        size += more
    return [
        Pieces(
            sources=tuple(sorted({n for p in bucket for n in p.sources}, key=order.__getitem__)),
            names=tuple(n for p in bucket for n in p.names),
            size_bytes=sum(tensors[n].nbytes for p in bucket for n in p.names),
        )
        for bucket in buckets
    ]


@dataclass(slots=True, eq=False)
class _Piece:
    sources: set[str]
    names: list[str]


def _pieces(sources: Mapping[str, Iterable[str]]) -> list[_Piece]:
    """Put names with a common source together, in the order of the first name of each piece.

    sources: by name.
    """
    found: dict[_Piece, None] = {}
    of: dict[str, _Piece] = {}
    for name, own in sources.items():
        known = list(dict.fromkeys(of[source] for source in sorted(own) if source in of))
        piece, *others = known or [_Piece(set(), [])]
        for other in others:
            piece.sources |= other.sources
            piece.names += other.names
            del found[other]
        piece.sources.update(own)
        piece.names.append(name)
        found[piece] = None
        of |= dict.fromkeys(piece.sources, piece)
    return list(found)


class _Sources(DispatchMode):
    """Records, for every tensor that an operation returns or changes, the named tensors it is made of.

    names: of the tensors that exist already, by `storage_id`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._of = {storage: frozenset([name]) for storage, name in names.items()}
        # Without it, a later storage could get the number of one that is gone.
        self._kept: list[Any] = []

    def of(self, tensor: Tensor) -> frozenset[str]:
        """The names of the tensors that a tensor is made of."""
        return self._of.get(storage_id(tensor), frozenset())

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        found = frozenset().union(*(self.of(tensor) for tensor in given))
        changed = given if func._schema.is_mutable else []
        self._of |= {storage_id(tensor): found for tensor in (*made, *changed)}
        self._kept.append(made)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
