"""`shard(model)`: replace every parameter by its home shard and its attribute by a property.

`sharded_class` explains the property.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params import registry
from fcdp_compile.core.params.gate import Gate
from fcdp_compile.core.params.home_shard import KEY, REPLACED, HomeShard
from fcdp_compile.core.params.inner_cut import InnerCut, local_part
from fcdp_compile.core.params.layout import ParamLayout
from fcdp_compile.core.params.mesh import Topology, topology_of
from fcdp_compile.core.params.packing import rows_of
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import (
    Home,
    fit_strategy,
    may_leave,
    on_hosts,
    param_spec,
    with_home,
)
from fcdp_compile.core.ranks.inner_mesh import data_mesh
from fcdp_compile.core.sharding.assignment import adapted, assign, chosen_strategy
from fcdp_compile.core.sharding.layers import StackRole, roles
from fcdp_compile.core.sharding.loads import watch_loads
from fcdp_compile.core.sharding.refusals import (
    Dtypes,
    check_choices,
    check_home_nodes,
    check_inner_dims,
    check_model,
    dtypes_of_statistics,
    ignore,
)
from fcdp_compile.core.sharding.replicas import agree_on_gpus, agree_on_model
from fcdp_compile.core.sharding.sharded_class import (
    STATE,
    ModuleState,
    gated_forward,
    sharded_class,
)
from fcdp_compile.devices import Device, current_device, device_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.quantised.weight import (
    QuantisedWeight,
    packed_parameters,
    unfolded,
)
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.home_memory import book, empty_home
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.strategy import Strategy
from fcdp_compile.strategy.home_nodes import home_nodes
from fcdp_compile.torch_compat.autograd import move_gradient_hooks

M = TypeVar("M", bound=nn.Module)

log = logging.getLogger(__name__)

_FULL = 0.75
"""The part of a GPU from which on "auto" offloads; gathered buckets and activations need the rest."""


def shard(
    model: M,
    mesh: DeviceMesh | None = None,
    *,
    strategy: str | Strategy = "fcdp",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    gradient_on: str | None = None,
    module_strategies: Mapping[str, str | Strategy] | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    buffer_dtype: torch.dtype | None = None,
    offload_params: bool | str = False,
    layers: str = "auto",
) -> M:
    """Shard `model` in place over all ranks of `mesh` and return it.

    Every parameter becomes a DTensor `nn.Parameter` that holds this rank's part; names, ties and
    requires_grad stay.  If values differ between ranks, rank 0's are taken.  Build the optimizer afterwards.
    The model may be on the host: only this rank's parts and the buffers are copied to the mesh's GPU.

    Parameters may be on meta, the same ones on every rank; until `materialize`, `load_pretrained` or
    `load_state_dict` gives them values, a forward or an optimizer step raises FcdpError, and buffers on meta
    stay there.

    mesh: from `make_mesh`; None in a single process.
    strategy: a preset's name (`fcdp_compile.strategy.PRESETS`) or a Strategy.
    param_dtype: of gathered parameters, computation and the model's inputs; by default each parameter's own.
    Parameters of layers with running statistics (BatchNorm) have the dtype of the statistics.
    reduce_dtype: the dtype that gradients are reduced in; by default param_dtype.
    reshard_after_forward: as in FSDP2, with strategy "fsdp" (`Strategy.fsdp`).
    gradient_on: where gradients wait within `no_sync`: "gpu", "host" or "auto"; by default the strategy's.
    module_strategies: other strategies by names of modules, where `*` stands for anything between two dots;
    a parameter gets the strategy of its innermost module that is named.
    ignored_params: parameters that stay whole on every rank, on the device where they are; fcdp does not
    average their gradients.
    buffer_dtype: the dtype that floating point buffers are cast to now; by default they stay as they are.
    offload_params: True: keep home shards, gradients and so optimizer states in host memory, where optimizers
    step; "auto": do so if they take more than three quarters of the smallest GPU of all ranks.
    layers: whether equal layers share a trace: "inline", "shared" or "auto" (`core.sharding.layers.roles`).

    Raises: ArgumentError, before anything is communicated, for arguments or a model that cannot be sharded,
    and on every rank if ranks build different models or NCCL would have to connect ranks that use one GPU.
    """
    check_choices(offload_params, layers)
    root, dtypes = model_of(model), Dtypes(param_dtype, reduce_dtype, buffer_dtype)
    check_inner_dims(root, mesh)
    given, mesh = mesh, None if mesh is None else data_mesh(mesh)
    chosen = chosen_strategy(strategy, reshard_after_forward)
    ignored = ignore(root, ignored_params)
    with unfolded(root, ignored):
        check_model(root, ignored, dtypes, mesh)
        topology = topology_of(mesh)
        chosen = adapted(chosen, reshard_after_forward, gradient_on, topology.ranks_per_node)
        names = {p: name for name, p in root.named_parameters() if name not in ignored}
        strategies = assign(root, names, chosen, module_strategies or {})
        state, records = _new_state(root, names, strategies, topology, dtypes, offload_params)
        agree_on_model(root, state, records, ignored, dtypes)
    _install(root, state, records, dtypes, given, roles(layers, root, records, state.records.alike))
    return model


def _new_state(
    root: nn.Module,
    names: Mapping[nn.Parameter, str],
    strategies: Mapping[nn.Parameter, Strategy],
    topology: Topology,
    dtypes: Dtypes,
    offload_params: bool | str,
) -> tuple[ShardedModel, dict[nn.Parameter, ParamRecord]]:
    """Make the run-time state of a model that is not sharded yet, and the records of its parameters."""
    device, number = _device_of(names, topology), registry.new_model_number()
    if offload_params is True:
        strategies = on_hosts(strategies, topology.position)
    specs = _specs(root, names, strategies, topology, dtypes, device, number)
    transport = Transport(topology, device)
    gpu_bytes = agree_on_gpus(topology, transport.collectives, device)
    if offload_params is True and device.shares_memory and topology.number == 0:
        log.warning("offload_params saves nothing here: the GPU's memory is the host's")
    held = [(spec, p.requires_grad) for p, spec in specs.items()]
    if offload_params == "auto" and not device.shares_memory and fills(gpu_bytes, held):
        strategies = on_hosts(strategies, topology.position, where_possible=True)
        specs = _specs(root, names, strategies, topology, dtypes, device, number)
    records = {p: ParamRecord(spec) for p, spec in specs.items()}
    state = ShardedModel(
        number,
        transport,
        records.values(),
        device,
        [spec.key for p, spec in specs.items() if p.is_meta],
        [name for name, b in root.named_buffers() if b.is_meta],
        gpu_bytes=gpu_bytes,
        accumulates_elsewhere=any(s.accumulates_on for s in strategies.values()),
    )
    return state, records


def _specs(
    root: nn.Module,
    names: Mapping[nn.Parameter, str],
    strategies: Mapping[nn.Parameter, Strategy],
    topology: Topology,
    dtypes: Dtypes,
    device: Device,
    number: int,
) -> dict[nn.Parameter, ParamSpec]:
    """The spec of each parameter.  number: the model's."""
    fitting = {
        s: fit_strategy(s, topology.position, shares_memory=device.shares_memory)
        for s in dict.fromkeys(strategies.values())
    }
    packed = packed_parameters(root)
    matrices = [p for p in matrices_of(root, names) if fitting[strategies[p]].whole_matrices]
    check_home_nodes(matrices, topology.tp)
    sizes = [(tuple(p.shape), p.element_size()) for p in matrices]
    homes = dict(zip(matrices, home_nodes(sizes, topology.nodes), strict=True))
    statistics = dtypes_of_statistics(root, dtypes)
    cuts = {p: None if topology.tp is None else InnerCut.of(p, topology.tp) for p in names}
    specs = {
        p: param_spec(
            f"m{number}:{name}",
            name,
            shape=tuple(local_part(p).shape),
            dtype=p.dtype,
            strategy=fitting[strategies[p]],
            mesh=topology.position,
            param_dtype=statistics.get(p, dtypes.param),
            reduce_dtype=dtypes.reduce,
            is_packed=p in packed,
            home_node=homes.get(p),
            inner=cuts[p],
            kept_dim=None if (cut := cuts[p]) is None else cut.kept_dim,
        )
        for p, name in names.items()
    }
    return {
        p: with_home(spec, device.torch, is_frozen=not p.requires_grad) for p, spec in specs.items()
    }


