"""`shard(model)`: replace every parameter by its home shard and its attribute by a property.

What the property does is in `sharded_class`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile import registry
from fcdp_compile.assignment import assign
from fcdp_compile.devices import Device, current_device, device_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.gpus import agree_on_gpus
from fcdp_compile.home_shard import KEY, REPLACED, Calls, HomeShard, rows_of
from fcdp_compile.layout import ParamLayout
from fcdp_compile.loads import watch_loads
from fcdp_compile.mesh import Topology, topology_of
from fcdp_compile.registry import ParamSpec
from fcdp_compile.replicas import agree_on_replicas
from fcdp_compile.runtime import numa
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.record import ParamRecord
from fcdp_compile.shardable import check_model, ignore, warn_of_torch
from fcdp_compile.sharded_class import STATE, Gate, ModuleState, gated_forward, sharded_class
from fcdp_compile.specs import Home, fit_strategy, param_spec
from fcdp_compile.strategy import Strategy

M = TypeVar("M", bound=nn.Module)


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
    bind_cores: bool = True,
) -> M:
    """Shard `model` in place over all ranks of `mesh` and return it.

    Every parameter becomes a DTensor `nn.Parameter` that holds this rank's part; names, ties and
    requires_grad stay.  Where ranks hold different values rank 0's are taken.  Build the optimizer after.

    Parameters may be on meta, all or some, the same ones on every rank: their home shards then have memory on
    the mesh's device (without a mesh: the GPU if there is one) but no values, and a forward or an optimizer
    step raises FcdpError until `materialize`, `load_pretrained` or `load_state_dict` has given them some.
    Buffers on meta stay there until then.

    mesh: from `make_mesh`; None in a single process.
    strategy: a preset's name (`fcdp_compile.strategy.PRESETS`) or a Strategy.
    param_dtype: what floating point parameters are gathered and computed in, and floating point inputs of
    the model are cast to; by default each parameter's own dtype.  Home shards keep theirs.
    reduce_dtype: what their gradients are reduced in; by default param_dtype.
    reshard_after_forward: as FSDP2's, with strategy "fsdp" (`Strategy.fsdp`).
    gradient_on: where gradients wait within `no_sync`: "gpu", "host", or "auto", on the GPU while the planned
    step has room for them; by default as the strategy says, and with those of module_strategies in any case.
    module_strategies: other strategies for the parameters of some modules, by the modules' names, in which
    `*` stands for anything between two dots: {"model.embed_tokens": "ddp", "model.layers.*.mlp": "mics"}; the
    innermost module with a strategy decides (`assignment`).
    ignored_params: parameters that stay as they are: whole on every rank, their gradients averaged by nobody.
    torch's clip_grad_norm_ and GradScaler do not take them together with DTensors.
    buffer_dtype: what floating point buffers are cast to, here and now; by default they stay.
    bind_cores: for a model on a GPU of a machine with several NUMA nodes, let this process, unless somebody
    bound it before, run on the cores of the GPU's node alone.

    Raises: ValueError or TypeError, before anything is communicated, for a mesh without "inter" and
    "intra", an unknown strategy or module, tied parameters with two strategies, and a model that cannot be
    sharded (`shardable.check_model`); ValueError on every rank if ranks build different models, or if NCCL is
    to connect ranks that use one GPU.
    """
    root = model_of(model)
    chosen = Strategy.parse(strategy)
    ignored = ignore(root, ignored_params)
    check_model(root, ignored, (param_dtype, reduce_dtype, buffer_dtype), mesh)
    if reshard_after_forward is not None and chosen != Strategy.parse("fsdp"):
        raise ArgumentError(
            f"reshard_after_forward is an option of strategy 'fsdp', not of {chosen.name!r}, which says "
            "itself what is kept; leave it out"
        )
    topology = topology_of(mesh)
    if reshard_after_forward is not None:
        chosen = Strategy.fsdp(reshard_after_forward, topology.ranks_per_node)
    if gradient_on is not None:
        chosen = chosen.with_gradients_on(gradient_on)
    names = {p: name for name, p in root.named_parameters() if name not in ignored}
    assigned = assign(root, names, chosen, module_strategies or {})
    fitting = {s: fit_strategy(s, topology.position) for s in dict.fromkeys(assigned.values())}
    number = registry.new_model_number()
    records = {
        p: ParamRecord(
            param_spec(
                f"m{number}:{name}",
                name,
                shape=tuple(p.shape),
                dtype=p.dtype,
                strategy=fitting[assigned[p]],
                mesh=topology.position,
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
            )
        )
        for p, name in names.items()
    }
    device = _device_of(names, topology)
    if bind_cores:
        numa.bind_process(numa.node_of(device))
    named = [(name, p) for p, name in names.items()]
    buffers = list(root.named_buffers())
    awaited = [r.spec.key for p, r in records.items() if p.is_meta]
    awaited_buffers = [name for name, b in buffers if b.is_meta]
    state = ShardedModel(
        number,
        topology,
        records.values(),
        device,
        awaited,
        awaited_buffers,
        accumulates_elsewhere=any(s.accumulates_on for s in assigned.values()),
    )
    state.gpu_bytes = agree_on_gpus(topology, state.collectives, device)
    if topology.ranks > 1 and topology.node == topology.place == 0:
        warn_of_torch()
    description = [f"param_dtype {param_dtype}, reduce_dtype {reduce_dtype}, {buffer_dtype=}"]
    description += [f"{name}: ignored" for name in ignored]
    description += [f"{r.spec.name}: {r.spec.strategy}" for r in records.values()]
    description += [
        f"{name}: {t.dtype} {tuple(t.shape)}, requires_grad={t.requires_grad}"
        + (", on meta" if t.is_meta else "")
        for name, t in [*named, *buffers]
    ]
    present = [(name, t) for name, t in [*named, *buffers] if not t.is_meta]
    agree_on_replicas(topology, state.collectives, description, present)
    state.make_groups()
    _install(root, state, records, param_dtype)
    if buffer_dtype is not None:
        _cast_buffers(root, buffer_dtype)
    for record in records.values():
        registry.register(record.spec.key, state)
    root.register_load_state_dict_post_hook(_state_dict_loaded)
    watch_loads(root, state)
    state.agree_on_host_memory()  # now that the whole parameters are gone
    return model


def model_of(model: nn.Module) -> nn.Module:
    """The module itself, whether it was given compiled or not."""
    return getattr(model, "_orig_mod", model)


def state_of(model: nn.Module) -> ShardedModel:
    """The run-time state of a sharded model, compiled or not.

    Raises: ValueError if it is not sharded.
    """
    state = vars(model_of(model)).get(STATE)
    if state is None:
        raise ArgumentError("the model is not sharded; call fcdp_compile.shard(model, mesh) first")
    found: ShardedModel = state.model
    return found


def _install(
    root: nn.Module,
    state: ShardedModel,
    records: dict[nn.Parameter, ParamRecord],
    input_dtype: torch.dtype | None,
) -> None:
    """Put home shards in the place of parameters and subclasses in the place of the modules' classes."""
    gate = Gate()
    homes = {
        p: _home_shard(p, r.spec, state.topology, gate.calls, state.device.torch)
        for p, r in records.items()
    }
    classes: dict[tuple[type, tuple[str, ...], bool], type] = {}
    for module in root.modules():
        held = {n: p for n, p in module._parameters.items() if p is not None and p in homes}
        for name, parameter in held.items():
            module._parameters[name] = homes[parameter]
            records[parameter].add_place(module, name)
            setattr(parameter, REPLACED, records[parameter].spec.name)
        keys = {name: records[p].spec.key for name, p in held.items()}
        kind = (type(module), tuple(keys), module is root)
        if kind not in classes:
            classes[kind] = sharded_class(
                type(module), tuple(keys), input_dtype if module is root else None, module is root
            )
        vars(module)[STATE] = ModuleState(state, gate, keys)
        module.__class__ = classes[kind]
    if (own := vars(root).get("forward")) is not None:
        vars(root)["forward"] = gated_forward(own, gate, input_dtype)


