"""FSDP2's interface for PyTorch's tests of it, answered by fcdp.

fully_shard(layer), fully_shard(model)    noted
model.parameters(), model(inputs)         the first use shards the outermost module that was noted
"""

from __future__ import annotations

import contextlib
import functools
import math
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcdp_compile
from tests.distributed.parity import whole
from tests.peers.outcomes import SkippedError

_NOT_NEEDED = (
    "set_is_last_backward",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_unshard_in_backward",
    "_set_unshard_async_op",
    "reset_iter_state",
)
"""Methods of FSDP2's modules that say when to gather and to free; fcdp's schedule decides that."""


class Sharding:
    """Which modules a test wants sharded, and what it asks of them."""

    def __init__(self, mesh: DeviceMesh, *, is_compiled: bool) -> None:
        self._mesh, self._is_compiled = mesh, is_compiled
        self._noted: dict[nn.Module, dict[str, Any]] = {}
        self._roots: dict[nn.Module, nn.Module] = {}
        self._open: dict[nn.Module, contextlib.ExitStack] = {}

    def names_in(self, script: ModuleType) -> dict[str, Any]:
        """What takes the place of FSDP2's names, and of what needs a GPU, in a module of tests."""
        return {name: _no_patch for name in vars(script) if name.startswith("patch_")} | {
            "checkpoint": _uncompiled if self._is_compiled else checkpoint,
            "fully_shard": self.fully_shard,
            "init_device_mesh": _init_device_mesh,
            "check_sharded_parity": _check_parity,
            "FSDPModule": _FullySharded,
            "FSDP2": _FullySharded,
            "register_fsdp_forward_method": lambda module, name: None,
            "share_comm_ctx": _internals,
            "GradScaler": functools.partial(torch.amp.GradScaler, device="cpu"),
        }

    def fully_shard(self, module: Any, **options: Any) -> Any:
        """Note one module or several."""
        for one in module if isinstance(module, list) else [module]:
            self._noted[one] = options
            one._compiled_call_impl = functools.partial(self._first_call, one)
            one.__dict__.update(dict.fromkeys(_NOT_NEEDED, lambda *args, **more: None))
            one.__dict__.update(
                set_requires_gradient_sync=functools.partial(self._synchronise, one),
                set_requires_all_reduce=functools.partial(self._synchronise, one),
                unshard=functools.partial(self._unshard, one),
                reshard=functools.partial(self._close, one),
                _get_fsdp_state=_internals,
            )
        return module

    @contextlib.contextmanager
    def noticing_uses(self) -> Iterator[None]:
        """Shard before anything reads a module's parameters; no block that a test opened stays open."""
        with contextlib.ExitStack() as stack:
            for name in ("named_parameters", "state_dict", "load_state_dict", "_apply"):
                method = self._settling(getattr(nn.Module, name))
                stack.enter_context(mock.patch.object(nn.Module, name, method))
            try:
                yield
            finally:
                for module in list(self._open):
                    self._close(module)

    def _settling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def settled(module: nn.Module, *args: Any, **more: Any) -> Any:
            self._settle(module)
            return method(module, *args, **more)

        return settled

    def _first_call(self, module: nn.Module, *args: Any, **more: Any) -> Any:
        self._settle(module)
        return module(*args, **more)

    def _settle(self, module: nn.Module) -> None:
        """Shard the outermost of this module and those that were noted around it or within it."""
        within = set(module.modules())
        met = [one for one in self._noted if one in within or module in set(one.modules())]
        if not met:
            return
        root = max([module, *met], key=lambda one: len(list(one.modules())))
        noted = [one for one in root.modules() if one in self._noted]
        wanted = {one: self._noted.pop(one) for one in noted}
        for one in noted:
            one._compiled_call_impl = None
            self._roots[one] = root
        options = {"mesh": self._mesh} | _options(wanted.get(root) or wanted[noted[0]], wanted)
        noted_params = {id(parameter) for one in noted for parameter in one.parameters()}
        options["ignored_params"] |= {p for p in root.parameters() if id(p) not in noted_params}
        fcdp_compile.shard(root, **options)
        if self._is_compiled:
            root.compile(backend="fcdp")

    def _synchronise(self, module: nn.Module, is_on: bool, *, recurse: bool = True) -> None:
        self._settle(module)
        if self._roots[module] is module and recurse:
            self._close(module)
            if not is_on:
                self._enter(module, fcdp_compile.no_sync(module))
        elif not is_on:
            raise SkippedError("no_sync is for a whole model, not for some of its modules")

    def _unshard(self, module: nn.Module, *, async_op: bool = False) -> None:
        """Gather; what FSDP2 does asynchronously is a prefetch."""
        self._settle(module)
        if not async_op:
            self._enter(module, fcdp_compile.gathered(self._roots[module], [module]))

    def _enter(self, module: nn.Module, block: contextlib.AbstractContextManager[None]) -> None:
        self._open[module] = contextlib.ExitStack()
        self._open[module].enter_context(block)

    def _close(self, module: nn.Module) -> None:
        if module in self._open:
            self._open.pop(module).close()


