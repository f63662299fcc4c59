"""Parameters that ranks of a node share ("tp"), and fcdp shards: parity with one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)

import fcdp_compile
from builders_planner import make_profile
from fcdp_compile import Strategy
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.tools.planner import Job, estimate, trace
from tests.distributed.cut_models import (
    CASES,
    ONE_LENGTH,
    SIZES,
    VOCABULARY,
    Stack,
    adamw,
    batch_of,
    llama,
    with_experts,
)
from tests.distributed.parity import values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def _train(mesh: DeviceMesh, case: str, compute: str | None) -> Iterator[tuple[float, float]]:
    make, cut = CASES[case]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    model = fcdp_compile.shard(cut(make(), whole), whole)
    if case == "LoRA later":  # PEFT has drawn values for each rank's part
        model.load_state_dict(plain.state_dict())
    net: Any = model
    if compute is not None:
        net = torch.compile(model, backend="fcdp", options={"compute": compute})
    optimizer, other = adamw(model), adamw(plain)
    assert whole is not None
    node, (nodes, places) = whole.get_local_rank("inter"), whole.shape[:2]
    mine = node * places + whole.get_local_rank("intra")
    for step in range(3):
        batches = [
            batch_of(n, step, 16 if case in ONE_LENGTH else 16 + 3 * step + n)
            for n in range(nodes * places)
        ]
        losses = [plain(**batch).loss for batch in batches]
        expected = torch.stack(losses).mean()
        expected.backward()
        loss = net(**batches[mine]).loss
        loss.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        assert float(norms[0].full_tensor()) == pytest.approx(float(norms[1]), rel=1e-5), case  # type: ignore[attr-defined]
        for o in (optimizer, other):
            o.step()
            o.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield float(mean) / dist.get_world_size(), expected.item()
    with torch.no_grad():
        assert torch.allclose(
            net(**batch_of(0, 9)).loss, plain(**batch_of(0, 9)).loss, rtol=1e-5
        ), case
    own = values(model)
    for name, value in plain.named_parameters():
        assert own[name].shape == value.shape
        assert torch.allclose(own[name], value, atol=2e-5), (case, name)
    if compute is not None:
        assert not fcdp_compile.explain(net).graph_breaks, case


def _parity(mesh: DeviceMesh, cases: Sequence[str], compute: str | None = "eager") -> None:
    for case in cases:
        torch._dynamo.reset()
        for loss, expected in _train(mesh, case, compute):
            assert loss == pytest.approx(expected, rel=1e-5), case


_FEW = ("experts",)


@pytest.mark.parametrize(
    "cases",
    [_FEW, tuple(CASES.keys() - set(_FEW))],
    ids=["few", "rest"],
)
@pytest.mark.rare
def test_losses_and_parameters_are_those_of_one_process(cases: Sequence[str]) -> None:
    run(_parity, cases, nodes=2, ranks_per_node=2)


def _outside(mesh: DeviceMesh) -> None:
    """Whole values, writes and state dicts are those of the plain model, bit by bit."""
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    for make, cut in (CASES["mixture"], CASES["norms of heads"], CASES["declared parts"]):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        model = fcdp_compile.shard(cut(make(), whole), whole)
        names = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(fcdp_compile.full(parameter), names[name]), name
        name, parameter = [(n, p) for n, p in model.named_parameters() if p.ndim > 1][-1]
        for value in (fcdp_compile.full(parameter), names[name]):
            (value**2).sum().backward()
        gradient: Any = parameter.grad
        assert torch.allclose(gradient.full_tensor(), names[name].grad), name  # type: ignore[arg-type]
        with torch.no_grad(), fcdp_compile.gathered(model, writeback=True):
            loss = model(**batch_of(0, 0)).loss
            for p in model.parameters():
                p.mul_(0.5)
        with torch.no_grad():
            assert torch.allclose(loss, plain(**batch_of(0, 0)).loss, rtol=1e-5)
            for p in plain.parameters():
                p.mul_(0.5)
        assert _equal(model, plain)
        model.load_state_dict({k: v * 2 for k, v in plain.state_dict().items()})
        plain.load_state_dict({k: v * 2 for k, v in plain.state_dict().items()})
        assert _equal(model, plain)


def _equal(model: nn.Module, plain: nn.Module) -> bool:
    pairs: Any = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(p.full_tensor(), q) for p, q in pairs)


def _refusals(mesh: DeviceMesh) -> None:
    def refused(match: str, act: Callable[[], object]) -> None:
        with pytest.raises(ArgumentError, match=match):
            act()

    refused(r"tp=3 must be a whole number that divides", lambda: fcdp_compile.make_mesh(2, tp=3))
    refused(
        r"tp=2 must be a whole number that divides the 1 ranks of a node with cp=2 that are left",
        lambda: fcdp_compile.make_mesh(2, cp=2, tp=2),
    )
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    assert whole is not None
    assert whole.mesh_dim_names == ("inter", "intra", "tp")
    tp, place = fcdp_compile.tensor_parallel, whole.get_local_rank("tp")
    refused("takes a model of Transformers", lambda: tp(nn.Linear(2, 2), whole))
    refused("2 ranks cannot share 4 query heads and 1 key", lambda: tp(llama(1), whole))
    late = peft.get_peft_model(tp(llama(), whole), peft.LoraConfig(modules_to_save=["lm_head"]))
    refused("was copied after the model was cut", lambda: tp(late, whole))
    late = peft.get_peft_model(tp(llama(), whole), peft.LoraConfig(target_modules=["q_proj"]))
    refused("after fcdp_compile.tensor_parallel", lambda: fcdp_compile.shard(late, whole))
    refused("it has no experts", lambda: with_experts(llama(), whole))
    refused("is a DTensor already", lambda: fcdp_compile.shard(tp(llama(), whole), mesh))
    other = parallelize_module(Stack(), mesh["inter"], {"blocks.*.up": ColwiseParallel()})
    refused(r'rank\'s "tp" mesh has ranks', lambda: fcdp_compile.shard(other, whole))
    torch.manual_seed(place)
    refused(r"differs between ranks \[0, 1\]", lambda: fcdp_compile.shard(Stack(), whole))
    dropping = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    with torch.no_grad():
        for parameter in dropping.parameters():
            parameter.zero_()
    refused("have different seeds for dropout", lambda: fcdp_compile.shard(dropping, whole))
    refused(
        "keeps whole matrices on a node",
        lambda: fcdp_compile.shard(tp(llama(), whole), whole, strategy="fcdp+matrix"),
    )
    refused(
        "takes Shard of a dimension",
        lambda: fcdp_compile.declare_part(nn.Parameter(torch.ones(2)), whole, Shard(1)),
    )
    torch.manual_seed(0)
    model = fcdp_compile.shard(tp(llama(), whole), whole)
    model.compile(backend="fcdp", options={"compute": "eager"})
    refused(
        r'ranks 0, 1 share parameters \("tp"\) but got different batches',
        lambda: model(**batch_of(dist.get_rank(), 0)),
    )


def _bytes(mesh: DeviceMesh) -> tuple[int, int]:
    """What this rank sends to other nodes in an ordinary step, and its part of the parameters."""
    torch.manual_seed(0)
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    model = fcdp_compile.shard(fcdp_compile.tensor_parallel(llama(), whole), whole)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    optimizer = adamw(model)
    assert whole is not None
    for step in range(2):
        net(**batch_of(whole.get_local_rank("inter"), step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "intra (model) [B]" in str(fcdp_compile.explain(net))
    parts = sum(math.prod(r.spec.layout.shape) for r in state_of(model).records.values())
    return fcdp_compile.traffic(net).last_step.bytes("inter"), 4 * parts


@pytest.mark.slow
def test_bytes_are_planned() -> None:
    """The parts of a rank cross twice, as weights and as gradients: counted = formula = plan."""

    def build(batch: int, seq: int) -> tuple[nn.Module, Any]:
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return llama(), {"input_ids": ids, "labels": ids.clone()}

    found = run(_bytes, nodes=2, ranks_per_node=2)
    agreed = found[0][0] - found[0][1]  # a rank has half of the parts, and sends them twice
    assert 0 <= agreed < 1024
    assert [sent - part for sent, part in found] == [agreed] * 4
    job = Job(profile=make_profile(), nodes=2, ranks_per_node=2, batch=2, tp=2)
    planned = estimate(trace(build, seq=16, param_dtype=None, tp=2), Strategy.parse("fcdp"), job)
    assert job.tp * planned.simulate().bytes_sent_by_node == found[0][1] + found[1][1]
    sent_within = [s.inner_bytes for part in planned.parts for s in part.steps]
    activations = 2 * 16 * SIZES["hidden_size"] * 4  # bytes of one rank's batch
    # An all-reduce of 2 ranks sends as much as it reduces: after the embedding, attention and MLP of each
    # layer, and of the gradients that enter these two and the head; the head gathers its logits.
    logits = 2 * 16 * VOCABULARY // 2 * 4
    assert sum(sent_within) >= (1 + 2 * SIZES["num_hidden_layers"]) * activations + logits


@pytest.mark.slow
def test_values_outside_and_refusals() -> None:
    run(_outside, nodes=2, ranks_per_node=2)
    run(_refusals, nodes=2, ranks_per_node=2)