def matrices_of(root: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable matrices among these parameters, without embeddings.

    An embedding is used row by row, so no optimizer orthogonalises it, and often it is larger than the rest.
    """
    # Not `m.weight`, which in a sharded model gathers.
    embeddings = {
        m._parameters.get("weight") for m in root.modules() if isinstance(m, nn.Embedding)
    }
    return [p for p in parameters if p.ndim == 2 and p.requires_grad and p not in embeddings]


def fills(gpu_bytes: int | None, specs: Iterable[tuple[ParamSpec, bool]]) -> bool:
    """Whether home shards, gradients and Adam's moments take too much of a GPU; the same on all ranks.

    gpu_bytes: of the smallest GPU; None without GPUs, where nothing is too much.  specs: each with whether
    the parameter is trainable.
    """
    taken = sum(
        spec.taken_bytes(is_frozen=not is_trained)
        for spec, is_trained in specs
        if not may_leave(spec, is_frozen=not is_trained)
    )
    return gpu_bytes is not None and taken > _FULL * gpu_bytes


def model_of(model: nn.Module) -> nn.Module:
    """The module itself, for a compiled module, a plain one, or Fabric's wrapper of a sharded one."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    if isinstance(inner, nn.Module) and STATE not in vars(inner):
        wrapped = getattr(inner, "module", None)  # Fabric's name for it
        if isinstance(wrapped, nn.Module) and STATE in vars(wrapped):
            return wrapped
    return inner


def is_sharded(model: object) -> bool:
    """Whether an object is a sharded model, compiled or not."""
    return isinstance(model, nn.Module) and STATE in vars(model_of(model))


def state_of(model: nn.Module) -> ShardedModel:
    """The run-time state of a sharded model, compiled or not.

    Raises: ValueError if it is not sharded.
    """
    state: ModuleState | None = vars(model_of(model)).get(STATE)
    if state is None:
        raise ArgumentError("the model is not sharded; call fcdp_compile.shard(model, mesh) first")
    return state.model


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that a sharded model was sharded over; None for a model of a single process.

    Raises: ValueError if the model is not sharded.
    """
    return _meshes[state_of(model)]


_meshes: weakref.WeakKeyDictionary[ShardedModel, DeviceMesh | None] = weakref.WeakKeyDictionary()
"""The mesh of each model: further models over the same mesh share its lanes and host memory."""


def _install(
    root: nn.Module,
    state: ShardedModel,
    records: dict[nn.Parameter, ParamRecord],
    dtypes: Dtypes,
    mesh: DeviceMesh | None,
    parts: Mapping[nn.Module, StackRole],
) -> None:
    """Replace the model's parameters and classes, and register its hooks.

    parts: what modules are to equal layers that share a trace.
    """
    _meshes[state] = mesh
    specs = {r.spec: p.requires_grad for p, r in records.items()}
    book(specs, state.host_memory, state.collectives, state.pool, state.device)
    _replace(root, state, records, dtypes.param, parts)
    _move_buffers(root, state.device.torch, dtypes.buffer)
    for record in records.values():
        registry.register(record.spec.key, state)
    root.register_load_state_dict_post_hook(_state_dict_loaded)
    watch_loads(root, state)
    state.agree_on_host_memory()  # now that the whole parameters are gone


def _replace(
    root: nn.Module,
    state: ShardedModel,
    records: dict[nn.Parameter, ParamRecord],
    input_dtype: torch.dtype | None,
    parts: Mapping[nn.Module, StackRole],
) -> None:
    """Replace parameters by home shards, and the modules' classes by subclasses."""
    gate = Gate()
    homes = {
        p: _home_shard(p, r.spec, state.topology, gate, state.device) for p, r in records.items()
    }
    classes: dict[tuple[type, tuple[str, ...], bool, StackRole | None], type] = {}
    for module in root.modules():
        held = {n: p for n, p in module._parameters.items() if p is not None and p in homes}
        for name, parameter in held.items():
            module._parameters[name] = homes[parameter]
            records[parameter].add_place(module, name)
            setattr(parameter, REPLACED, records[parameter].spec.name)
        keys = {name: records[p].spec.key for name, p in held.items()}
        role = parts.get(module)
        kind = (type(module), tuple(keys), module is root, role)
        if kind not in classes:
            dtype = input_dtype if module is root else None
            classes[kind] = sharded_class(type(module), tuple(keys), dtype, module is root, role)
        vars(module)[STATE] = ModuleState(state, gate, keys)
        module.__class__ = classes[kind]
    if (own := vars(root).get("forward")) is not None:
        vars(root)["forward"] = gated_forward(own, gate, input_dtype)


def _device_of(parameters: Iterable[nn.Parameter], topology: Topology) -> Device:
    """The device of the home shards: the mesh's; without a mesh, the parameters' unless all are on meta."""
    kind = None if topology.home_mesh is None else topology.device_type
    for parameter in parameters:
        if not parameter.is_meta and kind in (None, parameter.device.type):
            return device_of(parameter.device)
    return current_device(kind)


def _home_shard(
    parameter: nn.Parameter, spec: ParamSpec, topology: Topology, gate: Gate, on: Device
) -> nn.Parameter:
    if topology.home_mesh is None:
        return _whole(parameter, spec.key, on.torch)
    layout, where = spec.layout, topology.home(spec.strategy.home)
    values = local_part(parameter.detach())
    # A frozen shard that the cache will let leave the device waits on the host from the start.
    is_away = may_leave(spec, is_frozen=not parameter.requires_grad)
    device = spec.home_device(on.torch)
    waits_on = torch.device("cpu") if is_away else device
    if spec.computes_on is not None:
        local = empty_home(spec, on)
        if not parameter.is_meta:
            local.copy_(rows_of(values, layout, where.node, where.place))
    elif parameter.is_meta:
        local = torch.empty(spec.local_shape, dtype=parameter.dtype, device=waits_on)
    else:
        local = _part(values, layout, where, waits_on)
    home = HomeShard.of(
        torch.empty_like(local, device=device) if is_away else local,
        spec,
        topology.home_mesh,
        requires_grad=parameter.requires_grad,
        gate=gate,
        key=spec.key,
    )
    if is_away and not home.release(local):
        home.held.copy_(local)
    _keep_marks(parameter, home)
    if parameter.grad is not None:
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
            grad = grad.redistribute(placements=parameter.placements)
        grad = _part(local_part(grad), layout, where, device)
        home.grad = HomeShard.of(grad, spec, topology.home_mesh, requires_grad=False)
    return cast(nn.Parameter, home)  # isinstance agrees (HomeShard._is_param)


def _whole(parameter: nn.Parameter, key: str, device: torch.device) -> nn.Parameter:
    """The home of a parameter in a single process: a new parameter with the same values.

    It is a new object so that mistakes show here as on several ranks, such as an optimizer that was built
    before `shard`.
    """
    values = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach()
    home = nn.Parameter(values, requires_grad=parameter.requires_grad)
    _keep_marks(parameter, home)
    setattr(home, KEY, key)
    home.grad = parameter.grad
    return home


def _keep_marks(parameter: nn.Parameter, home: Tensor) -> None:
    """Keep the attributes that frameworks set on a parameter, such as "no weight decay", and its hooks."""
    for name, value in vars(parameter).items():
        if name != REPLACED:  # set by another model that had this parameter too
            setattr(home, name, value)
    move_gradient_hooks(parameter, home)


def _part(whole: Tensor, layout: ParamLayout, home: Home, device: torch.device) -> Tensor:
    part = rows_of(whole, layout, home.node, home.place)
    return part.to(device, copy=True, memory_format=torch.contiguous_format)


def _move_buffers(root: nn.Module, device: torch.device, buffer_dtype: torch.dtype | None) -> None:
    """Move buffers to the device and cast floating point ones; a buffer of several modules stays shared."""
    made: dict[Tensor, Tensor] = {}
    for module in root.modules():
        # Scales keep their dtype: the library's kernels need it.
        cast = None if isinstance(module, QuantisedWeight) else buffer_dtype
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = cast if cast is not None and buffer.is_floating_point() else buffer.dtype
                where = buffer.device if buffer.is_meta else device
                module._buffers[name] = made.setdefault(buffer, buffer.to(where, dtype))


def _state_dict_loaded(module: nn.Module, incompatible: Any) -> None:
    state_of(module).validity.values_changed()
