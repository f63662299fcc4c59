"""Whole copies of a model's tensors on the ranks that keep them, and twins of the model made from the copies.

    home shards [W/G] on G ranks ── point to point ──▶ the writer [W]; other ranks hold only their own shards
    home shards or node shards   ── all-gather ──────▶ every rank [W], which only ranks that ask keep

The writer is the first rank of node 0.  To the writer, shards travel through host memory: an all-gather
on the device would need room for the largest parameter on every GPU, and training may have filled them.

A twin has the model's structure and the original classes, before `shard` replaced them.  Libraries that
change a model to save or merge it work on a twin with whole tensors.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.inner_cut import whole_of
from fcdp_compile.core.params.mesh import Topology, everyone_ranks
from fcdp_compile.core.params.packing import put_boxes
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.ranks.lost_ranks import naming_lost_ranks
from fcdp_compile.core.ranks.messages import Attempts
from fcdp_compile.core.sharding.sharded_class import STATE
from fcdp_compile.errors import FcdpError
from fcdp_compile.models.files.safetensors_file import as_bytes
from fcdp_compile.models.pretrained.huggingface import adapter_tensors
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat.tensors import storage_id

_DOING = "whole parameters on their way to the rank that writes them"


class WholeValues(Attempts):
    """Brings whole parameters to the writer, by the group of all ranks, on the Python thread.

    keeps: whether this rank gets the values, which are on `device`.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology
        self._ranks = everyone_ranks(topology)
        self._here = (topology.node, topology.place, topology.number % topology.sharers)
        self.keeps = topology.number == 0
        self.device = torch.device("cpu")

    def whole(self, record: ParamRecord) -> Tensor | None:
        """Return a parameter in its home dtype on the writer's CPU, else None; all ranks must call it.

        Shapes: this rank's part `spec.local_shape`, the result `spec.whole_shape`.
        """
        spec = record.spec
        whole = self.attempt(lambda: _empty(spec.whole_shape, spec)) if self.keeps else None
        for node, place, index in _owners(spec):
            owner, part = (node, place, index), None
            if owner == self._here:
                part = self.attempt(lambda: record.peek().cpu())
            elif not self.keeps:
                continue
            if part is None:
                part = _empty(spec.part_layout(index).local_shape(node, place), spec)
            self._move(part, owner)
            if whole is not None:
                put_boxes(part, whole, spec.boxes(*owner))
        return whole

    def _move(self, part: Tensor, owner: tuple[int, int, int]) -> None:
        """Send a home shard to the writer, or receive it there, unless the writer owns it."""
        if not part.numel() or (self.keeps and owner == self._here):
            return
        everyone = self._topology.everyone
        with naming_lost_ranks(everyone, _DOING):  # as bytes: Gloo knows few dtypes
            if self.keeps:
                dist.recv(as_bytes(part), group=everyone, group_src=self._ranks[owner])
            else:
                dist.send(as_bytes(part), group=everyone, group_dst=self._ranks[0, 0, 0])


class GatheredValues(WholeValues):
    """Brings whole parameters to the device of every rank that asks.

    A parameter crosses between nodes only if the cache has no valid copy of it.  Uses the lanes' groups.
    """

    def __init__(self, state: ShardedModel, *, keeps: bool) -> None:
        super().__init__(state.topology)
        self._state = state
        self.keeps = keeps
        self.device = state.device.torch

    def whole(self, record: ParamRecord) -> Tensor | None:
        """Return a parameter in its home dtype, in new memory, on ranks that ask; all ranks must call it.

        Raises: PlanMismatchError on every rank if ranks are about to do different things.
        """
        spec, shard = record.spec, record.peek().to(self.device)
        part = self._state.outside.read(spec.key, shard, spec.home_dtype)
        with naming_lost_ranks(self._topology.everyone, _DOING):
            found = whole_of(part, spec.inner, self._topology.tp)
        return found if self.keeps else None


