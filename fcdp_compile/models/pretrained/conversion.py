"""Transformers' conversions of checkpoints, done to sources instead of tensors.

    experts.0.w1, experts.1.w1 … ─ MergeModulelist ─▶ stacked ┐
    experts.0.w3, experts.1.w3 … ─ MergeModulelist ─▶ stacked ┴ Concatenate ─▶ experts.gate_up_proj

The names of an operation's results come from the operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.pretrained.source import (
    Source,
    joined,
    rearranged,
    rows_of,
    stacked,
    transposed,
)

_OPERATIONS_OF = "transformers.core_model_loading"

Collected = dict[str, "list[Source] | Source"]
"""Sources by pattern: all tensors that the pattern matched, or the one source that was made from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The result of a converter: its first name, the model, and the shapes of the model's tensors by name."""

    name: str
    base: nn.Module
    shape_of: Callable[[str], tuple[int, ...] | None]


def converted(
    converter: Any, collected: dict[str, list[Source]], target: Target
) -> dict[str, Source]:
    """Return the results of a WeightConverter for its patterns' sources, by the model's names.

    Raises: CheckpointError for an operation that is not known here, or tensors that do not fit together.
    """
    absent = [pattern for pattern in converter.source_patterns if pattern not in collected]
    if absent:
        raise CheckpointError(
            f"{target.name!r} is made of several tensors, but its parts {absent[0]!r} are missing"
        )
    now: Collected = dict(collected)
    for operation in converter.operations:
        now = _apply(operation, now, converter, target)
    found = {}
    for name, source in _named(now, target.name).items():
        one = source[0] if isinstance(source, list) and len(source) == 1 else source
        if isinstance(one, list):
            raise CheckpointError(f"{len(one)} tensors are all {name!r}")
        found[name] = one
    return found


def _apply(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    kind = type(operation)
    act = _KNOWN.get(kind.__name__) if kind.__module__ == _OPERATIONS_OF else None
    if act is None:
        raise CheckpointError(
            f"{target.name!r} is made by transformers' operation {kind.__name__!r}, which cannot be done in "
            "parts; load with from_pretrained before fcdp_compile.shard"
        )
    try:
        return act(operation, now, converter, target)
    except (ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{target.name!r} cannot be made by {kind.__name__}: {error}"
        ) from error


def _named(now: Collected, name: str) -> Collected:
    """Return the results by full names: the text around the first one in the target's name surrounds each."""
    full = name.replace("*.", "0.")
    for key in now:
        if key in full:
            before, _, after = full.partition(key)
            return {before + k + after: source for k, source in now.items()}
    return now


def _merge(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    made: Collected = {}
    for pattern, parts in now.items():
        name = operation.get_target_pattern(len(now), pattern, converter.target_patterns)
        if not isinstance(parts, list):
            made[name] = parts
            continue
        if len({part.shape for part in parts}) > 1:
            raise CheckpointError(
                f"{target.name!r} would be made by stacking tensors, but their shapes differ"
            )
        made[name] = stacked(parts, _dim(operation.dim, len(parts[0].shape) + 1))
    return made


def _concatenate(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    parts: list[Source] = []
    for pattern in converter.source_patterns:
        some = now[pattern]
        parts += some if isinstance(some, list) else [some]
    dim = _dim(operation.dim, len(parts[0].shape))
    around = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(around) > 1 or len({len(part.shape) for part in parts}) > 1:
        raise CheckpointError(
            f"{target.name!r} would be made by joining tensors along dimension {dim}, but their other "
            "dimensions differ"
        )
    return {operation.get_target_pattern(converter.target_patterns): joined(parts, dim)}


def _chunk(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    whole = _only(now)
    names = operation.get_target_patterns(
        converter.target_patterns, config=getattr(target.base, "config", None)
    )
    dim = _dim(operation.dim, len(whole.shape))
    rows = -(-whole.shape[dim] // len(names))  # as torch.chunk cuts
    sizes = [max(0, min(rows, whole.shape[dim] - i * rows)) for i in range(len(names))]
    return _parts(whole, dim, names, sizes)


def _split(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    whole = _only(now)
    names = converter.target_patterns
    dim = _dim(operation.dim, len(whole.shape))
    sizes = []
    for name in names:
        shape = target.shape_of(target.name.replace(names[0], name))
        if shape is None or len(shape) <= dim:
            raise CheckpointError(f"{target.name!r} is cut into parts that the model lacks")
        sizes.append(shape[dim])
    if sum(sizes) != whole.shape[dim]:
        raise CheckpointError(
            f"{target.name!r} is cut into {sizes} rows of a tensor with {whole.shape[dim]}"
        )
    return _parts(whole, dim, names, sizes)


def _parts(whole: Source, dim: int, names: Sequence[str], sizes: Sequence[int]) -> Collected:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return {
        name: rows_of(whole, dim, start, size)
        for name, start, size in zip(names, starts, sizes, strict=True)
    }


def _transpose(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    name = operation.get_target_pattern(now, converter.source_patterns, converter.target_patterns)
    source = _only(now)
    if operation.check_dims and source.shape == target.shape_of(target.name):
        return {name: source}
    rank = len(source.shape)
    return {name: transposed(source, _dim(operation.dim0, rank), _dim(operation.dim1, rank))}


def _rearrange(operation: Any, now: Collected, converter: Any, target: Target) -> Collected:
    """Rearrange each tensor by itself, with transformers' own function on the whole tensor."""
    options = {
        "source_patterns": converter.source_patterns,
        "target_patterns": converter.target_patterns,
        "full_layer_name": target.name,
        "model": target.base,
        "config": getattr(target.base, "config", None),
    }

    def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = operation.convert({k: [t] for k, t in tensors.items()}, **options)
        return {k: t[0] if isinstance(t, list) else t for k, t in made.items()}

    sources = {pattern: _one(some) for pattern, some in now.items()}
    blank = {k: torch.empty(s.shape, device="meta") for k, s in sources.items()}
    # The operation returns its results in the order of its inputs.
    results = named(blank)
    if len(results) != len(sources):
        raise CheckpointError(
            f"the conversion of {target.name!r} turns {len(sources)} tensors into {len(results)}; fcdp can "
            "only convert them one by one; load with from_pretrained before fcdp_compile.shard"
        )

    def act(pattern: str, name: str, whole: Tensor) -> Tensor:
        # All inputs are passed because an operation may count them.
        return named({**blank, pattern: whole})[name]

    return {
        name: rearranged(source, partial(act, pattern, name), tuple(result.shape))
        for (pattern, source), (name, result) in zip(sources.items(), results.items(), strict=True)
    }


_KNOWN: dict[str, Callable[[Any, Collected, Any, Target], Collected]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _rearrange,
    "PermuteForRope": _rearrange,
    "Conv3dToLinear": _rearrange,
    "LinearToConv3d": _rearrange,
}


def _only(now: Collected) -> Source:
    if len(now) != 1:
        raise CheckpointError(f"expected tensors of one pattern, not of {list(now)}")
    return _one(next(iter(now.values())))


def _one(some: list[Source] | Source) -> Source:
    if not isinstance(some, list):
        return some
    if len(some) != 1:
        raise CheckpointError(f"expected one tensor, not {len(some)}")
    return some[0]


def _dim(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise CheckpointError(f"a tensor of {rank} dimensions has no dimension {dim}")
    return dim % rank
