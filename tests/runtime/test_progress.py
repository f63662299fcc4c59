"""What a long compilation says, and that a short one says nothing."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from torch import nn

import fcdp_compile
from fcdp_compile.runtime import progress
from fcdp_compile.runtime.progress import CompileProgress

_import = importlib.import_module


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(name: str, package: str | None = None) -> Any:
        if name == "tqdm":
            raise ImportError(name)
        return _import(name, package)

    monkeypatch.setattr(progress.importlib, "import_module", refusing)


def _compile(made: CompileProgress, clock: Clock, took_s: float) -> None:
    for k in range(4):
        made.traces(f"p{k}")
        clock.now_s += took_s / 6
    made.plans()
    with made.compiling(2) as compiled:
        for _ in range(2):
            clock.now_s += took_s / 6
            compiled()
    made.end()


@pytest.mark.usefixtures("without_tqdm")
def test_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    made = CompileProgress(4, is_shown=True, clock=clock)
    _compile(made, clock, 1.9)
    assert caplog.messages == []
    for _ in range(2):  # each compilation has its own time
        caplog.clear()
        _compile(made, clock, 36.0)
        assert caplog.messages == [
            "tracing the model, parameter 2 of 4, after 6 s",
            "tracing the model, parameter 4 of 4, after 18 s",
            "compiling segment 1 of 2, after 30 s",
        ]


def test_a_bar_that_vanishes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    clock = Clock()
    _compile(CompileProgress(4, is_shown=True, clock=clock), clock, 36.0)
    shown = capsys.readouterr().err.split("\r")
    assert "fcdp: tracing the model, parameter 2/4 [00:06]" in [text.strip() for text in shown]
    assert any(text.startswith("fcdp: compiling segment 2/2") for text in shown)
    assert shown[-1].strip() == ""


@pytest.mark.usefixtures("without_tqdm")
@pytest.mark.parametrize("why", ["another rank", "the setting"])
def test_nothing_is_shown(
    why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "the setting":
        monkeypatch.setenv("FCDP_PROGRESS", "0")
    clock = Clock()
    _compile(CompileProgress(4, is_shown=why == "the setting", clock=clock), clock, 99.0)
    assert caplog.messages == []


@pytest.mark.usefixtures("without_tqdm")
def test_a_model_says_what_is_done(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SHORT_S", 0.0)
    monkeypatch.setattr(progress, "_BETWEEN_LINES_S", 0.0)
    torch._dynamo.reset()
    model = fcdp_compile.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    net = torch.compile(model, backend="fcdp")
    with caplog.at_level(logging.WARNING, progress.log.name):
        net(torch.ones(1, 2)).sum().backward()
        said = [m.rpartition(",")[0] for m in caplog.messages if " of " in m]
        net(torch.ones(1, 2)).sum().backward()
    assert said[:4] == [f"tracing the model, parameter {k} of 4" for k in range(1, 5)]
    assert said[4] == "planning the graph of parameters 4 of 4"
    last = said[-1].split()
    assert last[:2] == ["compiling", "segment"]
    assert last[2] == last[4]
    assert len([m for m in caplog.messages if " of " in m]) == len(said), (
        "a second step says nothing"
    )