def _owners(spec: ParamSpec) -> Iterable[tuple[int, int, int]]:
    """The node, place and number in the "tp" group of the ranks whose home shards make a parameter, once.

    If every rank, or every node, has a copy of its own, the writer needs no other copy.
    """
    layout, inner = spec.layout, spec.inner
    sharers = 1 if inner is None or inner.dim is None else inner.ranks
    nodes, places = (1, 1) if layout.dim is None else (layout.nodes, layout.ranks_per_node)
    return itertools.product(range(nodes), range(places), range(sharers))


def _empty(shape: tuple[int, ...], spec: ParamSpec) -> Tensor:
    return torch.empty(shape, dtype=spec.home_dtype, device="cpu")


class ModelTensors:
    """Whole tensors of a model by name, fetched on request; only ranks that ask for values keep them.

    names_on_meta: of the last twin's tensors that were not fetched, by `storage_id`.

    Raises: FcdpError for a DTensor that no record knows.
    """

    def __init__(self, root: nn.Module, state: ShardedModel | None) -> None:
        self._root = root
        self._tensors = dict([*root.named_parameters(), *root.named_buffers()])
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        by_place = {} if state is None else state.records.by_parameter()
        self._records = {n: by_place[id(t)] for n, t in self._tensors.items() if id(t) in by_place}
        self._whole: dict[int, Tensor] = {}
        self.names_on_meta: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            if name in self._records:
                self._records[name].parameter()  # raises if its new value is cut differently
            elif isinstance(tensor, DTensor):
                raise FcdpError(
                    f"{name!r} was put into the model as a DTensor after fcdp_compile.shard, so fcdp does "
                    "not know how it is cut; finish the model first, then shard it"
                )

    def names(self, *, of_adapters: bool = False) -> list[str]:
        """Return the names of all tensors, or of those that PEFT has added to the model."""
        if not of_adapters:
            return list(self._tensors)
        added = {id(tensor) for tensor in adapter_tensors(self._root)}
        return [name for name, tensor in self._tensors.items() if id(tensor) in added]

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of whole tensors."""
        return sum(self._tensors[name].nbytes for name in names)

    def describe(self, names: Iterable[str]) -> str:
        """Return names, dtypes and shapes, for ranks to compare."""
        found = ((name, self._tensors[name]) for name in names)
        return "\n".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in found)

    def check(self, names: Iterable[str]) -> None:
        """Raise FcdpError if this rank's part of a tensor is no longer as `shard` has cut it."""
        for name in names:
            if name in self._records:
                self._records[name].peek()

    def fetch(self, name: str, values: WholeValues) -> None:
        """Copy a whole tensor to the ranks that keep it; all ranks must call it."""
        tensor = self._tensors[name]
        if name in self._records:
            whole = values.whole(self._records[name])
            if whole is not None:
                self._whole[id(tensor)] = whole
        elif values.keeps:
            made = values.attempt(lambda: _copy(tensor, values.device))
            self._whole |= {} if made is None else {id(tensor): made}

    def forget(self) -> None:
        """Forget all tensors that were fetched."""
        self._whole.clear()

    def twin(self) -> nn.Module:
        """Return a twin of the model; tensors that were not fetched are on meta."""
        self.names_on_meta = {}
        return Twins(self._stand_in).of(self._root)

    def lacking(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of the tensors that were not fetched, given tensors of the last twin.

        Raises: FcdpError for a tensor that was computed from one that was not fetched.
        """
        storages = {storage_id(tensor) for tensor in tensors if tensor.is_meta}
        if storages - self.names_on_meta.keys():
            raise FcdpError(
                "PEFT computes a part of the adapter from weights of the base, which fcdp does not gather to "
                "save an adapter; call the model's own save_pretrained within fcdp_compile.gathered(model)"
            )
        return [name for storage, name in self.names_on_meta.items() if storage in storages]

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if (whole := self._whole.get(id(tensor))) is not None:
            return whole
        if (name := self._names.get(id(tensor))) is None:  # of a module in an attribute
            return _copy(tensor)
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.names_on_meta[storage_id(meta)] = name
        return meta


def _copy(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


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
