"""In an ordinary step the Python thread does not wait for the device; it notices every access to values."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile import devices
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.params.seals import seal
from tests.distributed.beside import Beside, named
from tests.distributed.jobs import WORKS, Job, Verdicts, asked, rows, run_jobs
from tests.distributed.models import CASES
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

_READERS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that make the Python thread wait for a device."""

_OF_THE_HOST = {
    ("collectives.py", "finish"),  # words of an agreement
    ("program.py", "_stamped"),  # the generations that a forward hands to its backward
}
"""Functions that read only tensors that are always on the host."""

_READ = ("reads.py", "read")

_OURS = [Path(fcdp_compile.__file__).parent, Path(fcdp_compile.__file__).parent.parent / "runtime"]


@contextmanager
def _reads() -> Iterator[Counter[tuple[str, str]]]:
    """Count where fcdp reads tensors within the block, by file and function; also waits for copies."""
    found: Counter[tuple[str, str]] = Counter()

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            code = sys._getframe(1).f_code
            path = Path(code.co_filename)
            at = (path.name, code.co_name)
            if any(folder in path.parents for folder in _OURS) and at not in _OF_THE_HOST:
                found[at] += 1
            return read(*args, **more)

        return call

    from fcdp_compile.runtime.buckets.bucket_cache import BucketCache

    patch = pytest.MonkeyPatch()
    for name in _READERS:
        patch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    patch.setattr(BucketCache, "node_shard", counted(BucketCache.node_shard))  # synchronises
    try:
        yield found
    finally:
        patch.undo()


def _backward(pair: Beside, *, synchronises: bool = True) -> None:
    loss = pair.case.loss(pair.net, pair.data(pair.step))
    pair.step += 1
    if synchronises:
        loss.backward()
        return
    with fcdp_compile.no_sync(pair.model):
        loss.backward()


def _counts(mesh: DeviceMesh, case: str, strategy: str) -> dict[str, dict[tuple[str, str], int]]:
    pair = Beside(mesh, CASES[case], strategy=strategy, options={"bucket_mb": 300 / 2**20})

    def step() -> None:
        _backward(pair)
        pair.optimizer.step()
        pair.optimizer.zero_grad()

    def accumulate() -> None:
        with fcdp_compile.no_sync(pair.model):
            for _ in range(3):
                pair.case.loss(pair.net, pair.data(pair.step)).backward()
        step()

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(2):
                pair.case.loss(pair.net, pair.data(pair.step))
        step()

    found = {}
    for act in (step, accumulate, evaluate):
        act()  # compiles
        seen = []
        for _ in range(4):
            with _reads() as reads:
                act()
            seen.append(dict(reads))
        # A gather of a bucket with one shard sends the shard itself.  If the lane still holds the shard when
        # the next forward looks, that looks like a user's alias: then there is one read.
        assert all(reads in ({}, {_READ: 1}) for reads in seen), seen
        found[act.__name__] = min(seen, key=len)
    _backward(pair)
    pair.model.zero_grad()
    with _reads() as reads:
        next(p for p in pair.model.parameters() if not p.requires_grad or case == "odd").data.mul_(
            1.0
        )
        _backward(pair)
    found["control"] = dict(reads)
    return found


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        ("fcdp", "odd-lora"),
        *(
            pytest.param(*other, marks=pytest.mark.rare)
            for other in (
                ("fcdp", "odd"),
                ("zero3", "odd"),
                ("zero3", "odd-lora"),
                ("zero++", "odd"),
                ("zero++", "odd-lora"),
            )
        ),
    ],
)
def test_an_ordinary_step_never_waits_for_the_device(case: str, strategy: str) -> None:
    for found in run(_counts, case, strategy, nodes=2, ranks_per_node=2):
        control = found.pop("control")
        if strategy != "zero3":
            assert found == {"step": {}, "accumulate": {}, "evaluate": {}}
        if strategy == "fcdp":
            assert control[_READ] == 1, "the control: one for all"


# --- seals ----------------------------------------------------------------------------------------------


def _model(mesh: DeviceMesh) -> HomeShard:
    torch.manual_seed(0)
    model = fcdp_compile.shard(CASES["odd"].model(), mesh)
    parameter: HomeShard = named(model, "first.weight")
    parameter._keeps = model  # type: ignore[attr-defined]
    return parameter


_WAYS: dict[str, Callable[[HomeShard], object]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "to_local": lambda p: p.to_local(),
    "_local_tensor": lambda p: p._local_tensor,
    "view": lambda p: p.view_as(p),
    "in place": lambda p: torch.no_grad()(p.mul_)(2.0),
    "copy": lambda p: torch.no_grad()(p.copy_)(torch.ones(p.shape)),
    "list": lambda p: torch.no_grad()(torch._foreach_mul_)([p], 2.0),
    "state dict": lambda p: p._keeps.state_dict(),  # type: ignore[attr-defined]
}


