"""`full(parameter)`: a sharded parameter as a whole tensor, in the training loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params import registry
from fcdp_compile.core.params.home_shard import HomeShard, as_dtensor, key_of
from fcdp_compile.core.params.inner_cut import whole_of
from fcdp_compile.core.params.mesh import process_count
from fcdp_compile.core.sharding.refusals import is_ignored
from fcdp_compile.errors import UnshardedParameterError
from fcdp_compile.runtime.model import ShardedModel


def full(parameter: Tensor) -> Tensor:
    """Return a parameter of a sharded model as a plain, whole tensor with gradients.

        loss = net(**batch).loss + 0.1 * fcdp_compile.full(model.head.weight).norm()

    The gradient is averaged over all ranks and scattered, like gradients of the model's own forward, whether
    the ranks compute the same with the parameter or each multiplies its own data by it.  If the cache has a
    valid copy, nothing crosses between nodes.  Every rank must call it, in the same order.

    Returns the whole parameter in the dtype that the model computes in (`param_dtype`), in its own memory.
    In one process, and for ignored_params, a parameter that is whole and has that dtype is returned itself.

    Raises: UnshardedParameterError if the tensor is not a parameter of a sharded model while several
    processes run; PlanMismatchError on every rank if ranks read different parameters.
    """
    if (key := key_of(parameter)) is not None:
        spec = registry.spec_of(key)
        if not isinstance(parameter, HomeShard):
            return parameter.to(spec.gather_dtype)
        part: Tensor = _Full.apply(parameter, key, spec.gather_dtype)  # type: ignore[no-untyped-call]
        model = registry.owner_of(key)
        assert isinstance(model, ShardedModel)
        return whole_of(part, spec.inner, model.topology.tp)
    if not isinstance(parameter, DTensor) and (process_count() == 1 or is_ignored(parameter)):
        return parameter
    kind = "a parameter" if isinstance(parameter, nn.Parameter) else "a tensor"
    raise UnshardedParameterError(
        f"full was given {kind} of shape {tuple(parameter.shape)} that belongs to no sharded model; give "
        "it a parameter as the model has it after fcdp_compile.shard, such as model.head.weight"
    )


class _Full(Function):
    """Gathers in forward, averages and scatters in backward, like `fcdp::unshard`, but for HomeShards."""

    @staticmethod
    def forward(ctx: Any, parameter: HomeShard, key: str, dtype: Any) -> Tensor:
        model = registry.owner_of(key)
        assert isinstance(model, ShardedModel)
        ctx.key, ctx.mesh = key, parameter.device_mesh
        model.unset.refuse("reading a parameter")
        return model.outside.read(key, parameter.values().to(model.device.torch), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        spec = registry.spec_of(ctx.key)
        shard = registry.owner_of(ctx.key).reduce_eagerly(ctx.key, grad)
        return as_dtensor(shard, spec, ctx.mesh), None, None
