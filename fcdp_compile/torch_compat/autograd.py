"""Autograd, its modes, and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes


def is_recomputing() -> bool:
    """Whether activation checkpointing runs a forward again: within a backward, with gradients recorded.

    Hooks of a backward run with gradients off, unless the backward is itself to be differentiated.
    """
    return torch.is_grad_enabled() and backward_number() != -1


def backward_number() -> int:
    """The number of the backward that runs in this thread, shared by all its graphs; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once the backward that runs in this thread has written every gradient to its `.grad`.

    The backward raises any exception of the callback.  A backward that fails drops the callback uncalled.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def gradient_hooks(tensor: Tensor) -> list[Any]:
    """The functions that autograd calls with a tensor's gradient, or once it has added to `.grad`."""
    registries = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for hooks in registries for hook in (hooks or {}).values()]


def move_gradient_hooks(old: Tensor, new: Tensor) -> None:
    """Move the functions of `gradient_hooks` to another leaf; torch's handles still remove them."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def is_in_transform() -> bool:
    """Whether a transform of torch.func, such as vmap, is running."""
    return bool(get_interpreter_stack())


def is_in_derivative() -> bool:
    """Whether a transform of torch.func that differentiates (grad, vjp, jvp, jacrev) is running."""
    found = get_interpreter_stack() or ()
    return any(i.key() in (TransformType.Grad, TransformType.Jvp) for i in found)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run tensor operations on real tensors, unrecorded: no tracing, gradients or inference mode."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def without_torch_function() -> AbstractContextManager[None]:
    """Call torch's functions without the `__torch_function__` of tensor subclasses."""
    entered: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return entered


def is_profiling() -> bool:
    """Whether a profiler is recording, so that named ranges are worth their time."""
    # torch.autograd._profiler_enabled() is false under a profiler that records every thread.
    return torch.autograd.profiler._is_profiler_enabled


def every_thread() -> _ExperimentalConfig:
    """An `experimental_config` that makes a profiler also record threads that started before it."""
    return _ExperimentalConfig(profile_all_threads=True)


def name_thread(name: str) -> None:
    """Give this thread a name for profilers and debuggers, which do not see Python's own thread names."""
    torch._C._set_thread_name(name)
