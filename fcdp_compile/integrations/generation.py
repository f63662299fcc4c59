"""`model.generate` of a sharded model, which all ranks call together."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from fcdp_compile.core.sharding.gathered import gathered
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.models.parallel.context import generate_whole

_ROOM = 0.8
"""The part of the free memory that whole parameters may take; the rest is for the tokens' keys and values."""


def generate_together(model: nn.Module, how: str) -> None:
    """Replace the `generate` of a sharded model, if it has one, by one that all ranks call together.

    how: as `FcdpOptions.generate`.  "whole": the parameters are gathered once for all tokens.  "sharded":
    each token gathers them anew, from within the node as long as the node's copies are valid; ranks that have
    finished go on with the others until all have (`synced_gpus` of Transformers).  "auto": "whole" if that
    fits the free memory of every GPU.
    """
    own = vars(model).get("generate")
    if isinstance(own, functools.partial) and own.func is _generate:
        own = own.args[2]  # an earlier Trainer may have given another `how`
    is_context = isinstance(own, MethodType) and own.__func__ is generate_whole
    if is_context or (own is None and callable(getattr(model, "generate", None))):
        vars(model)["generate"] = functools.partial(_generate, weakref.ref(model), how, own)


def _generate(
    reference: weakref.ref[nn.Module],
    how: str,
    own: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    model: Any = reference()
    assert model is not None, "the function is an attribute of the model"
    generate = own or functools.partial(type(model).generate, model)
    if how == "whole" or (how == "auto" and _fits(model)):
        with gathered(model):
            return generate(*args, **kwargs)
    if state_of(model).topology.ranks > 1:  # in a single process there is no group to synchronise
        kwargs["synced_gpus"] = True
    # Compiled, it would be compiled again for each length of the keys and values.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return generate(*args, **kwargs)


def _fits(model: nn.Module) -> bool:
    """Whether the whole parameters fit on every rank; all ranks must call it."""
    state = state_of(model)
    free = state.device.free_bytes()
    if free is None:  # on the host, where the ranks of a machine share what is free
        return True
    specs = [record.spec for record in state.records.values()]
    needed = sum(math.prod(spec.layout.shape) * spec.home_dtype.itemsize for spec in specs)
    return all(row[0] for row in state.collectives.agree([int(needed <= _ROOM * free)]))
