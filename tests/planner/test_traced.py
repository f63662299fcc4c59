"""Traces: for any batch, of several graphs, kept for the next plan, and trusted only if fcdp made them."""

from __future__ import annotations

import importlib
import logging
import logging.handlers
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from builders_planner import (
    LENGTH,
    build_of,
    build_with_batch,
    make_job,
    make_profile,
    traced,
)
from fcdp_compile.cluster.requests import PACKED_FORMATS
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Plan, Variant
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import (
    Estimate,
    ModelOptions,
    Source,
    TracedModel,
    estimate,
    saved,
    trace,
    traced_model,
)
from fcdp_compile.tools.planner.source import PackedLinear
from fcdp_compile.tools.planner.traced import TRACED_BATCH, Inputs
from tests.distributed.ranks import run
from tests.marks import quick

OPTIONS = ModelOptions(seq=LENGTH, dtype=torch.float32)
SMALL = make_profile(device_memory_bytes=50_000)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that keeps traces in these tests."""
    monkeypatch.setenv("FCDP_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def _estimate(model: TracedModel, strategy: str = "fcdp", **job: int) -> Estimate:
    return estimate(model, Strategy.parse(strategy), make_job(profile=SMALL, **job))


def _refuse(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    raise AssertionError("a kept trace was to be used")


# Batches.


class Insists(nn.Module):
    """Works with one batch size only, which it checks."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(batch, 8))
        self.more = nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        return self.more(values * self.weight).sum()


def _insisting(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    return Insists(batch), {"values": torch.zeros(batch, 8)}


@pytest.mark.parametrize(
    ("case", "batch"), quick([("odd", 1), ("odd", 64), ("broken", 5)], ("odd", 64))
)
def test_a_trace_is_of_any_batch(case: str, batch: int) -> None:
    """Peaks equal those of a trace with that batch size."""
    mine = _estimate(traced(case), "zero2", batch=batch)
    fixed = trace(build_with_batch(case, batch), seq=LENGTH, param_dtype=None)
    theirs = _estimate(fixed, "zero2", batch=batch)
    assert mine.peak_gpu_bytes == theirs.peak_gpu_bytes
    assert [p.digest() for p in mine.plans] == [p.digest() for p in theirs.plans]
    work = [[s.flops for part in e.parts for s in part.steps] for e in (mine, theirs)]
    assert sum(work[0]) == sum(work[1]) > 0


def test_a_model_that_insists_on_its_batch() -> None:
    model = trace(_insisting, seq=1, param_dtype=None)
    assert not model.has_any_batch
    assert _estimate(model, batch=TRACED_BATCH).max_batch_per_gpu is None


@pytest.mark.parametrize(
    ("case", "strategy", "accumulate"),
    quick(
        [
            ("odd", "fcdp", 1),
            ("odd", "fcdp", 3),
            ("odd", "zero1", 3),
            ("odd", "ddp", 1),
            ("odd-lora", "zero3", 1),
            ("broken", "zero3", 1),
        ],
        ("odd", "fcdp", 3),
    ),
)
def test_the_largest_batch_fits_and_the_next_does_not(
    case: str, strategy: str, accumulate: int
) -> None:
    def planned(batch: int) -> Estimate:
        profile = make_profile(device_memory_bytes=100_000)
        job = make_job(batch=batch, accumulate=accumulate, profile=profile)
        return estimate(traced(case), Strategy.parse(strategy), job)

    largest = planned(1).max_batch_per_gpu
    assert largest is not None
    assert largest > 0
    assert planned(largest).fits
    assert not planned(largest + 1).fits
    assert planned(largest + 5).max_batch_per_gpu == largest, "whatever batch is asked about"


def test_no_batch_fits_beside_too_large_a_model() -> None:
    job = make_job(profile=make_profile(device_memory_bytes=1000))
    found = estimate(traced("odd"), Strategy.parse("ddp"), job)
    assert not found.fits
    assert found.max_batch_per_gpu == 0


# Graphs.


def test_several_graphs_are_one_step() -> None:
    whole, broken = traced("odd"), traced("broken")
    assert len(whole.graphs) == 1
    assert len(broken.graphs) > 1
    assert broken.has_any_batch
    found = _estimate(broken)
    assert len(found.plans) == len(broken.graphs)
    assert [part.direction.value for part in found.parts] == ["forward", "backward"]
    steps = [len(s.steps) for p in found.plans for s in p.schedules if s.variant is Variant.COLD]
    assert sum(len(part.steps) for part in found.parts) == sum(steps)
    assert found.peak_gpu_bytes >= max(plan.peak_bytes or 0 for plan in found.plans)


class Deep(nn.Module):
    """Equal layers behind a frozen one, large enough that they share a trace by default."""

    WIDTH = 4096

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, self.WIDTH).requires_grad_(False)
        linear = partial(nn.Linear, self.WIDTH, self.WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(8)))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.layers(self.first(values)).square().mean()
        return result


