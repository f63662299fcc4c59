"""Muon and matrices with home nodes: numbers as plain training's, bytes as with AdamW."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError, PlanMismatchError
from fcdp_compile.plan import Kind, Variant
from fcdp_compile.torch_compat.distributed import calls_dispatch_of_subclasses
from fcdp_compile.torch_compat.placements import NodeShard
from tests.distributed.ranks import run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not calls_dispatch_of_subclasses(), reason="torch 2.11 cannot have matrices with home nodes"
    ),
]

VOCABULARY = 11
OPTIONS = {"compute": "eager"}


def _model(seed: int = 0) -> nn.Module:
    """Matrices of uneven rows, tall and wide ones, and an embedding, which gets no home node."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 5)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 7), *hidden, nn.Linear(5, 17, bias=False))


def _optimizer(model: nn.Module, muon: Callable[..., Optimizer], **options: Any) -> Optimizer:
    # AdamW steps the head, too, which has a home node.
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in embeddings][:-1]
    chosen = set(matrices)
    rest = [p for p in model.parameters() if p not in chosen]
    return fcdp_compile.combine(muon(matrices, lr=0.02, **options), AdamW(rest, lr=0.01))


def _losses(net: Callable[[Tensor], Tensor], step: int, rank: int | None) -> Iterator[Tensor]:
    """The losses of two micro-batches of all ranks or of one."""
    for micro_batch in range(2):
        torch.manual_seed(2 * step + micro_batch)
        world = dist.get_world_size()
        tokens = torch.randint(0, VOCABULARY, (2 * world, 3))
        mine = tokens if rank is None else tokens[2 * rank : 2 * rank + 2]
        yield net(mine).square().mean()


def _train(model: nn.Module, optimizer: Optimizer, net: Any, rank: int | None, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        waiting = contextlib.nullcontext() if rank is None else fcdp_compile.no_sync(model)
        losses = _losses(net, step, rank)
        with waiting:
            next(losses).backward()
        next(losses).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def _sharded(
    mesh: DeviceMesh, strategy: str, seed: int = 0, **options: Any
) -> tuple[nn.Module, Any]:
    model = fcdp_compile.shard(_model(seed), mesh, strategy=strategy, **options)
    return model, torch.compile(model, backend="fcdp", options=OPTIONS)


def _gap(model: nn.Module, plain: nn.Module) -> float:
    """The largest difference of a parameter, relative to the largest change."""
    pairs = zip(model.parameters(), plain.parameters(), _model().parameters(), strict=True)
    return max(
        float((fcdp_compile.full(p) - q).abs().max() / (q - old).abs().max()) for p, q, old in pairs
    )


def _between(model: nn.Module) -> list[int]:
    """Bytes of weights and of gradients that all ranks sent between nodes in the last step."""
    sent = state_of(model).counters.last_step
    kinds = ("inter_all_gather", "inter_reduce_scatter")
    counted = torch.tensor([sent.get(kind, 0) for kind in kinds])
    dist.all_reduce(counted)
    return list(map(int, counted))


def _planned(model: nn.Module) -> list[int]:
    """The bytes of `_between` that all ranks' plans have together; each has the mean of all nodes."""
    kinds = (Kind.INTER_ALL_GATHER, Kind.INTER_REDUCE_SCATTER)
    (plan,) = state_of(model).plans.values()
    cold = [s for s in plan.schedules if s.variant is Variant.COLD]
    return [dist.get_world_size() * sum(s.bytes_by_kind().get(k, 0) for s in cold) for k in kinds]


def _check_parity(mesh: DeviceMesh) -> None:
    rank, nodes = dist.get_rank(), mesh.size(0)
    plain = _model()
    _train(plain, _optimizer(plain, fcdp_compile.Muon, ns_dtype=torch.float64), plain, None, 4)
    in_bf16 = _model()
    _train(in_bf16, _optimizer(in_bf16, torch.optim.Muon), in_bf16, None, 4)
    bytes_of: dict[str, list[int]] = {}
    for strategy, dtype in (
        ("fcdp+matrix", torch.float64),
        ("fcdp+matrix", torch.bfloat16),
        ("zero3+matrix", torch.float64),
        ("mics", torch.float64),
    ):
        model, net = _sharded(mesh, strategy)
        _train(model, _optimizer(model, fcdp_compile.Muon, ns_dtype=dtype), net, rank, 4)
        if dtype is torch.float64:
            assert _gap(model, plain) < 1e-4, strategy
        else:
            assert _gap(model, in_bf16) < 0.05, strategy
        bytes_of[strategy] = _between(model)
        if strategy == "fcdp+matrix":
            assert sum(isinstance(p.placements[1], NodeShard) for p in model.parameters()) == 4
            layouts = [r.spec.layout for r in state_of(model).records.values()]
            crossing = (nodes - 1) * sum(x.slots * x.slot_elements for x in layouts) * 4
            assert bytes_of[strategy] == [crossing, crossing]
            planned = _planned(model)
            assert all(crossing - 2 * mesh.size() <= n <= crossing for n in planned), planned
    model, net = _sharded(mesh, "fcdp")
    _train(model, AdamW(model.parameters(), lr=0.01), net, rank, 4)
    with_adamw = _between(model)
    assert all(a <= b for a, b in zip(bytes_of["fcdp+matrix"], with_adamw, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2, 2), (3, 1)], ids="{0[0]}x{0[1]}".format)
