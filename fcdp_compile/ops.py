"""The ops of fcdp: those that tracing sees, and the explicit ops by which the passes replace two of these.

`fcdp::unshard` and `fcdp::reduce_grad` are real ops: correct when run eagerly, so that a graph break, a
skipped frame or an uncompiled model is slow and never wrong.  `fcdp::unshard_given` and
`fcdp::reduce_given` do the same, and no pass replaces them: a graph has them where it reads values that are
not the model's own (`passes.set_apart`).  The explicit ops mark places in a lowered graph; only the executor
can run them, so calling one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Node

from fcdp_compile.core.params import registry
from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Kind


@torch.library.custom_op("fcdp::unshard", mutates_args=())
def unshard(shard: Tensor, key: str, dtype: torch.dtype | None = None) -> Tensor:
    """Gather the parameter `key` from every rank's `shard`, in the full shape.

    dtype: of the result; by default the gather dtype (`passes.narrow`).
    """
    spec = registry.spec_of(key)
    registry.check_shard(spec, shard)
    whole = registry.owner_of(key).gather_eagerly(key, shard)
    return whole if dtype in (None, whole.dtype) else whole.to(dtype)


@unshard.register_fake
def _fake_unshard(shard: Tensor, key: str, dtype: torch.dtype | None = None) -> Tensor:
    spec = registry.spec_of(key)
    registry.check_shard(spec, shard)
    device = spec.computes_on or shard.device
    return shard.new_empty(spec.layout.shape, dtype=dtype or spec.gather_dtype, device=device)


@torch.library.custom_op("fcdp::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, key: str) -> Tensor:
    """Average the full gradient of parameter `key` over all ranks; returns this rank's shard of it."""
    return registry.owner_of(key).reduce_eagerly(key, grad)


@reduce_grad.register_fake
def _fake_reduce_grad(grad: Tensor, key: str) -> Tensor:
    spec = registry.spec_of(key)
    device = spec.home_device(grad.device)
    return grad.new_empty(spec.local_shape, dtype=spec.home_dtype, device=device)


@torch.library.custom_op("fcdp::accumulate_grad", mutates_args=())
def accumulate_grad(grad: Tensor, key: str) -> Tensor:
    """Let the full gradient of parameter `key` wait for the next micro-batch's; returns negative zeros.

    Only backwards that run eagerly call it; graphs have variants for that.
    """
    return registry.owner_of(key).accumulate_eagerly(key, grad)


