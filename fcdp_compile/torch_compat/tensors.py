"""Subclasses of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WrapperTensor(Tensor):
    """A tensor without memory: every op on it is a call of its class's `__torch_dispatch__`.

    It has the shape, strides, dtype and device of `like`.
    """

    @staticmethod
    def __new__(cls, like: Tensor, *args: Any) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # typed as a method