def _device_of(parameters: Iterable[nn.Parameter], topology: Topology) -> Device:
    """Where home shards are: where the parameters are, or where the mesh is if all of them are on meta."""
    if (device := next((p.device for p in parameters if not p.is_meta), None)) is not None:
        return device_of(device)
    return current_device(None if topology.home_mesh is None else topology.device_type)


def _home_shard(
    parameter: nn.Parameter, spec: ParamSpec, topology: Topology, calls: Calls, device: torch.device
) -> nn.Parameter:
    layout, scope = spec.layout, spec.strategy.home
    if topology.home_mesh is None:
        return _whole(parameter, spec.key, device)
    where = topology.home(scope)
    if parameter.is_meta:
        local = torch.empty(spec.local_shape, dtype=parameter.dtype, device=device)
    else:
        local = _part(parameter.detach(), layout, where)
    home = HomeShard.of(
        local,
        layout,
        topology.home_mesh,
        requires_grad=parameter.requires_grad,
        home=scope,
        calls=calls,
        key=spec.key,
    )
    _keep_marks(parameter, home)
    if parameter.grad is not None:
        grad = _part(parameter.grad, layout, where)
        home.grad = HomeShard.of(grad, layout, topology.home_mesh, requires_grad=False, home=scope)
    return cast(nn.Parameter, home)  # isinstance says so too (HomeShard._is_param)


def _whole(parameter: nn.Parameter, key: str, device: torch.device) -> nn.Parameter:
    """The home of a parameter in a single process: another one with the same values.

    Another one, so that what does not work on several ranks does not work here: an optimizer that was built
    before `shard`, for one.
    """
    values = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach()
    home = nn.Parameter(values, requires_grad=parameter.requires_grad)
    _keep_marks(parameter, home)
    setattr(home, KEY, key)
    home.grad = parameter.grad
    return home


def _keep_marks(parameter: nn.Parameter, home: Tensor) -> None:
    """Keep what frameworks note on a parameter, such as "no weight decay"."""
    for name, value in vars(parameter).items():
        if name != REPLACED:  # of another model that had the parameter, too
            setattr(home, name, value)


def _part(whole: Tensor, layout: ParamLayout, home: Home) -> Tensor:
    part = rows_of(whole, layout, home.node, home.place)
    return part.clone(memory_format=torch.contiguous_format)


def _cast_buffers(root: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating point buffers; one that several modules share stays shared."""
    made: dict[int, Tensor] = {}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = made.setdefault(id(buffer), buffer.to(dtype))


def _state_dict_loaded(module: nn.Module, incompatible: Any) -> None:
    state_of(module).values_loaded()
