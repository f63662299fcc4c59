"""Tensors whose values are still on their way: the first op that needs the values waits for them.

They are local tensors of the DTensors that autograd passes on while a backward runs, such as a gradient whose
reduction has not ended.  DTensor runs ops on its local tensor, and so comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.torch_compat import WrapperTensor, tree_map_only


class Awaited:
    """A value that `finish` puts into `value`."""

    __slots__ = ("finish", "value")

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        """The value; waits for it."""
        if self.value is None:
            self.finish()
        assert self.value is not None, "`finish` has set it"
        return self.value


class LateTensor(WrapperTensor):
    """A tensor of the shape, strides, dtype and device of `like`, with the values of `awaited`."""

    def __init__(self, like: Tensor, awaited: Awaited) -> None:
        self._awaited = awaited

    def present(self) -> Tensor:
        """The tensor with its values."""
        return self._awaited.get()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd detaches what it puts into `.grad`
            return LateTensor(args[0], args[0]._awaited)
        args, kwargs = tree_map_only(LateTensor, LateTensor.present, (args, kwargs or {}))
        return func(*args, **kwargs)
