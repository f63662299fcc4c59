"""Which tensors of a model a checkpoint has, and under which names.

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight      the wrapped model's name
                     model.layers.0.self_attn.q_proj.weight                 the checkpoint's

PEFT's wrappers are recognised by their classes: any module may be called `base_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor, nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.models.pretrained.huggingface import base_of, is_adapter_layer, is_trained_copy


class Role(Enum):
    """The role of a tensor in a model that may be wrapped by PEFT.

    COPY: of a module of the base; PEFT trains the copy in its place (`modules_to_save`).
    """

    BASE = "base"
    COPY = "copy"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One name of a model's state dict.

    name: the name in the root's state dict; for a parameter it is a name of `named_parameters`, tied ones
    included.
    plain: the name in a checkpoint of the base; for an adapter equal to `name`.
    module, leaf: where it is.  tensor: the parameter or buffer itself; a tied one has several entries.
    """

    name: str
    plain: str
    role: Role
    module: nn.Module
    leaf: str
    tensor: Tensor


def entries_of(root: nn.Module) -> list[Entry]:
    """Return every parameter and persistent buffer of a model, in the order of its state dict, not gathered.

    Raises: FcdpError for a state dict with something else in it.
    """
    places = {place.path: place for place in _walk(root, base_of(root))}
    # keep_vars returns the parameters themselves: no home shard is touched.
    state = root.state_dict(keep_vars=True)
    found = []
    for name in state:
        path, _, leaf = name.rpartition(".")
        place = places.get(path)
        tensor = None if place is None else _held(place.module, leaf)
        if place is None or tensor is None:
            raise FcdpError(
                f"{name!r} of the model's state dict is not a parameter or buffer of its modules (extra "
                "state, or a hook that renames), which a safetensors checkpoint cannot carry"
            )
        plain = f"{place.plain}.{leaf}" if place.plain else leaf
        found.append(
            Entry(
                name=name,
                plain=name if place.role is Role.ADAPTER else plain,
                role=place.role,
                module=place.module,
                leaf=leaf,
                tensor=tensor,
            )
        )
    return found


def adapter_tensors(root: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors that PEFT has added to a base: adapters, trained copies, prompt encoders."""
    of_base: set[int] = set()
    added: list[Tensor] = []
    for place in _walk(root, base_of(root)):
        tensors = [*place.module._parameters.values(), *place.module._buffers.values()]
        found = [tensor for tensor in tensors if tensor is not None]
        if place.role is Role.BASE:
            of_base |= {id(tensor) for tensor in found}
        else:
            added += found
    # A prompt encoder also refers to the base's embedding.
    return (tensor for tensor in added if id(tensor) not in of_base)


def _held(module: nn.Module, leaf: str) -> Tensor | None:
    parameter: Tensor | None = module._parameters.get(leaf)
    return parameter if parameter is not None else module._buffers.get(leaf)


class _Place(NamedTuple):
    """A module at a path, the checkpoints' name for that path, and the role of the module's own tensors."""

    path: str
    module: nn.Module
    plain: str
    role: Role


def _walk(root: nn.Module, base: nn.Module) -> Iterator[_Place]:
    """Yield the place of every path to a module."""
    # Outside of a wrapped base, all modules are adapters (prompt encoders).
    waiting = [_Place("", root, "", Role.BASE if base is root else Role.ADAPTER)]
    while waiting:
        place = waiting.pop()
        if place.module is base:
            place = place._replace(plain="", role=Role.BASE)
        has_adapters = place.role is Role.BASE and is_adapter_layer(place.module)
        yield place._replace(role=Role.ADAPTER) if has_adapters else place
        for name, child in place.module._modules.items():
            if child is not None:
                waiting += _below(place, name, child)


def _below(place: _Place, name: str, child: nn.Module) -> list[_Place]:
    """Return the place of a child; for a dictionary of copies, the places of the copies."""
    path = f"{place.path}.{name}" if place.path else name
    plain = f"{place.plain}.{name}" if place.plain else name
    if place.role is Role.BASE and is_adapter_layer(place.module):
        if name == "base_layer":
            return [_Place(path, child, place.plain, Role.BASE)]
        return [_Place(path, child, plain, Role.ADAPTER)]
    if place.role is Role.BASE and is_trained_copy(place.module):
        if name == "original_module" or is_adapter_layer(child):
            return [_Place(path, child, place.plain, Role.BASE)]
        copies = [(f"{path}.{n}", c) for n, c in child._modules.items() if c is not None]
        return [_Place(at, copy, place.plain, Role.COPY) for at, copy in copies]
    return [_Place(path, child, plain, place.role)]
