"""Train on sequences that are cut over the ranks of a node: context parallelism."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.ranks.inner_mesh import CONTEXT, CP, cp_of
from fcdp_compile.core.sharding.shard import is_sharded
from fcdp_compile.errors import ArgumentError
from fcdp_compile.extras import require
from fcdp_compile.models.parallel.ulysses import Context, attention, heads_of

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
