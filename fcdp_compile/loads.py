"""Notice which parameters and buffers without values a `load_state_dict` gives values to.

Of the model or of any module in it, torch.distributed.checkpoint's `set_model_state_dict` included, which
calls it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from fcdp_compile.runtime.model import ShardedModel


def notice_loads(root: nn.Module, state: ShardedModel) -> None:
    """Watch the modules that have parameters or buffers without values."""
    keys = {
        (module, name): key for key in state.awaited for module, name in state.records[key].owners()
    }
    buffers = {
        (module, name): f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    }
    names: dict[nn.Module, list[str]] = {}
    for module, name in [*keys, *buffers]:
        names.setdefault(module, []).append(name)
    for module, held in names.items():
        watch = _Watch(
            weakref.ref(state),
            {n: keys[module, n] for n in held if (module, n) in keys},
            {n: buffers[module, n] for n in held if (module, n) in buffers},
        )
        module.register_load_state_dict_pre_hook(watch.begins)
        module.register_load_state_dict_post_hook(watch.ended)


class _Watch:
    """What one module lacked: keys of parameters and names of buffers, by their names in it."""

    def __init__(
        self, state: weakref.ref[ShardedModel], keys: dict[str, str], buffers: dict[str, str]
    ) -> None:
        self._state = state
        self._keys = keys
        self._buffers = buffers
        self._given: set[str] = set()
        self._problems: list[str] = []

    def begins(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._given = {n for n in [*self._keys, *self._buffers] if prefix + n in state_dict}
        self._problems = error_msgs  # the list that torch goes on writing to
        if (state := self._state()) is not None:
            for name in self._given.intersection(self._buffers):
                # torch would copy into meta, which keeps nothing.
                buffer = module._buffers[name]
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=state.device)

    def ended(self, module: nn.Module, incompatible: Any) -> None:
        given, self._given = self._given, set()
        problems, self._problems = self._problems, []
        state = self._state()
        if state is None or problems:
            return  # torch is about to raise: nobody knows which values were copied
        state.values_arrived(
            [self._keys[n] for n in given if n in self._keys],
            [self._buffers[n] for n in given if n in self._buffers],
        )
