"""`shard(model)`: replace every parameter by its home shard and its attribute by a property.

A sharded module's class is a subclass of its own, of the same name.  Within the forward of any module of
the sharded model, when activation checkpointing recomputes, and in every graph that Dynamo traces,
reading a parameter's attribute gathers it (`fcdp::unshard`).  Elsewhere the attribute is the parameter
itself, so that freezing, optimizers, merging adapters and `state_dict` see what they would see without fcdp.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile import registry
from fcdp_compile.errors import FcdpError, UnshardedParameterError
from fcdp_compile.gathering import Algorithm
from fcdp_compile.home_shard import Calls, HomeShard
from fcdp_compile.layout import ParamLayout
from fcdp_compile.mesh import Home, Topology, topology_of
from fcdp_compile.ops import UNSHARD
from fcdp_compile.registry import ParamSpec
from fcdp_compile.replicas import agree_on_replicas
from fcdp_compile.runtime import numa
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.record import ParamRecord
from fcdp_compile.shardable import check_model
from fcdp_compile.strategy import Scope, Strategy
from fcdp_compile.torch_compat import is_recomputing, skip_frame, tree_map_only

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

_STATE = "_fcdp"


class _Gate:
    """Whether a forward of any module of the model is running; shared by all its modules.

    calls: whether the model itself is being called, which begins before its guards are looked at.
    """

    def __init__(self) -> None:
        self.inside = False
        self.calls = Calls()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """How a model is cut: over which ranks, and the mesh of all; None in a single process."""

    home: Home
    scope: Scope
    mesh: DeviceMesh | None


class _ModuleState:
    """What a sharded module knows: its model, the keys of its own parameters, the gate."""

    def __init__(self, model: ShardedModel, gate: _Gate, keys: dict[str, str]) -> None:
        self.model = model
        self.gate = gate
        self.keys = keys


def shard(
    model: M,
    mesh: DeviceMesh | None = None,
    *,
    strategy: str | Strategy = "fcdp",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    gradient_on: str | None = None,
    bind_cores: bool = True,
) -> M:
    """Shard `model` in place over all ranks of `mesh` and return it.

    Every parameter becomes a DTensor `nn.Parameter` that holds this rank's part; names, ties and
    requires_grad stay.  Where ranks hold different values rank 0's are taken.  Build the optimizer after.

    mesh: from `make_mesh`; None in a single process.
    strategy: a preset's name (`fcdp_compile.strategy.PRESETS`) or a Strategy.
    param_dtype: what floating point parameters are gathered and computed in, and floating point inputs of
    the model are cast to; by default each parameter's own dtype.  Home shards keep theirs.
    reduce_dtype: what their gradients are reduced in; by default param_dtype.
    reshard_after_forward: as FSDP2's, with strategy "fsdp" (`Strategy.fsdp`).
    gradient_on: where gradients wait within `no_sync`: "gpu", "host", or "auto", on the GPU while the planned
    step has room for them; by default as the strategy says.
    bind_cores: for a model on a GPU of a machine with several NUMA nodes, let this process, unless somebody
    bound it before, run on the cores of the GPU's node alone.

    Raises: ValueError or TypeError, before anything is communicated, for a mesh without "inter" and
    "intra", an unknown strategy, and a model that cannot be sharded (`shardable.check_model`); ValueError
    on every rank if ranks build different models.
    """
    root = model_of(model)
    chosen = Strategy.parse(strategy)
    check_model(root, param_dtype, reduce_dtype, mesh)
    if reshard_after_forward is not None and chosen != Strategy.parse("fsdp"):
        raise ValueError(
            f"reshard_after_forward is an option of strategy 'fsdp', not of {chosen.name!r}, which says "
            "itself what is kept; leave it out"
        )
    topology = topology_of(mesh)
    if reshard_after_forward is not None:
        chosen = Strategy.fsdp(reshard_after_forward, topology.ranks_per_node)
    if gradient_on is not None:
        chosen = chosen.with_gradients_on(gradient_on)
    chosen = _fitting(chosen, topology)
    where = _Where(home=topology.home(chosen.home), scope=chosen.home, mesh=topology.home_mesh)
    number = registry.new_model_number()
    names = _names(root)
    records = {
        parameter: ParamRecord(
            _spec(f"m{number}:{name}", name, parameter, where, param_dtype, reduce_dtype)
        )
        for parameter, name in names.items()
    }
    device = next(iter(names)).device
    if bind_cores:
        numa.bind_process(numa.node_of(device))
    state = ShardedModel(number, topology, chosen, records.values(), device)
    named = [(name, p) for p, name in names.items()]
    buffers = list(root.named_buffers())
    description = [f"strategy {chosen}, param_dtype {param_dtype}, reduce_dtype {reduce_dtype}"]
    description += [
        f"{name}: {t.dtype} {tuple(t.shape)}, requires_grad={t.requires_grad}"
        for name, t in [*named, *buffers]
    ]
    agree_on_replicas(topology, state.collectives, description, [*named, *buffers])
    state.make_groups()
    _warn_of_older_optimizers(list(names))
    _install(root, state, records, where, param_dtype)
    for record in records.values():
        registry.register(record.spec.key, state)
    root.register_load_state_dict_post_hook(_state_dict_loaded)
    state.agree_on_host_memory()  # now that the whole parameters are gone
    return model


def _fitting(strategy: Strategy, topology: Topology) -> Strategy:
    """The strategy as it is on this many nodes.

    Raises: ValueError for one that makes no sense there.
    """
    if topology.nodes > 1:
        if topology.ranks_per_node == 1:  # there is one link, and one way to gather over it
            strategy = replace(strategy, algorithm=Algorithm.HIERARCHICAL)
        is_whole = topology.home(strategy.home).ranks == 1
        return strategy.on_whole_copies() if is_whole else strategy
    if strategy.home is Scope.INTRA and topology.ranks > 1:
        raise ValueError(
            f"strategy {strategy.name!r} shards within a node and replicates over nodes, but there is one "
            "node; use 'zero3', which shards over all ranks, or make_mesh(nodes=…)"
        )
    return strategy.on_one_node(topology.ranks_per_node)


def model_of(model: nn.Module) -> nn.Module:
    """The module itself, whether it was given compiled or not."""
    return getattr(model, "_orig_mod", model)


def state_of(model: nn.Module) -> ShardedModel:
    """The run-time state of a sharded model, compiled or not.

    Raises: ValueError if it is not sharded.
    """
    state = vars(model_of(model)).get(_STATE)
    if state is None:
        raise ValueError("the model is not sharded; call fcdp_compile.shard(model, mesh) first")
    found: ShardedModel = state.model
    return found


def _names(root: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter with its first name; ties count once."""
    return {parameter: name for name, parameter in root.named_parameters()}


