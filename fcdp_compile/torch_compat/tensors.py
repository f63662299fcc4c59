"""Subclasses of tensors, their storages, copies of many tensors in one call; torch's check for races."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode


class MemoryLayout(NamedTuple):
    """Where a tensor has its elements, without the memory itself."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> MemoryLayout:
        """The layout of a tensor."""
        where = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return MemoryLayout(*where, tensor.dtype, tensor.device)


class WrapperTensor(Tensor):
    """A tensor without memory: every op on it is a call of its class's `__torch_dispatch__`."""

    @staticmethod
    def __new__(cls, layout: MemoryLayout, *args: Any) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.stride,
            storage_offset=layout.offset,
            dtype=layout.dtype,
            device=layout.device,
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # typed as a method


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Start to copy each source to its target, in one call of torch."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def storage_id(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage while the storage lives, also if it has no memory."""
    return int(tensor.untyped_storage()._cdata)


@functools.cache
def _references_of_nobody() -> int:
    """The reference count of a storage object that only the caller holds (3 in torch 2.11 to 2.15)."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def storage_uses(tensor: Tensor) -> int:
    """The number of tensors that share a tensor's storage, itself included, plus holders of its object."""
    storage = tensor.untyped_storage()  # adds one use
    held = sys.getrefcount(storage) - _references_of_nobody()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + held


class Sanitizer(NamedTuple):
    """torch's CUDA sanitizer: a mode, and the error that it raises if kernels of two streams race."""

    mode: DispatchMode
    error: type[Exception]


def cuda_sanitizer() -> Sanitizer:
    """Make the sanitizer, to which torch then reports every event and allocation; tried on torch 2.13."""
    # Imported only now, because the import makes torch report everything.
    module: Any = importlib.import_module("torch.cuda._sanitizer")
    return Sanitizer(module.CUDASanitizerDispatchMode(), module.CUDASanitizerErrors)
