"""Graphs of torch.fx, their fake values, and the form of functions that AOTAutograd expects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen


def is_opaque(node: Node) -> bool:
    """Whether a node's value is an object that is neither tensor nor number, such as a DeviceMesh."""
    return isinstance(node.meta.get("val"), FakeScriptObject)


def unwritten_inputs(joint: GraphModule, positions: Collection[int]) -> list[Node]:
    """The inputs of a joint graph, of those at positions of Dynamo's graph, that nothing writes to."""
    descriptions = joint.graph.output_node().meta.get("desc", ())
    written = {d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)}
    writes = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    into = {node.args[0] for node in writes}
    return [
        node
        for node in joint.graph.find_nodes(op="placeholder")
        if node not in into
        and (of := node.meta.get("desc")) not in written
        and _position(of) in positions
    ]


def _position(description: Any) -> int | None:
    while isinstance(description, SubclassGetAttrAOTInput):
        description = description.base
    return description.idx if isinstance(description, PlainAOTInput) else None


def graph_module(root: nn.Module, graph: Graph, name: str = "GraphModule") -> GraphModule:
    """A GraphModule that generates its Python code when it is first called or printed, if ever."""
    return _LazyGraphModule(root, graph, name)


def without_code() -> AbstractContextManager[None]:
    """Make torch's own passes delay the generation of Python code too, as `graph_module` does."""
    return _use_lazy_graph_module(True)


def as_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that a function takes its arguments as a list and empties it."""

    def call(args: list[Any]) -> Any:
        return function(args)

    marked: Any = call
    marked._boxed_call = True
    return call


def boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function that takes its arguments as a list and empties it."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _LazyGraphModule.force_recompile(
        gm
    )  # else its first call would recompile it and then call it twice
    return gm.forward


def meta_of(fake: Tensor) -> Tensor:
    """A meta tensor with a fake tensor's storage, for ops that need no device; call it `without_modes`."""
    meta = torch.empty(0, dtype=fake.dtype, device="meta")
    return meta.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())


def fake_of(meta: Tensor, like: FakeTensor) -> FakeTensor:
    """A fake tensor with a meta tensor's storage, in the mode and on the device of another fake tensor."""
    return FakeTensor(like.fake_mode, meta, like.device)


def saved_output_descriptor(index: int) -> SavedForBackwardsAOTOutput:
    """AOTAutograd's descriptor of the forward's output that is saved as number `index`."""
    return SavedForBackwardsAOTOutput(index)


def graphs_to_bytes(graphs: Sequence[GraphModule]) -> bytes:
    """Serialise traced graphs with their fake values, including symbolic sizes and shared storages."""
    for gm in graphs:
        for node in gm.graph.nodes:  # other entries of meta may not be picklable
            node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    data: bytes = GraphPickler.dumps(tuple(graphs), PicklerOptions(ops_filter=None))
    return data


def graphs_from_bytes(data: bytes) -> tuple[GraphModule, ...]:
    """Undo `graphs_to_bytes`, in a new fake mode; it runs code, so read only bytes that this user wrote."""
    loaded: Any = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    return tuple(loaded)


def tracing_mode() -> FakeTensorMode:
    """A fake mode for tracing models without memory; sizes become symbols as under Dynamo.

    Modules made in it can be moved and cast.  Reading a value raises, as there are no values, even where
    torch would continue with an unknown symbol: an `item()`, a size that depends on values.
    """
    mode = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    )
    mode.fake_tensor_converter = _Forgetful()
    return mode


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to the tensors that it makes.

    torch 2.13 refuses `Module.to` for fake parameters that have weak references, and its own converter keeps
    one to every tensor whose shape is new to it.
    """

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        pass

    def from_real_tensor(self, *args: Any, **more: Any) -> FakeTensor:
        made = super().from_real_tensor(*args, **more)
        self.tensor_memo.clear()
        return made

    def add_constant_storage_mapping(self, fake_tensor: FakeTensor) -> None:
        super().add_constant_storage_mapping(fake_tensor)
        kept: list[list[Any]] = list(self.constant_storage_mapping.values())
        for references in kept:
            references[:] = [
                r if isinstance(r, _Reference) else _Reference(r()) for r in references
            ]


class _Reference:
    """Used like a weak reference, but keeps a scalar alive as long as the mode lives."""

    def __init__(self, value: FakeTensor | None) -> None:
        self._value = value

    def __call__(self) -> FakeTensor | None:
        return self._value


def is_static_input(tensor: Tensor) -> bool:
    """Whether an input of a Dynamo graph is a parameter or buffer of a module."""
    return hasattr(tensor, "_dynamo_static_input_type")
