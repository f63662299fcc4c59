"""Storages of tensors, and torch's check for races on them."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode


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
