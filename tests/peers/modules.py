"""torch's own table of modules: each trains sharded as it does alone, on the same input on every rank.

Equal inputs make the average of the gradients equal to the gradient of one process.  A case is a module, its
mode, its dtype, and whether it is compiled; it covers all inputs that the table has for the module.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

import fcdp_compile
from tests.distributed.parity import whole
from tests.peers.outcomes import SkippedError

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}
"""Relative to the largest element, as both sides may add in another order."""

_FLOOR = 1e-2
MOST_INPUTS = 4
"""Of a module: LinearCrossEntropyLoss alone has hundreds."""

_MODES = ("train", "eval")
_WAYS = ("compiled", "eager")


def version() -> str:
    return f"torch {torch.__version__}"


def cases() -> list[str]:
    return [
        f"{name} {mode} {dtype} {way}"
        for name in _table()
        for mode in _MODES
        for dtype in DTYPES
        for way in _WAYS
    ]


def run(mesh: DeviceMesh, case: str) -> None:
    """Compare outputs, all gradients, buffers, and parameters after a step, for each input of the table."""
    name, mode, dtype_name, way = case.split()
    info, dtype, is_training = _table()[name], DTYPES[dtype_name], mode == "train"
    if dtype not in info.supported_dtypes("cpu"):
        raise SkippedError(f"the table has no {dtype_name} for this module")
    _seed()
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=is_training
    )
    tried = 0
    for number, sample in _spread(list(enumerate(samples))):
        tried += _is_tried(mesh, info.module_cls, sample, dtype, is_training, way, number)
        torch._dynamo.reset()
    if not tried:
        raise SkippedError("the module has no parameters")


def _spread(samples: list[Any]) -> list[Any]:
    """At most MOST_INPUTS of them, evenly spread."""
    return samples[:: -(-len(samples) // MOST_INPUTS) or 1]


def _is_tried(
    mesh: DeviceMesh, kind: Any, sample: Any, dtype: Any, is_training: bool, way: str, number: int
) -> bool:
    """Run one input on both; False if the module has no parameters."""
    _seed()
    made = sample.constructor_input
    plain = kind(*made.args, **made.kwargs).to(dtype).train(is_training)
    given = sample.forward_input
    if isinstance(plain, nn.modules.lazy.LazyModuleMixin):
        plain(*_copied(given.args), **_copied(given.kwargs))  # makes its parameters
    if not list(plain.parameters()):
        return False
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    net = torch.compile(model, backend="fcdp") if way == "compiled" else model
    for step in range(2):
        expected = dict(_trained(plain, plain, given))
        found = dict(_trained(net, model, given))
        about = f"input {number}, step {step}"
        assert found.keys() == expected.keys(), f"{about}: {found.keys() ^ expected.keys()}"
        for name, value in expected.items():
            _check(f"{about}: {name}", found[name], value, _TOLERANCE[dtype])
    return True


def _trained(net: Any, model: nn.Module, given: Any) -> Iterator[tuple[str, Tensor]]:
    """Take one step of SGD; what it computed, by name."""
    args, kwargs = _copied(given.args), _copied(given.kwargs)
    _seed()
    outputs = [t for t in tree_leaves(net(*args, **kwargs)) if isinstance(t, Tensor)]
    yield from ((f"output {n}", t) for n, t in enumerate(outputs))
    trained = [t for t in outputs if t.requires_grad]
    if trained:
        sum((t.sin() + t.pow(2)).mean() for t in trained).backward()
    for n, leaf in enumerate(tree_leaves((args, kwargs))):
        if isinstance(leaf, Tensor) and leaf.grad is not None:
            yield f"gradient of argument {n}", leaf.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copied(inputs: Any) -> Any:
    """Leaves of their own, so that gradients do not add up."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return copy.deepcopy(value)

    return tree_map(one, inputs)


def _check(about: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    a, b = whole(found), expected.detach()
    assert a.shape == b.shape, f"{about}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{about}: {a.dtype}, expected {b.dtype}"
    if a.numel():
        scale = max(b.double().nan_to_num().abs().max().item(), _FLOOR)
        assert torch.allclose(
            a.double(), b.double(), rtol=0, atol=tolerance * scale, equal_nan=True
        ), f"{about} is off by {(a.double() - b.double()).abs().max().item() / scale:.1e}"


def _table() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db  # needs expecttest

    return {info.name.removeprefix("nn."): info for info in module_db}


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
