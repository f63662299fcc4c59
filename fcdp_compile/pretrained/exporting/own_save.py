"""`model.save_pretrained(folder)`, as Transformers and PEFT have it, for a sharded model.

    no home shard in it (one process, or within `gathered`)  -> the library's own method
    Transformers' and PEFT's                                 -> fcdp_compile.save_pretrained
    any other library's                                      -> refused

The libraries' methods would take home shards for whole values, on one rank alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.pretrained.exporting.export import export
from fcdp_compile.pretrained.huggingface import is_library_save
from fcdp_compile.runtime.model import ShardedModel


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