def _deep(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    return Deep(), {"values": torch.zeros(batch, 8)}


def test_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = trace(_deep, seq=1, param_dtype=None)
    monkeypatch.setattr("fcdp_compile.core.sharding.layers._MANY", 99)
    inline = trace(_deep, seq=1, param_dtype=None)
    assert (len(inline.graphs), len(inline.calls)) == (1, 1)
    # The frozen layer; the first of the equal ones, whose input needs no gradient; the others; the loss.
    assert (len(shared.graphs), len(shared.calls)) == (4, 10)
    assert shared.unread == inline.unread == ()
    assert [p.name for p in shared.params] == [p.name for p in inline.params]
    saved.save(shared, "deep")
    kept = saved.load("deep")
    assert kept is not None
    job = make_job(batch=512, profile=make_profile(device_memory_bytes=1 << 36))
    cases = ("fcdp", 1), ("fcdp", 2), ("fcdp+matrix", 1), ("zero3", 1), ("mics", 2)
    for strategy, accumulate in cases:
        found, expected, again = (
            estimate(of, Strategy.parse(strategy), replace(job, accumulate=accumulate))
            for of in (shared, inline, kept)
        )
        assert found == again
        assert len(found.plans) == 10
        assert found.host_bytes_per_node == expected.host_bytes_per_node
        assert _moved(found) == _moved(expected)
        assert 0.5 < found.peak_gpu_bytes / expected.peak_gpu_bytes < 1.1, "smaller buckets"


def _moved(found: Estimate) -> dict[str, int]:
    """The bytes that each kind of transfer moves in a step."""
    moved: Counter[str] = Counter()
    for part in found.parts:
        moved.update({kind.value: size for kind, size in part.bytes_by_kind().items()})
    return dict(moved)


# Traces that are kept.


def test_estimates_from_a_kept_trace_are_the_same() -> None:
    for case in ("odd-lora", "broken"):
        fresh = trace(build_of(case), seq=LENGTH, param_dtype=torch.float32)
        expected = [_estimate(fresh, s, accumulate=2) for s in ("fcdp", "ddp")]
        saved.save(fresh, case)
        kept = saved.load(case)
        assert kept is not None
        assert kept.params == fresh.params
        found = [_estimate(kept, s, accumulate=2) for s in ("fcdp", "ddp")]
        assert found == expected


def test_the_second_plan_does_not_trace() -> None:
    first = traced_model(Source(name="odd", build=build_of("odd"), identity="it"), OPTIONS)
    again = traced_model(Source(name="odd", build=_refuse, identity="it"), OPTIONS)
    assert _estimate(again) == _estimate(first)
    with pytest.raises(FcdpError, match="was to be used"):
        trace(_refuse, seq=LENGTH, param_dtype=None)


def test_functions_are_traced_every_time() -> None:
    """Nothing shows whether the code of a function has changed."""
    calls = []

    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        calls.append(batch)
        return build_of("odd")(batch, seq)

    for _ in range(2):
        traced_model(Source(name="odd", build=build), OPTIONS)
    assert len(calls) == 2


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "another": lambda file: file.write_bytes(b"{}\n"),
    "short": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "garbled": lambda file: file.write_bytes(b"not JSON" + file.read_bytes()),
    "group": lambda file: file.chmod(0o660),
    "others": lambda file: file.chmod(0o602),
    "folder": lambda file: file.parent.chmod(0o770),
    "owner": lambda file: os.chown(file, 65534, 65534),
}


