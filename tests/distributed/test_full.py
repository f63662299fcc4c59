"""Parameters that the training loop uses outside of the model's forward, compared with a replicated run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile import full
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError, UnshardedParameterError
from tests.device.choice import seeded
from tests.distributed.beside import assert_close, whole
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 9)
        self.base.requires_grad_(False)
        self.body = nn.Linear(9, 5)
        self.head = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(torch.tanh(self.base(inputs))) * self.scale
        return outputs


def _torch_full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


Loss = Callable[[_Net, Tensor, Callable[[Tensor], Tensor]], Tensor]

LOSSES: dict[str, Loss] = {
    # Losses equal on every rank, and losses of a rank's data times a parameter; `whole`: full, full_tensor.
    "full": lambda m, out, whole: out.mean() + 0.1 * whole(m.head.weight).norm(),
    "local data": lambda m, out, whole: (out @ whole(m.head.weight).T).square().mean(),
    "frozen": lambda m, out, whole: (out.T @ out @ whole(m.base.weight)[:5]).mean(),
    # Plain arithmetic.
    "norm": lambda m, out, _: out.square().mean() + 0.1 * m.head.weight.norm(),
    "l1": lambda m, out, _: out.square().mean() + 0.1 * sum(p.abs().sum() for p in m.parameters()),
    "l2": lambda m, out, _: sum(p.pow(2).sum() for p in m.parameters()) + out.mean(),
    "largest": lambda m, out, _: m.body.weight.max() * out.square().mean(),
    "orthogonal": lambda m, out, _: (
        (m.body.weight @ m.body.weight.T - torch.eye(5)).square().sum() + out.mean()
    ),
    "scale": lambda m, out, _: (out @ out.T * m.scale.exp()).mean(),
    "weight of a loss": lambda m, out, _: (
        torch.exp(-m.scale) * out.square().mean() + m.scale + out.abs().mean() * m.scale
    ),
    "hooks": lambda m, out, _: out.square().mean(),
    "matrix": lambda m, out, _: (out @ m.head.weight.T).square().mean(),
}


def _train(
    mesh: DeviceMesh | None, loss: Loss, take: Callable[[Tensor], Tensor], is_compiled: bool
) -> None:
    torch.manual_seed(0)
    plain = _Net()
    if loss is LOSSES["hooks"]:
        plain.register_forward_pre_hook(lambda m, args: (args[0] + m.base.weight.mean(),))
        plain.register_forward_hook(lambda m, _, out: out @ m.body.weight[:, :5] * m.scale)
    model = copy.deepcopy(plain)
    fcdp_compile.shard(model, mesh)
    net = torch.compile(model, backend="fcdp") if is_compiled else model
    rank, world = (dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)
    batches = [torch.randn(4, 7, generator=seeded(r)) for r in range(world)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for _ in range(2):
        mine = loss(model, net(batches[rank]), take)
        mine.backward()
        theirs = [loss(plain, plain(b), lambda p: p) for b in batches]
        (sum(theirs) / world).backward()
        assert not isinstance(mine, DTensor)
        assert_close(mine.detach(), theirs[rank].detach(), "the loss")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                assert_close(whole(p.grad), q.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _losses(mesh: DeviceMesh | None) -> None:
    for name, loss in LOSSES.items():
        takes = (full, _torch_full) if "whole" in loss.__code__.co_varnames else (full,)
        for take in takes:
            for is_compiled in (True, False) if name in ("local data", "l1", "hooks") else (True,):
                torch.compiler.reset()
                try:
                    _train(mesh, loss, take, is_compiled)
                except BaseException as error:
                    error.add_note(f"{name}, {take.__name__}, {is_compiled=}")
                    raise


def _averages(mesh: DeviceMesh) -> None:
    """Averages kept beside the parameters, with writes to both."""
    torch.manual_seed(0)
    plain = _Net()
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    kept = []
    for net in (model, plain):
        mine = {n: p.detach().clone() for n, p in net.named_parameters()}
        for name, p in net.named_parameters():
            p.data.mul_(torch.tensor(2.0))
            with torch.no_grad():
                mine[name].mul_(torch.tensor(0.5)).lerp_(p, torch.tensor(0.1))
                torch._foreach_add_([mine[name]], torch.tensor(1.0))
        mine["head.weight"].copy_(torch.ones(3, 5))
        mine["body.bias"].data = torch.ones(5)
        kept.append(mine)
    for name, value in kept[0].items():
        assert_close(whole(value), kept[1][name].detach(), name)
    for take in (float, int, bool, Tensor.item, lambda v: v.detach().item()):
        assert take((model.body.weight > 0).sum()) == take((plain.body.weight > 0).sum())
    with torch.no_grad(), pytest.raises(FcdpError, match="would be lost"):
        model.body.weight[:1, :1].fill_(5)


def _reads(mesh: DeviceMesh) -> dict[str, int]:
    """The bytes that a read of a cached frozen parameter sends between nodes, and refused reads."""
    torch.manual_seed(0)
    plain = _Net()
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    net = torch.compile(model, backend="fcdp", options={"device_memory": 1})
    net(torch.ones(2, 7)).sum().backward()
    counters = state_of(model).counters
    before = dict(counters.sent)
    assert torch.equal(full(model.base.weight), plain.base.weight)
    sent = {k: v - before.get(k, 0) for k, v in counters.sent.items()}
    for meet, name in (
        (lambda w: torch.ones(3, 5).mul(w), "parameter 'head.weight'"),
        (lambda w: torch.mul(w, nn.Parameter(torch.ones(5))), "parameter 'head.weight'"),
        (lambda w: nn.functional.linear(torch.ones(2, 5), w), "a value of sharded parameters"),
    ):
        with pytest.raises(FcdpError, match=rf"combines {name}, .*fcdp_compile.full\(parameter\)"):
            meet(model.head.weight)
    with pytest.raises(UnshardedParameterError, match="belongs to no sharded model"):
        full(nn.Parameter(torch.ones(2)))
    with torch.no_grad():
        assert_close(
            torch.tensor(model.head.weight.norm().item()), plain.head.weight.norm(), "item"
        )
    return sent


@pytest.mark.slow
def test_like_a_replicated_run() -> None:
    run(_losses, nodes=2, ranks_per_node=2)


def test_values_that_are_kept() -> None:
    run(_averages, nodes=2, ranks_per_node=1)


@pytest.mark.slow
def test_in_one_process() -> None:
    _losses(None)


def test_a_cached_parameter_is_read_within_the_node() -> None:
    for sent in run(_reads, nodes=2, ranks_per_node=2):
        assert sent.get("inter_all_gather", 0) == 0
        assert sent.get("load", 0) > 0
