"""Storages of tensors, and the check of who touches them."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage share, and no others, while it lives; also without memory."""
    return int(tensor.untyped_storage()._cdata)


@functools.cache
def _references_of_nobody() -> int:
    """References to the object of a storage that nobody holds but whoever asks (3 in torch 2.11 to 2.15)."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def storage_uses(tensor: Tensor) -> int:
    """How many tensors share a tensor's storage, itself counted, and who else holds the storage's object."""
    storage = tensor.untyped_storage()  # counts as one more
    held = sys.getrefcount(storage) - _references_of_nobody()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + held


class Sanitizer(NamedTuple):
    """torch's CUDA sanitizer: a mode, and what it raises where kernels of two streams race."""

    mode: DispatchMode
    error: type[Exception]


def cuda_sanitizer() -> Sanitizer:
    """Make the sanitizer, which from then on is told of every event and allocation; tried on torch 2.13."""
    # Not imported with this file: importing it makes torch report everything.
    module: Any = importlib.import_module("torch.cuda._sanitizer")
    return Sanitizer(module.CUDASanitizerDispatchMode(), module.CUDASanitizerErrors)
