"""Make `load_state_dict` work with a sharded model and any module in it.

    whole tensors -> all ranks compare them, then each rank takes its part
    assign=True   -> values are written to the home shards, which stay the model's parameters
    on meta       -> parameters and buffers that were loaded count as having values

torch.distributed.checkpoint's `set_model_state_dict` and PEFT's `set_peft_model_state_dict` use it too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.runtime.collectives.agreement import same_tensors
from fcdp_compile.runtime.model import ShardedModel


def watch_loads(root: nn.Module, state: ShardedModel) -> None:
    """Register hooks for loading on every module of a sharded model."""
    keys = {owner: key for key, record in state.records.items() for owner in record.owners()}
    for path, module in root.named_modules():
        watch = _LoadWatch(
            weakref.ref(state),
            {name: keys[module, name] for name in module._parameters if (module, name) in keys},
            {
                name: f"{path}.{name}" if path else name
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.is_meta
            },
        )
        module.register_load_state_dict_pre_hook(watch.begins)
        module.register_load_state_dict_post_hook(watch.ended)


class _LoadWatch:
    """One module's hooks.

    keys: the keys of its parameters, by name.  buffers: the paths of its buffers that were on meta.
    """

    def __init__(
        self, state: weakref.ref[ShardedModel], keys: dict[str, str], buffers: dict[str, str]
    ) -> None:
        self._state = state
        self._keys = keys
        self._buffers = buffers
        self._given: set[str] = set()
        self._problems: list[str] = []

    def begins(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, about: Any, *others: Any
    ) -> None:
        self._given = {n for n in [*self._keys, *self._buffers] if prefix + n in state_dict}
        *_, self._problems = others  # torch appends to this list of messages during the load
        if (state := self._state()) is None:
            return
        for name in self._given.intersection(self._buffers):
            # torch would copy into the tensor on meta, which keeps no values.
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=state.device.torch)
        _cut(state, module, state_dict, prefix)
        if about.get("assign_to_params_buffers"):
            self._write(module, state_dict, prefix)

    def _write(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Copy values to the parameters, and give torch the parameters themselves to assign."""
        for name in self._given.intersection(self._keys):
            parameter, value = module._parameters[name], state_dict[prefix + name]
            if parameter is None or not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:
                with torch.no_grad():
                    parameter.copy_(value)
                state_dict[prefix + name] = parameter

    def ended(self, module: nn.Module, incompatible: Any) -> None:
        given, self._given = self._given, set()
        problems, self._problems = self._problems, []
        if (state := self._state()) is None:
            return
        keys = [self._keys[n] for n in given if n in self._keys]
        if problems:  # torch is about to raise, and any of the values may have been copied
            state.validity.values_changed(keys)
        else:
            buffers = [self._buffers[n] for n in given if n in self._buffers]
            state.validity.values_arrived(keys, buffers)


def _cut(state: ShardedModel, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace whole tensors for home shards of a module and of the modules below by this rank's parts.

    torch passes the changed state dict on to the modules below, so ranks compare once for each load.

    Raises: PlanMismatchError or FcdpError on every rank if ranks do not load the same.
    """
    homes = dict(module.named_parameters(prefix.removesuffix("."), remove_duplicate=False))
    whole = {
        name: value.detach().view(homes[name].shape)
        for name, value in state_dict.items()
        if _is_whole(value, homes.get(name))
    }
    if not whole:
        return
    same_tensors(state.collectives, "loads whole tensors into the model", whole)
    for name, value in whole.items():
        home = homes[name]
        assert isinstance(home, HomeShard), name
        state_dict[name] = home.cut(value)


def _is_whole(value: Any, home: Tensor | None) -> bool:
    """Whether a value of a state dict is a plain tensor that fits a home shard, as torch compares shapes."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and isinstance(home, HomeShard)
        and (value.shape == home.shape or (home.dim() == 0 and value.shape == (1,)))
    )