def test_traces_of_no_use_or_of_others_are_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(name="odd", build=build_of("odd"), identity="it")
    traced_model(source, OPTIONS)
    (file,) = folder.glob("*.trace")
    intact = file.read_bytes()
    for name, damage in _DAMAGES.items():
        if name == "owner" and os.getuid() != 0:
            continue  # root alone gives files away
        file.unlink()
        file.parent.chmod(0o700)
        file.touch(0o600)
        file.write_bytes(intact)
        assert saved.load("it") is not None, "control"
        caplog.clear()
        damage(file)
        assert saved.load("it") is None, name
        assert str(file) in caplog.text, name
    assert _estimate(traced_model(source, OPTIONS)) == _estimate(traced("odd"))


def test_files_are_the_users_own(folder: Path) -> None:
    saved.save(traced("odd"), "it")
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.touch()
    traced_model(Source(name="odd", build=build_of("odd"), identity="it"), OPTIONS)
    assert "set FCDP_CACHE to a folder" in caplog.text


# What cannot be traced.


class Peeks(nn.Module):
    """Reads a value, but a trace has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        if scale.max().item() > 1:
            values = values * 2
        return (values * self.weight).sum()


def test_a_model_that_needs_data() -> None:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Peeks(), (torch.zeros(batch, 8), torch.zeros(batch))

    dynamo, pages = logging.getLogger("torch._dynamo"), logging.handlers.BufferingHandler(1000)
    dynamo.addHandler(pages)
    began: list[str] = []
    line = Peeks.forward.__code__.co_firstlineno + 1
    why = rf"cannot be traced without data \(.*, at .*test_traced\.py:{line}\).*values of inputs"
    try:
        with pytest.raises(FcdpError, match=why):
            trace(build, seq=1, param_dtype=None, note=began.append)
        assert not pages.buffer, "Dynamo's page on the graph break"
        assert dynamo.isEnabledFor(logging.WARNING), "as it was before"
    finally:
        dynamo.removeHandler(pages)
    assert began[:2] == ["building the model without weights", "tracing its forward"]


class Invents(nn.Module):
    """Computes with a number that depends on values, without reading it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(8, 8)
        self.more = nn.Linear(8, 8)

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        values = self.first(values)
        if self.how == "factor":
            values = values * scale.max().item()
        elif self.how == "size":
            values = values[: scale.long().max().item()]  # type: ignore[misc]
        elif self.how == "choice":
            values = values[scale > 0]
        elif self.how == "constant":
            values = values.repeat(torch.tensor(3).item(), 1)  # type: ignore[arg-type]
        elif self.how == "outside":
            values = _outside(values)
        total: Tensor = self.more(values).sum()
        return total


@torch.compiler.disable
def _outside(values: Tensor) -> Tensor:
    return values * 2


def _inventing(how: str) -> TracedModel:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Invents(how), (torch.zeros(batch, 8), torch.zeros(batch))

    return trace(build, seq=1, param_dtype=None)


@pytest.mark.parametrize("how", ["factor", "size", "choice"])
def test_values_are_not_invented(how: str) -> None:
    """Else the rest of the model would be planned for the traced batch, or for an invalid size."""
    with pytest.raises(FcdpError, match=r"cannot be traced without data.*values of inputs"):
        _inventing(how)
    assert _inventing("constant").graphs, "control: a constant has a value"


def test_what_runs_outside_of_graphs_fixes_the_batch() -> None:
    """The graph after it is traced for one batch, and must not be used for other batches."""
    found = _inventing("outside")
    assert len(found.graphs) == 2
    assert found.graphs[0].sizes(1) != found.graphs[0].sizes(2), (
        "control: the first is of any batch"
    )
    assert not found.has_any_batch
    with pytest.raises(FcdpError, match="accepts no other number"):
        _estimate(found, batch=TRACED_BATCH + 1)


