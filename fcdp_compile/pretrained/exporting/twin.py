"""A model of the same structure with other tensors and its original classes, before `shard` replaced them.

Libraries that change a model to save or merge it work on a twin with whole tensors.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fcdp_compile.sharding.sharded_class import STATE


class Twins:
    """Twins of modules; modules, parameters and buffers that are shared stay shared among the twins.

    tensors: returns the tensor that replaces a parameter or buffer; parameters become parameters again.
    """

    def __init__(self, tensors: Callable[[Tensor], Tensor]) -> None:
        self._tensors = tensors
        self._modules: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._buffers: dict[int, Tensor] = {}
        self._memo: dict[int, Any] = {}  # of copied configurations

    def of(self, module: nn.Module) -> nn.Module:
        """Return the twin of a module, with twins of all modules below it."""
        if (known := self._modules.get(id(module))) is not None:
            return known
        # A sharded module's class is a subclass that `shard` made of its own.
        kind: Any = type(module).__bases__[0] if STATE in vars(module) else type(module)
        twin: nn.Module = kind.__new__(kind)
        self._modules[id(module)] = twin
        for name, value in vars(module).items():
            if name != STATE:
                vars(twin)[name] = self._attribute(name, value)
        return twin

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "_parameters":
            return {n: None if p is None else self._parameter(p) for n, p in value.items()}
        if name == "_buffers":
            return {n: None if b is None else self._buffer(b) for n, b in value.items()}
        if name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            return OrderedDict()  # those of `shard` wait for other ranks, which have no twin
        if name in ("config", "peft_config"):  # merging and saving write to them
            return copy.deepcopy(value, self._memo)
        return self._mapped(value)

    def _mapped(self, value: Any) -> Any:
        """Return an attribute's value, with its containers copied and its modules replaced by their twins."""
        if isinstance(value, nn.Module):
            return self.of(value)
        if type(value) in (list, tuple, set):
            return type(value)(self._mapped(v) for v in value)
        if isinstance(value, dict):
            # `copy` takes long, and modules have many dictionaries.
            twin = value.copy() if type(value) in (dict, OrderedDict) else copy.copy(value)
            twin.update({k: self._mapped(v) for k, v in value.items()})
            return twin
        return value

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self._parameters:
            made = nn.Parameter(self._tensors(parameter), requires_grad=False)
            self._parameters[id(parameter)] = made
        return self._parameters[id(parameter)]

    def _buffer(self, buffer: Tensor) -> Tensor:
        if id(buffer) not in self._buffers:
            self._buffers[id(buffer)] = self._tensors(buffer)
        return self._buffers[id(buffer)]
