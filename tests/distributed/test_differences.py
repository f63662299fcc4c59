"""Weights that cross as differences have the bits of weights that cross as values, whatever changes them."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.strategy.formats import Format
from tests.distributed.beside import Beside, named
from tests.distributed.models import CASES, Case
from tests.distributed.ranks import run
from tests.distributed.test_staleness import FULL
from tests.marks import quick

pytestmark = pytest.mark.distributed


class Twins(Beside):
    """`plain` is sharded and compiled, too, and its weights cross as values."""

    def __init__(self, mesh: DeviceMesh, strategy: str, case: Case = CASES["odd"]) -> None:
        low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        options = {"bucket_mb": 300 / 2**20, "compute": "eager"}
        super().__init__(mesh, case, options=options, strategy=f"{strategy}+delta", **low)
        fcdp_compile.shard(self.plain, mesh, strategy=strategy, **low)
        self.other_net = self.compiled(self.plain)
        self.has_matrices = "matrix" in strategy
        self.use(_adamw)

    def pairs(self, step: int) -> tuple[Tensor, Tensor]:
        found = tuple(self.case.loss(net, self.data(step)) for net in (self.net, self.other_net))
        assert _same(*(loss.detach() for loss in found)), f"loss of step {step}"
        return found

    def losses(self, step: int) -> tuple[float, float]:
        first, second = self.pairs(step)
        return first.item(), second.item()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            for loss in self.pairs(self.step):
                loss.backward()
            self.optimize()
            self.step += 1

    def compare_parameters(self) -> None:
        for (name, mine), other in zip(
            self.model.named_parameters(), self.plain.parameters(), strict=True
        ):
            assert _same(mine.to_local(), other.to_local()), name

    def compare_copies(self) -> None:
        """The copies of each bucket have the same bits on both sides."""
        mine, other = (_copies(m) for m in self.both)
        assert mine.keys() == other.keys()
        for number, copy in mine.items():
            assert _same(copy, other[number]), f"copy of bucket {number}"

    def sent(self) -> list[int]:
        """The bytes of weights that this rank has sent between nodes, as differences and as values."""
        return [state_of(m).counters.sent.get("inter_all_gather", 0) for m in self.both]


def _copies(model: nn.Module) -> dict[int, Tensor]:
    """The node shards of the buckets that graphs have stored, by the bucket's number."""
    found = {}
    for plan in state_of(model).bound.values():
        for number, bucket in plan.items():
            shard = bucket.cache.node_shard(bucket.generation, bucket.home)
            if shard is not None:
                found[number] = shard
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


# --- changes beyond those of `test_staleness` -----------------------------------------------------------


def _on_one_rank(pair: Twins, change: Callable[[nn.Module], Any]) -> None:
    if pair.rank == 0:  # it has the first chunk, which is never empty
        for model in pair.both:
            change(model)


def _one_local(model: nn.Module) -> None:
    with torch.no_grad():
        named(model, "first.weight").to_local().mul_(-2.0).add_(1.0)


