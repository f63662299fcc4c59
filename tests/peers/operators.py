"""torch's own table of operators, on sharded tensors: values and gradients are those of whole tensors.

A case is an operator; it covers at most 10 inputs of the table.  All tensors of an input are cut, unevenly
mostly, also where a rank gets no row.  An operator that fcdp refuses for some inputs counts as refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import fcdp_compile
from fcdp_compile.core.params.home_collectives import part_of
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.errors import FcdpError
from tests.distributed.parity import whole
from tests.peers.outcomes import SkippedError

MOST_INPUTS = 10
_UNSET = "empty"
"""Operators with this in their names return memory as it is."""


def version() -> str:
    return f"torch {torch.__version__}"


def cases() -> list[str]:
    return list(_table())


def run(mesh: DeviceMesh, case: str) -> None:
    """Compare results, gradients, and what the operator wrote to its arguments, for inputs of the table."""
    op = _table()[case]
    dtype = next((t for t in (torch.float32, torch.int64) if t in op.dtypes), None)
    if dtype is None or _UNSET in op.name:
        raise SkippedError("the operator has no values that could be compared")
    torch.manual_seed(0)
    needs_grad = op.supports_autograd and dtype.is_floating_point
    samples = [s for s in op.sample_inputs("cpu", dtype, requires_grad=needs_grad) if _is_dense(s)]
    if not samples:
        raise SkippedError("the table has no input with a tensor that can be cut")
    like = _parameter(mesh)
    tried, refused = 0, None
    for number, sample in enumerate(samples[:MOST_INPUTS]):
        given = sample.input, tuple(sample.args), dict(sample.kwargs)
        try:
            expected = _called(op, tree_map_only(Tensor, _leaf, given))
        except Exception:  # the table has inputs that the operator itself refuses
            continue
        tried += 1
        try:
            found = _called(op, tree_map_only(Tensor, lambda t: _cut(t, like), given))
            tree_map(lambda a, b, number=number: _check(f"input {number}", a, b), expected, found)
        except FcdpError as error:
            refused = error
    if refused is not None:
        raise refused
    if not tried:
        raise SkippedError("the operator refuses the inputs of the table")


def _called(op: Any, given: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The results, the gradients of all arguments that have one, and the arguments afterwards."""
    first, args, kwargs = given
    torch.manual_seed(1)
    results = tree_leaves(op(first, *args, **kwargs))
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    losses = [
        (r * torch.arange(r.numel(), dtype=r.dtype).cos().view(r.shape)).sum()
        for r in results
        if isinstance(r, Tensor) and r.requires_grad and r.is_floating_point()
    ]
    grads: tuple[Any, ...] = ()
    if losses and wanted:
        grads = torch.autograd.grad(sum(losses), wanted, allow_unused=True, materialize_grads=True)
    return [_seen(r) for r in results], [whole(g) for g in grads], [whole(t) for t in tensors]


def _seen(result: Any) -> Any:
    return whole(result) if isinstance(result, Tensor) else result


def _check(about: str, expected: Any, found: Any) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected or found != found, f"{about}: {found}, expected {expected}"
    elif expected.layout is torch.strided:
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{about}: {m}"
        )


def _is_dense(sample: Any) -> bool:
    tensors = [
        t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)
    ]
    return any(t.dim() for t in tensors) and all(t.layout is torch.strided for t in tensors)


def _leaf(tensor: Tensor) -> Tensor:
    kept = tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept.requires_grad_(tensor.requires_grad)


def _cut(tensor: Tensor, like: DTensor) -> Tensor:
    """The same values as a home shard; a single number stays plain."""
    leaf = _leaf(tensor)
    if not leaf.dim():
        return leaf
    layout: dict[str, Any] = {"run_check": False, "shape": leaf.shape, "stride": leaf.stride()}
    empty = DTensor.from_local(leaf.new_empty(0), like.device_mesh, like.placements, **layout)
    part = part_of(empty, leaf.detach()).clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(part, like.device_mesh, like.placements, **layout)
    home: Tensor = HomeTensor.adopt(made.detach())
    return home.requires_grad_(tensor.requires_grad)


def _parameter(mesh: DeviceMesh) -> DTensor:
    """A home shard of the mesh, for its placements."""
    (bias,) = fcdp_compile.shard(nn.PReLU(8), mesh).parameters()
    assert isinstance(bias, DTensor)
    return bias


def _table() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # needs expecttest

    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}
