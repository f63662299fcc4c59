"""Subclasses of tensors, and copies of many tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