class Leaves(nn.Module):
    """Computes a part of itself outside of any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.outside = nn.Linear(8, 8)
        self.outside.forward = torch.compiler.disable(self.outside.forward)  # type: ignore[method-assign]

    def forward(self, values: Tensor) -> Tensor:
        total: Tensor = self.inside(self.outside(values)).sum()
        return total


def test_parameters_that_no_graph_reads_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Leaves(), (torch.zeros(batch, 8),)

    def told(source: Source) -> list[str]:
        caplog.clear()
        traced_model(source, OPTIONS)
        return [r.getMessage() for r in caplog.records if r.name == "fcdp_compile.tools.planner"]

    for _ in range(2):  # traced, then kept
        (text,) = told(Source(name="it", build=build, identity="it"))
        assert "2 parameters of it, such as 'outside.weight', are in no graph" in text
    assert told(Source(name="odd", build=build_of("odd"))) == []


def test_a_missing_input_is_named() -> None:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Peeks(), {"values": torch.zeros(batch, 8)}

    with pytest.raises(FcdpError, match=r"missing a required argument: 'scale'.*mapping of all"):
        trace(build, seq=1, param_dtype=None)


def test_a_model_without_a_loss() -> None:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        model = nn.Linear(8, 8).requires_grad_(False)
        return model, (torch.zeros(batch, 8),)

    with pytest.raises(FcdpError, match="return a loss that needs gradients"):
        trace(build, seq=1, param_dtype=None)


def test_models_can_be_cast_and_moved() -> None:
    """`fcdp plan --lora` and build functions do this."""

    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        model = nn.Sequential(nn.Linear(13, 17), nn.Linear(17, 1)).to("cpu", torch.bfloat16)
        return Total(model.half()), (torch.zeros(batch, 13, dtype=torch.half),)

    found = trace(build, seq=1, param_dtype=None)
    assert {p.dtype for p in found.params} == {torch.float16}


class Total(nn.Module):
    """The sum of what a model returns, as its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor) -> Tensor:
        total: Tensor = self.model(values).sum()
        return total


# Quantised weights.


class Adapted(nn.Module):
    """A quantised layer between trained ones, so that its weight is read in the backward, too."""

    def __init__(self, quantised: nn.Module) -> None:
        super().__init__()
        self.first, self.quantised, self.last = nn.Linear(16, 128), quantised, nn.Linear(64, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.quantised(self.first(values)))
        return hidden.square().mean()


def _adapted(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    frozen = nn.Linear(128, 64, bias=False).requires_grad_(False)
    return Adapted(PackedLinear(frozen, PACKED_FORMATS["nf4"])), {"values": torch.zeros(batch, 16)}


def test_packed_parameters_stay_packed_in_a_kept_trace(tmp_path: Path) -> None:
    source = Source(name="adapted", build=_adapted, identity="adapted")
    first, second = (traced_model(source, OPTIONS) for _ in range(2))
    assert first.params == second.params
    assert first is not second
    (plan,) = _estimate(second, "fcdp+c8").plans
    by_name = {p.name: b for b in plan.buckets for p in b.params}
    packed = by_name["quantised.weight.packed"]
    assert (packed.dtype, packed.wire.value, packed.full_bytes) == ("uint8", "full", 128 * 32)
    assert by_name["quantised.weight.absmax"].wire.value == "full", "scales are exact"
    assert by_name["first.weight"].wire.value == "int8"


def _frozen_bytes(mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the frozen buckets of a model that bitsandbytes quantised, and the bytes that it sent."""
    bnb = importlib.import_module("bitsandbytes")
    torch.manual_seed(0)
    linear = bnb.nn.Linear4bit(128, 64, bias=False, compress_statistics=False, quant_type="nf4")
    model: Any = fcdp_compile.shard(Adapted(linear.to("cpu")), mesh)
    net = torch.compile(model, backend="fcdp")
    net(torch.ones(2, 16)).backward()
    sent = state_of(model).counters.sent["inter_all_gather"]
    return {"sent": sent, **_sizes(list(state_of(model).plans.values()))}


def _sizes(plans: list[Plan]) -> dict[str, int]:
    return {p.name: b.full_bytes for x in plans for b in x.buckets for p in b.params if b.frozen}


@pytest.mark.slow
@pytest.mark.distributed
def test_the_bytes_are_those_of_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    job = make_job(nodes=2, ranks_per_node=1)
    (plan,) = estimate(trace(_adapted, seq=1, param_dtype=None), Strategy.parse("fcdp"), job).plans
    expected = _sizes([plan])
    assert sum(expected.values()) == 128 * 64 // 2 + 4 * 128
    for found in run(_frozen_bytes, nodes=2, ranks_per_node=1):
        sent = found.pop("sent")
        assert found == expected
        assert sent == sum(b.wire_bytes for b in plan.buckets), "one of two nodes sends its half"
