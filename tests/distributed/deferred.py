"""Models to build on meta, the values that they must get, and the memory that materialize takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import peft
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.torch_compat import DispatchMode, FakeTensor
from fcdp_compile.torch_compat.tensors import storage_id
from tests.distributed.beside import whole
from tests.distributed.models import Odd, llama

Make = Callable[[], nn.Module]


class OwnOdd(Odd):
    """Odd with an initialisation of its own, which its constructor calls as modules of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)


class TiedHead(nn.Module):
    """A head tied to the embedding, a norm with buffers, and a buffer that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 7, padding_idx=3)
        self.norm = nn.BatchNorm1d(7)
        self.attention = nn.MultiheadAttention(7, 1)
        self.head = nn.Linear(7, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.note = "kept"  # type: ignore[attr-defined]  # a mark such as frameworks leave

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).transpose(1, 2)
        logits: Tensor = self.head(self.norm(hidden).transpose(1, 2))
        return logits


def adapted(base: Make, config: peft.PeftConfig) -> nn.Module:
    adapted: nn.Module = peft.get_peft_model(base(), config)  # type: ignore[arg-type]
    return adapted


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)


SAME: dict[str, Make] = {
    "odd": OwnOdd,
    "tied": TiedHead,
    "llama": llama,
    "lora": partial(adapted, llama, lora()),
    "dora": partial(adapted, llama, lora(use_dora=True)),
    "lora as linear": partial(adapted, llama, lora(init_lora_weights=False)),
    "a trained head": partial(adapted, llama, lora(modules_to_save=["lm_head"])),
    "ia3": partial(
        adapted,
        llama,
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
    ),
}
"""Models whose values after materialize equal those of an unsharded build, bit for bit."""


def built(make: Make, mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = make()
    model = fcdp_compile.shard(model, mesh, **options)
    torch.manual_seed(seed)
    fcdp_compile.materialize(model)
    return model


def expect(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert torch.equal(whole(parameter), expected[name].detach()), name
        assert parameter.requires_grad == expected[name].requires_grad, name
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
        assert buffer.dtype == buffers[name].dtype
    assert set(model.state_dict()) == set(plain.state_dict())  # with persistent buffers


class Live(DispatchMode):
    """Counts the bytes of storages that ops made and that are still held, and their peak.

    older: tensors not to count.
    """

    def __init__(self, older: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._older = {storage_id(tensor) for tensor in older}
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and type(tensor) is not FakeTensor and not tensor.is_meta:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = storage_id(tensor)
        if storage in self._older:
            return
        if storage not in self._known:
            self.now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)
        self._known[storage] = self._known.get(storage, 0) + 1
        weakref.finalize(tensor, self._forget, storage, tensor.untyped_storage().nbytes())

    def _forget(self, storage: int, size_bytes: int) -> None:
        self._known[storage] -= 1
        if not self._known[storage]:
            del self._known[storage]
            self.now -= size_bytes


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(48)], nn.Embedding(2048, 512))


def memory(mesh: DeviceMesh | None, make: Make = layers) -> None:
    """Besides the home shards, materialize never holds more than the largest module's parameters."""
    with torch.device("meta"):
        model = make()
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules())
    whole_bytes = sum(p.nbytes for p in model.parameters())
    model = fcdp_compile.shard(model, mesh)
    live = Live([record.local() for record in state_of(model).records.values()])
    with live:
        fcdp_compile.materialize(model)
    buffers = sum(b.nbytes for b in model.buffers())
    small = 2**16  # the states of generators
    if mesh is not None:
        small += 2**19  # the working memory of fingerprints, independent of the model
    assert largest <= live.peak <= largest + buffers + small, (live.peak, largest)
    assert live.peak < whole_bytes / 8, "the control: the whole model is much larger"
