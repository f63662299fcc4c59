"""Autograd, its modes, and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes


def is_recomputing() -> bool:
    """Whether activation checkpointing runs a forward again: in a backward, but recording gradients.

    Hooks of a backward run with gradients off, unless it is itself to be differentiated.
    """
    return torch.is_grad_enabled() and backward_number() != -1


def backward_number() -> int:
    """A number of the backward that runs in this thread, which all its graphs share; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this once the backward that runs in this thread has given every gradient to its `.grad`.

    What it raises the backward raises.  A backward that fails lets go of it and does not call it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook for gradients was registered on a leaf and its handle not removed."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run tensor operations for real and unseen: no tracing, gradients or inference mode."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def without_torch_function() -> AbstractContextManager[None]:
    """Call torch's functions themselves, past the `__torch_function__` of tensor subclasses."""
    entered: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return entered


def is_profiling() -> bool:
    """Whether a profiler is recording, so that named ranges are worth their time."""
    # Not torch.autograd._profiler_enabled(), which is false under a profiler that records every thread.
    return torch.autograd.profiler._is_profiler_enabled


def every_thread() -> _ExperimentalConfig:
    """The `experimental_config` with which a profiler also records threads that are older than it."""
    return _ExperimentalConfig(profile_all_threads=True)


def name_thread(name: str) -> None:
    """Give this thread the name that profilers and debuggers show; Python's own stays within Python."""
    torch._C._set_thread_name(name)
