"""The refusals of `shard`, each with one sentence, before anything is communicated.

Transformers and Accelerate leave marks on a model that they have spread over devices or ranks: a mesh for
tensor parallelism and FSDP2, a device map, hooks that bring values from the host or from disk.  A model whose
values are elsewhere has parameters on meta, which `shard` would take for parameters that get their values
later.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fcdp_compile.core.params.inner_cut import check_declared, check_inner, is_declared, local_part
from fcdp_compile.core.ranks.inner_mesh import CONTEXT, CUT, Cut, cp_of, tp_mesh_of
from fcdp_compile.core.sharding.references import find_references
from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.quantised.weight import packed_parameters
from fcdp_compile.strategy import Strategy
from fcdp_compile.strategy.formats import Format
from fcdp_compile.torch_compat import FakeTensor, NormWithStatistics
from fcdp_compile.torch_compat.distributed import calls_dispatch_of_subclasses

log = logging.getLogger(__name__)

_IGNORED = "_fcdp_ignored"

_WRAPPERS = (FullyShardedDataParallel, DistributedDataParallel, nn.DataParallel)


class Dtypes(NamedTuple):
    """The `…_dtype` arguments of `shard`."""

    param: torch.dtype | None
    reduce: torch.dtype | None
    buffer: torch.dtype | None


def dtypes_of_statistics(model: nn.Module, dtypes: Dtypes) -> dict[nn.Parameter, torch.dtype]:
    """The dtypes of running statistics, by the parameters of their layers; torch mixes no dtypes there.

    FSDP1, too, leaves such layers out of mixed precision.
    """
    return {
        parameter: dtypes.buffer or module.running_mean.dtype
        for module in model.modules()
        if isinstance(module, NormWithStatistics) and module.running_mean is not None
        for parameter in module.parameters(recurse=False)
    }


def check_model(
    model: nn.Module,
    ignored: Collection[str],
    dtypes: Dtypes,
    mesh: DeviceMesh | None,
) -> None:
    """Check that `shard` can shard the model.

    ignored: names of parameters that `shard` leaves alone.

    Raises: TypeError if the model is not a module or a dtype is not a floating point dtype; ValueError for a
    model that is wrapped or sharded already or has no parameters; for a parameter that is neither on the
    mesh's device nor on the host (`meta` is fine, but not for ignored ones), is uninitialised, sparse,
    complex or quantised, is of a class of its own, gets sparse gradients or gradients of another dtype, or
    shares memory with another; for a module that holds a
    parameter in a list, closure or the like (`references`); for an adapter that exchanges parameters; for a
    model that Transformers or Accelerate has spread (`check_loaded`).
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"shard needs an nn.Module, not {type(model).__name__}")
    for option, dtype in dtypes._asdict().items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(
                f"{option}_dtype must be a floating point torch.dtype, not {dtype!r}"
            )
    _check_modules(model)
    check_loaded(model)
    parameters = {n: p for n, p in model.named_parameters() if n not in ignored}
    if not parameters:
        raise ArgumentError("the model has no parameters; there is nothing to shard")
    packed = packed_parameters(model)
    for name, parameter in parameters.items():
        if (problem := _problem(parameter, mesh, is_packed=parameter in packed)) is not None:
            raise ArgumentError(f"parameter {name!r} {problem}")
    for name, parameter in model.named_parameters():
        if name in ignored and parameter.is_meta:
            raise ArgumentError(
                f"parameter {name!r} is in ignored_params and on meta, and fcdp gives no values to "
                "ignored parameters; give it values before shard"
            )
    _check_memory({n: p for n, p in parameters.items() if not p.is_meta})
    _check_references(model, parameters)