def _spec(
    key: str,
    name: str,
    parameter: nn.Parameter,
    where: _Where,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> ParamSpec:
    home = where.home
    layout = ParamLayout.of(parameter.shape, home.nodes, home.ranks_per_node)
    gathers_as = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
    reduces_as = reduce_dtype if reduce_dtype and parameter.is_floating_point() else gathers_as
    return ParamSpec(
        key=key,
        name=name,
        layout=layout,
        home_dtype=parameter.dtype,
        gather_dtype=gathers_as,
        reduce_dtype=reduces_as,
        local_shape=layout.local_shape(home.node, home.place),
        home=where.scope,
    )


def _install(
    root: nn.Module,
    state: ShardedModel,
    records: dict[nn.Parameter, ParamRecord],
    where: _Where,
    input_dtype: torch.dtype | None,
) -> None:
    """Put home shards in the place of parameters and subclasses in the place of the modules' classes."""
    gate = _Gate()
    homes = {p: _home_shard(p, r.spec.layout, where, gate.calls) for p, r in records.items()}
    classes: dict[tuple[type, tuple[str, ...], bool], type] = {}
    for module in root.modules():
        held = {n: p for n, p in module._parameters.items() if p is not None}
        for name, parameter in held.items():
            module._parameters[name] = homes[parameter]
            records[parameter].add_place(module, name)
        keys = {name: records[p].spec.key for name, p in held.items()}
        kind = (type(module), tuple(keys), module is root)
        if kind not in classes:
            classes[kind] = _sharded_class(
                type(module), tuple(keys), input_dtype if module is root else None, module is root
            )
        vars(module)[_STATE] = _ModuleState(state, gate, keys)
        module.__class__ = classes[kind]


def _home_shard(
    parameter: nn.Parameter, layout: ParamLayout, where: _Where, calls: Calls
) -> nn.Parameter:
    if where.mesh is None:
        return parameter
    local = _part(parameter.detach(), layout, where.home)
    home = HomeShard.of(
        local,
        layout,
        where.mesh,
        requires_grad=parameter.requires_grad,
        home=where.scope,
        calls=calls,
    )
    for name, value in vars(
        parameter
    ).items():  # marks that frameworks leave, such as "no weight decay"
        setattr(home, name, value)
    if parameter.grad is not None:
        grad = _part(parameter.grad, layout, where.home)
        home.grad = HomeShard.of(grad, layout, where.mesh, requires_grad=False, home=where.scope)
    return cast(nn.Parameter, home)  # isinstance says so too (HomeShard._is_param)


def _part(whole: Tensor, layout: ParamLayout, home: Home) -> Tensor:
    if layout.dim is None:
        return whole.clone()
    start = layout.local_start(home.node, home.place)
    rows = layout.local_shape(home.node, home.place)[layout.dim]
    return whole.narrow(layout.dim, start, rows).clone(memory_format=torch.contiguous_format)


def _sharded_class(
    cls: type[nn.Module], names: tuple[str, ...], input_dtype: torch.dtype | None, is_root: bool
) -> type:
    members: dict[str, Any] = {name: _gathering_property(name) for name in names}
    members["__reduce_ex__"] = _refuse_to_copy
    members["_apply"] = _apply_to_buffers(cls._apply)
    if cls.forward is not nn.Module.forward:
        members["forward"] = _forward_within_gate(cls, input_dtype, is_root)
    if is_root:
        members["__call__"] = _noted_call(cls)
    members["__module__"], members["__qualname__"] = cls.__module__, cls.__qualname__
    return type(cls.__name__, (cls,), members)


def _state(module: nn.Module) -> _ModuleState:
    state: Any = module._fcdp  # nn.Module's attributes are typed as tensors and modules
    found: _ModuleState = state
    return found


def _gathering_property(name: str) -> property:
    def get(self: nn.Module) -> Tensor:
        parameter = self._parameters.get(name)
        state = _state(self)
        if parameter is None:
            raise AttributeError(f"{type(self).__name__!r} object has no parameter {name!r}")
        # A checkpointed function that a backward runs again is outside of every forward.
        if not (torch.compiler.is_compiling() or state.gate.inside or is_recomputing()):
            return parameter
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        full: Tensor = UNSHARD(local, state.keys[name])
        return full

    return property(get)


def _forward_within_gate(
    cls: type[nn.Module], input_dtype: torch.dtype | None, is_root: bool
) -> Callable[..., Any]:
    inner: Callable[..., Any] = cls.forward

    # A graph break inside makes Dynamo leave this frame to Python, which then sets the gate for what
    # runs eagerly; without one the assignments cancel out and cost nothing.
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_root and not torch.compiler.is_compiling():
            _refuse_new_parameters(self)
        gate = _state(self).gate
        was_inside = gate.inside
        gate.inside = True
        try:
            if input_dtype is not None:
                args, kwargs = tree_map_only(Tensor, _cast_to(input_dtype), (args, kwargs))
            return inner(self, *args, **kwargs)
        finally:
            gate.inside = was_inside

    # Dynamo counts recompiles by code object: a shared one would add up those of all classes and models.
    own: Any = forward
    own.__code__ = own.__code__.replace(co_name=f"forward of {cls.__name__}")
    return forward


def _noted_call(cls: type[nn.Module]) -> Callable[..., Any]:
    inner: Callable[..., Any] = cls.__call__

    @functools.wraps(inner)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(self, *args, **kwargs)
        calls = _state(self).gate.calls
        was_inside = calls.inside
        calls.inside = True
        try:
            return inner(self, *args, **kwargs)
        finally:
            calls.inside = was_inside

    # The guards of what this calls must find that it has begun.
    skip_frame(call)
    return call


def _refuse_new_parameters(root: nn.Module) -> None:
    if _state(root).model.topology.ranks == 1:
        return
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UnshardedParameterError(
                f"parameter {name!r} was added or replaced after fcdp_compile.shard, so nothing would "
                "average its gradient; finish the model's structure, adapters too, and shard it then"
            )


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _apply_to_buffers(inner: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    # nn.Module._apply, which is what half(), to() and the like call, would put another tensor in the place
    # of every parameter, even where nothing changes, and cannot make a Parameter of a HomeShard.
    @functools.wraps(inner)
    def apply(
        self: nn.Module, convert: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> nn.Module:
        held = self._parameters
        for name, parameter in held.items():
            if isinstance(parameter, HomeShard):
                _refuse_to_convert(f"{type(self).__name__}.{name}", parameter, convert)
        homes = {n: p for n, p in held.items() if isinstance(p, HomeShard)}
        self._parameters = {n: p for n, p in held.items() if n not in homes}
        try:
            return inner(self, convert, *args, **kwargs)
        finally:
            self._parameters = {n: homes.get(n, self._parameters.get(n)) for n in held}

    return apply


def _refuse_to_convert(
    name: str, parameter: HomeShard, convert: Callable[[Tensor], Tensor]
) -> None:
    local = parameter.to_local().detach()
    converted = convert(local)
    if (converted.dtype, converted.device) != (local.dtype, local.device):
        raise FcdpError(
            f"{name} is sharded as {local.dtype} on {local.device} and cannot become {converted.dtype} on "
            f"{converted.device}; convert the model before fcdp_compile.shard"
        )


def _refuse_to_copy(self: nn.Module, protocol: Any) -> NoReturn:
    raise TypeError(
        f"a sharded {type(self).__name__} cannot be copied or pickled, its copy would share caches with it; "
        "save its state_dict with torch.distributed.checkpoint instead"
    )


def _state_dict_loaded(module: nn.Module, incompatible: Any) -> None:
    state_of(module).values_loaded()


def _warn_of_older_optimizers(parameters: list[nn.Parameter]) -> None:
    """Warn if a living optimizer owns parameters that are about to be replaced."""
    replaced = {id(p) for p in parameters}
    for candidate in gc.get_objects():
        if isinstance(type(candidate), type) and issubclass(type(candidate), Optimizer):
            owned = (p for group in candidate.param_groups for p in group["params"])
            if any(id(p) in replaced for p in owned):
                log.warning(
                    "%s was built before fcdp_compile.shard: its parameters are no longer the model's and "
                    "stepping it changes nothing; build the optimizer after sharding",
                    type(candidate).__name__,
                )
