"""Whole copies of a model's tensors on the ranks that keep them, and twins that are made from them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.pretrained.exporting.twin import Twins
from fcdp_compile.pretrained.exporting.whole_values import HOST, WholeValues
from fcdp_compile.pretrained.names import adapter_tensors
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat import storage_id


class ModelTensors:
    """Whole tensors of a model by name, fetched on request; only ranks that ask for values keep them.

    Raises: FcdpError for a DTensor that no record knows.
    """

    def __init__(self, root: nn.Module, state: ShardedModel | None) -> None:
        self._root = root
        self._tensors = dict(chain(root.named_parameters(), root.named_buffers()))
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        records = {} if state is None else state.records
        by_place = {id(place): r for r in records.values() for place in r.places()}
        self._records = {n: by_place[id(t)] for n, t in self._tensors.items() if id(t) in by_place}
        self._whole: dict[int, Tensor] = {}
        self._names_on_meta: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            if name in self._records:
                self._records[name].parameter()  # raises if its new value is cut differently
            elif isinstance(tensor, DTensor):
                raise FcdpError(
                    f"{name!r} was put into the model as a DTensor after fcdp_compile.shard, so fcdp does "
                    "not know how it is cut; finish the model first, then shard it"
                )

    def names(self, *, of_adapters: bool) -> list[str]:
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
            values.attempt(lambda: self._whole.update({id(tensor): _copy(tensor, values.device)}))

    def forget(self) -> None:
        """Forget all tensors that were fetched."""
        self._whole.clear()

    def twin(self) -> nn.Module:
        """Return a twin of the model; tensors that were not fetched are on meta."""
        self._names_on_meta.clear()
        return Twins(self._stand_in).of(self._root)

    def names_on_meta(self) -> dict[int, str]:
        """Return the names of the last twin's tensors that were not fetched, by `storage_id`."""
        return dict(self._names_on_meta)

    def lacking(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of the tensors that were not fetched, given tensors of the last twin.

        Raises: FcdpError for a tensor that was computed from one that was not fetched.
        """
        storages = {storage_id(tensor) for tensor in tensors if tensor.is_meta}
        if storages - self._names_on_meta.keys():
            raise FcdpError(
                "PEFT computes a part of the adapter from weights of the base, which fcdp does not gather to "
                "save an adapter; call the model's own save_pretrained within fcdp_compile.gathered(model)"
            )
        return [name for storage, name in self._names_on_meta.items() if storage in storages]

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if (whole := self._whole.get(id(tensor))) is not None:
            return whole
        if (name := self._names.get(id(tensor))) is None:  # of a module in an attribute
            return _copy(tensor)
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._names_on_meta[storage_id(meta)] = name
        return meta


def _copy(tensor: Tensor, device: torch.device = HOST) -> Tensor:
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