def _special(pair: Twins) -> None:
    """Infinities, NaN, negative zeros and denormals come and go."""
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-40, -1e-39, 0.0])
    parts = [named(m, "second.weight").to_local().view(-1) for m in pair.both]
    for part in parts:
        n, kept = part.numel() // 2, part.clone()
        with torch.no_grad():
            part[:n] = special.repeat(-(-n // len(special)))[:n]
    pair.losses(80)
    pair.compare_copies()
    for part in parts:
        with torch.no_grad():
            part.copy_(kept)


def _dropped(model: nn.Module) -> None:
    for cache in state_of(model).buckets.caches():
        cache.drop()


def _micro_batches(pair: Twins) -> None:
    for model, net in zip(pair.both, (pair.net, pair.other_net), strict=True):
        with fcdp_compile.no_sync(model):
            pair.case.loss(net, pair.data(50)).backward()
        pair.case.loss(net, pair.data(51)).backward()
    pair.optimize()


def _evaluated(pair: Twins) -> None:
    with torch.no_grad():
        pair.losses(60)
    pair.train()
    pair.losses(61)  # a forward whose backward never runs


def _uncompiled(pair: Twins) -> None:
    """Reads outside of graphs refresh the graphs' copies."""
    pair.train()
    first, second = (pair.case.loss(m, pair.data(70)).item() for m in pair.both)
    assert first == second


def _saved(pair: Twins) -> None:
    pair.train()
    for model in pair.both:
        with fcdp_compile.gathered(model):
            pass


def _one_group(pair: Twins) -> None:
    """Only some parameters step, so copies of some buckets stay valid."""
    pair.use(lambda parameters: torch.optim.SGD(list(parameters)[:2], lr=0.1))
    pair.train(2)
    for model in pair.both:
        model.zero_grad()
    pair.use(_adamw)


def _loaded(pair: Twins) -> None:
    """A checkpoint is saved, training goes on, and the checkpoint comes back."""
    folders = [tempfile.mkdtemp() if pair.rank == 0 else ""]
    dist.broadcast_object_list(folders)
    optimizers = (pair.optimizer, pair.plain_optimizer)
    for act in (fcdp_compile.save, fcdp_compile.load):
        for i, (model, optimizer) in enumerate(zip(pair.both, optimizers, strict=True)):
            act(f"{folders[0]}/{i}", model=model, optimizer=optimizer)
        pair.train(2)
    if pair.rank == 0:
        shutil.rmtree(folders[0])


def _muon(parameters: Any) -> torch.optim.Optimizer:
    """Muon for matrices that have home nodes, or might have them; AdamW for the others."""
    given = list(parameters)
    hidden = [p for p in given if p.shape in ((13, 7), (7, 13))]
    others = [p for p in given if p.shape not in ((13, 7), (7, 13))]
    return fcdp_compile.combine(fcdp_compile.Muon(hidden, lr=0.01), _adamw(others))


def _stepped_by_muon(pair: Twins) -> None:
    if pair.has_matrices:
        pair.use(_muon)
        pair.train(2)
        pair.use(_adamw)


def _other_shape(pair: Twins) -> None:
    """One rank has another batch, and compiles again."""
    ids = pair.data(95)
    if pair.rank == 1:
        ids = torch.cat([ids, ids])
    for net in (pair.net, pair.other_net):
        pair.case.loss(net, ids).backward()
    pair.optimize()


MORE: dict[str, Callable[[Twins], None]] = {
    "one rank's rows": partial(_on_one_rank, change=_one_local),
    "special values": _special,
    "copies of one rank gone": partial(_on_one_rank, change=_dropped),
    "copies of all ranks gone": lambda pair: [_dropped(m) for m in pair.both],
    "a failure on one rank": partial(
        _on_one_rank, change=lambda model: state_of(model).references.fail()
    ),
    "micro-batches": _micro_batches,
    "evaluation": _evaluated,
    "uncompiled": _uncompiled,
    "gathered": _saved,
    "some parameters": _one_group,
    "checkpoint": _loaded,
    "Muon": _stepped_by_muon,
    "another shape on one rank": _other_shape,
}
NOT_FOR_TWINS = {
    "_local_tensor on one rank",
    "to_local() on one rank",
}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes of weights that a rank sent between nodes, as differences and as values."""

    differences: int
    values: int


def _all_changes(mesh: DeviceMesh, strategy: str) -> dict[str, Sent]:
    torch._dynamo.config.recompile_limit = 64
    pair = Twins(mesh, strategy)
    pair.train(2)
    buckets = [b for plan in state_of(pair.model).plans.values() for b in plan.buckets]
    assert {b.wire for b in buckets} == {Format.DELTA}
    seen = {}
    usual = {n: c for n, c in FULL.items() if n not in NOT_FOR_TWINS} if strategy == "fcdp" else {}
    for name, change in (usual | MORE).items():
        before = pair.sent()
        try:
            change(pair)
            pair.train(2)
            pair.losses(1000)
            pair.compare_copies()
            pair.compare_parameters()
        except Exception as error:
            raise AssertionError(f"change {name!r}") from error
        mine, other = (b - a for a, b in zip(before, pair.sent(), strict=True))
        seen[name] = Sent(differences=mine, values=other)
    return seen


@pytest.mark.parametrize("strategy", quick(["fcdp", "zero2+g4", "fcdp+matrix"], "fcdp"))
def test_every_change(strategy: str) -> None:
    for seen in run(_all_changes, strategy, nodes=2, ranks_per_node=2):
        for name, sent in seen.items():
            assert sent.differences <= sent.values, name
        assert sum(s.differences for s in seen.values()) < 0.9 * sum(
            s.values for s in seen.values()
        )


# --- a damaged copy ---------------------------------------------------------------------------------------


def _damaged(mesh: DeviceMesh) -> None:
    """One value of one rank's copy flips a bit: wrong weights are computed with once, and then noticed."""
    pair = Twins(mesh, "fcdp")
    pair.train(3)
    pair.losses(0)
    if pair.rank == 0:
        _copies(pair.model)[0].view(torch.int16)[-1] ^= 8
    for seed in range(2):  # the copy is valid at first; then a difference is added to it
        pair.case.loss(pair.net, pair.data(seed)).backward()
        pair.optimize()
    with pytest.raises(FcdpError, match=r"bucket 0 \(.* is not what was sent"):
        pair.case.loss(pair.net, pair.data(2))
    with torch.no_grad():
        for mine, other in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            mine.copy_(other)
    pair.use(_adamw)
    pair.train(3)
    pair.compare_copies()
    pair.compare_parameters()


def test_a_damaged_copy_is_noticed() -> None:
    run(_damaged, nodes=2, ranks_per_node=2)


# --- between the programs of one forward ----------------------------------------------------------------


class Broken(nn.Module):
    """Three programs; `between` runs before the second, which starts the last one's gather."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CASES["odd"].vocabulary, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.between: Callable[[], None] = lambda: None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(ids))
        self._pause()
        x = self.layers[1](x).relu()
        torch._dynamo.graph_break()
        return self.layers[2](x)

    @torch._dynamo.disable
    def _pause(self) -> None:
        self.between()


_BROKEN = Case(
    model=Broken,
    loss=lambda net, ids: net(ids).float().square().mean(),
    vocabulary=CASES["odd"].vocabulary,
)


def _written_between(mesh: DeviceMesh) -> None:
    """Rows change on all ranks or on one, which finds it out before others; then their gather starts."""
    pair = Twins(mesh, "fcdp", _BROKEN)
    pair.train(4)  # the second step on, gathers start early
    for ranks in (range(4), (0,), (3,)):
        for model in pair.both:
            rows = named(model, "layers.2.weight").to_local()
            model.between = partial(_scale, rows if pair.rank in ranks else rows[:0])
        pair.train()
        for model in pair.both:
            model.between = lambda: None
        pair.train(2)
        pair.losses(0)
        pair.compare_copies()
        pair.compare_parameters()
    mine, other = pair.sent()
    assert mine < other


def _scale(rows: Tensor) -> None:
    with torch.no_grad():
        rows.mul_(-3).add_(0.1)


def test_rows_change_before_their_gather_starts_early() -> None:
    run(_written_between, nodes=2, ranks_per_node=2)


# --- matrices with home nodes -----------------------------------------------------------------------------


def _three_matrices(mesh: DeviceMesh) -> None:
    """Each matrix is a bucket, of which one node owns nothing."""
    case = Case(
        model=lambda: nn.Sequential(
            nn.Embedding(11, 64), *(nn.Linear(64, 64, bias=False) for _ in range(3))
        ),
        loss=lambda net, ids: net(ids).float().square().mean(),
        vocabulary=11,
    )
    pair = Twins(mesh, "fcdp+matrix", case)
    pair.train(4)
    sizes = [b.sizes() for plan in state_of(pair.model).plans.values() for b in plan.buckets]
    assert {(64 * 64, 0), (0, 64 * 64)} <= set(sizes)
    pair.losses(0)
    pair.compare_copies()
    pair.compare_parameters()
    total = [torch.tensor(sent) for sent in pair.sent()]
    for sent in total:
        dist.all_reduce(sent)
    assert total[0] < total[1] * 0.7


def test_a_node_owns_nothing_of_a_bucket() -> None:
    run(_three_matrices, nodes=2, ranks_per_node=1)


# --- bytes ------------------------------------------------------------------------------------------------


_STAGES = (1, 2, 4, 8, 16)


def _bits(model: nn.Module) -> dict[str, Tensor]:
    """The local rows of each parameter as they are gathered, as the bits of bf16."""
    found = {n: p.to_local().detach() for n, p in model.named_parameters()}
    return {n: t.bfloat16().flatten().view(torch.int16).to(torch.int32) for n, t in found.items()}


def _z(new: Tensor, old: Tensor) -> Tensor:
    """`difference` by another way: distances on the number line of bf16."""
    a, b = (torch.where(t < 0, -(t & 0x7FFF) - 1, t) for t in (new, old))
    d = (a - b + 0x8000) % 0x10000 - 0x8000
    return torch.where(d < 0, -2 * d - 1, 2 * d)


def _expected(model: nn.Module, old: dict[str, Tensor]) -> int:
    """Bytes that this rank must send to each other node after a change."""
    state, new = state_of(model), _bits(model)
    plan = max(state.plans.values(), key=lambda p: len(p.buckets))
    total = 0
    for bucket in plan.buckets:
        z = torch.cat([_z(new[p.name], old[p.name]) for p in bucket.params])
        lengths = [2 * bucket.slot_elements]
        least = itertools.accumulate((2**b - 1 for b in _STAGES[:-1]), initial=0)
        mine = [int((z >= limit).sum()) for limit in least]
        mine[0] = bucket.slot_elements  # padding never changes
        # All ranks send as much as the rank with the most values in each stage.
        most = [max(row) for row in zip(*state.collectives.agree(mine), strict=True)]
        coded = sum(math.ceil(n * b / 8) for n, b in zip(most, _STAGES, strict=True))
        lengths.append(coded + 8)
        if bucket.wire is Format.DELTA:
            total += min(lengths)
    return total * (plan.nodes - 1)


def _bytes_of_steps(mesh: DeviceMesh) -> None:
    pair = Twins(mesh, "fcdp")
    pair.train(2)
    for _ in range(5):
        pair.losses(0)
        old, before = _bits(pair.model), pair.sent()
        pair.train()
        expected = _expected(pair.model, old)
        pair.losses(0)
        mine, values = (b - a for a, b in zip(before, pair.sent(), strict=True))
        assert mine == expected < values / 2


def test_bytes_are_those_of_the_formula() -> None:
    run(_bytes_of_steps, nodes=3, ranks_per_node=1)
