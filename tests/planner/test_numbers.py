"""Numbers of plans that must not depend on the trace: graph breaks, batches, names that are no folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fcdp_compile.cluster.profile import CLUSTERS
from fcdp_compile.errors import FcdpError
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import Job, estimate, trace
from fcdp_compile.tools.planner.ranking import rank
from fcdp_compile.tools.planner.saved import load, save
from fcdp_compile.tools.planner.traced import TracedModel
from fcdp_compile.tools.simulator import Conditions

SEQ = 32


class _Broken(nn.Module):
    """A break after samples and tokens have become one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.first = nn.Linear(16, 30, bias=False)
        self.second = nn.Linear(30, 50)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.first(self.table(ids)).relu().view(-1, 30)
        torch._dynamo.graph_break()
        return self.second(tokens).float().logsumexp(-1).mean()


class _Wide(nn.Module):
    """A wide table, which sets the peak for few samples, before a layer that sets the peak for many."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4096, bias=False)
        self.second = nn.Linear(4096, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).sum()


def _broken(batch: int, seq: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return _Broken(), {"ids": torch.zeros(batch, seq, dtype=torch.long)}


def _wide(batch: int, seq: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return _Wide(), {"x": torch.zeros(batch, seq, 8)}


def _insisting(batch: int, seq: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return _Wide(), {"x": torch.zeros(seq, batch, 8)}


@pytest.fixture(scope="module")
def broken() -> TracedModel:
    return trace(_broken, seq=SEQ, param_dtype=None)


@pytest.fixture(scope="module")
def wide() -> TracedModel:
    return trace(_wide, seq=SEQ, param_dtype=None)


def _job(batch: int) -> Job:
    return Job(profile=CLUSTERS["a40x8-10gbe"], nodes=2, ranks_per_node=8, batch=batch)


def test_what_follows_a_break_grows_with_the_batch(broken: TracedModel) -> None:
    assert len(broken.graphs) > 1

    one, many = (
        sum(s.flops for part in estimate(broken, Strategy.parse("zero3"), _job(b)).parts
            for s in part.steps)
        for b in (1, 64)
    )  # fmt: skip

    assert many == 64 * one


@pytest.mark.parametrize("batch", [1, 2, 64, 100_000])
def test_largest_batch_is_the_last_that_fits_whatever_is_asked_for(
    wide: TracedModel, batch: int
) -> None:
    zero3 = Strategy.parse("zero3")

    most = estimate(wide, zero3, _job(batch)).max_batch_per_gpu

    assert most is not None
    assert estimate(wide, zero3, _job(most)).fits
    assert not estimate(wide, zero3, _job(most + 1)).fits


def test_a_model_of_one_batch_size_is_not_planned_for_another() -> None:
    traced = trace(_insisting, seq=SEQ, param_dtype=None)

    with pytest.raises(FcdpError, match="traced with 7 samples and accepts no other number"):
        estimate(traced, Strategy.parse("zero3"), _job(2))
    assert estimate(traced, Strategy.parse("zero3"), _job(7)).max_batch_per_gpu is None


@pytest.mark.parametrize("made", ["raises", "none"])
def test_a_model_that_cannot_be_built_is_one_line(made: str) -> None:
    def build(batch: int, seq: int) -> tuple[nn.Module, dict[str, Tensor]]:
        if made == "raises":
            raise KeyError("weights")
        return _Wide(), None  # type: ignore[return-value]

    with pytest.raises(FcdpError, match=r"cannot be built|instead of inputs"):
        trace(build, seq=SEQ, param_dtype=None)


def test_a_cache_folder_that_is_a_file_is_no_error(
    wide: TracedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FCDP_CACHE", str(file))

    save(wide, "0" * 8)

    assert load("0" * 8) is None


def test_the_reason_is_none_that_does_not_hold(wide: TracedModel) -> None:
    one_node = Job(profile=CLUSTERS["a40x8-10gbe"], nodes=1, ranks_per_node=1, batch=4)

    why = rank([estimate(wide, Strategy.parse(name), one_node) for name in ("ddp", "zero1")]).why

    assert "as fast as" in why
    assert "instead of" not in why


def test_jitter_is_refused_where_it_overflows() -> None:
    with pytest.raises(ValueError, match="jitter is 1e\\+200"):
        Conditions(jitter=1e200)
