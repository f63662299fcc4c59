"""The class that a sharded module gets: a subclass of its own class with the same name.

Within the forward of any module of the sharded model, when activation checkpointing recomputes, and in every
graph that Dynamo traces, reading a parameter's attribute gathers the parameter (`fcdp::unshard`).  Elsewhere
the attribute is the parameter itself, so that freezing, optimizers, merging adapters and `state_dict` work as
without fcdp.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.derived import local_of
from fcdp_compile.core.params.gate import Gate, Read
from fcdp_compile.core.params.home_shard import HomeShard, check_cut, key_of, placements_of
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.inner_cut import InnerTensor
from fcdp_compile.core.params.registry import spec_of, whole_error
from fcdp_compile.core.sharding.layers import COMPILES_LAYERS, StackRole, has_hooks, is_plain
from fcdp_compile.core.sharding.refusals import is_ignored
from fcdp_compile.errors import ArgumentError, FcdpError, UnshardedParameterError
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.ops import REQUIRE_GRAD, UNSHARD
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat import tree_map_only
from fcdp_compile.torch_compat.autograd import is_in_derivative, is_recomputing
from fcdp_compile.torch_compat.compilers import (
    OWN_BREAK,
    break_graph,
    may_skip_frame,
    skip_frame,
    skip_this_frame,
    tracing_backend,
)

log = logging.getLogger(__name__)

STATE = "_fcdp"
"""The attribute of a sharded module that holds its `ModuleState`."""


class ModuleState:
    """The state of a sharded module: its model, the keys of its own parameters, the gate.

    alike: for each parameter, the key of the first one that is alike (`passes.planning.alike`).
    cuts: the placements of its own parameters.  is_on_mesh: whether they are DTensors, as with several ranks.
    """

    def __init__(self, model: ShardedModel, gate: Gate, keys: dict[str, str]) -> None:
        self.model = model
        self.gate = gate
        self.keys = keys
        self.is_on_mesh = model.topology.home_mesh is not None
        self.alike = {name: model.records.alike[key] for name, key in keys.items()}
        specs = {name: model.spec(key) for name, key in keys.items()}
        self.cuts = {n: placements_of(spec) for n, spec in specs.items()}
        self.inner = {
            name: InnerTensor(spec.inner)
            for name, spec in specs.items()
            if spec.inner is not None and spec.inner.mesh is not None
        }
        self._alone: Callable[..., Any] | None = None

    def alone(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What calls `inner` for this module alone; name: of its code."""
        if self._alone is None:
            self._alone = _with_own_code(inner, name)
        return self._alone

    skip_frame(alone)


def sharded_class(
    cls: type[nn.Module],
    names: tuple[str, ...],
    input_dtype: torch.dtype | None,
    is_root: bool,
    role: StackRole | None,
) -> type:
    """Make a subclass of `cls` whose attributes with these names gather.

    input_dtype: the dtype that floating point inputs of its forward are cast to.  role: what the module is to
    the equal layers of its model.
    """
    members: dict[str, Any] = {name: _gathering_property(name) for name in names}
    members["__reduce_ex__"] = _refuse_to_copy
    members["_apply"] = _apply_to_buffers(cls._apply)
    members["_fcdp_key_of"] = _fcdp_key_of
    members["compile"] = _compile_within_gate(cls)
    if callable(getattr(cls, "save_pretrained", None)):
        members["save_pretrained"] = _saving(cls.save_pretrained)  # type: ignore[attr-defined]  # a library's
    if cls.forward is not nn.Module.forward:
        members["forward"] = _forward_within_gate(cls, input_dtype, is_root, role)
        members["_fcdp_only_asks_for_gradients"] = _fcdp_only_asks_for_gradients
    if role is StackRole.STACK:
        members["_fcdp_is_apart"] = _fcdp_is_apart
    if role is StackRole.BESIDE:
        members["_fcdp_is_beside"] = _fcdp_is_beside
    if role is StackRole.LAYER:
        members["_fcdp_stands_alone"] = _fcdp_stands_alone
        members["__call__"] = _layer_call(cls)
    if is_root:
        members["__call__"] = _noted_call(cls)
        members["_fcdp_refuse_new_parameters"] = _fcdp_refuse_new_parameters
    members["__module__"], members["__qualname__"] = cls.__module__, cls.__qualname__
    return type(cls.__name__, (cls,), members)


def _state(module: nn.Module) -> ModuleState:
    state: Any = module._fcdp  # nn.Module's attributes are typed as tensors and modules
    found: ModuleState = state
    return found


