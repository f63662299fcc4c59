"""What a format of quantised weights offers.

[Note: packed weights]
A quantised weight is several tensors that the library keeps in one: packed values, one scale for each block
of values, perhaps scales of these scales, and a code book.  A format takes them apart and joins them again:

* *Packed*: tensors that are cut over the ranks.  A row of their first dimension is a whole number of blocks.
  So a rank's rows can be quantised and read alone, and the scales of a block are with its values.
* *Whole*: tensors so small that each rank has them.

    bitsandbytes, 4 bits     packed: values [blocks, 32 bytes], scales [blocks] (fp32, or 8 bits if nested)
                             whole: code book [16]; if nested, scales of 256 scales, their code book, offset
    bitsandbytes, 8 bits     packed: values [out, in], scales [out]
    torchao and its like     what `__tensor_flatten__` names

Sources: QLoRA (Dettmers et al., 2023), section 3 (NF4, double quantisation); LLM.int8() (Dettmers et al.,
2022).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Recipe(ABC):
    """How the tensors of one weight become what the library's kernels take.

    members: methods that the module's class needs in place of the library's.
    code_book: the whole tensor that tells this format from others, if there is one.
    """

    members: ClassVar[Mapping[str, Callable[..., Any]]] = MappingProxyType({})
    code_book: ClassVar[str | None] = None

    @abstractmethod
    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight, from all its tensors by name; in a graph a plain tensor with attributes."""

    @abstractmethod
    def dequantise(self, weight: Tensor) -> Tensor:
        """The plain values of a weight that `join` has made, as the library computes them."""

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What the bytes stand for; bytes of another meaning may have the same names, dtypes and shapes."""

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Attributes of the module that must change, because they hold the weight or write to it."""
        return {}

    @property
    def source_dtype(self) -> torch.dtype | None:
        """The dtype of the values that the weight is made of, if the recipe depends on it."""
        return None

    def made_of(self, dtype: torch.dtype) -> Recipe:
        """The same for a weight that is made of values of this dtype."""
        return self

    @property
    def quantiser(self) -> Quantiser | None:
        """How values become such a weight; None if fcdp does not know."""
        return None

    def saved(self, leaf: str) -> Saved | None:
        """Where the parts are in the library's own state dicts; None if fcdp does not know.

        leaf: the weight's name in its layer.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Quantiser(ABC):
    """How plain values become the tensors of a quantised weight.

    shape, dtype: of the values.  row_elements: the values that a row of each packed tensor stands for, in the
    order of memory; None if a row is not a whole number of blocks.
    asked: the packed tensors that `finish` needs whole, from all ranks.
    """

    shape: torch.Size
    dtype: torch.dtype
    row_elements: int | None
    asked: tuple[str, ...] = ()

    @abstractmethod
    def quantise(self, values: Tensor) -> dict[str, Tensor]:
        """The rows of the packed tensors for some values [rows * row_elements]."""

    def finish(self, asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors, and the packed tensors that follow from `asked`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A quantised weight taken apart; see [Note: packed weights]."""

    packed: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    recipe: Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A quantised weight in its library's state dicts; names are relative to the layer's.

    parts: names of parts of the weight, by their names there; the bytes are the same, the shapes may differ.
    state: the name of a small tensor that describes the weight.
    read: returns the weight's recipe and the parts that this tensor has the values of; raises ArgumentError
    with the end of a sentence about the saved weight if it is of another kind.
    """

    parts: Mapping[str, str]
    state: str
    read: Callable[[Tensor], tuple[Recipe, Mapping[str, Tensor]]]


Take = Callable[[nn.Module, Any], Parts]
"""Takes a module's parameter apart; raises ArgumentError with the end of a sentence about the parameter."""
