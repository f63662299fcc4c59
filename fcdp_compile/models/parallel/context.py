"""Train on sequences that are cut over the ranks of a node: context parallelism of Transformers models.

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
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from fcdp_compile.core.ranks.inner_mesh import CONTEXT, CP, cp_of
from fcdp_compile.core.sharding.shard import is_sharded
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.extras import require
from fcdp_compile.torch_compat.distributed import all_to_all_of_equals

M = TypeVar("M", bound=nn.Module)

_NAME = "fcdp_ulysses"
_LAYERS = {"full_attention", "sliding_attention"}


def context_parallel(model: M, mesh: DeviceMesh | None) -> M:
    """Let a Transformers model compute with parts of sequences (`sequence_part`); returns the model.

    Call it before `shard`.  Each attention exchanges its heads within the ranks that share a sequence, so
    that each of them computes some heads over the whole sequence.  The attention implementation is the one
    that the model has.  `model.generate` takes whole sequences, which each rank computes alone.  Without "cp"
    in the mesh nothing happens.

    mesh: from `make_mesh(cp=…)`.

    Raises: ArgumentError for models whose attention cannot be cut so.
    """
    ranks = cp_of(mesh)
    if mesh is None or ranks == 1:
        return model
    modeling = require("transformers.modeling_utils", "context_parallel")
    base = transformers_base(model, "context_parallel")
    if base.config._attn_implementation == _NAME:
        raise ArgumentError(
            "context_parallel got a model, or its config, a second time; call it once"
        )
    if (problem := _virtual_tokens(model) or _problem(base)) is not None:
        raise ArgumentError(
            f"context_parallel cannot cut sequences of {type(base).__name__}: {problem}"
        )
    config = base.config
    name = config._attn_implementation
    inner = modeling.ALL_ATTENTION_FUNCTIONS[name]
    group = mesh.get_group(CP).group_name
    for module in base.modules():
        if isinstance(getattr(module, "is_causal", None), bool):
            setattr(module, CONTEXT, Context(group, ranks, name, inner, heads_of(module)))
    modeling.AttentionInterface.register(_NAME, attention)
    base.set_attn_implementation(_NAME)
    if callable(getattr(base, "generate", None)):
        vars(base)["generate"] = MethodType(generate_whole, base)
    return model


def transformers_base(model: nn.Module, what: str, otherwise: str = "") -> Any:
    """The model of Transformers in a model that is not sharded yet.

    what: the function that needs it.  otherwise: what to do with other models, the end of a sentence.

    Raises: ArgumentError.
    """
    modeling = require("transformers.modeling_utils", what)
    if is_sharded(model):
        raise ArgumentError(f"{what} got a sharded model; call it before fcdp_compile.shard")
    for module in model.modules():
        if isinstance(module, modeling.PreTrainedModel):
            return module
    raise ArgumentError(
        f"{what} takes a model of Transformers, or one around it, not {type(model).__name__}{otherwise}"
    )


def generate_whole(base: Any, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of a model after `context_parallel`: each rank computes with whole sequences."""
    contexts = (getattr(module, CONTEXT, None) for module in base.modules())
    base.set_attn_implementation(next(found.name for found in contexts if found is not None))
    try:
        return type(base).generate(base, *args, **kwargs)
    finally:
        base.set_attn_implementation(_NAME)


def _virtual_tokens(model: nn.Module) -> str | None:
    """Why each rank would have more tokens than its part; None if it has not."""
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        for config in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(config, "is_prompt_learning", False):
                return "its adapter puts virtual tokens before the part of every rank; use LoRA"
    return None


def _problem(base: Any) -> str | None:
    """Why this rank's attention would not see the whole sequences; None if it would."""
    config = base.config
    implementation: str = config._attn_implementation
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if not base._supports_attention_backend:
        return "its attention does not go through Transformers' AttentionInterface"
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return "it has other inputs than one sequence of tokens"
    if strange:
        return (
            f"it has layers of type {sorted(strange)[0]!r}, which are no attention over all tokens"
        )
    if base.loss_type not in (None, "ForCausalLM"):
        return "its labels are not the next tokens"
    if getattr(config, "output_router_logits", False):
        return "its auxiliary loss would count the tokens of a part; set config.output_router_logits = False"
    if getattr(config, "attn_temperature_tuning", False) or _counts_positions(base):
        return "it counts positions itself, from the first token that a rank has"
    if implementation != "sdpa" and not implementation.startswith("flash_attention"):
        return (
            f"attn_implementation={implementation!r} cannot compute some of the heads; load the model with "
            "attn_implementation='sdpa'"
        )
    return None


def _counts_positions(base: Any) -> bool:
    """Whether positions depend on more than `position_ids`, such as the number of tokens or the padding."""
    config = base.config
    most = getattr(config, "max_position_embeddings", None)
    for module in base.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            return True
        if isinstance(module, nn.Embedding) and most and module.num_embeddings != config.vocab_size:
            # A table with places for an offset or for padding: the model finds the positions itself.
            has_more = most < module.num_embeddings <= most + 8
            has_padding = module.num_embeddings == most and module.padding_idx is not None
            if has_more or has_padding:
                return True
    return False


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