def _every_way(mesh: DeviceMesh) -> None:
    parameter = _model(mesh)
    for name, way in _WAYS.items():
        seal([parameter])
        assert parameter.seal is not None
        assert parameter.seal.is_intact(parameter.held), name
        assert not parameter.norm().isnan(), "who only reads gets no hold of the memory"
        assert parameter.seal.is_intact(parameter.held), name
        way(parameter)
        assert not parameter.seal.is_intact(parameter.held), name
        assert parameter.seal.mark is not None, name
    seal([parameter])
    parameter.data = torch.zeros(parameter.shape)
    assert parameter.seal is None


def _older_views(mesh: DeviceMesh) -> None:
    parameter = _model(mesh)
    for view in (parameter.detach(), parameter.to_local(), parameter.data):
        seal([parameter])
        assert parameter.seal is not None
        assert not parameter.seal.is_intact(parameter.held), "somebody else may write"
        del view


def _within_a_call(mesh: DeviceMesh) -> None:
    parameter = _model(mesh)
    seal([parameter])
    assert parameter._gate is not None
    assert parameter.seal is not None
    parameter._gate.is_called = True
    local = parameter._local_tensor
    assert parameter.seal.is_intact(parameter.held), "Dynamo's guards look"
    with torch.no_grad():
        local.mul_(2.0)
    parameter._gate.is_called = False
    assert not parameter.seal.is_intact(parameter.held)


def _captured(mesh: DeviceMesh) -> None:
    parameter = _model(mesh)
    seal([parameter])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(devices._classes, "sim", raising=False)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for act in (parameter.detach, optimizer.step):
            with pytest.raises(fcdp_compile.FcdpError, match=r"outside of torch\.cuda\.graph"):
                act()


class _Two(nn.Module):
    """Two layers of equal size, each in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.tanh(self.a(x)))
        return found


def _exchange(model: _Two, teacher: _Two) -> None:
    model.a.weight, model.b.weight = model.b.weight, model.a.weight


def _take(model: _Two, teacher: _Two) -> None:
    model.a.weight = teacher.b.weight


def _tie(model: _Two, teacher: _Two) -> None:
    model.b.weight.data = model.a.weight.data


def _write_to_one(model: _Two, teacher: _Two) -> None:
    model.a.weight.data.mul_(3.0)


def _write_to_the_other(model: _Two, teacher: _Two) -> None:
    with torch.no_grad():
        model.b.weight.add_(1.0)


def _places(mesh: DeviceMesh, *, strategy: str, is_frozen: bool) -> None:
    """After each change the sharded model computes the same as the plain model; only changes read values."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, plain_teacher = (_Two().requires_grad_(not is_frozen) for _ in range(2))
    model, teacher = copy.deepcopy(plain), copy.deepcopy(plain_teacher)
    for each in (model, teacher):
        fcdp_compile.shard(each, mesh, strategy=strategy)
    options = {"compute": "eager", "bucket_mb": 300 / 2**20}
    net, other = (torch.compile(m, backend="fcdp", options=options) for m in (model, teacher))
    x = torch.ones(3, 8)
    for change in (_exchange, _exchange, _take, _tie, _write_to_one, _write_to_the_other):
        for _ in range(2):
            torch.testing.assert_close(net(x), plain(x))
            torch.testing.assert_close(other(x), plain_teacher(x))
        change(model, teacher)
        change(plain, plain_teacher)
    torch.testing.assert_close(net(x), plain(x))


def _kept_storages(mesh: DeviceMesh) -> None:
    parameter = _model(mesh)
    local = parameter.to_local()
    for keep in (local.untyped_storage, local.storage):
        kept = keep()
        seal([parameter])
        assert parameter.seal is not None
        assert not parameter.seal.is_intact(parameter.held), "its holder may write"
        del kept


_JOBS: dict[str, Job] = {
    **{
        f"places, {strategy}{', frozen' * is_frozen}": partial(
            _places, strategy=strategy, is_frozen=is_frozen
        )
        for strategy in ("fcdp", "zero3")
        for is_frozen in (False, True)
    },
    "kept storages": _kept_storages,
    "every way to the memory": _every_way,
    "views from before": _older_views,
    "raw tensors within a call": _within_a_call,
    "CUDA graphs": _captured,
}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=1)


@pytest.mark.parametrize("job", rows(_JOBS, slow=[job for job in _JOBS if "zero3" in job]))
def test_seals_and(verdicts: Verdicts, job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 2
