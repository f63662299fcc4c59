"""Tensors whose values are still on their way: the first op that needs the values waits for them.

They are local tensors of the DTensors that autograd passes on while a backward runs, such as a gradient whose
reduction has not ended.  DTensor runs ops on its local tensor, and so comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.torch_compat import tree_map_only
from fcdp_compile.torch_compat.tensors import MemoryLayout, WrapperTensor


class Awaited:
    """A value that somebody puts into `value`, at the latest when `wait` is called."""

    __slots__ = ("__weakref__", "value", "wait")

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.value: Tensor | None = None


class LateTensor(WrapperTensor):
    """A tensor of this layout, with the values of `awaited`."""

    def __init__(self, layout: MemoryLayout, awaited: Awaited) -> None:
        self._layout = layout
        self._awaited = awaited

    @property
    def is_late(self) -> bool:
        """Whether nobody has waited for the values yet."""
        return self._awaited.value is None

    def present(self) -> Tensor:
        """The tensor with its values, complete for the next work on this thread's stream."""
        self._awaited.wait()
        assert self._awaited.value is not None, "`wait` has set it"
        return self._awaited.value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd detaches what it puts into `.grad`
            return LateTensor(args[0]._layout, args[0]._awaited)
        args, kwargs = tree_map_only(LateTensor, LateTensor.present, (args, kwargs or {}))
        return func(*args, **kwargs)
