"""Optimizers, norms and gathers of sharded parameters, compared with one rank's, on uneven rows."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from benchmarks.optimizers import CASES, measure
from tests.device.choice import seeded
from tests.distributed.jobs import WORKS, Job, Verdicts, asked, message_of, run_jobs

pytestmark = pytest.mark.distributed


class _Warnings(logging.Handler):
    """Collects the warnings of torch and fcdp in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _warnings_of(job: Job, mesh: DeviceMesh) -> list[str]:
    handler = _Warnings()
    loggers = [logging.getLogger(name) for name in ("torch", "fcdp_compile")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        job(mesh)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    return handler.texts


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7))


def _pair(mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded model and an equal unsharded one, both with the gradients of one batch."""
    model, plain = fcdp_compile.shard(_build(), mesh, **options), _build()
    batch = torch.randn(16, 6, generator=seeded(1))
    plain(batch).square().mean().backward()
    model(batch.view(4, 4, 6)[dist.get_rank()]).square().mean().backward()
    return model, plain


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _collect(mesh: DeviceMesh) -> None:
    # Sums of the same numbers in another order: no more than a few units in the last place.
    close = {"rtol": 1e-5, "atol": 1e-7}
    for options in ({}, {"strategy": "mics"}, {"module_strategies": {"2": "mics", "0": "ddp"}}):
        model, plain = _pair(mesh, **options)
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        for norm_type in (1.0, 2.0, 3.0):
            norms = [
                nn.utils.get_total_norm([p.grad for p in m.parameters()], norm_type)
                for m in (model, plain)
            ]
            torch.testing.assert_close(_whole(norms[0]), norms[1], **close)
            assert torch.isclose(torch.tensor(norms[0].item()), norms[1], **close), options
        for m in (model, plain):
            nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        for sharded, whole in pairs:
            torch.testing.assert_close(_whole(sharded.grad), whole.grad, **close)
            assert torch.equal(_whole(sharded), whole)
            for function in (Tensor.sum, Tensor.norm, Tensor.mean, Tensor.max):
                one, other = function(sharded.detach()), function(whole.detach())
                assert one.item() == pytest.approx(other.item(), rel=1e-5), (function, options)
            assert float((sharded * sharded).sum()) == pytest.approx(float(whole.norm()) ** 2)
        # Gradients of a norm and of gathered values equal those of one rank.
        for sharded, whole in pairs:
            sharded.grad = whole.grad = None
            (2 * sharded.norm()).backward()
            (_whole(sharded) ** 3).sum().backward()
            (2 * whole.norm() + (whole**3).sum()).backward()
            torch.testing.assert_close(_whole(sharded.grad), whole.grad, **close)


def _collect_quietly(mesh: DeviceMesh) -> None:
    assert _warnings_of(_collect, mesh) == []


def _lists(mesh: DeviceMesh) -> None:
    """The fast implementation is used, gives the loop's bits, and leaves nothing behind."""
    model, other = _pair(mesh)[0], _pair(mesh)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loop = torch.optim.AdamW(other.parameters(), lr=0.1, foreach=False)
    seen = []
    for _ in range(3):
        optimizer.step(lambda: seen.append(optimizer.param_groups[0]["foreach"]) or 0.0)
        loop.step()
    assert seen == [True] * 3
    assert optimizer.param_groups[0]["foreach"] is None
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(_whole(one), _whole(two))
        assert torch.equal(
            _whole(optimizer.state[one]["exp_avg_sq"]), _whole(loop.state[two]["exp_avg_sq"])
        )
    # The state can be read without fcdp.
    file = io.BytesIO()
    torch.save(copy.deepcopy(optimizer.state_dict()), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read["state"][0]["exp_avg"]) is DTensor


def _outcomes(mesh: DeviceMesh) -> None:
    by_title = {case.title: case for case in CASES}
    for title in (
        "SGD (momentum=0.9, fused=True)",
        "Adafactor",
        "LBFGS (line_search_fn=strong_wolfe)",
        "Rprop",
    ):
        found = measure(mesh, by_title[title])
        assert found.refusal is None, (title, found)
        # Doubles: a mistake is larger by many orders.
        assert (found.gap or 0.0) < 1e-9, (title, found)
    assert found.inter_bytes == 0
    refused = measure(mesh, by_title["transformers Adafactor"]).refusal
    assert "docs/optimizers.md" in str(refused)
    texts = _warnings_of(lambda m: measure(m, by_title["Muon"]), mesh)
    if dist.get_rank() == 0:
        assert [t[:38] for t in texts] == ["Muon communicates in its step: it sent"], texts
    else:
        assert not texts


def _views(mesh: DeviceMesh) -> None:
    """A flat view of uneven rows can be read; a write to the view would be lost and is refused."""
    parameter = next(_pair(mesh)[0].parameters()).detach()
    flat = parameter.view(-1)
    assert torch.equal(_whole(flat), next(_build().parameters()).flatten())
    assert "would be lost" in message_of(fcdp_compile.errors.FcdpError, lambda: flat[1:3].add_(1.0))
    # Ranks that share a cache of graphs: of each, only those with as many rows get the same graph.
    facts: list[Any] = [None] * dist.get_world_size()
    mine = (parameter.to_local().shape, parameter._stable_hash_for_caching())
    dist.all_gather_object(facts, mine)
    assert 1 < len({shape for shape, _ in facts}) == len(set(facts)) == len({h for _, h in facts})


def _anomalies(mesh: DeviceMesh) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        _pair(mesh)


_JOBS: dict[str, Job] = {
    "one collective each": _collect_quietly,
    "lists": _lists,
    "outcomes": _outcomes,
    "views": _views,
    "anomalies": _anomalies,
}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("job", _JOBS)
def test_sharded_tensors_do_as_whole_ones(verdicts: Verdicts, job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4