def _options(one: dict[str, Any], wanted: dict[nn.Module, dict[str, Any]]) -> dict[str, Any]:
    """The options of `shard` for those of `fully_shard`; the table is in docs/coming-from.md."""
    for name in ("mp_policy", "offload_policy", "reshard_after_forward"):
        if any(other.get(name) != one.get(name) for other in wanted.values()):
            raise SkippedError(f"fcdp has one {name} for a whole model")
    policy, mesh, reshard = (one.get(n) for n in ("mp_policy", "mesh", "reshard_after_forward"))
    found: dict[str, Any] = {"ignored_params": set(one.get("ignored_params") or ())}
    if mesh is not None and mesh.mesh_dim_names == ("inter",):
        found["mesh"] = _mesh_with_tp()
    if mesh is not None and mesh.ndim == 2:
        found["strategy"] = "mics"
    elif reshard is not None:
        found |= {"strategy": "fsdp", "reshard_after_forward": reshard}
    if policy is not None:
        if policy.output_dtype not in (None, policy.param_dtype):
            raise SkippedError("fcdp has no output_dtype")
        found |= {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    if hasattr(one.get("offload_policy"), "pin_memory"):
        found["offload_params"] = True
    return found


class _Noted(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return "set_requires_gradient_sync" in vars(instance)


class _FullySharded(metaclass=_Noted):
    """FSDP2's class of the modules that `fully_shard` was called with."""


class _Meshes:
    """fcdp's mesh with "tp", by the names that the suite gives its dimensions."""

    def __getitem__(self, name: str) -> DeviceMesh | None:
        return None if name == "pp" else _mesh_with_tp()["inter" if name == "dp" else name]


@functools.cache
def _mesh_with_tp() -> DeviceMesh:
    mesh = fcdp_compile.make_mesh(nodes=2, tp=2)
    assert mesh is not None
    return mesh


def _init_device_mesh(device: str, mesh_shape: tuple[int, ...], **options: Any) -> Any:
    is_tp = "tp" in (options.get("mesh_dim_names") or ())
    if math.prod(mesh_shape) != dist.get_world_size() or (is_tp and mesh_shape[-1] != 2):
        raise SkippedError("the suite's own condition: it is written for 8 ranks")
    return _Meshes() if is_tp else init_device_mesh(device, mesh_shape, **options)


def _check_parity(
    test: unittest.TestCase,
    replicated: nn.Module,
    sharded: nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
) -> None:
    """Compare whole values; the suite's own function compares parts cut as FSDP2 cuts them."""
    check: Callable[[Any, Any], None] = test.assertEqual
    pairs = zip(replicated.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, expected), (wrapped_name, found) in pairs:
        check(
            name, functools.reduce(lambda n, p: n.replace(p, ""), prefixes_to_ignore, wrapped_name)
        )
        check(whole(expected), whole(found))
        check(expected.grad is None, found.grad is None)
        if expected.grad is not None and found.grad is not None:
            check(whole(expected.grad), whole(found.grad))


def _no_patch(*args: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _uncompiled(*args: Any) -> Any:
    raise SkippedError("torch.compile with the composable checkpoint: the suite leaves it out")


def _internals(*args: Any) -> Any:
    raise SkippedError("the test reads FSDP2's own state")
