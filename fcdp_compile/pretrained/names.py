"""Which tensors of a model a checkpoint has, and what it calls them.

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight      the wrapped model's name
                     model.layers.0.self_attn.q_proj.weight                 the checkpoint's

PEFT's wrappers are recognised by their classes: a module may be called `base_layer` without being one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.pretrained.huggingface import base_of, is_adapter_layer, is_trained_copy


class Role(Enum):
    """What a tensor is in a model that may be wrapped by PEFT.

    COPY: of a module of the base, which is trained in its place (`modules_to_save`).
    """

    BASE = "base"
    COPY = "copy"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One name of a model's state dict.

    name: in the root's state dict, which for a parameter is a name of `named_parameters`, tied ones included.
    plain: what a checkpoint of the base calls it; for an adapter the same as name.
    module, leaf: where it is.  tensor: the parameter or buffer itself; a tied one has several entries.
    """

    name: str
    plain: str
    role: Role
    module: nn.Module
    leaf: str
    tensor: Tensor

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return self.leaf in self.module._parameters


def entries_of(root: nn.Module) -> list[Entry]:
    """Every parameter and persistent buffer of a model, in the order of its state dict, not gathered.

    Raises: FcdpError for a state dict with something else in it.
    """
    places = {path: place for path, *place in _walk(root, base_of(root))}
    # With keep_vars it gives the very parameters: no home shard is touched.
    state = root.state_dict(keep_vars=True)
    found = []
    for name in state:
        path, _, leaf = name.rpartition(".")
        module, plain, role = places.get(path, (None, "", Role.BASE))
        tensor = _held(module, leaf)
        if tensor is None:
            raise FcdpError(
                f"{name!r} of the model's state dict is no parameter or buffer of its modules (extra state, "
                "or a hook that renames), which a safetensors checkpoint cannot carry"
            )
        plain_name = name if role is Role.ADAPTER else (f"{plain}.{leaf}" if plain else leaf)
        found.append(
            Entry(name=name, plain=plain_name, role=role, module=module, leaf=leaf, tensor=tensor)
        )
    return found


def _held(module: nn.Module | None, leaf: str) -> Tensor | None:
    if module is None:
        return None
    parameter: Tensor | None = module._parameters.get(leaf)
    return parameter if parameter is not None else module._buffers.get(leaf)


def _walk(root: nn.Module, base: nn.Module) -> Iterator[tuple[str, nn.Module, str, Role]]:
    """Every path of a module with the module, its plain path, and the role of what it holds itself."""
    # Outside of a wrapped base there are only adapters (prompt encoders).
    start = Role.BASE if base is root else Role.ADAPTER
    waiting = [("", root, "", start)]
    while waiting:
        path, module, plain, role = waiting.pop()
        if module is base:
            plain, role = "", Role.BASE
        is_layer = is_adapter_layer(module)
        yield path, module, plain, Role.ADAPTER if is_layer and role is Role.BASE else role
        for name, child in module._modules.items():
            if child is not None:
                below = f"{path}.{name}" if path else name
                waiting += _below(module, name, below, child, plain, role)


def _below(
    module: nn.Module, name: str, path: str, child: nn.Module, plain: str, role: Role
) -> list[tuple[str, nn.Module, str, Role]]:
    """A child with its path, plain path and role; for a dictionary of copies each of the copies."""
    joined = f"{plain}.{name}" if plain else name
    if role is Role.BASE and is_adapter_layer(module):
        is_base = name == "base_layer"
        return [(path, child, plain if is_base else joined, role if is_base else Role.ADAPTER)]
    if role is Role.BASE and is_trained_copy(module):
        if name == "original_module" or is_adapter_layer(child):
            return [(path, child, plain, role)]
        return [(f"{path}.{n}", c, plain, Role.COPY) for n, c in child._modules.items() if c]
    return [(path, child, joined, role)]
