"""Attention over sequences that are cut over the ranks of a node, for models of Transformers.

    [B, H, S/c, D] of each rank   heads of a part of the sequence
       │ all-to-all within the node
    [B, H/c, S, D]                some heads of the whole sequence: the model's own attention
       │ all-to-all within the node
    [B, S/c, H, D]

Each all-to-all sends (c-1)/c of what a rank has of query, key, value or result.  If c does not divide H,
heads of zeros are added; pairs of key and value heads are repeated as often as c ranks need.
Source: DeepSpeed Ulysses (Jacobs et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fcdp_compile.core.ranks.inner_mesh import CONTEXT
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.torch_compat import all_to_all_of_equals


class Heads(nn.Module):
    """An attention module as the inner attention sees it, with the group size of the heads that it gets."""

    def __init__(self, module: nn.Module, repeats: int) -> None:
        super().__init__()
        self.num_key_value_groups = int(module.num_key_value_groups) // repeats  # type: ignore[arg-type]
        self.is_causal = module.is_causal
        self.config = module.config
        self.layer_idx = getattr(module, "layer_idx", None)


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share a sequence, and the attention that computes within each of them.

    group: the name of their process group.  inner: Transformers' attention implementation of this name.
    heads: what `inner` gets for the module if each pair of key and value heads is sent several times, by how
    often.
    """

    group: str
    ranks: int
    name: str
    inner: Callable[..., tuple[Tensor, Tensor | None]]
    heads: Mapping[int, Heads]


def heads_of(module: nn.Module) -> dict[int, Heads]:
    """What the inner attention may get for an attention module, by how often pairs of heads are sent."""
    group = int(getattr(module, "num_key_value_groups", 1))
    return {n: Heads(module, n) for n in range(2, group + 1) if group % n == 0}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' attention interface, on parts of sequences.

    query [B, H, S/c, D], key and value [B, K, S/c, D] -> [B, S/c, H, D]

    Raises: FcdpError if the model was not given what `sequence_part` returns, or drops it on the way here;
    ArgumentError for sequences that the attention cannot keep apart.
    """
    context: Context | None = getattr(module, CONTEXT, None)
    if context is None:
        raise FcdpError(
            f"{type(module).__name__} was not made ready by fcdp_compile.context_parallel, but has the "
            "config of a model that was, or is built in another way; give each model a config of its own"
        )
    if any(kwargs.get(name) is not None for name in ("s_aux", "position_bias")):
        raise ArgumentError(
            f"{type(module).__name__} has attention sinks or position biases, which are not cut over ranks; "
            "train it without context_parallel"
        )
    if "sequence_ids" not in kwargs:
        raise FcdpError(
            f"{type(module).__name__} got no sequence_ids, so it does not know which part of the sequences "
            "this rank has; give the model **fcdp_compile.sequence_part(batch, mesh), and use only models "
            "that pass keyword arguments on to their attention"
        )
    kwargs.pop("position_ids", None)  # of this rank's part; the attention sees the whole sequences
    ids: Tensor | None = kwargs.pop("sequence_ids")
    only_trailing: bool = kwargs.pop("only_trailing", False)
    # Of this rank: ranks of "tp" may share the model's heads.
    heads = query.shape[1]
    repeats = repeats_of(heads, key.shape[1], context.ranks)
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    query, key, value = (_whole_sequences(t, context) for t in (query, key, value))
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if only_trailing and is_causal:
        ids = None  # no token sees what comes after it
    window = kwargs.get("sliding_window")
    if ids is not None and context.name != "sdpa":
        raise ArgumentError(
            f"attn_implementation={context.name!r} cannot keep padding and packed sequences apart if they "
            "are cut over ranks; load the model with attn_implementation='sdpa', or pad at the end only"
        )
    mask = _mask(query, ids, window if context.name == "sdpa" else None, is_causal=is_causal)
    found, weights = context.inner(
        context.heads.get(repeats, module), query, key, value, mask, **kwargs
    )
    return _own_part(found, heads, context), weights


def repeats_of(heads: int, pairs: int, ranks: int) -> int:
    """How often each pair of key and value heads is repeated, so that each rank gets the pairs of its heads.

    As seldom as possible: equal numbers of a rank's heads then share a pair, and no pair is of two ranks.
    """
    group, own = heads // pairs, -(-heads // ranks)
    return next(n for n in range(1, group + 1) if group % n == 0 and own % (group // n) == 0)


def _whole_sequences(part: Tensor, context: Context) -> Tensor:
    """[B, H, S/c, D] -> [B, ceil(H/c), S, D]."""
    if missing := -part.shape[1] % context.ranks:
        part = pad(part, (0, 0, 0, 0, 0, missing))
    batch, heads, _, width = part.shape
    sent = _split(part, context.ranks)
    got = all_to_all_of_equals(sent.contiguous(), context.group)  # [c, B, H/c, S/c, D]
    return got.permute(1, 2, 0, 3, 4).reshape(batch, heads // context.ranks, -1, width)


def _own_part(whole: Tensor, heads: int, context: Context) -> Tensor:
    """[B, S, ceil(H/c), D] -> [B, S/c, H, D]."""
    batch, length, _, width = whole.shape
    sent = _split(whole, context.ranks)
    got = all_to_all_of_equals(sent.contiguous(), context.group)  # [c, B, S/c, H/c, D]
    own = got.permute(1, 2, 0, 3, 4).reshape(batch, length // context.ranks, -1, width)
    return own[:, :, :heads].contiguous()


def _split(tensor: Tensor, ranks: int) -> Tensor:
    """[B, c*n, ...] -> [c, B, n, ...]."""
    # Not the method: with torch.set_default_device, Dynamo cannot trace it.
    return torch.unflatten(tensor, 1, (ranks, tensor.shape[1] // ranks)).movedim(1, 0)


def _mask(
    query: Tensor, ids: Tensor | None, window: int | None, *, is_causal: bool
) -> Tensor | None:
    """[B or 1, 1, S, S]: whether a token may see another; None where causality says all."""
    length = query.shape[2]
    if ids is None and (window is None or length <= window):
        return None
    at = torch.arange(length, device=query.device)
    distance = at[:, None] - at
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    seen = seen[None, None]
    if ids is None:
        return seen
    # As with Transformers' own masks, nothing sees padding, and padding sees what comes before it.
    asking, asked = ids[:, None, :, None], ids[:, None, None, :]
    return seen & (asked >= 0) & ((asking == asked) | (asking < 0))
