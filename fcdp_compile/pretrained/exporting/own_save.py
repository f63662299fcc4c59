"""`model.save_pretrained(folder)`, as Transformers and PEFT have it, of a sharded model.

    no home shard in it (one process, or within `gathered`)  -> the library's own method
    Transformers' and PEFT's                                 -> fcdp_compile.save_pretrained
    any other library's                                      -> refused

The libraries' methods would look for whole values in home shards, on one rank alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.pretrained.exporting.export import save_pretrained
from fcdp_compile.pretrained.huggingface import is_library_save
from fcdp_compile.runtime.model import ShardedModel

_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def save_own(
    module: nn.Module,
    state: ShardedModel,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Do what `module.save_pretrained(*args, **kwargs)` asks for; all ranks must call it.

    method: the library's own, as a function.

    Raises: FcdpError, with nothing communicated, for a method that is not Transformers' or PEFT's and for
    arguments that fcdp_compile.save_pretrained has nothing for; else what that raises.
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
    folder, options = _understood(inspect.signature(method).bind(module, *args, **kwargs))
    return save_pretrained(module, folder, **options)


def _understood(bound: inspect.BoundArguments) -> tuple[Any, dict[str, int]]:
    """The folder, and what is asked for besides as options of fcdp_compile.save_pretrained."""
    parameters = bound.signature.parameters
    _, (_, folder), *more = bound.arguments.items()
    given: dict[str, Any] = {}
    for name, value in more:
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= {n: v for n, v in value.items() if v is not None}
        elif value is not parameters[name].default and value != parameters[name].default:
            given[name] = value
    given.pop("is_main_process", None)  # fcdp knows which rank writes
    options = {}
    if "max_shard_size" in given:
        options["max_shard_bytes"] = _bytes_of(given.pop("max_shard_size"))
    if given.get("safe_serialization") is True:
        del given["safe_serialization"]
    if given:
        raise FcdpError(
            f"save_pretrained of a sharded model takes a folder, max_shard_size and is_main_process, not "
            f"{' or '.join(given)}; leave that out, or see fcdp_compile.save_pretrained(model, folder)"
        )
    return folder, options


def _bytes_of(size: int | str) -> int:
    """A size as Transformers takes it: a number of bytes, or a text such as "5GB"."""
    if not isinstance(size, str):
        return size  # save_pretrained says what is wrong with it
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", size.strip().upper())
    if match is None:
        raise FcdpError(
            f"max_shard_size must be a number of bytes or a text such as '5GB', not {size!r}; "
            "fcdp_compile.save_pretrained(model, folder) takes max_shard_bytes"
        )
    return int(float(match[1]) * _BYTES[match[2]])