accumulate_grad.register_fake(_fake_reduce_grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.key = inputs[1]
    is_traced = type(output) is not Tensor
    ctx.accumulates = not is_traced and registry.owner_of(ctx.key).accumulates_eagerly(ctx.key)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if grad.layout is not torch.strided:
        raise FcdpError(
            f"the gradient of parameter {ctx.key.partition(':')[2]!r} is sparse, and fcdp averages "
            "dense gradients; pass sparse=False where the forward looks rows up"
        )
    reduce = torch.ops.fcdp.accumulate_grad if ctx.accumulates else torch.ops.fcdp.reduce_grad
    return reduce(grad, ctx.key), None, None


unshard.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("fcdp::unshard_given", mutates_args=())
def unshard_given(shard: Tensor, key: str, dtype: torch.dtype | None = None) -> Tensor:
    """Gather a value of the parameter `key` that is not the model's own from every rank's `shard`."""
    spec = registry.spec_of(key)
    registry.check_shard(spec, shard)
    return registry.owner_of(key).gather(key, shard, dtype or spec.gather_dtype)


@torch.library.custom_op("fcdp::reduce_given", mutates_args=())
def reduce_given(grad: Tensor, key: str) -> Tensor:
    """Average the full gradient of a value from `unshard_given` over all ranks; returns this rank's shard."""
    return registry.owner_of(key).reduce_eagerly(key, grad)


unshard_given.register_fake(_fake_unshard)
reduce_given.register_fake(_fake_reduce_grad)


@torch.library.custom_op("fcdp::require_grad", mutates_args=())
def require_grad(tensor: Tensor, anchor: Tensor) -> Tensor:
    """The same values, which require a gradient because `anchor` does; neither input gets a gradient.

    Compiled graphs do without it (`Compute.decompositions`): it is there while Dynamo and autograd trace.
    """
    return tensor.clone()


@require_grad.register_fake
def _fake_require_grad(tensor: Tensor, anchor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


require_grad.register_autograd(lambda ctx, grad: (None, None))

UNSHARD = torch.ops.fcdp.unshard.default
REQUIRE_GRAD = torch.ops.fcdp.require_grad.default
REDUCE_GRAD = torch.ops.fcdp.reduce_grad.default
GIVEN = {
    UNSHARD: torch.ops.fcdp.unshard_given.default,
    REDUCE_GRAD: torch.ops.fcdp.reduce_given.default,
}
"""For each op that passes replace, the op for other values, which they leave alone."""


def _only_in_a_graph(name: str) -> NoReturn:
    raise FcdpError(f"{name} is a step of a lowered graph; only the executor can run it")


def inter_all_gather(home: Tensor, bucket: int) -> Any:
    """Home buffer [S] of every node's rank at this place -> node shard [N*S], pending."""
    _only_in_a_graph("inter_all_gather")


def intra_all_gather(node: Tensor, bucket: int) -> Any:
    """Node shard [N*S] of every rank of this node -> full buffer [g*N*S], pending."""
    _only_in_a_graph("intra_all_gather")


def intra_own_all_gather(home: Tensor, bucket: int) -> Any:
    """Home buffer [S] of every rank of this node -> the node's home buffers [g*S], pending."""
    _only_in_a_graph("intra_own_all_gather")


def intra_rest_all_gather(node: Tensor, own: Tensor, bucket: int) -> Any:
    """Node shard [N*S] of this node's ranks, `own` [g*S] gathered before -> full buffer [g*N*S], pending."""
    _only_in_a_graph("intra_rest_all_gather")


def store(node: Tensor, bucket: int) -> Any:
    """Put the node shard into the bucket's tier; pending."""
    _only_in_a_graph("store")


def load(bucket: int) -> Any:
    """Take the node shard [N*S] out of the bucket's tier; pending."""
    _only_in_a_graph("load")


def load_home(*shards: Tensor, bucket: int) -> Any:
    """Home shards in host memory -> home buffer [S] on the device, pending."""
    _only_in_a_graph("load_home")


def wait(pending: Any, bucket: int) -> Any:
    """The result of a pending step."""
    _only_in_a_graph("wait")


def free(*buffers: Tensor, bucket: int) -> None:
    """Mark the end of the last use of a gathered bucket."""
    _only_in_a_graph("free")


def intra_reduce_scatter(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Gradients [g*N*S] of every rank of this node -> the average of this place's part [N*S], pending."""
    _only_in_a_graph("intra_reduce_scatter")


def inter_reduce_scatter(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Node's average [N*S] of every node's rank at this place -> the average of this slot [S], pending."""
    _only_in_a_graph("inter_reduce_scatter")


def inter_all_reduce(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Gradient part [n] of every node's rank at this place -> their average [n], pending."""
    _only_in_a_graph("inter_all_reduce")


def intra_grad_all_gather(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Averaged gradient part [n] of every rank of this node -> the whole [g*n], pending."""
    _only_in_a_graph("intra_grad_all_gather")


def store_grads(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Averaged gradients of this slot [S] -> the same in the home dtype in host memory, pending."""
    _only_in_a_graph("store_grads")


def collect(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Add gradients [n] and the waiting gradients of these parameters, which then wait no longer; pending."""
    _only_in_a_graph("collect")


def accumulate(grads: Tensor, bucket: int, params: tuple[str, ...]) -> Any:
    """Let gradients [n] of these parameters wait for the next micro-batch's gradients; pending."""
    _only_in_a_graph("accumulate")


def stamp(buckets: tuple[int, ...]) -> Tensor:
    """The values that this forward uses, saved for its backward: int64 [3 + len(buckets)] on the CPU.

    Whether the backward will accumulate gradients; the fingerprint of the shards that the forward was given
    if they are not the model's own, else 0; the number of the plan; then the generation of each bucket.
    """
    _only_in_a_graph("stamp")


def check(stamps: Tensor, buckets: tuple[int, ...]) -> None:
    """Let the backward have the values that the forward stamped; a load of others, or the end, raises."""
    _only_in_a_graph("check")


EXPLICIT: dict[Callable[..., Any], Kind | None] = {
    inter_all_gather: Kind.INTER_ALL_GATHER,
    intra_all_gather: Kind.INTRA_ALL_GATHER,
    intra_own_all_gather: Kind.INTRA_OWN_ALL_GATHER,
    intra_rest_all_gather: Kind.INTRA_REST_ALL_GATHER,
    store: Kind.STORE,
    load: Kind.LOAD,
    load_home: Kind.LOAD_HOME,
    wait: Kind.WAIT,
    free: Kind.FREE,
    collect: Kind.COLLECT,
    accumulate: Kind.ACCUMULATE,
    intra_reduce_scatter: Kind.INTRA_REDUCE_SCATTER,
    inter_reduce_scatter: Kind.INTER_REDUCE_SCATTER,
    inter_all_reduce: Kind.INTER_ALL_REDUCE,
    intra_grad_all_gather: Kind.INTRA_GRAD_ALL_GATHER,
    store_grads: Kind.STORE_GRADS,
    stamp: None,
    check: None,
}
"""The explicit ops and the kind of step each is; `stamp` and `check` are bookkeeping, not steps."""


def kind_of(node: Node) -> Kind | None:
    """The kind of step that a node of a segmented graph is; None if it is not a step."""
    if node.op == "call_module":
        return Kind.COMPUTE
    return EXPLICIT.get(node.target) if callable(node.target) else None
