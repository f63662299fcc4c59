"""PEFT's own table of adapters on small models (tests/test_custom_models.py), each sharded and replicated.

A case is a row of the table, compiled or not.  It compares outputs, losses, gradients and parameters over
three steps, then with the adapter disabled, merged, unmerged and unloaded.  All ranks get the input that
PEFT's tests use, and equal random numbers, so that they compute what one process computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version as version_of
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from tests.distributed.parity import whole
from tests.peers import sources
from tests.peers.stubs import stub

_RELATIVE, _FLOOR = 1e-4, 1e-2
"""Inputs of up to 89 and sums over all outputs make large terms that cancel."""

_STEPS, _RATE = 3, 1e-3
_WAYS = ("compiled", "eager")


def version() -> str:
    return f"PEFT {version_of('peft')}"


def cases() -> list[str]:
    return [f"{name}, {way}" for name in _table() for way in _WAYS]


def run(mesh: DeviceMesh, case: str) -> None:
    """Train a row of the table on both sides, then change its adapters."""
    name, _, way = case.rpartition(", ")
    both = _Both(mesh, name, is_compiled=way == "compiled")
    both.compare("output", lambda side: side.output())
    for step in range(_STEPS):
        both.compare(f"step {step}", lambda side: side.trained())
    both.each(lambda side: side.check_frozen())
    both.compare("disabled", lambda side: side.output(is_disabled=True))
    if _can_merge(name):
        _merge(both)


def _merge(both: _Both) -> None:
    """Merge within `gathered`: adapters that compute with a plain tensor cannot merge home shards."""
    both.each(lambda side: side.merge())
    both.compare("merged", lambda side: side.output())
    both.each(lambda side: side.unmerge())
    both.compare("unmerged", lambda side: side.output())
    both.each(lambda side: side.unload())
    both.compare("unloaded", lambda side: side.output())


class _Side:
    """A model, sharded or not, with the net that computes it."""

    def __init__(
        self, model: Any, inputs: dict[str, Tensor], compile_: Callable[[Any], Any]
    ) -> None:
        self.model, self._inputs, self._compile = model, inputs, compile_
        self._net = compile_(model)
        self._is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=_RATE)
        self._frozen = {n: whole(p) for n, p in model.named_parameters() if not p.requires_grad}

    def output(self, *, is_disabled: bool = False) -> Iterator[tuple[str, Tensor]]:
        self.model.eval()
        disabled: AbstractContextManager[Any] = (
            self.model.disable_adapter() if is_disabled else nullcontext()
        )
        torch.manual_seed(1)
        with torch.no_grad(), disabled:
            yield "output", self._net(**self._inputs)

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        self.model.train()
        torch.manual_seed(2)
        loss = self._net(**self._inputs).sum()
        loss.backward()
        yield "loss", loss
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield f"gradient of {name}", parameter.grad
        self._optimizer.step()
        self._optimizer.zero_grad()
        yield from self.model.named_parameters()

    def check_frozen(self) -> None:
        """Only adapters change."""
        now = dict(self.model.named_parameters())
        changed = [n for n, value in self._frozen.items() if not torch.equal(whole(now[n]), value)]
        assert not changed, f"frozen parameters changed: {changed}"

    def merge(self) -> None:
        with self._gathered():
            self.model.merge_adapter()

    def unmerge(self) -> None:
        with self._gathered():
            self.model.unmerge_adapter()

    def unload(self) -> None:
        """The merged values stay in the sharded parameters; the adapter is dropped after the block."""
        self.merge()
        self.model = self.model.unload()
        self._net = self._compile(self.model)

    def _gathered(self) -> AbstractContextManager[Any]:
        if self._is_sharded:
            return fcdp_compile.gathered(self.model, writeback=True)
        return nullcontext()


class _Both:
    """The sharded side and the replicated one; each act is done to both with equal random numbers."""

    def __init__(self, mesh: DeviceMesh, name: str, *, is_compiled: bool) -> None:
        inputs = _suite().TestPeftCustomModel().prepare_inputs_for_testing()
        self._plain = _Side(_model(name), inputs, lambda model: model)
        self._sharded = _Side(
            fcdp_compile.shard(_model(name), mesh),
            inputs,
            (lambda model: torch.compile(model, backend="fcdp")) if is_compiled else lambda m: m,
        )

    def each(self, act: Callable[[_Side], None]) -> None:
        for side in (self._plain, self._sharded):
            torch.manual_seed(3)
            act(side)

    def compare(self, about: str, values: Callable[[_Side], Iterator[tuple[str, Tensor]]]) -> None:
        # The two sides may not take turns: a context manager of one would be open beside the other's.
        expected = {name: whole(value) for name, value in values(self._plain)}
        found = {name: whole(value) for name, value in values(self._sharded)}
        assert found.keys() == expected.keys(), f"{about}: {found.keys() ^ expected.keys()}"
        for name, value in expected.items():
            _check(f"{about}: {name}", found[name], value)


def _check(about: str, found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape, f"{about}: {tuple(found.shape)}, {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{about}: {found.dtype}, expected {expected.dtype}"
    a, b = found.double(), expected.double()
    if not a.numel() or not (a.isfinite().any() or b.isfinite().any()):
        return
    scale = max(b.nan_to_num(0, 0, 0).abs().max().item(), _FLOOR)
    assert torch.allclose(a, b, rtol=0, atol=_RELATIVE * scale, equal_nan=True), (
        f"{about} is off by {(a - b).nan_to_num().abs().max().item() / scale:.1e}"
    )


def _model(name: str) -> nn.Module:
    from peft import get_peft_model

    model_id, kind, options = _table()[name]
    suite = _suite()
    base = suite.MockTransformerWrapper.from_pretrained(model_id)
    config = kind(base_model_name_or_path=model_id, **suite.set_init_weights_false(kind, options))
    torch.manual_seed(0)
    return get_peft_model(base, config)


def _can_merge(name: str) -> bool:
    """Whether PEFT's own tests merge this row."""
    import pytest

    try:
        _suite()._skip_if_merging_not_supported(*_table()[name])
    except pytest.skip.Exception:
        return False
    return True


def _table() -> dict[str, tuple[str, Any, dict[str, Any]]]:
    """Model, class of the configuration and its arguments, by the row's title."""
    rows: dict[str, tuple[str, Any, dict[str, Any]]] = {}
    for title, *rest in _suite().TEST_CASES:
        name = title
        while name in rows:  # some titles occur twice
            name += " again"
        rows[name] = (rest[0], rest[1], rest[2])
    return rows


def _suite() -> Any:
    stub("diffusers")
    return importlib.import_module(f"{sources.package('peft')}.test_custom_models")
