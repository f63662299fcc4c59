"""Ways to put another shard, tie or parameter into a sharded model: they raise or work."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fcdp_compile
from fcdp_compile.errors import ArgumentError, FcdpError
from tests.distributed.cut_models import Stack, declared, llama, mixtral, qwen3
from tests.distributed.models import CASES, Odd, batch
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def _step(model: nn.Module, *, compiled: bool = True) -> float:
    case = CASES["odd"]
    torch._dynamo.reset()
    net = torch.compile(model, backend="fcdp") if compiled else model
    return case.loss(net, batch(case, step=0, rank=0)).item()


def _refusal(model: nn.Module, *, compiled: bool = True) -> str:
    try:
        _step(model, compiled=compiled)
    except Exception as raised:  # Dynamo wraps what a backend raises
        return f"{type(raised).__name__}: {raised}"
    return "accepted"


def _sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return fcdp_compile.shard(Odd(), mesh)


def _misuse(mesh: DeviceMesh) -> dict[str, object]:
    found: dict[str, object] = {}
    new = torch.arange(91.0).reshape(13, 7) / 91
    other_cut = distribute_tensor(new, mesh, [Shard(0), Shard(0)])

    model = _sharded(mesh)
    model.first.weight.data = other_cut
    found["data of another mesh"] = torch.equal(model.first.weight.full_tensor(), new)

    model = _sharded(mesh)
    model.first.weight = nn.Parameter(other_cut)
    found["parameter of another mesh"] = _refusal(model)

    model = _sharded(mesh)
    model.extra = nn.Linear(2, 2)
    found["new parameter"] = _refusal(model, compiled=False)
    return found


def test_other_shards_and_new_parameters_are_right_or_refused() -> None:
    for found in run(_misuse, nodes=2, ranks_per_node=2):
        assert found["data of another mesh"] is True
        assert "was sharded as" in str(found["parameter of another mesh"])
        assert str(found["new parameter"]).startswith("UnshardedParameterError")
        assert "'extra.weight' was added or replaced after fcdp_compile.shard" in str(
            found["new parameter"]
        )


def _vary(mesh: DeviceMesh, strategy: str) -> list[float]:
    """Ranks see a new length, and recompile, at different steps; a weight is tied across a graph break."""
    case = CASES["broken"]
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = fcdp_compile.shard(case.model(), mesh, strategy=strategy)
    net = torch.compile(model, backend="fcdp", options={"bucket_mb": 300 / 2**20})
    losses = []
    for step, length in enumerate((16, 16 + 2 * (rank == 0), 16 + 3 * (rank == 1), 20)):
        loss = case.loss(net, batch(case, step=step, rank=rank, length=length))
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["zero3", "zero++"])
@pytest.mark.slow
def test_ranks_that_recompile_at_different_steps_agree(strategy: str) -> None:
    results = run(_vary, strategy, nodes=2, ranks_per_node=1)
    assert all(len(losses) == 4 for losses in results)


def _copies(mesh: DeviceMesh) -> None:
    model = _sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    CASES["odd"].loss(model, batch(CASES["odd"], step=0, rank=0)).backward()
    optimizer.step()
    weight = model.first.weight
    values = weight.full_tensor().detach().clone()
    copied = copy.deepcopy([weight, weight, optimizer])
    assert copied[0] is copied[1]
    assert copied[0].requires_grad
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(copied[0].full_tensor(), values)
    assert "local_tensor" in repr(weight)
    kept, expected = (o.state_dict()["state"][0]["exp_avg"] for o in (copied[2], optimizer))
    assert torch.equal(kept.full_tensor(), expected.full_tensor())


def test_parameters_and_optimizers_can_be_copied() -> None:
    run(_copies, nodes=2, ranks_per_node=1)


def _wrap(mesh: DeviceMesh) -> None:
    def sharded() -> nn.Module:
        return fcdp_compile.shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), mesh)

    with pytest.raises(
        FcdpError, match=r"c10d\.broadcast_.* do not wrap a sharded model in Dist.*full"
    ):
        DistributedDataParallel(sharded())
    with_buffer = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with_buffer.register_buffer("frequencies", torch.zeros(8))
    with pytest.raises(FcdpError, match=r"aten\.cat.* do not wrap a sharded model in Dist"):
        DistributedDataParallel(fcdp_compile.shard(with_buffer, mesh))
    with pytest.raises(FcdpError, match=r"call full_tensor\(\)\.detach\(\)\.cpu\(\)\.numpy\(\)"):
        sharded()[0].weight.detach().numpy()
    with pytest.raises(
        FcdpError, match=r"\.weight is sharded.*a sharded model in FullyShardedData"
    ):
        FullyShardedDataParallel(sharded(), device_id=torch.device("cpu"))


@pytest.mark.cpu  # where FSDP1 is
def test_wrappers_of_a_sharded_model() -> None:
    run(_wrap, nodes=2, ranks_per_node=1)


def _lost(mesh: DeviceMesh) -> None:
    """What tensor_parallel or declare_part did is gone, or does not fit the mesh or the optimizer."""

    def refused(match: str, make: Callable[[], Any], on: DeviceMesh | None) -> None:
        with pytest.raises(ArgumentError, match=match):
            fcdp_compile.shard(make(), on)

    whole, tp = fcdp_compile.make_mesh(nodes=2, tp=2), fcdp_compile.tensor_parallel
    torch.manual_seed(0)
    refused("was copied after", lambda: copy.deepcopy(tp(llama(), whole)), whole)

    def loaded() -> nn.Module:
        model = tp(qwen3(), whole)
        model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
        return model

    refused("q_norm.weight' was replaced after", loaded, whole)
    refused(r'"tp" of the mesh that shard gets is missing', lambda: declared(Stack(), whole), mesh)

    def on_a_node() -> Any:
        return declared(Stack(), fcdp_compile.make_mesh(nodes=1, tp=4))

    refused(r"over ranks \[0, 1, 2, 3\], but", on_a_node, whole)
    for strategy in ("mics", "ddp", "fcdp"):
        model = fcdp_compile.shard(tp(llama(), whole), whole, strategy=strategy)
        matrix = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        with pytest.raises(ArgumentError, match=r'ranks of "tp" have parts of parameter'):
            fcdp_compile.Muon([matrix])


def _from_the_end(mesh: DeviceMesh) -> None:
    """A dimension counted from the end; norms of a strided shard over one dimension; meshes go away."""
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    part: Any = nn.Linear(4, 6, bias=False)
    fcdp_compile.declare_part(part.weight, whole, Shard(-1))
    model: Any = fcdp_compile.shard(nn.Sequential(part), whole)
    assert model(torch.ones(2, 4)).shape == (2, 6)
    assert tuple(model[0].weight.shape) == (6, 8)
    torch.manual_seed(0)
    mixture = fcdp_compile.shard(fcdp_compile.tensor_parallel(mixtral(), whole), whole)
    packed: Any = mixture.get_parameter("model.layers.0.mlp.experts.gate_up_proj").detach()
    found = packed.norm(dim=0).full_tensor()
    assert torch.allclose(found, packed.full_tensor().norm(dim=0))
    with pytest.raises(FcdpError, match="parts of several matrices"):
        packed.__create_chunk_list__()  # as torch.distributed.checkpoint
    everything = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    values = get_model_state_dict(mixture, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(FcdpError, match="parts of several matrices"):
        set_model_state_dict(mixture, values, options=everything)
    reference = weakref.ref(other := fcdp_compile.make_mesh(nodes=2, tp=2))
    fcdp_compile.shard(declared(Stack(), other), other)
    del other
    gc.collect()
    assert reference() is None


def test_what_is_lost_is_refused() -> None:
    run(_lost, nodes=2, ranks_per_node=2)
    run(_from_the_end, nodes=2, ranks_per_node=2)
