"""Find references to a model's parameters outside of the modules' own tables of parameters.

`shard` replaces each parameter by another tensor.  A list, a closure or a buffer that holds the old
parameter, or a view of it, would go on reading values that are never trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import (
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from fcdp_compile.torch_compat.autograd import gradient_hooks
from fcdp_compile.torch_compat.tensors import storage_id

_TABLES = ("_parameters", "_modules")
"""The attributes that `shard` handles itself."""

_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, ReferenceType)
"""Types whose objects hold no tensor of a model, or are shared by all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A tensor outside of the tables that is a parameter or shares its memory.

    owner: what has the tensor.  path: in the owner, like `weights[0]`.
    parameter: name of the parameter.  is_copy: whether it takes no part in training, like `weight.data`.
    """

    owner: str
    path: str
    parameter: str
    is_copy: bool


def find_references(model: nn.Module, parameters: Mapping[str, Tensor]) -> list[Reference]:
    """All tensors in a model, outside of the tables, that are one of these parameters or share its memory.

    parameters: by name.
    The search covers attributes, hooks and buffers of the modules, hooks on gradients, and everything in
    them: lists, dictionaries, objects, functions and their closures.
    """
    owners = {storage_id(p): name for name, p in parameters.items()}
    # Modules of the model are searched separately, under their own name.
    seen: dict[int, object] = {id(m): m for m in model.modules()}
    held = [
        (name or "the model", key, value)
        for name, module in model.named_modules()
        for key, value in (*vars(module).items(), *_methods(module))
        if key not in _TABLES
    ]
    held += [
        (f"a hook on the gradient of parameter {name!r}", "closure", hook)
        for name, parameter in parameters.items()
        for hook in gradient_hooks(parameter)
    ]
    found = []
    for owner, key, value in held:
        for path, tensor in _sharing(value, key, owners, seen):
            is_copy = not (tensor.requires_grad or isinstance(tensor, nn.Parameter))
            found.append(
                Reference(
                    owner=owner,
                    path=path,
                    parameter=owners[storage_id(tensor)],
                    is_copy=is_copy and key != "_buffers",
                )
            )
    return found


def _methods(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The methods of a module's classes that close over something; torch's own are left out."""
    for cls in type(module).__mro__:
        if not cls.__module__.startswith("torch."):
            for name, value in vars(cls).items():
                if isinstance(value, FunctionType) and value.__closure__:
                    yield name, value


def _sharing(
    value: object, path: str, owners: Mapping[int, str], seen: dict[int, object]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that share memory with a parameter, in the value at `path` or in objects it holds.

    owners: names of parameters by their storage.  seen: objects to skip, by their ids.  Those that are
    visited are added, which keeps temporary objects alive: ids are unique among living objects only.
    """
    todo = [(value, path)]
    while todo:
        value, path = todo.pop()
        if isinstance(value, Tensor):
            if value.layout is torch.strided and storage_id(value) in owners:
                yield path, value
        elif not isinstance(value, _LEAVES) and id(value) not in seen:
            seen[id(value)] = value
            todo += reversed(list(_parts(value, path)))


def _parts(value: Any, path: str) -> Iterator[tuple[object, str]]:
    """The objects that a value holds, each with its path."""
    if isinstance(value, (dict, MappingProxyType)):
        yield from ((v, f"{path}[{k!r}]") for k, v in list(value.items()) if _may_hold(v))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((v, f"{path}[{i}]") for i, v in enumerate(value) if _may_hold(v))
    elif isinstance(value, partial):
        yield from ((v, path) for v in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from ((v, path) for v in (value.__self__, value.__func__))
    elif isinstance(value, FunctionType):
        held = (value.__closure__ or (), value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from ((v, path) for v in held)
    elif isinstance(value, Node):
        if (variable := getattr(value, "variable", None)) is not None:
            yield variable, path  # of a leaf; torch's hooks on several gradients keep such nodes
    elif isinstance(value, CellType):
        with suppress(ValueError):  # a variable that has no value yet
            yield value.cell_contents, path
    else:
        # Read without `__getattr__` and the like, by which a class may return something else, or raise.
        own = inspect.getattr_static(value, "__dict__", None)
        if isinstance(own, GetSetDescriptorType):
            own = own.__get__(value)
        if isinstance(own, dict):
            yield from ((v, f"{path}.{k}") for k, v in list(own.items()) if _may_hold(v))


def _may_hold(value: object) -> bool:
    return not isinstance(value, _LEAVES)