def _saving(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own_save = import_module("fcdp_compile.models.pretrained.exporting.export")
        return own_save.save_own(self, _state(self).model, inner, args, kwargs)

    return save_pretrained


def _gathering_property(name: str) -> property:
    """The attribute of a sharded parameter.

    traced   gathered by the op `UNSHARD`; Dynamo takes the key for a constant
    eager    outside of the forward, and of a recomputation, the parameter itself; within `gathered`, the
             parameter, which is whole; else gathered by `UNSHARD`, and noted for the backward
    """

    # Dynamo traces a call of this function for every read: it calls little, and reads few objects.
    def get(self: Any) -> Tensor:
        parameter: Tensor | None = self._parameters.get(name)
        if parameter is None:
            raise AttributeError(f"{type(self).__name__!r} object has no parameter {name!r}")
        state: ModuleState = self._fcdp
        if torch.compiler.is_compiling():
            if not isinstance(parameter, HomeShard):
                _check_read(state, name, parameter)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            full: Tensor = UNSHARD(local, self._fcdp_key_of(name, state.alike[name]))
        # When a backward recomputes a checkpointed function, no forward is running.
        elif not (state.gate.inside or is_recomputing()):
            return parameter
        elif state.keys[name] in state.model.whole:
            # In the dtype of gathered parameters; no copy if the home shards have this dtype.
            return parameter.to(state.model.spec(state.keys[name]).gather_dtype)
        else:
            _refuse_derivatives()
            _check_read(state, name, parameter)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if isinstance(parameter, HomeTensor):
                local = local_of(parameter)  # UNSHARD brings back what it reads
            with _counting_writes():
                full = UNSHARD(local, state.keys[name])
            if state.gate.reads is not None and not full.is_inference():
                state.gate.reads.append(Read.of(state.keys[name], full))
        if name in state.inner and isinstance(parameter, DTensor):
            return state.inner[name].of(full)  # a DTensor: ranks of "tp" have parts of it
        return full

    def put(self: nn.Module, value: Any) -> NoReturn:
        # Reached once the parameter is gone: before, nn.Module's own assignment replaces parameters.
        raise FcdpError(
            f"{type(self).__name__}.{name} is sharded, and no other tensor can take its place; do not wrap a "
            "sharded model in FullyShardedDataParallel, and parametrize modules before fcdp_compile.shard"
        )

    return property(get, put)


def _check_read(state: ModuleState, name: str, parameter: Tensor) -> None:
    """Check the class and the cut of a value that is about to be gathered.

    Raises: FcdpError.
    """
    if not isinstance(parameter, DTensor):
        # Some tensor parallel layers compute with local tensors: they put `to_local` in a parameter's place.
        if state.is_on_mesh and name not in state.inner:
            # Check the class, which is the same on all ranks: on some ranks a shard has the whole shape too.
            raise whole_error(state.keys[name].partition(":")[2], parameter)
    elif not isinstance(parameter, HomeShard):
        # A local shard of the right shape may hold other rows: [Shard(0), Shard(0)] on another mesh.
        check_cut(parameter, state.keys[name], state.cuts[name])


@contextmanager
def _counting_writes() -> Iterator[None]:
    """Make tensors in inference mode that have a version, by which writes to them are noticed."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# Constant for Dynamo, as `_fcdp_refuse_new_parameters` is.  Dynamo guards the arguments and not the key, so
# equal modules share a trace if their parameters are alike.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _fcdp_key_of(module: nn.Module, name: str, alike: str) -> str:
    state = _state(module)
    state.model.progress.traces(state.keys[name])
    return state.keys[name]


def _forward_within_gate(
    cls: type[nn.Module], input_dtype: torch.dtype | None, is_root: bool, role: StackRole | None
) -> Callable[..., Any]:
    inner: Callable[..., Any] = cls.forward

    @functools.wraps(inner)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_root:
            self._fcdp_refuse_new_parameters()
        if input_dtype is not None:
            args, kwargs = tree_map_only(Tensor, _cast_to(input_dtype), (args, kwargs))
        return inner(self, *args, **kwargs)

    inlined = checked if is_root or input_dtype is not None else inner
    shared = _with_own_code(inlined, f"forward of {cls.__name__}")
    is_stack, is_beside = role is StackRole.STACK, role is StackRole.BESIDE

    # Python runs the first of these frames, so the gate is set for all that runs eagerly below it, whatever
    # is traced.  Frames that Dynamo inlines leave the gate alone: each look at it would be a guard.
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if is_stack and self._fcdp_is_apart():
                break_graph(msg=OWN_BREAK)
            if is_beside and self._fcdp_is_beside():
                skip_this_frame()
            result = inlined(self, *args, **kwargs)
            return _requiring_grad(self, result) if self._forward_hooks else result
        state: ModuleState = self._fcdp  # a call of a function would be a frame for Dynamo
        if not is_stack:
            return state.gate.watch(shared, self, *args, **kwargs)
        before, state.gate.stack = state.gate.stack, self
        try:
            return state.gate.watch(shared, self, *args, **kwargs)
        finally:
            state.gate.stack = before

    skip_frame(forward)
    return forward


def _layer_call(cls: type[nn.Module]) -> Callable[..., Any]:
    """The call of a layer that may be compiled by itself ([Note: layers by themselves]).

    It is the call and not the forward, because some layers (Transformers') checkpoint their forward in it.
    """
    inner: Callable[..., Any] = cls.__call__
    name = f"call of {cls.__name__}"
    shared = _with_own_code(inner, name)

    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if self._fcdp_stands_alone(is_plain((args, kwargs))):
                skip_this_frame()
            return inner(self, *args, **kwargs)
        if self._compiled_call_impl is not None:  # compiled by the user
            return inner(self, *args, **kwargs)
        state: ModuleState = self._fcdp
        traced = state.alone(inner, name) if has_hooks(self) else shared
        return state.gate.watch(traced, self, *args, **kwargs)

    skip_frame(call)
    return call


# Constant for Dynamo, as `_fcdp_refuse_new_parameters` is.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _fcdp_is_apart(module: nn.Module) -> bool:
    """Whether a call of a stack is left to Python: it contains layers that stand by themselves."""
    return bool(_state(module).gate.has_layers) and _may_stand_alone()


# Constant for Dynamo, too.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _fcdp_is_beside(module: nn.Module) -> bool:
    """Whether Dynamo traces a frame of a stack's forward, which is left to Python at its first layer.

    Left to Python here, the frame is not traced up to that layer.
    """
    gate = _state(module).gate
    is_within = gate.stack is not None and any(m is module for m in gate.stack.children())
    return is_within and bool(gate.has_layers) and _may_stand_alone()


# Constant for Dynamo, too.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _fcdp_stands_alone(layer: nn.Module, is_plain: bool) -> bool:
    """Whether a layer that Dynamo reaches stands by itself; the first one decides for the others.

    is_plain: whether none of its arguments can differ between layers.
    """
    if not _may_stand_alone():
        return False
    state = _state(layer)
    if not is_plain and state.gate.has_layers is None and state.model.topology.number == 0:
        log.warning(
            "equal layers are traced one by one, and the model starts slowly: %s is given an object that may "
            "differ between layers, such as a cache of keys and values; make a Transformers model with "
            "use_cache=False",
            type(layer).__name__,
        )
    state.gate.has_layers = is_plain or bool(state.gate.has_layers)
    return is_plain


def _may_stand_alone() -> bool:
    return may_skip_frame() and hasattr(tracing_backend(), COMPILES_LAYERS)


def _with_own_code(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that calls `inner`, with a code object of its own.

    Dynamo counts recompiles by code object: a shared object would add up all classes and models.
    """

    @functools.wraps(inner)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    own: Any = traced
    own.__code__ = own.__code__.replace(co_name=name)
    return traced


def _compile_within_gate(cls: type[nn.Module]) -> Callable[..., None]:
    inner: Callable[..., None] = cls.compile

    @functools.wraps(inner)
    def compile_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        compiled: Any = self._compiled_call_impl
        gate, model = _state(self).gate, _state(self).model

        def call(*args: Any, **kwargs: Any) -> Any:
            if model.whole:  # as in `_noted_call`, which does not reach what was compiled in place
                return torch.compiler.disable(self._call_impl)(*args, **kwargs)
            before, gate.is_called = gate.is_called, True
            try:
                return compiled(*args, **kwargs)
            finally:
                gate.is_called = before

        self._compiled_call_impl = call

    return compile_module


def _requiring_grad(module: nn.Module, result: Any) -> Any:
    """Let what a module returns require a gradient if the module's hooks only ask for that.

    `enable_input_require_grads` of Transformers adds such a hook to a frozen embedding, for activation
    checkpointing.  Dynamo breaks the graph where a hook sets `requires_grad` (PyTorch 2.13 only after it has
    traced the whole model, in every frame above), but not where nothing is left to set.
    """
    if not (torch.is_grad_enabled() and isinstance(result, Tensor) and result.is_floating_point()):
        return result
    if result.requires_grad:
        return result
    # nn.Module's attributes are typed as tensors and modules.
    asks: Any = module._fcdp_only_asks_for_gradients
    return REQUIRE_GRAD(result, _state(module).gate.anchor) if asks() else result


# Constant for Dynamo, as `_fcdp_refuse_new_parameters` is; guards notice other hooks.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _fcdp_only_asks_for_gradients(module: nn.Module) -> bool:
    """Whether all that a module's forward hooks do is to call `requires_grad_`, and not with False.

    In eager mode such a hook makes the module's result a leaf; in the compiled graph it is none.  So a hook
    that could keep the result, for its gradient, must not count: its code has another name, or a closure.
    """
    codes = [getattr(hook, "__code__", None) for hook in module._forward_hooks.values()]
    return all(
        code is not None
        and code.co_names == ("requires_grad_",)
        and not code.co_freevars
        and False not in code.co_consts
        for code in codes
    )


def gated_forward(
    own: Callable[..., Any], gate: Gate, input_dtype: torch.dtype | None
) -> Callable[..., Any]:
    """Wrap a forward that is an attribute of the root itself and hides the class's forward.

    Some libraries (TRL's fused heads, Liger) replace the forward of an instance.  Outside of the gate, this
    forward would read home shards, and gradients computed from them would not be averaged.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        if input_dtype is not None:
            args, kwargs = tree_map_only(Tensor, _cast_to(input_dtype), (args, kwargs))
        return own(*args, **kwargs)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        before, gate.inside = gate.inside, True
        try:
            return traced(*args, **kwargs)
        finally:
            gate.inside = before

    skip_frame(forward)
    return forward


def _noted_call(cls: type[nn.Module]) -> Callable[..., Any]:
    inner: Callable[..., Any] = cls.__call__

    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(self, *args, **kwargs)
        state: ModuleState = self._fcdp
        state.model.unset.refuse("a forward")
        gate = state.gate
        before, gate.is_called = gate.is_called, True
        try:
            if state.model.whole:
                # Compiled graphs would gather, but parameters are whole already.
                return torch.compiler.disable(inner)(self, *args, **kwargs)
            return inner(self, *args, **kwargs)
        finally:
            gate.is_called = before

    # `is_called` must be set before the guards of the called code are checked.
    skip_frame(call)
    return call


# Dynamo calls this when it traces, but does not trace into it.  It is a method, because torch 2.11 accepts no
# module as a constant argument; the member has the function's name, because torch looks it up by that name.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _fcdp_refuse_new_parameters(root: nn.Module) -> None:
    model = _state(root).model
    if not model.whole:
        _refuse_derivatives()
    whole = {model.spec(key).name for key in model.whole}
    for name, parameter in root.named_parameters():
        is_known = key_of(parameter) is not None or isinstance(parameter, DTensor)
        if model.topology.home_mesh is None:  # functional_call replaces parameters by tensors
            is_known |= not isinstance(parameter, nn.Parameter)
        if not (is_known or is_ignored(parameter) or name in whole):
            raise UnshardedParameterError(
                f"parameter {name!r} was added or replaced after fcdp_compile.shard, so its gradient "
                "would not be averaged; finish the model's structure, including adapters, before "
                "fcdp_compile.shard"
            )


def _refuse_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_in_derivative():
        raise FcdpError(
            "a sharded model is called within torch.func.grad, jvp or the like, and fcdp gathers parameters "
            "outside of such transforms; call the transform within a block of fcdp_compile.gathered(model)"
        )


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _apply_to_buffers(inner: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    # half(), to() and the like call nn.Module._apply, which would replace every parameter by another tensor,
    # even if nothing changes, and cannot make a Parameter from a HomeShard.
    @functools.wraps(inner)
    def apply(
        self: nn.Module, convert: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> nn.Module:
        if isinstance(self, QuantisedWeight):
            # Its library leaves these tensors' dtypes as they are, too.
            convert = _to_device_of(convert)
        held = self._parameters
        for name, parameter in held.items():
            if parameter is not None and key_of(parameter) is not None:
                _refuse_to_convert(f"{type(self).__name__}.{name}", parameter, convert)
        homes = {n: p for n, p in held.items() if key_of(p) is not None}
        self._parameters = {n: p for n, p in held.items() if n not in homes}
        try:
            return inner(self, convert, *args, **kwargs)
        finally:
            self._parameters = {n: homes.get(n, self._parameters.get(n)) for n in held}

    return apply


def _to_device_of(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(convert(tensor).device)


def _refuse_to_convert(
    name: str, parameter: nn.Parameter, convert: Callable[[Tensor], Tensor]
) -> None:
    held, key = ParamRecord.held(parameter), key_of(parameter)
    assert key is not None, "only sharded parameters are refused"
    # A released shard has no memory to convert, and one on the host computes on the device.
    device = spec_of(key).computes_on or held.device
    local = held.new_empty(0, device=device)
    converted = convert(local)
    if (converted.dtype, converted.device) != (local.dtype, local.device):
        raise FcdpError(
            f"{name} is sharded as {local.dtype} on {local.device} and cannot become {converted.dtype} on "
            f"{converted.device}; convert the model before fcdp_compile.shard"
        )


def _refuse_to_copy(self: nn.Module, protocol: Any) -> NoReturn:
    raise ArgumentError(
        f"a sharded {type(self).__name__} cannot be copied or pickled, its copy would share caches with it; "
        "save its state_dict with torch.distributed.checkpoint instead"
    )
