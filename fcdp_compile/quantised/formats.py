"""Take a quantised weight apart, whatever library has made it.

A format is a function of a parameter that returns None for a parameter of another format.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import ArgumentError
from fcdp_compile.quantised.bitsandbytes import bitsandbytes_format
from fcdp_compile.quantised.flattened import flattened_format
from fcdp_compile.quantised.interface import Parts
from fcdp_compile.torch_compat import FakeTensor

FORMATS = (bitsandbytes_format, flattened_format)


def take_apart(module: nn.Module, name: str) -> Parts | None:
    """The parts of a module's parameter; None if it is a plain tensor.

    The parts share the parameter's memory.

    Raises: ArgumentError for a parameter in a format that fcdp does not know, one that is trainable, and one
    that its library has yet to quantise.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    for format_of in FORMATS:
        if (take := format_of(parameter)) is not None:
            parts = take(module, parameter)
            if parameter.requires_grad:
                raise ArgumentError(
                    "is quantised but trainable, and fcdp cannot average gradients of packed values; call "
                    "requires_grad_(False) on it and train adapters"
                )
            return parts
    if _has_meaning_of_its_own(parameter):
        raise ArgumentError(
            f"is a {type(parameter).__name__}, whose values fcdp cannot take apart; quantise with "
            "bitsandbytes (Linear4bit, Linear8bitLt) or torchao, or dequantise it before shard"
        )
    return None


def _has_meaning_of_its_own(parameter: nn.Parameter) -> bool:
    """Whether a tensor's class gives its values another meaning than a plain tensor's."""
    if type(parameter) in (Tensor, nn.Parameter) or isinstance(parameter, FakeTensor | DTensor):
        return False
    own = type(parameter)
    changes = own.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return changes or not parameter.is_floating_point()
