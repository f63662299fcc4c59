"""Equal layers of a model, which are traced and compiled once: the first layer's trace serves the others.

[Note: layers by themselves] With `shard(layers="shared")`, and with "auto" if it pays (`_pays`), a module
that contains equal layers, a *stack*, runs in Python where it calls them.  Each layer is compiled by itself,
and so are the modules beside them, such as an embedding.  What modules around the stack compute, such as a
loss, is compiled as ever, with a graph break where the stack is called.  Dynamo compares a layer with those
that it has traced, by its guards: a layer with another flag, another size, another tensor or other hooks
(`guard_empty_hooks`) gets a trace of its own.  Dynamo stops compiling a code object that has many traces.
Hooks often differ in every layer, so each layer with hooks, its own or of a module in it, has its own code
object.

`roles` finds no layers if a trainable parameter is in two of these parts.  Else the first layer that Dynamo
reaches decides for all; they stay in one graph

* with another backend, which could not tell the layers of a trace apart;
* if the user asks for one graph (`fullgraph=True`);
* if the model calls its layers within a function that is checkpointed;
* if a layer is given an object that may differ between layers, such as a cache of keys and values: then no
  layer could share a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.strategy import Cache
from fcdp_compile.torch_compat.compilers import skip_frame

COMPILES_LAYERS = "fcdp_compiles_layers"
"""The attribute of a backend whose graphs serve all layers that share a trace."""

_MANY, _LARGE = 8, 2**24

_PLAIN = (Tensor, BlockMask, bool, int, float, str, type(None), torch.dtype, torch.device)


class StackRole(Enum):
    """What a module is to the equal layers of its model.

    STACK: it contains some.  LAYER: it is one.  BESIDE: the forward that calls some in a loop calls it, too.
    """

    STACK = "stack"
    LAYER = "layer"
    BESIDE = "beside"


def roles(
    setting: str,
    root: nn.Module,
    records: Mapping[nn.Parameter, ParamRecord],
    alike: Mapping[str, str],
) -> dict[nn.Module, StackRole]:
    """The roles of modules; of none if no equal layers shall share a trace.

    The children of a module list or a sequence are layers if two of them have submodules and are equal: in
    class, and in the names and facts of their parameters.

    setting: "inline": one graph of all layers; "shared": equal layers share a trace and its code; "auto":
    shared if they are many and large.  records: of the parameters; other parameters are ignored.
    alike: `runtime.parameters.record.Records`.
    """
    if setting == "inline":
        return {}
    found: dict[nn.Module, StackRole] = {}

    def kind(layer: nn.Module) -> tuple[Any, ...] | None:
        held = [
            (n, alike[records[p].spec.key]) for n, p in layer.named_parameters() if p in records
        ]
        return (type(layer), *held) if held and next(layer.children(), None) is not None else None

    def has_layers(module: nn.Module) -> bool:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = [k for layer in module if (k := kind(layer)) is not None]
            if any(kinds.count(k) > 1 for k in set(kinds)):
                found.update(dict.fromkeys(module, StackRole.LAYER))
                found[module] = StackRole.STACK
                return True
        below = {child: has_layers(child) for child in module.children()}
        if any(below.values()):
            found[module] = StackRole.STACK
        if any(has and isinstance(child, nn.ModuleList) for child, has in below.items()):
            found.update(dict.fromkeys([m for m in below if m not in found], StackRole.BESIDE))
        return any(below.values())

    if not has_layers(root):
        return {}
    stacks = {m for m, role in found.items() if role is StackRole.STACK}
    apart = {child for stack in stacks for child in stack.children()} - stacks
    uses = Counter(p for m in apart for p in set(m.parameters()) if p.requires_grad)
    # Two graphs would reduce the gradient of a shared parameter twice, where one graph reduces the sum.
    is_whole = all(count == 1 for count in uses.values())
    return found if is_whole and (setting == "shared" or _pays(found, records)) else {}


def _pays(
    parts: Mapping[nn.Module, StackRole], records: Mapping[nn.Parameter, ParamRecord]
) -> bool:
    """Whether the earlier start of these layers pays for the work that Python has more in every step.

    For at least 8 layers, counted with unequal ones beside them, of on average at least 16.8 million
    elements: they compute, or wait for the network, longer than Python works for them.  But not if their
    copies live until the backward only, as no program loads those early (`plan.whole_step.leading`).  The
    same on all ranks.

    parts: of `roles`.  records: of the parameters.
    """
    layers = [module for module, role in parts.items() if role is StackRole.LAYER]
    held = [p for layer in layers for p in layer.parameters() if p in records]
    strategies = {records[p].spec.strategy for p in held}
    if any(s.cache is not Cache.NONE and not s.is_resident for s in strategies):
        return False
    return len(layers) >= _MANY and sum(p.numel() for p in held) >= _LARGE * len(layers)


def is_plain(value: Any) -> bool:
    """Whether a value cannot keep anything that differs between layers."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module, or any module below it, has hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(has_hooks(child) for child in module._modules.values() if child is not None)
    )


skip_frame(has_hooks)  # it runs while Dynamo looks at frames