def _check_modules(model: nn.Module) -> None:
    exchanging = _exchanging()
    for name, module in model.named_modules():
        if isinstance(module, exchanging):
            raise ArgumentError(
                f"{name or 'the model'} has an adapter of PEFT ({type(module).__name__}) that puts another "
                "tensor in a parameter's place in every forward, and no tensor can take the place of a "
                "sharded parameter; give adapters to layers such as nn.Linear (target_modules), not to "
                "parameters (target_parameters) or nn.MultiheadAttention"
            )
        if isinstance(module, _WRAPPERS):
            raise ArgumentError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}; pass the bare module to shard"
            )
        if "_fcdp" in vars(module):
            raise ArgumentError(
                f"{name or 'the model'} is sharded already; shard a model once, after its structure is final"
            )
        if _makes_sparse_gradients(module):
            raise ArgumentError(
                f"{name or 'the model'} ({type(module).__name__}) makes sparse gradients, and fcdp averages "
                "dense gradients; set its attribute sparse to False before shard"
            )


def _exchanging() -> tuple[type[nn.Module], ...]:
    """The modules of PEFT that exchange a parameter in their forward, if PEFT has been imported."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    found = (getattr(layers, name, None) for name in ("MultiheadAttention", "ParamWrapper"))
    return tuple(kind for kind in found if kind is not None)


def _makes_sparse_gradients(module: nn.Module) -> bool:
    if not (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse):
        return False
    return module.weight.requires_grad and not is_ignored(module.weight)


def ignore(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[str]:
    """Mark parameters that `shard` leaves alone; returns their names in the model's order.

    The mark means that fcdp need not average the gradient; another model's `shard`, or a failed one, may have
    set the mark already.

    Raises: TypeError for an object that is not a parameter, ValueError for a parameter of another model.
    """
    if not isinstance(model, nn.Module):
        return []  # check_model will raise
    names = {id(p): name for name, p in model.named_parameters()}
    marked = list(parameters)
    for parameter in marked:
        if not isinstance(parameter, nn.Parameter):
            raise ArgumentError(
                f"ignored_params must be parameters of the model, not {type(parameter).__name__}"
            )
        if id(parameter) not in names:
            raise ArgumentError(
                f"ignored_params has a parameter of shape {tuple(parameter.shape)} that is not in the "
                "model; pass parameters that the model has now"
            )
    for parameter in marked:
        setattr(parameter, _IGNORED, True)
    # In the model's order: FSDP2's option of that name takes a set, whose order differs between ranks.
    given = {id(p) for p in marked}
    return [name for i, name in names.items() if i in given]


def is_ignored(parameter: object) -> bool:
    """Whether `shard` was told to leave a parameter alone."""
    return getattr(parameter, _IGNORED, False)


def _check_references(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse references that would go on using a parameter's old values, and warn of those that may."""
    for found in find_references(model, parameters):
        where = f"{found.owner} keeps parameter {found.parameter!r} in its {found.path}"
        if not found.is_copy:
            raise ArgumentError(
                f"{where}, where shard cannot replace it, so code that reads it there would use values "
                "that are never trained; read the parameter through the module that it belongs to "
                "(model.layer.weight) where it is used; a hook may also be set after shard"
            )
        log.warning(
            "%s, which shares memory with the parameter now, but will not after shard", where
        )


