"""What `shard` refuses, each with one sentence, before anything is communicated."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

_WRAPPERS = (FullyShardedDataParallel, DistributedDataParallel, nn.DataParallel)


def check_model(
    model: nn.Module,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    mesh: DeviceMesh | None,
) -> None:
    """Check that `shard` can shard the model.

    Raises: TypeError if it is no module or a dtype no floating point dtype; ValueError for a model that is
    wrapped or sharded already, has no parameters, or has one on `meta`, on another device than the mesh's,
    uninitialised, sparse, complex, quantised, or sharing memory with another.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard needs an nn.Module, not {type(model).__name__}")
    for option, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{option} must be a floating point torch.dtype, not {dtype!r}")
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}; pass the bare module to shard"
            )
        if "_fcdp" in vars(module):
            raise ValueError(
                f"{name or 'the model'} is sharded already; shard a model once, after its structure is final"
            )
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"{name or 'the model'} is of type {type(module).__name__}, which keeps a list of its own "
                "parameters that sharding cannot reach; use a cell-based or attention-based module"
            )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError("the model has no parameters; there is nothing to shard")
    for name, parameter in parameters.items():
        if (problem := _problem(parameter, mesh)) is not None:
            raise ValueError(f"parameter {name!r} {problem}")
    _check_memory(parameters)


def _check_memory(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that share memory: their home shards would be independent."""
    spans = []
    for name, p in parameters.items():
        if p.numel():
            elements = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            if elements < p.numel():
                raise ValueError(
                    f"parameter {name!r} of shape {tuple(p.shape)} holds each value several times (expand); "
                    "make it contiguous, or keep the smaller tensor as the parameter"
                )
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + elements * p.itemsize, name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise ValueError(
                f"parameters {name!r} and {other!r} share memory but are two parameters; tie them "
                "(assign one nn.Parameter to both) or give one of them memory of its own (clone)"
            )


def _problem(parameter: nn.Parameter, mesh: DeviceMesh | None) -> str | None:
    if isinstance(parameter, DTensor):
        return (
            "is a DTensor already (FSDP2 or tensor parallelism); pass a model with plain parameters"
        )
    if isinstance(parameter, UninitializedParameter):
        return "is not initialised; run one forward before shard"
    if parameter.is_meta:
        return "is on the meta device; materialise it (model.to_empty and load its weights) before shard"
    if parameter.layout is not torch.strided:
        return f"is sparse ({parameter.layout}); make it dense before shard"
    if parameter.is_complex():
        return (
            f"is complex ({parameter.dtype}); store its real view (torch.view_as_real) before shard"
        )
    if parameter.is_quantized:
        return f"is quantised ({parameter.dtype}); dequantise it before shard"
    if (
        mesh is not None
        and isinstance(mesh, DeviceMesh)
        and parameter.device.type != mesh.device_type
    ):
        return (
            f"is on {parameter.device} but the mesh is of {mesh.device_type} devices; "
            f"call model.to({mesh.device_type!r}) before shard"
        )
    return None
