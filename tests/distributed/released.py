"""Models whose frozen shards leave the device, and which shards are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.params import seals
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.runtime.buckets import validity
from tests.distributed.beside import Beside
from tests.distributed.models import CASES, Case

OPTIONS = {"bucket_mb": 300 / 2**20}  # several buckets
NAMES = ("first.base_layer.weight", "first.base_layer.bias", "scale", "embedding.weight")
"""A parameter that is split evenly, one that is not, a scalar, and a tied one."""


def frozen_of(model: nn.Module) -> dict[str, HomeShard]:
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return cast(dict[str, HomeShard], frozen)  # modules' parameters are typed as nn.Parameter


def held_bytes(parameter: HomeShard) -> int:
    return parameter.held.untyped_storage().nbytes()


def there(model: nn.Module) -> list[str]:
    """The frozen parameters whose shards take memory on this rank.  Comparing parameters loads all shards."""
    return [n for n, p in frozen_of(model).items() if held_bytes(p)]


def forward(pair: Beside, step: int = 1000) -> Tensor:
    return pair.case.loss(pair.net, pair.data(step))


def make_pair(mesh: DeviceMesh, case: str | Case = "odd-lora", **more: Any) -> Beside:
    chosen = CASES[case] if isinstance(case, str) else case
    pair = Beside(mesh, chosen, options=OPTIONS, **more)
    pair.train(2)
    return pair


@contextmanager
def counting_fingerprints() -> Iterator[list[str]]:
    """Record each fingerprint of the block: "broken" if a seal breaks, "compared" for a comparison."""
    taken: list[str] = []
    one, several = seals.fingerprint, validity.fingerprints
    seals.fingerprint = lambda tensors: (taken.append("broken"), one(tensors))[1]  # type: ignore[attr-defined]
    validity.fingerprints = lambda groups: (taken.append("compared"), several(groups))[1]  # type: ignore[attr-defined]
    try:
        yield taken
    finally:
        seals.fingerprint, validity.fingerprints = one, several  # type: ignore[attr-defined]