def _check_memory(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that share memory: their home shards would be independent."""
    spans = []
    for name, parameter in parameters.items():
        p = local_part(parameter)
        if p.numel() and not isinstance(p, FakeTensor):  # fake tensors have no memory
            elements = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            if elements < p.numel():
                raise ArgumentError(
                    f"parameter {name!r} of shape {tuple(p.shape)} holds each value several times (expand); "
                    "make it contiguous, or keep the smaller tensor as the parameter"
                )
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + elements * p.itemsize, name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise ArgumentError(
                f"parameters {name!r} and {other!r} share memory but are two parameters; tie them "
                "(assign one nn.Parameter to both) or give one of them memory of its own (clone)"
            )


def _problem(parameter: nn.Parameter, mesh: DeviceMesh | None, *, is_packed: bool) -> str | None:
    tp = tp_mesh_of(mesh)
    problem = (
        check_inner(parameter, tp)
        if isinstance(parameter, DTensor)
        else check_declared(parameter, tp)
    )
    if problem is not None:
        return problem
    if isinstance(parameter, UninitializedParameter):
        return "is not initialised; run one forward before shard"
    if parameter.layout is not torch.strided:
        return f"is sparse ({parameter.layout}); make it dense before shard"
    if parameter.is_complex():
        return (
            f"is complex ({parameter.dtype}); store its real view (torch.view_as_real) before shard"
        )
    if parameter.is_quantized:
        return f"is quantised ({parameter.dtype}); dequantise it before shard"
    if (
        type(parameter) is not nn.Parameter
        and nn.Parameter in type(parameter).__mro__
        and not is_packed
    ):
        return (
            f"is of class {type(parameter).__name__}, and a sharded parameter would not have the methods of "
            "that class; replace it by an nn.Parameter before shard"
        )
    if parameter.grad_dtype not in (None, parameter.dtype):
        return (
            f"asks for a gradient in {parameter.grad_dtype} (grad_dtype), but a sharded parameter's gradient "
            f"has the parameter's dtype; keep the parameter in {parameter.grad_dtype} and give shard "
            f"param_dtype={parameter.dtype}"
        )
    # Of a parameter on meta or on the host, the home shard is made on the mesh's device.  Quantised weights
    # are not moved from the host, because libraries pack them differently for it.
    can_move = parameter.is_meta or (parameter.device.type == "cpu" and not is_packed)
    if isinstance(mesh, DeviceMesh) and parameter.device.type != mesh.device_type and not can_move:
        return (
            f"is on {parameter.device} but the mesh is of {mesh.device_type} devices; "
            f"call model.to({mesh.device_type!r}) before shard"
        )
    return None


def check_inner_dims(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Refuse a model that does not fit a mesh whose ranks share sequences or parameters.

    The model must know that ranks share sequences.  Parameters that were added after `tensor_parallel`, such
    as adapters, are cut by nobody: each rank would train other values of what all take for one.

    Raises: ArgumentError.
    """
    if cp_of(mesh) > 1 and not any(CONTEXT in vars(module) for module in root.modules()):
        raise ArgumentError(
            f"mesh has cp={cp_of(mesh)}, but the attention of {type(root).__name__} sees one rank's part of "
            "the sequences; call fcdp_compile.context_parallel first, or make the mesh without cp"
        )
    modules = root.modules() if isinstance(root, nn.Module) else ()  # check_model will raise
    for module in modules:
        if (cut := vars(module).get(CUT)) is not None:
            _check_cut(module, cut)


def _check_cut(module: nn.Module, cut: Cut) -> None:
    """Raises: ArgumentError for a model that is no longer what `tensor_parallel` has made."""
    if cut.model != id(module):
        raise ArgumentError(
            f"{type(module).__name__} was copied after fcdp_compile.tensor_parallel, and computes with the "
            "parameters of the model that it was copied from; copy first, then call tensor_parallel for each"
        )
    named = dict(module.named_parameters())
    if (name := next((n for n in named if n not in cut.names), None)) is not None:
        raise ArgumentError(
            f"{type(module).__name__} got parameter {name!r} after fcdp_compile.tensor_parallel; call "
            "tensor_parallel again, which cuts the adapters"
        )
    lost = (n for n, p in named.items() if n in cut.declared and not is_declared(p))
    if (name := next(lost, None)) is not None:
        raise ArgumentError(
            f"parameter {name!r} was replaced after fcdp_compile.tensor_parallel (to_empty, "
            "load_state_dict(assign=True)), so its gradient would not be summed; give the parameters values "
            "in place, or use load_pretrained or materialize after shard"
        )


def check_choices(offload_params: object, layers: object) -> None:
    """Refuse unknown values of these arguments.

    Raises: ArgumentError.
    """
    if not isinstance(offload_params, bool) and offload_params != "auto":
        raise ArgumentError(f"offload_params must be True, False or 'auto', not {offload_params!r}")
    if layers not in ("auto", "inline", "shared"):
        raise ArgumentError(f"layers must be 'auto', 'inline' or 'shared', not {layers!r}")


def check_home_nodes(matrices: Sequence[nn.Parameter], tp: DeviceMesh | None) -> None:
    """Raises: ArgumentError for matrices that get home nodes, where they cannot have them."""
    if matrices and tp is not None:
        raise ArgumentError(
            "strategy modifier 'matrix' keeps whole matrices on a node, but ranks of \"tp\" have parts of "
            "them; leave 'matrix' out, or make the mesh without tp"
        )
    if matrices and not calls_dispatch_of_subclasses():
        raise ArgumentError(
            f"strategy modifier 'matrix' needs torch 2.12 or newer, not {torch.__version__}; use a newer "
            "torch, or leave 'matrix' out"
        )


def warn_of_torch() -> None:
    """Warn if this version of torch gives wrong results."""
    if not calls_dispatch_of_subclasses():
        log.warning(
            "torch %s ignores what fcdp does for operations on sharded parameters: .item() of a norm or "
            "sum of a parameter or gradient gives only this rank's part; use torch 2.12 or newer, or compute "
            "it from the whole tensor, such as p.grad.full_tensor().norm()",
            torch.__version__,
        )


def warn_of_no_frozen(found: Iterable[tuple[Strategy, bool]]) -> None:
    """Warn of a format for frozen parameters if none is frozen; found: strategies and requires_grad."""
    pairs = [pair for pair in found if pair[0].frozen_format is not Format.FULL]
    used = {strategy for strategy, requires_grad in pairs if not requires_grad}
    for strategy in dict.fromkeys(strategy for strategy, _ in pairs if strategy not in used):
        log.warning(
            "strategy %r sends and keeps frozen parameters in %s, but none of its parameters is frozen, so "
            "the format changes nothing; freeze the base model, or leave the modifier out",
            strategy.name,
            strategy.frozen_format.value,
        )


_FSDP = "ACCELERATE_USE_FSDP"


def check_loaded(model: nn.Module) -> None:
    """Refuse a model that is spread over devices or ranks, or that FSDP's launch settings have loaded.

    A device map with one device is fine; quantised loading sets one.

    Raises: ArgumentError.
    """
    if os.environ.get(_FSDP, "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ArgumentError(
            f"{_FSDP} is set, as accelerate launch does for a configuration with FSDP, so from_pretrained "
            "leaves values out on some ranks for FSDP to fill in, and two systems cannot shard one model; "
            "choose no FSDP in accelerate config, or start the script with torchrun"
        )
    for name, module in model.named_modules():
        if (problem := _spread(module)) is not None:
            raise ArgumentError(f"{name or 'the model'} {problem}")


def _spread(module: nn.Module) -> str | None:
    own = vars(module)
    if isinstance(mesh := own.get("_device_mesh"), DeviceMesh) and mesh.size() > 1:
        sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
        spread = ", ".join(f"{name}={size}" for name, size in sizes if size > 1)
        return (
            f"was loaded with tp_plan or distributed_config, which spread it over ranks ({spread}); load it "
            "without these arguments, because shard spreads it"
        )
    device_map = own.get("hf_device_map")
    if isinstance(device_map, Mapping):
        devices = list(dict.fromkeys(map(_device_name, device_map.values())))
        if len(devices) > 1 or "disk" in devices:
            return (
                f"was loaded with a device_map over {', '.join(devices)}, but each rank of data parallel "
                "training has one device; leave device_map out or give it one device, or load the model "
                "with fcdp_compile.load_pretrained if it is too large for one device"
            )
    if _offloads(own.get("_hf_hook")):
        return (
            "is offloaded by Accelerate, whose hooks bring values to the device only while it computes; call "
            "accelerate.hooks.remove_hook_from_submodules(model), or do not offload the model, because fcdp "
            "moves parameters itself"
        )
    return None


def _device_name(device: Any) -> str:
    """One name for a device that a map may give as a number, a text or a torch.device."""
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    return "cuda:0" if name == "cuda" else name


def _offloads(hook: Any) -> bool:
    """Whether a hook of Accelerate, or one of several in a SequentialHook, offloads."""
    return any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ())))
