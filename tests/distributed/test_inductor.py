"""Segments compiled by Inductor, with features that change how a model is traced."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.device.choice import seeded
from tests.distributed.layered import VOCABULARY, Model
from tests.distributed.parity import (
    GRADIENT_FLOOR,
    RELATIVE,
    Replica,
    check_close,
    fresh,
    gradients,
    rank_and_ranks,
)
from tests.distributed.ranks import run

LAYERS = 4  # enough to be cut apart
BUCKET_MB = 0.004  # about a layer


def _loss(net: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), ids.flatten())


def _batch(step: int, rank: int, length: int = 6) -> Tensor:
    generator = seeded(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


def _sharded(model: nn.Module, mesh: DeviceMesh | None, **more: Any) -> Any:
    fcdp_compile.shard(model, mesh)
    options = {"compute": "inductor", "bucket_mb": BUCKET_MB}
    return torch.compile(model, backend="fcdp", fullgraph=True, options=options, **more)


def _check_lengths(mesh: DeviceMesh | None, checkpointed: bool, dynamic: bool) -> None:
    fresh()
    torch.manual_seed(0)
    model = Model(LAYERS, 0.0, checkpointed=checkpointed)
    replica = Replica(copy.deepcopy(model), _loss)
    net = _sharded(model, mesh, dynamic=dynamic)
    rank, ranks = rank_and_ranks(mesh)
    for step, length in enumerate([6, 9, 5] if dynamic else [6]):
        batches = [_batch(step, r, length) for r in range(ranks)]
        loss = _loss(net, batches[rank])
        loss.backward()
        assert abs(loss.item() - replica.backward(batches)[rank]) <= RELATIVE * loss.item()
        check_close("", gradients(model), gradients(replica.model), floor=GRADIENT_FLOOR)
        model.zero_grad()
        replica.model.zero_grad()


def _check_masks(mesh: DeviceMesh | None) -> None:
    """Dropout drops the same elements if a backward recomputes: the gradients equal those without."""
    fresh()
    torch.manual_seed(0)
    kept, recomputed = Model(LAYERS, 0.3), Model(LAYERS, 0.3, checkpointed=True)
    recomputed.load_state_dict(kept.state_dict())
    models = [kept, recomputed]
    nets = [_sharded(model, mesh) for model in models]
    rank, _ = rank_and_ranks(mesh)
    losses = []
    for net in nets:
        torch.manual_seed(7)
        loss = _loss(net, _batch(0, rank))
        torch.manual_seed(8)  # a backward must not draw anew
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    check_close("", gradients(kept), gradients(recomputed), floor=GRADIENT_FLOOR)
    torch.manual_seed(9)
    assert _loss(nets[0], _batch(0, rank)).item() != losses[0]  # the control: dropout drops


def _check_autocast(mesh: DeviceMesh | None) -> None:
    fresh()
    torch.manual_seed(0)
    model = Model(LAYERS, 0.0)
    plain = copy.deepcopy(model)
    net = _sharded(model, mesh)
    ids = _batch(0, 0)  # equal on every rank, so that the average is the plain model's
    dtypes = []
    losses = []
    for one, autocast in ((net, True), (plain, True), (plain, False)):
        plain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            dtypes.append(one(ids).dtype)
            loss = _loss(one, ids)
        loss.backward()
        losses.append(loss.item())
        if one is plain and autocast:
            # bfloat16 keeps 8 bits; Inductor rounds at other places than the plain kernels do.
            for name, mine in gradients(model).items():
                other = gradients(plain)[name]
                assert (mine - other).abs().max() <= 0.05 * other.abs().max() + 1e-3, name
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert abs(losses[0] - losses[1]) <= 1e-2 * losses[1]


def _check_all(mesh: DeviceMesh | None) -> None:
    _check_lengths(mesh, checkpointed=True, dynamic=True)
    _check_masks(mesh)
    _check_autocast(mesh)


@pytest.mark.parametrize(
    ("checkpointed", "dynamic"),
    [
        pytest.param(False, True, marks=pytest.mark.rare),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
    ids=["dynamic", "checkpointed"],
)
def test_alone(checkpointed: bool, dynamic: bool) -> None:
    _check_lengths(None, checkpointed, dynamic)


@pytest.mark.rare
def test_dropout_drops_the_same_when_it_is_recomputed() -> None:
    _check_masks(None)


@pytest.mark.rare
def test_autocast() -> None:
    _check_autocast(None)


@pytest.mark.rare
@pytest.mark.distributed
def test_two_nodes() -> None:
    run(_check_all, nodes=2, ranks_per_node=1)