def test_parity_and_bytes(size: tuple[int, int]) -> None:
    run(_check_parity, nodes=size[0], ranks_per_node=size[1])


def _full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor().detach()
    return whole


def _check_ops(mesh: DeviceMesh) -> None:
    """Ops of users and optimizers on matrices of which one node has all rows."""
    model, _ = _sharded(mesh, "fcdp+matrix")
    wholes = [p.detach() for p in _model().parameters()]
    of_last_node = NodeShard(0, mesh.size(0) - 1)
    at = next(i for i, p in enumerate(model.parameters()) if p.placements[1] == of_last_node)
    p, q = list(model.parameters())[at], wholes[at]
    ops: dict[str, Callable[[Tensor], Tensor]] = {
        "itself": lambda x: x,
        "elementwise": lambda x: x.double().exp() * 2 - x.double(),
        "view": lambda x: x.view(-1),
        "row": lambda x: x[1],
        "transposed": lambda x: x.t(),
        "product": lambda x: x.detach() @ x.detach().t(),
        "joined": lambda x: torch.cat([x.detach(), x.detach()]),
        "sum": torch.sum,
        "maximum": torch.max,
        "norms of rows": lambda x: x.detach().norm(dim=-1),
        "norm": torch.norm,
        "greatest": lambda x: x.norm(float("inf")),
        "least": lambda x: torch.linalg.vector_norm(x, -float("inf")),
        "zeros": lambda x: x.detach().new_zeros(x.shape),
        "meeting a whole tensor": lambda x: x * torch.ones(x.shape),
    }
    for name, op in ops.items():
        found = op(p)
        value = _full(found) if hasattr(found, "full_tensor") else found.detach()
        torch.testing.assert_close(value, op(q), msg=name)
    (grad,) = torch.autograd.grad(p.norm().full_tensor() + fcdp_compile.full(p).sum(), [p])
    torch.testing.assert_close(_full(grad), q / q.norm() + 1)
    cut = grad.redistribute(placements=p.placements)
    assert cut.placements == p.placements
    torch.testing.assert_close(cut.to_local(), p.part_of(q / q.norm() + 1))
    with torch.no_grad():
        p.normal_()
    drawn = [torch.empty_like(q) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, _full(p))
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    assert not torch.equal(drawn[0][0], drawn[0][-1])
    p.data.copy_(q)
    torch.testing.assert_close(_full(p), q)
    parts = sum(r.numel() for r in (p.to_local(),))
    assert (parts > 0) == (dist.get_rank() // mesh.size(1) == mesh.size(0) - 1)
    with fcdp_compile.gathered(model, writeback=True):
        whole = list(model.parameters())[at]
        torch.testing.assert_close(whole.detach(), q)
        with torch.no_grad():
            whole[0] = 1.0
    torch.testing.assert_close(_full(p)[0], torch.ones(q.shape[1]))


def _check_checkpoints(mesh: DeviceMesh, folder: str) -> None:
    """Of a combined optimizer, onto other numbers of nodes and strategies; torch's own, too."""
    rank = dist.get_rank()
    model, net = _sharded(mesh, "fcdp+matrix")
    optimizer = _optimizer(model, fcdp_compile.Muon)
    _train(model, optimizer, net, rank, 2)
    fcdp_compile.save(f"{folder}/own", model, optimizer=optimizer)
    for strategy, nodes in (("fcdp+matrix", 2), ("mics", 2), ("zero3", 1), ("fcdp+matrix", 4)):
        other, again = _sharded(fcdp_compile.make_mesh(nodes=nodes), strategy, seed=1)
        states = _optimizer(other, fcdp_compile.Muon)
        fcdp_compile.load(f"{folder}/own", other, optimizer=states)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(_full(a), _full(b)), strategy
            for key, value in optimizer.state[a].items():
                if value.ndim:
                    assert torch.equal(_full(value), _full(states.state[b][key])), (strategy, key)
        _train(other, states, again, rank, 1)
    saved = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, list(optimizer.optimizers)),  # type: ignore[attr-defined]
    }
    dcp.save(saved, checkpoint_id=f"{folder}/torch")
    other, _ = _sharded(mesh, "fcdp", seed=1)
    loaded = {"model": get_model_state_dict(other)}
    dcp.load(loaded, checkpoint_id=f"{folder}/torch")
    for name, value in saved["model"].items():
        assert torch.equal(_full(loaded["model"][name]), _full(value)), name
    # Of a pickle, in which the mesh is another object.
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    other, again = _sharded(mesh, "fcdp+matrix", seed=1)
    states = _optimizer(other, fcdp_compile.Muon)
    for target, state in zip((other, states), torch.load(file, weights_only=False), strict=True):
        target.load_state_dict(state)
    _train(model, optimizer, net, rank, 1)
    _train(other, states, again, rank, 1)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(_full(a), _full(b))


def _check_mistakes(mesh: DeviceMesh) -> None:
    model, _ = _sharded(mesh, "fcdp+matrix")
    with pytest.raises(
        ValueError, match=r"rows of parameter '0.weight' of shape .* are on 2 nodes"
    ):
        fcdp_compile.Muon(model[0].parameters())  # type: ignore[index]
    matrices = [model[i].weight for i in (1, 3)]  # type: ignore[index]
    optimizer = fcdp_compile.Muon(matrices)
    for count in (0, 1):  # that the last rank steps
        optimizer.zero_grad()
        for p in matrices[: count + (dist.get_rank() != 3)]:
            p.grad = p.detach().clone()
        with pytest.raises(PlanMismatchError, match=r"steps '1.weight' and"):
            optimizer.step()
    with pytest.raises(FcdpError, match=r"one node has all rows; use fcdp_compile.Muon"):
        torch.optim.Muon(matrices).step()
    weight = matrices[0].detach()
    for traced in (lambda x: x.mean(), lambda x: x.t() @ x):
        with pytest.raises(Exception, match="on a matrix with a home node"):
            torch.compile(traced, backend="aot_eager", dynamic=False)(weight)
    found = torch.compile(lambda x: (x * 2 + x).exp(), backend="aot_eager", dynamic=False)(weight)
    assert found.placements == weight.placements
    torch.testing.assert_close(_full(found), (3 * _full(weight)).exp())


def _check_all(mesh: DeviceMesh) -> None:
    _check_ops(mesh)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    _check_checkpoints(mesh, folders[0])
    _check_mistakes(mesh)


@pytest.mark.slow
def test_ops_checkpoints_and_mistakes() -> None:
    run(_check_all, nodes=2, ranks_per_node=2)
